"""The engine process: `python -m cascade.server --socket PATH --config FILE`.

One thread owns the engine and steps it; the event loop owns the sockets. Commands go to the thread through a
queue, events come back through the loop. An idle engine waits on a condition and uses no processor time.
"""

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from cascade import framing, ops
from cascade.config import load_config
from cascade.errors import StepwellError
from cascade.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    Credit,
    EngineMessage,
    EngineStats,
    GenerateRequest,
    Hello,
    Rejected,
    StatsRequest,
    TokenEvent,
    Welcome,
)
from cascade.step_thread import EngineLike, StepThread

log = logging.getLogger("stepwell.engine")

MAX_UNSENT_BYTES = 64 << 20
"""A connection with more than this unsent is not read by its peer; it is closed.

Credit alone bounds 64 sequences to 2.6 MiB, with 20 log-probabilities a token to 11 MiB; only with those and 9 tokens
an event (84 MiB) could it be passed, by a client that reads nothing while all of that is computed.
"""

STOP_LIMIT_S = 2.0
"""A step that runs longer than this at the end is left behind."""


class Connection:
    """One client: its requests and its socket."""

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        steps: StepThread,
        from_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self._prefix = f"{number}:"
        self._reader = reader
        self._writer = writer
        self._steps = steps
        self._from_thread = from_thread
        self._in_flight: set[str] = set()

    async def serve(self, welcome: Callable[[], Welcome], stats: Callable[["Connection"], None]) -> None:
        """Read messages until the client leaves or breaks the protocol."""
        decoder = msgspec.msgpack.Decoder(ClientMessage)
        greeted = False
        while (frame := await framing.read_frame(self._reader)) is not None:
            message = decoder.decode(frame)
            if not greeted:
                if not isinstance(message, Hello) or message.version != PROTOCOL_VERSION:
                    raise framing.FrameError(f"expected Hello of version {PROTOCOL_VERSION}, got {message!r:.80}")
                greeted = True
                self.send(welcome())
            elif isinstance(message, GenerateRequest):
                self._generate(message)
            elif isinstance(message, Cancel):
                self._steps.cancel(self._prefix + message.request_id)
            elif isinstance(message, Credit):
                if message.n > 0:
                    self._steps.grant(self._prefix + message.request_id, message.n)
            elif isinstance(message, StatsRequest):
                stats(self)
            else:
                raise framing.FrameError("a second Hello")

    def send(self, message: EngineMessage) -> None:
        """Write a message; a client that does not read is cut off."""
        if self._writer.is_closing():
            return
        self._writer.write(framing.encode(message))
        transport = self._writer.transport
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("connection %s leaves %d bytes unread; closed", self._prefix, transport.get_write_buffer_size())
            transport.abort()

    def deliver(self, event: TokenEvent) -> None:
        """Send an event under the client's own name for the request."""
        request_id = event.request_id.removeprefix(self._prefix)
        if request_id not in self._in_flight:
            return
        if event.finish_reason is not None:
            self._in_flight.remove(request_id)
        self.send(msgspec.structs.replace(event, request_id=request_id))

    def refuse(self, rejected: Rejected) -> None:
        """Send a refusal under the client's own name for the request."""
        request_id = rejected.request_id.removeprefix(self._prefix)
        self._in_flight.discard(request_id)
        self.send(msgspec.structs.replace(rejected, request_id=request_id))

    def close(self) -> None:
        """Cancel what is in flight and drop the socket."""
        for request_id in self._in_flight:
            self._steps.cancel(self._prefix + request_id)
        self._in_flight.clear()
        self._writer.close()

    def _generate(self, request: GenerateRequest) -> None:
        if request.request_id in self._in_flight:
            self.send(Rejected(request.request_id, "invalid", f"request id {request.request_id!r} is in use"))
            return
        self._in_flight.add(request.request_id)
        named = msgspec.structs.replace(request, request_id=self._prefix + request.request_id)
        self._steps.submit(named, lambda rejected: self._from_thread(lambda: self.refuse(rejected)))


class EngineServer:
    """Accepts connections on a Unix socket and connects them to the step thread."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._connections: dict[str, Connection] = {}
        self._next_connection = 0
        self._stopped = asyncio.Event()
        self.failed = False
        self._process = psutil.Process()
        self._steps = StepThread(
            engine,
            lambda events: self._from_thread(lambda: self._route(events)),
            lambda: self._from_thread(self._fail),
        )

    async def run(self, socket_path: Path) -> None:
        """Serve until `stop`. The socket's directory must be private to this user."""
        self._steps.start()
        server = await asyncio.start_unix_server(self._accept, socket_path, limit=1 << 20)
        try:
            await self._stopped.wait()
        finally:
            server.close()
            self._steps.stop()
            for connection in list(self._connections.values()):
                connection.close()
            await asyncio.to_thread(self._steps.join, STOP_LIMIT_S)

    def stop(self) -> None:
        """Cancel what runs and end `run`."""
        self._stopped.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self._next_connection
        self._next_connection += 1
        connection = Connection(number, reader, writer, self._steps, self._from_thread)
        self._connections[str(number)] = connection
        try:
            await connection.serve(self._welcome, self._send_stats)
        except (framing.FrameError, msgspec.DecodeError, RecursionError) as error:
            log.warning("connection %d broke the protocol and is closed: %s", number, error)
        except ConnectionError:
            pass
        finally:
            del self._connections[str(number)]
            connection.close()

    def _welcome(self) -> Welcome:
        return Welcome(PROTOCOL_VERSION, self._engine.tiers, ops.isa())

    def _send_stats(self, connection: Connection) -> None:
        def complete(stats: EngineStats) -> None:
            tasks = len(asyncio.all_tasks(self._loop))
            rss = self._process.memory_info().rss
            connection.send(msgspec.structs.replace(stats, tasks=tasks, rss_bytes=rss))

        self._steps.stats(lambda stats: self._from_thread(lambda: complete(stats)))

    def _route(self, events: list[TokenEvent]) -> None:
        for event in events:
            number = event.request_id.partition(":")[0]
            if connection := self._connections.get(number):
                connection.deliver(event)

    def _fail(self) -> None:
        self.failed = True
        self.stop()

    def _from_thread(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when the gateway is gone, however it went."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the request reached the kernel
        sys.exit("the parent process is gone")


def _open_directory(directory: Path) -> str | None:
    """What is wrong with the socket's directory: whoever reaches the socket may read and spend."""
    try:
        status = directory.stat()
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        return f"{directory} must belong to this user and be closed to others (chmod 700)"
    return None


async def _serve(engine: EngineLike, socket_path: Path) -> int:
    server = EngineServer(engine)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run(socket_path)
    return 1 if server.failed else 0


def main() -> int:
    """Entry point; the exit status is 0 after SIGTERM, 1 with one line on stderr when loading failed."""
    parser = argparse.ArgumentParser(description="Stepwell's engine process; `stepwell serve` starts it.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--parent", type=int, help="process id of the parent; the engine ends when it does")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    if arguments.parent is not None:
        _die_with(arguments.parent)
    if open_to := _open_directory(arguments.socket.parent):
        print(f"error: {open_to}", file=sys.stderr)
        return 1
    from cascade.engine import Engine  # loads onnxruntime: only once the arguments are known to be right

    try:
        engine = Engine(load_config(arguments.config))
    except StepwellError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        status = asyncio.run(_serve(engine, arguments.socket))
    except OSError as error:
        print(f"error: {arguments.socket}: {error}", file=sys.stderr)
        status = 1
    logging.shutdown()
    # A step may still run in native code; the process must not wait for it.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
