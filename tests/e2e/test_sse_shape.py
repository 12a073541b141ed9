"""The bytes on the wire: a raw socket sees exactly OpenAI's events, under both HTTP framings."""

import json
import socket
from typing import Any
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
    with open_stream(live, BODY) as connection:
        header, _, events = read_all(connection).partition(b"\r\n\r\n")
    assert b"200 OK" in header.splitlines()[0]
    assert b"chunked" not in header.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_a_reader_that_comes_late_loses_nothing(live: LiveGateway) -> None:
    """More events than the engine's credit of 256, all of them made before the second is read."""
    tokens = 300
    body = BODY | {"max_tokens": tokens, "ignore_eos": True, "model": "small", "logprobs": True}
    with open_stream(live, body, receive_buffer=4096) as connection:
        received = connection.recv(1024)
        live.wait(lambda: live.metric("stepwell_engine_running") == 0)
        received += read_all(connection)
    events = received.split(b"\n\n")
    assert events[-2] == b"data: [DONE]"
    chunks = [json.loads(event[6:]) for event in events[1:-2]]
    entries = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks[:-1] if chunk["choices"][0]["logprobs"]]
    assert sum(map(len, entries)) == tokens
    assert chunks[-1]["usage"]["completion_tokens"] == tokens


def open_stream(live: LiveGateway, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """Send the request over a bare socket, as HTTP/1.0."""
    address = urlsplit(live.url)
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        f"Host: {address.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.socket()
    connection.settimeout(120)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((address.hostname, address.port))
    connection.sendall(head.encode() + data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)
