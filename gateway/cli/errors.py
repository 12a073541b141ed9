"""How commands end when something is wrong: one clean message on standard error, status 1, no traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from cascade.errors import StepwellError


@contextmanager
def clean_errors(command: str) -> Iterator[None]:
    """Deliberate errors of the body become `stepwell COMMAND: message`; Ctrl-C ends with status 130."""
    try:
        yield
    except StepwellError as error:
        typer.echo(f"stepwell {command}: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"stepwell {command}: interrupted", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader left (`| head`): nothing to say, nobody to say it to
        raise typer.Exit(1) from None
