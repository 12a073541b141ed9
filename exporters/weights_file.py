"""Writing `weights.bin`: blobs one after another, each at an offset that a memory map can start at."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from exporters.graph import Weight

ALIGNMENT = 4096
"""Page size: onnxruntime maps external data in place only at page boundaries."""


def aligned(size: int) -> int:
    """`size` rounded up to a whole number of pages."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class WeightsFile:
    """Sequential writer; keeps the sha256 of all bytes and the place of every blob."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[str, Weight] = {}
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._offset = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._offset

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes written so far."""
        return self._digest.hexdigest()

    def add_panels(self, name: str, chunks: Iterable[NDArray[np.uint8]]) -> None:
        """Write a blob of uint8 panels that comes in chunks."""
        start = self._align()
        for chunk in chunks:
            self._write(chunk.data)
        length = self._offset - start
        self.weights[name] = Weight(TensorProto.UINT8, (length,), start, length)

    def add_floats(self, name: str, values: NDArray[np.float32]) -> None:
        """Write a float32 tensor."""
        start = self._align()
        self._write(np.ascontiguousarray(values, "<f4").data.cast("B"))
        self.weights[name] = Weight(TensorProto.FLOAT, values.shape, start, self._offset - start)

    def _align(self) -> int:
        self._write(bytes(aligned(self._offset) - self._offset))
        return self._offset

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._offset += len(data)
