"""The scheduler: which tokens of which sequences run in the next step. It decides; it never touches tensors.

One step, per tier, is one ragged batch under a token budget: decodes and verifies first, in order of arrival,
then prompt chunks in what is left. Blocks are reserved while planning: a sequence is admitted when the blocks
of all its tokens are free, and a running one that finds none takes them from the latest arrival, which is
recomputed later (its own full blocks usually come back from the prefix cache).
"""

from array import array
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from cascade.prefix_cache import PrefixCache, PrefixHit
from cascade.sequence import Sequence

CATCH_UP_TOKENS = 32
"""A drafter this far behind catches up in the first draft pass; further behind, in prompt chunks."""


@dataclass(slots=True, frozen=True)
class Chunk:
    """Run `tokens[start:start+count]` of a sequence; `samples`: the last row's logits choose the next token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(slots=True, frozen=True)
class Verify:
    """Draft `length` tokens, then verify them. `bonus`: when all are accepted, one more token is sampled.

    Without `bonus` the last draft is not run through the verifier: nothing after it is needed yet.
    `round_left` is what remains of a sampled round when all drafts are accepted; None: a new round begins.
    """

    sequence: Sequence
    length: int
    bonus: bool
    round_left: int | None = None

    @property
    def rows(self) -> int:
        """Tokens that the verifier runs: the pending token and the drafts whose successors are judged."""
        return self.length + 1 if self.bonus else self.length


@dataclass(slots=True)
class StepPlan:
    """What one step runs: plain chunks per tier, and the sequences that speculate."""

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    verifies: list[Verify] = field(default_factory=list)

    def sequences(self) -> Iterator[Sequence]:
        """Whose work it is; a sequence that reads its prompt in two tiers comes twice."""
        yield from (verify.sequence for verify in self.verifies)
        yield from (chunk.sequence for chunks in self.chunks.values() for chunk in chunks)

    def __bool__(self) -> bool:
        return bool(self.verifies) or any(self.chunks.values())


class DraftController(Protocol):
    """How far to draft; the seam for controllers that adapt to acceptance and load."""

    def share(self, num_speculating: int) -> int:
        """Most drafts per sequence in a step with that many speculating sequences; 0: do not speculate."""

    def round_length(self, sequence: Sequence) -> int:
        """Draft positions of a round that starts now: may depend on the sequence alone, never on load."""


class Scheduler:
    """Owns the queues: `waiting` holds no blocks, `running` does. Both are in order of arrival."""

    def __init__(
        self,
        caches: dict[str, PrefixCache],
        drafts: DraftController,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        interleaved_prefill_tokens: int,
    ) -> None:
        self.caches = caches
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self._drafts = drafts
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._interleaved_prefill_tokens = interleaved_prefill_tokens
        self._catch_up = min(CATCH_UP_TOKENS, max_batch_tokens // 4)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by order of arrival (a preempted one comes before later arrivals)."""
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished, failed or cancelled sequence; every block is returned."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def reset(self, caches: dict[str, PrefixCache]) -> None:
        """Forget every sequence and start on empty pools; the counters go on."""
        self.caches = caches
        self.waiting.clear()
        self.running.clear()

    def sequences(self) -> list[Sequence]:
        """Every live sequence."""
        return self.running + self.waiting

    def has_work(self) -> bool:
        """True when some sequence is not paused."""
        return any(not s.paused for s in self.running) or any(not s.paused for s in self.waiting)

    def plan(self) -> StepPlan:
        """Decide the next step and reserve its blocks."""
        step = StepPlan({tier: [] for tier in self.caches})
        budget = dict.fromkeys(self.caches, self._max_batch_tokens)
        preemptions = self.preemptions
        self._plan_decodes(step, budget)
        if step:  # others wait for their next token: shorter chunks
            budget = {tier: min(left, self._interleaved_prefill_tokens) for tier, left in budget.items()}
        for sequence in self.running:
            if not sequence.paused and sequence.pending(sequence.answering) > 1:
                self._plan_prefill(step, budget, sequence, sequence.answering)
            if not sequence.paused and sequence.drafting is not None:
                self._plan_prefill(step, budget, sequence, sequence.drafting)
        if self.preemptions == preemptions:
            for sequence in self._admit(budget):
                for tier in sequence.tiers:
                    self._plan_prefill(step, budget, sequence, tier)
        return step

    # Decodes and verifies

    def _plan_decodes(self, step: StepPlan, budget: dict[str, int]) -> None:
        ready = [s for s in self.running if not s.paused and s.pending(s.answering) == 1]
        share = self._drafts.share(sum(s.drafting is not None for s in ready))
        scheduled: set[int] = set()
        for sequence in ready:
            if sequence not in self.running:
                continue  # preempted for an earlier one
            if budget[sequence.answering] < 1:
                break
            verify = self._verify_for(sequence, share, budget)
            if verify is None and self._must_draft(sequence):
                continue  # its drafter is still reading the prompt
            if not self._make_room(sequence, 0 if verify is None else verify.length, scheduled):
                continue
            scheduled.add(sequence.arrival)
            if verify is None:
                start = len(sequence.tokens) - 1
                step.chunks[sequence.answering].append(Chunk(sequence, start, 1, True))
                budget[sequence.answering] -= 1
            else:
                step.verifies.append(verify)
                budget[sequence.answering] -= verify.rows
                assert sequence.drafting is not None
                budget[sequence.drafting] -= sequence.pending(sequence.drafting)

    def _must_draft(self, sequence: Sequence) -> bool:
        """Sampled speculation: is the next position a draft position, whatever the load?

        Which positions are drafted decides which random numbers choose their tokens, so it must follow from
        the sequence alone for a seed to give one stream. The first output token never is, nor the last.
        """
        if sequence.drafting is None or sequence.greedy or sequence.num_generated == 0:
            return False
        return self._round_left(sequence) > 0

    def _round_left(self, sequence: Sequence) -> int:
        left = sequence.round_left
        return self._drafts.round_length(sequence) if left is None else left

    def _verify_for(self, sequence: Sequence, share: int, budget: dict[str, int]) -> Verify | None:
        """The speculation of this step, or None for a plain decode (or to wait, where drafts are a must)."""
        drafter = sequence.drafting
        if drafter is None or sequence.num_generated == 0:
            return None
        behind = sequence.pending(drafter)
        if not 1 <= behind <= min(self._catch_up, budget[drafter]):
            return None
        room = budget[sequence.answering]
        if sequence.greedy:
            length = min(share, self._drafts.round_length(sequence), room - 1)
            return Verify(sequence, length, bonus=True) if length > 0 else None
        left = self._round_left(sequence)
        length = min(left, max(share, 1), room)
        if length == left and length == room:
            length -= 1  # the bonus row does not fit
        if length == left:
            return Verify(sequence, length, bonus=True) if length > 0 else None
        return Verify(sequence, length, bonus=False, round_left=left - length) if length > 0 else None

    def _make_room(self, sequence: Sequence, drafts: int, scheduled: set[int]) -> bool:
        """Reserve blocks for the tokens and `drafts` more in every tier; False when the sequence lost its own."""
        for tier, state in sequence.tiers.items():
            pool = self.caches[tier].pool
            missing = pool.blocks_for(len(sequence.tokens) + drafts) - len(state.block_table)
            while missing > pool.num_free:
                victim = self._victim(sequence, scheduled)
                self._preempt(victim)
                if victim is sequence:
                    return False
            if missing > 0:
                state.block_table.extend(pool.allocate(missing))
        return True

    # Preemption

    def _victim(self, sequence: Sequence, scheduled: set[int]) -> Sequence:
        """Whom to preempt for `sequence`: a paused one first, else the latest arrival, perhaps itself.

        Sequences already in this step's plan are out: their blocks are about to be read.
        """
        others = [s for s in self.running if s.arrival not in scheduled and s is not sequence]
        paused = [s for s in others if s.paused]
        later = [s for s in others if s.arrival > sequence.arrival]
        return (paused or later or [sequence])[-1]

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._release(victim)
        self.add(victim)

    def _release(self, sequence: Sequence) -> None:
        for tier, state in sequence.tiers.items():
            self.caches[tier].pool.release(state.block_table)
            state.block_table = array("i")
            state.num_computed_tokens = 0
            state.block_hashes = []

    # Prefill and admission

    def _plan_prefill(self, step: StepPlan, budget: dict[str, int], sequence: Sequence, tier: str) -> None:
        """Give a sequence what it still has to read in one tier, as far as the budget goes."""
        wanted = sequence.pending(tier)
        if tier == sequence.drafting:
            # The rest is read in the first draft pass.
            wanted = wanted - 1 if wanted > self._catch_up else 0
        elif sequence.drafting is not None and sequence.num_generated > 0:
            wanted -= 1  # recomputed after preemption: the last token is for the verify
        count = min(wanted, budget[tier])
        if count <= 0:
            return
        budget[tier] -= count
        start = sequence.tiers[tier].num_computed_tokens
        samples = tier == sequence.answering and start + count == len(sequence.tokens)
        step.chunks[tier].append(Chunk(sequence, start, count, samples))

    def _admit(self, budget: dict[str, int]) -> list[Sequence]:
        """Move waiting sequences to `running`, first come first served, while blocks and budget last."""
        admitted: list[Sequence] = []
        for sequence in self._admission_order():
            if budget[sequence.answering] - sum(s.pending(s.answering) for s in admitted) <= 0:
                break
            if not self._fits(sequence):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.arrival)
            admitted.append(sequence)
        return admitted

    def _admission_order(self) -> list[Sequence]:
        """Whom to admit first: in order of arrival, whatever the plan's length class."""
        return [s for s in self.waiting if not s.paused]

    def _fits(self, sequence: Sequence) -> bool:
        """Take the sequence's blocks, cached prefix included; False, with nothing taken, when they are not there.

        Paused sequences, whose clients do not read, make way.
        """
        while True:
            hits = {tier: self._match(sequence, tier) for tier in sequence.tiers}
            if len(self.running) < self._max_sequences and all(
                self._blocks_missing(sequence, tier, hit) <= 0 for tier, hit in hits.items()
            ):
                break
            paused = [s for s in self.running if s.paused]
            if not paused:
                return False
            self._preempt(paused[-1])
        for tier, hit in hits.items():
            pool = self.caches[tier].pool
            pool.acquire(hit.blocks)
            state = sequence.tiers[tier]
            new = pool.allocate(pool.blocks_for(len(sequence.tokens)) - len(hit.blocks))
            state.block_table = array("i", hit.blocks + new)
            state.block_hashes = hit.hashes
            state.num_computed_tokens = len(hit.blocks) * pool.block_size
        if sequence.first_admission:
            sequence.first_admission = False
            sequence.cached_tokens = sequence.tiers[sequence.answering].num_computed_tokens
            self.prefix_hit_tokens += sequence.cached_tokens
        return True

    def _match(self, sequence: Sequence, tier: str) -> PrefixHit:
        if not sequence.request.plan.use_prefix_cache:
            return PrefixHit([], [])
        return self.caches[tier].match(sequence.tokens, sequence.tiers[tier].hasher)

    def _blocks_missing(self, sequence: Sequence, tier: str, hit: PrefixHit) -> int:
        """Blocks lacking for admission; one spare block per running sequence keeps the next steps from preempting."""
        pool = self.caches[tier].pool
        users = sum(tier in s.tiers for s in self.running)
        taken = sum(pool.is_kept(block) for block in hit.blocks)
        new = pool.blocks_for(len(sequence.tokens)) - len(hit.blocks)
        return new + taken + users - pool.num_free
