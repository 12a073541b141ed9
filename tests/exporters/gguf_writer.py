"""A small GGUF writer for tests, and a tiny model to write with it."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporters.gguf.blocks import LAYOUTS
from exporters.gguf.reader import TENSOR_TYPES

_TYPE_NUMBERS = {name: number for number, name in TENSOR_TYPES.items()}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class Raw:
    """A metadata value of a stated type: `Raw(10, 5)` is a u64, `Raw(9, ...)` bytes of an array as they are."""

    type: int
    value: Any


@dataclass
class Model:
    """What a file holds. `tensors`: name -> (type, shape in torch's order, bytes)."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    def write(self, path: Path, *, version: int = 3, alignment: int = 32) -> Path:
        path.write_bytes(encode(self, version=version, alignment=alignment))
        return path


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Type number and value: str, bool, int (u32), float (f32), lists of str, int (i32) or float (f32), or Raw."""
    if isinstance(item, Raw):
        return struct.pack("<I", item.type) + (
            item.value if isinstance(item.value, bytes) else struct.pack(_SCALARS[item.type], item.value)
        )
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    head = struct.pack("<IIQ", 9, 8 if isinstance(item[0], str) else 5 if isinstance(item[0], int) else 6, len(item))
    if isinstance(item[0], str):
        return head + b"".join(string(text) for text in item)
    return head + np.array(item, "<i4" if isinstance(item[0], int) else "<f4").tobytes()


def encode(model: Model, *, version: int = 3, alignment: int = 32) -> bytes:
    """The bytes of a whole file."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(model.tensors), len(model.metadata))]
    parts += [string(key) + value(item) for key, item in model.metadata.items()]
    data = b""
    for name, (type_name, shape, content) in model.tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(string(name) + dims + struct.pack("<IQ", _TYPE_NUMBERS[type_name], len(data)))
        data += content + bytes(-len(content) % alignment)
    head = b"".join(parts)
    return head + bytes(-len(head) % alignment) + data


def random_raw(type_name: str, rows: int, columns: int, source: np.random.Generator) -> NDArray[np.uint8]:
    """uint8 [rows, row_bytes]: random codes under small, finite scales."""
    layout = LAYOUTS[type_name]
    if layout.elements == 1:
        numbers = source.standard_normal((rows, columns)).astype(np.float32)
        if type_name == "F32":
            return numbers.view(np.uint8)
        if type_name == "F16":
            return numbers.astype(np.float16).view(np.uint8)
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = source.integers(0, 256, (rows, columns // layout.elements, layout.size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(type_name, (0,))
    for at in halves:
        scale = (source.random(blocks.shape[:2]) * 0.01).astype("<f2")
        blocks[:, :, at : at + 2] = scale[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)


BYTE_ALPHABET = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def byte_tokens() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes, in byte order."""
    others = [byte for byte in range(256) if byte not in BYTE_ALPHABET]
    return [chr(byte) if byte in BYTE_ALPHABET else chr(256 + others.index(byte)) for byte in range(256)]


def tokenizer_metadata(pre: str = "gpt-2", merges: list[str] | None = None) -> dict[str, Any]:
    """Two control tokens (ids 0 and 1), the 256 bytes, then what `merges` give."""
    merges = merges or ["h e", "l l", "he ll", "hell o", "Ġ t"]
    tokens = ["<|im_start|>", "<|im_end|>", *byte_tokens(), *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def tiny_model(architecture: str = "llama", type_name: str = "F32", *, tied: bool = True, seed: int = 0) -> Model:
    """Two layers, hidden 256, four heads of 64 over two key/value heads, ffn 512."""
    source = np.random.default_rng(seed)
    tokenizer = tokenizer_metadata()
    vocab = len(tokenizer["tokenizer.ggml.tokens"])
    hidden, heads, kv_heads, head_dim, ffn, layers = 256, 4, 2, 64, 512, 2
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "tiny",
        "general.license": "apache-2.0",
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": hidden,
        f"{architecture}.feed_forward_length": ffn,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        **tokenizer,
    }
    model = Model(metadata)

    def add(name: str, *shape: int, kind: str = type_name) -> None:
        kind = "F32" if len(shape) == 1 else kind
        rows = shape[0] if len(shape) == 2 else 1
        model.tensors[name] = (kind, shape, random_raw(kind, rows, shape[-1], source).tobytes())

    add("token_embd.weight", vocab, hidden)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", vocab, hidden)
    for i in range(layers):
        block = f"blk.{i}."
        add(block + "attn_norm.weight", hidden)
        add(block + "ffn_norm.weight", hidden)
        for part, rows in {"attn_q": heads, "attn_k": kv_heads, "attn_v": kv_heads}.items():
            add(f"{block}{part}.weight", rows * head_dim, hidden)
            if architecture == "qwen2":
                add(f"{block}{part}.bias", rows * head_dim)
            if architecture == "qwen3" and part != "attn_v":
                add(f"{block}{part}_norm.weight", head_dim)
        add(block + "attn_output.weight", hidden, heads * head_dim)
        add(block + "ffn_gate.weight", ffn, hidden)
        add(block + "ffn_up.weight", ffn, hidden)
        add(block + "ffn_down.weight", hidden, ffn)
    return model
