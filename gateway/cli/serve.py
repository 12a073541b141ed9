"""`stepwell serve`: the gateway with its engine."""

from pathlib import Path
from typing import Annotated

import typer
import uvloop

from gateway.cli.bundles import ensure_bundles
from gateway.cli.errors import clean_errors
from gateway.config import Config, load_config
from gateway.logs import configure_logs
from gateway.server import run_gateway


def serve(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="Configuration file; without one, the defaults.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, instead of the file's.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, instead of the file's.")] = None,
    pull: Annotated[bool, typer.Option("--pull/--no-pull", help="Fetch bundles that are missing.")] = True,
) -> None:
    """Serve the OpenAI-compatible API. SIGTERM finishes what is in flight, then ends."""
    with clean_errors("serve"):
        settings = with_address(load_config(config), host, port)
        configure_logs(settings.log.level, settings.log.format)
        if pull:
            ensure_bundles(settings)
        raise typer.Exit(uvloop.run(run_gateway(settings)))


def with_address(config: Config, host: str | None, port: int | None) -> Config:
    """The configuration with the command line's address."""
    changes = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    return config.model_copy(update={"server": config.server.model_copy(update=changes)}) if changes else config
