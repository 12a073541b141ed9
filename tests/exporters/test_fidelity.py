"""Fidelity: the parity bars on a real model, and the arithmetic of the measure."""

import json
from pathlib import Path

import numpy as np
import pytest

from cascade.bundle import FIDELITY_FILE
from exporters.checkpoint import open_checkpoint
from exporters.fidelity import BARS, Fidelity, compare, measure, worst
from exporters.texts import calibration_texts, fidelity_texts


def report(recipe: str, kl: float, top1: float) -> Fidelity:
    return Fidelity(
        bundle="b",
        recipe=recipe,
        fingerprint="",
        source_sha256="",
        positions=1,
        kl=kl,
        top1=top1,
        source_perplexity=1.0,
        perplexity=1.0,
        texts=[],
    )


@pytest.fixture(scope="module")
def reports(smol_gguf: Path, smol_bundle: Path, smol_bundle_w8a8: Path, smol_bundle_w4a8: Path) -> dict[str, Fidelity]:
    """All recipes of SmolLM2, measured over all texts."""
    measured = measure(open_checkpoint(smol_gguf), [smol_bundle, smol_bundle_w8a8, smol_bundle_w4a8])
    return {result.recipe: result for result in measured}


@pytest.mark.parametrize("recipe", sorted(BARS))
def test_divergence_is_within_the_bar(reports: dict[str, Fidelity], recipe: str) -> None:
    assert reports[recipe].kl <= BARS[recipe][0]


@pytest.mark.parametrize("recipe", sorted(BARS))
def test_top_token_agrees_as_often_as_the_bar_asks(reports: dict[str, Fidelity], recipe: str) -> None:
    assert reports[recipe].top1 >= BARS[recipe][1]


def test_exact_is_the_source_to_within_the_caches_rounding(reports: dict[str, Fidelity]) -> None:
    assert reports["exact"].kl < 1e-5


def test_result_is_stored_in_the_bundle(reports: dict[str, Fidelity], smol_bundle: Path) -> None:
    stored = json.loads((smol_bundle / FIDELITY_FILE).read_text())
    assert stored["fingerprint"] == reports["exact"].fingerprint
    assert len(stored["texts"]) == 20


def test_texts_are_twenty_kinds_of_a_hundred_tokens(smol_gguf: Path) -> None:
    tokenizer = open_checkpoint(smol_gguf).tokenizer
    texts = fidelity_texts()
    assert len({text.kind for text in texts}) == len(texts) == 20
    assert min(len(tokenizer.encode(text.text).ids) for text in texts) >= 100


def test_calibration_never_sees_a_text_that_fidelity_is_measured_on() -> None:
    seen = {line for text in calibration_texts() for line in text.text.splitlines() if len(line) > 20}
    judged = {line for text in fidelity_texts() for line in text.text.splitlines()}
    assert not seen & judged


def test_equal_distributions_diverge_by_nothing() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 50)).astype(np.float32)
    same = compare("x", [1, 2, 3, 4], logits, logits)
    assert (same.kl, same.top1) == (0.0, 1.0)


def test_divergence_of_a_known_pair() -> None:
    half = np.log(np.array([[0.5, 0.5], [0.5, 0.5]], np.float32))
    skew = np.log(np.array([[0.9, 0.1], [0.9, 0.1]], np.float32))
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert compare("x", [0, 0], half, skew).kl == pytest.approx(expected, rel=1e-5)


def test_perplexity_is_of_the_tokens_that_follow() -> None:
    logits = np.log(np.array([[0.25, 0.75], [0.5, 0.5]], np.float32))
    assert compare("x", [1, 0], logits, logits).perplexity == pytest.approx(4.0)


def test_long_texts_are_compared_whole() -> None:
    source = np.random.default_rng(1).normal(0, 3, (21, 50)).astype(np.float32)
    bundle = source.copy()
    bundle[20] = -bundle[20]
    assert compare("x", [7] * 21, source, bundle).top1 == pytest.approx(20 / 21)


def test_figures_are_the_worst_over_the_models() -> None:
    both = [report("exact", 1e-6, 1.0), report("exact", 1e-5, 0.999), report("w8a8", 0.01, 0.97)]
    assert worst(both) == [
        ("exact_kl", "nats", 1e-5),
        ("exact_top1", "share", 0.999),
        ("w8a8_kl", "nats", 0.01),
        ("w8a8_top1", "share", 0.97),
    ]


def test_a_bundle_under_its_bar_does_not_pass() -> None:
    assert report("w8a8", 0.019, 0.961).passes
    assert not report("w8a8", 0.019, 0.959).passes
    assert not report("exact", 0.002, 1.0).passes
