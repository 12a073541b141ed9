"""What happens around every handler: request ids, logs, counts, keys, draining, and errors as OpenAI's JSON."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from cascade.errors import StepwellError
from gateway.api.errors import (
    SERVER_ERROR,
    ApiError,
    HttpError,
    describe,
    unauthorized,
    unknown_path,
)
from gateway.auth import bearer_token
from gateway.logs import log_event
from gateway.state import LOG_FIELDS, REQUEST_ID, STATE, GatewayState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
CLIENT_CLOSED = 499
"""nginx's status for a client that left; for logs and metrics only."""


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The only middleware, so that a request costs one wrapped call."""
    state = request.app[STATE]
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    request[LOG_FIELDS] = {}
    if request.path in _PROBES:
        return await _guarded(request, handler, state)
    start = time.monotonic()
    state.in_flight.enter()
    state.metrics.in_flight.inc()
    status = CLIENT_CLOSED
    try:
        response = await _guarded(request, handler, state)
        status = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):
        state.metrics.disconnects.labels(_endpoint(request)).inc()
        # A failed write means the same as a cancelled handler; aiohttp would log it as our own fault.
        raise asyncio.CancelledError from None
    finally:
        state.in_flight.leave()
        state.metrics.in_flight.dec()
        _record(request, state, status, time.monotonic() - start)


async def _guarded(request: web.Request, handler: Handler, state: GatewayState) -> web.StreamResponse:
    """Run the handler; any exception but a lost client becomes an answer."""
    try:
        _admit(request, state)
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:
        if not isinstance(error, StepwellError | web.HTTPException):
            log_event("request failed", level=logging.ERROR, failure=error, request_id=request[REQUEST_ID])
        described = describe(error)
        if described.code == "unknown_url":
            described = unknown_path(request.method, request.path)
        request[LOG_FIELDS]["error"] = described.code
        response = described.response()
        if state.draining or described.status in (408, 413):
            response.force_close()
        return response


def _admit(request: web.Request, state: GatewayState) -> None:
    """Keys first, then draining. Raises HttpError (401, 503)."""
    if request.path in _PROBES:
        return
    if state.keys.required:
        token = bearer_token(request.headers.get("Authorization"))
        if token is None:
            raise unauthorized("You didn't provide an API key. Send it as 'Authorization: Bearer KEY'.")
        if not state.keys.accepts(token):
            raise unauthorized("Incorrect API key provided.")
    if state.draining:
        headers = {"Retry-After": "1"}
        raise HttpError(ApiError(503, "The server is shutting down.", SERVER_ERROR, code="draining", headers=headers))


def _endpoint(request: web.Request) -> str:
    """The route's pattern: bounded, unlike the path that the client wrote."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _record(request: web.Request, state: GatewayState, status: int, seconds: float) -> None:
    endpoint = _endpoint(request)
    fields = request[LOG_FIELDS]
    state.metrics.requests.labels(endpoint, fields.get("model", ""), str(status)).inc()
    state.metrics.duration.labels(endpoint).observe(seconds)
    log_event(
        "request",
        request_id=request[REQUEST_ID],
        method=request.method,
        endpoint=endpoint,
        status=status,
        ms=round(seconds * 1000, 1),
        **fields,
    )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: every answer, streams too, carries the request's id."""
    response.headers["x-request-id"] = request.get(REQUEST_ID, "")
