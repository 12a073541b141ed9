"""The GGUF reader: what it reads, and how it refuses what is damaged or hostile."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cascade.errors import CheckpointError
from exporters.checkpoint import open_checkpoint
from exporters.gguf.reader import read_gguf
from tests.exporters.gguf_writer import Model, Raw, encode, string, tiny_model


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_whole_model_opens(tmp_path: Path, architecture: str, version: int) -> None:
    checkpoint = open_checkpoint(tiny_model(architecture).write(tmp_path / "m.gguf", version=version))
    assert checkpoint.architecture == architecture
    assert checkpoint.dimensions.layers == 2
    assert checkpoint.dimensions.head_dim == 64
    assert checkpoint.tied
    assert checkpoint.rope.interleaved == (architecture == "llama")
    assert ("layers.1.q_bias" in checkpoint.tensors) == (architecture == "qwen2")
    assert ("layers.1.k_norm" in checkpoint.tensors) == (architecture == "qwen3")
    assert checkpoint.tensors["layers.0.down"].shape == (256, 512)
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.add_bos) == (0, [1], False)
    assert (checkpoint.name, checkpoint.licence) == ("tiny", "apache-2.0")


def test_values_come_back_as_written(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    checkpoint = open_checkpoint(model.write(tmp_path / "m.gguf"))
    written = np.frombuffer(model.tensors["output.weight"][2], "<f4").reshape(-1, 256)
    np.testing.assert_array_equal(checkpoint.tensors["head"].dequantize(), written)


def test_an_alignment_of_the_files_own_is_used(tmp_path: Path) -> None:
    model = tiny_model()
    model.metadata["general.alignment"] = 4096
    checkpoint = open_checkpoint(model.write(tmp_path / "m.gguf", alignment=4096))
    written = np.frombuffer(model.tensors["output_norm.weight"][2], "<f4")
    np.testing.assert_array_equal(checkpoint.tensors["final_norm"].dequantize(), written)


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    numbers = {f"n{kind}": Raw(kind, 1) for kind in (0, 1, 2, 3, 4, 5, 7, 10, 11)}
    arrays = {"strings": ["a", "", "é"], "ints": [1, -2], "floats": [0.5, 2.0]}
    model = Model({**numbers, "f32": Raw(6, 0.5), "f64": Raw(12, 0.25), "text": "hello", **arrays})
    metadata = read_gguf(model.write(tmp_path / "m.gguf")).metadata
    assert [metadata[key] for key in numbers] == [1] * len(numbers)
    assert (metadata["f32"], metadata["f64"], metadata["text"]) == (0.5, 0.25, "hello")
    assert metadata["strings"] == arrays["strings"]
    assert list(metadata["ints"]) == [1, -2]  # type: ignore[arg-type]


# Rope scaling


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling_is_read(tmp_path: Path, keys: dict[str, object], scaling: dict[str, object] | None) -> None:
    model = tiny_model("qwen2")
    model.metadata |= {f"qwen2.rope.scaling.{key}": item for key, item in keys.items()}
    assert open_checkpoint(model.write(tmp_path / "m.gguf")).rope.scaling == scaling


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    model = tiny_model()
    plain = open_checkpoint(model.write(tmp_path / "plain.gguf")).rope.inv_freq()
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    model.tensors["rope_freqs.weight"] = ("F32", (32,), factors.tobytes())
    scaled = open_checkpoint(model.write(tmp_path / "scaled.gguf")).rope.inv_freq()
    np.testing.assert_allclose(scaled, plain / factors, rtol=1e-6)


# Refusals: one change to a good model, one message.


def _set(key: str, item: object) -> Callable[[Model], None]:
    return lambda model: model.metadata.update({key: item})


def _drop(key: str) -> Callable[[Model], None]:
    return lambda model: model.metadata.pop(key) and None


def _tensor(name: str, type_name: str, shape: tuple[int, ...], size: int) -> Callable[[Model], None]:
    return lambda model: model.tensors.update({name: (type_name, shape, bytes(size))})


REFUSALS: dict[str, tuple[Callable[[Model], None], str]] = {
    "other architecture": (_set("general.architecture", "gemma3"), "gemma3.*supported are llama, qwen2, qwen3"),
    "no architecture": (_drop("general.architecture"), "general.architecture.*missing"),
    "no heads": (_drop("llama.attention.head_count"), "llama.attention.head_count.*missing"),
    "zero heads": (_set("llama.attention.head_count", 0), "head_count.*0"),
    "heads of another type": (_set("llama.attention.head_count", "four"), "head_count.*'four'"),
    "uneven groups": (_set("llama.attention.head_count_kv", 3), "4 heads.*3"),
    "billions of layers": (_set("llama.block_count", 4_000_000_000), "block_count.*4000000000"),
    "partly rotated heads": (_set("llama.rope.dimension_count", 32), "32 of a head's 64"),
    "odd rope scaling": (_set("llama.rope.scaling.type", "longrope"), "longrope"),
    "infinite theta": (_set("llama.rope.freq_base", float("inf")), "freq_base.*inf"),
    "experts": (_set("llama.expert_count", 8), "mixture of experts"),
    "split file": (_set("split.count", Raw(2, 3)), "split model"),
    "alignment of 48": (_set("general.alignment", 48), "alignment is 48"),
    "alignment of zero": (_set("general.alignment", 0), "alignment is 0"),
    "no tokens": (_drop("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens.*missing"),
    "other vocabulary size": (_set("llama.vocab_size", 300), "embed has shape"),
    "missing tensor": (lambda model: model.tensors.pop("blk.1.ffn_up.weight") and None, r"layers\.1\.up is missing"),
    "unknown tensor": (_tensor("blk.0.ssm.weight", "F32", (4, 4), 64), "blk.0.ssm.weight.*no place"),
    "layer past the last": (_tensor("blk.7.ffn_up.weight", "F32", (4, 4), 64), "layer 7.*has 2"),
    "wrong shape": (_tensor("blk.0.ffn_up.weight", "F32", (256, 512), 524288), r"\(256, 512\).*needs \(512, 256\)"),
    "three dimensions": (_tensor("blk.0.ffn_up.weight", "F32", (2, 256, 256), 524288), "two dimensions"),
    "quantized vector": (_tensor("output_norm.weight", "Q8_0", (256,), 272), "vector of type Q8_0"),
    "unsupported type": (_tensor("blk.0.ffn_up.weight", "IQ2_XXS", (512, 256), 33792), "IQ2_XXS; supported are"),
    "empty shape": (_tensor("blk.0.ffn_up.weight", "F32", (0, 256), 0), "empty shape"),
    "row within a block": (_tensor("blk.0.ffn_up.weight", "Q4_K", (512, 128), 36864), "block of 256"),
    "larger than the file": (_tensor("blk.0.ffn_up.weight", "F32", (1 << 40, 1 << 40), 0), "the file ends at"),
    "product past 64 bits": (_tensor("blk.0.ffn_up.weight", "F32", (1 << 33, 1 << 33), 0), "the file ends at"),
    "array of arrays": (_set("x", Raw(9, struct.pack("<IQ", 9, 1))), "array of arrays"),
    "unknown value type": (_set("x", Raw(13, b"")), "unknown type 13"),
    "unknown item type": (_set("x", Raw(9, struct.pack("<IQ", 77, 1))), "unknown type 77"),
    "huge array": (_set("x", Raw(9, struct.pack("<IQ", 4, 1 << 62))), "limit is"),
    "array past the file": (_set("x", Raw(9, struct.pack("<IQ", 8, 1 << 23))), "are left in the file"),
    "huge string": (_set("x", Raw(8, struct.pack("<Q", 1 << 63))), "claims"),
    "string past the file": (_set("x", Raw(8, struct.pack("<Q", 40 << 20))), "the file ends at"),
    "string not UTF-8": (_set("x", Raw(8, string(b"\xff\xfe"))), "not UTF-8"),
    "item not UTF-8": (_set("x", Raw(9, struct.pack("<IQ", 8, 1) + string(b"\xff"))), r"x'\[0\] is not UTF-8"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    change, message = REFUSALS[case]
    model = tiny_model()
    change(model)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(model.write(tmp_path / "m.gguf"))


def _patched(at: int, data: bytes) -> bytes:
    whole = encode(tiny_model())
    return whole[:at] + data + whole[at + len(data) :]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "the magic"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (_patched(4, struct.pack("<I", 1)), "version 1 is not supported"),
        (_patched(4, struct.pack("<I", 4)), "version 4 is not supported"),
        (_patched(4, struct.pack(">I", 3)), "big-endian"),
        (_patched(8, struct.pack("<Q", 1 << 60)), "tensor count is"),
        (_patched(16, struct.pack("<Q", 1 << 60)), "metadata count is"),
        (_patched(16, struct.pack("<Q", 60_000)), "metadata count|needs|claims|type"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def _with_offset(name: str, offset: int) -> bytes:
    """The tiny model with one tensor's offset changed."""
    whole = encode(tiny_model())
    at = whole.index(string(name)) + 8 + len(name)
    rank = struct.unpack_from("<I", whole, at)[0]
    at += 4 + 8 * rank + 4
    return whole[:at] + struct.pack("<Q", offset) + whole[at + 8 :]


@pytest.mark.parametrize(
    ("offset", "message"),
    [(0, "overlaps"), (33, "multiple of the alignment"), (1 << 62, "the file ends at"), ((1 << 64) - 32, "ends at")],
)
def test_a_wrong_offset_is_refused(tmp_path: Path, offset: int, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_with_offset("blk.1.ffn_up.weight", offset))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("what", ["key", "tensor"])
def test_a_name_that_appears_twice_is_refused(tmp_path: Path, what: str) -> None:
    model = tiny_model()
    if what == "key":
        model.metadata |= {"aaaa": 1, "aaab": 2}
        content = encode(model).replace(string("aaab"), string("aaaa"))
    else:
        content = encode(model).replace(string("blk.1.ffn_up.weight"), string("blk.0.ffn_up.weight"))
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="appears twice"):
        open_checkpoint(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "none.gguf")


@pytest.mark.parametrize("seed", range(8))
def test_damage_anywhere_gives_an_error_or_a_sound_checkpoint(tmp_path: Path, seed: int) -> None:
    """Flipped, cut, repeated and overwritten bytes never raise anything but CheckpointError."""
    model = tiny_model("qwen2")
    whole = encode(model)
    # The structure is damaged, not the weights, which may be anything.
    head = len(whole) - sum(len(content) for _, _, content in model.tensors.values())
    source = random.Random(seed)
    path = tmp_path / "m.gguf"
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(head)
            kind = source.randrange(4)
            if kind == 0:
                data[at] ^= 1 << source.randrange(8)
            elif kind == 1:
                data[at : at + 8] = source.randbytes(8)
            elif kind == 2:
                data[at : at + 8] = source.choice([b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << source.randrange(64))])
            else:
                del data[at : at + source.randint(1, 64)]
        if source.random() < 0.2:
            del data[source.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError:
            continue
        for tensor in checkpoint.tensors.values():
            assert tensor.raw(slice(0, 1)).shape[0] == 1


def test_a_cut_file_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = encode(tiny_model())
    path = tmp_path / "m.gguf"
    for length in range(0, len(whole) - 1, 4999):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_real_smollm_has_its_published_dimensions(smol_gguf: Path) -> None:
    checkpoint = open_checkpoint(smol_gguf)
    d = checkpoint.dimensions
    assert (d.layers, d.hidden, d.heads, d.kv_heads, d.ffn, d.vocab) == (30, 576, 9, 3, 1536, 49152)
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.add_bos) == (1, [2, 0], False)
    assert checkpoint.licence == "apache-2.0"
