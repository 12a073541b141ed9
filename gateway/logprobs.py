"""Log-probabilities in the two shapes that OpenAI's endpoints have. Pure functions."""

from collections.abc import Iterable
from typing import Any

from cascade.protocol import Token, TokenEvent
from cascade.token_table import TokenTable

LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


def visible_tokens(event: TokenEvent) -> list[Token]:
    """The tokens that clients see: an EOS or stop token ends the answer and is counted, but is no part of it."""
    ended_by_token = event.finish_reason == "stop" and not isinstance(event.stop_reason, str)
    return event.tokens[:-1] if ended_by_token else event.tokens


def chat_logprobs(tokens: Iterable[Token], table: TokenTable) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}, ...], "refusal": null}`."""
    content = []
    for token in tokens:
        entry = _chat_entry(token.id, token.logprob, table)
        entry["top_logprobs"] = [_chat_entry(other.id, other.logprob, table) for other in token.top or ()]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float | None, table: TokenTable) -> dict[str, Any]:
    return {"token": table.text_of(token_id), "logprob": _finite(logprob), "bytes": list(table.bytes_of(token_id))}


def completion_logprobs(tokens: Iterable[Token], table: TokenTable, offset: int) -> tuple[dict[str, Any], int]:
    """The legacy shape, and the offset (in characters of the answer) where the next tokens begin.

    `top_logprobs` is keyed by text, so of two candidates with the same text the likelier one stays. It holds
    the chosen token as well, as OpenAI's does.
    """
    texts: list[str] = []
    offsets: list[int] = []
    chosen: list[float] = []
    top: list[dict[str, float]] = []
    for token in tokens:
        text = _legacy_text(token.id, table)
        offsets.append(offset)
        offset += len(table.text_of(token.id))
        texts.append(text)
        chosen.append(_finite(token.logprob))
        best: dict[str, float] = {}
        for other in token.top or ():
            best.setdefault(_legacy_text(other.id, table), _finite(other.logprob))
        if token.top:
            best.setdefault(text, _finite(token.logprob))
        top.append(best)
    any_top = any(top)
    return {
        "tokens": texts,
        "token_logprobs": chosen,
        "top_logprobs": top if any_top else None,
        "text_offset": offsets,
    }, offset


def _legacy_text(token_id: int, table: TokenTable) -> str:
    r"""The text, or `bytes:\xe2\x82` for a piece of a character."""
    data = table.bytes_of(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    if logprob is None or not logprob > LOWEST:
        return LOWEST
    return logprob
