"""The judge of fidelity: transformers' own model, in float32, with a checkpoint's dequantized weights."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Read once, when torch loads OpenMP. Its threads otherwise spin between operations, against onnxruntime's and
# whatever else runs here: five times the processor time on two busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from exporters.checkpoint import Checkpoint

_MODELS: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_PARTS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "gate.weight": "mlp.gate_proj.weight",
    "up.weight": "mlp.up_proj.weight",
    "down.weight": "mlp.down_proj.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
} | {f"{part}.{kind}": f"self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")}
_WHOLE = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}


class Reference:
    """A transformers model built from a checkpoint; holds all weights in float32 (4 bytes each)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config_class, model_class = _MODELS[checkpoint.architecture]
        config = config_class(**_config(checkpoint), attn_implementation="eager")
        with torch.device("meta"):
            self._model: Any = model_class(config)
        state = {_hf_name(name): _weight(checkpoint, name) for name in checkpoint.tensors}
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        self._model.load_state_dict(state, strict=True, assign=True)
        self._set_rope(checkpoint)
        self._model.eval()

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """float32 [T, vocab]: the logits after every token of one sequence."""
        with torch.inference_mode():
            out = self._model(torch.tensor([ids]), use_cache=False).logits[0]
        rows: NDArray[np.float32] = out.float().numpy()
        return rows

    def _set_rope(self, checkpoint: Checkpoint) -> None:
        """The rotary embedding keeps its frequencies in a buffer that no checkpoint holds: make it anew."""
        decoder = self._model.model
        rotary = type(decoder.rotary_emb)(self._model.config)
        if checkpoint.rope.scaling is not None and checkpoint.rope.scaling["type"] == "factors":
            rotary.inv_freq = torch.from_numpy(checkpoint.rope.inv_freq())
        decoder.rotary_emb = rotary


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    d = checkpoint.dimensions
    rope = checkpoint.rope
    scaling = dict(rope.scaling or {"type": "default"})
    kind = scaling.pop("type")
    config: dict[str, Any] = {
        "vocab_size": d.vocab,
        "hidden_size": d.hidden,
        "intermediate_size": d.ffn,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "max_position_embeddings": d.context_length,
        "rms_norm_eps": checkpoint.rms_epsilon,
        # The names of transformers 4. 5 reads them too, as it must for older files; 4 ignores 5's `rope_parameters`.
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": "default" if kind == "factors" else kind, **scaling},
        "tie_word_embeddings": checkpoint.tied,
        "use_sliding_window": False,
    }
    if checkpoint.architecture == "llama":
        del config["use_sliding_window"]
        config["attention_bias"] = False
    return config


def _hf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, layer, part = name.split(".")
    key = part.replace("_bias", ".bias") if part.endswith("_bias") else f"{part}.weight"
    return f"model.layers.{layer}.{_PARTS[key]}"


def _weight(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    values = checkpoint.tensors[name].dequantize()
    if checkpoint.rope.interleaved and name.rpartition(".")[2] in ("q", "k", "q_bias", "k_bias"):
        # llama GGUF pairs rows (2i, 2i + 1) of a head where transformers pairs (i, i + head_dim / 2).
        half = checkpoint.dimensions.head_dim // 2
        shape = values.shape
        values = values.reshape(-1, half, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return torch.from_numpy(np.ascontiguousarray(values))
