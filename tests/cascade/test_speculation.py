"""Speculation is lossless: whatever the drafter proposes, what is emitted has the verifier's distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cascade.sampler import sample
from cascade.speculation import AdaptiveDraftLength, judge, verify_greedy, verify_sampled

VOCAB = 6
CHI_SQUARED_999 = {2: 13.82, 5: 20.52, 35: 66.62}
"""Critical values at 0.999 by degrees of freedom."""


def random_distribution(rng: np.random.Generator, support: int = VOCAB) -> NDArray[np.float32]:
    probs = np.zeros(VOCAB, np.float32)
    chosen = rng.choice(VOCAB, support, replace=False)
    probs[chosen] = rng.dirichlet(np.ones(support)).astype(np.float32)
    return probs / probs.sum()


def chi_squared(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    used = expected > 0
    assert not counts[~used].any(), "a token of probability 0 was emitted"
    return float((((counts - expected)[used]) ** 2 / expected[used]).sum())


@pytest.mark.parametrize("seed", range(4))
def test_judged_token_is_distributed_as_p(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = random_distribution(rng), random_distribution(rng)
    count = 20_000
    u = rng.random((count, 3))
    tokens = [judge(sample(q, u[i, 0]), q, p, u[i, 1], u[i, 2]) for i in range(count)]
    assert chi_squared(np.bincount(tokens, minlength=VOCAB), p.astype(np.float64) * count) < CHI_SQUARED_999[VOCAB - 1]


def test_disjoint_supports_always_correct() -> None:
    p = np.array([0.5, 0.5, 0, 0], np.float32)
    q = np.array([0, 0, 0.5, 0.5], np.float32)
    assert {judge(2, q, p, a / 10, r / 10) for a in range(10) for r in range(10)} == {0, 1}


def test_acceptance_rate_is_one_minus_total_variation() -> None:
    rng = np.random.default_rng(7)
    p, q = random_distribution(rng), random_distribution(rng)
    count = 20_000
    u = rng.random((count, 3))
    accepted = sum(judge(x := sample(q, a), q, p, b, c) == x for a, b, c in u)
    expected = float(np.minimum(p, q).sum())
    assert abs(accepted / count - expected) < 4 * (0.25 / count) ** 0.5


def test_two_drafted_positions_have_the_joint_distribution_of_p() -> None:
    """The second position's p and q depend on the first token: rejections must not bias what follows."""
    rng = np.random.default_rng(3)
    p1, q1 = random_distribution(rng), random_distribution(rng)
    p2 = [random_distribution(rng) for _ in range(VOCAB)]
    q2 = [random_distribution(rng, 3) for _ in range(VOCAB)]
    count = 40_000
    pairs = np.zeros((VOCAB, VOCAB), np.int64)
    for u in rng.random((count, 8)):
        drafts = [sample(q1, u[0])]
        drafts.append(sample(q2[drafts[0]], u[1]))
        verdict = verify_sampled(
            drafts,
            [q1, q2[drafts[0]]],
            lambda i, d=drafts: p1 if i == 0 else p2[d[0]],  # type: ignore[misc]
            lambda i, u=u: (u[2 + i], u[4 + i]),  # type: ignore[misc]
            None,
        )
        first = verdict.tokens[0]
        second = verdict.tokens[1] if len(verdict.tokens) > 1 else sample(p2[first], u[6])
        pairs[first, second] += 1
    expected = p1[:, None].astype(np.float64) * np.stack(p2) * count
    assert chi_squared(pairs.ravel(), expected.ravel()) < CHI_SQUARED_999[VOCAB * VOCAB - 1]


def test_bonus_follows_a_fully_accepted_round() -> None:
    p = np.array([0, 1, 0], np.float32)
    verdict = verify_sampled([1, 1], [p, p], lambda i: p, lambda i: (0.5, 0.5), lambda p: sample(p, 0.5))
    assert (verdict.tokens, verdict.fates) == ([1, 1, 1], ["accepted", "accepted", "bonus"])
    assert not verdict.rejected


def test_nothing_after_a_rejection_is_asked_for() -> None:
    p, q = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    asked: list[int] = []

    def row(index: int) -> NDArray[np.float32]:
        asked.append(index)
        return p

    verdict = verify_sampled([1, 1, 1], [q, q, q], row, lambda i: (0.5, 0.5), lambda p: 0)
    assert (verdict.tokens, verdict.fates, verdict.rejected) == ([0], ["corrected"], True)
    assert asked == [0]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_greedy_emits_the_verifiers_choices(drafts: list[int], choices: list[int]) -> None:
    verdict = verify_greedy(drafts, lambda i: choices[i])
    assert verdict.tokens == choices[: len(verdict.tokens)]
    assert len(verdict.tokens) == verdict.accepted + 1
    assert verdict.rejected == (verdict.accepted < len(drafts))


@pytest.mark.parametrize(("sequences", "share"), [(1, 8), (7, 8), (8, 7), (16, 3), (32, 1), (33, 0), (64, 0)])
def test_verify_rows_are_bounded(sequences: int, share: int) -> None:
    assert AdaptiveDraftLength(8).share(sequences) == share


class _Windowed:
    """The part of a sequence that the draft length reads and writes."""

    draft_window = 4
    round_accepted = 0
    remaining = 1000


def test_a_round_accepted_whole_doubles_the_window_up_to_the_limit() -> None:
    lengths, sequence = AdaptiveDraftLength(8), _Windowed()
    for expected in (8, 8):
        lengths.after_verify(sequence, sequence.draft_window, refused=False, round_over=True)
        assert lengths.round_length(sequence) == expected


def test_a_refused_draft_shrinks_the_window_to_one_more_than_was_accepted() -> None:
    lengths, sequence = AdaptiveDraftLength(8), _Windowed()
    lengths.after_verify(sequence, 2, refused=True, round_over=True)
    assert lengths.round_length(sequence) == 3


def test_a_round_in_several_verifies_ends_like_one_in_a_single_verify() -> None:
    lengths, split, whole = AdaptiveDraftLength(8), _Windowed(), _Windowed()
    lengths.after_verify(split, 2, refused=False, round_over=False)
    lengths.after_verify(split, 1, refused=True, round_over=True)
    lengths.after_verify(whole, 3, refused=True, round_over=True)
    assert (split.draft_window, split.round_accepted) == (whole.draft_window, whole.round_accepted)
