"""Cost of one `QuantLinear` node at a size of Qwen2.5-Coder-1.5B (K = 1536, N = 8960), beside ONNX Runtime's own op.

- `linear_FORMAT_mM` (ms): M rows times a weight in FORMAT with 8-bit activations; `_a16` with 16-bit ones, which
  `exact` bundles use. The peer is MatMulNBits of 4 bits, block 32, accuracy_level 4, in the same run.
- `linear_FORMAT_mM_roofline` (share): the time that the machine itself would take, over that time, without a peer. Its
  limit is the longer of two: reading the weight at the read bandwidth, and as many multiply-adds (twice for `_a16`)
  at the rate of MatMulInteger on large square matrices, both measured in the same run.

A model holds several nodes with a weight each, more than the last-level cache keeps, as a network does; a figure is
the median of whole runs divided by the nodes. The activations are the same for all. Where a last-level cache is larger
than these weights, the machine reads them faster than its memory, and `_roofline` of few rows may exceed 1.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from cascade import ops
from gateway.cli.report import Report, Row, report, row
from tests.bench.machine import ReadBandwidth, int8_macs_per_s
from tests.cascade.ops.linear_model import isa_named, random_panels

K, N = 1536, 8960
ROWS = (1, 4, 16, 64, 256, 512)
NODES = 6
"""6 x 7.9 MB of q4k: more than the 32 MB of L3 of the machines that this was written on."""
SEED = 20
PEER = "onnxruntime MatMulNBits"


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of weight and activations: the name in a row's name, the format and `act_bits`."""

    name: str
    format: str
    act_bits: int


CASES = (Case("q4k", "q4k", 8), Case("q4k_a16", "q4k", 16), Case("q6k", "q6k", 8), Case("c8", "c8", 8))


def run(*, threads: int | None = None, seconds: float = 0.5, isa: str | None = None) -> list[Row]:
    """All rows; every figure is measured over `seconds` of runs, at least 3. `threads`: one a core by default."""
    threads = threads or len(os.sched_getaffinity(0))
    bandwidth = ReadBandwidth(threads)
    peak = int8_macs_per_s(threads)
    peer = _Bench(_peer_model(), threads, seconds)
    peer_ms = {rows: peer.node_ms(rows) for rows in ROWS}
    figures = [row("int8_peak", "GMAC/s", peak / 1e9)]
    for case in CASES:
        with isa_named(isa or ops.isa()):
            bench = _Bench(_linear_model(case), threads, seconds)
        for rows in ROWS:
            bandwidth.measure()
            ms = bench.node_ms(rows)
            figure = row(f"linear_{case.name}_m{rows}", "ms", ms)
            peer_row = row("", "ms", peer_ms[rows])
            figure |= {"peer": PEER, "peer_value": peer_row["value"], "ratio": float(f"{ms / peer_ms[rows]:.4g}")}
            figures.append(figure)
            limit_s = max(bench.weight_bytes / bandwidth.bytes_per_s(), rows * K * N * case.act_bits / 8 / peak)
            figures.append(row(f"linear_{case.name}_m{rows}_roofline", "share", 1000 * limit_s / ms))
    return [row("read_bandwidth", "GB/s", bandwidth.bytes_per_s() / 1e9), *figures]


def measure_kernels(*, threads: int | None = None, seconds: float = 0.5) -> Report:
    """`run` in the frame that all benchmarks share."""
    return report("kernels", "none (one node)", run(threads=threads, seconds=seconds))


class _Bench:
    """A session over NODES nodes that differ in their weight only."""

    def __init__(self, model: ModelProto, threads: int, seconds: float) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(str(ops.library_path()))
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._seconds = seconds
        self.weight_bytes = sum(len(tensor.raw_data) for tensor in model.graph.initializer) // NODES

    def node_ms(self, rows: int) -> float:
        """Median milliseconds of one node over `rows` rows."""
        binding = self._session.io_binding()
        binding.bind_cpu_input("x", np.random.default_rng(SEED).standard_normal((rows, K), np.float32))
        for output in self._session.get_outputs():
            binding.bind_output(output.name)
        self._session.run_with_iobinding(binding)
        times: list[float] = []
        while sum(times) < self._seconds or len(times) < 3:
            start = time.perf_counter()
            self._session.run_with_iobinding(binding)
            times.append(time.perf_counter() - start)
        return 1000 * statistics.median(times) / NODES


def _linear_model(case: Case) -> ModelProto:
    rng = np.random.default_rng(SEED)
    attributes: dict[str, Any] = {
        "k": K,
        "rows": [N],
        "formats": case.format,
        "act_group": 0,
        "act_bits": case.act_bits,
        "swiglu": 0,
    }

    def node(index: int) -> tuple[NodeProto, dict[str, np.ndarray]]:
        weight = f"weight{index}"
        op = helper.make_node("QuantLinear", ["x", "", weight], [f"y{index}"], domain="stepwell", **attributes)
        return op, {weight: random_panels(case.format, N, K, rng)}

    return _model(node)


def _peer_model() -> ModelProto:
    rng = np.random.default_rng(SEED)
    attributes: dict[str, Any] = {"K": K, "N": N, "bits": 4, "block_size": 32, "accuracy_level": 4}

    def node(index: int) -> tuple[NodeProto, dict[str, np.ndarray]]:
        codes, scales = f"codes{index}", f"scales{index}"
        op = helper.make_node("MatMulNBits", ["x", codes, scales], [f"y{index}"], domain="com.microsoft", **attributes)
        return op, {
            codes: rng.integers(0, 256, (N, K // 32, 16), np.uint8),
            scales: rng.normal(0, 0.01, N * (K // 32)).astype(np.float32),
        }

    return _model(node)


def _model(node: Callable[[int], tuple[NodeProto, dict[str, np.ndarray]]]) -> ModelProto:
    nodes, initializers = [], []
    for index in range(NODES):
        made, weights = node(index)
        nodes.append(made)
        initializers += [numpy_helper.from_array(array, name) for name, array in weights.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", K])]
    outputs = [helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, ["T", N]) for index in range(NODES)]
    graph = helper.make_graph(nodes, "kernels", inputs, outputs, initializers)
    domains = [
        helper.make_opsetid(domain, version) for domain, version in (("", 17), ("stepwell", 1), ("com.microsoft", 1))
    ]
    return helper.make_model(graph, opset_imports=domains, ir_version=9)


if __name__ == "__main__":
    for figure in run():
        ratio = "" if figure["ratio"] is None else f"   {figure['ratio']:.2f} of {figure['peer']}"
        print(f"{figure['name']:28} {figure['value']:9.3f} {figure['unit']}{ratio}")
