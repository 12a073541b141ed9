"""A one-node `PagedAttention` model on onnxruntime, for tests and for `tests/bench/attention.py`.

Every input is an OrtValue: the op writes into its caches, and writing into the buffer of a NumPy feed is not defined.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from cascade import ops

INPUTS = (
    ("qkv", TensorProto.FLOAT, 2),
    ("rope", TensorProto.FLOAT, 2),
    ("slot_mapping", TensorProto.INT32, 1),
    ("cu_seqlens", TensorProto.INT32, 1),
    ("past_lens", TensorProto.INT32, 1),
    ("block_table", TensorProto.INT32, 2),
    ("key_cache", None, 4),
    ("value_cache", None, 4),
    ("key_scale", TensorProto.FLOAT, 3),
    ("value_scale", TensorProto.FLOAT, 3),
    ("q_norm", TensorProto.FLOAT, 1),
    ("k_norm", TensorProto.FLOAT, 1),
    ("tree_mask", TensorProto.UINT8, 2),
)
"""The op's inputs in order: name, element type (None: that of the caches), rank."""

KV_DTYPES: dict[str, tuple[int, type[np.generic]]] = {
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, np.uint16),
    "int8": (TensorProto.INT8, np.int8),
}
"""Element type of the caches in ONNX and in NumPy, which has no bfloat16: its bits are held as uint16."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The node's attributes and the element type of its caches."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    kv_dtype: str = "float16"
    scale: float | None = None
    """None: head_dim ** -0.5."""
    rope_interleaved: bool = False
    window: int = 0
    sinks: int = 0
    epsilon: float = 1e-6

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def attributes(self) -> dict[str, int | float]:
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "scale": self.softmax_scale,
            "rope_interleaved": int(self.rope_interleaved),
            "window": self.window,
            "sinks": self.sinks,
            "epsilon": self.epsilon,
        }


@dataclass(slots=True)
class Attention:
    """A session of one node. `given` names the optional inputs that the node has."""

    geometry: Geometry
    given: frozenset[str] = frozenset()
    isa: str | None = None
    threads: int = 1
    attributes: dict[str, int | float] = field(default_factory=dict)
    """Overrides of the geometry's; this and what follows is for tests of refusals."""
    without_attribute: str | None = None
    cache_types: tuple[type[np.generic], type[np.generic]] | None = None
    """NumPy types of key_cache and value_cache in the model, where they are not the geometry's."""
    session: ort.InferenceSession = field(init=False)

    def __post_init__(self) -> None:
        kv_type = KV_DTYPES[self.geometry.kv_dtype][0]
        cache_types = [kv_type, kv_type]
        if self.cache_types is not None:
            cache_types = [helper.np_dtype_to_tensor_dtype(np.dtype(t)) for t in self.cache_types]
        attributes = {**self.geometry.attributes, **self.attributes}
        attributes.pop(self.without_attribute or "", None)
        present = [name for i, (name, _, _) in enumerate(INPUTS) if i < 8 or name in self.given]
        names = [name if name in present else "" for name, _, _ in INPUTS]
        while not names[-1]:
            names.pop()
        graph = helper.make_graph(
            [helper.make_node("PagedAttention", names, ["out"], name="attention", domain="stepwell", **attributes)],
            "one_node",
            [
                helper.make_tensor_value_info(
                    name, cache_types[name == "value_cache"] if kind is None else kind, [None] * rank
                )
                for name, kind, rank in INPUTS
                if name in present
            ],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, [None, None])],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stepwell", 1)]
        model = helper.make_model(graph, ir_version=9, opset_imports=opsets)
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 4
        options.register_custom_ops_library(str(ops.library_path()))
        with chosen_isa(self.isa):
            self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def bind(self, inputs: dict[str, ort.OrtValue]) -> ort.IOBinding:
        """A binding of all inputs, with an output that onnxruntime allocates."""
        binding = self.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("out")
        return binding

    def run(self, inputs: dict[str, ort.OrtValue]) -> NDArray[np.float32]:
        """The op's output [T, heads * head_dim]; the caches among `inputs` are updated."""
        binding = self.bind(inputs)
        self.session.run_with_iobinding(binding)
        return np.array(binding.get_outputs()[0].numpy())


@contextmanager
def chosen_isa(isa: str | None) -> Iterator[None]:
    """Sessions created inside use `isa` (None: the best of the machine, whatever the environment says)."""
    before = os.environ.pop("STEPWELL_ISA", None)
    if isa is not None:
        os.environ["STEPWELL_ISA"] = isa
    try:
        yield
    finally:
        os.environ.pop("STEPWELL_ISA", None)
        if before is not None:
            os.environ["STEPWELL_ISA"] = before


def ort_value(array: Array) -> ort.OrtValue:
    """An OrtValue on the memory of `array` (C order), which sees what the op writes; uint16 is taken as bfloat16."""
    if array.dtype == np.uint16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)
