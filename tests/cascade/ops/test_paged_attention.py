"""PagedAttention computes what FORMAT.md says, in every dtype and on every ISA, against a float64 reference."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade import ops
from tests.cascade.ops.attention_model import KV_DTYPES, Array, Attention, Geometry
from tests.cascade.ops.attention_reference import attend, new_rows, read, stored
from tests.cascade.ops.attention_steps import (
    Part,
    Pool,
    Tokens,
    make_pool,
    make_tokens,
    optional_names,
    run,
    step_inputs,
)

ISAS = [name for name in ops.available_isas() if name in ("portable", "avx2", "avx512vnni")]
"""AMX machines use the AVX-512 kernel."""
TOLERANCE = 3e-6
"""Of the largest output: float32 sums of a few hundred terms against float64 ones."""


def case(
    geometry: Geometry, lengths: list[tuple[int, int]], seed: int = 0, block_size: int = 16
) -> tuple[Pool, list[Tokens], list[Part]]:
    """Sequences of (tokens in the cache, new tokens): a filled pool, all tokens, and the parts of one step."""
    rng = np.random.default_rng(seed)
    pool = make_pool(geometry, [past + new for past, new in lengths], rng, block_size)
    tokens = [make_tokens(geometry, past + new, rng) for past, new in lengths]
    for sequence, (past, _) in enumerate(lengths):
        pool.fill(sequence, past, rng)
    return pool, tokens, [Part(i, past, new) for i, (past, new) in enumerate(lengths)]


def check(geometry: Geometry, arrays: dict[str, Array], isa: str | None = None, threads: int = 1) -> Array:
    """Run and compare with the reference over the K/V that the op left in the caches."""
    names = frozenset(arrays) & {"key_scale", "value_scale", "q_norm", "k_norm", "tree_mask"}
    out = run(Attention(geometry, names, isa=isa, threads=threads), arrays)
    expected = attend(geometry, arrays)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE * max(1.0, float(np.abs(expected).max(initial=0))))
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ragged_batch_with_past(isa: str, kv_dtype: str, head_dim: int) -> None:
    geometry = Geometry(heads=6, kv_heads=2, head_dim=head_dim, kv_dtype=kv_dtype)
    pool, tokens, parts = case(geometry, [(0, 37), (100, 1), (31, 2), (5, 40), (64, 1)])
    check(geometry, step_inputs(pool, tokens, parts), isa)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (14, 2), (12, 1), (71, 1), (130, 2)])
def test_every_grouping_of_heads(heads: int, kv_heads: int) -> None:
    geometry = Geometry(heads=heads, kv_heads=kv_heads, head_dim=32)
    pool, tokens, parts = case(geometry, [(40, 1), (0, 35)])
    check(geometry, step_inputs(pool, tokens, parts))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 72, 80, 96, 104, 256])
def test_every_head_dim(isa: str, kv_dtype: str, head_dim: int) -> None:
    geometry = Geometry(heads=2, kv_heads=1, head_dim=head_dim, kv_dtype=kv_dtype)
    pool, tokens, parts = case(geometry, [(50, 3)])
    arrays = step_inputs(pool, tokens, parts)
    if kv_dtype != "int8":
        arrays |= {"q_norm": np.full(head_dim, 1.5, np.float32), "k_norm": np.full(head_dim, 0.5, np.float32)}
    check(geometry, arrays, isa)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("norms", [(), ("q_norm",), ("k_norm",), ("q_norm", "k_norm")], ids="+".join)
def test_norms_and_rope(interleaved: bool, norms: tuple[str, ...]) -> None:
    geometry = Geometry(rope_interleaved=interleaved, epsilon=1e-3)
    pool, tokens, parts = case(geometry, [(20, 5), (0, 18)])
    gammas = np.random.default_rng(1).uniform(0.5, 2, (len(norms), 64)).astype(np.float32)
    arrays = step_inputs(pool, tokens, parts, dict(zip(norms, gammas, strict=True)))
    check(geometry, arrays)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_keys_and_values_reach_their_slots(isa: str, kv_dtype: str, interleaved: bool) -> None:
    geometry = Geometry(kv_dtype=kv_dtype, rope_interleaved=interleaved)
    pool, tokens, parts = case(geometry, [(0, 40)])
    arrays = step_inputs(pool, tokens, parts, {"k_norm": np.full(64, 1.25, np.float32)})
    run(Attention(geometry, optional_names(geometry, "k_norm"), isa=isa), arrays)
    _, keys, values = new_rows(geometry, arrays)
    slots = pool.slots(0, 0, 40)
    # Half a step of the dtype, of the row's largest for int8.
    step = {"float16": 2**-11, "bfloat16": 2**-8, "int8": 0.5 / 127}[kv_dtype] * 1.001
    for name, expected in (("key", keys), ("value", values)):
        got = read(arrays[f"{name}_cache"], arrays.get(f"{name}_scale")).reshape(-1, 2, 64)[slots]
        largest = np.abs(expected).max(axis=-1, keepdims=True) if kv_dtype == "int8" else np.abs(expected)
        assert (np.abs(got - expected) <= step * largest + 1e-6).all()
        if kv_dtype == "int8":
            scale = arrays[f"{name}_scale"].reshape(-1, 2)[slots]
            np.testing.assert_allclose(scale, np.abs(expected).max(axis=-1) / 127, rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_values_are_rounded_to_nearest_even(kv_dtype: str) -> None:
    """Values go in as they are, so the cache's bits are known exactly."""
    geometry = Geometry(kv_dtype=kv_dtype)
    pool, tokens, parts = case(geometry, [(0, 33)])
    arrays = step_inputs(pool, tokens, parts)
    run(Attention(geometry, optional_names(geometry)), arrays)
    values = tokens[0].qkv[:, -128:].reshape(33, 2, 64)
    expected, _ = stored(values, kv_dtype)
    got = arrays["value_cache"].reshape(-1, 2, 64)[pool.slots(0, 0, 33)]
    np.testing.assert_array_equal(got, expected)


def test_a_row_of_zeros_in_int8() -> None:
    geometry = Geometry(kv_dtype="int8")
    pool, tokens, parts = case(geometry, [(0, 1)])
    tokens[0].qkv[:] = 0
    arrays = step_inputs(pool, tokens, parts)
    assert not run(Attention(geometry, optional_names(geometry)), arrays).any()
    assert not arrays["value_scale"].reshape(-1, 2)[pool.slots(0, 0, 1)].any()


def test_slot_minus_one_writes_nothing_and_reads_what_is_there() -> None:
    geometry = Geometry()
    pool, tokens, parts = case(geometry, [(20, 2)])
    pool.fill(0, 22, np.random.default_rng(5))
    before = {name: array.copy() for name, array in pool.arrays.items()}
    arrays = step_inputs(pool, tokens, parts)
    arrays["slot_mapping"][:] = -1
    check(geometry, arrays)
    for name, array in before.items():
        np.testing.assert_array_equal(pool.arrays[name].view(np.uint16), array.view(np.uint16))


def test_only_the_named_slots_are_written() -> None:
    geometry = Geometry()
    pool, tokens, parts = case(geometry, [(20, 2), (3, 1)])
    before = pool.arrays["key_cache"].view(np.uint16).reshape(-1, 2, 64).copy()
    arrays = step_inputs(pool, tokens, parts)
    run(Attention(geometry), arrays)
    changed = (pool.arrays["key_cache"].view(np.uint16).reshape(-1, 2, 64) != before).any(axis=(1, 2))
    assert set(np.flatnonzero(changed)) == set(arrays["slot_mapping"].tolist())


@pytest.mark.parametrize("window", [1, 7, 32, 40, 600, 2**40])
@pytest.mark.parametrize("sinks", [0, 1, 4, 33, 2**40])
def test_window_and_sinks(window: int, sinks: int) -> None:
    geometry = Geometry(heads=2, kv_heads=1, window=window, sinks=sinks)
    pool, tokens, parts = case(geometry, [(0, 70), (530, 1), (1200, 3)])
    check(geometry, step_inputs(pool, tokens, parts))


def test_a_window_reads_nothing_outside() -> None:
    """Slots outside hold NaN, which would spoil every row that read them."""
    geometry = Geometry(window=50, sinks=3)
    pool, tokens, parts = case(geometry, [(1500, 40)])
    hidden = pool.slots(0, 3, 1451 - 3)
    for name in ("key_cache", "value_cache"):
        pool.arrays[name].reshape(-1, 2, 64)[hidden] = np.nan
    assert np.isfinite(run(Attention(geometry), step_inputs(pool, tokens, parts))).all()


TREE = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], np.uint8)
"""Two branches of three tokens: 0-1-3 and 0-2-4."""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("past", [0, 30, 31, 64, 510, 600])
@pytest.mark.parametrize("window", [0, 3, 20])
def test_tree_mask(isa: str, past: int, window: int) -> None:
    geometry = Geometry(heads=6, kv_heads=2, window=window, sinks=window and 1)
    pool, tokens, parts = case(geometry, [(past, 5), (17, 2)])
    mask = np.zeros((7, 6), np.uint8)
    mask[:5, :5] = TREE
    mask[5:, :2] = [[1, 0], [1, 255]]
    check(geometry, step_inputs(pool, tokens, parts, {"tree_mask": mask}), isa)


def test_a_wide_tree_mask_ignores_columns_past_the_new_tokens() -> None:
    geometry = Geometry()
    pool, tokens, parts = case(geometry, [(10, 3)])
    mask = np.ones((3, 40), np.uint8)
    check(geometry, step_inputs(pool, tokens, parts, {"tree_mask": mask}))


def test_a_token_that_a_tree_mask_lets_see_nothing_gives_zeros() -> None:
    geometry = Geometry()
    pool, tokens, parts = case(geometry, [(0, 3)])
    mask = np.tril(np.ones((3, 3), np.uint8))
    mask[1] = 0
    out = check(geometry, step_inputs(pool, tokens, parts, {"tree_mask": mask}))
    assert not out[1].any() and out[0].any() and out[2].any()


@pytest.mark.parametrize("threads", [1, 2])
def test_long_contexts_over_several_partitions(threads: int) -> None:
    geometry = Geometry(heads=6, kv_heads=2)
    pool, tokens, parts = case(geometry, [(1535, 2), (512, 1), (511, 1), (1023, 30), (0, 1)])
    check(geometry, step_inputs(pool, tokens, parts), threads=threads)


def test_large_scores_do_not_overflow() -> None:
    geometry = Geometry(scale=50.0)
    pool, tokens, parts = case(geometry, [(600, 4)])
    arrays = step_inputs(pool, tokens, parts)
    out = run(Attention(geometry), arrays)
    np.testing.assert_allclose(out, attend(geometry, arrays), rtol=0, atol=2e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_values_that_are_not_finite_reach_the_rows_that_see_them_and_no_others(
    isa: str, kv_dtype: str, bad: float, part: str
) -> None:
    geometry = Geometry(heads=2, kv_heads=1, kv_dtype=kv_dtype)
    pool, tokens, parts = case(geometry, [(0, 40)])
    tokens[0].qkv[25, (2 if part == "key" else 3) * 64 + 7] = bad
    out = run(Attention(geometry, optional_names(geometry), isa=isa), step_inputs(pool, tokens, parts))
    finite = np.isfinite(out.sum(axis=1))
    assert finite[:25].all()
    if part == "key" and not np.isnan(bad) and kv_dtype != "int8":
        assert not finite[25:].all()  # an infinite key may score -inf, whose weight is 0
    else:
        assert not finite[25:].any()


def test_no_tokens() -> None:
    geometry = Geometry()
    pool, tokens, _ = case(geometry, [(20, 2)])
    arrays = step_inputs(pool, tokens, [Part(0, 20, 0)])
    assert run(Attention(geometry), arrays).shape == (0, 256)


def test_sequences_without_new_tokens_are_skipped() -> None:
    geometry = Geometry()
    pool, tokens, parts = case(geometry, [(20, 2), (9, 1)])
    arrays = step_inputs(pool, tokens, [Part(0, 20, 0), parts[0], Part(1, 9, 0), parts[1]])
    arrays["block_table"][[0, 2]] = -1
    check(geometry, arrays)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Random geometry, batch, block size and block table."""
    kv_heads = data.draw(st.integers(1, 3), label="kv_heads")
    geometry = Geometry(
        heads=kv_heads * data.draw(st.integers(1, 9), label="group"),
        kv_heads=kv_heads,
        head_dim=8 * data.draw(st.integers(1, 17), label="head_dim / 8"),
        kv_dtype=data.draw(st.sampled_from(sorted(KV_DTYPES)), label="kv_dtype"),
        rope_interleaved=data.draw(st.booleans(), label="interleaved"),
        window=data.draw(st.sampled_from([0, 0, 5, 33, 100]), label="window"),
        sinks=data.draw(st.sampled_from([0, 4]), label="sinks"),
    )
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=5), label="lengths"
    )
    block_size = data.draw(st.sampled_from([1, 3, 16, 32, 64]), label="block_size")
    seed = data.draw(st.integers(0, 2**16), label="seed")
    pool, tokens, parts = case(geometry, lengths, seed, block_size)
    extra: dict[str, Array] = {}
    if data.draw(st.booleans(), label="tree"):
        total, widest = sum(new for _, new in lengths), max(new for _, new in lengths)
        extra["tree_mask"] = (np.random.default_rng(seed).random((total, widest)) < 0.5).astype(np.uint8)
    if data.draw(st.booleans(), label="norms"):
        extra |= {name: np.linspace(0.5, 2, geometry.head_dim, dtype=np.float32) for name in ("q_norm", "k_norm")}
    isa = data.draw(st.sampled_from(ISAS), label="isa")
    check(geometry, step_inputs(pool, tokens, parts, extra), isa)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "portable"])
def test_isas_agree_bit_for_bit(isa: str, kv_dtype: str) -> None:
    """More than the contract asks for, and cheap: the same chains of fma everywhere."""
    for geometry in (
        Geometry(kv_dtype=kv_dtype),
        Geometry(heads=7, kv_heads=1, head_dim=40, kv_dtype=kv_dtype, window=300),
    ):
        results = []
        for name in ("portable", isa):
            pool, tokens, parts = case(geometry, [(0, 37), (600, 1), (31, 9)])
            names = optional_names(geometry, "q_norm")
            gamma = {"q_norm": np.linspace(0.5, 2, geometry.head_dim, dtype=np.float32)}
            arrays = step_inputs(pool, tokens, parts, gamma)
            results.append((run(Attention(replace(geometry), names, isa=name), arrays), arrays["key_cache"]))
        (portable, portable_cache), (other, other_cache) = results
        np.testing.assert_array_equal(other.view(np.uint32), portable.view(np.uint32))
        np.testing.assert_array_equal(other_cache.view(np.uint8), portable_cache.view(np.uint8))
