"""Weight panels: the layout of `cascade/ops/FORMAT.md`, packed from GGUF blocks, safetensors rows or float32 rows.

A segment (one matrix [rows, K] in one format) is packed in chunks of whole panels (16 rows), so that memory does
not grow with the matrix. GGUF blocks are transcoded: codes, scales and minima are moved, never recomputed.

Every part of a unit is a number of *lines*; a line is 16 lanes, one for each row of the panel, of one element
(a scale, or four 8-bit codes, or eight 4-bit codes in a 32-bit word). Packing therefore is one transposition,
[panel, lane, unit, line] -> [panel, unit, line, lane], whatever the format; a structured dtype says where the
parts of a unit lie.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporters.checkpoint import Tensor
from exporters.quantize import Parts, quantize_c8, quantize_q4m

LANES = 16
"""Output rows of one panel."""

FORMAT_OF_TYPE = {
    "Q4_0": "q4",
    "Q4_1": "q4m",
    "Q5_0": "q6s",
    "Q5_1": "q6m",
    "Q8_0": "q8",
    "Q4_K": "q4k",
    "Q5_K": "q6k2",
    "Q6_K": "q6k",
    "F16": "f16",
    "BF16": "bf16",
    "F32": "f32",
}
"""The format that carries a source type's values without change."""

FLOAT_FORMATS = frozenset({"f16", "bf16", "f32"})
UNIT_K = {"q4": 32, "q4m": 32, "q6s": 32, "q6m": 32, "q8": 32, "q4k": 256, "q6k2": 256, "q6k": 256}
"""Elements along K of one unit; the other formats have one unit of the whole row."""

CHUNK_ELEMENTS = 1 << 21
"""Elements packed at a time: 2 M, so 8 MB of float32 when a format is quantized on the way."""


@lru_cache(maxsize=256)
def unit_dtype(format_: str, k: int) -> np.dtype[Any]:
    """Structured dtype of one unit of `format_` in a matrix of `k` columns: named parts of [lines, 16]."""

    def part(name: str, dtype: str, lines: int) -> tuple[str, str, tuple[int, int]]:
        return (name, dtype, (lines, LANES))

    scale, minimum = part("scale", "<u2", 1), part("min", "<u2", 1)
    layouts = {
        "q4": [scale, part("codes", "<u4", 4)],
        "q4m": [scale, minimum, part("codes", "<u4", 4)],
        "q6s": [scale, part("codes", "<u4", 6)],
        "q6m": [scale, minimum, part("codes", "<u4", 6)],
        "q8": [scale, part("codes", "<u4", 8)],
        "q4k": [scale, minimum, part("sc", "u1", 8), part("mn", "u1", 8), part("codes", "<u4", 8 * 4)],
        "q6k2": [scale, minimum, part("sc", "u1", 8), part("mn", "u1", 8), part("codes", "<u4", 8 * 6)],
        "q6k": [scale, part("sc", "u1", 16), part("codes", "<u4", 8 * 6)],
        "c8": [part("codes", "<u4", k // 4), part("channel", "<f4", 1)],
        "f16": [part("codes", "<u2", k)],
        "bf16": [part("codes", "<u2", k)],
        "f32": [part("codes", "<u4", k)],
    }
    if format_ not in layouts:
        raise ValueError(f"unknown weight format {format_!r}; known: {', '.join(layouts)}")
    return np.dtype(layouts[format_])


def check_k(format_: str, k: int) -> None:
    """Raise ValueError unless a matrix of `k` columns can be stored in `format_`."""
    multiple = 1 if format_ in FLOAT_FORMATS else UNIT_K.get(format_, 32)
    if k <= 0 or k % multiple:
        raise ValueError(f"format {format_} needs K a multiple of {multiple}, not {k}")


def segment_bytes(format_: str, rows: int, k: int) -> int:
    """Size of a packed segment; rows are padded to a multiple of 16."""
    check_k(format_, k)
    units = k // UNIT_K[format_] if format_ in UNIT_K else 1
    return -(-rows // LANES) * units * unit_dtype(format_, k).itemsize


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """(rows, K) of a matrix; ValueError for a vector."""
    if len(tensor.shape) != 2:
        raise ValueError(f"tensor {tensor.name} is a vector of {tensor.shape[0]}, not a matrix")
    return tensor.shape


def pack_segment(
    tensor: Tensor,
    format_: str,
    column_scale: NDArray[np.float32] | None = None,
    row_scale: NDArray[np.float32] | None = None,
) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of one segment, chunk by chunk.

    Without scales and with the source type's own format, codes are transcoded; otherwise the float32 rows,
    times `row_scale` [N] and `column_scale` [K], are quantized (`c8` and `q4m` only).
    """
    rows, k = matrix_shape(tensor)
    check_k(format_, k)
    transcode = format_ == FORMAT_OF_TYPE[tensor.type] and column_scale is None and row_scale is None
    if not transcode and format_ not in _QUANTIZERS:
        raise ValueError(f"{tensor.type} cannot become {format_}: only {', '.join(_QUANTIZERS)} are quantized here")
    step = max(LANES, CHUNK_ELEMENTS // k // LANES * LANES)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        if transcode:
            parts = _transcode(tensor, part, format_)
        else:
            values = tensor.dequantize(part)
            if row_scale is not None:
                values = values * row_scale[part, None]
            if column_scale is not None:
                values = values * column_scale[None, :]
            parts = _QUANTIZERS[format_](values)
        yield lay_out(parts, format_, k)


def lay_out(parts: Parts, format_: str, k: int) -> NDArray[np.uint8]:
    """Panels of the rows whose unit parts are given as arrays [rows, units, lines]; the last panel is zero-padded."""
    dtype = unit_dtype(format_, k)
    rows, units, _ = parts["codes"].shape
    panels = -(-rows // LANES)
    out = np.zeros((panels, units), dtype)
    whole = rows // LANES
    for name, values in parts.items():
        lines = values.shape[2]
        lanes = values[: whole * LANES].reshape(whole, LANES, units, lines)
        out[name][:whole] = lanes.transpose(0, 2, 3, 1)
        if rest := rows - whole * LANES:
            out[name][whole, :, :, :rest] = values[whole * LANES :].transpose(1, 2, 0)
    return out.reshape(-1).view(np.uint8)


def unpack(blob: NDArray[np.uint8], format_: str, rows: int, k: int) -> NDArray[np.float32]:
    """The float32 values [rows, K] of a packed segment, by the table of FORMAT.md, one rounding per operation."""
    if blob.size != segment_bytes(format_, rows, k):
        raise ValueError(f"{format_} [{rows}, {k}] has {segment_bytes(format_, rows, k)} bytes, not {blob.size}")
    dtype = unit_dtype(format_, k)
    panels = -(-rows // LANES)
    units = np.ascontiguousarray(blob).view(dtype).reshape(panels, -1)

    def lanes_first(name: str) -> NDArray[Any]:
        """A part as [rows (padded), units, lines]."""
        part = units[name].transpose(0, 3, 1, 2)
        return np.ascontiguousarray(part).reshape(panels * LANES, part.shape[2], part.shape[3])

    words = lanes_first("codes")
    if format_ == "f16":
        return np.asarray(words.view("<f2"), np.float32).reshape(-1, k)[:rows]
    if format_ == "bf16":
        wide: NDArray[np.uint32] = words.astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(-1, k)[:rows]
    if format_ == "f32":
        return np.array(words.view("<f4"), np.float32).reshape(-1, k)[:rows]
    codes = _codes(words, format_, k).astype(np.float32)
    if format_ == "c8":
        channel: NDArray[np.float32] = lanes_first("channel").reshape(-1, 1)
        values = (codes - 128) * channel
        return values[:rows].astype(np.float32, copy=False)
    scale = lanes_first("scale").view("<f2").astype(np.float32)
    if format_ in ("q4", "q6s", "q8"):
        offset = {"q4": 8, "q6s": 16, "q8": 128}[format_]
        values = scale * (codes.reshape(len(codes), -1, 32) - offset)
    elif format_ in ("q4m", "q6m"):
        minimum = lanes_first("min").view("<f2").astype(np.float32)
        values = scale * codes.reshape(len(codes), -1, 32) + minimum
    elif format_ == "q6k":
        steps = (scale * lanes_first("sc").view(np.int8).astype(np.float32))[..., None]
        values = steps * (codes.reshape(len(codes), -1, 16, 16) - 32)
    else:
        minimum = lanes_first("min").view("<f2").astype(np.float32)
        steps = (scale * lanes_first("sc").astype(np.float32))[..., None]
        lows = (minimum * lanes_first("mn").astype(np.float32))[..., None]
        values = steps * codes.reshape(len(codes), -1, 8, 32) - lows
    return values.reshape(-1, k)[:rows].astype(np.float32, copy=False)


def _codes(words: NDArray[np.uint32], format_: str, k: int) -> NDArray[np.uint8]:
    """Codes [rows, K] of code words [rows, units, lines]."""
    rows = len(words)
    if format_ in ("q8", "c8"):
        return words.view(np.uint8).reshape(rows, k)
    lines = 4 if format_ in ("q4", "q4m", "q4k") else 6
    planes = words.reshape(rows, k // 32, lines)
    low = np.ascontiguousarray(planes[..., :4]).view(np.uint8)
    codes = np.concatenate([low & 15, low >> 4], axis=-1)
    if lines == 6:
        high = np.ascontiguousarray(planes[..., 4:]).view(np.uint8)
        for m in range(4):
            codes[..., 8 * m : 8 * m + 8] |= ((high >> (2 * m)) & 3) << 4
    return codes.reshape(rows, k)


def _transcode(tensor: Tensor, rows: slice, format_: str) -> Parts:
    """The parts of these rows in their own type's format: the file's codes and scales, moved."""
    if format_ in FLOAT_FORMATS:
        raw = np.ascontiguousarray(tensor.raw(rows))
        return {"codes": raw.view("<u4" if format_ == "f32" else "<u2")[:, None, :]}
    blocks = tensor.blocks(rows)
    n, k = blocks.codes.shape
    units = k // UNIT_K[format_]
    parts: Parts = {
        "scale": blocks.scale.view("<u2").reshape(n, units, 1),
        "codes": _PLANES[format_](blocks.codes.reshape(n, k // 32, 32)).reshape(n, units, -1),
    }
    if blocks.minimum is not None:
        parts["min"] = blocks.minimum.view("<u2").reshape(n, units, 1)
    if blocks.sub_scale is not None:
        parts["sc"] = blocks.sub_scale.view(np.uint8)
    if blocks.sub_minimum is not None:
        parts["mn"] = blocks.sub_minimum
    return parts


def _four_bit(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Plane words [..., 4] of slices of codes [..., 32]: k in the low nibbles, k + 16 in the high ones."""
    words: NDArray[np.uint32] = np.ascontiguousarray(codes).view("<u4")
    return words[..., :4] | words[..., 4:] << np.uint32(4)


def _six_bit(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Plane words [..., 6] of slices of codes [..., 32]: the 4-bit plane, then the 2-bit plane."""
    words = np.ascontiguousarray(codes).view("<u4")
    low, high = words & np.uint32(0x0F0F0F0F), words >> np.uint32(4) & np.uint32(0x03030303)
    # Word 2*m + h holds k = 8*m + 4*h + 0..3, whose high bits go to bits 2*m of line h.
    twos = high[..., 0:2].copy()
    for m in (1, 2, 3):
        twos |= high[..., 2 * m : 2 * m + 2] << np.uint32(2 * m)
    return np.concatenate([low[..., :4] | low[..., 4:] << np.uint32(4), twos], axis=-1)


def _eight_bit(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Plane words [..., 8] of slices of codes [..., 32]."""
    return np.ascontiguousarray(codes).view("<u4")


_PLANES: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint32]]] = {
    "q4": _four_bit,
    "q4m": _four_bit,
    "q4k": _four_bit,
    "q6s": _six_bit,
    "q6m": _six_bit,
    "q6k2": _six_bit,
    "q6k": _six_bit,
    "q8": _eight_bit,
}
_QUANTIZERS: dict[str, Callable[[NDArray[np.float32]], Parts]] = {"c8": quantize_c8, "q4m": quantize_q4m}
