"""Block decoding against the gguf package, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cascade.errors import CheckpointError
from exporters.checkpoint import Tensor, open_checkpoint
from exporters.gguf.blocks import FLOAT_TYPES, LAYOUTS, TWO_LEVEL_TYPES, decode_blocks, dequantize
from tests.exporters.gguf_writer import random_raw

QUANTIZED = sorted(set(LAYOUTS) - FLOAT_TYPES)


def reference(type_name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 [N, K] by the gguf package."""
    floats = {"F32": np.float32, "F16": np.float16}
    data = raw.view(floats[type_name]) if type_name in floats else raw
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    return values


@pytest.mark.parametrize("type_name", sorted(LAYOUTS))
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 4), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_dequantization_equals_the_reference_on_any_bytes(type_name: str, rows: int, blocks: int, seed: int) -> None:
    width = LAYOUTS[type_name].size * blocks
    raw = np.random.default_rng(seed).integers(0, 256, (rows, width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        mine = dequantize(type_name, raw)
    # NaN payloads and the sign of zero are no one's business: equality of numbers, NaN where NaN.
    np.testing.assert_array_equal(mine, reference(type_name, raw).reshape(mine.shape))


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_parts_have_the_documented_shapes(type_name: str) -> None:
    blocks = decode_blocks(type_name, random_raw(type_name, 3, 512, np.random.default_rng(1)))
    two_level = type_name in TWO_LEVEL_TYPES
    scales = (3, 2) if two_level else (3, 16)
    assert blocks.codes.shape == (3, 512)
    assert blocks.codes.dtype == np.uint8
    assert blocks.scale.shape == scales
    assert blocks.scale.dtype == np.float16
    assert (blocks.minimum is not None) == (type_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
    assert (blocks.offset == 0) == (blocks.minimum is not None)
    expected = {"Q4_K": (3, 2, 8), "Q5_K": (3, 2, 8), "Q6_K": (3, 2, 16)}.get(type_name)
    assert (None if blocks.sub_scale is None else blocks.sub_scale.shape) == expected
    assert (blocks.sub_minimum is not None) == (type_name in ("Q4_K", "Q5_K"))


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_codes_fit_their_bits(type_name: str) -> None:
    raw = np.random.default_rng(2).integers(0, 256, (2, LAYOUTS[type_name].size * 8), dtype=np.uint8)
    bits = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}[type_name]
    assert decode_blocks(type_name, raw).codes.max() == 2**bits - 1


@pytest.mark.parametrize("type_name", sorted(LAYOUTS))
def test_a_row_range_gives_the_same_rows(type_name: str) -> None:
    tensor = Tensor("t", (8, 256), type_name, random_raw(type_name, 8, 256, np.random.default_rng(3)))
    np.testing.assert_array_equal(tensor.dequantize(slice(2, 5)), tensor.dequantize()[2:5])


def test_a_scale_that_is_not_finite_is_refused_by_name() -> None:
    raw = random_raw("Q8_0", 2, 64, np.random.default_rng(4))
    raw[1, :2] = np.array([np.inf], "<f2").view(np.uint8)
    tensor = Tensor("layers.0.q", (2, 64), "Q8_0", raw)
    with pytest.raises(CheckpointError, match=r"layers\.0\.q"):
        tensor.blocks()
    with pytest.raises(CheckpointError, match=r"layers\.0\.q"), np.errstate(all="ignore"):
        tensor.dequantize()


def test_a_float_tensor_has_no_blocks() -> None:
    tensor = Tensor("t", (2, 4), "F32", random_raw("F32", 2, 4, np.random.default_rng(5)))
    with pytest.raises(CheckpointError, match="F32"):
        tensor.blocks()


def first_of_each_type(path: Path) -> Iterator[tuple[Tensor, NDArray[np.uint8]]]:
    """Our tensor and the package's bytes, for one tensor of every type in the file."""
    mine = {tensor.data.ctypes.data: tensor for tensor in open_checkpoint(path).tensors.values()}
    by_order = sorted(mine.items())
    theirs = sorted(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset)
    seen: set[str] = set()
    for (_, tensor), reference_tensor in zip(by_order, theirs, strict=True):
        if tensor.type not in seen:
            seen.add(tensor.type)
            yield tensor, reference_tensor.data


def check_real_file(path: Path) -> None:
    for tensor, data in first_of_each_type(path):
        rows = slice(0, 64)
        theirs = gguf.quants.dequantize(data[rows], gguf.GGMLQuantizationType[tensor.type])
        np.testing.assert_array_equal(tensor.dequantize(rows), theirs)


def test_real_smollm_tensors_equal_the_reference(smol_gguf: Path) -> None:
    check_real_file(smol_gguf)
