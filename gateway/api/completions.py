"""`POST /v1/completions`, the legacy endpoint: text or token ids in, text out, no template."""

from aiohttp import web

from cascade.errors import InvalidRequestError
from cascade.protocol import TokenEvent
from gateway.api.common import (
    Job,
    build_job,
    json_answer,
    note_usage,
    plan_request,
    read_json,
)
from gateway.api.sse import ChunkFormat, encode_json
from gateway.api.streaming import stream_job
from gateway.generation import collect
from gateway.logprobs import completion_logprobs, visible_tokens
from gateway.prompts import TierText
from gateway.schema import CompletionRequest, parse_request
from gateway.state import STATE

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default on this endpoint."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, streamed or whole."""
    body = parse_request(CompletionRequest, await read_json(request))
    limit = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
    plan, text = plan_request(request.app[STATE], body, limit)
    prompts = body.prompts()
    most = request.app[STATE].config.server.max_choices
    if len(prompts) > most:
        message = f"The request has {len(prompts)} prompts, at most {most} answers are allowed."
        raise InvalidRequestError(message, "prompt", "invalid_value")
    ids = [await _encode(prompt, text) for prompt in prompts]
    job = await build_job(
        request,
        body,
        plan,
        ids,
        prefix="cmpl-",
        param="prompt",
        token_limit=limit,
        logprobs=body.logprobs,
    )
    echoes = [_echo(prompt, text) for prompt in prompts] if body.echo else [""] * len(prompts)
    prefixes = [echoes[index // job.choices_per_prompt] for index in range(len(job.requests))]
    if body.stream:
        return await _stream(request, job, prefixes, logprobs=body.logprobs is not None)
    return await _whole(request, job, prefixes, logprobs=body.logprobs is not None)


async def _encode(prompt: str | list[int], text: TierText) -> list[int]:
    if isinstance(prompt, str):
        ids = await text.encode_text(prompt)
        if not ids:
            raise InvalidRequestError("'prompt' is empty.", "prompt", "invalid_value")
        return ids
    if (worst := max(prompt)) >= text.vocab_size:
        message = f"'prompt' has token id {worst}; the model's are 0 to {text.vocab_size - 1}."
        raise InvalidRequestError(message, "prompt", "invalid_value")
    return prompt


def _echo(prompt: str | list[int], text: TierText) -> str:
    return prompt if isinstance(prompt, str) else text.decode(prompt)


async def _stream(request: web.Request, job: Job, prefixes: list[str], *, logprobs: bool) -> web.StreamResponse:
    chunks = ChunkFormat(
        chat=False,
        response_id=job.response_id,
        created=job.created,
        model=job.model,
        fingerprint=job.text.fingerprint,
        include_usage=job.body.include_usage,
    )
    offsets = [0] * len(job.requests)

    def write_event(index: int, event: TokenEvent) -> bytes:
        data = b""
        if logprobs and (tokens := visible_tokens(event)):
            shape, offsets[index] = completion_logprobs(tokens, job.text.table, offsets[index])
            data = chunks.text(index, event.text, encode_json(shape))
        elif event.text:
            data = chunks.text(index, event.text)
        return data + chunks.finish(index, event.finish_reason) if event.finish_reason else data

    opening = [chunks.text(index, prefix) for index, prefix in enumerate(prefixes) if prefix]
    return await stream_job(request, job, chunks, opening, write_event)


async def _whole(request: web.Request, job: Job, prefixes: list[str], *, logprobs: bool) -> web.Response:
    async with job.generation() as generation:
        choices = await collect(generation, len(job.requests), keep_tokens=logprobs)
    usage = job.usage([choice.usage for choice in choices])
    note_usage(request, usage)
    answer = job.head("text_completion") | {
        "choices": [
            {
                "index": index,
                "text": prefixes[index] + choice.text,
                "logprobs": completion_logprobs(choice.tokens, job.text.table, 0)[0] if logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage,
    }
    return json_answer(job, answer)
