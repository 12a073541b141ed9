"""`stepwell check FILE`: prove a configuration before it is used."""

from pathlib import Path
from typing import Annotated

import typer

from cascade.errors import BundleError, ConfigError
from gateway.auth import load_keys
from gateway.config import Config, load_config


def check(
    file: Annotated[
        Path | None, typer.Argument(help="Configuration file; without one the defaults are checked.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Look at the file only, not at keys and bundles.")] = False,
) -> None:
    """Check a configuration file: syntax, keys, references, API keys and bundles."""
    try:
        config = load_config(file)
        if not offline:
            load_keys(config)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    faults = [] if offline else check_bundles(config)
    for fault in faults:
        typer.echo(fault, err=True)
    if faults:
        raise typer.Exit(1)
    policy = config.policies[0]
    typer.echo(f"{file or 'defaults'}: ok ({', '.join(config.tiers)}; auto: {policy.name})")


def check_bundles(config: Config) -> list[str]:
    """One line for every bundle that is missing, damaged, or unfit for its policy."""
    from gateway.prompts import (  # tokenizers take time to import: not for --offline
        load_text,
        load_texts,
    )

    faults = []
    for tier in config.tiers:
        try:
            load_text(config.bundle_path(tier))
        except BundleError as error:
            faults.append(f"tier {tier!r}: {error}")
    if not faults:
        try:
            load_texts(config)
        except ConfigError as error:
            faults.append(str(error))
    return faults
