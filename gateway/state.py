"""What the handlers of one application share: built once by `app.create_app`, owned by it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gateway.auth import KeyRing
from gateway.capacity import Capacity
from gateway.config import Config
from gateway.engine import EngineHandle
from gateway.metrics import Metrics
from gateway.prompts import TierText
from gateway.router import Router


class InFlight:
    """Counts the requests being answered, so that a drain knows when it is done."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self._count += 1
        self._idle.clear()

    def leave(self) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    @property
    def count(self) -> int:
        """Requests in flight now."""
        return self._count

    async def wait_idle(self, limit_s: float) -> bool:
        """True when nothing was in flight before the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


@dataclass(slots=True)
class GatewayState:
    """Configuration, the engine, and the gateway's own state."""

    config: Config
    engine: EngineHandle
    router: Router
    texts: dict[str, TierText]
    """By tier."""
    keys: KeyRing
    capacity: Capacity
    metrics: Metrics = field(default_factory=Metrics)
    in_flight: InFlight = field(default_factory=InFlight)
    draining: bool = False


STATE: web.AppKey[GatewayState] = web.AppKey("state", GatewayState)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
LOG_FIELDS: web.RequestKey[dict[str, Any]] = web.RequestKey("log_fields", dict[str, Any])
"""What handlers add to their request's log line."""
