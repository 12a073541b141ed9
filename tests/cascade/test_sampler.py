"""The sampler: order of settings, ties, distributions, random numbers, log-probabilities."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade import sampler
from cascade.errors import EngineFailedError
from cascade.protocol import SamplingParams
from cascade.sampler import SequenceHistory

NONE = SequenceHistory()


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def probabilities(logits: np.ndarray, history: SequenceHistory = NONE, **settings: Any) -> np.ndarray:
    return sampler.distribution(logits, SamplingParams(**settings), history)


def history(prompt: list[int], answer: list[int]) -> SequenceHistory:
    seen = SequenceHistory(prompt)
    for token in answer:
        seen.append(token)
    return seen


rows = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=300).map(lambda values: np.array(values, np.float32))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sampler.greedy(row(1, 5, 5, 2), SamplingParams(temperature=0), NONE) == 1


def test_temperature_zero_is_one_hot() -> None:
    assert probabilities(row(1, 5, 5, 2), temperature=0).tolist() == [0, 1, 0, 0]


def test_plain_distribution_is_softmax() -> None:
    logits = row(0, 1, 2)
    np.testing.assert_allclose(probabilities(logits), np.exp(logits) / np.exp(logits).sum(), rtol=1e-6)


def test_temperature_divides_logits() -> None:
    np.testing.assert_allclose(probabilities(row(0, 1, 2), temperature=0.5), probabilities(row(0, 2, 4)), rtol=1e-6)


def test_top_k_keeps_k_and_the_lowest_ids_at_the_border() -> None:
    assert np.flatnonzero(probabilities(row(1, 3, 3, 3, 0), top_k=2)).tolist() == [1, 2]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    assert np.flatnonzero(probabilities(logits, top_p=0.7)).tolist() == [0, 1]


def test_top_p_counts_mass_after_top_k() -> None:
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    assert np.flatnonzero(probabilities(logits, top_k=2, top_p=0.5)).tolist() == [0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = np.log(row(0.6, 0.25, 0.1, 0.05))
    assert np.flatnonzero(probabilities(logits, min_p=0.3)).tolist() == [0, 1]


def test_logit_bias_is_added() -> None:
    assert sampler.greedy(row(1, 2, 3), SamplingParams(logit_bias={0: 5.0}), NONE) == 0


def test_repetition_penalty_looks_at_prompt_and_answer_and_shrinks_towards_less_likely() -> None:
    shaped = sampler.shaped(row(2, -2, 2), SamplingParams(repetition_penalty=2.0), history([0], [1]))
    assert shaped.tolist() == [1, -4, 2]


def test_presence_and_frequency_penalties_look_at_the_answer_only() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    assert sampler.shaped(row(0, 0, 0), params, history([0], [1, 1])).tolist() == [0, -2, 0]


def test_shaping_leaves_the_given_row_alone() -> None:
    logits = row(1, 2, 3)
    sampler.shaped(logits, SamplingParams(logit_bias={0: 5.0}), NONE)
    assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_fails_this_request(bad: float) -> None:
    with pytest.raises(EngineFailedError, match="finite"):
        probabilities(row(0, bad, 1))


@given(
    rows,
    st.floats(0.05, 3),
    st.integers(0, 40),
    st.floats(0.05, 1),
    st.floats(0, 1),
)
def test_every_setting_leaves_a_distribution_over_the_likeliest(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    probs = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert probs.sum(dtype=np.float64) == pytest.approx(1, abs=1e-5)
    kept = probs > 0
    if top_k:
        assert kept.sum() <= top_k
    plain = probabilities(logits, temperature=temperature)
    assert plain[kept].min() >= plain[~kept].max(initial=0)
    assert plain[probs.argmax()] == plain.max()


@given(st.integers(2, 5000), st.floats(0.1, 0.999), st.integers(0, 2**32 - 1))
def test_top_p_agrees_with_a_full_sort(size: int, top_p: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 0.1, size).astype(np.float32)
    plain = probabilities(logits)
    order = np.argsort(-plain, kind="stable")
    mass = np.cumsum(plain[order], dtype=np.float64)
    expected = int(np.searchsorted(mass, top_p)) + 1
    assert abs(int((probabilities(logits, top_p=top_p) > 0).sum()) - expected) <= 1


@given(st.integers(300, 6000), st.integers(1, 200), st.floats(0.05, 0.999), st.integers(0, 2**32 - 1))
def test_top_k_and_top_p_agree_with_a_full_sort(size: int, top_k: int, top_p: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, size).round(1).astype(np.float32)  # rounded: many ties
    order = np.argsort(-logits, kind="stable")[:top_k]
    mass = np.cumsum(np.exp(logits[order] - logits.max()), dtype=np.float64)
    expected = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    assert np.flatnonzero(probabilities(logits, top_k=top_k, top_p=top_p)).tolist() == sorted(expected.tolist())


def test_top_p_of_equals_keeps_the_lowest_ids() -> None:
    kept = np.flatnonzero(probabilities(np.zeros(1000, np.float32), top_p=0.25))
    assert kept.tolist() == list(range(250))


@pytest.mark.parametrize("temperature", [1e-46, 1e-40, 1e-6])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    assert probabilities(row(1, 5, 2), temperature=temperature).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1e-46}, {"logit_bias": {0: float("nan")}}, {"logit_bias": {0: float("inf")}}]
)
def test_settings_that_break_the_row_fail_this_request(settings: dict[str, Any]) -> None:
    with pytest.raises(EngineFailedError, match="bias and penalties"):
        probabilities(row(1, 2, 3), history([0], []), **settings)


def test_impossible_tokens_are_not_listed_as_likeliest() -> None:
    _, top = sampler.logprobs(row(0, -np.inf, 1), SamplingParams(), NONE, 2, 3)
    assert top is not None
    assert [t.id for t in top] == [2, 0]


@given(
    st.integers(1, 5000),
    st.floats(0, 1),
    st.sampled_from([0.0, 1e-300, 0.5, np.nextafter(1, 0)]) | st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**32 - 1),
)
def test_a_sample_is_where_the_running_sum_passes_the_number(size: int, kept: float, number: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    probs = np.where(generator.random(size) < kept, generator.random(size), 0).astype(np.float32)
    probs[generator.integers(size)] = 0.5
    cumulative = np.cumsum(probs, dtype=np.float64)
    chosen = sampler.sample(probs, number)
    assert probs[chosen] > 0
    assert cumulative[chosen] >= number * cumulative[-1] * (1 - 1e-12)
    assert cumulative[chosen] - probs[chosen] <= number * cumulative[-1] * (1 + 1e-12)


@given(rows, st.floats(0, 1, exclude_max=True))
def test_a_sample_never_has_probability_zero(logits: np.ndarray, number: float) -> None:
    probs = probabilities(logits, top_k=3)
    assert probs[sampler.sample(probs, number)] > 0


def test_samples_follow_the_distribution() -> None:
    probs = row(0.1, 0, 0.6, 0.3)
    counts = np.bincount([sampler.sample(probs, sampler.uniform(7, i, 0)) for i in range(20_000)], minlength=4)
    expected = np.array([2000, 12000, 6000])
    assert counts[1] == 0
    statistic = (((counts[[0, 2, 3]] - expected) ** 2) / expected).sum()
    assert statistic < 18.4  # chi-squared, 2 degrees of freedom, p = 0.0001


@given(st.integers(), st.integers(0, 2**40), st.integers(0, 10))
def test_uniforms_are_repeatable_and_in_range(seed: int, position: int, stream: int) -> None:
    number = sampler.uniform(seed, position, stream)
    assert 0 <= number < 1
    assert number == sampler.uniform(seed, position, stream)


def test_seed_position_and_stream_each_change_the_number() -> None:
    numbers = {sampler.uniform(s, p, t) for s in range(10) for p in range(10) for t in range(4)}
    assert len(numbers) == 400


def test_logprobs_are_log_softmax_in_descending_order() -> None:
    logits = row(0, 2, 1, 2)
    own, top = sampler.logprobs(logits, SamplingParams(), NONE, 2, 3)
    expected = logits - np.log(np.exp(logits).sum())
    assert own == pytest.approx(expected[2], abs=1e-6)
    assert top is not None
    assert [t.id for t in top] == [1, 3, 2]
    assert [t.logprob for t in top] == pytest.approx(expected[[1, 3, 2]], abs=1e-6)


def test_logprobs_without_alternatives() -> None:
    assert sampler.logprobs(row(0, 1), SamplingParams(), NONE, 0, 0)[1] is None
