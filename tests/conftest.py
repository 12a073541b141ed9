"""Real models for tests: fetched once into the cache of `stepwell pull`, exported once per state of the exporter."""

import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from exporters.export import export_bundle
from exporters.recipes import Recipe
from exporters.sources import Silent, fetch
from exporters.sources.store import locked, stepwell_home

# No verdict depends on how busy the machine is.
# CI repeats the same examples, so that a change fails by what it does; elsewhere every run looks at new ones.
settings.register_profile(
    "stepwell", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("stepwell")

REPOSITORY = Path(__file__).parents[1]
KEEP_S = 6 * 3600
"""Bundles of other states of the exporter are removed when unused for so long."""


def model_file(name: str) -> Path:
    """A catalogue model's GGUF. `STEPWELL_TEST_MODELS` may name directories that have it already."""
    directories = [Path(text) for text in os.environ.get("STEPWELL_TEST_MODELS", "").split(":") if text]
    return fetch(name, directories=directories)


def exporter_state() -> str:
    """Hash of everything that decides what a bundle's bytes are."""
    files = [REPOSITORY / "cascade" / "bundle.py"]
    sources = REPOSITORY / "exporters"
    files += [p for p in sources.rglob("*") if p.suffix in (".py", ".txt") and "sources" not in p.parts]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def bundle_for_tests(name: str, recipe: Recipe) -> Path:
    """A bundle by today's exporter, shared by all workers and later runs."""
    root = stepwell_home() / "test-bundles"
    directory = root / exporter_state()
    with locked(directory, Silent()):
        os.utime(directory)
        out = directory / f"{name}-{recipe}"
        if not out.exists():
            export_bundle(model_file(name), out, recipe, name)
    for other in root.iterdir():
        if other != directory and time.time() - other.stat().st_mtime > KEEP_S:
            shutil.rmtree(other, ignore_errors=True)
    return out


@pytest.fixture(scope="session")
def smol_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 (llama architecture)."""
    return model_file("smollm2-135m")


@pytest.fixture(scope="session")
def smol_bundle() -> Path:
    """SmolLM2 exported with the recipe `exact`."""
    return bundle_for_tests("smollm2-135m", "exact")


@pytest.fixture(scope="session")
def smol_bundle_w8a8() -> Path:
    """SmolLM2 exported with the recipe `w8a8`."""
    return bundle_for_tests("smollm2-135m", "w8a8")


@pytest.fixture(scope="session")
def smol_bundle_w4a8() -> Path:
    """SmolLM2 exported with the recipe `w4a8`."""
    return bundle_for_tests("smollm2-135m", "w4a8")


@pytest.fixture(scope="session")
def qwen_pair() -> tuple[Path, Path]:
    """Qwen2.5-Coder 0.5B and 1.5B, recipe `exact`. Tests that use it carry the mark `qwen`."""
    return bundle_for_tests("qwen2.5-coder-0.5b", "exact"), bundle_for_tests("qwen2.5-coder-1.5b", "exact")
