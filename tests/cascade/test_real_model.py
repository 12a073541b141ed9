"""The determinism contract on a real model (SmolLM2 through the op library): the same bits, however computed."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from cascade.bundle import TOKENIZER_FILE
from cascade.config import EngineConfig, TierConfig
from cascade.engine import Engine
from cascade.protocol import GenerateRequest, Plan, SamplingParams, TokenEvent
from exporters.texts import calibration_texts, fidelity_texts

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "1, 2, 3, 5, 8, 13,",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics state that energy cannot be created or destroyed, that entropy",
    "SELECT name, COUNT(*) FROM users WHERE",
]
SHARED_PREFIX = [504, 2025, 17] * 30
"""More than two blocks of arbitrary tokens."""
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 42}


def engine_of(bundle: Path, **overrides: Any) -> Engine:
    tiers = [TierConfig(name, str(bundle), kv_blocks=256) for name in ("small", "large")]
    return Engine(EngineConfig(tiers, **{"max_sequences": 16, **overrides}))


@pytest.fixture(scope="module")
def engine(smol_bundle: Path) -> Engine:
    return engine_of(smol_bundle)


@pytest.fixture(scope="module")
def prompts(smol_bundle: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smol_bundle / TOKENIZER_FILE))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in [*TEXTS, *(t + " a" for t in TEXTS)]]


def answers(
    engine: Engine, prompts: list[list[int]], *, together: bool, draft: str | None = None, cached: bool, **sampling: Any
) -> list[list[int]]:
    """Token ids per prompt, run one after the other or all at once."""
    plan = Plan("speculate" if draft else "direct", "large", draft, use_prefix_cache=cached)
    params = SamplingParams(max_tokens=20, ignore_eos=True, **sampling)
    found: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        assert engine.submit(GenerateRequest(str(index), prompt, plan, params)) is None
        for event in drain(engine) if not together else []:
            found[event.request_id] += [token.id for token in event.tokens]
    for event in drain(engine):
        found[event.request_id] += [token.id for token in event.tokens]
    engine.check_invariants()
    assert engine.stats().blocks_free == engine.stats().blocks_total
    return list(found.values())


def drain(engine: Engine) -> Iterator[TokenEvent]:
    while engine.has_work():
        yield from engine.step()


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    params: dict[str, Any] = request.param
    return params


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
    return answers(engine, prompts, together=False, cached=False, **sampling)


def test_sixteen_at_once(
    engine: Engine, prompts: list[list[int]], sampling: dict[str, Any], alone: list[list[int]]
) -> None:
    assert answers(engine, prompts, together=True, cached=False, **sampling) == alone


def test_prefix_cached(
    engine: Engine, prompts: list[list[int]], sampling: dict[str, Any], alone: list[list[int]]
) -> None:
    repeated = [SHARED_PREFIX + prompt for prompt in prompts[:4]]
    before = answers(engine, repeated, together=False, cached=False, **sampling)
    hits = engine.stats().prefix_hit_tokens
    assert answers(engine, repeated, together=False, cached=True, **sampling) == before
    assert answers(engine, repeated, together=True, cached=True, **sampling) == before
    assert engine.stats().prefix_hit_tokens > hits


def test_prompt_read_in_small_chunks(
    smol_bundle: Path, prompts: list[list[int]], sampling: dict[str, Any], alone: list[list[int]]
) -> None:
    engine = engine_of(smol_bundle, max_batch_tokens=5, max_sequences=2)
    assert answers(engine, prompts[:4], together=False, cached=False, **sampling) == alone[:4]


def test_greedy_speculation_gives_the_direct_answer(engine: Engine, prompts: list[list[int]]) -> None:
    direct = answers(engine, prompts, together=False, cached=False, **GREEDY)
    for together in (False, True):
        assert answers(engine, prompts, together=together, draft="small", cached=together, **GREEDY) == direct
    stats = engine.stats()
    assert stats.drafted_tokens == stats.accepted_tokens > 0  # the drafter is the verifier's twin


def test_sampled_speculation_repeats_whatever_the_load(engine: Engine, prompts: list[list[int]]) -> None:
    alone = answers(engine, prompts, together=False, draft="small", cached=False, **SAMPLED)
    assert answers(engine, prompts, together=True, draft="small", cached=True, **SAMPLED) == alone


def test_idle_engine_uses_no_processor(engine: Engine, prompts: list[list[int]]) -> None:
    answers(engine, prompts[:2], together=True, cached=False, **GREEDY)
    time.sleep(0.2)
    process = psutil.Process()
    before = process.cpu_times()
    time.sleep(1.0)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.05


@pytest.fixture(scope="module")
def qwen(qwen_pair: tuple[Path, Path]) -> Engine:
    names = zip(("small", "large"), qwen_pair, strict=True)
    return Engine(EngineConfig([TierConfig(name, str(path), kv_blocks=256) for name, path in names], max_sequences=16))


@pytest.fixture(scope="module")
def forty_prompts(qwen_pair: tuple[Path, Path]) -> list[list[int]]:
    """Forty beginnings of texts of many kinds, long enough for the prefix cache to hold a block of each."""
    tokenizer = Tokenizer.from_file(str(qwen_pair[1] / TOKENIZER_FILE))
    texts = [text.text for text in [*fidelity_texts(), *calibration_texts()][:40]]
    return [tokenizer.encode(text, add_special_tokens=False).ids[:40] for text in texts]


@pytest.fixture(scope="module")
def qwen_alone(qwen: Engine, forty_prompts: list[list[int]]) -> list[list[int]]:
    """The large model's greedy answers, one prompt after the other, nothing cached."""
    return answers(qwen, forty_prompts, together=False, cached=False, **GREEDY)


@pytest.mark.qwen
@pytest.mark.parametrize("draft", [None, "small"], ids=["direct", "speculated"])
def test_forty_prompts_sixteen_at_a_time(
    qwen: Engine, forty_prompts: list[list[int]], qwen_alone: list[list[int]], draft: str | None
) -> None:
    assert answers(qwen, forty_prompts, together=True, draft=draft, cached=False, **GREEDY) == qwen_alone


@pytest.mark.qwen
def test_forty_prompts_speculated_from_cached_prefixes(
    qwen: Engine, forty_prompts: list[list[int]], qwen_alone: list[list[int]]
) -> None:
    answers(qwen, forty_prompts, together=True, cached=True, **GREEDY)
    before = qwen.stats().prefix_hit_tokens
    assert answers(qwen, forty_prompts, together=True, draft="small", cached=True, **GREEDY) == qwen_alone
    assert qwen.stats().prefix_hit_tokens - before >= 32 * len(forty_prompts)


@pytest.mark.qwen
def test_forty_prompts_speculated_alone(
    qwen: Engine, forty_prompts: list[list[int]], qwen_alone: list[list[int]]
) -> None:
    assert answers(qwen, forty_prompts, together=False, draft="small", cached=False, **GREEDY) == qwen_alone
