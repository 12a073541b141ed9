"""`stepwell doctor`: what this machine has, whether the op library computes, whether the models are whole."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from cascade.errors import StepwellError

WANTED_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
LOW_MEMORY_BYTES = 4 << 30
LOW_DISK_BYTES = 4 << 30

Verdict = Literal["ok", "note", "FAIL"]


class Finding(NamedTuple):
    """One line of the report. `note`: worth knowing; `FAIL`: serving will not work until it is repaired."""

    verdict: Verdict
    subject: str
    text: str


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Check the sizes of models only, not every byte.")] = False,
) -> None:
    """Check processor, ONNX Runtime, op library, memory, disk and models. Status 1 when something is broken."""
    failed = False
    for finding in findings(quick):
        typer.echo(f"{finding.verdict:4}  {finding.subject:12} {finding.text}")
        failed |= finding.verdict == "FAIL"
    if failed:
        raise typer.Exit(1)


def findings(quick: bool) -> Iterator[Finding]:
    """The report, line by line as it becomes known."""
    yield from _processor()
    yield from _runtime()
    yield from _memory()
    yield from _models(quick)


def processor_name() -> str:
    """The processor's own name, as the kernel tells it."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _processor() -> Iterator[Finding]:
    flags = next((line.split(":", 1)[1].split() for line in _cpuinfo() if line.startswith("flags")), [])
    has = [flag for flag in WANTED_FLAGS if flag in flags]
    cores = len(os.sched_getaffinity(0))
    yield Finding("ok", "processor", f"{processor_name()}, {cores} cores for this process")
    if platform.machine() == "x86_64" and "avx2" not in has:
        yield Finding("note", "processor", "no AVX2: the portable path runs, many times slower")
    else:
        yield Finding("ok", "processor", f"has {' '.join(has) or 'none of the x86 extensions'}")


def _runtime() -> Iterator[Finding]:
    try:
        import onnxruntime
    except ImportError:
        yield Finding("FAIL", "onnxruntime", "not installed: pip install 'stepwell[cpu]' (or [gpu])")
        return
    providers = ", ".join(p.removesuffix("ExecutionProvider") for p in onnxruntime.get_available_providers())
    yield Finding("ok", "onnxruntime", f"{onnxruntime.__version__}, providers: {providers}")
    try:
        from cascade import ops
        from gateway.cli.self_check import largest_error

        error = largest_error()
        forced = " (STEPWELL_ISA)" if os.environ.get("STEPWELL_ISA") else ""
        yield Finding("ok", "op library", f"{ops.library_path().name} runs on {ops.isa()}{forced}, error {error:.1e}")
    except Exception as error:  # ORT raises many unrelated types
        yield Finding("FAIL", "op library", " ".join(str(error).split()))


def _memory() -> Iterator[Finding]:
    import psutil

    from cascade.session import available_memory
    from exporters.sources.store import mib, stepwell_home

    free, total = available_memory(), psutil.virtual_memory().total
    verdict: Verdict = "ok" if free >= LOW_MEMORY_BYTES else "note"
    yield Finding(verdict, "memory", f"{mib(free)} available of {mib(total)}")
    home = stepwell_home()
    existing = next(path for path in (home, *home.absolute().parents) if path.exists())
    disk = psutil.disk_usage(str(existing)).free
    yield Finding("ok" if disk >= LOW_DISK_BYTES else "note", "disk", f"{mib(disk)} free at {home}")


def _models(quick: bool) -> Iterator[Finding]:
    from cascade.bundle import load_manifest
    from exporters.sources.store import mib, stepwell_home

    directory = stepwell_home() / "bundles"
    bundles = sorted(p for p in directory.glob("*") if p.is_dir() and not p.is_symlink() and p.name[0] != ".")
    if not bundles:
        yield Finding("note", "models", f"none in {directory}; `stepwell pull NAME` fetches one")
    for path in bundles:
        try:
            manifest = load_manifest(path, verify_hashes=not quick)
        except StepwellError as error:
            yield Finding("FAIL", "model", f"{error}; pull it again after removing {path}")
            continue
        size = sum(entry.size for entry in manifest.files.values())
        what = "sizes" if quick else "sha256"
        yield Finding("ok", "model", f"{path.name}: {manifest.architecture}, {mib(size)}, {what} right")
