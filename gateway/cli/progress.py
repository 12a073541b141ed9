"""Progress bars on a terminal, plain lines elsewhere; both on standard error, so that output can be piped."""

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class TerminalReporter:
    """A `exporters.sources.Reporter` with one bar a task, as a context manager. Safe to call from any thread."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._finished: set[str] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> "TerminalReporter":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, message: str) -> None:
        """One line above the bars."""
        self._bars.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def progress(self, task: str, done: int, total: int) -> None:
        """Move the task's bar; on no terminal, say when it ends."""
        with self._lock:
            if task not in self._tasks:
                self._tasks[task] = self._bars.add_task(task, total=total)
            self._bars.update(self._tasks[task], completed=done, total=total)
            ended = done >= total and task not in self._finished
            if ended:
                self._finished.add(task)
        if ended and not self._console.is_terminal:
            self.say(f"{task}: done")
