"""How the gateway's process begins and ends."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx

from tests.e2e.conftest import LiveGateway, Start

BODY = {
    "model": "large",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
}


def serve(config: Path, text: str) -> tuple[int, str]:
    """`stepwell serve` that is meant to fail: status and standard error."""
    config.write_text(text)
    command = [sys.executable, "-m", "gateway.cli.main", "serve", "-c", str(config), "--no-pull"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    return done.returncode, done.stderr


def stop_mid_stream(gateway: LiveGateway, max_tokens: int) -> list[bytes]:
    """Begin a stream, send SIGTERM, read to the end: the stream's events."""
    body = BODY | {"max_tokens": max_tokens}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as response:
        pieces = response.iter_raw()
        received = next(pieces)
        gateway.process.terminate()
        received += b"".join(pieces)
    return received.removesuffix(b"\n\n").split(b"\n\n")


def test_sigterm_finishes_the_answer_in_flight_and_exits_0(start_gateway: Start) -> None:
    gateway = start_gateway()
    *_, finish, done = stop_mid_stream(gateway, max_tokens=100)
    assert done == b"data: [DONE]"
    assert json.loads(finish[6:])["choices"][0]["finish_reason"] == "length"
    assert gateway.process.wait(60) == 0


def test_past_the_drain_limit_streams_end_with_an_error_event(start_gateway: Start) -> None:
    gateway = start_gateway(drain_timeout_s=0.2)
    *_, last = stop_mid_stream(gateway, max_tokens=2000)
    assert json.loads(last[6:])["error"]["type"] == "server_error"
    assert gateway.process.wait(60) == 0


def test_sigterm_while_the_engine_loads(start_gateway: Start) -> None:
    gateway = start_gateway(wait_ready=False)
    gateway.wait(lambda: "listening" in gateway.log.read_text())
    assert not gateway.ready()
    assert gateway.stop() == 0


def test_a_missing_bundle_ends_the_start_with_its_name(tmp_path: Path) -> None:
    status, error = serve(tmp_path / "c.yaml", "tiers: {a: {bundle: ./absent}}")
    assert status == 1
    assert f"{tmp_path / 'absent'}: not a bundle" in error
    assert "Traceback" not in error


def test_a_taken_port_ends_the_start_with_its_number(tmp_path: Path, smol_bundle: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f"server: {{port: {port}}}\ntiers: {{a: {{bundle: {smol_bundle}}}}}"
        status, error = serve(tmp_path / "c.yaml", text)
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "Traceback" not in error
