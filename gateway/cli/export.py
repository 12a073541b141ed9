"""`stepwell export`: a checkpoint on this machine -> a bundle in a directory of one's choice."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from cascade.bundle import KvDtype
from cascade.errors import SourceError
from gateway.cli.errors import clean_errors

Choice = TypeVar("Choice", bound=str)


def export(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a directory with safetensors and config.json.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The bundle's directory; an older bundle there is replaced.")
    ],
    recipe: Annotated[str, typer.Option(help="exact, w8a8 or w4a8.")] = "exact",
    kv_dtype: Annotated[
        str, typer.Option(help="Element type of the K/V cache: float16, bfloat16, or int8 for half the memory.")
    ] = "float16",
    name: Annotated[str | None, typer.Option(help="The bundle's name; by default the checkpoint's own.")] = None,
) -> None:
    """Export a checkpoint as a bundle: a quantized ONNX model with tokenizer and chat template."""
    with clean_errors("export"):
        from exporters.recipes import RECIPES
        from gateway.cli.progress import TerminalReporter

        kv_dtypes: tuple[KvDtype, ...] = get_args(KvDtype)
        chosen = _one_of(RECIPES, recipe, "recipe")
        chosen_kv_dtype = _one_of(kv_dtypes, kv_dtype, "K/V dtype")
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
                kv_dtype=chosen_kv_dtype,
                progress=lambda _, done, total: reporter.progress(label, min(done, total), total),
            )
        made = f"{manifest.name}, {recipe}, {kv_dtype} K/V, {manifest.fingerprint[:12]}"
        typer.echo(f"{out}: {made} ({time.monotonic() - start:.0f} s)")


def _one_of(choices: Sequence[Choice], given: str, what: str) -> Choice:
    """The choice that `given` spells. Raises SourceError naming them all."""
    for choice in choices:
        if choice == given:
            return choice
    raise SourceError(f"no {what} is called {given!r}; there are {', '.join(choices)}")
