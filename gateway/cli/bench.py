"""`stepwell bench NAME`: figures of this machine. The benchmarks live in `tests/bench` of the source tree."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from cascade.errors import BundleError, StepwellError
from gateway.cli.errors import clean_errors

if TYPE_CHECKING:
    from gateway.cli.report import Report

DEFAULT_BUNDLE = "qwen2.5-coder-1.5b"

app = typer.Typer(no_args_is_help=True, help="Measure this machine (from a checkout of the source tree).")


Threads = Annotated[int | None, typer.Option(min=1, help="Threads; by default one a core.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Least time to measure each row for.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def engine(
    bundle: Annotated[
        str, typer.Argument(help="A bundle: its name under the models directory, or a path.")
    ] = DEFAULT_BUNDLE,
    threads: Threads = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
) -> None:
    """Decode and prefill speed of one bundle, and what verifying a draft costs."""
    with clean_errors("bench"):
        measure = benchmark("engine").measure_engine
        _show(measure(bundle_path(bundle), threads=threads, seconds=seconds), as_json)


@app.command()
def kernels(threads: Threads = None, seconds: Seconds = 0.5, as_json: AsJson = False) -> None:
    """Cost of one linear layer in each weight format, beside ONNX Runtime's own 4-bit op."""
    with clean_errors("bench"):
        _show(benchmark("kernels").measure_kernels(threads=threads, seconds=seconds), as_json)


@app.command()
def attention(threads: Threads = None, seconds: Seconds = 0.3, as_json: AsJson = False) -> None:
    """Cost of one attention node over pages."""
    with clean_errors("bench"):
        from cascade.session import default_threads

        measure = benchmark("attention").measure_attention
        _show(measure(threads=threads or default_threads(), seconds=seconds), as_json)


@app.command()
def peers(
    bundles: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BUNDLE]...",
            help="Bundles of one model, each of another recipe: names or paths; by default those of " + DEFAULT_BUNDLE,
        ),
    ] = None,
    peers_directory: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            envvar="STEPWELL_PEERS",
            help="What tests/bench/fetch_peers.py installed; by default `peers` in Stepwell's home.",
        ),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The file that the bundles were made from; by default the catalogue's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write an SVG here: cost of a pass against its rows.")] = None,
    threads: Threads = None,
    seconds: Seconds = 2.0,
    as_json: AsJson = False,
) -> None:
    """Speed and memory of bundles against llama.cpp on the same file, in one run. Takes minutes."""
    with clean_errors("bench"):
        from exporters.sources.store import stepwell_home

        measured = benchmark("peers").measure_peers(
            [bundle_path(bundle) for bundle in bundles or default_bundles()],
            peers_directory or stepwell_home() / "peers",
            gguf=gguf,
            threads=threads,
            seconds=seconds,
            plot=plot,
            say=lambda line: typer.echo(f"stepwell bench: {line}", err=True),
        )
        _show(measured, as_json)


def _show(measured: "Report", as_json: bool) -> None:
    """Print a report; in the table, a row with a peer says how they compare."""
    from gateway.cli.report import as_table

    if as_json:
        typer.echo(json.dumps(measured, indent=1))
        return
    head, *lines = as_table(measured).splitlines()
    typer.echo(head)
    for line, row in zip(lines, measured["rows"], strict=True):
        beside = "" if row["peer"] is None else f"  {row['ratio']:.3g}x {row['peer_value']:.6g} of {row['peer']}"
        typer.echo(line + beside)


def default_bundles() -> list[str]:
    """Names of all bundles of the default model; BundleError when there is none."""
    from exporters.sources.store import stepwell_home

    found = sorted(path.name for path in (stepwell_home() / "bundles").glob(f"{DEFAULT_BUNDLE}-*") if path.is_dir())
    if not found:
        raise BundleError(f"no bundle of {DEFAULT_BUNDLE}; `stepwell pull {DEFAULT_BUNDLE}` makes one")
    return found


def benchmark(name: str) -> ModuleType:
    """The module `tests.bench.NAME` of the checkout that this code, or the working directory, belongs to."""
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if (root / "tests" / "bench" / f"{name}.py").is_file():
            sys.path.insert(0, str(root))
            return importlib.import_module(f"tests.bench.{name}")
    raise StepwellError(
        "benchmarks are not part of the installed package; run this command in a checkout of Stepwell's source tree"
    )


def bundle_path(bundle: str) -> Path:
    """A name under `$STEPWELL_HOME/bundles`, or a path; BundleError when there is no bundle."""
    from cascade.bundle import load_manifest
    from exporters.sources.store import stepwell_home

    named = stepwell_home() / "bundles" / bundle
    path = named if "/" not in bundle and named.exists() else Path(bundle).expanduser()
    if not path.exists():
        raise BundleError(f"{bundle}: no such bundle; `stepwell pull {bundle}` makes it, or give a path")
    load_manifest(path)
    return path.resolve()
