"""Lossless speculation: which drafts the verifier keeps, and how far to draft. Pure functions.

q is the drafter's distribution and p the verifier's, both after the request's own sampling settings. A draft
x ~ q is accepted with probability min(1, p(x)/q(x)); else the token is drawn from norm(max(0, p - q)). The
emitted token is then distributed exactly as p (Leviathan et al. 2023). When a whole round is accepted, one
bonus token is drawn from p. Greedy requests compare ids: the answer is the verifier's argmax, always.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cascade.protocol import TokenFate
from cascade.sampler import Probabilities, sample

MAX_VERIFY_ROWS = 64
"""Most rows that one step verifies over all sequences: the pending token and the drafts of each."""


@dataclass(slots=True, frozen=True)
class Verdict:
    """What one verify emits: the accepted drafts, then perhaps a corrected or a bonus token."""

    tokens: list[int]
    fates: list[TokenFate]
    accepted: int
    rejected: bool
    """True when a draft was refused (the last token is its correction)."""


def judge(draft: int, q: Probabilities, p: Probabilities, accept_uniform: float, residual_uniform: float) -> int:
    """The token at a drafted position: `draft` when it is accepted, else a draw from norm(max(0, p - q))."""
    if accept_uniform * float(q[draft]) < float(p[draft]):
        return draft
    residual = np.maximum(p.astype(np.float64) - q, 0.0).astype(np.float32)
    return sample(residual if residual.any() else p, residual_uniform)  # p and q may be equal up to rounding


def verify_sampled(
    drafts: Sequence[int],
    q: Sequence[Probabilities],
    p: Callable[[int], Probabilities],
    uniforms: Callable[[int], tuple[float, float]],
    bonus: Callable[[Probabilities], int] | None,
) -> Verdict:
    """Judge `drafts` in order up to the first rejection.

    `p(i)` is the verifier's distribution at draft i (`p(len(drafts))` at the bonus position), asked only where
    needed; `uniforms(i)` the pair (accept, residual) of that position; `bonus` draws from the last p, None when
    the round goes on.
    """
    for index, draft in enumerate(drafts):
        token = judge(draft, q[index], p(index), *uniforms(index))
        if token != draft:
            return _verdict([*drafts[:index], token], index, "corrected")
    if bonus is None:
        return _verdict(list(drafts), len(drafts), None)
    return _verdict([*drafts, bonus(p(len(drafts)))], len(drafts), "bonus")


def verify_greedy(drafts: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """Keep the drafts that equal the verifier's own choice `choose(i)`; its choice after them comes free."""
    for index, draft in enumerate(drafts):
        token = choose(index)
        if token != draft:
            return _verdict([*drafts[:index], token], index, "corrected")
    return _verdict([*drafts, choose(len(drafts))], len(drafts), "bonus")


def _verdict(tokens: list[int], accepted: int, last: TokenFate | None) -> Verdict:
    fates: list[TokenFate] = ["accepted"] * accepted
    if last is not None:
        fates.append(last)
    return Verdict(tokens, fates, accepted, last == "corrected")


class Drafted(Protocol):
    """The part of a sequence that drafting follows."""

    draft_window: int
    round_accepted: int

    @property
    def remaining(self) -> int: ...


class AdaptiveDraftLength:
    """How far to draft: follows what the sequence's own rounds accepted, and gives way to load.

    A round that is accepted whole doubles the sequence's window, up to `draft_tokens`; a refused draft sets it to
    one more than that round accepted. The window follows from the sequence alone, as sampled speculation needs for
    a seed to give one stream; load only cuts how many of a round's drafts one step verifies.
    """

    def __init__(self, draft_tokens: int, max_verify_rows: int = MAX_VERIFY_ROWS) -> None:
        self._draft_tokens = draft_tokens
        self._max_verify_rows = max_verify_rows

    def share(self, num_speculating: int) -> int:
        """Most drafts per sequence this step."""
        if num_speculating == 0:
            return 0
        return max(0, min(self._draft_tokens, self._max_verify_rows // num_speculating - 1))

    def round_length(self, sequence: Drafted) -> int:
        """Draft positions of a round that starts now: the bonus token must still fit."""
        return max(0, min(sequence.draft_window, self._draft_tokens, sequence.remaining - 1))

    def after_verify(self, sequence: Drafted, accepted: int, *, refused: bool, round_over: bool) -> None:
        """Take in one verify of the sequence; a sampled round may take several."""
        sequence.round_accepted += accepted
        if not round_over:
            return
        window = sequence.round_accepted + 1 if refused else 2 * sequence.draft_window
        sequence.draft_window = max(1, min(window, self._draft_tokens))
        sequence.round_accepted = 0
