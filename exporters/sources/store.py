"""The directory of downloaded files: what stands under its final name is whole and has the right hash.

`sources/NAME/FILE` is written as `sources/NAME/.partial/…`, verified, flushed and renamed. One process at a time
works on a model: `NAME/.lock` is held with flock, which the kernel frees when its holder dies.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cascade.errors import SourceError
from exporters.sources.report import Reporter

CHUNK_BYTES = 1 << 20
SPACE_MARGIN_BYTES = 64 << 20
"""Left free beside what is downloaded: file system overhead, other programs."""


class NoSpaceError(SourceError):
    """The disk is too small: another source would not help."""


def stepwell_home() -> Path:
    """`$STEPWELL_HOME`, else `~/.cache/stepwell`: holds `sources/` and `bundles/`."""
    home = os.environ.get("STEPWELL_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "stepwell"


def check_space(directory: Path, needed: int, what: str) -> None:
    """Raise NoSpaceError unless `needed` bytes and a margin are free where `directory` is (or will be)."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + SPACE_MARGIN_BYTES:
        raise NoSpaceError(
            f"{directory}: {what} needs {mib(needed + SPACE_MARGIN_BYTES)} and {mib(free)} are free; "
            "free some space, or set STEPWELL_HOME to a directory on a larger disk"
        )


@contextmanager
def locked(directory: Path, reporter: Reporter) -> Iterator[None]:
    """Hold `directory`'s lock, waiting (and saying so) while another process works on the same model."""
    with space_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "another"
            reporter.say(f"process {holder} is pulling {directory.name} already; waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextmanager
def space_errors(path: Path) -> Iterator[None]:
    """Turn a full disk into NoSpaceError, and a directory that cannot be written into SourceError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"{path}: the disk is full; free some space and pull again (what is there already is kept)"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT):
            raise SourceError(
                f"{error.filename or path}: {error.strerror}; set STEPWELL_HOME to a directory that you may write"
            ) from error
        raise


def write_verified(
    chunks: Iterable[bytes], target: Path, size: int, sha256: str, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Write `chunks` as `target`, all or nothing; `on_bytes` gets the bytes written so far.

    Raises SourceError when size or hash are not the expected ones; nothing stays behind then.
    """
    digest = hashlib.sha256()
    written = 0
    staged = target.with_name(target.name + ".tmp")
    try:
        with space_errors(target), staged.open("wb") as file:
            for chunk in chunks:
                written += len(chunk)
                if written > size:
                    raise SourceError(f"{target.name}: more than the expected {size} bytes came")
                file.write(chunk)
                digest.update(chunk)
                if on_bytes:
                    on_bytes(written)
            file.flush()
            os.fsync(file.fileno())
        if written != size:
            raise SourceError(f"{target.name}: truncated, {written} bytes of {size}; pull again")
        if digest.hexdigest() != sha256:
            raise SourceError(f"{target.name}: sha256 is {digest.hexdigest()}, expected {sha256}; not used")
        staged.rename(target)
    finally:
        staged.unlink(missing_ok=True)


def read_chunks(path: Path) -> Iterator[bytes]:
    """A file in pieces."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def sizes_below(directory: Path) -> Iterator[tuple[str, int]]:
    """(name, size) of every file below, while others create and remove some (pathlib's globs fail on those)."""
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                yield name, os.stat(os.path.join(parent, name)).st_size


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{-(-size // (1 << 20))} MiB"
