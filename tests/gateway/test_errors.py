"""Every fault has OpenAI's shape, a right status, and nothing of our insides."""

import asyncio
import gzip
import json
from typing import Any

import pytest
from pydantic import ValidationError

from cascade.errors import (
    ContextOverflowError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from gateway.auth import KeyRing
from gateway.schema import ChatRequest
from tests.gateway.support import Gateway, ScriptedEngine, Serve, make_config

CHAT = "/v1/chat/completions"
BODY = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
JSON = {"Content-Type": "application/json"}


async def fault(
    gateway: Gateway, status: int, method: str = "POST", path: str = CHAT, **options: Any
) -> dict[str, Any]:
    response = await gateway.client.request(method, path, **options)
    assert response.status == status
    assert response.headers["Content-Type"].startswith("application/json")
    assert response.headers["x-request-id"]
    value = await response.json()
    assert set(value) == {"error"}
    assert set(value["error"]) == {"message", "type", "param", "code"}
    return {**value["error"], "headers": response.headers}


@pytest.mark.parametrize(
    "data", [b"{", b"", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"a":"\\ud800"}'], ids=range(6)
)
async def test_invalid_json(gateway: Gateway, data: bytes) -> None:
    error = await fault(gateway, 400, data=data, headers=JSON)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")


async def test_half_a_surrogate_pair_is_named(gateway: Gateway) -> None:
    error = await fault(gateway, 400, data=b'{"a":"\\ud800"}', headers=JSON)
    assert "surrogate pair" in error["message"]


async def test_json_that_is_no_object(gateway: Gateway) -> None:
    assert "JSON object" in (await fault(gateway, 400, json=[1]))["message"]


async def test_wrong_content_type(gateway: Gateway) -> None:
    error = await fault(gateway, 415, data=b"{}", headers={"Content-Type": "text/plain"})
    assert error["code"] == "unsupported_content_type"


async def test_too_large_a_body(serve: Serve) -> None:
    gateway = await serve(config=make_config("server: {max_body: 1KiB}"))
    error = await fault(gateway, 413, json=BODY | {"user": "x" * 2000})
    assert error["code"] == "request_too_large"


async def test_too_large_a_body_is_refused_by_its_header(serve: Serve) -> None:
    gateway = await serve(config=make_config("server: {max_body: 1KiB}"))
    reader, writer = await asyncio.open_connection(gateway.client.host, gateway.client.port)
    lines = (f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {10**12}", "", "")
    writer.write("\r\n".join(lines).encode())
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_unknown_model_with_suggestion(gateway: Gateway) -> None:
    error = await fault(gateway, 404, json=BODY | {"model": "lagre"})
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "did you mean 'large'?" in error["message"]


async def test_unknown_path(gateway: Gateway) -> None:
    error = await fault(gateway, 404, "GET", "/v1/nothing")
    assert (error["message"], error["code"]) == ("Invalid URL (GET /v1/nothing)", "unknown_url")


async def test_wrong_method(gateway: Gateway) -> None:
    error = await fault(gateway, 405, "GET")
    assert error["headers"]["Allow"] == "POST"


async def test_context_overflow_names_the_numbers(gateway: Gateway) -> None:
    error = await fault(gateway, 400, json=BODY | {"max_tokens": 1000})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "maximum context length is 256 tokens" in error["message"]
    assert "1000 in the completion" in error["message"]


async def test_prompt_longer_than_the_context(gateway: Gateway) -> None:
    error = await fault(gateway, 400, json=BODY | {"messages": [{"role": "user", "content": "x" * 9000}]})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reject", "status", "code", "retry_after"),
    [
        (QueueFullError("full", retry_after_s=7), 429, "queue_full", "7"),
        (EngineUnavailableError("starting"), 503, "engine_unavailable", "5"),
        (EngineFailedError("died"), 500, "engine_failed", None),
        (ContextOverflowError("too long"), 400, "context_length_exceeded", None),
        (InvalidRequestError("bad", "seed", "invalid_value"), 400, "invalid_value", None),
        (ValueError("secret"), 500, "internal_error", None),
    ],
)
async def test_engine_errors_before_the_first_token(
    serve: Serve, reject: Exception, status: int, code: str, retry_after: str | None, stream: bool
) -> None:
    gateway = await serve(engine=ScriptedEngine(reject=reject))
    error = await fault(gateway, status, json=BODY | {"stream": stream})
    assert error["code"] == code
    assert error["headers"].get("Retry-After") == retry_after
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"repetition_penalty": 1e-9}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 2000}, "n", "2000 answers, at most 32 are allowed"),
        ({"stop": [1]}, "stop[0]", "Invalid value for 'stop[0]': it should be a valid string."),
        ({"logit_bias": {"1" * 10: 1}}, "logit_bias", "token ids, '1111111111' is none"),
        ({"stop": 1}, "stop", "it should be a valid string or a valid list"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "token ids, '05' is none"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "the bias of token 5 is 101, the range is -100 to 100"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "it has 1025 tokens, at most 1024"),
        ({"": 1}, "", "supplied: ''"),
        ({"stream": True, "stream_options": {"include_use": 1}}, "stream_options.include_use", "'include_usage'?"),
        ({"stop_token_ids": [1 << 40]}, "stop_token_ids", "1099511627776; the model's are 0 to"),
        ({"top_logprobs": 3}, "top_logprobs", "'logprobs' is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "valid"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "Supported values"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "not supported yet"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter: 'messages[0].content'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got null"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "a valid string or a valid list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "'image_url' are not supported",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "not supported yet"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "not supported yet"),
        ({"audio": {"voice": "x"}}, "audio", "not supported yet"),
        ({"seed": 1 << 64}, "seed", "less than or equal"),
        ({"model": ""}, "model", "at least 1 character"),
    ],
)
async def test_field_faults_name_field_and_reason(
    gateway: Gateway, fields: dict[str, Any], param: str, part: str
) -> None:
    error = await fault(gateway, 400, json=BODY | fields)
    assert error["param"] == param
    assert part in error["message"]


@pytest.mark.parametrize("field", ["model", "messages"])
async def test_missing_fields(gateway: Gateway, field: str) -> None:
    error = await fault(gateway, 400, json={key: value for key, value in BODY.items() if key != field})
    assert (error["param"], error["code"]) == (field, "missing_required_parameter")


@pytest.mark.parametrize(
    ("header", "status"),
    [(None, 401), ("Bearer wrong", 401), ("Basic k1", 401), ("Bearer", 401), ("Bearer k1", 200), ("bearer k2", 200)],
)
async def test_api_keys(serve: Serve, header: str | None, status: int) -> None:
    gateway = await serve(keys=KeyRing(["k1", "k2"]))
    headers = {"Authorization": header} if header else {}
    response = await gateway.client.post(CHAT, json=BODY, headers=headers)
    assert response.status == status
    if status == 401:
        assert (await response.json())["error"]["code"] == "invalid_api_key"
        assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_probes_need_no_key(serve: Serve, path: str) -> None:
    gateway = await serve(keys=KeyRing(["k"]))
    assert (await gateway.client.get(path)).status == 200


async def test_hostile_request_ids_are_replaced(gateway: Gateway) -> None:
    response = await gateway.client.get("/v1/models", headers={"x-request-id": "a b\tc"})
    assert response.headers["x-request-id"] != "a b\tc"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"stop": [1] * 1000},
        {"stop_token_ids": ["a"] * 1000},
        {"logit_bias": {str(i): "a" for i in range(2000)}},
    ],
    ids=["messages", "parts", "stop", "stop_token_ids", "logit_bias"],
)
def test_many_faults_cost_no_more_than_a_few(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(BODY | fields)
    assert caught.value.error_count() <= 2


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_in_the_encoding_it_names(gateway: Gateway, encoding: str) -> None:
    error = await fault(gateway, 400, data=b'{"model": "small"}', headers={**JSON, "Content-Encoding": encoding})
    assert error["code"] == "invalid_body"


async def test_an_unknown_content_encoding(gateway: Gateway) -> None:
    error = await fault(gateway, 415, data=b"{}", headers={**JSON, "Content-Encoding": "zzz"})
    assert "'zzz'" in error["message"]


async def test_a_gzipped_body_is_read(gateway: Gateway) -> None:
    data = gzip.compress(json.dumps(BODY).encode())
    response = await gateway.client.post(CHAT, data=data, headers={**JSON, "Content-Encoding": "gzip"})
    assert response.status == 200
