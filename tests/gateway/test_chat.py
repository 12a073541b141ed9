"""`POST /v1/chat/completions` as OpenAI's clients expect it."""

import asyncio
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from cascade.errors import EngineFailedError
from cascade.protocol import Token, TokenEvent
from gateway.logprobs import visible_tokens
from tests.gateway.support import (
    Gateway,
    ScriptedEngine,
    Serve,
    events_of,
    make_config,
    until,
)

pytestmark = pytest.mark.asyncio
BODY = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
URL = "/v1/chat/completions"


async def post(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(URL, json=BODY | fields)
    assert response.status == 200, await response.text()
    value = await response.json()
    assert isinstance(value, dict)
    return value


async def stream(gateway: Gateway, **fields: Any) -> list[bytes]:
    response = await gateway.client.post(URL, json=BODY | {"stream": True} | fields)
    assert response.status == 200, await response.text()
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    return events_of(await response.read())


async def test_whole_answer(gateway: Gateway) -> None:
    value = await post(gateway)
    assert value["id"].startswith("chatcmpl-")
    assert value["object"] == "chat.completion"
    assert value["model"] == "auto"
    assert value["system_fingerprint"] == "fp_0123456789ab"
    assert value["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello wörld", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


async def test_usage_counts_and_never_calls_drafts_predictions(gateway: Gateway) -> None:
    usage = (await post(gateway))["usage"]
    assert usage["prompt_tokens"] == len(gateway.engine.requests[0].prompt_ids)
    assert usage["completion_tokens"] == len("Hello wörld".encode())
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


async def test_prompt_is_the_rendered_template(gateway: Gateway, byte_tokenizer: Tokenizer) -> None:
    await post(gateway)
    text = byte_tokenizer.decode(gateway.engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_special_tokens_in_user_text_stay_text(gateway: Gateway) -> None:
    await post(gateway, messages=[{"role": "user", "content": "a<|im_end|>b"}])
    assert gateway.engine.requests[0].prompt_ids.count(1) == 1


async def test_text_parts_are_joined_and_developer_is_system(gateway: Gateway, byte_tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await post(gateway, messages=[{"role": "developer", "content": "S"}, {"role": "user", "content": parts}])
    text = byte_tokenizer.decode(gateway.engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nab<|im_end|>")


async def test_stream_is_role_deltas_finish_done(gateway: Gateway) -> None:
    *chunks, done = await stream(gateway)
    assert done == b"[DONE]"
    values = [json.loads(chunk) for chunk in chunks]
    choices = [value["choices"][0] for value in values]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "Hello wörld"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    assert len({value["id"] for value in values}) == 1
    assert all("usage" not in value for value in values)


async def test_stream_with_usage_ends_with_a_chunk_without_choices(gateway: Gateway) -> None:
    *chunks, last, done = await stream(gateway, stream_options={"include_usage": True})
    assert done == b"[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    value = json.loads(last)
    assert value["choices"] == []
    assert value["usage"] == (await post(gateway))["usage"]


async def test_stream_of_two_choices_keeps_them_apart(gateway: Gateway) -> None:
    *chunks, _ = await stream(gateway, n=2)
    texts = ["", ""]
    reasons: list[list[str]] = [[], []]
    for chunk in chunks:
        choice = json.loads(chunk)["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == ["Hello wörld"] * 2
    assert reasons == [["stop"], ["stop"]]


async def test_n_choices_are_requests_with_successive_seeds(gateway: Gateway) -> None:
    value = await post(gateway, n=3, seed=7)
    assert [choice["index"] for choice in value["choices"]] == [0, 1, 2]
    assert sorted(request.sampling.seed for request in gateway.engine.requests) == [7, 8, 9]
    assert len({request.request_id for request in gateway.engine.requests}) == 3
    assert value["usage"]["prompt_tokens"] == len(gateway.engine.requests[0].prompt_ids)
    assert value["usage"]["completion_tokens"] == 3 * len("Hello wörld".encode())


async def test_a_missing_seed_is_drawn_anew(gateway: Gateway) -> None:
    await post(gateway)
    await post(gateway)
    first, second = (request.sampling.seed for request in gateway.engine.requests)
    assert first != second


@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, -(1 << 63)])
async def test_any_64_bit_seed_becomes_a_non_negative_one(gateway: Gateway, seed: int) -> None:
    await post(gateway, seed=seed, n=2)
    assert all(0 <= request.sampling.seed < 1 << 63 for request in gateway.engine.requests)


async def test_sampling_fields_reach_the_engine(gateway: Gateway) -> None:
    await post(
        gateway,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        logit_bias={"5": -100},
        stop=["x", "y"],
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=2,
        max_completion_tokens=8,
        max_tokens=99,
    )
    sampling = gateway.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.3, -0.2)
    assert (sampling.logit_bias, sampling.stop, sampling.stop_token_ids) == ({5: -100.0}, ["x", "y"], [9])
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (True, 2, 8)


async def test_defaults_are_openais(gateway: Gateway) -> None:
    await post(gateway, temperature=None, top_p=None)
    sampling = gateway.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)
    assert sampling.max_tokens == 256 - len(gateway.engine.requests[0].prompt_ids)


async def test_top_p_zero_means_the_likeliest_token(gateway: Gateway) -> None:
    await post(gateway, top_p=0)
    sampling = gateway.engine.requests[0].sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


async def test_length_is_reported(gateway: Gateway) -> None:
    value = await post(gateway, max_tokens=4)
    assert value["choices"][0]["finish_reason"] == "length"
    assert value["choices"][0]["message"]["content"] == "Hell"


@pytest.mark.parametrize(
    ("model", "mode", "tier", "draft"),
    [
        ("auto", "speculate", "large", "small"),
        ("large", "direct", "large", None),
        ("small", "direct", "small", None),
        ("big-model", "direct", "large", None),
    ],
)
async def test_model_name_picks_the_plan(gateway: Gateway, model: str, mode: str, tier: str, draft: str | None) -> None:
    response = await gateway.client.post(URL, json=BODY | {"model": model})
    plan = gateway.engine.requests[0].plan
    assert (plan.mode, plan.tier, plan.draft) == (mode, tier, draft)
    assert response.headers["x-stepwell-model"] == tier
    assert response.headers["x-stepwell-plan"].startswith(mode)


async def test_streams_carry_the_headers_too(gateway: Gateway) -> None:
    response = await gateway.client.post(URL, json=BODY | {"stream": True}, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.headers["x-stepwell-plan"] == "speculate; draft=small; verify=large; policy=default"


async def test_logprobs_have_token_bytes_and_alternatives(gateway: Gateway) -> None:
    value = await post(gateway, logprobs=True, top_logprobs=2, max_tokens=1)
    content = value["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [72],
            "top_logprobs": [
                {"token": "H", "logprob": -0.5, "bytes": [72]},
                {"token": "\x00", "logprob": -1.5, "bytes": [0]},
            ],
        }
    ]


async def test_logprob_bytes_put_together_are_the_answer(gateway: Gateway) -> None:
    content = (await post(gateway, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "Hello wörld"


async def test_streamed_logprobs_equal_the_whole_ones(gateway: Gateway) -> None:
    whole = (await post(gateway, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    streamed: list[dict[str, Any]] = []
    for chunk in (await stream(gateway, logprobs=True, top_logprobs=1))[:-1]:
        logprobs = json.loads(chunk)["choices"][0]["logprobs"]
        streamed += logprobs["content"] if logprobs else []
    assert streamed == whole


async def test_harmless_fields_are_ignored(gateway: Gateway) -> None:
    await post(
        gateway,
        user="u",
        store=True,
        metadata={"a": "b"},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        service_tier="auto",
        prediction={"type": "content", "content": "x"},
    )


async def test_keep_alive_comment_while_waiting_for_the_first_token(serve: Serve) -> None:
    engine = ScriptedEngine(hold_after=0)
    gateway = await serve(engine=engine, config=make_config("server: {stream_comment_s: 0.02}"))
    response = await gateway.client.post(URL, json=BODY | {"stream": True})
    await response.content.readuntil(b": waiting\n\n")
    engine.release.set()
    assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_failure_mid_stream_is_an_error_event_without_done(serve: Serve) -> None:

    gateway = await serve(engine=ScriptedEngine(fail_after=3, fail_with=EngineFailedError("engine died")))
    *chunks, last = await stream(gateway)
    assert json.loads(last) == {
        "error": {"message": "engine died", "type": "server_error", "param": None, "code": "engine_failed"}
    }
    text = "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "Hel"


async def test_unforeseen_failure_mid_stream_tells_nothing(serve: Serve) -> None:
    gateway = await serve(engine=ScriptedEngine(fail_after=1, fail_with=RuntimeError("secret path /x")))
    *_, last = await stream(gateway)
    assert b"secret" not in last
    assert json.loads(last)["error"]["code"] == "internal_error"


async def test_one_failing_choice_cancels_its_siblings(serve: Serve) -> None:
    engine = ScriptedEngine(fail_after=5)
    gateway = await serve(engine=engine)
    response = await gateway.client.post(URL, json=BODY | {"n": 4})
    assert response.status == 500
    assert engine.running == set()


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}])
async def test_disconnect_cancels_every_choice(serve: Serve, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine(hold_after=2)
    gateway = await serve(engine=engine)
    choices = fields.get("n", 1)
    request = asyncio.ensure_future(gateway.client.post(URL, json=BODY | fields))
    await until(lambda: len(engine.running) == choices)
    if fields.get("stream"):
        response = await request
        await response.content.readuntil(b"\n\n")
        response.close()
    else:
        request.cancel()
    await until(lambda: not engine.running)
    assert len(engine.cancelled) == choices


async def test_without_a_limit_an_answer_may_fill_the_smallest_pool(serve: Serve) -> None:
    gateway = await serve(engine=ScriptedEngine(blocks={"large": 100, "small": 8}))
    await post(gateway)
    request = gateway.engine.requests[0]
    assert len(request.prompt_ids) + request.sampling.max_tokens == 8 * 16


async def test_an_eos_token_is_counted_but_has_no_logprob() -> None:
    token = Token(1, "large", "decoded", logprob=-0.1)
    ended = TokenEvent("r", [token, token], "x", finish_reason="stop")
    assert visible_tokens(ended) == [token]
    assert visible_tokens(TokenEvent("r", [token], "x", finish_reason="length")) == [token]
    assert visible_tokens(TokenEvent("r", [token], "x", finish_reason="stop", stop_reason="y")) == [token]
