"""GGUF tensor types: block sizes, and vectorised decoding of blocks to codes, scales and float32 values.

Decoding never rounds: `Blocks` holds the file's own integers and float16 numbers, so that packing them
again (`exporters/panels.py`) multiplies exactly the values that the file describes. The layouts are ggml's; all
scalars are little-endian.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]


class BlockLayout(NamedTuple):
    """Elements and bytes of one block along a row."""

    elements: int
    size: int


LAYOUTS: dict[str, BlockLayout] = {
    "F32": BlockLayout(1, 4),
    "F16": BlockLayout(1, 2),
    "BF16": BlockLayout(1, 2),
    "Q4_0": BlockLayout(32, 18),
    "Q4_1": BlockLayout(32, 20),
    "Q5_0": BlockLayout(32, 22),
    "Q5_1": BlockLayout(32, 24),
    "Q8_0": BlockLayout(32, 34),
    "Q4_K": BlockLayout(256, 144),
    "Q5_K": BlockLayout(256, 176),
    "Q6_K": BlockLayout(256, 210),
}
FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
TWO_LEVEL_TYPES = frozenset({"Q4_K", "Q5_K", "Q6_K"})
# What is subtracted from an unsigned code to get the signed one (types without a minimum).
CODE_OFFSETS: dict[str, int] = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The integers and float16 scales of N rows of K elements, before any arithmetic.

    One-level types: value = scale * (code - offset), or scale * code + minimum.
    Two-level types: value = (scale * sub_scale) * (code - offset) - (minimum * sub_minimum).
    """

    type: str
    codes: U8
    """[N, K] unsigned; Q8_0 is int8 + 128."""
    offset: int
    """Subtracted from a code; 0 for the types with a minimum."""
    scale: F16
    """[N, K/32], or `d` of the two-level types, [N, K/256]."""
    minimum: F16 | None
    """[N, K/32], or `dmin` [N, K/256]; None for the types without one."""
    sub_scale: U8 | NDArray[np.int8] | None
    """uint8 [N, K/256, 8] (Q4_K, Q5_K), int8 [N, K/256, 16] (Q6_K), None for one-level types."""
    sub_minimum: U8 | None
    """uint8 [N, K/256, 8] (Q4_K, Q5_K)."""

    def values(self) -> F32:
        """float32 [N, K], with the roundings of ggml's own dequantization."""
        n, k = self.codes.shape
        scale = self.scale.astype(np.float32)
        if self.sub_scale is None:
            group = 32
            minimum = None if self.minimum is None else self.minimum.astype(np.float32)
        else:
            group = 256 // self.sub_scale.shape[2]
            scale = (scale[:, :, None] * self.sub_scale.astype(np.float32)).reshape(n, k // group)
            minimum = None
            if self.minimum is not None and self.sub_minimum is not None:
                product = self.minimum.astype(np.float32)[:, :, None] * self.sub_minimum.astype(np.float32)
                minimum = -product.reshape(n, k // group)
        out = self.codes.reshape(n, k // group, group).astype(np.float32)
        if self.offset:
            out -= np.float32(self.offset)
        out *= scale[:, :, None]
        if minimum is not None:
            out += minimum[:, :, None]
        return out.reshape(n, k)


def row_bytes(type_name: str, columns: int) -> int:
    """Bytes of one row of `columns` elements. The caller has checked that blocks divide the row."""
    layout = LAYOUTS[type_name]
    return columns // layout.elements * layout.size


def decode_blocks(type_name: str, raw: U8) -> Blocks:
    """Split raw rows, uint8 [N, row_bytes], of a quantized type into codes and scales."""
    layout = LAYOUTS[type_name]
    n = raw.shape[0]
    count = raw.shape[1] // layout.size
    blocks = np.ascontiguousarray(raw).reshape(n, count, layout.size)
    return _DECODERS[type_name](blocks)


def decode_floats(type_name: str, raw: U8) -> F32:
    """float32 values of raw rows, uint8 [N, row_bytes], of F32, F16 or BF16: [N, K]."""
    data = np.ascontiguousarray(raw)
    if type_name == "F32":
        return data.view("<f4").astype(np.float32)
    if type_name == "F16":
        return data.view("<f2").astype(np.float32)
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def dequantize(type_name: str, raw: U8) -> F32:
    """float32 [N, K] of raw rows of any supported type."""
    if type_name in FLOAT_TYPES:
        return decode_floats(type_name, raw)
    return decode_blocks(type_name, raw).values()


def _half(blocks: U8, at: int) -> F16:
    """The float16 at byte `at` of every block: [N, blocks]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0].astype(np.float16)


def _nibbles(packed: U8) -> U8:
    """[..., 16] bytes -> [..., 32] codes: low nibbles are elements 0..15, high nibbles 16..31."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: U8) -> U8:
    """[N, blocks, 4] bytes -> [N, blocks, 32]: bit j of the little-endian word, moved to bit 4."""
    return np.left_shift(np.unpackbits(packed, axis=-1, bitorder="little"), 4, dtype=np.uint8)


def _one_level(type_name: str, blocks: U8, codes: U8, has_minimum: bool) -> Blocks:
    n = blocks.shape[0]
    return Blocks(
        type=type_name,
        codes=codes.reshape(n, -1),
        offset=CODE_OFFSETS.get(type_name, 0),
        scale=_half(blocks, 0),
        minimum=_half(blocks, 2) if has_minimum else None,
        sub_scale=None,
        sub_minimum=None,
    )


def _q4_0(blocks: U8) -> Blocks:
    return _one_level("Q4_0", blocks, _nibbles(blocks[:, :, 2:]), False)


def _q4_1(blocks: U8) -> Blocks:
    return _one_level("Q4_1", blocks, _nibbles(blocks[:, :, 4:]), True)


def _q5_0(blocks: U8) -> Blocks:
    return _one_level("Q5_0", blocks, _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6]), False)


def _q5_1(blocks: U8) -> Blocks:
    return _one_level("Q5_1", blocks, _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8]), True)


def _q8_0(blocks: U8) -> Blocks:
    # int8 + 128 is the same bits with the top one flipped.
    return _one_level("Q8_0", blocks, blocks[:, :, 2:] ^ np.uint8(128), False)


def _k_scales(packed: U8) -> tuple[U8, U8]:
    """Twelve bytes -> eight 6-bit scales and eight 6-bit minimums, each [N, blocks, 8].

    Bytes 0..3 hold scales 0..3, bytes 4..7 minimums 0..3; their top two bits complete the nibbles of
    bytes 8..11, which are scales (low) and minimums (high) 4..7.
    """
    first, second, third = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scale, minimum


def _k_nibbles(packed: U8) -> U8:
    """128 bytes -> [N, blocks, 8, 32] codes: each 32 bytes hold two groups, low nibbles first."""
    n, count, _ = packed.shape
    quads = packed.reshape(n, count, 4, 1, 32)
    return np.concatenate([quads & 15, quads >> 4], axis=3).reshape(n, count, 8, 32)


def _with_minimum(type_name: str, blocks: U8, codes: U8) -> Blocks:
    scale, minimum = _k_scales(blocks[:, :, 4:16])
    return Blocks(
        type=type_name,
        codes=codes.reshape(blocks.shape[0], -1),
        offset=0,
        scale=_half(blocks, 0),
        minimum=_half(blocks, 2),
        sub_scale=scale,
        sub_minimum=minimum,
    )


def _q4_k(blocks: U8) -> Blocks:
    return _with_minimum("Q4_K", blocks, _k_nibbles(blocks[:, :, 16:]))


def _q5_k(blocks: U8) -> Blocks:
    # Bit g of qh byte l is the fifth bit of element l of group g.
    high = blocks[:, :, 16:48][:, :, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _with_minimum("Q5_K", blocks, _k_nibbles(blocks[:, :, 48:]) | high << np.uint8(4))


def _q6_k(blocks: U8) -> Blocks:
    n, count, _ = blocks.shape
    # Two halves of 128 elements; each: 64 bytes of nibbles, 32 bytes with two high bits for four groups of 32.
    low = blocks[:, :, :128].reshape(n, count, 2, 1, 2, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=3).reshape(n, count, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, :, 128:192].reshape(n, count, 2, 1, 32) >> shifts & 3
    return Blocks(
        type="Q6_K",
        codes=(nibbles | high << 4).reshape(n, -1),
        offset=CODE_OFFSETS["Q6_K"],
        scale=_half(blocks, 208),
        minimum=None,
        sub_scale=np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8),
        sub_minimum=None,
    )


_DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
