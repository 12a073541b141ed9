"""The thread that owns the engine: runs commands between steps, steps while there is work, counts credit.

Credit is counted here and not where events are sent: the thread may be many steps ahead of the event loop, and
would produce without bound before the loop noticed.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from cascade.protocol import INITIAL_CREDIT, EngineStats, GenerateRequest, Rejected, TierInfo, TokenEvent

log = logging.getLogger("stepwell.engine")

Command = Callable[[], None]


class EngineLike(Protocol):
    """What the server needs of `cascade.engine.Engine`."""

    tiers: list[TierInfo]

    def submit(self, request: GenerateRequest) -> Rejected | None: ...
    def cancel(self, request_id: str) -> None: ...
    def pause(self, request_id: str) -> None: ...
    def resume(self, request_id: str) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...


class StepThread(threading.Thread):
    """Public methods may be called from any thread; callbacks run in this one.

    `deliver` gets each step's events. `failed` is called when the loop cannot go on; the thread ends then.
    """

    def __init__(
        self, engine: EngineLike, deliver: Callable[[list[TokenEvent]], None], failed: Callable[[], None]
    ) -> None:
        super().__init__(name="engine-steps", daemon=True)
        self._engine = engine
        self._deliver = deliver
        self._failed = failed
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._credit: dict[str, int] = {}
        """Events that may still be produced, per request that the engine has. Owned by the thread."""

    def submit(self, request: GenerateRequest, refuse: Callable[[Rejected], None]) -> None:
        """Give the engine a request with its first credit, or say why not."""

        def command() -> None:
            try:
                rejected = self._engine.submit(request)
            except Exception as error:  # the fault of this request alone: the others go on
                log.exception("request %s could not be taken", request.request_id)
                self._engine.cancel(request.request_id)
                rejected = Rejected(request.request_id, "invalid", f"the engine cannot take this request: {error}")
            if rejected is None:
                self._credit[request.request_id] = INITIAL_CREDIT
            else:
                refuse(rejected)

        self._post(command)

    def cancel(self, request_id: str) -> None:
        """End a request; its last event follows."""
        self._post(lambda: self._engine.cancel(request_id))

    def grant(self, request_id: str, events: int) -> None:
        """Let a request produce that many more events."""

        def command() -> None:
            left = self._credit.get(request_id)
            if left is not None:
                self._credit[request_id] = left + events
                if left == 0:
                    self._engine.resume(request_id)

        self._post(command)

    def stats(self, answer: Callable[[EngineStats], None]) -> None:
        """Ask for the engine's counts."""
        self._post(lambda: answer(self._engine.stats()))

    def stop(self) -> None:
        """End after the step that runs."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._stopping or self._engine.has_work()):
                        self._wake.wait()
                    if self._stopping:
                        return
                    commands, self._commands = self._commands, deque()
                for command in commands:
                    command()
                if events := self._engine.step():
                    for event in events:
                        self._take_credit(event)
                    self._deliver(events)
        except Exception:
            log.exception("the step loop failed; the engine ends")
            self._failed()

    def _post(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _take_credit(self, event: TokenEvent) -> None:
        request_id = event.request_id
        if event.finish_reason is not None:
            self._credit.pop(request_id, None)
        elif request_id in self._credit:
            self._credit[request_id] -= 1
            if self._credit[request_id] == 0:
                self._engine.pause(request_id)
