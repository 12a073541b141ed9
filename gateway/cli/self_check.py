"""A two-op graph through the op library, held against NumPy: does what was compiled compute on this processor?"""

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from cascade import ops
from cascade.errors import StepwellError

ROWS, K, N = 3, 64, 16
EPSILON = 1e-6
TOLERANCE = 1e-3
"""Far above the error of 16-bit activations (about 1e-5), far below that of any wrong code."""


def largest_error() -> float:
    """Largest error of norm and 8-bit linear relative to the largest result; StepwellError when it is not small."""
    random = np.random.default_rng(7)
    x = random.standard_normal((ROWS, K)).astype(np.float32)
    gamma = random.uniform(0.5, 1.5, K).astype(np.float32)
    codes = random.integers(1, 256, (N, K), dtype=np.uint8)
    scales = random.uniform(0.01, 0.02, (N, K // 32)).astype(np.float16)
    found = _run(x, gamma, pack_q8(codes, scales))
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPSILON) * gamma
    weight = (codes.astype(np.float64) - 128) * np.repeat(scales.astype(np.float64), 32, axis=1)
    expected = normed @ weight.T
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error < TOLERANCE:  # also true for NaN
        raise StepwellError(f"computes wrongly on {ops.isa()}: relative error {error:.1e}; try STEPWELL_ISA=portable")
    return error


def pack_q8(codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Codes [16, K] and scales [16, K/32] as one panel of `q8` (cascade/ops/FORMAT.md)."""
    units = []
    for unit in range(codes.shape[1] // 32):
        plane = codes[:, 32 * unit : 32 * unit + 32].reshape(N, 8, 4).transpose(1, 0, 2)
        units.append(scales[:, unit].copy().view(np.uint8))
        units.append(plane.reshape(-1))
    return np.concatenate(units)


def _run(x: NDArray[np.float32], gamma: NDArray[np.float32], weight: NDArray[np.uint8]) -> NDArray[np.float32]:
    norm = helper.make_node("RMSNorm", ["x", "gamma"], ["normed"], domain="stepwell", epsilon=EPSILON)
    linear = helper.make_node(
        "QuantLinear",
        ["normed", "", "weight"],
        ["y"],
        domain="stepwell",
        k=K,
        rows=[N],
        formats="q8",
        act_group=0,
        act_bits=16,
        swiglu=0,
    )
    graph = helper.make_graph(
        [norm, linear],
        "self-check",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, N])],
        [onnx.numpy_helper.from_array(gamma, "gamma"), onnx.numpy_helper.from_array(weight, "weight")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stepwell", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(ops.library_path()))
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], enable_fallback=0
    )
    result: NDArray[np.float32] = session.run(["y"], {"x": x})[0]
    return result
