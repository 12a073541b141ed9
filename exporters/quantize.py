"""Quantizers of float32 rows: per-channel int8 (`c8`) and 4 bits with a minimum per 32 (`q4m`).

They return the parts of FORMAT.md's units as arrays [rows, units, lines], which `panels` lays out.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Parts = dict[str, NDArray[Any]]


def quantize_c8(values: NDArray[np.float32]) -> Parts:
    """Symmetric int8 with one float32 scale per row: codes -127..127, stored plus 128."""
    peak = np.abs(values).max(axis=1, keepdims=True)
    scale = peak / np.float32(127)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.clip(np.rint(values * inverse), -127, 127).astype(np.int8).view(np.uint8) ^ np.uint8(128)
    return {"codes": codes.view("<u4")[:, None, :], "channel": scale[:, None, :]}


def quantize_q4m(values: NDArray[np.float32]) -> Parts:
    """Four bits per weight, float16 scale and minimum per block of 32.

    The range of a block is shrunk in a few steps at either end and the one of least squared error kept: the
    plain minimum and maximum spend the 16 levels on outliers.
    """
    rows, k = values.shape
    blocks = values.reshape(rows, k // 32, 32)
    low, high = blocks.min(axis=2, keepdims=True), blocks.max(axis=2, keepdims=True)
    best_error = np.full(low.shape, np.inf, np.float32)
    scale, minimum = np.zeros_like(low), np.zeros_like(low)
    codes = np.zeros(blocks.shape, np.uint8)
    for cut_low, cut_high in ((0.0, 0.0), (0.04, 0.04), (0.08, 0.08), (0.06, 0.0), (0.0, 0.06)):
        span = high - low
        # Rounded to float16 before the codes are chosen: the kernel multiplies by these very numbers.
        try_minimum = (low + np.float32(cut_low) * span).astype(np.float16).astype(np.float32)
        try_scale = (span * np.float32((1 - cut_low - cut_high) / 15)).astype(np.float16).astype(np.float32)
        inverse = np.divide(np.float32(1), try_scale, out=np.zeros_like(span), where=try_scale > 0)
        try_codes = np.clip(np.rint((blocks - try_minimum) * inverse), 0, 15)
        error = np.square(try_codes * try_scale + try_minimum - blocks).sum(axis=2, keepdims=True)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        scale, minimum = np.where(better, try_scale, scale), np.where(better, try_minimum, minimum)
        codes = np.where(better, try_codes.astype(np.uint8), codes)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return {
        "scale": scale.astype("<f2").view("<u2"),
        "min": minimum.astype("<f2").view("<u2"),
        "codes": packed.view("<u4"),
    }
