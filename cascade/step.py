"""Runs one planned step: draft, forward, choose. Changes no sequence; everything it finds out is in `Outcome`s."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cascade.choice import Chooser, Stream
from cascade.protocol import Token
from cascade.runner import Logits, Rows, Runner
from cascade.sampler import Probabilities
from cascade.scheduler import Chunk, StepPlan, Verify
from cascade.sequence import Sequence
from cascade.speculation import Verdict, verify_greedy, verify_sampled

log = logging.getLogger("stepwell.engine")


@dataclass(slots=True)
class Outcome:
    """What a step found out about one sequence, to be committed by the engine.

    `computed`: per tier, how many leading tokens have right K/V once `tokens` are appended.
    """

    sequence: Sequence
    tokens: list[Token] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    round_left: int | None = None
    error: str | None = None


class _Result(NamedTuple):
    """Logits [n, vocab] of one sequence's rows and their argmax; `broken` when a row holds NaN."""

    logits: Logits
    best: NDArray[np.intp]
    broken: bool


@dataclass(slots=True)
class _Drafts:
    tokens: list[int] = field(default_factory=list)
    q: list[Probabilities] = field(default_factory=list)
    """Drafter's distribution at each draft; empty when greedy."""


class StepRunner:
    """Executes plans over the tiers' runners. `choosers` maps arrival to the sequence's chooser."""

    def __init__(self, runners: Mapping[str, Runner], choosers: Mapping[int, Chooser]) -> None:
        self._runners = runners
        self._choosers = choosers

    def execute(self, plan: StepPlan) -> list[Outcome]:
        """Run the plan; one outcome per sequence in it."""
        outcomes: dict[int, Outcome] = {}
        for sequence in plan.sequences():
            outcomes.setdefault(sequence.arrival, Outcome(sequence))
        chunks = dict(plan.chunks)
        drafts: dict[int, _Drafts] = {}
        for tier in self._runners:
            verifies = [v for v in plan.verifies if v.sequence.drafting == tier]
            if verifies:
                drafts |= self._draft(tier, verifies, chunks.pop(tier, []), outcomes)
        for tier in self._runners:
            verifies = [v for v in plan.verifies if v.sequence.answering == tier]
            self._forward(tier, chunks.get(tier, []), verifies, drafts, outcomes)
        return list(outcomes.values())

    def _draft(
        self, tier: str, verifies: list[Verify], chunks: list[Chunk], outcomes: dict[int, Outcome]
    ) -> dict[int, _Drafts]:
        """Draft for all `verifies` together, one token a pass; the tier's own chunks ride in the first pass."""
        drafts = {v.sequence.arrival: _Drafts() for v in verifies}
        work: list[tuple[Sequence, Rows]] = [(c.sequence, _chunk_rows(c, tier)) for c in chunks]
        for verify in verifies:
            sequence, state = verify.sequence, verify.sequence.tiers[tier]
            start = state.num_computed_tokens
            work.append((sequence, Rows(sequence.tokens[start:], start, state.block_table, 1)))
        results = self._run(tier, work, outcomes)
        for chunk, result in zip(chunks, results, strict=False):
            self._finish_chunk(tier, chunk, result, outcomes)
        active = list(zip(verifies, results[len(chunks) :], strict=True))
        while active:
            for verify, result in active:
                if result is not None:
                    self._guard(outcomes, verify.sequence, self._add_draft, drafts[verify.sequence.arrival], result)
            going = [
                v
                for v, _ in active
                if len(drafts[v.sequence.arrival].tokens) < v.length and outcomes[v.sequence.arrival].error is None
            ]
            work = []
            for verify in going:
                sequence, tokens = verify.sequence, drafts[verify.sequence.arrival].tokens
                position = len(sequence.tokens) + len(tokens) - 1
                work.append((sequence, Rows(tokens[-1:], position, sequence.tiers[tier].block_table, 1)))
            active = list(zip(going, self._run(tier, work, outcomes), strict=True))
        return drafts

    def _add_draft(self, sequence: Sequence, drafts: _Drafts, result: _Result) -> None:
        chooser = self._choosers[sequence.arrival]
        if sequence.greedy:
            drafts.tokens.append(chooser.greedy(result.logits[0], int(result.best[0]), drafts.tokens))
        else:
            q = chooser.distribution(result.logits[0], drafts.tokens)
            drafts.tokens.append(chooser.draw(q, Stream.DRAFT, drafts.tokens))
            drafts.q.append(q)

    def _forward(
        self,
        tier: str,
        chunks: list[Chunk],
        verifies: list[Verify],
        drafts: dict[int, _Drafts],
        outcomes: dict[int, Outcome],
    ) -> None:
        """The answering tiers' pass: prompt chunks, decodes and verifies in one ragged batch."""
        chunks = [c for c in chunks if outcomes[c.sequence.arrival].error is None]
        verifies = [v for v in verifies if outcomes[v.sequence.arrival].error is None]
        work = [(c.sequence, _chunk_rows(c, tier)) for c in chunks]
        for verify in verifies:
            sequence = verify.sequence
            tokens = [sequence.tokens[-1], *drafts[sequence.arrival].tokens][: verify.rows]
            table = sequence.tiers[tier].block_table
            work.append((sequence, Rows(tokens, len(sequence.tokens) - 1, table, len(tokens))))
        results = self._run(tier, work, outcomes)
        for chunk, result in zip(chunks, results, strict=False):
            self._finish_chunk(tier, chunk, result, outcomes)
        for verify, result in zip(verifies, results[len(chunks) :], strict=True):
            if result is not None:
                sequence = verify.sequence
                arguments = (tier, verify, drafts[sequence.arrival], result, outcomes[sequence.arrival])
                self._guard(outcomes, sequence, self._judge, *arguments)

    def _finish_chunk(self, tier: str, chunk: Chunk, result: _Result | None, outcomes: dict[int, Outcome]) -> None:
        outcome = outcomes[chunk.sequence.arrival]
        if result is None:
            return
        outcome.computed[tier] = chunk.start + chunk.count
        if chunk.samples:
            self._guard(outcomes, chunk.sequence, self._sample, tier, result, outcome)

    def _sample(self, sequence: Sequence, tier: str, result: _Result, outcome: Outcome) -> None:
        chooser = self._choosers[sequence.arrival]
        logits, best = result.logits[0], int(result.best[0])
        if sequence.greedy:
            token = chooser.greedy(logits, best, [])
        else:
            token = chooser.draw(chooser.distribution(logits, []), Stream.SAMPLE, [])
        outcome.tokens = [chooser.describe(token, tier, "decoded", logits, [])]

    def _judge(
        self, sequence: Sequence, tier: str, verify: Verify, drafts: _Drafts, result: _Result, outcome: Outcome
    ) -> None:
        chooser = self._choosers[sequence.arrival]
        verdict = self._verdict(chooser, verify, drafts, result)
        ids = verdict.tokens
        outcome.tokens = [
            chooser.describe(token, tier, fate, result.logits[i], ids[:i])
            for i, (token, fate) in enumerate(zip(ids, verdict.fates, strict=True))
        ]
        before = len(sequence.tokens)
        outcome.computed[tier] = before + min(verdict.accepted, verify.rows - 1)
        assert sequence.drafting is not None
        outcome.computed[sequence.drafting] = before + min(verdict.accepted, verify.length - 1)
        outcome.drafted, outcome.accepted = verify.length, verdict.accepted
        outcome.round_left = None if verdict.rejected else verify.round_left

    def _verdict(self, chooser: Chooser, verify: Verify, drafts: _Drafts, result: _Result) -> Verdict:
        tokens = drafts.tokens
        if verify.sequence.greedy:
            return verify_greedy(tokens, lambda i: chooser.greedy(result.logits[i], int(result.best[i]), tokens[:i]))
        return verify_sampled(
            tokens,
            drafts.q,
            lambda i: chooser.distribution(result.logits[i], tokens[:i]),
            lambda i: (chooser.uniform(Stream.ACCEPT, i), chooser.uniform(Stream.RESIDUAL, i)),
            (lambda p: chooser.draw(p, Stream.SAMPLE, tokens)) if verify.bonus else None,
        )

    def _run(self, tier: str, work: list[tuple[Sequence, Rows]], outcomes: dict[int, Outcome]) -> list[_Result | None]:
        """One pass over all rows. When it fails, each sequence alone; None marks those that fail alone."""
        if not work:
            return []
        try:
            results = _split(self._runners[tier].run([rows for _, rows in work]), [rows for _, rows in work])
        except Exception:
            log.exception("tier %s: a pass over %d sequences failed; running each alone", tier, len(work))
            results = [self._run_alone(tier, sequence, rows, outcomes) for sequence, rows in work]
        for index, ((sequence, _), result) in enumerate(zip(work, results, strict=True)):
            if result is not None and result.broken:
                outcomes[sequence.arrival].error = f"tier {tier} produced logits that are not numbers"
                results[index] = None
        return results

    def _run_alone(self, tier: str, sequence: Sequence, rows: Rows, outcomes: dict[int, Outcome]) -> "_Result | None":
        try:
            logits = self._runners[tier].run([rows]).copy()  # the next run overwrites it
        except Exception as error:
            log.exception("request %s failed in tier %s", sequence.request_id, tier)
            outcomes[sequence.arrival].error = f"the model failed on this request: {error}"
            return None
        return _split(logits, [rows])[0]

    def _guard(
        self, outcomes: dict[int, Outcome], sequence: Sequence, action: Callable[..., None], *arguments: object
    ) -> None:
        """Run one sequence's own part; what it raises ends that sequence only."""
        try:
            action(sequence, *arguments)
        except Exception as error:
            log.exception("request %s failed while choosing tokens", sequence.request_id)
            outcomes[sequence.arrival].error = f"choosing a token failed: {error}"


def _chunk_rows(chunk: Chunk, tier: str) -> Rows:
    tokens = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
    return Rows(tokens, chunk.start, chunk.sequence.tiers[tier].block_table, int(chunk.samples))


def _split(logits: Logits, rows: list[Rows]) -> list[_Result | None]:
    best = logits.argmax(axis=1)
    # argmax returns the first NaN where there is one, so looking at the best is looking at all.
    nan = np.isnan(np.take_along_axis(logits, best[:, None], axis=1)[:, 0])
    results: list[_Result | None] = []
    start = 0
    for row in rows:
        end = start + row.num_logits
        results.append(_Result(logits[start:end], best[start:end], bool(nan[start:end].any())))
        start = end
    return results
