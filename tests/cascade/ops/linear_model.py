"""One-node models of the linear ops on onnxruntime, and random panels to feed them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from cascade import ops
from exporters.panels import segment_bytes, unit_dtype

INTEGER_FORMATS = ("q4", "q4m", "q6s", "q6m", "q8", "q4k", "q6k2", "q6k", "c8")
FLOAT_FORMATS = ("f16", "bf16", "f32")
FORMATS = INTEGER_FORMATS + FLOAT_FORMATS
OTHER_ISAS = [isa for isa in ops.available_isas() if isa != "portable"]

_DTYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}

Array = NDArray[Any]


@contextmanager
def isa_named(name: str) -> Iterator[None]:
    """Kernels created inside use this ISA."""
    before = os.environ.get("STEPWELL_ISA")
    os.environ["STEPWELL_ISA"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["STEPWELL_ISA"]
        else:
            os.environ["STEPWELL_ISA"] = before


def op_session(
    op: str,
    inputs: Sequence[np.dtype[Any] | None],
    outputs: Sequence[int],
    *,
    isa: str = "portable",
    threads: int = 1,
    **attributes: Any,
) -> ort.InferenceSession:
    """A session of one `stepwell` op on `isa`: inputs i0, i1, … of any shape, None where one is left out."""
    names = [f"i{i}" if dtype is not None else "" for i, dtype in enumerate(inputs)]
    outs = [f"o{i}" for i in range(len(outputs))]
    graph = helper.make_graph(
        [helper.make_node(op, names, outs, domain="stepwell", **attributes)],
        op,
        [
            helper.make_tensor_value_info(name, _DTYPES[dtype], None)
            for name, dtype in zip(names, inputs, strict=True)
            if dtype is not None
        ],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in zip(outs, outputs, strict=True)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stepwell", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(ops.library_path()))
    with isa_named(isa):
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_session(session: ort.InferenceSession, inputs: Sequence[Array | None]) -> list[Array]:
    """The outputs of a session that `op_session` made."""
    results: list[Array] = session.run(
        None, {f"i{i}": np.ascontiguousarray(x) for i, x in enumerate(inputs) if x is not None}
    )
    return results


def run_op(op: str, inputs: Sequence[Array | None], outputs: Sequence[int], **keywords: Any) -> list[Array]:
    """Run one `stepwell` op; None is an input that is left out; `outputs` are ONNX element types.

    Keywords: isa, threads and the op's attributes.
    """
    session = op_session(op, [None if x is None else x.dtype for x in inputs], outputs, **keywords)
    return run_session(session, inputs)


def quant_linear(
    x: Array, weight: Array, *, k: int, rows: Sequence[int], formats: Sequence[str], isa: str = "portable", **kw: Any
) -> Array:
    """QuantLinear; keywords: x_scale, bias, residual, act_group, act_bits, swiglu, threads."""
    inputs = [x, kw.pop("x_scale", None), weight, kw.pop("bias", None), kw.pop("residual", None)]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"act_group": 0, "act_bits": 8, "swiglu": 0} | kw
    return run_op(
        "QuantLinear",
        inputs,
        [TensorProto.FLOAT],
        isa=isa,
        k=k,
        rows=list(rows),
        formats=",".join(formats),
        **attributes,
    )[0]


def random_panels(format_: str, rows: int, k: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A segment of random codes with finite scales of both signs."""
    blob = rng.integers(0, 256, segment_bytes(format_, rows, k), np.uint8)
    units = blob.view(unit_dtype(format_, k))
    limit_codes(units, format_)
    for name in units.dtype.names or ():
        part = units[name]
        if name in ("scale", "min") or (name == "codes" and format_ == "f16"):
            part[...] = rng.normal(0, 0.01, part.shape).astype(np.float16).view(np.uint16)
        elif name == "channel" or (name == "codes" and format_ == "f32"):
            part[...] = rng.normal(0, 0.01, part.shape).astype(np.float32).view(part.dtype)
        elif name == "codes" and format_ == "bf16":
            part[...] = (rng.normal(0, 0.01, part.shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif name in ("sc", "mn") and format_ != "q6k":
            part[...] = rng.integers(0, 64, part.shape)
    return blob


def limit_codes(units: Array, format_: str) -> None:
    """Clear the highest bit of `q6k2` codes, which have five."""
    if format_ == "q6k2":
        planes = units["codes"].view(np.uint8).reshape(*units.shape, 8, 384)
        planes[..., 256:] &= 0x55
