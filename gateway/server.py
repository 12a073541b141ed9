"""A running gateway: sockets, signals, the engine's supervisor, and an orderly end."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from cascade.errors import ConfigError, StepwellError
from cascade.supervisor import EngineSupervisor
from gateway.app import create_app
from gateway.config import Config
from gateway.engine_settings import engine_config
from gateway.logs import log_event
from gateway.state import STATE

BACKLOG = 1024
LAST_WRITES_S = 2.0
"""After a drain ran out of time: what the failed requests get to write their error event."""


async def run_gateway(config: Config) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the process's exit status.

    The port answers at once; `/readyz` says when the engine is warm. A second signal ends the drain early.
    Raises StepwellError when the engine cannot start at all, ConfigError when the port is taken.
    """
    stop = _Signals()
    supervisor = EngineSupervisor(engine_config(config), start_limit_s=config.engine.start_timeout_s)
    app = create_app(config, supervisor)
    state = app[STATE]
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves cancels its handler, and so its sequences
        keepalive_timeout=config.server.keep_alive_s,
        access_log=None,
        shutdown_timeout=LAST_WRITES_S,
    )
    await runner.setup()
    site = web.TCPSite(runner, config.server.host, config.server.port, backlog=BACKLOG)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        where = f"{config.server.host}:{config.server.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    log_event("listening", address=f"http://{_address(runner)}")
    start = asyncio.create_task(supervisor.start())
    try:
        if await _started(start, stop):
            log_event("ready", tiers=",".join(config.tiers))
            await stop.first.wait()
        log_event("draining", in_flight=state.in_flight.count, limit_s=config.server.drain_timeout_s)
        state.draining = True
        await site.stop()
        await _drain(state.in_flight.wait_idle(config.server.drain_timeout_s), stop)
        if state.in_flight.count:
            # Without an engine the requests left over fail, each with an error that its client can read.
            log_event("drain limit reached", in_flight=state.in_flight.count)
            await supervisor.stop()
            await state.in_flight.wait_idle(LAST_WRITES_S)
    finally:
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError, StepwellError):
            await start
        await supervisor.stop()
        await runner.cleanup()
    log_event("stopped")
    return 0


class _Signals:
    """The first and the second SIGTERM or SIGINT as events."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._notice)

    def _notice(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _started(start: asyncio.Task[None], stop: _Signals) -> bool:
    """True when the engine is up, False when a signal came first. Raises what `start` raised."""
    stopped = asyncio.create_task(stop.first.wait())
    await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.first.is_set():
        return False
    await start
    return True


async def _drain(idle: Coroutine[Any, Any, bool], stop: _Signals) -> None:
    """Wait for idleness or a second signal."""
    tasks = {asyncio.create_task(idle), asyncio.create_task(stop.second.wait())}
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


def _address(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
