"""The bundle: the directory that `exporters/` writes and `cascade/` loads (design, section 3)."""

import hashlib
import json
from pathlib import Path
from typing import Literal

import msgspec

from cascade.errors import BundleError

FORMAT_VERSION = 2
MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MANIFEST_FILE = "bundle.json"
FIDELITY_FILE = "fidelity.json"

KvDtype = Literal["float16", "bfloat16", "int8"]


class Dimensions(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer, in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the weights came from."""

    origin: str
    """Repository or package, or `local`; never a machine's path."""
    file: str
    sha256: str
    licence: str


class FileEntry(msgspec.Struct, frozen=True):
    """Size in bytes and sha256 of one file of the bundle."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`bundle.json`."""

    format_version: int
    name: str
    architecture: Literal["llama", "qwen2", "qwen3"]
    flavour: Literal["cpu", "cuda", "trt"]
    dimensions: Dimensions
    recipe: str
    formats: dict[str, str]
    """Weight format of every linear by graph name, such as `layers.0.qkv` -> `q4k,q4k,q6k`."""
    kv_dtype: KvDtype
    block_size: int
    bos_id: int | None
    eos_ids: list[int]
    add_bos: bool
    source: Source
    files: dict[str, FileEntry]
    """Every file but `bundle.json` and `fidelity.json`."""
    fingerprint: str
    """sha256 over the files' hashes and all that says how to run them (see `fingerprint_of`): keys every cache."""


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def fingerprint_of(manifest: Manifest) -> str:
    """Hex sha256 over the manifest but its name and source, which change no answer, and the fingerprint itself."""
    fields = msgspec.to_builtins(manifest)
    for field in ("name", "source", "fingerprint"):
        del fields[field]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def load_manifest(directory: Path, *, verify_hashes: bool = False) -> Manifest:
    """Read and check `bundle.json` against the files beside it.

    Sizes are always checked; `verify_hashes` reads every byte (done after export and by `doctor`).
    Raises BundleError naming the file and the two values that differ.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise BundleError(f"{directory}: not a bundle (no {MANIFEST_FILE}); export one with `stepwell pull`")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{path}: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise BundleError(
            f"{path}: format version {manifest.format_version}, this release reads {FORMAT_VERSION}; export it again"
        )
    if fingerprint_of(manifest) != manifest.fingerprint:
        raise BundleError(f"{path}: was changed after export, its fingerprint does not fit; export it again")
    for name in (MODEL_FILE, WEIGHTS_FILE, TOKENIZER_FILE):
        if name not in manifest.files:
            raise BundleError(f"{path}: lists no {name}")
    for name, entry in manifest.files.items():
        if name != Path(name).name:
            raise BundleError(f"{path}: file name {name!r} leaves the bundle")
        file = directory / name
        if not file.is_file():
            raise BundleError(f"{file}: missing")
        size = file.stat().st_size
        if size != entry.size:
            raise BundleError(f"{file}: {size} bytes, {MANIFEST_FILE} says {entry.size}")
        if verify_hashes and (digest := sha256_file(file)) != entry.sha256:
            raise BundleError(f"{file}: sha256 {digest}, {MANIFEST_FILE} says {entry.sha256}")
    return manifest


def save_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `bundle.json`, keys sorted, so that the same bundle has the same bytes."""
    text = json.dumps(msgspec.to_builtins(manifest), indent=1, sort_keys=True, ensure_ascii=False)
    (directory / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
