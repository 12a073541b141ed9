"""The bytes on the wire: a raw socket sees exactly OpenAI's events, under both HTTP framings."""

import json
import socket
from urllib.parse import urlsplit

import httpx2 as httpx

from tests.e2e.conftest import LiveGateway

BODY = {
    "model": "auto",
    "messages": [{"role": "user", "content": "Say hi."}],
    "temperature": 0,
    "max_tokens": 6,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def test_events_are_data_lines_and_blank_lines_only(live: LiveGateway) -> None:
    response = httpx.post(f"{live.url}/v1/chat/completions", json=BODY, timeout=60)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.content.endswith(b"data: [DONE]\n\n")
    blocks = response.content.split(b"\n\n")[:-1]
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    values = [json.loads(block[6:]) for block in blocks[:-1]]
    assert values[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in value["choices"][0]["delta"] for value in values[1:-1])
    assert values[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert values[-1]["choices"] == []
    assert values[-1]["usage"]["completion_tokens"] == 6
    assert {value["object"] for value in values} == {"chat.completion.chunk"}


def test_http_1_0_gets_the_same_events_without_chunks(live: LiveGateway) -> None:
    address = urlsplit(live.url)
    body = json.dumps(BODY).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        f"Host: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    header, _, events = received.partition(b"\r\n\r\n")
    assert b"200 OK" in header.splitlines()[0]
    assert b"chunked" not in header.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_a_slow_reader_gets_everything(live: LiveGateway) -> None:
    """More events than the engine's credit and every buffer between: they wait, and none is lost."""
    body = BODY | {"max_tokens": 400, "ignore_eos": True, "model": "large"}
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=120) as response:
        first = next(response.iter_raw(1))
        live.wait(lambda: live.metric("stepwell_engine_running") == 0, 120)
        rest = b"".join(response.iter_raw())
    usage = json.loads((first + rest).split(b"\n\n")[-3][6:])["usage"]
    assert usage["completion_tokens"] == 400
