"""The ONNX graph of a decoder-only transformer over the ops of domain `stepwell` (design, section 3).

The graph is ragged: T new tokens of B sequences, no padding. It holds no weights: every one of them is external
data in `weights.bin`, at the offset that `WeightTable` gives, so that the file is a few hundred kilobytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cascade.bundle import WEIGHTS_FILE, KvDtype
from exporters.checkpoint import Checkpoint
from exporters.recipes import LinearPlan, ModelPlan

DOMAIN = "stepwell"
OPSET = 17
IR_VERSION = 9
"""With opset 17, loads in every onnxruntime since 1.16."""

_KV_TYPES: dict[KvDtype, int] = {
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
}


@dataclass(frozen=True, slots=True)
class Weight:
    """One initializer in `weights.bin`."""

    dtype: int
    """TensorProto.UINT8 (panels) or FLOAT (norms, biases)."""
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(slots=True)
class _Builder:
    """Nodes and initializers as they are added; `add` returns the name of a node's first output."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, op: str, name: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add an op of our domain."""
        return self._append(op, name, inputs, outputs, DOMAIN, attributes)

    def standard(self, op: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add an op of ONNX's own domain."""
        return self._append(op, name, inputs, (), "", attributes)

    def constant(self, name: str, values: np.ndarray[Any, Any]) -> str:
        """Add a small constant that lies in the graph itself."""
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def _append(
        self,
        op: str,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        domain: str,
        attributes: dict[str, Any],
    ) -> str:
        names = list(outputs) or [name]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=name, domain=domain, **attributes))
        return names[0]


def build_graph(
    checkpoint: Checkpoint, plan: ModelPlan, weights: dict[str, Weight], kv_dtype: KvDtype, block_size: int
) -> onnx.ModelProto:
    """The graph of `checkpoint` under `plan`.

    `weights` has the panels under the graph names of the plan (and `embed`), norms under their canonical
    names, and `layers.{i}.qkv.bias` where the model has biases.
    """
    d = checkpoint.dimensions
    build = _Builder()
    for name, weight in weights.items():
        build.initializers.append(_external(name, weight))
    rope = _rope(build, checkpoint)
    hidden = build.add(
        "EmbedDequant", "embedding", ["input_ids", "embed"], k=d.hidden, rows=d.vocab, format=plan.embed_format
    )
    for i in range(d.layers):
        hidden = _layer(build, checkpoint, plan, weights, f"layers.{i}", hidden, rope, kv_dtype)
    # Only the rows whose logits are asked for go through the last norm and the head.
    rows = build.standard("Gather", "last_hidden", [hidden, "logit_rows"], axis=0)
    head = plan.linears["head"]
    normed = _norm(build, checkpoint, "final_norm", rows, head)
    head_weight = "embed" if "head" not in weights else "head"
    _linear(build, "logits", head, normed, head_weight)
    graph = helper.make_graph(
        build.nodes,
        "stepwell",
        _inputs(checkpoint, kv_dtype, block_size),
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["R", d.vocab])],
        build.initializers,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="stepwell")


def _external(name: str, weight: Weight) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=weight.dtype, dims=weight.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", WEIGHTS_FILE), ("offset", weight.offset), ("length", weight.length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _inputs(checkpoint: Checkpoint, kv_dtype: KvDtype, block_size: int) -> list[onnx.ValueInfoProto]:
    d = checkpoint.dimensions
    signature: list[tuple[str, int, list[str | int]]] = [
        ("input_ids", TensorProto.INT64, ["T"]),
        ("positions", TensorProto.INT32, ["T"]),
        ("slot_mapping", TensorProto.INT32, ["T"]),
        ("cu_seqlens", TensorProto.INT32, ["B_plus_1"]),
        ("past_lens", TensorProto.INT32, ["B"]),
        ("block_table", TensorProto.INT32, ["B", "M"]),
        ("logit_rows", TensorProto.INT32, ["R"]),
    ]
    for i in range(d.layers):
        for side in ("key", "value"):
            pages: list[str | int] = ["num_blocks", block_size, d.kv_heads]
            signature.append((f"{side}_cache.{i}", _KV_TYPES[kv_dtype], [*pages, d.head_dim]))
            if kv_dtype == "int8":
                signature.append((f"{side}_scale.{i}", TensorProto.FLOAT, pages))
    return [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in signature]


def _rope(build: _Builder, checkpoint: Checkpoint) -> str:
    """cos and sin of every token's angles, [T, head_dim], once per step for all layers."""
    axis = build.constant("rope.axis", np.array([1], np.int64))
    frequencies = build.constant("rope.inv_freq", checkpoint.rope.inv_freq()[None, :])
    positions = build.standard("Cast", "rope.positions", ["positions"], to=TensorProto.FLOAT)
    column = build.standard("Unsqueeze", "rope.column", [positions, axis])
    angles = build.standard("Mul", "rope.angles", [column, frequencies])
    halves = [build.standard(op, f"rope.{op.lower()}", [angles]) for op in ("Cos", "Sin")]
    joined = build.standard("Concat", "rope.joined", halves, axis=1)
    factor = checkpoint.rope.attention_factor
    if factor == 1.0:
        return joined
    scale = build.constant("rope.attention_factor", np.array(factor, np.float32))
    return build.standard("Mul", "rope.scaled", [joined, scale])


def _norm(build: _Builder, checkpoint: Checkpoint, name: str, x: str, consumer: LinearPlan) -> list[str]:
    """RMSNorm for `consumer`: its inputs [rows] or [int8 rows, scales]."""
    inputs, epsilon = [x, name], checkpoint.rms_epsilon
    if not consumer.int8_input:
        return [build.add("RMSNorm", f"{name}.rows", inputs, epsilon=epsilon)]
    outputs = [f"{name}.rows", f"{name}.scale"]
    build.add("RMSNormQuant", f"{name}.norm", inputs, outputs, epsilon=epsilon, act_group=consumer.act_group)
    return outputs


def _linear(
    build: _Builder,
    name: str,
    plan: LinearPlan,
    x: list[str],
    weight: str,
    *,
    bias: str = "",
    residual: str = "",
    swiglu: bool = False,
) -> str:
    """QuantLinear whose output is called `name`."""
    inputs = [*x, *[""] * (2 - len(x)), weight, bias, residual]
    while not inputs[-1]:
        inputs.pop()
    return build.add(
        "QuantLinear",
        name,
        inputs,
        k=plan.k,
        rows=list(plan.rows),
        formats=",".join(plan.formats),
        act_group=plan.act_group,
        act_bits=plan.act_bits,
        swiglu=int(swiglu),
    )


def _layer(
    build: _Builder,
    checkpoint: Checkpoint,
    plan: ModelPlan,
    weights: dict[str, Weight],
    layer: str,
    hidden: str,
    rope: str,
    kv_dtype: KvDtype,
) -> str:
    """One transformer layer over `hidden` [T, hidden]; returns the name of the new hidden rows."""
    d = checkpoint.dimensions
    index = layer.rpartition(".")[2]
    qkv, o, gate_up, down = (plan.linears[f"{layer}.{part}"] for part in ("qkv", "o", "gate_up", "down"))
    normed = _norm(build, checkpoint, f"{layer}.attn_norm", hidden, qkv)
    bias = f"{layer}.qkv.bias" if f"{layer}.qkv.bias" in weights else ""
    projected = _linear(build, f"{layer}.qkv.out", qkv, normed, f"{layer}.qkv", bias=bias)
    scales = [f"key_scale.{index}", f"value_scale.{index}"] if kv_dtype == "int8" else ["", ""]
    head_norms = [f"{layer}.q_norm", f"{layer}.k_norm"] if f"{layer}.q_norm" in weights else ["", ""]
    inputs = [projected, rope, "slot_mapping", "cu_seqlens", "past_lens", "block_table"]
    inputs += [f"key_cache.{index}", f"value_cache.{index}", *scales, *head_norms]
    while not inputs[-1]:
        inputs.pop()
    attended = build.add(
        "PagedAttention",
        f"{layer}.attention",
        inputs,
        heads=d.heads,
        kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        scale=d.head_dim**-0.5,
        rope_interleaved=int(checkpoint.rope.interleaved),
        window=0,
        sinks=0,
        epsilon=checkpoint.rms_epsilon,
    )
    hidden = _linear(build, f"{layer}.o.out", o, [attended], f"{layer}.o", residual=hidden)
    normed = _norm(build, checkpoint, f"{layer}.ffn_norm", hidden, gate_up)
    gated = _linear(build, f"{layer}.gate_up.out", gate_up, normed, f"{layer}.gate_up", swiglu=True)
    return _linear(build, f"{layer}.down.out", down, [gated], f"{layer}.down", residual=hidden)
