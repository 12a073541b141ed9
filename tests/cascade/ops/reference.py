"""FORMAT.md in NumPy, written from its text alone: it shares no code with the ops, nor with `exporters.panels`.

Products and norms are given to the bit, so a kernel that agrees has the order of operations that the text asks for.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 16
SLICE = 32
MOST_PER_STEP = 256
"""Elements of K in a float step."""

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """One line of FORMAT.md's table. `unit` 0 is the whole of K; `sub` is the elements that share a sub-scale."""

    bits: int
    unit: int
    zero: int = 0
    has_min: bool = False
    sub: int = 0


LAYOUTS = {
    "q4": Layout(4, 32, zero=8),
    "q4m": Layout(4, 32, has_min=True),
    "q6s": Layout(6, 32, zero=16),
    "q6m": Layout(6, 32, has_min=True),
    "q8": Layout(8, 32, zero=128),
    "q4k": Layout(4, 256, has_min=True, sub=32),
    "q6k2": Layout(6, 256, has_min=True, sub=32),
    "q6k": Layout(6, 256, zero=32, sub=16),
    "c8": Layout(8, 0, zero=128),
}
FLOAT_WIDTH = {"f16": 2, "bf16": 2, "f32": 4}


@dataclass(slots=True)
class Weight:
    """An unpacked integer segment, padding rows left off. Units are along K; sub-scales are 1 where there are none."""

    layout: Layout
    codes: I64  # [rows, K]
    scale: F32  # [rows, units]; c8: the channel scale [rows, 1]
    minimum: F32  # [rows, units]
    sub_scale: I64  # [rows, K / sub]
    sub_min: I64  # [rows, K / sub]


def float_weight(blob: NDArray[np.uint8], format_: str, rows: int, k: int) -> F32:
    """The values [rows, K] of a segment in a float format: per k, 16 lanes."""
    panels = -(-rows // LANES)
    cells = blob.reshape(panels, k, LANES, FLOAT_WIDTH[format_])
    raw = np.ascontiguousarray(cells.transpose(0, 2, 1, 3)).reshape(panels * LANES, -1)[:rows]
    if format_ == "f32":
        return raw.view("<f4").astype(np.float32)
    if format_ == "f16":
        return raw.view("<f2").astype(np.float32)
    wide: NDArray[np.uint32] = raw.view("<u2").astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def integer_weight(blob: NDArray[np.uint8], format_: str, rows: int, k: int) -> Weight:
    """Unpack a segment byte by byte: a cursor walks over a panel's units, the planes are indexed as the text says."""
    f = LAYOUTS[format_]
    panels = -(-rows // LANES)
    unit, sub = f.unit or k, f.sub or SLICE
    padded, units, subs = panels * LANES, k // unit, k // sub
    codes = np.zeros((padded, k), np.int64)
    scale, minimum = np.ones((padded, units), np.float32), np.zeros((padded, units), np.float32)
    sub_scale, sub_min = np.ones((padded, subs), np.int64), np.ones((padded, subs), np.int64)
    for panel, data in enumerate(blob.reshape(panels, -1)):
        lanes = slice(panel * LANES, (panel + 1) * LANES)
        at = 0

        def take(count: int, data: NDArray[np.uint8] = data) -> NDArray[np.uint8]:
            nonlocal at
            at += count
            return data[at - count : at]

        for u in range(units):
            if f.unit:
                scale[lanes, u] = take(32).view("<f2")
                if f.has_min:
                    minimum[lanes, u] = take(32).view("<f2")
            if f.sub:
                these = slice(u * unit // sub, (u + 1) * unit // sub)
                count = unit // sub
                steps = take(count * LANES).reshape(count, LANES).T
                sub_scale[lanes, these] = steps if f.has_min else steps.view(np.int8)
                if f.has_min:
                    sub_min[lanes, these] = take(count * LANES).reshape(count, LANES).T
            for s in range(u * unit, (u + 1) * unit, SLICE):
                codes[lanes, s : s + SLICE] = _slice_codes(take(SLICE * LANES * f.bits // 8), f.bits)
        if not f.unit:
            scale[lanes, 0] = take(64).view("<f4")
        assert at == data.size
    return Weight(f, codes[:rows], scale[:rows], minimum[:rows], sub_scale[:rows], sub_min[:rows])


def _slice_codes(data: NDArray[np.uint8], bits: int) -> I64:
    """Codes [16, 32] of one slice."""
    j, k = np.arange(LANES)[:, None], np.arange(SLICE)[None, :]
    i = k % 4
    if bits == 8:
        return data[k // 4 * 64 + j * 4 + i].astype(np.int64)
    byte = data[k % 16 // 4 * 64 + j * 4 + i].astype(np.int64)
    low = np.where(k < 16, byte & 15, byte >> 4)
    if bits == 4:
        return low
    high = data[256 + k % 8 // 4 * 64 + j * 4 + i].astype(np.int64)
    return low | (high >> (k // 8 * 2) & 3) << 4


def dequantized(blob: NDArray[np.uint8], format_: str, rows: int, k: int) -> F32:
    """The values [rows, K], one rounding per operation, as `EmbedDequant` gives them."""
    if format_ in FLOAT_WIDTH:
        return float_weight(blob, format_, rows, k)
    w = integer_weight(blob, format_, rows, k)
    unit, sub = w.layout.unit or k, w.layout.sub or SLICE
    scale = np.repeat(w.scale, unit, 1) * np.repeat(w.sub_scale, sub, 1).astype(np.float32)
    values = scale * (w.codes - w.layout.zero).astype(np.float32)
    if not w.layout.has_min:
        return values
    low = np.repeat(w.minimum, unit, 1) * np.repeat(w.sub_min, sub, 1).astype(np.float32)
    return values - low if w.layout.sub else values + low


def fma(a: Any, b: Any, c: Any) -> F32:
    """a * b + c rounded once to float32: exact product in float64, sum rounded to odd, then to float32."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    product, addend = np.broadcast_arrays(product, np.asarray(c, np.float64))
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def quantize_rows(x: F32, group: int, bits: int = 8) -> list[tuple[NDArray[np.int8], F32]]:
    """The planes of quantized rows: codes int8 [T, K] and scales [T, K / group]; one plane, or two for 16 bits."""
    rows, k = x.shape
    parts = x.reshape(rows, -1, group or k)
    most = np.abs(parts).max(axis=2)
    scale = most / np.float32(127)
    zero, bad = scale < np.float32(1e-37), ~np.isfinite(most)
    scale = np.where(zero, np.float32(0), np.where(bad, np.float32(np.nan), scale))
    with np.errstate(all="ignore"):
        inverse = np.where(zero | bad, np.float32(0), np.float32(127) / most)[:, :, None]
        scaled = np.where(bad[:, :, None], np.float32(0), parts) * inverse
    coarse = np.rint(np.clip(scaled, -127, 127)).astype(np.float32)
    planes = [(coarse.astype(np.int8).reshape(rows, k), scale)]
    if bits == 16:
        rest = np.rint(np.clip((scaled - coarse) * np.float32(254), -127, 127))
        planes.append((rest.astype(np.int8).reshape(rows, k), scale / np.float32(254)))
    return planes


def product(x: F32, blob: NDArray[np.uint8], format_: str, rows: int, *, group: int = 0, bits: int = 8) -> F32:
    """x [T, K] float32 times a segment: [T, rows], to the bit."""
    k = x.shape[1]
    if format_ in FLOAT_WIDTH:
        weight = float_weight(blob, format_, rows, k)
        acc = np.zeros((len(x), rows), np.float32)
        for i in range(k):
            acc = fma(weight[None, :, i], x[:, i, None], acc)
        return acc
    w = integer_weight(blob, format_, rows, k)
    passes = [_integer_product(codes, scale, w) for codes, scale in quantize_rows(x, group, bits)]
    return passes[0] if len(passes) == 1 else passes[0] + passes[1]


def _integer_product(codes: NDArray[np.int8], scales: F32, w: Weight) -> F32:
    tokens, k = codes.shape
    group, unit, sub = k // scales.shape[1], w.layout.unit or k, w.layout.sub or SLICE
    step = min(group, unit, MOST_PER_STEP)
    acc = np.zeros((tokens, len(w.codes)), np.float32)
    x = codes.astype(np.int64)
    one = np.ones((1, 1), np.float32)
    for at in range(0, k, step):
        span = slice(at, min(at + step, k))
        weighted = w.codes[:, span] * np.repeat(w.sub_scale, sub, 1)[:, span]
        total = x[:, span] @ weighted.T
        zeros = np.repeat(w.sub_scale, sub, 1)[:, span] * w.layout.zero
        total -= x[:, span] @ zeros.T
        xs = one if group == k else scales[:, at // group, None]
        scale = w.scale[None, :, at // unit] if w.layout.unit else one
        acc = fma(total.astype(np.float32), scale * xs, acc)
        if w.layout.has_min:
            low = x[:, span] @ np.repeat(w.sub_min, sub, 1)[:, span].T
            minimum = w.minimum[None, :, at // unit]
            acc = fma(low.astype(np.float32), (-minimum if w.layout.sub else minimum) * xs, acc)
    if group == k:
        acc = acc * scales[:, :1]
    return acc if w.layout.unit else acc * w.scale[None, :, 0]


def rms_norm(x: F32, gamma: F32, epsilon: float) -> F32:
    """RMSNorm [T, K], to the bit: 16 lanes of fma over ascending k, added up 8, 4, 2 and 1 apart."""
    lanes = np.zeros((len(x), LANES), np.float32)
    for i in range(0, x.shape[1], LANES):
        lanes = fma(x[:, i : i + LANES], x[:, i : i + LANES], lanes)
    for width in (8, 4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    mean = lanes[:, 0] / np.float32(x.shape[1])
    inverse = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
    return (x * inverse[:, None]) * gamma
