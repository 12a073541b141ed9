"""`stepwell eval NAME`: how good a bundle's answers are. Needs the extra `export` (torch, transformers)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cascade.errors import SourceError, StepwellError
from gateway.cli.errors import clean_errors

if TYPE_CHECKING:
    from exporters.fidelity import Fidelity

QUICK_MODELS = ["smollm2-135m"]
MODELS = ["smollm2-135m", "qwen2.5-coder-0.5b"]

app = typer.Typer(no_args_is_help=True, help="Judge bundles by what they say.")


@app.callback()
def _group() -> None:
    """Keeps `fidelity` a subcommand while it is the only one."""


@app.command()
def fidelity(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|PATH]...", help="Catalogue names or checkpoints; by default two small ones."),
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Repeat for several; by default exact and w8a8.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only SmolLM2-135M: under a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare bundles with their sources in float32: KL, top-1 agreement, perplexity. Stored in `fidelity.json`.

    Bundles that are not there yet are pulled. Ends with status 1 when a bundle misses its recipe's bars.
    """
    from gateway.cli.report import as_table, report, row

    with clean_errors("eval"):
        chosen = models or (QUICK_MODELS if quick else MODELS)
        reports = [result for model in chosen for result in _measure(model, recipe or ["exact", "w8a8"])]
        from exporters.fidelity import worst

        rows = [row(*figure) for figure in worst(reports)]
        for result in reports:
            prefix = f"{result.bundle}_{result.recipe}"
            rows.append(row(f"{prefix}_kl", "nats", result.kl))
            rows.append(row(f"{prefix}_top1", "share", result.top1))
            rows.append(row(f"{prefix}_perplexity", "x source's", result.perplexity / result.source_perplexity))
        printed = report("fidelity", ", ".join(chosen), rows)
        typer.echo(json.dumps(printed, indent=1) if as_json else as_table(printed))
        if missed := [f"{result.bundle} ({result.recipe})" for result in reports if not result.passes]:
            raise StepwellError(f"under the parity bars: {', '.join(missed)}")


def _measure(model: str, recipes: list[str]) -> "list[Fidelity]":
    """Pull the model's bundles and hold them against its source."""
    from exporters.checkpoint import open_checkpoint
    from exporters.sources import fetch, pull
    from exporters.sources.pull import is_path
    from gateway.cli.progress import TerminalReporter

    try:
        from exporters.fidelity import measure
    except ModuleNotFoundError as error:
        raise StepwellError(f"{error.name} is not installed; `pip install 'stepwell[cpu,export]'`") from error
    if model.startswith("hf:"):
        raise SourceError(f"{model}: give the path of a local copy, so that there is a source to compare with")
    with TerminalReporter() as reporter:
        bundles = [pull(model, recipe, reporter=reporter).bundle for recipe in recipes]
        source = Path(model).expanduser() if is_path(model) else fetch(model, reporter=reporter)
        return measure(
            open_checkpoint(source),
            bundles,
            lambda _, done, total: reporter.progress(f"fidelity of {model} (texts)", done, total),
        )
