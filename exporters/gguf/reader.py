"""The GGUF container: header, metadata, tensor directory, over a memory-mapped file.

The file is untrusted. Every count, length, offset and product is checked against the bytes that are really
there before anything is allocated or sliced by it; what is wrong becomes a CheckpointError with the name and
the numbers. Tensor data is never copied: a tensor is a view into the mapping.

Layout (version 2 and 3, little-endian): magic, version u32, tensor count u64, metadata count u64; metadata
entries (key, type, value); tensor entries (name, dimensions, type, offset); padding to `general.alignment`; data.
"""

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cascade.errors import CheckpointError
from exporters.gguf.blocks import LAYOUTS, row_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ENTRIES = 1 << 16
"""Metadata keys, and tensors: far above any model, far below what would hurt."""
MAX_ARRAY = 1 << 24
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 64 << 20
MAX_DIMENSIONS = 4

Scalar = int | float | bool | str
Value = Scalar | list[str] | NDArray[np.generic]

# Metadata value types 0..12.
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_ARRAY_DTYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

# ggml's tensor types by number; those without a layout in `blocks` are known by name only, to refuse them by name.
TENSOR_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file. `shape` is in torch's order: slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: NDArray[np.uint8] = field(repr=False)
    """uint8 [rows, row_bytes], a view into the mapping; a vector is one row."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file. Strings of metadata are str, numeric arrays numpy, string arrays lists."""

    path: Path
    version: int
    metadata: dict[str, Value] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)


class _Cursor:
    """A position in the mapping that never leaves it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.end = len(data)

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def take(self, size: int, what: str) -> int:
        """Advance over `size` bytes and return where they begin."""
        at = self.at
        if size > self.end - at:
            raise self.fail(f"{what} needs {size} bytes at offset {at}, the file ends at {self.end}")
        self.at = at + size
        return at

    def scalar(self, kind: int, what: str) -> int | float | bool:
        form = _SCALARS[kind]
        value: int | float | bool = form.unpack_from(self.data, self.take(form.size, what))[0]
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar(4, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(10, what))

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.u64(f"length of {what}")
        if length > limit:
            raise self.fail(f"{what} claims {length} bytes, the limit is {limit}")
        at = self.take(length, what)
        return self._text(at, length, what)

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the loop is written out because a vocabulary has 150,000 of them."""
        data, end, at = self.data, self.end, self.at
        length_at = _SCALARS[10].unpack_from
        out: list[str] = []
        for i in range(count):
            if end - at < 8:
                raise self.fail(f"{what}[{i}] needs 8 bytes at offset {at}, the file ends at {end}")
            length: int = length_at(data, at)[0]
            at += 8
            if length > end - at:
                raise self.fail(f"{what}[{i}] needs {length} bytes at offset {at}, the file ends at {end}")
            try:
                out.append(data[at : at + length].decode())
            except UnicodeDecodeError as error:
                raise self.fail(f"{what}[{i}] is not UTF-8: {error.reason} at byte {error.start}") from error
            at += length
        self.at = at
        return out

    def _text(self, at: int, length: int, what: str) -> str:
        try:
            return self.data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from error


def read_gguf(path: Path) -> GgufFile:
    """Map and parse a GGUF file. Raises CheckpointError for whatever is wrong with it."""
    cursor = _Cursor(path, _map(path))
    version = _version(cursor)
    tensor_count, entry_count = cursor.u64("tensor count"), cursor.u64("metadata count")
    # The smallest entries: key 8 + type 4 + value 1; name 8 + dimension count 4 + one 8 + type 4 + offset 8.
    _bounded(cursor, "metadata count", entry_count, MAX_ENTRIES, 13)
    _bounded(cursor, "tensor count", tensor_count, MAX_ENTRIES, 32)
    metadata: dict[str, Value] = {}
    for _ in range(entry_count):
        key = cursor.string("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = _value(cursor, key)
    return GgufFile(path, version, metadata, _tensors(cursor, tensor_count, _alignment(cursor, metadata)))


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: not a GGUF file (it is empty)") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _version(cursor: _Cursor) -> int:
    magic = cursor.data[cursor.take(4, "the magic") : cursor.at]
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file (begins with {magic!r}, not {MAGIC!r})")
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise cursor.fail("big-endian GGUF is not supported; convert it to little-endian")
    raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are); convert the model again")


def _bounded(cursor: _Cursor, what: str, count: int, limit: int, unit: int) -> None:
    """Refuse a count that is over the limit, or that the rest of the file could not hold at `unit` bytes each."""
    rest = cursor.end - cursor.at
    if count > limit:
        raise cursor.fail(f"{what} is {count}, the limit is {limit}")
    if count * unit > rest:
        raise cursor.fail(f"{what} is {count}, at least {count * unit} bytes, but only {rest} are left in the file")


def _value(cursor: _Cursor, key: str) -> Value:
    what = f"metadata {key!r}"
    kind = cursor.u32(f"type of {what}")
    if kind in _SCALARS:
        return cursor.scalar(kind, what)
    if kind == _STRING:
        return cursor.string(what)
    if kind != _ARRAY:
        raise cursor.fail(f"{what} has unknown type {kind}")
    item = cursor.u32(f"item type of {what}")
    count = cursor.u64(f"length of {what}")
    if item == _STRING:
        _bounded(cursor, f"length of {what}", count, MAX_ARRAY, 8)
        return cursor.strings(count, what)
    if item == _ARRAY:
        raise cursor.fail(f"{what} is an array of arrays, which no supported model has")
    if item not in _ARRAY_DTYPES:
        raise cursor.fail(f"{what} is an array of unknown type {item}")
    dtype = np.dtype(_ARRAY_DTYPES[item])
    _bounded(cursor, f"length of {what}", count, MAX_ARRAY, dtype.itemsize)
    at = cursor.take(count * dtype.itemsize, what)
    return np.frombuffer(cursor.data[at : cursor.at], dtype=dtype)


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= 1 << 20 or value & (value - 1):
        raise cursor.fail(f"general.alignment is {value!r}, not a power of two up to 1048576")
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    entries: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for _ in range(count):
        name = cursor.string("a tensor name", MAX_NAME_BYTES)
        if name in entries:
            raise cursor.fail(f"tensor {name!r} appears twice")
        rank = cursor.u32(f"rank of tensor {name!r}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise cursor.fail(f"tensor {name!r} has {rank} dimensions, 1 to {MAX_DIMENSIONS} are possible")
        shape = tuple(cursor.u64(f"dimension of tensor {name!r}") for _ in range(rank))[::-1]
        number = cursor.u32(f"type of tensor {name!r}")
        type_name = TENSOR_TYPES.get(number, f"number {number}")
        if type_name not in LAYOUTS:
            raise cursor.fail(f"tensor {name!r} has type {type_name}; supported are {', '.join(LAYOUTS)}")
        entries[name] = (shape, type_name, cursor.u64(f"offset of tensor {name!r}"))
    start = -(-cursor.at // alignment) * alignment
    whole = np.frombuffer(cursor.data, dtype=np.uint8)
    tensors = {name: _tensor(cursor, whole, start, alignment, name, *entry) for name, entry in entries.items()}
    _check_overlap(cursor, {name: (entry[2], tensors[name].data.nbytes) for name, entry in entries.items()})
    return tensors


def _tensor(
    cursor: _Cursor,
    whole: NDArray[np.uint8],
    start: int,
    alignment: int,
    name: str,
    shape: tuple[int, ...],
    type_name: str,
    offset: int,
) -> GgufTensor:
    elements = LAYOUTS[type_name].elements
    if 0 in shape:
        raise cursor.fail(f"tensor {name!r} has an empty shape {shape}")
    if shape[-1] % elements:
        raise cursor.fail(f"tensor {name!r}: row of {shape[-1]} is not a multiple of {type_name}'s block of {elements}")
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r}: offset {offset} is not a multiple of the alignment {alignment}")
    # Python's integers do not overflow: a product past the file's size is simply too large.
    rows, width = math.prod(shape[:-1]), row_bytes(type_name, shape[-1])
    size = rows * width
    if size > cursor.end - start - offset:
        raise cursor.fail(
            f"tensor {name!r} of shape {shape} needs {size} bytes at offset {start + offset}, "
            f"the file ends at {cursor.end}"
        )
    return GgufTensor(name, shape, type_name, whole[start + offset : start + offset + size].reshape(rows, width))


def _check_overlap(cursor: _Cursor, spans: dict[str, tuple[int, int]]) -> None:
    """Two tensors may not share bytes: no writer does that, and it is how a small file poses as a large model."""
    end, before = 0, ""
    for name, (offset, size) in sorted(spans.items(), key=lambda item: item[1]):
        if offset < end:
            raise cursor.fail(f"tensor {name!r} at offset {offset} overlaps {before!r}, which ends at {end}")
        end, before = offset + size, name
