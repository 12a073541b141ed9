"""A Hugging Face directory (config.json, safetensors, tokenizer.json) as a Checkpoint."""

import json
import math
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

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
from exporters.safetensors_file import Entry, read_safetensors
from exporters.tokenizer import END_TOKENS

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_TOP = {"embed_tokens.weight": "embed", "norm.weight": "final_norm", "lm_head.weight": "head"}
_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
# Some checkpoints keep these together; the rows of the parts follow one another.
_FUSED = {
    "self_attn.qkv_proj.weight": ("q", "k", "v"),
    "self_attn.qkv_proj.bias": ("q_bias", "k_bias", "v_bias"),
    "mlp.gate_up_proj.weight": ("gate", "up"),
}
_BUFFER = "rotary_emb.inv_freq"


class _Config:
    """Typed, range-checked access to a JSON object."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def integer(self, key: str, default: int | None = None, high: int = 1 << 24) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= high:
            raise self.fail(f"{key} is {value!r}, not a whole number from 1 to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= above:
            raise self.fail(f"{key} is {value!r}, not a number above {above}")
        return float(value)

    def ids(self, key: str) -> list[int]:
        """One id, a list of them, or none."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise self.fail(f"{key} is {value!r}, not token ids")
        return ids


def open_hf(directory: Path) -> Checkpoint:
    """Open a directory of safetensors as a Checkpoint; the weights stay memory-mapped.

    Pickled weights (`pytorch_model.bin`) are never loaded: unpickling runs code. Raises CheckpointError.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: has no config.json; a source is a GGUF file or a Hugging Face directory")
    config = _Config(directory / "config.json", _json(directory / "config.json"))
    architecture = _architecture(config)
    dimensions = _dimensions(config)
    tied = config.values.get("tie_word_embeddings", False) is True
    files = _weight_files(directory)
    tensors: dict[str, Tensor] = {}
    for file, wanted in files.items():
        entries = read_safetensors(file)
        for name in wanted if wanted is not None else sorted(entries):
            if name not in entries:
                raise CheckpointError(f"{file}: tensor {name!r} is missing, the index says it is here")
            for tensor in _canonical(file, name, entries[name], dimensions):
                if tensor.name in tensors:
                    raise CheckpointError(f"{file}: tensor {tensor.name} appears twice")
                tensors[tensor.name] = tensor
    if tied:
        tensors.pop("head", None)
    bias = architecture == "qwen2" or config.values.get("attention_bias") is True
    check_tensors(
        directory,
        tensors,
        expected_shapes(dimensions, attention_bias=bias, head_norms=architecture == "qwen3", tied=tied),
    )
    tokenizer = _tokenizer(directory, dimensions.vocab)
    settings = _json(directory / "tokenizer_config.json", optional=True)
    bos_id = _bos_id(config, settings, tokenizer)
    begins = tokenizer.encode("", add_special_tokens=True).ids
    return Checkpoint(
        architecture=architecture,
        dimensions=dimensions,
        rms_epsilon=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, dimensions),
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=_template(directory, settings),
        bos_id=bos_id,
        eos_ids=_eos_ids(directory, config, tokenizer),
        add_bos=bos_id is not None and begins[:1] == [bos_id],
        name=directory.resolve().name,
        licence=_licence(directory),
        files=tuple(files),
    )


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _architecture(config: _Config) -> Architecture:
    values = config.values
    found = values.get("model_type")
    if values.get("quantization_config"):
        raise config.fail("the weights are already quantized; use the original ones or a GGUF file")
    if values.get("use_sliding_window"):
        raise config.fail("use_sliding_window is on, which is not supported")
    if values.get("mlp_bias"):
        raise config.fail("mlp_bias is on, which is not supported")
    if (act := values.get("hidden_act", "silu")) != "silu":
        raise config.fail(f"hidden_act is {act!r}, only 'silu' is supported")
    for known in ARCHITECTURES:
        if found == known:
            return known
    raise config.fail(f"model_type {found!r} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _dimensions(config: _Config) -> Dimensions:
    heads, hidden = config.integer("num_attention_heads", high=1 << 12), config.integer("hidden_size")
    kv_heads = config.integer("num_key_value_heads", heads, high=heads)
    head_dim = config.integer("head_dim", max(hidden // heads, 1), high=1 << 12)
    if heads % kv_heads:
        raise config.fail(f"{heads} heads are not a multiple of {kv_heads} key/value heads")
    if head_dim % 2:
        raise config.fail(f"heads of {head_dim} elements cannot be rotated in pairs")
    return Dimensions(
        layers=config.integer("num_hidden_layers", high=1 << 12),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings", high=1 << 30),
    )


def _weight_files(directory: Path) -> dict[Path, list[str] | None]:
    """Weight file -> the tensors that the index puts there; None: all of the only file's."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: None}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE} (pickled weights are not read)")
    placed = _json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index}: has no weight_map")
    files: dict[Path, list[str] | None] = {}
    for tensor, name in sorted(placed.items(), key=lambda item: (str(item[1]), item[0])):
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight file {name!r} is not a safetensors file of this directory")
        listed = files.setdefault(directory / name, [])
        if listed is not None:
            listed.append(tensor)
    return files


def _canonical(file: Path, name: str, entry: Entry, d: Dimensions) -> list[Tensor]:
    """The canonical tensors that one stored tensor holds: one, several when it is fused, none for a buffer."""
    short = name.removeprefix("model.")
    if name.endswith(_BUFFER):
        return []
    if len(entry.shape) > 2:
        raise CheckpointError(f"{file}: tensor {name!r} has shape {entry.shape}, two dimensions are possible")
    if short in _TOP:
        return [_tensor(_TOP[short], entry, 0, entry.shape[0])]
    match = re.fullmatch(r"layers\.(0|[1-9]\d{0,5})\.(.+)", short)
    if match is None or (match[2] not in _LAYER and match[2] not in _FUSED):
        raise CheckpointError(f"{file}: tensor {name!r} has no place in this architecture")
    prefix = f"layers.{match[1]}."
    if match[2] in _LAYER:
        return [_tensor(prefix + _LAYER[match[2]], entry, 0, entry.shape[0])]
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    parts = _FUSED[match[2]]
    sizes = [q, kv, kv] if len(parts) == 3 else [d.ffn, d.ffn]
    if sum(sizes) != entry.shape[0]:
        raise CheckpointError(f"{file}: tensor {name!r} has {entry.shape[0]} rows, its parts {sizes}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        _tensor(prefix + part, entry, start, start + size)
        for part, start, size in zip(parts, starts, sizes, strict=True)
    ]


def _tensor(name: str, entry: Entry, first: int, last: int) -> Tensor:
    if len(entry.shape) == 1:
        data = entry.data.reshape(entry.shape[0], -1)[first:last]
        return Tensor(name, (last - first,), entry.type, data)
    return Tensor(name, (last - first, entry.shape[1]), entry.type, entry.data[first:last])


def _rope(config: _Config, dimensions: Dimensions) -> RopeSpec:
    # transformers 5 writes rope_parameters, earlier ones rope_scaling with rope_theta beside it.
    given = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise config.fail(f"rope_scaling is {given!r}, not an object")
    scaling = _Config(config.path, given)
    if config.values.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise config.fail("partial_rotary_factor is not 1, which is not supported")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0, above=1.0), above=1.0)
    kind = given.get("rope_type", given.get("type", "default"))
    return RopeSpec(
        theta=theta,
        dim=dimensions.head_dim,
        interleaved=False,
        scaling=_scaling(scaling, kind, dimensions.context_length),
    )


def _scaling(given: _Config, kind: Any, context_length: int) -> dict[str, Any] | None:
    if kind == "default":
        return None
    if kind not in ("linear", "yarn", "llama3"):
        raise given.fail(f"rope scaling type {kind!r} is not supported (default, linear, yarn, llama3)")
    scaling: dict[str, Any] = {"type": kind, "factor": given.number("factor")}
    if kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = given.integer(
        "original_max_position_embeddings", context_length, high=1 << 30
    )
    if kind == "llama3":
        scaling |= {"low_freq_factor": given.number("low_freq_factor")}
        return scaling | {"high_freq_factor": given.number("high_freq_factor", above=scaling["low_freq_factor"])}
    if given.values.get("truncate", True) is not True:
        raise given.fail("yarn with truncate off is not supported")
    scaling |= {"beta_fast": given.number("beta_fast", 32.0), "beta_slow": given.number("beta_slow", 1.0)}
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if given.values.get(key) is not None:
            scaling[key] = given.number(key)
    return scaling


def _tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; save the tokenizer with transformers' fast tokenizers")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path}: {error}") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(f"{path}: token id {largest}, but the embedding has {vocab_size} rows")
    return tokenizer


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _bos_id(config: _Config, settings: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    given = settings.get("bos_token")
    token = given.get("content") if isinstance(given, dict) else given
    if isinstance(token, str):
        return tokenizer.token_to_id(token)
    return next(iter(config.ids("bos_token_id")), None)


def _eos_ids(directory: Path, config: _Config, tokenizer: Tokenizer) -> list[int]:
    path = directory / "generation_config.json"
    ids = _Config(path, _json(path, optional=True)).ids("eos_token_id") + config.ids("eos_token_id")
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = list(dict.fromkeys(ids + [special[token] for token in END_TOKENS if token in special]))
    if not ids:
        raise config.fail("no token ends an answer: eos_token_id is missing here and in generation_config.json")
    return ids


def _licence(directory: Path) -> str:
    """The `license:` line of the model card's front matter."""
    card = directory / "README.md"
    if not card.is_file():
        return "unknown"
    with card.open(encoding="utf-8", errors="replace") as file:
        head = file.read(1 << 16)
    front = re.match(r"---\n(.*?)\n---", head, re.DOTALL)
    found = re.search(r"^license:\s*([\w.+-]+)\s*$", front[1], re.MULTILINE) if front else None
    return found[1] if found else "unknown"
