"""The safetensors container, memory-mapped and checked: a JSON header and one block of tensor bytes.

Read here rather than through the `safetensors` package because its numpy interface has no bfloat16 and
copies what it returns; an export must be able to read a 3 GB shard row by row.
"""

import itertools
import json
import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cascade.errors import CheckpointError
from exporters.gguf.blocks import FLOAT_TYPES, row_bytes

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class Entry(NamedTuple):
    """One tensor of a file: shape in torch's order, type as in `blocks.LAYOUTS`, uint8 [rows, row_bytes] view."""

    shape: tuple[int, ...]
    type: str
    data: NDArray[np.uint8]


def read_safetensors(path: Path) -> dict[str, Entry]:
    """Map a file and return its tensors by name. Raises CheckpointError naming what is wrong."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: header of {length} bytes in a file of {size}: not a safetensors file, or cut off"
        )
    header = _header(path, data[8 : 8 + length])
    whole = np.frombuffer(data, dtype=np.uint8)[8 + length :]
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, description in header.items():
        if name == "__metadata__":
            continue
        begin, end, shape, type_name = _describe(path, name, description, len(whole))
        rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
        entries[name] = Entry(shape, type_name, whole[begin:end].reshape(rows, -1))
        spans.append((begin, end, name))
    spans.sort()
    for (_, end, before), (begin, _, name) in itertools.pairwise(spans):
        if begin < end:
            raise CheckpointError(f"{path}: tensor {name!r} at {begin} overlaps {before!r}, which ends at {end}")
    return entries


def _header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"{path}: a name appears twice in the header")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    return header


def _describe(path: Path, name: str, description: Any, size: int) -> tuple[int, int, tuple[int, ...], str]:
    try:
        type_name, shape = str(description["dtype"]), description["shape"]
        begin, end = description["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} is described wrongly: {error!r}") from error
    if type_name not in FLOAT_TYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has type {type_name}; supported are F32, F16, BF16")
    if not whole or not shape or 0 in shape:
        raise CheckpointError(f"{path}: tensor {name!r} has shape {shape} and offsets {begin}, {end}")
    need = math.prod(shape[:-1]) * row_bytes(type_name, shape[-1])
    if end - begin != need or end > size:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} needs {need} bytes, has {begin} to {end} of {size}"
        )
    return begin, end, tuple(shape), type_name
