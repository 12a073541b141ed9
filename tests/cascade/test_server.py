"""The engine's socket: many clients, broken ones among them; credit; nothing left behind."""

import asyncio
import random
import struct
import time

import msgspec
import pytest

import cascade.server
from cascade.engine import Engine
from cascade.protocol import (
    INITIAL_CREDIT,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    GenerateRequest,
    Hello,
    Rejected,
    StatsRequest,
    Welcome,
)
from tests.cascade.serving import (
    LIMIT_S,
    RawClient,
    collect,
    connected,
    idle_stats,
    ids_of,
    roomy_engine,
    serving,
    until,
)
from tests.cascade.test_engine import drain, ids, request_of

LONG = 600
"""Tokens of an answer that needs more than the first credit."""


def alone(request: GenerateRequest) -> list[int]:
    """What the engine answers without any server."""
    engine = roomy_engine()
    engine.submit(request)
    return ids(drain(engine)[request.request_id])


async def test_the_greeting_names_the_tiers() -> None:
    async with serving(roomy_engine()) as (_, path):
        client = await RawClient.connect(path, greet=False)
        client.send(Hello(PROTOCOL_VERSION))
        welcome = await client.receive()
        assert isinstance(welcome, Welcome)
        assert [tier.name for tier in welcome.tiers] == ["small", "large"]
        client.drop()


BROKEN_GREETINGS = {
    "another version": msgspec.msgpack.encode(Hello(PROTOCOL_VERSION + 1)),
    "no greeting": msgspec.msgpack.encode(StatsRequest()),
    "not msgpack": b"\xc1\xc1\xc1",
    "empty": b"",
}


@pytest.mark.parametrize("body", BROKEN_GREETINGS.values(), ids=BROKEN_GREETINGS.keys())
async def test_a_broken_greeting_ends_the_connection(body: bytes) -> None:
    async with serving(roomy_engine()) as (_, path):
        client = await RawClient.connect(path, greet=False)
        client.send_body(body)
        assert await client.receive() is None


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


BROKEN_FRAMES = {
    "too long": struct.pack("<I", MAX_FRAME_BYTES + 1),
    "text": b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
    "unknown type": framed(msgspec.msgpack.encode({"type": "nonsense"})),
    "no type": framed(msgspec.msgpack.encode({"request_id": "a"})),
    "wrong field": framed(msgspec.msgpack.encode({"type": "credit", "request_id": "a", "n": "many"})),
    "missing field": framed(msgspec.msgpack.encode({"type": "generate", "request_id": "a"})),
    "bad utf-8": framed(b"\x82\xa4type\xa6cancel\xaarequest_id\xa2\xff\xfe"),
    "trailing bytes": framed(msgspec.msgpack.encode(Cancel("a")) + b"\x00"),
    "deep nesting": framed(b"\x91" * 100_000 + b"\xc0"),
    "second greeting": framed(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION))),
}


@pytest.mark.parametrize("data", BROKEN_FRAMES.values(), ids=BROKEN_FRAMES.keys())
async def test_a_broken_frame_ends_its_connection_and_no_other(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    request = request_of("other", [1, 2, 3], max_tokens=100)
    async with serving(roomy_engine()) as (_, path), connected(path) as other:
        answer = asyncio.create_task(collect(other, request))
        client = await RawClient.connect(path)
        client.writer.write(data)
        assert await client.receive() is None
        assert ids_of(await answer) == alone(request)
    assert "broke the protocol" in caplog.text


async def test_a_stream_that_ends_inside_a_frame_cancels_what_it_began() -> None:
    async with serving(roomy_engine()) as (_, path), connected(path) as other:
        client = await RawClient.connect(path)
        client.send(request_of("a", [1, 2, 3], max_tokens=900))
        await client.events(1)
        client.writer.write(b"\x10\x00\x00\x00half")
        client.writer.write_eof()
        stats = await idle_stats(other)
        assert stats.blocks_free == stats.blocks_total


async def test_equal_request_ids_of_two_connections_are_two_requests() -> None:
    one, two = request_of("same", [1, 2, 3], max_tokens=80), request_of("same", [9, 8], max_tokens=80)
    async with serving(roomy_engine()) as (_, path), connected(path) as a, connected(path) as b:
        first, second = await asyncio.gather(collect(a, one), collect(b, two))
    assert ids_of(first) == alone(one)
    assert ids_of(second) == alone(two)


async def test_a_cancel_does_not_reach_another_connections_request() -> None:
    request = request_of("same", [1, 2, 3], max_tokens=200)
    async with serving(roomy_engine()) as (_, path), connected(path) as other:
        answer = asyncio.create_task(collect(other, request))
        client = await RawClient.connect(path)
        client.send(Cancel("same"))
        assert ids_of(await answer) == alone(request)
        client.drop()


async def test_an_id_in_use_is_refused() -> None:
    async with serving(roomy_engine()) as (_, path):
        client = await RawClient.connect(path)
        client.send(request_of("a", [1], max_tokens=900))
        client.send(request_of("a", [2], max_tokens=1))
        message = await client.receive()
        while not isinstance(message, Rejected):
            message = await client.receive()
        assert (message.request_id, message.code) == ("a", "invalid")
        client.drop()


async def test_without_credit_a_sequence_rests_until_there_is_more() -> None:
    request = request_of("a", [1, 2, 3], max_tokens=LONG)
    async with serving(roomy_engine()) as (_, path), connected(path) as other:
        client = await RawClient.connect(path)
        client.send(request)
        events = await client.events(INITIAL_CREDIT)
        steps, before = -1, (await other.stats()).steps
        while steps != before:  # an engine that steps on never gets here before the answer ends
            await asyncio.sleep(0.05)
            steps, before = before, (await other.stats()).steps
        resting = await other.stats()
        assert resting.running == 1
        assert resting.generated_tokens == INITIAL_CREDIT
        client.send(Credit("a", LONG))
        events += await client.events()
        assert ids_of(events) == alone(request)
        client.drop()


async def test_an_engine_faster_than_its_socket_keeps_to_the_credit() -> None:
    """The event loop stands still while the step thread could run the whole answer."""
    engine = roomy_engine()
    async with serving(engine) as (_, path), connected(path) as other:
        client = await RawClient.connect(path)
        client.send(request_of("a", [1, 2, 3], max_tokens=LONG))
        await client.events(1)
        deadline = time.monotonic() + LIMIT_S
        while engine.has_work() and time.monotonic() < deadline:
            time.sleep(0.01)  # blocks the loop on purpose
        assert (await other.stats()).generated_tokens == INITIAL_CREDIT
        client.drop()


async def test_a_client_that_does_not_read_stops_no_other() -> None:
    request = request_of("b", [4, 5], max_tokens=200)
    async with serving(roomy_engine(max_sequences=16)) as (_, path), connected(path) as other:
        client = await RawClient.connect(path)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for index in range(16):
            client.send(request_of(f"slow-{index}", [index, 1], max_tokens=900, logprobs=20))
        assert ids_of(await collect(other, request)) == alone(request)
        client.drop()
        stats = await idle_stats(other)
        assert stats.blocks_free == stats.blocks_total


async def test_a_client_with_too_much_unread_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cascade.server, "MAX_UNSENT_BYTES", 1 << 15)
    async with serving(roomy_engine()) as (_, path), connected(path) as other:
        client = await RawClient.connect(path)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for index in range(16):
            client.send(request_of(f"slow-{index}", [index, 1], max_tokens=900, logprobs=20))
        await until(lambda: "unread; closed" in caplog.text)
        stats = await idle_stats(other)
        assert stats.blocks_free == stats.blocks_total


async def test_a_lost_connection_returns_every_block() -> None:
    async with serving(roomy_engine(max_sequences=8)) as (_, path), connected(path) as other:
        client = await RawClient.connect(path)
        for index in range(20):
            draft = "small" if index % 2 else None
            client.send(request_of(f"{index}", [index, 2, 3], draft=draft, max_tokens=900))
        await client.events(30)
        client.drop()
        stats = await idle_stats(other)
        assert stats.blocks_free == stats.blocks_total


async def test_hundreds_of_requests_with_random_cancels_leave_nothing() -> None:
    chance = random.Random(7)
    engine = roomy_engine(max_waiting=300)

    async def one(number: int, index: int) -> None:
        client = clients[number]
        prompt = [chance.randrange(40) for _ in range(chance.randrange(1, 30))]
        draft = chance.choice([None, "small"])
        temperature = chance.choice([0.0, 1.0])
        request = request_of(str(index), prompt, draft=draft, max_tokens=60, temperature=temperature, seed=index)
        patience = chance.randrange(1, 90)
        events = client.generate(request)
        async for _ in events:
            patience -= 1
            if patience == 0:
                break
        await events.aclose()

    async with (
        serving(engine) as (server, path),
        connected(path) as a,
        connected(path) as b,
        connected(path) as c,
        connected(path) as watcher,
    ):
        clients = [a, b, c]
        tasks = (await watcher.stats()).tasks
        async with asyncio.timeout(60):
            await asyncio.gather(*(one(index % 3, index) for index in range(300)))
        stats = await idle_stats(watcher)
        assert stats.blocks_free == stats.blocks_total
        assert stats.tasks == tasks
        assert [connection._in_flight for connection in server._connections.values()] == [set()] * 4
        assert server._steps._credit == {}
    engine.check_invariants()


class CountingEngine:
    """An engine that counts how often the loop comes by."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.visits = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def has_work(self) -> bool:
        self.visits += 1
        return self._engine.has_work()


async def test_an_idle_engine_is_left_alone() -> None:
    engine = CountingEngine(roomy_engine())
    async with serving(engine) as (_, path), connected(path) as client:  # type: ignore[arg-type]
        await collect(client, request_of("a", [1], max_tokens=5))
        await idle_stats(client)
        await asyncio.sleep(0.05)  # the thread goes to sleep
        visits = engine.visits
        await asyncio.sleep(0.3)
        assert engine.visits == visits


class Picky(CountingEngine):
    """Fails to take one request, and to step at all once told so."""

    broken = False

    def submit(self, request: GenerateRequest) -> Rejected | None:
        if request.request_id.endswith("poison"):
            raise KeyError("a bug in submit")
        return self._engine.submit(request)

    def step(self) -> list[object]:
        if self.broken:
            raise RuntimeError("a bug in step")
        return list(self._engine.step())


async def test_a_request_that_the_engine_chokes_on_is_refused_alone() -> None:
    request = request_of("good", [1, 2], max_tokens=100)
    async with serving(Picky(roomy_engine())) as (_, path), connected(path) as other:  # type: ignore[arg-type]
        answer = asyncio.create_task(collect(other, request))
        client = await RawClient.connect(path)
        client.send(request_of("poison", [1]))
        message = await client.receive()
        assert isinstance(message, Rejected)
        assert (message.request_id, message.code) == ("poison", "invalid")
        assert ids_of(await answer) == alone(request)
        client.drop()


async def test_a_step_loop_that_fails_ends_the_server() -> None:
    engine = Picky(roomy_engine())
    async with serving(engine) as (server, path):  # type: ignore[arg-type]
        client = await RawClient.connect(path)
        client.send(request_of("a", [1], max_tokens=900))
        await client.events(1)
        engine.broken = True
        while await client.receive() is not None:
            pass
        assert server.failed
