"""What the machine can do, measured beside the figures that are held against it."""

import ctypes
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import psutil
from onnx import TensorProto, helper, numpy_helper

from gateway.cli.doctor import WANTED_FLAGS
from tests.bench.worker import SEED

READ_BYTES = 512 << 20
"""Far more than any last-level cache of the machines that this is for."""
INT8_SIZE = 2048
RUNS = 5

_libc = ctypes.CDLL(None)
_libc.memchr.restype, _libc.memchr.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


class ReadBandwidth:
    """Reads READ_BYTES from memory with some threads: libc's vectorised search for a byte that is not there."""

    def __init__(self, threads: int) -> None:
        self._parts = [np.full(READ_BYTES // threads, 2, np.uint8) for _ in range(threads)]
        self._samples: list[float] = []

    def measure(self) -> None:
        """Take a few samples; called between the passes that the figure is held against."""
        with ThreadPoolExecutor(len(self._parts)) as pool:
            for _ in range(RUNS):
                start = time.perf_counter()
                list(pool.map(_read, self._parts))
                self._samples.append(READ_BYTES / (time.perf_counter() - start))

    def bytes_per_s(self) -> float:
        """Median of all samples."""
        return statistics.median(self._samples)


def _read(part: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
    assert _libc.memchr(part.ctypes.data, 1, part.size) is None


def int8_macs_per_s(threads: int) -> float:
    """Multiply-adds a second of ONNX Runtime's MatMulInteger (u8 x s8) on square matrices that fit into L2 and L3."""
    n = INT8_SIZE
    rng = np.random.default_rng(SEED)
    weight = numpy_helper.from_array(rng.integers(-127, 128, (n, n), np.int8), "b")
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    inputs = [helper.make_tensor_value_info("a", TensorProto.UINT8, [n, n])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT32, [n, n])]
    graph = helper.make_graph([node], "int8", inputs, outputs, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {"a": rng.integers(0, 256, (n, n), np.uint8)}
    session.run(None, feed)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - start)
    return n**3 / statistics.median(times)


def processor_flags() -> str:
    """Those of the processor's flags that matter here, with spaces between."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return " ".join(flag for flag in (*WANTED_FLAGS, "avx512_bf16", "amx_bf16") if flag in flags)


class OtherLoad:
    """How much of the processors went to others, while only some processes were meant to run."""

    def __init__(self) -> None:
        self._others = 0.0
        self._total = 0.0

    def count(self, pids: list[int], busy: "Busy") -> None:
        """Add the time since `busy` was taken of the same processes."""
        now = Busy(pids)
        self._others += max(0.0, (now.all - busy.all) - (now.own - busy.own))
        self._total += (now.clock - busy.clock) * (os.cpu_count() or 1)

    def share(self) -> float:
        """0 to 1 of all processors' time."""
        return self._others / self._total if self._total else 0.0


class Busy:
    """Processor seconds so far: of everything on the machine, and of this process and `pids`."""

    def __init__(self, pids: list[int]) -> None:
        times = psutil.cpu_times()
        self.clock = time.perf_counter()
        self.all = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        own = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pids)]
        self.own = sum(t.user + t.system for t in own)
