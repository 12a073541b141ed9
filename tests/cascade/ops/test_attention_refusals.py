"""Bad inputs to PagedAttention: each an error that names the op, the input, the index, the value and the bound."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cascade.ops.attention_model import Array, Attention, Geometry
from tests.cascade.ops.attention_steps import Part, make_pool, make_tokens, optional_names, run, step_inputs

GEOMETRY = Geometry(heads=2, kv_heads=1, head_dim=16)
LENGTHS = ((20, 3), (0, 2))
BLOCKS = 6
"""Of 16 tokens: two and one for the sequences, three to spare."""


def good(geometry: Geometry = GEOMETRY) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    pool = make_pool(geometry, [past + new for past, new in LENGTHS], rng)
    tokens = [make_tokens(geometry, past + new, rng) for past, new in LENGTHS]
    pool.fill(0, 20, rng)
    return step_inputs(pool, tokens, [Part(i, past, new) for i, (past, new) in enumerate(LENGTHS)])


def put(name: str, index: Any, value: int) -> Callable[[dict[str, Array]], None]:
    def change(arrays: dict[str, Array]) -> None:
        arrays[name][index] = value

    return change


def reshape(name: str, change: Callable[[Array], Array]) -> Callable[[dict[str, Array]], None]:
    def apply(arrays: dict[str, Array]) -> None:
        arrays[name] = np.ascontiguousarray(change(arrays[name]))

    return apply


INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

BAD_VALUES = [
    (put("slot_mapping", 3, 96), "slot_mapping[3] = 96, expected -1 to 95"),
    (put("slot_mapping", 0, -2), "slot_mapping[0] = -2, expected -1 to 95"),
    (put("slot_mapping", 4, INT_MAX), "slot_mapping[4] = 2147483647, expected -1 to 95"),
    (put("slot_mapping", 4, INT_MIN), "slot_mapping[4] = -2147483648, expected -1 to 95"),
    (put("cu_seqlens", 0, 1), "cu_seqlens[0] = 1, expected 0"),
    (put("cu_seqlens", 0, -1), "cu_seqlens[0] = -1, expected 0"),
    (put("cu_seqlens", 2, 4), "cu_seqlens[2] = 4, expected the 5 tokens of qkv"),
    (put("cu_seqlens", 2, 6), "cu_seqlens[2] = 6, expected at most the 5 tokens of qkv"),
    (put("cu_seqlens", 1, 6), "cu_seqlens[1] = 6, expected at most the 5 tokens of qkv"),
    (put("cu_seqlens", 1, INT_MAX), "cu_seqlens[1] = 2147483647, expected at most the 5 tokens of qkv"),
    (put("cu_seqlens", 1, -1), "cu_seqlens[1] = -1, expected at least cu_seqlens[0] = 0"),
    (put("cu_seqlens", 2, 2), "cu_seqlens[2] = 2, expected at least cu_seqlens[1] = 3"),
    (put("past_lens", 1, -1), "past_lens[1] = -1, expected 0 or more"),
    (put("past_lens", 0, INT_MIN), "past_lens[0] = -2147483648, expected 0 or more"),
    (put("past_lens", 0, 30), "block_table has 2 columns, expected at least 3 for the 33 tokens of sequence 0"),
    (put("past_lens", 0, INT_MAX), "expected at least 134217729 for the 2147483650 tokens of sequence 0"),
    (put("past_lens", 1, 15), "block_table[1][1] = -1, expected 0 to 5"),
    (put("block_table", (0, 1), -1), "block_table[0][1] = -1, expected 0 to 5"),
    (put("block_table", (0, 0), 6), "block_table[0][0] = 6, expected 0 to 5"),
    (put("block_table", (1, 0), INT_MAX), "block_table[1][0] = 2147483647, expected 0 to 5"),
    (put("block_table", (0, 0), INT_MIN), "block_table[0][0] = -2147483648, expected 0 to 5"),
]

BAD_SHAPES = [
    (reshape("qkv", lambda x: x[:, :-1]), "input qkv has shape [5, 63], expected [any, 64]"),
    (reshape("qkv", lambda x: x[:4]), "input rope has shape [5, 16], expected [4, 16]"),
    (reshape("rope", lambda x: x[:, :8]), "input rope has shape [5, 8], expected [5, 16]"),
    (reshape("rope", lambda x: x[:1]), "input rope has shape [1, 16], expected [5, 16]"),
    (reshape("slot_mapping", lambda x: x[:-1]), "input slot_mapping has shape [4], expected [5]"),
    (reshape("cu_seqlens", lambda x: x[:-1]), "input cu_seqlens has shape [2], expected [3]"),
    (reshape("cu_seqlens", lambda x: x[:0]), "input cu_seqlens has shape [0], expected [3]"),
    (reshape("past_lens", lambda x: x[:-1]), "input cu_seqlens has shape [3], expected [2]"),
    (reshape("block_table", lambda x: x[:1]), "input block_table has shape [1, 2], expected [2, any]"),
    (reshape("block_table", lambda x: x[:, :0]), "block_table has 0 columns, expected at least 2"),
    (reshape("block_table", lambda x: x[:, :1]), "block_table has 1 columns, expected at least 2"),
    (reshape("key_cache", lambda x: x[..., :8]), "input key_cache has shape [6, 16, 1, 8], expected [any, any, 1, 16]"),
    (reshape("key_cache", lambda x: x.reshape(6, 8, 2, 16)), "input key_cache has shape [6, 8, 2, 16], expected"),
    (reshape("key_cache", lambda x: x[:5]), "input value_cache has shape [6, 16, 1, 16], expected [5, 16, 1, 16]"),
    (reshape("value_cache", lambda x: x[:, :8]), "input value_cache has shape [6, 8, 1, 16], expected [6, 16, 1, 16]"),
]


def assert_refused(attention: Attention, arrays: dict[str, Array], message: str) -> None:
    """The call fails with the message, and leaves the caches as they were."""
    before = {name: arrays[name].copy() for name in arrays if name.endswith(("_cache", "_scale"))}
    with pytest.raises(Exception, match=re.escape(message)) as error:
        run(attention, arrays)
    assert "Status Message: PagedAttention: " in str(error.value)
    for name, array in before.items():
        np.testing.assert_array_equal(arrays[name].view(np.uint8), array.view(np.uint8))


def test_the_good_step_is_good() -> None:
    assert np.isfinite(run(Attention(GEOMETRY), good())).all()


@pytest.mark.parametrize(("change", "message"), BAD_VALUES, ids=[message for _, message in BAD_VALUES])
def test_values(change: Callable[[dict[str, Array]], None], message: str) -> None:
    arrays = good()
    change(arrays)
    assert_refused(Attention(GEOMETRY), arrays, message)


@pytest.mark.parametrize(("change", "message"), BAD_SHAPES, ids=[message for _, message in BAD_SHAPES])
def test_shapes(change: Callable[[dict[str, Array]], None], message: str) -> None:
    arrays = good()
    change(arrays)
    assert_refused(Attention(GEOMETRY), arrays, message)


def test_a_session_works_after_a_refusal() -> None:
    attention, arrays = Attention(GEOMETRY), good()
    arrays["slot_mapping"][0] = 1000
    assert_refused(attention, arrays, "slot_mapping[0] = 1000")
    np.testing.assert_array_equal(run(attention, good()), run(Attention(GEOMETRY), good()))


def test_a_pool_without_blocks() -> None:
    arrays = good()
    for name in ("key_cache", "value_cache"):
        arrays[name] = arrays[name][:0]
    assert_refused(Attention(GEOMETRY), arrays, "expected -1 to -1")


def test_blocks_of_no_tokens() -> None:
    arrays = good()
    for name in ("key_cache", "value_cache"):
        arrays[name] = np.ascontiguousarray(arrays[name][:, :0])
    assert_refused(Attention(GEOMETRY), arrays, "input key_cache has block_size 0, expected 1 or more")


def test_tokens_without_a_sequence() -> None:
    arrays = good()
    arrays |= {
        "past_lens": np.zeros(0, np.int32),
        "cu_seqlens": np.zeros(1, np.int32),
        "block_table": np.zeros((0, 2), np.int32),
    }
    assert_refused(Attention(GEOMETRY), arrays, "cu_seqlens[0] = 0, expected the 5 tokens of qkv")


@pytest.mark.parametrize("missing", ["key_scale", "value_scale"])
def test_int8_without_scales(missing: str) -> None:
    geometry = Geometry(heads=2, kv_heads=1, head_dim=16, kv_dtype="int8")
    arrays = good(geometry)
    del arrays[missing]
    assert_refused(Attention(geometry, optional_names(geometry) - {missing}), arrays, f"input {missing} is missing")


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_int8_scales_of_another_shape(name: str) -> None:
    geometry = Geometry(heads=2, kv_heads=1, head_dim=16, kv_dtype="int8")
    arrays = good(geometry)
    arrays[name] = np.ascontiguousarray(arrays[name][:, :8])
    message = f"input {name} has shape [6, 8, 1], expected [6, 16, 1]"
    assert_refused(Attention(geometry, optional_names(geometry)), arrays, message)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norms_of_another_length(name: str) -> None:
    arrays = good() | {name: np.ones(8, np.float32)}
    assert_refused(Attention(GEOMETRY, frozenset({name})), arrays, f"input {name} has shape [8], expected [16]")


def test_a_tree_mask_too_narrow() -> None:
    arrays = good() | {"tree_mask": np.ones((5, 2), np.uint8)}
    message = "tree_mask has 2 columns, expected at least the 3 new tokens of sequence 0"
    assert_refused(Attention(GEOMETRY, frozenset({"tree_mask"})), arrays, message)


def test_a_tree_mask_with_too_few_rows() -> None:
    arrays = good() | {"tree_mask": np.ones((4, 3), np.uint8)}
    message = "input tree_mask has shape [4, 3], expected [5, any]"
    assert_refused(Attention(GEOMETRY, frozenset({"tree_mask"})), arrays, message)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.float64])
def test_caches_of_another_dtype(dtype: type[np.generic]) -> None:
    arrays = good()
    for name in ("key_cache", "value_cache"):
        arrays[name] = np.zeros(arrays[name].shape, dtype)
    attention = Attention(GEOMETRY, cache_types=(dtype, dtype))
    assert_refused(attention, arrays, "input key_cache is ")


def test_caches_of_two_dtypes() -> None:
    arrays = good()
    arrays["value_cache"] = np.zeros(arrays["value_cache"].shape, np.int8)
    attention = Attention(GEOMETRY, cache_types=(np.float16, np.int8))
    assert_refused(attention, arrays, "input value_cache is int8, expected float16")


BAD_ATTRIBUTES = [
    ({"heads": 0}, "attribute heads = 0, expected 1 to 4096"),
    ({"heads": -4}, "attribute heads = -4, expected 1 to 4096"),
    ({"heads": 2**40}, "attribute heads = 1099511627776, expected 1 to 4096"),
    ({"kv_heads": 0}, "attribute kv_heads = 0, expected a divisor of heads = 2"),
    ({"kv_heads": 3}, "attribute kv_heads = 3, expected a divisor of heads = 2"),
    ({"kv_heads": -1}, "attribute kv_heads = -1, expected a divisor of heads = 2"),
    ({"head_dim": 0}, "attribute head_dim = 0, expected a multiple of 8 up to 256"),
    ({"head_dim": 12}, "attribute head_dim = 12, expected a multiple of 8 up to 256"),
    ({"head_dim": 264}, "attribute head_dim = 264, expected a multiple of 8 up to 256"),
    ({"head_dim": -8}, "attribute head_dim = -8, expected a multiple of 8 up to 256"),
    ({"scale": float("nan")}, "attribute scale = nan, expected a finite number"),
    ({"scale": float("inf")}, "attribute scale = inf, expected a finite number"),
    ({"epsilon": -1e-6}, "attribute epsilon = -1e-06, expected a finite number, 0 or more"),
    ({"rope_interleaved": 2}, "attribute rope_interleaved = 2, expected 0 or 1"),
    ({"window": -1}, "attribute window = -1, expected 0 or more"),
    ({"sinks": -1}, "attribute sinks = -1, expected 0 or more"),
]


@pytest.mark.parametrize(("attributes", "message"), BAD_ATTRIBUTES, ids=[message for _, message in BAD_ATTRIBUTES])
def test_attributes(attributes: dict[str, int | float], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(f"PagedAttention: {message}")):
        Attention(GEOMETRY, attributes=attributes)


@pytest.mark.parametrize("name", sorted(GEOMETRY.attributes))
def test_a_missing_attribute(name: str) -> None:
    with pytest.raises(Exception, match=f"PagedAttention: attribute {name}"):
        Attention(GEOMETRY, without_attribute=name)
