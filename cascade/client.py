"""The gateway's side of the engine's socket."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from cascade import framing
from cascade.errors import (
    ContextOverflowError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    StepwellError,
    UnknownModelError,
)
from cascade.protocol import (
    INITIAL_CREDIT,
    MAX_FRAME_BYTES,
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
    TierInfo,
    TokenEvent,
    Welcome,
)

log = logging.getLogger("stepwell.client")

CREDIT_STEP = INITIAL_CREDIT // 2
"""Events consumed before their credit is given back."""


class EngineClient:
    """A connection that many requests share."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome) -> None:
        self._reader = reader
        self._writer = writer
        self.tiers: list[TierInfo] = welcome.tiers
        self.isa = welcome.isa
        self._requests: dict[str, asyncio.Queue[TokenEvent | StepwellError]] = {}
        self._stats: list[asyncio.Future[EngineStats]] = []
        self._lost = False
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, path: Path) -> "EngineClient":
        """Connect and wait for the engine's Welcome. Raises EngineUnavailableError."""
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
        except OSError as error:
            raise EngineUnavailableError(f"no engine listens on its socket: {error.strerror or error}") from error
        writer.write(framing.encode(Hello(PROTOCOL_VERSION)))
        try:
            frame = await framing.read_frame(reader)
            welcome = None if frame is None else msgspec.msgpack.decode(frame, type=EngineMessage)
        except (framing.FrameError, msgspec.DecodeError) as error:
            writer.close()
            raise EngineUnavailableError(f"the engine's greeting is malformed: {error}") from error
        except asyncio.CancelledError:
            writer.close()
            raise
        if not isinstance(welcome, Welcome) or welcome.version != PROTOCOL_VERSION:
            writer.close()
            raise EngineUnavailableError(f"the engine does not speak protocol version {PROTOCOL_VERSION}")
        return cls(reader, writer, welcome)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Events of one request up to its last. Closing the generator early cancels the request.

        Raises what a `Rejected` means, and EngineFailedError when the engine goes or fails on the way.
        """
        if self._lost:
            raise EngineUnavailableError("the engine is not connected")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        frame = _frame_of(request)
        queue: asyncio.Queue[TokenEvent | StepwellError] = asyncio.Queue()
        self._requests[request.request_id] = queue
        self._writer.write(frame)
        finished = False
        consumed = 0
        try:
            while not finished:
                event = await queue.get()
                if isinstance(event, StepwellError):
                    finished = True
                    raise event
                finished = event.finish_reason is not None
                if event.finish_reason == "error":
                    raise EngineFailedError(event.error or "the engine failed on this request")
                yield event
                consumed += 1
                if consumed == CREDIT_STEP and not finished:
                    self._send(Credit(request.request_id, consumed))
                    consumed = 0
        finally:
            self._requests.pop(request.request_id, None)
            if not finished:
                self._send(Cancel(request.request_id))

    async def stats(self) -> EngineStats:
        """Gauges and counters of the engine. Raises EngineUnavailableError."""
        if self._lost:
            raise EngineUnavailableError("the engine is not connected")
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._send(StatsRequest())
        return await future

    async def wait_lost(self) -> None:
        """Return when the connection is gone."""
        await asyncio.wait({self._receiver})

    async def close(self) -> None:
        """Drop the connection; what is in flight fails."""
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _send(self, message: ClientMessage) -> None:
        if not self._lost:
            self._writer.write(framing.encode(message))

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(EngineMessage)
        try:
            while (frame := await framing.read_frame(self._reader)) is not None:
                self._dispatch(decoder.decode(frame))
        except (framing.FrameError, msgspec.DecodeError, RecursionError) as error:
            log.error("the engine broke the protocol; its connection is dropped: %s", error)
        finally:
            self._lose()

    def _dispatch(self, message: EngineMessage) -> None:
        if isinstance(message, TokenEvent):
            if queue := self._requests.get(message.request_id):
                queue.put_nowait(message)
        elif isinstance(message, Rejected):
            if queue := self._requests.get(message.request_id):
                queue.put_nowait(_error_of(message))
        elif isinstance(message, EngineStats):
            if not self._stats:
                raise framing.FrameError("stats that nobody asked for")
            future = self._stats.pop(0)
            if not future.done():
                future.set_result(message)

    def _lose(self) -> None:
        self._lost = True
        self._writer.close()
        for queue in self._requests.values():
            queue.put_nowait(EngineFailedError("the engine stopped while this request was in flight; try again"))
        for future in self._stats:
            if not future.done():
                future.set_exception(EngineUnavailableError("the engine is not connected"))
        self._stats.clear()


def _frame_of(request: GenerateRequest) -> bytes:
    """The request's frame. What cannot be sent is refused here: sent, it would cost the shared connection."""
    try:
        frame = framing.encode(request)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise InvalidRequestError(f"the request has {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    return frame


def _error_of(rejected: Rejected) -> StepwellError:
    match rejected.code:
        case "context_overflow":
            return ContextOverflowError(rejected.message)
        case "unknown_tier":
            return UnknownModelError(rejected.message)
        case "queue_full":
            return QueueFullError(rejected.message, rejected.retry_after_s)
        case "invalid":
            return InvalidRequestError(rejected.message)
