"""The gateway's side of the socket: streams, errors, early ends, a lost engine."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cascade import framing
from cascade.client import EngineClient
from cascade.errors import (
    ContextOverflowError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    StepwellError,
    UnknownModelError,
)
from cascade.protocol import PROTOCOL_VERSION, EngineStats, Welcome
from tests.cascade.serving import LIMIT_S, collect, connected, idle_stats, ids_of, roomy_engine, serving
from tests.cascade.test_engine import request_of
from tests.cascade.test_server import LONG, alone, framed


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sw-") as directory:
        yield Path(directory) / "engine.sock"


@pytest.mark.parametrize("draft", [None, "small"])
async def test_a_stream_is_the_engines_answer(draft: str | None) -> None:
    request = request_of("a", [1, 2, 3], draft=draft, max_tokens=50)
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        events = await collect(client, request)
    assert ids_of(events) == alone(request)
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == "length"
    assert events[-1].usage is not None
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (3, 50)


async def test_an_answer_longer_than_the_first_credit_comes_whole() -> None:
    request = request_of("a", [1, 2, 3], max_tokens=LONG)
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        assert ids_of(await collect(client, request)) == alone(request)


async def test_many_requests_share_a_connection() -> None:
    requests = [request_of(str(i), [i, i + 1], max_tokens=30) for i in range(20)]
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        answers = await asyncio.gather(*(collect(client, request) for request in requests))
    assert [ids_of(events) for events in answers] == [alone(request) for request in requests]


REFUSALS: list[tuple[type[StepwellError], dict[str, Any]]] = [
    (InvalidRequestError, {"prompt": []}),
    (InvalidRequestError, {"prompt": [10**6]}),
    (ContextOverflowError, {"prompt": [1], "max_tokens": 2000}),
    (UnknownModelError, {"prompt": [1], "draft": "nobody"}),
]


@pytest.mark.parametrize(("error", "arguments"), REFUSALS)
async def test_a_refusal_is_the_error_that_it_means(error: type[StepwellError], arguments: dict[str, Any]) -> None:
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        with pytest.raises(error) as caught:
            await collect(client, request_of("a", **arguments))
    assert type(caught.value) is error


async def test_a_full_queue_says_when_to_come_back() -> None:
    requests = [request_of(str(i), [i], max_tokens=300) for i in range(10)]
    async with serving(roomy_engine(max_sequences=1, max_waiting=2)) as (_, path), connected(path) as client:
        answers = await asyncio.gather(*(collect(client, r) for r in requests), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, QueueFullError)]
    assert refused
    assert all(error.retry_after_s >= 1 for error in refused)
    assert len(refused) + sum(isinstance(answer, list) for answer in answers) == 10


async def test_closing_early_returns_the_blocks() -> None:
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        events = client.generate(request_of("a", [1, 2, 3], max_tokens=900))
        await anext(events)
        await events.aclose()
        stats = await idle_stats(client)
        assert stats.generated_tokens < 900
        assert stats.blocks_free == stats.blocks_total


async def test_a_cancelled_reader_returns_the_blocks() -> None:
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        reader = asyncio.create_task(collect(client, request_of("a", [1, 2, 3], max_tokens=900)))
        while (await client.stats()).running == 0:
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        stats = await idle_stats(client)
        assert stats.blocks_free == stats.blocks_total


UNSENDABLE: dict[str, dict[str, Any]] = {"half a surrogate": {"stop": ["\ud800"]}, "a huge seed": {"seed": 1 << 70}}


@pytest.mark.parametrize("sampling", UNSENDABLE.values(), ids=UNSENDABLE.keys())
async def test_what_cannot_be_sent_is_refused_and_harms_no_other(sampling: dict[str, Any]) -> None:
    good = request_of("good", [1], max_tokens=100)
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        answer = asyncio.create_task(collect(client, good))
        with pytest.raises(InvalidRequestError):
            await collect(client, request_of("bad", [1], **sampling))
        assert ids_of(await answer) == alone(good)


async def test_a_request_over_the_frame_limit_is_refused_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cascade.client.MAX_FRAME_BYTES", 1000)
    good = request_of("good", [1], max_tokens=100)
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        answer = asyncio.create_task(collect(client, good))
        with pytest.raises(InvalidRequestError, match="limit is 1000"):
            await collect(client, request_of("bad", [1] * 2000))
        assert ids_of(await answer) == alone(good)


async def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    request = request_of("a", [1], max_tokens=100)
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        answer = asyncio.create_task(collect(client, request))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="in use"):
            await collect(client, request)
        assert ids_of(await answer) == alone(request)


async def test_a_lost_engine_fails_every_request_in_flight() -> None:
    async with serving(roomy_engine()) as (server, path), connected(path) as client:
        streams = [client.generate(request_of(str(i), [i], max_tokens=900)) for i in range(5)]
        for stream in streams:
            await anext(stream)
        server.stop()
        async with asyncio.timeout(LIMIT_S):
            for stream in streams:
                with pytest.raises(EngineFailedError):
                    async for _ in stream:
                        pass
            await client.wait_lost()
        with pytest.raises(EngineUnavailableError):
            await client.stats()
        with pytest.raises(EngineUnavailableError):
            await collect(client, request_of("late", [1]))


async def test_closing_the_client_fails_what_is_in_flight() -> None:
    async with serving(roomy_engine()) as (_, path):
        client = await EngineClient.connect(path)
        stream = client.generate(request_of("a", [1], max_tokens=900))
        await anext(stream)
        await client.close()
        with pytest.raises(EngineFailedError):
            async for _ in stream:
                pass


async def test_stats_asked_at_once_are_all_answered() -> None:
    async with serving(roomy_engine()) as (_, path), connected(path) as client:
        answers = await asyncio.gather(*(client.stats() for _ in range(10)))
    assert all(stats.blocks_total == {"small": 1024, "large": 1024} for stats in answers)


async def test_nobody_listening_is_an_unavailable_engine(socket_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match="No such file"):
        await EngineClient.connect(socket_path)


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def impostor(path: Path, script: Script) -> AsyncIterator[None]:
    """A server that follows the script and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await script(reader, writer)
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield


GREETINGS: dict[str, bytes] = {
    "garbage": b"\x03\x00\x00\x00\xc1\xc1\xc1",
    "nothing": b"",
    "half a frame": b"\x10\x00",
    "another version": framing.encode(Welcome(PROTOCOL_VERSION + 1, [], "avx2")),
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS.keys())
async def test_a_wrong_greeting_is_an_unavailable_engine(socket_path: Path, greeting: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await framing.read_frame(reader)
        writer.write(greeting)

    async with impostor(socket_path, script):
        with pytest.raises(EngineUnavailableError):
            await asyncio.wait_for(EngineClient.connect(socket_path), LIMIT_S)


BREACHES: dict[str, bytes] = {
    "garbage": framed(b"\xc1\xc1\xc1"),
    "an unknown type": framed(msgspec.msgpack.encode({"type": "x"})),
    "unasked stats": framing.encode(EngineStats(0, 0, {}, {}, {}, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES.keys())
async def test_an_engine_that_breaks_the_protocol_is_lost(socket_path: Path, breach: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await framing.read_frame(reader)
        writer.write(framing.encode(Welcome(PROTOCOL_VERSION, [], "avx2")))
        await framing.read_frame(reader)  # the request
        writer.write(breach)

    async with impostor(socket_path, script), connected(socket_path) as client:
        with pytest.raises(EngineFailedError):
            await collect(client, request_of("a", [1]))
