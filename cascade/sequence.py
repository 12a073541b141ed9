"""One request's sequence: its tokens, owned once, and per tier where their K/V lives."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from cascade.prefix_cache import ROOT, BlockHasher, PrefixCache
from cascade.protocol import GenerateRequest

FIRST_DRAFT_WINDOW = 4
"""Drafts of a sequence's first round."""


@dataclass(slots=True)
class TierState:
    """K/V of one sequence in one tier.

    The K/V of `tokens[:num_computed_tokens]` is in the blocks of `block_table`; slots beyond that hold
    rejected drafts or nothing, and are overwritten. `block_hashes` are the chained hashes of the leading
    full blocks that the prefix cache knows.
    """

    hasher: BlockHasher
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    """An array, so that the runner copies it into the batch without converting each id."""
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)


class Sequence:
    """Prompt and verified output tokens of one request. Drafted tokens are never in `tokens`."""

    __slots__ = (
        "accepted_tokens",
        "arrival",
        "cached_tokens",
        "draft_window",
        "drafted_tokens",
        "first_admission",
        "paused",
        "prompt_length",
        "request",
        "round_accepted",
        "round_left",
        "tiers",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, arrival: int, hashers: dict[str, BlockHasher]) -> None:
        self.request = request
        self.arrival = arrival
        """Order of arrival; unique."""
        self.tokens: list[int] = list(request.prompt_ids)
        self.prompt_length = len(self.tokens)
        self.tiers = {name: TierState(hasher) for name, hasher in hashers.items()}
        self.paused = False
        self.first_admission = True
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.draft_window = FIRST_DRAFT_WINDOW
        """Drafts of the next round of speculation."""
        self.round_accepted = 0
        """Drafts accepted so far in the current round."""
        self.round_left: int | None = None
        """Draft positions left in the current round of sampled speculation; None between rounds."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def answering(self) -> str:
        """The tier whose tokens are emitted."""
        return self.request.plan.tier

    @property
    def drafting(self) -> str | None:
        """The drafting tier in mode `speculate`."""
        return self.request.plan.draft if self.request.plan.mode == "speculate" else None

    @property
    def greedy(self) -> bool:
        return self.request.sampling.temperature == 0.0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.sampling.max_tokens - self.num_generated

    def pending(self, tier: str) -> int:
        """Tokens whose K/V this tier has not computed yet."""
        return len(self.tokens) - self.tiers[tier].num_computed_tokens

    def commit(self, tier: str, computed: int, cache: PrefixCache) -> None:
        """After a forward pass: the K/V of `tokens[:computed]` is right; index the blocks that became full.

        `computed` may be less than was computed: that is how rejected drafts are rolled back.
        """
        state = self.tiers[tier]
        state.num_computed_tokens = min(computed, len(self.tokens))
        if not self.request.plan.use_prefix_cache:
            return
        size = cache.pool.block_size
        while (len(state.block_hashes) + 1) * size <= state.num_computed_tokens:
            index = len(state.block_hashes)
            own = self.tokens[index * size : (index + 1) * size]
            parent = state.block_hashes[-1] if index else ROOT
            digest = state.hasher.block_hash(parent, own)
            cache.insert(state.block_table[index], digest, parent, own)
            state.block_hashes.append(digest)


def block_tables(sequences: Iterable[Sequence], tier: str) -> "list[array[int]]":
    """The tier's tables of these sequences, for the pool's invariant check."""
    return [s.tiers[tier].block_table for s in sequences if tier in s.tiers]
