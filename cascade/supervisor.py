"""Keeps one engine process running: starts it, watches it, starts it again."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator
from pathlib import Path

from cascade.client import EngineClient
from cascade.config import EngineConfig, save_config
from cascade.errors import EngineUnavailableError
from cascade.protocol import EngineStats, GenerateRequest, TokenEvent

log = logging.getLogger("stepwell.supervisor")

MAX_BACK_OFF_S = 30.0
STABLE_S = 30.0
"""An engine that ran this long starts again at once when it ends."""
CONNECT_INTERVAL_S = 0.02
TERMINATE_LIMIT_S = 5.0
"""From SIGTERM to SIGKILL."""
MAX_LOG_LINE_BYTES = 8 << 10
PACKAGE_ROOT = Path(__file__).parents[1]


class EngineSupervisor:
    """The engine as one object that outlives its processes.

    `start_limit_s`: loading and warming up take at most this long. `heartbeat_limit_s`: an engine that does not
    answer a stats request for this long hangs and is killed; it must exceed the longest step.
    """

    def __init__(self, config: EngineConfig, *, start_limit_s: float = 300.0, heartbeat_limit_s: float = 60.0) -> None:
        self._config = config
        self._start_limit_s = start_limit_s
        self._heartbeat_limit_s = heartbeat_limit_s
        self._directory: Path | None = None
        self._client: EngineClient | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._log: asyncio.Task[None] | None = None
        self._last_line = ""
        self.restarts = 0

    @property
    def ready(self) -> bool:
        """Loaded, warm and connected."""
        return self._client is not None

    @property
    def client(self) -> EngineClient:
        """The connection. Raises EngineUnavailableError while there is none."""
        if self._client is None:
            raise EngineUnavailableError("the engine is starting; try again in a few seconds")
        return self._client

    async def start(self) -> None:
        """Start the first process and wait until it is warm. Raises EngineUnavailableError with its last words."""
        # mkdtemp makes the directory private to this user, and with it the socket.
        self._directory = Path(tempfile.mkdtemp(prefix="stepwell-"))
        try:
            save_config(self._directory / "engine.json", self._config)
            await self._launch()
        except BaseException:
            self._remove_directory()
            raise
        self._watch = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the process: SIGTERM, and SIGKILL after 5 s. Requests in flight fail."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self._end_process()
        self._remove_directory()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `EngineClient.generate`; raises EngineUnavailableError while there is no engine."""
        async with contextlib.aclosing(self.client.generate(request)) as events:
            async for event in events:
                yield event

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        return await self.client.stats()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _launch(self) -> None:
        assert self._directory is not None
        socket_path = self._directory / "engine.sock"
        socket_path.unlink(missing_ok=True)
        search_path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        self._last_line = ""
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                # -P: not the working directory's cascade/
                *("-P", "-m", "cascade.server", "--parent", str(os.getpid())),
                *("--socket", str(socket_path), "--config", str(self._directory / "engine.json")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": search_path},
                limit=MAX_LOG_LINE_BYTES,
                start_new_session=True,  # a terminal's Ctrl-C reaches the gateway only, which drains first
            )
        except OSError as error:  # out of processes or memory: that may pass
            raise EngineUnavailableError(f"the engine did not start: {error}") from error
        self._log = log_task = asyncio.create_task(self._forward_log(process))
        try:
            self._client = await asyncio.wait_for(self._connect(process, socket_path), self._start_limit_s)
        except TimeoutError:
            await self._end_process()
            raise EngineUnavailableError(f"the engine was not ready within {self._start_limit_s:.0f} s") from None
        except EngineUnavailableError:
            await self._end_process()
            await asyncio.wait({log_task}, timeout=1)
            reason = self._last_line.removeprefix("error: ") or f"it ended with status {process.returncode}"
            raise EngineUnavailableError(f"the engine did not start: {reason}") from None
        except asyncio.CancelledError:
            await self._end_process()
            raise

    async def _connect(self, process: asyncio.subprocess.Process, path: Path) -> EngineClient:
        while process.returncode is None:
            if path.exists():
                with contextlib.suppress(EngineUnavailableError):
                    return await EngineClient.connect(path)
            await asyncio.sleep(CONNECT_INTERVAL_S)
        raise EngineUnavailableError("the engine process ended")

    async def _keep_running(self) -> None:
        back_off_s = 0.0
        while True:
            started = time.monotonic()
            await self._watch_client()
            status = await self._end_process()
            log.error("the engine ended with status %s; starting it again", status)
            if time.monotonic() - started > STABLE_S:
                back_off_s = 0.0
            while True:
                await asyncio.sleep(back_off_s)
                back_off_s = min(MAX_BACK_OFF_S, 2 * back_off_s or 0.5)
                self.restarts += 1
                try:
                    await self._launch()
                except EngineUnavailableError as error:
                    log.error("%s; next try in %.1f s", error, back_off_s)
                else:
                    log.info("the engine is ready again")
                    break

    async def _watch_client(self) -> None:
        """Return when the connection is lost or the engine hangs."""
        client = self.client
        lost = asyncio.create_task(client.wait_lost())
        try:
            while not lost.done():
                beat = asyncio.create_task(client.stats())
                try:
                    await asyncio.wait({beat, lost}, timeout=self._heartbeat_limit_s, return_when=FIRST_COMPLETED)
                    if not (beat.done() or lost.done()):
                        log.error("the engine has not answered for %.0f s; it is killed", self._heartbeat_limit_s)
                        return
                    if beat.done() and beat.exception() is not None:
                        return
                finally:
                    beat.cancel()
                await asyncio.wait({lost}, timeout=self._heartbeat_limit_s / 4)
        finally:
            lost.cancel()

    async def _end_process(self) -> int | None:
        """Close the connection and reap the process; its exit status."""
        client, self._client = self._client, None
        process = self._process
        if client is not None:
            await client.close()
        if process is None:
            return None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), TERMINATE_LIMIT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        status = await process.wait()
        self._process = None  # only now: `stop` may have interrupted the watch and must find it
        return status

    async def _forward_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than the limit: that part is dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._last_line = text
                log.info("engine: %s", text)
