"""Clients come and go: 200 requests, 16 at a time, many broken off; afterwards nothing is left of them."""

import asyncio
import random

import httpx2 as httpx
import psutil
import pytest

from tests.e2e.conftest import LiveGateway

REQUESTS = 200
CONCURRENT = 16


async def one_request(client: httpx.AsyncClient, chance: random.Random) -> str:
    """Send one request of a random shape; leave it at a random point. Returns what became of it."""
    body = {
        "model": chance.choice(["auto", "small", "large"]),
        "messages": [{"role": "user", "content": "Tell me about " + "rivers and " * chance.randint(1, 60) + "seas."}],
        "max_tokens": chance.randint(1, 48),
        "temperature": chance.choice([0, 0.8]),
        "n": chance.choice([1, 1, 1, 2]),
        "stream": chance.random() < 0.6,
    }
    leave_after = chance.choice([None, None, 0.0, 0.05, 0.3, 1.0])
    try:
        async with asyncio.timeout(leave_after):
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for _ in response.aiter_bytes():
                    if leave_after is not None and chance.random() < 0.2:
                        return "left"
    except TimeoutError:
        return "left"
    return "finished"


async def run_all(url: str) -> list[str]:
    gate = asyncio.Semaphore(CONCURRENT)
    limits = httpx.Limits(max_connections=CONCURRENT)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def gated(number: int) -> str:
            async with gate:
                return await one_request(client, random.Random(number))

        return await asyncio.gather(*(gated(number) for number in range(REQUESTS)))


@pytest.fixture(scope="module")
def tasks_and_sockets(live: LiveGateway) -> tuple[float, int]:
    """Engine tasks and gateway connections before the storm."""
    return live.metric("stepwell_engine_tasks"), connections(live)


def connections(live: LiveGateway) -> int:
    found = psutil.Process(live.process.pid).net_connections(kind="all")
    return sum(connection.status not in ("LISTEN", "CLOSE_WAIT", "TIME_WAIT") for connection in found)


def test_nothing_is_left_of_200_requests(live: LiveGateway, tasks_and_sockets: tuple[float, int]) -> None:
    outcomes = asyncio.run(run_all(live.url))
    assert len(outcomes) == REQUESTS
    assert {"left", "finished"} == set(outcomes)

    def idle() -> bool:
        return live.metric("stepwell_engine_running") == live.metric("stepwell_engine_queue_depth") == 0

    live.wait(idle)
    total = live.metric("stepwell_kv_blocks", state="total")
    assert live.metric("stepwell_kv_blocks", state="free") == total
    assert live.metric("stepwell_requests_in_flight") == 0
    tasks, sockets = tasks_and_sockets
    assert live.metric("stepwell_engine_tasks") <= tasks
    live.wait(lambda: connections(live) <= sockets)
    assert live.metric("stepwell_engine_restarts_total") == 0
