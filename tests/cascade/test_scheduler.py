"""The scheduler plans within budget and pool, in order of arrival, and returns every block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cascade.block_pool import BlockPool
from cascade.prefix_cache import PrefixCache
from cascade.protocol import GenerateRequest, Plan, SamplingParams
from cascade.scheduler import CATCH_UP_TOKENS, Scheduler, StepPlan
from cascade.sequence import Sequence, block_tables
from cascade.speculation import AdaptiveDraftLength

SIZE = 4


def scheduler_of(
    num_blocks: int = 64, *, budget: int = 64, interleaved: int = 64, max_sequences: int = 8, draft_tokens: int = 4
) -> Scheduler:
    caches = {name: PrefixCache(BlockPool(num_blocks, SIZE), name) for name in ("small", "large")}
    drafts = AdaptiveDraftLength(draft_tokens, max_verify_rows=budget // 2)
    return Scheduler(
        caches, drafts, max_batch_tokens=budget, max_sequences=max_sequences, interleaved_prefill_tokens=interleaved
    )


def sequence_of(
    scheduler: Scheduler,
    arrival: int,
    prompt: list[int],
    *,
    max_tokens: int = 32,
    draft: str | None = None,
    temperature: float = 0.0,
    cached: bool = True,
) -> Sequence:
    plan = Plan("speculate" if draft else "direct", "large", draft, use_prefix_cache=cached)
    request = GenerateRequest(
        str(arrival), prompt, plan, SamplingParams(temperature=temperature, max_tokens=max_tokens)
    )
    tiers = ["large", draft] if draft else ["large"]
    return Sequence(request, arrival, {tier: scheduler.caches[tier].hasher("") for tier in tiers})


def execute(scheduler: Scheduler, step: StepPlan, accept: int = 99) -> None:
    """Commit a plan as the engine does, with token 7 for every output and `accept` drafts of a verify right."""
    for tier, chunks in step.chunks.items():
        for chunk in chunks:
            if chunk.samples:
                chunk.sequence.tokens.append(7)
            chunk.sequence.commit(tier, chunk.start + chunk.count, scheduler.caches[tier])
    for verify in step.verifies:
        sequence = verify.sequence
        drafter = sequence.drafting
        assert drafter is not None
        accepted = min(accept, verify.length)
        before = len(sequence.tokens)
        extra = 1 if verify.bonus or accepted < verify.length else 0
        sequence.tokens += [7] * (accepted + extra)
        sequence.round_left = verify.round_left if accepted == verify.length else None
        sequence.commit(sequence.answering, len(sequence.tokens) - 1, scheduler.caches[sequence.answering])
        sequence.commit(drafter, min(before + verify.length - 1, before + accepted), scheduler.caches[drafter])
    for sequence in list(scheduler.running):
        if sequence.remaining <= 0:
            scheduler.remove(sequence)


def test_prompt_is_read_in_chunks_of_the_budget() -> None:
    scheduler = scheduler_of(budget=16)
    scheduler.add(sequence_of(scheduler, 0, list(range(40))))
    chunks = []
    for _ in range(3):
        step = scheduler.plan()
        chunks += [(c.start, c.count, c.samples) for c in step.chunks["large"]]
        execute(scheduler, step)
    assert chunks == [(0, 16, False), (16, 16, False), (32, 8, True)]


def test_decodes_come_before_a_long_prompt() -> None:
    scheduler = scheduler_of(budget=16)
    scheduler.add(sequence_of(scheduler, 0, [1, 2]))
    execute(scheduler, scheduler.plan())
    scheduler.add(sequence_of(scheduler, 1, list(range(40))))
    step = scheduler.plan()
    assert [(c.sequence.arrival, c.count) for c in step.chunks["large"]] == [(0, 1), (1, 15)]


def test_prompt_chunks_are_shorter_while_others_decode() -> None:
    scheduler = scheduler_of(budget=64, interleaved=8)
    scheduler.add(sequence_of(scheduler, 0, [1, 2], max_tokens=2))
    execute(scheduler, scheduler.plan())
    scheduler.add(sequence_of(scheduler, 1, list(range(40))))
    counts = []
    for _ in range(2):
        step = scheduler.plan()
        counts.append([c.count for c in step.chunks["large"]])
        execute(scheduler, step)
    assert counts == [[1, 8], [32]]


def test_waits_when_its_blocks_are_not_free() -> None:
    scheduler = scheduler_of(num_blocks=10)
    scheduler.add(sequence_of(scheduler, 0, list(range(24))))
    scheduler.add(sequence_of(scheduler, 1, list(range(100, 124))))
    step = scheduler.plan()
    assert [c.sequence.arrival for c in step.chunks["large"]] == [0]
    assert [s.arrival for s in scheduler.waiting] == [1]


def test_cached_prefix_is_not_run_again() -> None:
    scheduler = scheduler_of()
    first = sequence_of(scheduler, 0, list(range(20)))
    scheduler.add(first)
    execute(scheduler, scheduler.plan())
    scheduler.remove(first)
    second = sequence_of(scheduler, 1, list(range(20)))
    scheduler.add(second)
    step = scheduler.plan()
    assert [(c.start, c.count) for c in step.chunks["large"]] == [(16, 4)]
    assert second.cached_tokens == 16


def test_request_that_opts_out_neither_reads_nor_feeds_the_prefix_cache() -> None:
    scheduler = scheduler_of()
    for arrival, cached in enumerate((False, True, False)):
        sequence = sequence_of(scheduler, arrival, list(range(20)), cached=cached)
        scheduler.add(sequence)
        step = scheduler.plan()
        assert step.chunks["large"][0].start == 0
        execute(scheduler, step)
        scheduler.remove(sequence)


def test_latest_arrival_is_preempted_and_comes_back_first() -> None:
    scheduler = scheduler_of(num_blocks=7)
    for arrival in range(2):
        scheduler.add(sequence_of(scheduler, arrival, list(range(arrival * 50, arrival * 50 + 11))))
    execute(scheduler, scheduler.plan())
    scheduler.add(sequence_of(scheduler, 2, [1, 2]))
    while not scheduler.preemptions:
        execute(scheduler, scheduler.plan())
    assert [s.arrival for s in scheduler.running] == [0]
    assert [s.arrival for s in scheduler.waiting] == [1, 2]


def test_paused_sequence_is_not_run_and_makes_way() -> None:
    scheduler = scheduler_of(num_blocks=8)
    paused = sequence_of(scheduler, 0, list(range(24)))
    scheduler.add(paused)
    execute(scheduler, scheduler.plan())
    paused.paused = True
    assert not scheduler.plan()
    scheduler.add(sequence_of(scheduler, 1, list(range(100, 124))))
    assert [c.sequence.arrival for c in scheduler.plan().chunks["large"]] == [1]
    assert scheduler.waiting == [paused]


def test_drafts_shrink_when_many_sequences_verify() -> None:
    scheduler = scheduler_of(256, budget=64, max_sequences=16)
    for arrival in range(16):
        scheduler.add(sequence_of(scheduler, arrival, [arrival, 2], draft="small"))
    execute(scheduler, scheduler.plan())
    assert [v.length for v in scheduler.plan().verifies] == [1] * 16


def test_greedy_speculation_stops_under_load_but_sampled_goes_on_without_extra_rows() -> None:
    scheduler = scheduler_of(512, budget=64, max_sequences=32)
    for arrival in range(32):
        temperature = float(arrival % 2)
        scheduler.add(sequence_of(scheduler, arrival, [arrival, 2], draft="small", temperature=temperature))
    execute(scheduler, scheduler.plan())
    step = scheduler.plan()
    assert len(step.chunks["large"]) == 16
    assert [(v.length, v.rows, v.round_left) for v in step.verifies] == [(1, 1, 3)] * 16


def test_drafts_never_pass_max_tokens() -> None:
    scheduler = scheduler_of()
    scheduler.add(sequence_of(scheduler, 0, [1, 2, 3], max_tokens=4, draft="small"))
    execute(scheduler, scheduler.plan())
    assert [v.length for v in scheduler.plan().verifies] == [2]


def test_sampled_speculation_waits_for_a_drafter_that_still_reads() -> None:
    scheduler = scheduler_of(256, budget=64)
    sequence = sequence_of(scheduler, 0, list(range(150)), draft="small", temperature=1.0)
    scheduler.add(sequence)
    while sequence.num_generated == 0:
        execute(scheduler, scheduler.plan())
    small = sequence.tiers["small"]
    small.num_computed_tokens = 0
    step = scheduler.plan()
    assert step.verifies == [] and step.chunks["large"] == []
    assert [c.count for c in step.chunks["small"]] == [64]


def round_positions(loads: list[int]) -> list[tuple[int, int]]:
    """(first draft position, round length) of a sampled sequence beside `loads[i]` others in step i."""
    scheduler = scheduler_of(4096, budget=64, max_sequences=32)
    subject = sequence_of(scheduler, 0, [1, 2, 3], draft="small", temperature=1.0, max_tokens=30)
    scheduler.add(subject)
    execute(scheduler, scheduler.plan())
    rounds = []
    arrival = 1
    for load in loads:
        while len(scheduler.sequences()) <= load:
            scheduler.add(sequence_of(scheduler, arrival, [arrival], draft="small", max_tokens=1000))
            arrival += 1
        position, fresh = len(subject.tokens), subject.round_left is None
        step = scheduler.plan()
        if fresh:
            verify = next(v for v in step.verifies if v.sequence is subject)
            rounds.append((position, verify.length + (verify.round_left or 0)))
        execute(scheduler, step)
    return rounds


def test_rounds_of_sampled_speculation_do_not_depend_on_load() -> None:
    alone = round_positions([0] * 3)
    assert round_positions([31] * 12)[:3] == alone


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps, pauses and cancellations on a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler_of(num_blocks=24, budget=16, max_sequences=4)
        self.arrivals = 0

    @rule(
        length=st.integers(1, 60),
        max_tokens=st.integers(1, 30),
        base=st.integers(0, 2),
        draft=st.sampled_from([None, "small"]),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def arrive(self, length: int, max_tokens: int, base: int, draft: str | None, temperature: float) -> None:
        prompt = [base + i for i in range(length)]
        self.scheduler.add(
            sequence_of(
                self.scheduler, self.arrivals, prompt, max_tokens=max_tokens, draft=draft, temperature=temperature
            )
        )
        self.arrivals += 1

    @rule(accept=st.integers(0, 4))
    def step(self, accept: int) -> None:
        step = self.scheduler.plan()
        assert bool(step) == self.scheduler.has_work(), "an engine with work must make progress"
        rows = {tier: sum(c.count for c in chunks) for tier, chunks in step.chunks.items()}
        rows["large"] += sum(v.rows for v in step.verifies)
        rows["small"] += sum(v.sequence.pending("small") for v in step.verifies)
        assert all(count <= 16 for count in rows.values())
        for tier in ("small", "large"):
            planned = [c.sequence.arrival for c in step.chunks[tier]]
            planned += [v.sequence.arrival for v in step.verifies]
            assert len(planned) == len(set(planned))
        for verify in step.verifies:
            assert 1 <= verify.sequence.pending("small") <= CATCH_UP_TOKENS
            assert verify.sequence.pending("large") == 1
        execute(self.scheduler, step, accept)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if live := self.scheduler.sequences():
            self.scheduler.remove(data.draw(st.sampled_from(live)))

    @rule(data=st.data())
    def toggle_pause(self, data: st.DataObject) -> None:
        if live := self.scheduler.sequences():
            sequence = data.draw(st.sampled_from(live))
            sequence.paused = not sequence.paused

    @invariant()
    def tables_and_pools_agree(self) -> None:
        for tier, cache in self.scheduler.caches.items():
            cache.pool.check(block_tables(self.scheduler.sequences(), tier))
            cache.check()
        for sequence in self.scheduler.running:
            for state in sequence.tiers.values():
                assert state.num_computed_tokens <= len(state.block_table) * SIZE
        assert all(not state.block_table for s in self.scheduler.waiting for state in s.tiers.values())
        assert len(self.scheduler.running) <= 4

    def teardown(self) -> None:
        for sequence in self.scheduler.sequences():
            sequence.paused = False
        for _ in range(3000):
            if not self.scheduler.has_work():
                break
            execute(self.scheduler, self.scheduler.plan(), 2)
        assert not self.scheduler.sequences(), "every sequence finishes"
        for cache in self.scheduler.caches.values():
            assert cache.pool.num_free == cache.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("draft", [None, "small"])
def test_finishing_returns_every_block(draft: str | None) -> None:
    scheduler = scheduler_of()
    scheduler.add(sequence_of(scheduler, 0, list(range(30)), draft=draft))
    while scheduler.has_work():
        execute(scheduler, scheduler.plan(), accept=1)
    assert all(cache.pool.num_free == 64 for cache in scheduler.caches.values())
