"""Several workers measured in turn, pass by pass, so that a slow minute of the machine meets all of them."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from cascade.errors import StepwellError
from tests.bench.machine import Busy, OtherLoad
from tests.bench.worker import MAX_SEQUENCES, ContestantError, Pass, Worker

ROOT = Path(__file__).parents[2]
ROUNDS = 3
MAX_BURST = 64
COLD_MATTERS_S = 1.0
"""The first pass of a burst does not count when it is shorter than this: others have emptied the caches."""

Command = Callable[[int], Sequence[str | Path]]
"""From a number of sequences to a worker's command line; 0: no more than one pass needs."""


class Contest:
    """Starts a worker for every command; ends them with the `with` block.

    `names` are those that run: the ones of `optional` that cannot are left out, with a line to `say`; any other one
    raises StepwellError.
    """

    def __init__(self, commands: Mapping[str, Command], optional: Iterable[str], say: Callable[[str], None]) -> None:
        self.resident: dict[str, int] = {}
        """Bytes of a process that has loaded the model and run a pass, by name."""
        self.load = OtherLoad()
        self._workers: dict[str, Worker] = {}
        self._stack = ExitStack()
        self._say = say
        for name, command in commands.items():
            say(f"loading {name}")
            try:
                self._start(name, command)
            except ContestantError as error:
                if name not in optional:
                    self._stack.close()
                    raise StepwellError(f"{name}: {error}") from error
                say(f"{name} does not run here, its figures stay empty: {error}")

    def __enter__(self) -> "Contest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """The contestants that run, in the order of their commands."""
        return list(self._workers)

    def describe(self, name: str) -> str:
        """What the worker says it is."""
        return self._workers[name].name

    def medians(
        self, wanted: Pass, seconds: float, names: Iterable[str], between: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Median seconds of a pass, over `seconds` of passes each in ROUNDS bursts; `between` is called before them."""
        self._say(f"measuring {wanted.kind} {wanted.size}")
        times: dict[str, list[float]] = {name: [] for name in names}
        pids = [worker.pid for worker in self._workers.values()]
        for _ in range(ROUNDS):
            for name, mine in times.items():
                if between:
                    between()
                busy = Busy(pids)
                mine += _burst(self._workers[name], wanted, seconds / ROUNDS)
                self.load.count(pids, busy)
        return {name: statistics.median(mine) for name, mine in times.items()}

    def _start(self, name: str, command: Command) -> None:
        small = Worker(command(0), ROOT)
        try:
            small.passes(Pass("decode", 1), 1)
            resident = small.resident_bytes()
        finally:
            small.close()
        worker = Worker(command(MAX_SEQUENCES), ROOT)
        self._stack.callback(worker.close)
        self._workers[name], self.resident[name] = worker, resident


def _burst(worker: Worker, wanted: Pass, seconds: float) -> list[float]:
    [first] = worker.passes(wanted, 1)
    if first >= COLD_MATTERS_S:
        return [first]
    return worker.passes(wanted, min(MAX_BURST, max(2, math.ceil(seconds / first))))
