"""`stepwell pull`: fetch a model and make its bundle."""

import time
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.errors import clean_errors


def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|hf:OWNER/REPO[:FILE]|PATH",
            help="A catalogue name, a hub repository, a GGUF file or directory.",
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="exact, w8a8 or w4a8; by default the catalogue's for that model.")
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="A directory that may have the file already (repeat for several)."),
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="Print the catalogue and end.")] = False,
) -> None:
    """Fetch a model, check it, and export it as a bundle. What is there already is not done again."""
    with clean_errors("pull"):
        if list_models or model is None:
            _print_catalogue()
            return
        from exporters.sources import pull as pull_model
        from gateway.cli.progress import TerminalReporter

        start = time.monotonic()
        with TerminalReporter() as reporter:
            pulled = pull_model(model, recipe, directories=source or [], reporter=reporter)
        took = f"{time.monotonic() - start:.0f} s" if pulled.exported else "was there already"
        typer.echo(f"{pulled.bundle} ({took})")


def _print_catalogue() -> None:
    from exporters.sources.catalogue import load_catalogue
    from exporters.sources.store import mib

    for name, model in load_catalogue().models.items():
        typer.echo(f"{name:22} {mib(model.size):>9}  {model.licence:11} {model.title}")
