"""Panels: the bytes are FORMAT.md's, and what comes back out is bit for bit what the source file says."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from exporters.checkpoint import Tensor
from exporters.gguf.blocks import LAYOUTS
from exporters.panels import FORMAT_OF_TYPE, UNIT_K, check_k, pack_segment, segment_bytes, unit_dtype, unpack
from exporters.quantize import quantize_c8

TYPES = sorted(FORMAT_OF_TYPE)
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_tensor(type_: str, rows: int, k: int, seed: int) -> Tensor:
    """A matrix of random codes with sane scales, as its file would hold it."""
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[type_]
    if type_ in HALVES:
        blocks = rng.integers(0, 256, (rows, k // layout.elements, layout.size), dtype=np.uint8)
        for at in HALVES[type_]:
            scales = rng.normal(0, 0.01, blocks.shape[:2]).astype("<f2")
            blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
        data = blocks.reshape(rows, -1)
    else:
        values = rng.normal(0, 1, (rows, k)).astype("<f4")
        if type_ == "BF16":
            data = (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
        else:
            data = values.astype("<f2" if type_ == "F16" else "<f4").view(np.uint8)
    return Tensor(name="w", shape=(rows, k), type=type_, data=np.ascontiguousarray(data).reshape(rows, -1))


def packed(tensor: Tensor, format_: str) -> NDArray[np.uint8]:
    return np.concatenate(list(pack_segment(tensor, format_)))


def nibble(plane: NDArray[np.uint8], lane: int, k: int) -> int:
    """Code of one weight in a 4-bit plane, as FORMAT.md words it."""
    g, i = divmod(k % 16, 4)
    byte = int(plane[g * 64 + lane * 4 + i])
    return byte & 15 if k < 16 else byte >> 4


def two_bits(plane: NDArray[np.uint8], lane: int, k: int) -> int:
    """High bits of one weight in a 2-bit plane, as FORMAT.md words it."""
    step, rest = divmod(k, 8)
    h, i = divmod(rest, 4)
    return int(plane[h * 64 + lane * 4 + i]) >> (2 * step) & 3


@pytest.mark.parametrize("type_", TYPES)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 70), units=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_transcoding_returns_the_source_values_bit_for_bit(type_: str, rows: int, units: int, seed: int) -> None:
    tensor = random_tensor(type_, rows, units * 256, seed)
    format_ = FORMAT_OF_TYPE[type_]
    values = unpack(packed(tensor, format_), format_, rows, units * 256)
    np.testing.assert_array_equal(values.view(np.uint32), tensor.dequantize().view(np.uint32))


@pytest.mark.parametrize("type_", TYPES)
def test_segment_size_follows_from_rows_k_and_format(type_: str) -> None:
    format_ = FORMAT_OF_TYPE[type_]
    assert packed(random_tensor(type_, 35, 512, 3), format_).size == segment_bytes(format_, 35, 512)


@pytest.mark.parametrize(
    ("format_", "bytes_per_unit"),
    [("q4", 288), ("q4m", 320), ("q6s", 416), ("q6m", 448), ("q8", 544), ("q4k", 2368), ("q6k2", 3392), ("q6k", 3360)],
)
def test_unit_size_is_the_tables(format_: str, bytes_per_unit: int) -> None:
    assert unit_dtype(format_, 256).itemsize == bytes_per_unit


@pytest.mark.parametrize(("type_", "header"), [("Q4_0", 32), ("Q4_1", 64)])
def test_nibble_plane_by_the_words_of_the_format(type_: str, header: int) -> None:
    tensor = random_tensor(type_, 32, 64, 5)
    format_ = FORMAT_OF_TYPE[type_]
    units = packed(tensor, format_).reshape(2, 2, -1)
    codes = tensor.blocks().codes
    for row, k in product(range(32), range(64)):
        assert nibble(units[row // 16, k // 32, header:], row % 16, k % 32) == codes[row, k]


@pytest.mark.parametrize(("type_", "header"), [("Q5_0", 32), ("Q5_1", 64)])
def test_six_bit_planes_by_the_words_of_the_format(type_: str, header: int) -> None:
    tensor = random_tensor(type_, 16, 64, 6)
    units = packed(tensor, FORMAT_OF_TYPE[type_]).reshape(2, -1)
    codes = tensor.blocks().codes
    for row, k in product(range(16), range(64)):
        unit = units[k // 32, header:]
        assert nibble(unit[:256], row, k % 32) | two_bits(unit[256:], row, k % 32) << 4 == codes[row, k]


@pytest.mark.parametrize(
    ("type_", "header", "slice_bytes"), [("Q4_K", 320, 256), ("Q5_K", 320, 384), ("Q6_K", 288, 384)]
)
def test_two_level_slices_by_the_words_of_the_format(type_: str, header: int, slice_bytes: int) -> None:
    tensor = random_tensor(type_, 16, 256, 7)
    unit = packed(tensor, FORMAT_OF_TYPE[type_])[header:]
    codes = tensor.blocks().codes
    for row, k in product(range(16), range(256)):
        plane = unit[k // 32 * slice_bytes :]
        high = two_bits(plane[256:], row, k % 32) << 4 if slice_bytes == 384 else 0
        assert nibble(plane, row, k % 32) | high == codes[row, k]


@pytest.mark.parametrize(("type_", "groups"), [("Q4_K", 8), ("Q6_K", 16)])
def test_two_level_scales_lie_group_by_group_sixteen_rows_together(type_: str, groups: int) -> None:
    tensor = random_tensor(type_, 16, 256, 8)
    blocks = tensor.blocks()
    unit = packed(tensor, FORMAT_OF_TYPE[type_])
    header = 32 if type_ == "Q6_K" else 64
    assert blocks.sub_scale is not None
    np.testing.assert_array_equal(unit[:32].view("<f2"), blocks.scale[:, 0])
    scales = unit[header : header + groups * 16].reshape(groups, 16)
    np.testing.assert_array_equal(scales, blocks.sub_scale.view(np.uint8)[:, 0].T)


def test_eight_bit_plane_by_the_words_of_the_format() -> None:
    tensor = random_tensor("Q8_0", 16, 32, 9)
    unit = packed(tensor, "q8")
    codes = tensor.blocks().codes
    for row, k in product(range(16), range(32)):
        assert unit[32 + k // 4 * 64 + row * 4 + k % 4] == codes[row, k]


def test_padding_rows_have_zero_codes_and_scales() -> None:
    tensor = random_tensor("Q8_0", 3, 32, 10)
    unit = packed(tensor, "q8")
    lanes = unit[32:].reshape(8, 16, 4)
    assert not lanes[:, 3:].any() and not unit[:32].view("<u2")[3:].any()


def test_chunks_join_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor("Q6_K", 100, 256, 11)
    whole = packed(tensor, "q6k")
    monkeypatch.setattr("exporters.panels.CHUNK_ELEMENTS", 256 * 16)
    assert len(list(pack_segment(tensor, "q6k"))) == 7
    np.testing.assert_array_equal(packed(tensor, "q6k"), whole)


def test_channel_format_is_within_half_a_step_of_the_source() -> None:
    tensor = random_tensor("F32", 20, 96, 12)
    values = tensor.dequantize()
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(unpack(packed(tensor, "c8"), "c8", 20, 96) - values) <= step * 0.5001).all()


def test_channel_scales_follow_the_codes() -> None:
    tensor = random_tensor("F32", 16, 64, 13)
    blob = packed(tensor, "c8")
    np.testing.assert_array_equal(blob[16 * 64 :].view("<f4"), quantize_c8(tensor.dequantize())["channel"][:, 0, 0])


def test_zero_row_in_the_channel_format_stays_zero() -> None:
    tensor = Tensor(name="w", shape=(1, 32), type="F32", data=np.zeros((1, 128), np.uint8))
    assert not unpack(packed(tensor, "c8"), "c8", 1, 32).any()


def test_four_bit_quantization_beats_plain_rounding_of_the_range() -> None:
    values = np.random.default_rng(14).standard_t(4, (32, 256)).astype(np.float32)
    tensor = Tensor(name="w", shape=(32, 256), type="F32", data=values.view(np.uint8))
    blocks = values.reshape(32, 8, 32)
    low, high = blocks.min(2, keepdims=True), blocks.max(2, keepdims=True)
    plain = np.rint((blocks - low) / (high - low) * 15) * (high - low) / 15 + low
    error = np.square(unpack(packed(tensor, "q4m"), "q4m", 32, 256) - values).mean()
    assert error < np.square(plain - blocks).mean()


def test_column_and_row_scales_multiply_before_quantization() -> None:
    tensor = random_tensor("F32", 16, 64, 15)
    rows = np.linspace(0.5, 2, 16, dtype=np.float32)
    columns = np.linspace(1, 3, 64, dtype=np.float32)
    scaled = tensor.dequantize() * rows[:, None] * columns
    blob = np.concatenate(list(pack_segment(tensor, "c8", column_scale=columns, row_scale=rows)))
    again = Tensor(name="w", shape=(16, 64), type="F32", data=scaled.view(np.uint8))
    np.testing.assert_array_equal(blob, packed(again, "c8"))


def test_requantizing_into_a_source_format_is_refused() -> None:
    with pytest.raises(ValueError, match="F32 cannot become q4k"):
        packed(random_tensor("F32", 16, 256, 16), "q4k")


@pytest.mark.parametrize("format_", sorted(UNIT_K))
def test_k_that_leaves_part_of_a_unit_is_refused(format_: str) -> None:
    with pytest.raises(ValueError, match=f"format {format_} needs K"):
        check_k(format_, UNIT_K[format_] + 16)
