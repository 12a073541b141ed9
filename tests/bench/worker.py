"""Contestants of `stepwell bench peers`: one process each, asked for timed passes a burst at a time.

A process each keeps instruction sets, thread pools and memory apart, so that each can be chosen and measured.
Protocol, a line each way: the child says its name as JSON when it is ready; then `KIND SIZE COUNT` is answered by a
JSON list of COUNT times in seconds.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from cascade.errors import StepwellError

Kind = Literal["decode", "prefill", "verify", "decode_at"]


class Pass(NamedTuple):
    """What one pass computes.

    - `decode`: the next token of `size` sequences with CONTEXT tokens each.
    - `prefill`: a prompt of `size` tokens, logits of the last.
    - `verify`: `size` new tokens of one sequence after CONTEXT, logits of all.
    - `decode_at`: the next token of one sequence with `size` tokens.
    """

    kind: Kind
    size: int


CONTEXT = 128
MAX_SEQUENCES = 16
MAX_VERIFY = 64
LONG_CONTEXT = 4000
PREFILL_TOKENS = 512
SEED = 20
"""Which tokens does not matter to the cost; ids below 256 exist in every vocabulary."""


class Contestant(Protocol):
    """An engine below its scheduler."""

    name: str

    def one_pass(self, wanted: Pass) -> float:
        """Seconds of one pass with the greedy choice from its logits; preparing for it does not count."""
        ...


class ContestantError(StepwellError):
    """A contestant cannot run here; the text says why."""


def serve(make: Callable[[], Contestant]) -> None:
    """The child's side: answer until standard input closes. What libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        try:
            contestant = make()
        except ContestantError as error:
            sys.exit(str(error))
        print(json.dumps(contestant.name), file=answers)
        for line in sys.stdin:
            kind, size, count = line.split()
            wanted = Pass(kind, int(size))  # type: ignore[arg-type]
            print(json.dumps([contestant.one_pass(wanted) for _ in range(int(count))]), file=answers)


class Worker:
    """The parent's side. Raises ContestantError, with the child's last words, when the child ends."""

    def __init__(self, command: Sequence[str | Path], root: Path, environment: Mapping[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._child = subprocess.Popen(
            [str(part) for part in command],
            cwd=root,
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self.pid = self._child.pid
        self.name = str(self._answer())

    def passes(self, wanted: Pass, count: int) -> list[float]:
        """Seconds of `count` passes in a row."""
        assert self._child.stdin is not None
        try:
            print(*wanted, count, file=self._child.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return [float(seconds) for seconds in self._answer()]

    def resident_bytes(self) -> int:
        """Resident memory of the child, each page of a file counted once."""
        return resident_bytes(Path(f"/proc/{self.pid}/smaps").read_text())

    def close(self) -> None:
        """End the child and give its memory back."""
        self._child.kill()
        self._child.communicate()
        self._stderr.close()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> ContestantError:
        status = self._child.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        self._stderr.close()
        return ContestantError(words[-1] if words else f"ended with status {status}")


_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (?P<inode>\d+) *(?P<path>.*)$")


def resident_bytes(smaps: str) -> int:
    """Resident bytes by /proc/PID/smaps. A file that is mapped twice counts its size at most, not twice."""
    anonymous, files = 0, dict[str, int]()
    inode, path = "0", ""
    for line in smaps.splitlines():
        if mapping := _MAPPING.match(line):
            inode, path = mapping["inode"], mapping["path"]
        elif line.startswith("Rss:"):
            size = 1024 * int(line.split()[1])
            if inode == "0":
                anonymous += size
            else:
                files[path] = files.get(path, 0) + size
    return anonymous + sum(min(size, _pages_of(path, size)) for path, size in files.items())


def _pages_of(path: str, otherwise: int) -> int:
    """Bytes of a file in whole pages; `otherwise` for one that is gone."""
    try:
        return -(-os.stat(path).st_size // 4096) * 4096
    except OSError:
        return otherwise
