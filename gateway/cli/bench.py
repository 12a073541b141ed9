"""`stepwell bench NAME`: figures of this machine. The benchmarks live in `tests/bench` of the source tree."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from cascade.errors import BundleError, StepwellError
from gateway.cli.errors import clean_errors

DEFAULT_BUNDLE = "qwen2.5-coder-1.5b"

app = typer.Typer(no_args_is_help=True, help="Measure this machine (from a checkout of the source tree).")


@app.callback()
def _group() -> None:
    """Keeps `engine` a subcommand while it is the only one."""


@app.command()
def engine(
    bundle: Annotated[
        str, typer.Argument(help="A bundle: its name under the models directory, or a path.")
    ] = DEFAULT_BUNDLE,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default one a core.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Least time to measure each row for.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode and prefill speed of one bundle, and what verifying a draft costs."""
    from gateway.cli.report import as_table

    with clean_errors("bench"):
        measure = benchmark("engine").measure_engine
        report = measure(bundle_path(bundle), threads=threads, seconds=seconds)
        typer.echo(json.dumps(report, indent=1) if as_json else as_table(report))


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
