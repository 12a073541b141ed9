"""Every error as OpenAI's JSON shape and status code, in this one place."""

from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from cascade.errors import (
    ContextOverflowError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    StepwellError,
    UnknownModelError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
ENGINE_RETRY_AFTER_S = 5
"""What a client is told to wait while the engine starts: a restart takes seconds, not minutes."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """What a client is told: HTTP status, headers, and the four members of OpenAI's `error` object."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """`{"error": {...}}` as JSON."""
        inner = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": inner})

    def response(self) -> web.Response:
        """The whole HTTP answer."""
        return web.Response(body=self.body(), status=self.status, headers=self.headers, content_type="application/json")


class HttpError(StepwellError):
    """An error that is about HTTP itself (media type, key, draining): it carries its own `ApiError`."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def describe(error: Exception) -> ApiError:
    """The answer to any exception. Unknown ones tell the client nothing but that they happened."""
    match error:
        case HttpError():
            return error.error
        case ContextOverflowError() | InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case UnknownModelError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case QueueFullError():
            headers = {"Retry-After": str(max(1, error.retry_after_s))}
            return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=headers)
        case EngineUnavailableError():
            headers = {"Retry-After": str(ENGINE_RETRY_AFTER_S)}
            return ApiError(503, str(error), SERVER_ERROR, code="engine_unavailable", headers=headers)
        case EngineFailedError():
            return ApiError(500, str(error), SERVER_ERROR, code="engine_failed")
        case web.HTTPException():
            return _describe_http(error)
        case _:
            return ApiError(
                500, "The server had an error while processing the request.", SERVER_ERROR, code="internal_error"
            )


def _describe_http(error: web.HTTPException) -> ApiError:
    """aiohttp's own answers: unknown path, wrong method, too large a body."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"Not allowed to {error.method} on this path; allowed: {allowed}."
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "The request body is too large.", code="request_too_large")
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "Unknown path.", code="unknown_url")
    return ApiError(
        error.status, error.reason or "Request failed.", SERVER_ERROR if error.status >= 500 else INVALID_REQUEST
    )


def unknown_path(method: str, path: str) -> ApiError:
    """404 as OpenAI words it."""
    return ApiError(404, f"Invalid URL ({method} {path[:256]})", code="unknown_url")


def unauthorized(message: str) -> HttpError:
    """401 with the challenge that RFC 9110 asks for."""
    headers = {"WWW-Authenticate": "Bearer"}
    return HttpError(ApiError(401, message, code="invalid_api_key", headers=headers))
