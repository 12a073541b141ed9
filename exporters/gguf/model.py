"""From a parsed GGUF file to a Checkpoint: architecture, dimensions, RoPE, canonical tensor names."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from cascade.bundle import Dimensions
from cascade.errors import CheckpointError
from exporters.checkpoint import (
    ARCHITECTURES,
    Architecture,
    Checkpoint,
    RopeSpec,
    Tensor,
    check_tensors,
    expected_shapes,
)
from exporters.gguf.reader import GgufFile, GgufTensor, Value, read_gguf
from exporters.tokenizer import build_tokenizer

_TOP = {"token_embd.weight": "embed", "output_norm.weight": "final_norm", "output.weight": "head"}
_LAYER = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "ffn_norm.weight": "ffn_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
_FREQUENCIES = "rope_freqs.weight"
_LARGEST = 1 << 24
"""No dimension of a model reaches this."""


class Metadata:
    """Typed, range-checked access to metadata; `{arch}` in a key stands for the architecture."""

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        self._path = path
        self._values = values
        self.architecture = ""

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def get(self, key: str) -> Value | None:
        return self._values.get(key.replace("{arch}", self.architecture))

    def _scalar(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"metadata {key.replace('{arch}', self.architecture)!r} is missing")
            return default
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = _LARGEST) -> int:
        value = self._scalar(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one number a layer, all the same
        if type(value) is not int or not low <= value <= high:
            shown = "an array that differs by layer" if isinstance(value, np.ndarray | list) else repr(value)
            raise self.fail(f"metadata {key!r} is {shown}, not a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._scalar(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= above:
            raise self.fail(f"metadata {key!r} is {value!r}, not a number above {above}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._scalar(key, default)
        if not isinstance(value, str):
            raise self.fail(f"metadata {key!r} is not a string")
        return value


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file as a Checkpoint; the weights stay memory-mapped."""
    file = read_gguf(path)
    metadata = Metadata(path, file.metadata)
    architecture = _architecture(metadata)
    dimensions = _dimensions(metadata, file)
    factors = file.tensors.get(_FREQUENCIES)
    tensors = {
        name: _canonical(path, name, tensor)
        for tensor in file.tensors.values()
        if tensor is not factors and (name := _name(metadata, tensor.name, dimensions.layers))
    }
    check_tensors(
        path,
        tensors,
        expected_shapes(
            dimensions,
            attention_bias=architecture == "qwen2" or "layers.0.q_bias" in tensors,
            head_norms=architecture == "qwen3",
            tied="head" not in tensors,
        ),
    )
    vocabulary = build_tokenizer(path, file.metadata, dimensions.vocab)
    template = metadata.get("tokenizer.chat_template")
    return Checkpoint(
        architecture=architecture,
        dimensions=dimensions,
        rms_epsilon=metadata.number("{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(metadata, architecture, dimensions, factors),
        tensors=tensors,
        tokenizer=vocabulary.tokenizer,
        chat_template=template if isinstance(template, str) else None,
        bos_id=vocabulary.bos_id,
        eos_ids=vocabulary.eos_ids,
        add_bos=vocabulary.add_bos,
        name=metadata.text("general.name", path.stem),
        licence=metadata.text("general.license", "unknown"),
        files=(path,),
    )


def _architecture(metadata: Metadata) -> Architecture:
    found = metadata.text("general.architecture")
    metadata.architecture = found
    for known in ARCHITECTURES:
        if found == known:
            break
    else:
        raise metadata.fail(f"architecture {found!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if metadata.integer("split.count", 1, low=0, high=1 << 16) > 1:
        raise metadata.fail("is one part of a split model; join the parts with llama-gguf-split --merge first")
    if metadata.integer("{arch}.expert_count", 0, low=0):
        raise metadata.fail("is a mixture of experts, which is not supported")
    return known


def _dimensions(metadata: Metadata, file: GgufFile) -> Dimensions:
    heads = metadata.integer("{arch}.attention.head_count", high=1 << 12)
    hidden = metadata.integer("{arch}.embedding_length")
    kv_heads = metadata.integer("{arch}.attention.head_count_kv", heads, high=heads)
    head_dim = metadata.integer("{arch}.attention.key_length", max(hidden // heads, 1), high=1 << 12)
    values = metadata.integer("{arch}.attention.value_length", head_dim, high=1 << 12)
    if heads % kv_heads:
        raise metadata.fail(f"{heads} heads are not a multiple of {kv_heads} key/value heads")
    if values != head_dim:
        raise metadata.fail(f"value heads of {values} and key heads of {head_dim} elements differ: not supported")
    if head_dim % 2:
        raise metadata.fail(f"heads of {head_dim} elements cannot be rotated in pairs")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise metadata.fail("metadata 'tokenizer.ggml.tokens' is missing or not an array of strings")
    return Dimensions(
        # A block has at least one tensor, so a hostile count ends here and not in a long loop.
        layers=metadata.integer("{arch}.block_count", high=max(len(file.tensors), 1)),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=metadata.integer("{arch}.feed_forward_length"),
        vocab=metadata.integer("{arch}.vocab_size", len(tokens)),
        context_length=metadata.integer("{arch}.context_length", high=1 << 30),
    )


def _name(metadata: Metadata, name: str, layers: int) -> str:
    """Canonical name of a GGUF tensor."""
    if name in _TOP:
        return _TOP[name]
    kind, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    if kind == "blk" and number.isdecimal() and str(int(number)) == number and part in _LAYER:
        if int(number) < layers:
            return f"layers.{number}.{_LAYER[part]}"
        raise metadata.fail(f"tensor {name!r} belongs to layer {number}, the model has {layers}")
    raise metadata.fail(f"tensor {name!r} has no place in architecture {metadata.architecture}")


def _canonical(path: Path, name: str, tensor: GgufTensor) -> Tensor:
    if len(tensor.shape) == 1:
        if tensor.type not in ("F32", "F16", "BF16"):
            raise CheckpointError(f"{path}: tensor {tensor.name!r} is a vector of type {tensor.type}")
        return Tensor(name, (tensor.shape[0],), tensor.type, tensor.data.reshape(tensor.shape[0], -1))
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has shape {tensor.shape}, two dimensions are possible")
    return Tensor(name, (tensor.shape[0], tensor.shape[1]), tensor.type, tensor.data)


def _rope(
    metadata: Metadata, architecture: Architecture, dimensions: Dimensions, factors: GgufTensor | None
) -> RopeSpec:
    dim = metadata.integer("{arch}.rope.dimension_count", dimensions.head_dim)
    if dim != dimensions.head_dim:
        raise metadata.fail(f"RoPE turns {dim} of a head's {dimensions.head_dim} elements: not supported")
    if metadata.integer("{arch}.attention.sliding_window", 0, low=0, high=1 << 30):
        raise metadata.fail("has sliding-window attention, which is not supported for this architecture")
    scaling: dict[str, Any] | None = {"type": "factors"}
    values = None
    if factors is not None:
        values = _canonical(Path(), _FREQUENCIES, factors).dequantize()
        if values.shape != (dim // 2,) or not (values > 0).all():
            raise metadata.fail(f"tensor {_FREQUENCIES!r} must hold {dim // 2} positive numbers")
    else:
        scaling = _scaling(metadata, dimensions)
    return RopeSpec(
        theta=metadata.number("{arch}.rope.freq_base", 10000.0, above=1.0),
        dim=dim,
        # llama.cpp's converter stores q and k of llama rows permuted, so that pairs are neighbours.
        interleaved=architecture == "llama",
        scaling=scaling,
        factors=values,
    )


def _scaling(metadata: Metadata, dimensions: Dimensions) -> dict[str, Any] | None:
    linear = metadata.number("{arch}.rope.scale_linear", 1.0)  # the key of old files
    kind = metadata.text("{arch}.rope.scaling.type", "linear" if linear != 1.0 else "none")
    if kind == "none":
        return None
    factor = metadata.number("{arch}.rope.scaling.factor", linear)
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind != "yarn":
        raise metadata.fail(f"rope scaling type {kind!r} is not supported (none, linear, yarn, llama3 factors)")
    original = metadata.integer("{arch}.rope.scaling.original_context_length", dimensions.context_length, high=1 << 30)
    scaling: dict[str, Any] = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": metadata.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
    }
    extra = metadata.number("{arch}.rope.scaling.attn_factor", 1.0)
    if extra != 1.0:
        scaling["attention_factor"] = extra * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling
