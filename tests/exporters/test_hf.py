"""Hugging Face directories: tiny random models written by transformers, read back by us."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cascade.errors import CheckpointError
from exporters.checkpoint import open_checkpoint
from exporters.tokenizer import build_tokenizer
from tests.exporters.gguf_writer import tokenizer_metadata

ARCHITECTURES = ["llama", "qwen2", "qwen3"]
CONTEXT = 256


def tokenizer_json() -> str:
    metadata = tokenizer_metadata()
    types = np.array(metadata.pop("tokenizer.ggml.token_type"))
    size = len(metadata["tokenizer.ggml.tokens"])
    vocabulary = build_tokenizer(Path("m"), metadata | {"tokenizer.ggml.token_type": types}, size)
    return vocabulary.tokenizer.to_str()


def save_model(
    directory: Path, architecture: str, *, shard: str = "1GB", dtype: Any = torch.float32, **options: Any
) -> PreTrainedModel:
    """Write a random model of two layers with tokenizer; returns it, for its weights and frequencies."""
    settings: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **settings | options)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(directory, max_shard_size=shard)
    (directory / "tokenizer.json").write_text(tokenizer_json())
    return model


def edit(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_come_back_as_they_are(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    model = save_model(tmp_path, architecture, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    pairs = {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "layers.1.v": "model.layers.1.self_attn.v_proj.weight",
        "layers.0.o": "model.layers.0.self_attn.o_proj.weight",
        "layers.0.down": "model.layers.0.mlp.down_proj.weight",
        "layers.1.ffn_norm": "model.layers.1.post_attention_layernorm.weight",
    }
    if architecture == "qwen2":
        pairs["layers.1.k_bias"] = "model.layers.1.self_attn.k_proj.bias"
    if architecture == "qwen3":
        pairs["layers.1.q_norm"] = "model.layers.1.self_attn.q_norm.weight"
    for mine, theirs in pairs.items():
        np.testing.assert_array_equal(checkpoint.tensors[mine].dequantize(), state[theirs].float().numpy())
    assert len(checkpoint.tensors) == len(state)


def test_the_view_describes_the_model(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", rms_norm_eps=1e-5)
    checkpoint = open_checkpoint(tmp_path)
    d = checkpoint.dimensions
    assert (d.layers, d.hidden, d.heads, d.kv_heads, d.head_dim, d.ffn) == (2, 64, 4, 2, 16, 96)
    assert (d.vocab, d.context_length) == (264, CONTEXT)
    assert checkpoint.rms_epsilon == 1e-5
    assert not checkpoint.rope.interleaved
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.add_bos) == (0, [1], False)
    assert not checkpoint.tied


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    assert open_checkpoint(tmp_path).tied


def test_shards_are_joined(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen2", shard="100KB")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 1
    theirs = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    np.testing.assert_array_equal(checkpoint.tensors["layers.1.up"].dequantize(), theirs)
    assert len(checkpoint.source().sha256) == 64


def test_fused_projections_are_parted(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for i in range(2):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        parts = [weights.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        weights[f"{attention}qkv_proj.weight"] = torch.cat(parts)
        parts = [weights.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
        weights[f"{mlp}gate_up_proj.weight"] = torch.cat(parts)
    save_file(weights, path)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    for mine, theirs in {
        "q": "self_attn.q",
        "k": "self_attn.k",
        "v": "self_attn.v",
        "gate": "mlp.gate",
        "up": "mlp.up",
    }.items():
        expected = state[f"model.layers.1.{theirs}_proj.weight"].numpy()
        np.testing.assert_array_equal(checkpoint.tensors[f"layers.1.{mine}"].dequantize(), expected)


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (1e6, {"rope_type": "default"}),
        (1e4, {"rope_type": "linear", "factor": 4.0}),
        (1e4, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        (
            1e6,
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 0.9,
            },
        ),
        (
            5e5,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rope_equals_transformers(tmp_path: Path, theta: float, scaling: dict[str, Any]) -> None:
    model = save_model(tmp_path, "llama", rope_theta=theta, rope_scaling=scaling)
    rope = open_checkpoint(tmp_path).rope
    theirs = model.model.rotary_emb
    np.testing.assert_allclose(rope.inv_freq(), theirs.inv_freq.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling)


def test_the_older_spelling_of_rope_scaling_is_read(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rope = open_checkpoint(tmp_path).rope
    assert (rope.theta, rope.scaling) == (5e5, {"type": "linear", "factor": 2.0})


def test_end_ids_of_the_generation_config_come_first(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    edit(tmp_path, "generation_config.json", eos_token_id=[7, 0])
    assert open_checkpoint(tmp_path).eos_ids == [7, 0, 1]


def test_a_tokenizer_that_begins_with_bos_says_so(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    bos = {"id": "<|im_start|>", "ids": [0], "tokens": ["<|im_start|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": bos},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert open_checkpoint(tmp_path).add_bos


@pytest.mark.parametrize("form", ["file", "string", "list"])
def test_the_chat_template_is_found(tmp_path: Path, form: str) -> None:
    save_model(tmp_path, "llama")
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text("T")
    elif form == "string":
        edit(tmp_path, "tokenizer_config.json", chat_template="T")
    else:
        named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]
        edit(tmp_path, "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(tmp_path).chat_template == "T"


def test_the_licence_is_the_model_cards(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: none\n")
    assert open_checkpoint(tmp_path).licence == "apache-2.0"


CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "other architecture": ({"model_type": "gemma3"}, "'gemma3' is not supported; supported are llama, qwen2, qwen3"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "already quantized"),
    "sliding window": ({"use_sliding_window": True}, "use_sliding_window"),
    "other activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "biased mlp": ({"mlp_bias": True}, "mlp_bias"),
    "uneven groups": ({"num_key_value_heads": 3}, "4 heads.*3"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "small vocabulary": ({"vocab_size": 200}, "embed has shape"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    "rope without factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "more layers": ({"num_hidden_layers": 3}, r"layers\.2\.attn_norm is missing"),
    "tied but biased": ({"attention_bias": True}, "q_bias is missing"),
}


@pytest.mark.parametrize("case", CONFIG_REFUSALS)
def test_what_is_wrong_in_the_config_is_named(tmp_path: Path, case: str) -> None:
    changes, message = CONFIG_REFUSALS[case]
    save_model(tmp_path, "llama")
    edit(tmp_path, "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def _header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Rewrite the JSON header of a safetensors file."""

    def apply(data: bytes) -> bytes:
        length = struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return apply


UP = "model.layers.0.mlp.up_proj.weight"
FILE_REFUSALS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "cannot be read"),
    "cut in the header": (lambda data: data[:100], "cut off"),
    "cut in the weights": (lambda data: data[:-4], "needs .* bytes"),
    "huge header": (lambda data: struct.pack("<Q", 1 << 60) + data[8:], "header of 1152921504606846976 bytes"),
    "header not JSON": (lambda data: data[:8] + b"x" + data[9:], "not JSON"),
    "nested header": (lambda _: struct.pack("<Q", 100_000) + b"[" * 100_000, "not JSON"),
    "integer weights": (_header(lambda header: header[UP].update(dtype="I8")), "type I8"),
    "shape too large": (_header(lambda header: header[UP].update(shape=[1 << 40, 1 << 40])), "needs"),
    "negative shape": (_header(lambda header: header[UP].update(shape=[-1, 64])), "shape"),
    "offsets past the end": (
        _header(lambda header: header[UP].update(data_offsets=[1 << 50, (1 << 50) + 24576])),
        "needs",
    ),
    "no offsets": (_header(lambda header: header[UP].pop("data_offsets") and None), "described wrongly"),
    "overlap": (
        _header(
            lambda header: header[UP].update(
                data_offsets=header["lm_head.weight"]["data_offsets"][:1]
                + [header["lm_head.weight"]["data_offsets"][0] + 24576]
            )
        ),
        "overlaps",
    ),
    "unknown tensor": (_header(lambda header: header.update({"model.x": header.pop(UP)})), "model.x.*no place"),
}


@pytest.mark.parametrize("case", FILE_REFUSALS)
def test_what_is_wrong_in_the_weights_is_named(tmp_path: Path, case: str) -> None:
    change, message = FILE_REFUSALS[case]
    save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    edit(tmp_path, "model.safetensors.index.json", weight_map={UP: "../other.safetensors"})
    with pytest.raises(CheckpointError, match="of this directory"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not read"):
        open_checkpoint(tmp_path)


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        open_checkpoint(tmp_path)
