"""The `stepwell` command. Only the module of the command that is called gets imported, so that all start fast."""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

COMMANDS = {
    "serve": "gateway.cli.serve:serve",
    "generate": "gateway.cli.generate:generate",
    "pull": "gateway.cli.pull:pull",
    "export": "gateway.cli.export:export",
    "check": "gateway.cli.check:check",
    "doctor": "gateway.cli.doctor:doctor",
    "eval": "gateway.cli.eval:app",
    "bench": "gateway.cli.bench:app",
}
"""Command -> its function, or its Typer app of subcommands."""


def app() -> None:
    """The console script."""
    called = sys.argv[1] if len(sys.argv) > 1 else ""
    if called == "--version":
        typer.echo(f"stepwell {version()}")
        return
    build_app([called] if called in COMMANDS else COMMANDS)()


def build_app(names: Iterable[str]) -> typer.Typer:
    """The command line with these commands; all of them are needed for `--help` and for a misspelt one."""
    main = typer.Typer(name="stepwell", no_args_is_help=True, pretty_exceptions_enable=False)
    main.callback()(_stepwell)
    for name in names:
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            main.add_typer(command, name=name)
        else:
            main.command(name)(command)
    return main


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepwell {version()}")
        raise typer.Exit


def version() -> str:
    """The installed distribution's version; `0+checkout` when the source tree runs without being installed."""
    try:
        return importlib.metadata.version("stepwell")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"


def _stepwell(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """An on-prem LLM gateway: an OpenAI-compatible API over a cascade of quantized ONNX models."""


if __name__ == "__main__":
    app()
