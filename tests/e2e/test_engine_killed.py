"""The engine dies under a stream: the client learns of it, and the gateway helps itself."""

import json
import signal
import threading
import time

import httpx2 as httpx
import pytest

from tests.e2e.conftest import LiveGateway, Start

BODY = {
    "model": "auto",
    "messages": [{"role": "user", "content": "Write a long story about a well."}],
    "max_tokens": 1500,
    "ignore_eos": True,
}
BACK_WITHIN_S = 10.0
"""The issue's own bound, not a matter of speed: a restart loads and warms up both tiers."""


@pytest.fixture(scope="module")
def doomed(start_gateway: Start) -> LiveGateway:
    """A gateway whose engine may be killed."""
    return start_gateway()


def kill_engine(gateway: LiveGateway) -> None:
    (engine,) = gateway.engine_processes()
    engine.send_signal(signal.SIGKILL)


def test_sigkill_mid_stream(doomed: LiveGateway) -> None:
    restarts = doomed.metric("stepwell_engine_restarts_total")
    with httpx.stream(
        "POST", f"{doomed.url}/v1/chat/completions", json=BODY | {"stream": True}, timeout=60
    ) as response:
        pieces = response.iter_raw()
        received = next(pieces)
        kill_engine(doomed)
        killed = time.monotonic()
        received += b"".join(pieces)
    *_, last = received.removesuffix(b"\n\n").split(b"\n\n")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_failed")
    assert b"[DONE]" not in received

    def answers() -> bool:
        reply = httpx.post(f"{doomed.url}/v1/chat/completions", json=BODY | {"max_tokens": 2}, timeout=60)
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 503:
            assert int(reply.headers["Retry-After"]) >= 1
        return reply.status_code == 200

    doomed.wait(answers)
    assert time.monotonic() - killed < BACK_WITHIN_S
    assert doomed.metric("stepwell_engine_restarts_total") == restarts + 1


def test_sigkill_under_a_whole_answer_is_a_500(doomed: LiveGateway) -> None:
    doomed.wait(doomed.ready)
    with httpx.Client(timeout=60) as client:
        replies: list[httpx.Response] = []
        url = f"{doomed.url}/v1/chat/completions"
        thread = threading.Thread(target=lambda: replies.append(client.post(url, json=BODY)))
        thread.start()
        doomed.wait(lambda: doomed.metric("stepwell_engine_running") == 1)
        kill_engine(doomed)
        thread.join(60)
    assert replies[0].status_code == 500
    assert replies[0].json()["error"]["code"] == "engine_failed"
