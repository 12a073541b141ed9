"""The bits of a row depend on its query and the K/V it reads, and on nothing else of the step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade import ops
from tests.cascade.ops.attention_model import KV_DTYPES, Array, Attention, Geometry
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


def bits(array: Array) -> Array:
    return array.view(np.uint32)


def sequences_of(
    geometry: Geometry, lengths: list[int], seed: int = 0, block_size: int = 16
) -> tuple[Pool, list[Tokens]]:
    rng = np.random.default_rng(seed)
    pool = make_pool(geometry, lengths, rng, block_size)
    return pool, [make_tokens(geometry, length, rng) for length in lengths]


def in_chunks(attention: Attention, pool: Pool, tokens: list[Tokens], sequence: int, ends: list[int]) -> Array:
    """Rows of a whole sequence, run alone in chunks that end at `ends`."""
    rows = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        rows.append(run(attention, step_inputs(pool, tokens, [Part(sequence, start, end - start)])))
    return np.concatenate(rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_one_chunk_or_many(isa: str, kv_dtype: str) -> None:
    geometry = Geometry(heads=6, kv_heads=2, kv_dtype=kv_dtype)
    attention = Attention(geometry, optional_names(geometry), isa=isa)
    whole = in_chunks(attention, *sequences_of(geometry, [150]), 0, [150])
    for ends in ([1, 2, 40, 149, 150], [32, 64, 150], [140, *range(141, 151)]):
        np.testing.assert_array_equal(bits(in_chunks(attention, *sequences_of(geometry, [150]), 0, ends)), bits(whole))


@pytest.mark.parametrize("threads", [1, 2])
def test_decode_across_partitions_gives_the_bits_of_prefill(threads: int) -> None:
    """Prefill walks whole tiles, the decode of so long a context one task a partition."""
    geometry = Geometry(heads=7, kv_heads=1)
    whole = in_chunks(Attention(geometry), *sequences_of(geometry, [1100]), 0, [1100])
    chunked = Attention(geometry, threads=threads)
    ends = [500, 511, 512, 513, 1023, *range(1024, 1030), 1098, 1099, 1100]
    np.testing.assert_array_equal(bits(in_chunks(chunked, *sequences_of(geometry, [1100]), 0, ends)), bits(whole))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_alone_or_in_a_batch(isa: str, kv_dtype: str) -> None:
    geometry = Geometry(heads=4, kv_heads=2, kv_dtype=kv_dtype, window=70, sinks=2)
    attention = Attention(geometry, optional_names(geometry), isa=isa)
    lengths = [90, 1, 33, 64, 17]
    pool, tokens = sequences_of(geometry, lengths)
    together = run(attention, step_inputs(pool, tokens, [Part(i, 0, n) for i, n in enumerate(lengths)]))
    pool, tokens = sequences_of(geometry, lengths)
    alone = [run(attention, step_inputs(pool, tokens, [Part(i, 0, n)])) for i, n in enumerate(lengths)]
    np.testing.assert_array_equal(bits(together), bits(np.concatenate(alone)))


def test_order_of_the_batch_does_not_matter() -> None:
    geometry = Geometry()
    attention = Attention(geometry)
    lengths = [40, 700, 5]
    parts = [Part(0, 0, 40), Part(1, 0, 700), Part(2, 0, 5)]
    pool, tokens = sequences_of(geometry, lengths)
    forward = run(attention, step_inputs(pool, tokens, parts))
    pool, tokens = sequences_of(geometry, lengths)
    backward = run(attention, step_inputs(pool, tokens, parts[::-1]))
    reordered = np.concatenate([backward[705:], backward[5:705], backward[:5]])
    np.testing.assert_array_equal(bits(forward), bits(reordered))


@pytest.mark.parametrize("threads", [2, 3])
def test_one_thread_or_several(threads: int) -> None:
    geometry = Geometry(heads=6, kv_heads=2)
    lengths = [600, 3, 90]
    results = []
    for n in (1, threads):
        pool, tokens = sequences_of(geometry, lengths)
        results.append(
            run(
                Attention(geometry, threads=n),
                step_inputs(pool, tokens, [Part(i, 0, k) for i, k in enumerate(lengths)]),
            )
        )
    np.testing.assert_array_equal(bits(results[0]), bits(results[1]))


@pytest.mark.parametrize("block_size", [1, 5, 32, 64])
def test_block_size_and_placement_do_not_matter(block_size: int) -> None:
    geometry = Geometry()
    attention = Attention(geometry)
    expected = in_chunks(attention, *sequences_of(geometry, [100]), 0, [100])
    _, tokens = sequences_of(geometry, [100])
    pool = make_pool(geometry, [100], np.random.default_rng(9), block_size)
    np.testing.assert_array_equal(bits(in_chunks(attention, pool, tokens, 0, [60, 100])), bits(expected))


@pytest.mark.parametrize("past", [0, 27, 31, 32, 509, 600])
def test_a_causal_tree_mask_changes_no_bit(past: int) -> None:
    geometry = Geometry(heads=6, kv_heads=2, window=40, sinks=4)
    results = []
    for mask in (None, np.tril(np.ones((8, 8), np.uint8))):
        pool, tokens = sequences_of(geometry, [past + 8])
        extra = {} if mask is None else {"tree_mask": mask}
        pool.fill(0, past, np.random.default_rng(1))
        arrays = step_inputs(pool, tokens, [Part(0, past, 8)], extra)
        results.append(run(Attention(geometry, frozenset(extra)), arrays))
    np.testing.assert_array_equal(bits(results[0]), bits(results[1]))


@pytest.mark.parametrize("past", [0, 29, 30, 510, 511])
def test_a_branch_of_a_tree_has_the_bits_of_plain_decoding(past: int) -> None:
    """Verifying a tree of drafts gives each branch the logits that decoding it alone would."""
    geometry = Geometry(heads=6, kv_heads=2)
    branch = [0, 2, 4]
    mask = np.zeros((5, 5), np.uint8)
    for row, seen in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])):
        mask[row, seen] = 1
    pool, tokens = sequences_of(geometry, [past + 5])
    pool.fill(0, past, np.random.default_rng(1))
    tree = run(
        Attention(geometry, frozenset({"tree_mask"})),
        step_inputs(pool, tokens, [Part(0, past, 5)], {"tree_mask": mask}),
    )
    pool, _ = sequences_of(geometry, [past + 5])
    pool.fill(0, past, np.random.default_rng(1))
    order = np.array([*range(past), *(past + j for j in branch)])
    chain = [Tokens(tokens[0].qkv[order], tokens[0].rope[order])]
    plain = run(Attention(geometry), step_inputs(pool, chain, [Part(0, past, 3)]))
    np.testing.assert_array_equal(bits(tree[branch]), bits(plain))


def test_what_hidden_slots_hold_changes_no_bit() -> None:
    """A later token's NaN in the same span and tile stays out of earlier rows."""
    geometry = Geometry()
    attention = Attention(geometry)
    pool, tokens = sequences_of(geometry, [40])
    clean = run(attention, step_inputs(pool, tokens, [Part(0, 0, 40)]))
    pool, tokens = sequences_of(geometry, [40])
    tokens[0].qkv[20:] = np.nan
    spoiled = run(attention, step_inputs(pool, tokens, [Part(0, 0, 40)]))
    np.testing.assert_array_equal(bits(spoiled[:20]), bits(clean[:20]))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_schedule(data: st.DataObject) -> None:
    """Any interleaving of chunks of several sequences gives the rows of each run alone in one step."""
    group = data.draw(st.integers(1, 8), label="group")
    geometry = Geometry(heads=group, kv_heads=1, head_dim=8 * data.draw(st.integers(1, 9), label="head_dim / 8"))
    lengths = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=4), label="lengths")
    attention = Attention(geometry, threads=2)
    pool, tokens = sequences_of(geometry, lengths, seed=3)
    expected = [in_chunks(attention, pool, tokens, i, [n]) for i, n in enumerate(lengths)]
    pool, tokens = sequences_of(geometry, lengths, seed=3)
    done = [0] * len(lengths)
    while done != lengths:
        unfinished = [i for i, n in enumerate(lengths) if done[i] < n]
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True), label="step")
        counts = [data.draw(st.integers(1, lengths[i] - done[i]), label="count") for i in chosen]
        out = run(
            attention, step_inputs(pool, tokens, [Part(i, done[i], n) for i, n in zip(chosen, counts, strict=True)])
        )
        for i, n in zip(chosen, counts, strict=True):
            np.testing.assert_array_equal(bits(out[:n]), bits(expected[i][done[i] : done[i] + n]))
            out = out[n:]
            done[i] += n
