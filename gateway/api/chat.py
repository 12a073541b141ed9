"""`POST /v1/chat/completions`."""

from aiohttp import web

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
from gateway.logprobs import chat_logprobs, visible_tokens
from gateway.schema import ChatRequest, parse_request
from gateway.state import STATE


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, streamed or whole."""
    body = parse_request(ChatRequest, await read_json(request))
    plan, text = plan_request(request.app[STATE], body, body.token_limit)
    ids = await text.encode_chat([message.as_template_input() for message in body.messages])
    job = await build_job(
        request,
        body,
        plan,
        [ids],
        prefix="chatcmpl-",
        param="messages",
        token_limit=body.token_limit,
        logprobs=body.logprob_count,
    )
    if body.stream:
        return await _stream(request, job, logprobs=bool(body.logprobs))
    return await _whole(request, job, logprobs=bool(body.logprobs))


async def _stream(request: web.Request, job: Job, *, logprobs: bool) -> web.StreamResponse:
    chunks = ChunkFormat(
        chat=True,
        response_id=job.response_id,
        created=job.created,
        model=job.model,
        fingerprint=job.text.fingerprint,
        include_usage=job.body.include_usage,
    )

    def write_event(index: int, event: TokenEvent) -> bytes:
        data = b""
        if logprobs and (tokens := visible_tokens(event)):
            data = chunks.text(index, event.text, encode_json(chat_logprobs(tokens, job.text.table)))
        elif event.text:
            data = chunks.text(index, event.text)
        return data + chunks.finish(index, event.finish_reason) if event.finish_reason else data

    opening = [chunks.role(index) for index in range(len(job.requests))]
    return await stream_job(request, job, chunks, opening, write_event)


async def _whole(request: web.Request, job: Job, *, logprobs: bool) -> web.Response:
    async with job.generation() as generation:
        choices = await collect(generation, len(job.requests), keep_tokens=logprobs)
    usage = job.usage([choice.usage for choice in choices])
    note_usage(request, usage)
    answer = job.head("chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.tokens, job.text.table) if logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage,
    }
    return json_answer(job, answer)
