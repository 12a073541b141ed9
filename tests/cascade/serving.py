"""An engine behind a real Unix socket, and a client that speaks raw frames."""

import asyncio
import contextlib
import struct
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from cascade import framing
from cascade.client import EngineClient
from cascade.engine import Engine
from cascade.protocol import (
    PROTOCOL_VERSION,
    ClientMessage,
    EngineMessage,
    EngineStats,
    GenerateRequest,
    Hello,
    TokenEvent,
)
from cascade.server import EngineServer
from tests.cascade.fake_model import FakeModel
from tests.cascade.test_engine import engine_of

LIMIT_S = 30.0
"""A hang fails the test after this long; nothing here takes a second."""


def roomy_engine(**overrides: Any) -> Engine:
    """Two tiers whose contexts hold answers longer than a request's first credit."""
    models = [
        FakeModel("small", num_blocks=1024, context=1024, agreement=0.8),
        FakeModel("large", num_blocks=1024, context=1024),
    ]
    return engine_of(models, **overrides)


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[tuple[EngineServer, Path]]:
    """A running server and its socket. Ends it and waits for its thread."""
    with tempfile.TemporaryDirectory(prefix="sw-") as directory:
        path = Path(directory) / "engine.sock"
        server = EngineServer(engine)
        running = asyncio.create_task(server.run(path))
        await until(path.exists)
        try:
            yield server, path
        finally:
            server.stop()
            await asyncio.wait_for(running, LIMIT_S)


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[EngineClient]:
    """A client, closed at the end."""
    client = await EngineClient.connect(path)
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(client: EngineClient, request: GenerateRequest) -> list[TokenEvent]:
    """Every event of a request."""
    async with asyncio.timeout(LIMIT_S), contextlib.aclosing(client.generate(request)) as events:
        return [event async for event in events]


def ids_of(events: list[TokenEvent]) -> list[int]:
    return [token.id for event in events for token in event.tokens]


async def idle_stats(client: EngineClient) -> EngineStats:
    """The engine's counts once no request is left."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            stats = await client.stats()
            if (stats.waiting, stats.running) == (0, 0):
                return stats
            await asyncio.sleep(0.005)


class RawClient:
    """Sends what it is told, reads only when asked."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)

    @classmethod
    async def connect(cls, path: Path, *, greet: bool = True) -> "RawClient":
        client = cls(*await asyncio.open_unix_connection(path))
        if greet:
            client.send(Hello(PROTOCOL_VERSION))
            await client.receive()
        return client

    def send(self, message: ClientMessage) -> None:
        self.writer.write(framing.encode(message))

    def send_body(self, body: bytes) -> None:
        """A well-framed body that need not be a message."""
        self.writer.write(struct.pack("<I", len(body)) + body)

    async def receive(self) -> EngineMessage | None:
        """The next message, None at the end of the stream."""
        frame = await asyncio.wait_for(framing.read_frame(self.reader), LIMIT_S)
        return None if frame is None else self._decoder.decode(frame)

    async def events(self, count: int | None = None) -> list[TokenEvent]:
        """The next `count` events, or all up to a last one."""
        found: list[TokenEvent] = []
        while count is None or len(found) < count:
            message = await self.receive()
            assert isinstance(message, TokenEvent)
            found.append(message)
            if message.finish_reason is not None:
                break
        return found

    def drop(self) -> None:
        """Go away without a word."""
        self.writer.transport.abort()
