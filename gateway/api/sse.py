"""Server-sent events in OpenAI's form: pure functions from values to bytes, no I/O.

One chunk is cut and joined, not serialised: all of it but the text is the same for a whole stream, so the
parts before and after the text are encoded once and a token costs one JSON string.
"""

from typing import Any

import msgspec

from gateway.api.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment: parsers skip it, proxies see traffic."""

_encode = msgspec.json.Encoder().encode
# JSON leaves these raw. SSE allows them, but clients that split with `str.splitlines` would cut the event.
_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def encode_json(value: Any) -> bytes:
    """JSON without any character that some line splitter takes for a line break."""
    data = _encode(value)
    for raw, escaped in _LINE_BREAKS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def event(value: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + encode_json(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed: OpenAI's error object; no `[DONE]` follows."""
    return b"data: " + error.body() + b"\n\n"


class ChunkFormat:
    """The chunks of one stream.

    `text_field` splits the two endpoints: chat puts text into `delta.content`, completions into `text`.
    With `include_usage` every chunk carries `usage: null` until the last, as OpenAI's do.
    """

    def __init__(
        self, *, chat: bool, response_id: str, created: int, model: str, fingerprint: str, include_usage: bool
    ) -> None:
        self._chat = chat
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._open = b"data: " + encode_json(self._head)[:-1] + b',"choices":[{"index":'
        self._close = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def role(self, index: int) -> bytes:
        """First chunk of a chat choice. Completions have none."""
        delta = b',"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}]'
        return self._open + b"%d" % index + delta + self._close

    def text(self, index: int, text: str, logprobs: bytes | None = None) -> bytes:
        """A piece of the answer; `logprobs` is encoded JSON."""
        before = b',"delta":{"content":' if self._chat else b',"text":'
        after = b'},"logprobs":' if self._chat else b',"logprobs":'
        return b"".join(
            (
                self._open,
                b"%d" % index,
                before,
                encode_json(text),
                after,
                logprobs or b"null",
                b',"finish_reason":null}]',
                self._close,
            )
        )

    def finish(self, index: int, reason: str) -> bytes:
        """Last chunk of a choice: no text, a reason."""
        body = b',"delta":{},"logprobs":null' if self._chat else b',"text":"","logprobs":null'
        return self._open + b"%d" % index + body + b',"finish_reason":' + encode_json(reason) + b"}]" + self._close

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk of `stream_options.include_usage`: no choices."""
        return event(self._head | {"choices": [], "usage": usage})
