"""The engine's promises: the same tokens however they were computed, and no block lost whatever happens."""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cascade.config import EngineConfig, TierConfig
from cascade.engine import Engine
from cascade.errors import ConfigError
from cascade.protocol import GenerateRequest, Plan, SamplingParams, TokenEvent
from cascade.runner import Rows, Runner
from tests.cascade.fake_model import EOS, VOCAB, FakeModel

CONFIG: dict[str, Any] = {"max_batch_tokens": 64, "max_sequences": 16, "warm_up": False}


def engine_of(models: list[FakeModel] | None = None, **overrides: Any) -> Engine:
    models = models or [FakeModel("small", agreement=0.8), FakeModel("large")]
    config = EngineConfig([TierConfig(m.name, m.bundle_dir) for m in models], **{**CONFIG, **overrides})
    return Engine(config, models)


def request_of(
    request_id: str,
    prompt: list[int],
    *,
    draft: str | None = None,
    salt: str = "",
    cached: bool = True,
    **sampling: Any,
) -> GenerateRequest:
    plan = Plan("speculate" if draft else "direct", "large", draft, use_prefix_cache=cached, cache_salt=salt)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling})
    return GenerateRequest(request_id, prompt, plan, params)


def drain(engine: Engine) -> dict[str, list[TokenEvent]]:
    """Step until idle; events by request. Checks the accounting after every step."""
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work():
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check_invariants()
    return events


def ids(events: list[TokenEvent]) -> list[int]:
    return [token.id for event in events for token in event.tokens]


def assert_idle_and_whole(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.blocks_free == stats.blocks_total


def run_one(engine: Engine, request: GenerateRequest) -> list[TokenEvent]:
    assert engine.submit(request) is None
    return drain(engine)[request.request_id]


def prompts(count: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(5)
    for _ in range(count):
        yield rng.integers(0, EOS, int(rng.integers(1, 30))).tolist()


SETTINGS = [
    pytest.param({"temperature": 0.0}, id="greedy"),
    pytest.param({"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5}, id="greedy-penalties"),
    pytest.param({"temperature": 0.9, "top_p": 0.9, "seed": 11}, id="sampled"),
    pytest.param({"temperature": 1.2, "top_k": 10, "frequency_penalty": 0.7, "seed": 3}, id="sampled-penalties"),
]
MODES = [pytest.param(None, id="direct"), pytest.param("small", id="speculate")]


@pytest.mark.parametrize("draft", MODES)
@pytest.mark.parametrize("sampling", SETTINGS)
class TestDeterminism:
    """Each test compares with the request alone, in an empty engine."""

    @pytest.fixture
    def alone(self, draft: str | None, sampling: dict[str, Any]) -> list[list[int]]:
        return [ids(run_one(engine_of(), request_of("r", p, draft=draft, **sampling))) for p in prompts(12)]

    def test_batched(self, alone: list[list[int]], draft: str | None, sampling: dict[str, Any]) -> None:
        engine = engine_of([FakeModel("small", agreement=0.8, num_blocks=400), FakeModel("large", num_blocks=400)])
        for index, prompt in enumerate(prompts(12)):
            engine.submit(request_of(str(index), prompt, draft=draft, **sampling))
        events = drain(engine)
        assert [ids(events[str(index)]) for index in range(12)] == alone

    def test_preempted(self, alone: list[list[int]], draft: str | None, sampling: dict[str, Any]) -> None:
        engine = engine_of([FakeModel("small", agreement=0.8, num_blocks=20), FakeModel("large", num_blocks=20)])
        for index, prompt in enumerate(prompts(12)):
            engine.submit(request_of(str(index), prompt, draft=draft, cached=index % 2 == 0, **sampling))
        events = drain(engine)
        assert engine.stats().preemptions > 0
        assert [ids(events[str(index)]) for index in range(12)] == alone

    def test_chunked(self, alone: list[list[int]], draft: str | None, sampling: dict[str, Any]) -> None:
        engine = engine_of(max_batch_tokens=4, max_sequences=2)
        found = [ids(run_one(engine, request_of("r", p, draft=draft, cached=False, **sampling))) for p in prompts(12)]
        assert found == alone

    def test_prefix_cached(self, alone: list[list[int]], draft: str | None, sampling: dict[str, Any]) -> None:
        engine = engine_of([FakeModel("small", agreement=0.8, num_blocks=400), FakeModel("large", num_blocks=400)])
        for prompt in prompts(12):
            run_one(engine, request_of("first", prompt, draft=draft, **sampling))
        found = [run_one(engine, request_of("r", p, draft=draft, **sampling)) for p in prompts(12)]
        assert [ids(events) for events in found] == alone
        assert any(e[-1].usage is not None and e[-1].usage.cached_tokens > 0 for e in found)


@pytest.mark.parametrize("agreement", [0.0, 0.5, 1.0])
def test_greedy_speculation_gives_the_direct_answer(agreement: float) -> None:
    for prompt in prompts(6):
        models = [FakeModel("small", agreement=agreement), FakeModel("large")]
        speculated = run_one(engine_of(models), request_of("r", prompt, draft="small"))
        assert ids(speculated) == ids(run_one(engine_of(), request_of("r", prompt)))


def test_speculation_takes_fewer_verifier_passes_than_tokens() -> None:
    small, large = FakeModel("small"), FakeModel("large")
    small.name = "large"  # the drafter is the verifier's twin
    small.logits = large.logits  # type: ignore[method-assign]
    small.name = "small"
    events = run_one(engine_of([small, large]), request_of("r", [1, 2, 3], draft="small", max_tokens=25))
    usage = events[-1].usage
    assert usage is not None and usage.accepted_tokens == usage.drafted_tokens
    assert len(large.batches) < 25 / 4


def test_sampled_speculation_has_the_verifiers_distribution() -> None:
    """Chi-squared over the second token of many seeds against sampling without a drafter."""

    def counts(draft: str | None) -> np.ndarray[Any, Any]:
        engine = engine_of([FakeModel("small", agreement=0.5, num_blocks=400), FakeModel("large", num_blocks=400)])
        found = np.zeros(VOCAB)
        for group in range(0, 1500, 100):
            for seed in range(group, group + 100):
                engine.submit(request_of(str(seed), [1, 2], draft=draft, temperature=0.7, max_tokens=3, seed=seed))
            for events in drain(engine).values():
                found[ids(events)[1]] += 1
        return found

    direct, speculated = counts(None), counts("small")
    used = direct + speculated >= 10
    statistic = float((((direct - speculated) ** 2)[used] / (direct + speculated)[used]).sum())
    degrees = int(used.sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 5


def test_every_token_says_where_it_came_from() -> None:
    events = run_one(engine_of(), request_of("r", [1, 2, 3], draft="small"))
    tokens = [token for event in events for token in event.tokens]
    usage = events[-1].usage
    assert usage is not None
    assert {token.tier for token in tokens} == {"large"}
    assert tokens[0].fate == "decoded"
    assert sum(token.fate == "accepted" for token in tokens) <= usage.accepted_tokens <= usage.drafted_tokens


@pytest.mark.parametrize("sampling", SETTINGS)
def test_logprobs_under_speculation_are_the_verifiers(sampling: dict[str, Any]) -> None:
    large = FakeModel("large")
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    request = request_of("r", [4, 5, 6], draft="small", logprobs=0, **{**sampling, **plain})
    events = run_one(engine_of(), request)
    context = [4, 5, 6]
    for token in (token for event in events for token in event.tokens):
        logits = large.logits(context).astype(np.float64)
        expected = logits[token.id] - np.log(np.exp(logits).sum())
        assert token.logprob == pytest.approx(expected, abs=1e-4)
        context.append(token.id)


@pytest.mark.parametrize("draft", MODES)
def test_max_tokens_is_exact_and_text_is_whole(draft: str | None) -> None:
    for max_tokens in (1, 2, 7):
        events = run_one(engine_of(), request_of("r", [1, 2, 3], draft=draft, max_tokens=max_tokens))
        assert len(ids(events)) == max_tokens
        assert events[-1].finish_reason == "length"
        assert "".join(e.text for e in events) == "".join(chr(65 + i) for i in ids(events))


@pytest.mark.parametrize("draft", MODES)
def test_stop_token_ends_the_answer_without_text(draft: str | None) -> None:
    whole = ids(run_one(engine_of(), request_of("r", [1, 2, 3], draft=draft)))
    stop = whole[9]
    events = run_one(engine_of(), request_of("r", [1, 2, 3], draft=draft, stop_token_ids=[stop]))
    assert ids(events) == whole[: whole.index(stop) + 1]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
    assert "".join(e.text for e in events) == "".join(chr(65 + i) for i in ids(events)[:-1])


@pytest.mark.parametrize("draft", MODES)
def test_stop_string_over_two_tokens(draft: str | None) -> None:
    text = "".join(e.text for e in run_one(engine_of(), request_of("r", [1, 2, 3], draft=draft)))
    events = run_one(engine_of(), request_of("r", [1, 2, 3], draft=draft, stop=[text[8:10]]))
    assert "".join(e.text for e in events) == text[: text.index(text[8:10])]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", text[8:10])


@pytest.mark.parametrize("draft", MODES)
def test_min_tokens_holds_eos_back(draft: str | None) -> None:
    sampling: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "ignore_eos": False}
    events = run_one(engine_of(), request_of("r", [1, 2, 3], draft=draft, min_tokens=5, **sampling))
    assert (len(ids(events)), ids(events)[-1], events[-1].finish_reason) == (6, EOS, "stop")


def test_salt_keeps_tenants_apart() -> None:
    engine = engine_of()
    prompt = list(range(20))
    run_one(engine, request_of("a", prompt, salt="tenant-a"))
    usage = run_one(engine, request_of("b", prompt, salt="tenant-b"))[-1].usage
    assert usage is not None and usage.cached_tokens == 0


def test_cancel_returns_blocks_and_tells_the_client() -> None:
    engine = engine_of()
    for index in range(4):
        engine.submit(request_of(str(index), [index, 2, 3], draft="small"))
    engine.step()
    for index in range(4):
        engine.cancel(str(index))
    events = engine.step()
    assert [e.finish_reason for e in events] == ["cancelled"] * 4
    assert not engine.has_work()
    assert_idle_and_whole(engine)


def test_cancelling_an_unknown_request_is_nothing() -> None:
    engine = engine_of()
    engine.cancel("nobody")
    assert not engine.has_work()


def test_paused_request_is_not_run_until_resumed() -> None:
    engine = engine_of()
    engine.submit(request_of("r", [1, 2, 3]))
    engine.step()
    engine.pause("r")
    assert not engine.has_work()
    engine.resume("r")
    assert len(ids(drain(engine)["r"])) == 23


@pytest.mark.parametrize("draft", MODES)
def test_failing_forward_pass_ends_only_the_request_that_causes_it(draft: str | None) -> None:
    models = [FakeModel("small", agreement=0.8), FakeModel("large")]
    engine = engine_of(models)
    bias = {40: -100.0}
    expected = [ids(run_one(engine_of(), request_of("r", [i, 2], draft=draft, logit_bias=bias))) for i in range(4)]
    for model in models:
        model.poison = 40
    for index in range(4):
        engine.submit(request_of(str(index), [index, 2], draft=draft, logit_bias=bias))
    engine.submit(request_of("bad", [40, 2], draft=draft))
    events = drain(engine)
    assert events["bad"][-1].finish_reason == "error"
    assert "poisoned token 40" in (events["bad"][-1].error or "")
    assert [ids(events[str(index)]) for index in range(4)] == expected
    assert_idle_and_whole(engine)


def test_logits_that_are_not_numbers_end_only_their_request() -> None:
    model = FakeModel("large")
    model.nan_after = 40
    engine = engine_of([model])
    engine.submit(request_of("good", [1, 2], logit_bias={40: -100.0}))
    engine.submit(request_of("bad", [2, 40]))
    events = drain(engine)
    assert events["bad"][-1].error == "tier large produced logits that are not numbers"
    assert events["good"][-1].finish_reason == "length"


def test_failure_in_the_engine_itself_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    engine.submit(request_of("r", [1, 2, 3]))
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "plan", lambda: 1 / 0)
        events = engine.step()
    assert [e.finish_reason for e in events] == ["error"]
    assert len(ids(run_one(engine, request_of("next", [1, 2, 3])))) == 24
    assert_idle_and_whole(engine)


def test_leaked_block_is_found_when_idle() -> None:
    engine = engine_of()
    engine._scheduler.caches["large"].pool.allocate(1)
    engine.submit(request_of("r", [1, 2, 3]))
    while engine.has_work():
        engine.step()
    assert_idle_and_whole(engine)


def rejection(request: GenerateRequest, **overrides: Any) -> tuple[str, str]:
    engine = engine_of(**overrides)
    rejected = engine.submit(request)
    assert rejected is not None
    assert not engine.has_work()
    return rejected.code, rejected.message


def test_context_overflow_names_the_numbers() -> None:
    code, message = rejection(request_of("r", [1] * 250, max_tokens=10))
    assert code == "context_overflow"
    assert all(number in message for number in ("250", "10", "260", "256"))


def test_request_that_never_fits_the_pool_is_refused() -> None:
    engine = engine_of([FakeModel("large", num_blocks=10)])
    rejected = engine.submit(request_of("r", [1] * 30, max_tokens=11))
    assert rejected is not None and rejected.code == "context_overflow" and "holds 40 tokens" in rejected.message


def test_unknown_tiers_are_named() -> None:
    request = request_of("r", [1])
    request.plan = Plan("direct", "huge")
    assert rejection(request) == ("unknown_tier", "no tier 'huge'; loaded: small, large")
    request.plan = Plan("speculate", "large", "tiny")
    assert rejection(request) == ("unknown_tier", "no tier 'tiny'; loaded: small, large")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of("r", []), "no tokens"),
        (request_of("r", [1, 48]), "prompt: token id 48"),
        (request_of("r", [-1]), "prompt: token id -1"),
        (request_of("r", [1], max_tokens=0), "max_tokens is 0"),
        (request_of("r", [1], stop_token_ids=[99]), "stop_token_ids: token id 99"),
        (request_of("r", [1], logit_bias={48: 1.0}), "logit_bias: token id 48"),
        (request_of("r", [1], draft="large"), "cannot draft for itself"),
    ],
)
def test_bad_requests_are_refused(request_: GenerateRequest, message: str) -> None:
    code, found = rejection(request_)
    assert code == "invalid" and message in found


def test_full_queue_says_when_to_come_back() -> None:
    engine = engine_of(max_waiting=2)
    for index in range(2):
        assert engine.submit(request_of(str(index), [1])) is None
    rejected = engine.submit(request_of("late", [1]))
    assert rejected is not None and rejected.code == "queue_full" and rejected.retry_after_s >= 1
    drain(engine)


def test_request_id_in_use_is_refused() -> None:
    engine = engine_of()
    engine.submit(request_of("r", [1]))
    rejected = engine.submit(request_of("r", [1]))
    assert rejected is not None and rejected.code == "invalid"
    drain(engine)


def test_random_traffic_leaves_every_block_free() -> None:
    rng = np.random.default_rng(1)
    engine = engine_of([FakeModel("small", agreement=0.6, num_blocks=30), FakeModel("large", num_blocks=30)])
    live: set[str] = set()
    finished: set[str] = set()
    for step in range(400):
        if rng.random() < 0.4:
            name = str(step)
            prompt = rng.integers(0, 4, int(rng.integers(1, 40))).tolist()
            sampling = {"temperature": float(rng.integers(0, 2)), "max_tokens": int(rng.integers(1, 30)), "seed": step}
            draft = "small" if rng.random() < 0.6 else None
            if engine.submit(request_of(name, prompt, draft=draft, **sampling)) is None:
                live.add(name)
        for name in sorted(live):
            if rng.random() < 0.03:
                engine.cancel(name)
            elif rng.random() < 0.05:
                engine.pause(name)
            elif rng.random() < 0.3:
                engine.resume(name)
        done = {e.request_id for e in engine.step() if e.finish_reason is not None}
        assert not done & finished
        finished |= done
        live -= done
        engine.check_invariants()
    for name in live:
        engine.resume(name)
    finished |= drain(engine).keys()
    assert live <= finished
    assert_idle_and_whole(engine)


def test_runner_builds_ragged_arrays() -> None:
    runner = Runner(FakeModel("m", block_size=4), 32, 8)
    rows = [Rows([7], 5, array("i", [3, 1]), 1), Rows([1, 2, 3], 2, array("i", [2, 0, 9]), 2)]
    batch = runner.build(rows)
    assert batch.input_ids.tolist() == [7, 1, 2, 3]
    assert batch.positions.tolist() == [5, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [5, 10, 11, 0]
    assert batch.cu_seqlens.tolist() == [0, 1, 4]
    assert batch.past_lens.tolist() == [5, 2]
    assert batch.block_table.tolist() == [[3, 1], [2, 0]]
    assert batch.logit_rows.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_sequences": 40}, "twice max_sequences"),
        ({"draft_tokens": 33}, "draft_tokens"),
        ({"threads": 0}, "threads"),
    ],
)
def test_configuration_is_checked(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig([TierConfig("a", "/a")], **{**CONFIG, **overrides})
