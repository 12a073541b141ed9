"""A job's answer as server-sent events: when the status goes out, what is joined, and how a failure ends it."""

import logging
from collections.abc import Callable
from contextlib import aclosing

from aiohttp import web

from cascade.errors import StepwellError
from cascade.protocol import TokenEvent, Usage
from gateway.api.common import Job, note_usage
from gateway.api.errors import describe
from gateway.api.sse import DONE, KEEP_ALIVE, ChunkFormat, error_event
from gateway.logs import log_event
from gateway.state import LOG_FIELDS, REQUEST_ID

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back
}


async def stream_job(
    request: web.Request,
    job: Job,
    chunks: ChunkFormat,
    opening: list[bytes],
    write_event: Callable[[int, TokenEvent], bytes],
) -> web.StreamResponse:
    """Answer as server-sent events: `opening`, then what `write_event` makes of each event.

    The status is sent with the first event (or the first keep-alive), so that a full queue is still a 429.
    A later failure becomes an error event, and the stream ends without `[DONE]`.
    """
    response: web.StreamResponse | None = None
    usages: list[Usage | None] = [None] * len(job.requests)
    try:
        async with (
            job.generation() as generation,
            aclosing(generation.batches(job.state.config.server.stream_comment_s)) as batches,
        ):
            async for batch in batches:
                parts = [write_event(index, event) for index, event in batch] or [KEEP_ALIVE]
                for index, event in batch:
                    usages[index] = event.usage or usages[index]
                if response is None:
                    response = web.StreamResponse(headers=SSE_HEADERS | job.headers())
                    await response.prepare(request)
                    parts = opening + parts
                # All that is ready goes out in one write: one packet, not one for each token.
                if data := b"".join(parts):
                    await response.write(data)
        assert response is not None, "every choice ends with an event"
        usage = job.usage(usages)
        note_usage(request, usage)
        await response.write((chunks.usage(usage) if job.body.include_usage else b"") + DONE)
    except ConnectionError:
        raise
    except Exception as error:  # after the status is sent, an event is all that can tell of it
        if response is None:
            raise
        request[LOG_FIELDS]["error"] = type(error).__name__
        if not isinstance(error, StepwellError):
            log_event("stream failed", level=logging.ERROR, failure=error, request_id=request[REQUEST_ID])
        await response.write(error_event(describe(error)))
    await response.write_eof()
    return response
