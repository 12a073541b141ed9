"""Framing: bytes exactly as OpenAI's, whatever the text contains."""

import json

import pytest

from gateway.api.errors import ApiError
from gateway.api.sse import DONE, ChunkFormat, encode_json, error_event


def chunk_format(*, chat: bool = True, include_usage: bool = False) -> ChunkFormat:
    return ChunkFormat(
        chat=chat, response_id="id-1", created=5, model="auto", fingerprint="fp_x", include_usage=include_usage
    )


def decode(data: bytes) -> dict[str, object]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    value = json.loads(data[6:-2])
    assert isinstance(value, dict)
    return value


def test_role_chunk_is_whole() -> None:
    assert decode(chunk_format().role(2)) == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "auto",
        "system_fingerprint": "fp_x",
        "choices": [
            {
                "index": 2,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }


def test_text_chunk_carries_only_the_delta() -> None:
    choice = decode(chunk_format().text(0, "hi"))["choices"]
    assert choice == [{"index": 0, "delta": {"content": "hi"}, "logprobs": None, "finish_reason": None}]


def test_finish_chunk_has_an_empty_delta() -> None:
    choice = decode(chunk_format().finish(1, "length"))["choices"]
    assert choice == [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "length"}]


def test_completion_chunks_carry_text() -> None:
    value = decode(chunk_format(chat=False).text(0, "hi"))
    assert value["object"] == "text_completion"
    assert value["choices"] == [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": None}]


@pytest.mark.parametrize("make", [lambda f: f.role(0), lambda f: f.text(0, "x"), lambda f: f.finish(0, "stop")])
@pytest.mark.parametrize("include_usage", [True, False])
def test_usage_is_null_in_every_chunk_exactly_when_asked_for(make: object, include_usage: bool) -> None:
    value = decode(make(chunk_format(include_usage=include_usage)))  # type: ignore[operator]
    assert ("usage" in value) == include_usage
    assert value.get("usage") is None


def test_usage_chunk_has_no_choices() -> None:
    value = decode(chunk_format(include_usage=True).usage({"total_tokens": 3}))
    assert value["choices"] == []
    assert value["usage"] == {"total_tokens": 3}


@pytest.mark.parametrize(
    "text", ['"quoted" \\ and\nlines\r\n', "\u2028 \u2029 \u0085", "😀 漢字 \x00\x1f", "data: [DONE]\n\n"]
)
def test_any_text_survives_and_never_breaks_a_line(text: str) -> None:
    data = chunk_format().text(0, text)
    assert len(data[:-2].decode().splitlines()) == 1
    assert decode(data)["choices"][0]["delta"]["content"] == text  # type: ignore[index]


def test_error_event_is_the_error_object() -> None:
    value = decode(error_event(ApiError(500, "broke", "server_error", code="engine_failed")))
    assert value == {"error": {"message": "broke", "type": "server_error", "param": None, "code": "engine_failed"}}


def test_done_is_literal() -> None:
    assert DONE == b"data: [DONE]\n\n"


def test_model_names_are_escaped() -> None:
    form = ChunkFormat(chat=True, response_id="i", created=1, model='a"b', fingerprint="", include_usage=False)
    assert decode(form.text(0, "x"))["model"] == 'a"b'


def test_json_is_compact() -> None:
    assert encode_json({"a": [1, 2]}) == b'{"a":[1,2]}'
