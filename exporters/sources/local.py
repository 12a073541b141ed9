"""Files that are on this machine already: for places without a network, and for tests."""

from pathlib import Path

from cascade.bundle import sha256_file
from cascade.errors import SourceError
from exporters.sources.catalogue import Model
from exporters.sources.report import Reporter
from exporters.sources.store import read_chunks, write_verified


def fetch_local(model: Model, directories: list[Path], target: Path, reporter: Reporter) -> None:
    """Copy the model's file out of `directories`, whatever its name there: size and sha256 decide.

    Raises SourceError when none of them has it.
    """
    for directory in directories:
        if not directory.is_dir():
            raise SourceError(f"{directory}: no such directory")
        for path in sorted(directory.iterdir()):
            if path.is_file() and path.stat().st_size == model.size and sha256_file(path) == model.sha256:
                reporter.say(f"found {path}")
                chunks = read_chunks(path)
                write_verified(
                    chunks,
                    target,
                    model.size,
                    model.sha256,
                    lambda done: reporter.progress(f"copy {model.file}", done, model.size),
                )
                return
    places = ", ".join(str(directory) for directory in directories)
    raise SourceError(f"{places}: no file of {model.size} bytes with sha256 {model.sha256[:12]}…")
