"""From a checkpoint to a bundle, all or nothing.

The bundle is written into a hidden directory beside its destination, flushed to the disk and renamed into
place: an export that is killed leaves no directory that looks like a bundle. The same source and recipe give the
same bytes: no times, paths, random numbers or hash-ordered sets go in.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cascade.bundle import (
    FORMAT_VERSION,
    MODEL_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    FileEntry,
    KvDtype,
    Manifest,
    fingerprint_of,
    save_manifest,
    sha256_file,
)
from cascade.errors import SourceError
from exporters.checkpoint import Checkpoint, open_checkpoint
from exporters.graph import build_graph
from exporters.pages import release_pages
from exporters.panels import pack_segment, segment_bytes
from exporters.recipes import ModelPlan, Recipe, plan_model
from exporters.smooth import Migration, calibrate_migration
from exporters.weights_file import WeightsFile, aligned

BLOCK_SIZE = 32
"""Positions of one K/V block: the span that PagedAttention's softmax steps by."""
DISK_MARGIN_BYTES = 64 << 20
"""Left free on the disk beside what the bundle itself takes (graph, tokenizer, file system)."""

Progress = Callable[[str, int, int], None]
"""Called with (what is being written, bytes done, bytes in all)."""


def export_bundle(
    source: Path,
    out: Path,
    recipe: Recipe = "exact",
    name: str | None = None,
    *,
    origin: str = "local",
    kv_dtype: KvDtype = "float16",
    block_size: int = BLOCK_SIZE,
    progress: Progress | None = None,
) -> Manifest:
    """Export `source` (a GGUF file or a Hugging Face directory) as the bundle directory `out`.

    `name` defaults to the checkpoint's own. An older bundle at `out` is replaced once the new one is whole.
    Raises CheckpointError (bad source), SourceError (no space, another export is writing `out`).
    """
    checkpoint = open_checkpoint(source)
    plan = plan_model(checkpoint, recipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_space(checkpoint, plan, out)
    with _staging(out) as staging:
        try:
            migration = calibrate_migration(checkpoint) if plan.smooth else Migration()
            with WeightsFile(staging / WEIGHTS_FILE) as weights:
                _write_weights(weights, checkpoint, plan, migration, progress)
            graph = build_graph(checkpoint, plan, weights.weights, kv_dtype, block_size)
            (staging / MODEL_FILE).write_bytes(graph.SerializeToString(deterministic=True))
            (staging / TOKENIZER_FILE).write_text(checkpoint.tokenizer.to_str() + "\n", encoding="utf-8")
            if checkpoint.chat_template is not None:
                (staging / TEMPLATE_FILE).write_text(checkpoint.chat_template, encoding="utf-8", newline="")
            manifest = _manifest(staging, checkpoint, plan, weights.sha256, name, origin, kv_dtype, block_size)
            save_manifest(staging, manifest)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise SourceError(f"{out}: the disk is full; free some space and export again") from error
        _publish(staging, out)
    return manifest


def _write_weights(
    file: WeightsFile, checkpoint: Checkpoint, plan: ModelPlan, migration: Migration, progress: Progress | None
) -> None:
    """Write every tensor in the order in which a step reads them."""
    total = weights_bytes(checkpoint, plan)
    tensors = checkpoint.tensors

    def floats(name: str, values: NDArray[np.float32]) -> None:
        file.add_floats(name, values)

    def panels(name: str, segments: tuple[str, ...], formats: tuple[str, ...]) -> None:
        def chunks() -> Iterator[NDArray[np.uint8]]:
            for segment, format_ in zip(segments, formats, strict=True):
                columns, rows = migration.columns.get(segment), migration.rows.get(segment)
                for chunk in pack_segment(tensors[segment], format_, columns, rows):
                    yield chunk
                    if progress:
                        progress(name, file.size, total)

        file.add_panels(name, chunks())
        for segment in segments:
            release_pages(tensors[segment])

    panels("embed", ("embed",), (plan.embed_format,))
    for i in range(checkpoint.dimensions.layers):
        layer = f"layers.{i}"
        for part in ("attn_norm", "q_norm", "k_norm", "ffn_norm"):
            norm = f"{layer}.{part}"
            if norm in tensors:
                floats(norm, migration.norm(norm, tensors[norm].dequantize()))
        if f"{layer}.q_bias" in tensors:
            biases = [tensors[f"{layer}.{part}_bias"].dequantize() for part in "qkv"]
            biases[2] = biases[2] * migration.rows.get(f"{layer}.v", np.float32(1))
            floats(f"{layer}.qkv.bias", np.concatenate(biases))
        for part in ("qkv", "o", "gate_up", "down"):
            linear = plan.linears[f"{layer}.{part}"]
            panels(f"{layer}.{part}", linear.segments, linear.formats)
    floats("final_norm", tensors["final_norm"].dequantize())
    head = plan.linears["head"]
    if not shares_embedding(plan):
        panels("head", head.segments, head.formats)


def shares_embedding(plan: ModelPlan) -> bool:
    """True when the head multiplies the very bytes that the embedding gathers from."""
    head = plan.linears["head"]
    return head.segments == ("embed",) and head.formats == (plan.embed_format,)


def weights_bytes(checkpoint: Checkpoint, plan: ModelPlan) -> int:
    """Size of `weights.bin` to within a page for each tensor."""
    d = checkpoint.dimensions
    total = segment_bytes(plan.embed_format, d.vocab, d.hidden)
    for name, linear in plan.linears.items():
        if name == "head" and shares_embedding(plan):
            continue
        sizes = zip(linear.formats, linear.rows, strict=True)
        total += aligned(sum(segment_bytes(format_, rows, linear.k) for format_, rows in sizes))
    vectors = [tensor.shape[0] for tensor in checkpoint.tensors.values() if len(tensor.shape) == 1]
    return total + sum(aligned(4 * size) for size in vectors)


def _check_space(checkpoint: Checkpoint, plan: ModelPlan, out: Path) -> None:
    needed = weights_bytes(checkpoint, plan) + DISK_MARGIN_BYTES
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise SourceError(
            f"{out}: the bundle needs {needed >> 20} MiB, {free >> 20} MiB are free on that disk; "
            "free some space or choose another directory"
        )


def _manifest(
    staging: Path,
    checkpoint: Checkpoint,
    plan: ModelPlan,
    weights_sha256: str,
    name: str | None,
    origin: str,
    kv_dtype: KvDtype,
    block_size: int,
) -> Manifest:
    files = {}
    for path in sorted(staging.iterdir()):
        digest = weights_sha256 if path.name == WEIGHTS_FILE else sha256_file(path)
        files[path.name] = FileEntry(path.stat().st_size, digest)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=name or checkpoint.name,
        architecture=checkpoint.architecture,
        flavour="cpu",
        dimensions=checkpoint.dimensions,
        recipe=plan.recipe,
        formats=plan.formats(),
        kv_dtype=kv_dtype,
        block_size=block_size,
        bos_id=checkpoint.bos_id,
        eos_ids=checkpoint.eos_ids,
        add_bos=checkpoint.add_bos,
        source=checkpoint.source(origin),
        files=files,
        fingerprint="",
    )
    return msgspec.structs.replace(manifest, fingerprint=fingerprint_of(manifest))


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """An empty hidden directory beside `out`, locked; what an earlier, killed export left in it is removed.

    Removed again unless it has been renamed away.
    """
    staging = out.parent / f".{out.name}.exporting"
    handle = _lock_directory(staging, out)
    try:
        for left_over in staging.iterdir():
            left_over.unlink()
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def _lock_directory(staging: Path, out: Path) -> int:
    """Create and lock `staging`; returns the descriptor that holds the lock (the kernel frees it on death)."""
    while True:
        staging.mkdir(exist_ok=True)
        try:
            handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another export may have renamed the directory away between the opening and the lock.
            if staging.exists() and os.path.samestat(os.fstat(handle), staging.stat()):
                return handle
        except BlockingIOError as error:
            os.close(handle)
            raise SourceError(f"{out}: another export is writing this bundle; wait for it to end") from error
        os.close(handle)


def _publish(staging: Path, out: Path) -> None:
    """Flush `staging` to the disk and rename it to `out`, replacing an older bundle there."""
    for path in [*staging.iterdir(), staging]:
        _flush(path)
    if out.exists():
        retired = out.parent / f".{out.name}.replaced"
        shutil.rmtree(retired, ignore_errors=True)
        out.rename(retired)
        staging.rename(out)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        staging.rename(out)
    _flush(out.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
