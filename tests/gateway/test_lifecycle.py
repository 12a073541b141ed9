"""Probes, draining, keys at start, and what the logs may say."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
from aiohttp.http_exceptions import BadStatusLine

from cascade.errors import ConfigError
from gateway.auth import load_keys
from gateway.logs import configure_logs, log_event
from tests.gateway.support import ScriptedEngine, Serve, make_config, until

BODY = {"model": "auto", "messages": [{"role": "user", "content": "tell-no-one"}]}
URL = "/v1/chat/completions"


@pytest.mark.asyncio
async def test_ready_follows_the_engine(serve: Serve) -> None:
    gateway = await serve(engine=ScriptedEngine(ready=False))
    response = await gateway.client.get("/readyz")
    assert (response.status, await response.json()) == (503, {"status": "starting"})
    gateway.engine.restarts = 1
    assert (await (await gateway.client.get("/readyz")).json())["status"] == "restarting"
    gateway.engine.ready = True
    assert (await gateway.client.get("/readyz")).status == 200


@pytest.mark.asyncio
async def test_health_does_not_follow_the_engine(serve: Serve) -> None:
    gateway = await serve(engine=ScriptedEngine(ready=False))
    assert (await gateway.client.get("/healthz")).status == 200


@pytest.mark.asyncio
async def test_draining_finishes_old_requests_and_refuses_new_ones(serve: Serve) -> None:
    engine = ScriptedEngine(hold_after=1)
    gateway = await serve(engine=engine)
    old = asyncio.ensure_future(gateway.client.post(URL, json=BODY))
    await until(lambda: bool(engine.running))
    gateway.state.draining = True
    new = await gateway.client.post(URL, json=BODY)
    assert (new.status, (await new.json())["error"]["code"]) == (503, "draining")
    assert new.headers["Connection"] == "close"
    assert (await gateway.client.get("/readyz")).status == 503
    engine.release.set()
    assert (await old).status == 200
    assert await gateway.state.in_flight.wait_idle(5)


@pytest.mark.asyncio
async def test_in_flight_limit_is_reported(serve: Serve) -> None:
    engine = ScriptedEngine(hold_after=1)
    gateway = await serve(engine=engine)
    request = asyncio.ensure_future(gateway.client.post(URL, json=BODY))
    await until(lambda: bool(engine.running))
    assert not await gateway.state.in_flight.wait_idle(0.01)
    request.cancel()


@pytest.mark.asyncio
async def test_a_slow_reader_stops_the_reading_of_the_engine(serve: Serve) -> None:
    """25 MB are more than all buffers on the way hold, so the engine is not asked for the rest until they are read."""
    events = 200
    engine = ScriptedEngine(answer=["x" * (1 << 17)] * events)
    gateway = await serve(engine=engine)
    response = await gateway.client.post(URL, json=BODY | {"stream": True, "max_tokens": events})
    sent = -1
    while sent != engine.sent:
        sent = engine.sent
        await asyncio.sleep(0.3)
    assert sent < events
    assert (await response.read()).count(b"xx") == events * (1 << 16)
    assert engine.sent == events


@pytest.mark.asyncio
async def test_logs_hold_no_prompt_and_no_answer(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await serve()
    with caplog.at_level(logging.DEBUG):
        await (await gateway.client.post(URL, json=BODY)).read()
        await (await gateway.client.post(URL, json=BODY | {"temperature": "tell-no-one"})).read()
    written = "".join(record.getMessage() + str(record.__dict__) for record in caplog.records)
    assert "'plan': 'speculate; draft=small; verify=large; policy=default'" in written
    assert "tell-no-one" not in written
    assert "Hello" not in written


def test_json_logs_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logs("info", "json")
        log_event("request", path="a\nb", status=200)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["event"], entry["path"], entry["status"]) == ("request", "a\nb", 200)


def test_keys_come_from_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfile-key\n\n")
    monkeypatch.setenv("TEST_KEYS", "one, two")
    keys = load_keys(make_config(f"server: {{api_keys_env: TEST_KEYS, api_keys_file: {file}}}"))
    assert [keys.accepts(key) for key in ("one", "two", "file-key", "# ours", "")] == [True, True, True, False, False]


@pytest.mark.parametrize("text", ["{api_keys_env: STEPWELL_UNSET_KEYS}", "{api_keys_file: /nowhere/keys}"])
def test_a_named_source_without_keys_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        load_keys(make_config(f"server: {text}"))


@pytest.mark.asyncio
async def test_a_refused_request_is_logged_with_its_code(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await serve()
    with caplog.at_level("INFO", "stepwell"):
        await gateway.client.post(URL, data=b"{", headers={"Content-Type": "application/json"})
    (record,) = [r for r in caplog.records if r.getMessage() == "request"]
    assert (record.__dict__["fields"]["error"], record.exc_info) == ("invalid_json", None)


def test_what_is_not_http_is_one_line_of_log(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logs("info", "text")
        try:
            raise BadStatusLine("junk")
        except BadStatusLine:
            logging.getLogger("aiohttp.server").exception("Error handling request from %s", "127.0.0.1")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("info    not a valid HTTP request: BadStatusLine")
