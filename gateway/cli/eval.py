"""`stepwell eval`: how good bundles are, measured against their sources."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cascade.errors import SourceError, StepwellError
from gateway.cli.errors import clean_errors

DEFAULT_MODEL, QUICK_MODEL = "qwen2.5-coder-0.5b", "smollm2-135m"

app = typer.Typer(no_args_is_help=True, help="Measure how close bundles are to their sources.")


@app.callback()
def _group() -> None:
    """Keeps `fidelity` a subcommand while it is the only one."""


@app.command()
def fidelity(
    model: Annotated[
        str | None, typer.Argument(metavar="[NAME|PATH]", help=f"A catalogue name or a GGUF file [{DEFAULT_MODEL}].")
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe to measure (repeat) [exact, w8a8].")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"Measure {QUICK_MODEL}: under a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """KL divergence and top-1 agreement with the source in float32; stored in the bundles as fidelity.json."""
    with clean_errors("eval"):
        if quick and model is not None:
            raise StepwellError(f"--quick measures {QUICK_MODEL}; leave out {model!r} or --quick")
        name = model or (QUICK_MODEL if quick else DEFAULT_MODEL)
        _measure(name, recipe or ["exact", "w8a8"], as_json)


def _measure(name: str, recipes: list[str], as_json: bool) -> None:
    from exporters.checkpoint import open_checkpoint
    from exporters.fidelity import BARS, measure, rows
    from exporters.sources import fetch, pull
    from exporters.sources.pull import is_path
    from gateway.cli.progress import TerminalReporter
    from gateway.cli.report import Row, as_table, report

    if name.startswith("hf:"):
        raise SourceError("eval measures catalogue models and local GGUF files; give the path of a downloaded file")
    with TerminalReporter() as reporter:
        bundles = [pull(name, each, reporter=reporter).bundle for each in recipes]
        source = Path(name).expanduser() if is_path(name) else fetch(name, reporter=reporter)
        checkpoint = open_checkpoint(source)
        reporter.say(f"measuring {', '.join(bundle.name for bundle in bundles)}")
        try:
            results = measure(checkpoint, bundles)
        except ImportError as error:
            raise StepwellError(f"{error.name} is missing: eval needs `pip install 'stepwell[export]'`") from error
    figures = [Row(**values) for values in rows(results)]  # type: ignore[typeddict-item]
    printed = report("fidelity", f"{results[0].bundle}, {results[0].positions} positions", figures)
    typer.echo(json.dumps(printed, indent=1) if as_json else as_table(printed))
    for result in results:
        if not result.passes:
            kl, top1 = BARS[result.recipe]
            typer.echo(f"{result.bundle} {result.recipe}: misses its bars (KL {kl}, top-1 {top1:.0%})", err=True)
