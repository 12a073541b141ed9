"""`stepwell export`: a checkpoint on this machine -> a bundle in a directory of one's choice."""

import time
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.errors import clean_errors


def export(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a directory with safetensors and config.json.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The bundle's directory; an older bundle there is replaced.")
    ],
    recipe: Annotated[str, typer.Option(help="exact, w8a8 or w4a8.")] = "exact",
    name: Annotated[str | None, typer.Option(help="The bundle's name; by default the checkpoint's own.")] = None,
) -> None:
    """Export a checkpoint as a bundle: a quantized ONNX model with tokenizer and chat template."""
    with clean_errors("export"):
        from cascade.errors import SourceError
        from exporters.recipes import RECIPES
        from gateway.cli.progress import TerminalReporter

        chosen = next((known for known in RECIPES if known == recipe), None)
        if chosen is None:
            raise SourceError(f"no recipe is called {recipe!r}; there are {', '.join(RECIPES)}")
        if not source.exists():
            raise SourceError(f"{source}: no such file or directory")
        from exporters.export import export_bundle  # onnx takes a second to import

        start = time.monotonic()
        with TerminalReporter() as reporter:
            label = f"export {out.name} ({recipe})"
            manifest = export_bundle(
                source,
                out,
                chosen,
                name,
                progress=lambda _, done, total: reporter.progress(label, min(done, total), total),
            )
        typer.echo(f"{out}: {manifest.name}, {recipe}, {manifest.fingerprint[:12]} ({time.monotonic() - start:.0f} s)")
