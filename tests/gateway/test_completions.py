"""`POST /v1/completions`: prompts in four forms, echo, legacy log-probabilities."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.gateway.support import Gateway, events_of

pytestmark = pytest.mark.asyncio
URL = "/v1/completions"


async def post(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(URL, json={"model": "large", "prompt": "Hi"} | fields)
    assert response.status == 200, await response.text()
    value = await response.json()
    assert isinstance(value, dict)
    return value


async def refused(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(URL, json={"model": "large", "prompt": "Hi"} | fields)
    assert response.status == 400
    error = (await response.json())["error"]
    assert isinstance(error, dict)
    return error


async def test_whole_answer(gateway: Gateway) -> None:
    value = await post(gateway)
    assert value["object"] == "text_completion"
    assert value["id"].startswith("cmpl-")
    assert value["choices"] == [{"index": 0, "text": "Hello wörld", "logprobs": None, "finish_reason": "stop"}]


async def test_text_gets_no_template(gateway: Gateway, byte_tokenizer: Tokenizer) -> None:
    await post(gateway)
    assert byte_tokenizer.decode(gateway.engine.requests[0].prompt_ids) == "Hi"


async def test_default_is_sixteen_tokens(gateway: Gateway) -> None:
    await post(gateway)
    assert gateway.engine.requests[0].sampling.max_tokens == 16


async def test_a_list_of_texts_makes_a_choice_each(gateway: Gateway) -> None:
    value = await post(gateway, prompt=["a", "bc"], n=2, echo=True)
    assert [choice["text"] for choice in value["choices"]] == [
        prompt + "Hello wörld" for prompt in ("a", "a", "bc", "bc")
    ]
    assert [choice["index"] for choice in value["choices"]] == [0, 1, 2, 3]
    assert value["usage"]["prompt_tokens"] == 3


async def test_token_ids_are_taken_as_they_are(gateway: Gateway) -> None:
    await post(gateway, prompt=[0, 99, 1])
    assert gateway.engine.requests[0].prompt_ids == [0, 99, 1]


async def test_lists_of_token_ids(gateway: Gateway) -> None:
    await post(gateway, prompt=[[4, 5], [6]])
    assert sorted(request.prompt_ids for request in gateway.engine.requests) == [[4, 5], [6]]


async def test_echo_of_token_ids_is_their_text(gateway: Gateway) -> None:
    value = await post(gateway, prompt=[ord("o") + 2, ord("k") + 2], echo=True, max_tokens=1)
    assert value["choices"][0]["text"] == "okH"


async def test_stream_is_text_finish_done(gateway: Gateway) -> None:
    response = await gateway.client.post(
        URL,
        json={
            "model": "large",
            "prompt": "Hi",
            "stream": True,
            "echo": True,
            "stream_options": {"include_usage": True},
        },
    )
    *chunks, usage, done = events_of(await response.read())
    assert done == b"[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "HiHello wörld"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert json.loads(usage)["usage"]["prompt_tokens"] == 2


async def test_legacy_logprobs(gateway: Gateway) -> None:
    value = await post(gateway, logprobs=2, max_tokens=2)
    assert value["choices"][0]["logprobs"] == {
        "tokens": ["H", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"H": -0.5, "\x00": -1.5}, {"e": -0.5, "\x00": -1.5}],
        "text_offset": [0, 1],
    }


async def test_legacy_logprobs_show_pieces_of_characters_as_bytes(gateway: Gateway) -> None:
    value = await post(gateway, logprobs=0)
    logprobs = value["choices"][0]["logprobs"]
    assert logprobs["tokens"][7:9] == ["bytes:\\xc3", "bytes:\\xb6"]
    assert logprobs["top_logprobs"] is None


async def test_streamed_logprob_offsets_go_on(gateway: Gateway) -> None:
    response = await gateway.client.post(
        URL, json={"model": "large", "prompt": "Hi", "stream": True, "logprobs": 0, "max_tokens": 3}
    )
    offsets: list[int] = []
    for chunk in events_of(await response.read())[:-1]:
        logprobs = json.loads(chunk)["choices"][0]["logprobs"]
        offsets += logprobs["text_offset"] if logprobs else []
    assert offsets == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"n": 33}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
    ],
)
async def test_faults_name_their_field(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    assert (await refused(gateway, **fields))["param"] == param


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (True, "Invalid value for 'prompt': it should be a valid string or a valid list."),
        ([], "Invalid value for 'prompt': it should have at least 1 item after validation, not 0."),
        ([-1], "Token ids of 'prompt' must be non-negative integers, at least one of them."),
        ([1 << 31], "'prompt' has token id 2147483648, which is larger than any model's."),
    ],
    ids=str,
)
async def test_faults_of_a_prompt_say_what_it_should_be(gateway: Gateway, prompt: object, message: str) -> None:
    assert (await refused(gateway, prompt=prompt))["message"] == message


async def test_overflow_names_the_numbers(gateway: Gateway) -> None:
    error = await refused(gateway, prompt="x" * 250, max_tokens=10)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("256 tokens", "260 tokens", "250 in the prompt", "10 in the"))
