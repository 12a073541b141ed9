"""Fidelity: how far a bundle's next-token distributions are from its source's, in float32.

The source is transformers' own model with the checkpoint's dequantized weights (`reference`), the bundle runs
through onnxruntime and the op library as it does in production. Both see the same token ids.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cascade.bundle import FIDELITY_FILE
from exporters.bundle_runner import BundleRunner
from exporters.checkpoint import Checkpoint
from exporters.texts import fidelity_texts

MAX_TOKENS = 160
"""Tokens taken of each text."""
ROWS_AT_A_TIME = 8
BARS = {"exact": (1e-3, 0.99), "w8a8": (0.02, 0.96), "w4a8": (0.02, 0.96)}
"""Recipe -> (largest mean KL in nats, smallest top-1 agreement) that parity asks for."""


class TextFidelity(msgspec.Struct, frozen=True, kw_only=True):
    """One text. KL is KL(source || bundle) in nats, averaged over positions."""

    kind: str
    positions: int
    kl: float
    top1: float
    source_perplexity: float
    perplexity: float


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle against its source, over all positions of all texts; `fidelity.json`."""

    bundle: str
    recipe: str
    fingerprint: str
    source_sha256: str
    positions: int
    kl: float
    top1: float
    source_perplexity: float
    perplexity: float
    texts: list[TextFidelity]

    @property
    def passes(self) -> bool:
        """Whether the recipe's parity bars are met; True for a recipe without bars."""
        max_kl, min_top1 = BARS.get(self.recipe, (math.inf, 0.0))
        return self.kl <= max_kl and self.top1 >= min_top1


Progress = Callable[[str, int, int], None]
"""Called with (what is being measured, texts done, texts in all)."""


def measure(checkpoint: Checkpoint, bundles: Sequence[Path], progress: Progress | None = None) -> list[Fidelity]:
    """Measure bundles of one checkpoint side by side and store `fidelity.json` in each of them.

    The reference runs once for every text, whatever the number of bundles.
    """
    # torch and transformers come with the extra `export` and take seconds to import.
    from exporters.reference import Reference

    reference = Reference(checkpoint)
    runners = [BundleRunner(bundle) for bundle in bundles]
    texts = fidelity_texts()
    measured: list[list[TextFidelity]] = [[] for _ in bundles]
    for done, text in enumerate(texts):
        if progress:
            progress(text.kind, done, len(texts))
        ids = checkpoint.tokenizer.encode(text.text, add_special_tokens=False).ids[:MAX_TOKENS]
        expected = reference.logits(ids)
        for results, runner in zip(measured, runners, strict=True):
            results.append(compare(text.kind, ids, expected, runner.logits(ids)))
    reports = [_report(runner, results) for runner, results in zip(runners, measured, strict=True)]
    for bundle, report in zip(bundles, reports, strict=True):
        encoded = json.dumps(msgspec.to_builtins(report), indent=1, sort_keys=True)
        (bundle / FIDELITY_FILE).write_text(encoded + "\n", encoding="utf-8")
    return reports


def compare(kind: str, ids: list[int], source: NDArray[np.float32], bundle: NDArray[np.float32]) -> TextFidelity:
    """Compare the logits [T, vocab] of the source and of a bundle after each token of `ids`."""
    count = len(ids)
    divergence, agreed = np.empty(count), np.empty(count, bool)
    expected_next, found_next = np.empty(count - 1), np.empty(count - 1)
    # A few rows at a time stay in the cache; whole texts are 100 MB with a vocabulary of 150,000.
    for start in range(0, count, ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        expected, found = log_softmax(source[part]), log_softmax(bundle[part])
        divergence[part] = (np.exp(expected) * (expected - found)).sum(axis=1, dtype=np.float64)
        agreed[part] = expected.argmax(axis=1) == found.argmax(axis=1)
        following = ids[start + 1 : start + 1 + ROWS_AT_A_TIME]
        expected_next[part] = expected[np.arange(len(following)), following]
        found_next[part] = found[np.arange(len(following)), following]
    return TextFidelity(
        kind=kind,
        positions=count,
        # Rounding can make the divergence of two equal distributions a negative 1e-9.
        kl=max(0.0, float(divergence.mean())),
        top1=float(agreed.mean()),
        source_perplexity=float(np.exp(-expected_next.mean())),
        perplexity=float(np.exp(-found_next.mean())),
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Row-wise log-probabilities, [T, vocab]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    normed: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normed


def worst(reports: Sequence[Fidelity]) -> list[tuple[str, str, float]]:
    """(name, unit, value) by recipe, `exact_kl`, `exact_top1`, `w8a8_kl`, ...: the worst value over the models."""
    figures = []
    for recipe in dict.fromkeys(report.recipe for report in reports):
        same = [report for report in reports if report.recipe == recipe]
        figures.append((f"{recipe}_kl", "nats", max(report.kl for report in same)))
        figures.append((f"{recipe}_top1", "share", min(report.top1 for report in same)))
    return figures


def _report(runner: BundleRunner, texts: list[TextFidelity]) -> Fidelity:
    weights = np.array([text.positions for text in texts], np.float64)

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=weights))

    manifest = runner.manifest
    return Fidelity(
        bundle=manifest.name,
        recipe=manifest.recipe,
        fingerprint=manifest.fingerprint,
        source_sha256=manifest.source.sha256,
        positions=int(weights.sum()),
        kl=mean([text.kl for text in texts]),
        top1=mean([text.top1 for text in texts]),
        source_perplexity=math.exp(mean([math.log(text.source_perplexity) for text in texts])),
        perplexity=math.exp(mean([math.log(text.perplexity) for text in texts])),
        texts=texts,
    )
