"""What the gateway needs of the engine: the client side of `cascade`, as one interface."""

from collections.abc import AsyncGenerator
from typing import Protocol

from cascade.protocol import EngineStats, GenerateRequest, TokenEvent


class EngineHandle(Protocol):
    """The engine process as the gateway sees it; `cascade.supervisor.EngineSupervisor` is the real one."""

    @property
    def ready(self) -> bool:
        """Loaded, warm and connected."""

    @property
    def restarts(self) -> int:
        """How often the process was started again after it died."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """The events of one request; closing the generator cancels it in the engine.

        Raises InvalidRequestError, ContextOverflowError, UnknownModelError or QueueFullError before the first
        event, EngineUnavailableError when there is no engine, EngineFailedError when it fails on the way.
        """

    async def stats(self) -> EngineStats:
        """Gauges and counters. Raises EngineUnavailableError."""
