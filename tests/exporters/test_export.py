"""export_bundle: what it writes, that it is all or nothing, repeatable and small."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cascade.bundle import MANIFEST_FILE, WEIGHTS_FILE, load_manifest
from cascade.errors import BundleError, SourceError
from exporters.bundle_runner import BundleRunner
from exporters.checkpoint import open_checkpoint
from exporters.export import export_bundle
from exporters.forward import forward
from exporters.panels import FORMAT_OF_TYPE
from exporters.recipes import RECIPES, Recipe
from tests.exporters.gguf_writer import tiny_model

ROOT = Path(__file__).parents[2]
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 200, 45)]


def tiny(directory: Path, architecture: str = "llama", type_name: str = "Q4_K", tied: bool = True) -> Path:
    path = directory / "tiny.gguf"
    tiny_model(architecture, type_name, tied=tied).write(path)
    return path


def source_logits(path: Path) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    rows = forward(checkpoint, [IDS], lambda name, x: None)
    return rows @ checkpoint.tensors["embed" if checkpoint.tied else "head"].dequantize().T


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative, over all logits. Random weights make softmaxes sharp, which blows up single rounding errors."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_computes_what_the_source_does(tmp_path: Path, architecture: str, tied: bool) -> None:
    source = tiny(tmp_path, architecture, tied=tied)
    export_bundle(source, tmp_path / "out", "exact")
    assert distance(BundleRunner(tmp_path / "out").logits(IDS), source_logits(source)) < 0.01


@pytest.mark.parametrize("type_name", sorted(FORMAT_OF_TYPE))
def test_every_weight_type_computes_what_the_source_does(tmp_path: Path, type_name: str) -> None:
    source = tiny(tmp_path, type_name=type_name)
    export_bundle(source, tmp_path / "out", "exact")
    assert distance(BundleRunner(tmp_path / "out").logits(IDS), source_logits(source)) < 0.01


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
def test_every_cache_type_runs(tmp_path: Path, kv_dtype: str) -> None:
    source = tiny(tmp_path)
    export_bundle(source, tmp_path / "out", "exact", kv_dtype=kv_dtype)  # type: ignore[arg-type]
    assert distance(BundleRunner(tmp_path / "out").logits(IDS), source_logits(source)) < 0.2


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_exports_have_the_same_bytes(tmp_path: Path, recipe: Recipe) -> None:
    source = tiny(tmp_path, "qwen2", "Q8_0")
    first = export_bundle(source, tmp_path / "first", recipe)
    second = export_bundle(source, tmp_path / "second", recipe)
    assert first.fingerprint == second.fingerprint
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_recipes_have_different_fingerprints(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    fingerprints = {export_bundle(source, tmp_path / recipe, recipe).fingerprint for recipe in RECIPES}
    assert len(fingerprints) == len(RECIPES)


def test_manifest_on_disk_is_the_one_returned_and_its_hashes_hold(tmp_path: Path) -> None:
    manifest = export_bundle(tiny(tmp_path), tmp_path / "out", name="my-model")
    assert load_manifest(tmp_path / "out", verify_hashes=True) == manifest
    assert manifest.name == "my-model"


def test_no_path_of_this_machine_is_in_the_bundle(tmp_path: Path) -> None:
    export_bundle(tiny(tmp_path), tmp_path / "out")
    assert not any(str(tmp_path).encode() in data for data in contents(tmp_path / "out").values())


def test_an_older_bundle_is_replaced(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    export_bundle(source, tmp_path / "out", "exact")
    export_bundle(source, tmp_path / "out", "w8a8")
    assert load_manifest(tmp_path / "out").recipe == "w8a8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_a_failed_export_leaves_nothing_and_keeps_the_older_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny(tmp_path)
    export_bundle(source, tmp_path / "out", "exact")

    def fails(*args: object) -> None:
        raise RuntimeError("no graph today")

    monkeypatch.setattr("exporters.export.build_graph", fails)
    with pytest.raises(RuntimeError, match="no graph today"):
        export_bundle(source, tmp_path / "out", "w8a8")
    assert load_manifest(tmp_path / "out", verify_hashes=True).recipe == "exact"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


@pytest.fixture
def killed_export(tmp_path: Path) -> Callable[[], Path]:
    """Kills an export (SIGKILL) when half of its weights are written; returns the destination."""

    def run() -> Path:
        source, out = tiny(tmp_path), tmp_path / "out"
        script = (
            "import os, signal, sys\nfrom pathlib import Path\nfrom exporters.export import export_bundle\n"
            "def die(name, done, total):\n"
            "    if 2 * done > total: os.kill(os.getpid(), signal.SIGKILL)\n"
            "export_bundle(Path(sys.argv[1]), Path(sys.argv[2]), progress=die)\n"
        )
        ended = subprocess.run([sys.executable, "-c", script, str(source), str(out)], cwd=ROOT, timeout=120)
        assert ended.returncode == -signal.SIGKILL
        return out

    return run


def test_a_killed_export_leaves_no_bundle(killed_export: Callable[[], Path]) -> None:
    assert not killed_export().exists()


def test_an_export_after_a_killed_one_cleans_up(killed_export: Callable[[], Path]) -> None:
    out = killed_export()
    export_bundle(out.parent / "tiny.gguf", out)
    load_manifest(out, verify_hashes=True)
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "tiny.gguf"]


def test_two_exports_into_one_place_do_not_mix(tmp_path: Path) -> None:
    source, out = tiny(tmp_path), tmp_path / "out"

    def second(name: str, done: int, total: int) -> None:
        with pytest.raises(SourceError, match="another export is writing this bundle"):
            export_bundle(source, out)

    export_bundle(source, out, progress=second)
    load_manifest(out, verify_hashes=True)


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(SourceError, match="1 MiB are free"):
        export_bundle(tiny(tmp_path), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_disk_that_fills_up_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("exporters.weights_file.WeightsFile.add_panels", full)
    with pytest.raises(SourceError, match="the disk is full"):
        export_bundle(tiny(tmp_path), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_real_model_exports_whole(smol_bundle: Path) -> None:
    manifest = load_manifest(smol_bundle, verify_hashes=True)
    assert manifest.formats["layers.29.qkv"] == "q4m,q4m,q4m"
    assert manifest.formats["head"] == "q8"


def test_real_export_is_repeatable_in_another_process(smol_gguf: Path, smol_bundle_w8a8: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom exporters.export import export_bundle\n"
        "export_bundle(Path(sys.argv[1]), Path(sys.argv[2]), 'w8a8', 'smollm2-135m')\n"
    )
    out = tmp_path / "again"
    subprocess.run([sys.executable, "-c", script, str(smol_gguf), str(out)], cwd=ROOT, check=True, timeout=300)
    assert load_manifest(out).files == load_manifest(smol_bundle_w8a8).files


@pytest.mark.parametrize("recipe", ["exact", "w8a8"])
def test_memory_of_a_real_export_stays_under_one_and_a_half_sources(
    smol_gguf: Path, tmp_path: Path, recipe: Recipe
) -> None:
    # What the interpreter and its libraries take is no part of the export, and is most of it for so small a model.
    script = (
        "import json, resource, sys\nfrom pathlib import Path\nfrom exporters.export import export_bundle\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\nexport_bundle(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])\n"
        "print(json.dumps(peak() - before))\n"
    )
    command = [sys.executable, "-c", script, str(smol_gguf), str(tmp_path / "out"), recipe]
    ended = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    assert json.loads(ended.stdout) < 1.5 * smol_gguf.stat().st_size


def test_weights_start_at_page_boundaries(smol_bundle: Path) -> None:
    import onnx

    graph = onnx.load(str(smol_bundle / "model.onnx"), load_external_data=False).graph
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    external = [place for place in places if place]
    assert external and all(int(place["offset"]) % 4096 == 0 for place in external)
    assert {place["location"] for place in external} == {WEIGHTS_FILE}
    assert max(int(p["offset"]) + int(p["length"]) for p in external) == os.path.getsize(smol_bundle / WEIGHTS_FILE)


@pytest.mark.parametrize("field", ["eos_ids", "head_dim", "formats", "recipe", "add_bos"])
def test_a_manifest_that_was_changed_is_refused(tmp_path: Path, field: str) -> None:
    out = tmp_path / "out"
    export_bundle(tiny(tmp_path), out, "exact")
    fields = json.loads((out / MANIFEST_FILE).read_text())
    holder = fields["dimensions"] if field == "head_dim" else fields
    changed = {"eos_ids": [1, 2, 3], "head_dim": 74, "formats": {}, "recipe": "w4a8", "add_bos": not fields["add_bos"]}
    holder[field] = changed[field]
    (out / MANIFEST_FILE).write_text(json.dumps(fields))
    with pytest.raises(BundleError, match="changed after export"):
        load_manifest(out)
