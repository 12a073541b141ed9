"""What the two generating endpoints share: reading a body, planning, building engine requests, streaming."""

import asyncio
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from cascade.errors import ContextOverflowError, InvalidRequestError
from cascade.protocol import GenerateRequest, Plan, SamplingParams, Usage
from gateway.api.errors import ApiError, HttpError
from gateway.generation import Generation, usage_object
from gateway.prompts import TierText
from gateway.router import Prompt, describe_plan
from gateway.schema import MAX_SEED, SamplingBody
from gateway.state import LOG_FIELDS, STATE, GatewayState

BODY_TIMEOUT_S = 60.0
"""A body that trickles in must not hold a drain up, nor a connection for good."""


async def read_json(request: web.Request) -> Any:
    """The decoded body. Raises HttpError (415, 408, 400), aiohttp's 413, or InvalidRequestError."""
    if request.content_type != "application/json":
        shown = request.headers.get("Content-Type", "")[:96]
        message = f"Unsupported content type: {shown!r}. This path only accepts 'application/json' requests."
        raise HttpError(ApiError(415, message, code="unsupported_content_type"))
    if (charset := request.charset) and charset.lower().replace("_", "-") not in ("utf-8", "utf8", "us-ascii"):
        raise HttpError(ApiError(415, f"Unsupported charset: {charset[:32]!r}; use utf-8.", code="unsupported_charset"))
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        message = f"Unsupported content encoding: {encoding[:32]!r}; use gzip, deflate or none."
        raise HttpError(ApiError(415, message, code="unsupported_content_encoding"))
    limit = request.app[STATE].config.server.max_body
    if (announced := request.content_length) is not None and announced > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=announced)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise HttpError(ApiError(408, "The request body did not arrive in time.", code="request_timeout")) from None
    except web.RequestPayloadError as error:
        raise HttpError(
            ApiError(400, f"The request body is not what its headers say: {error}", code="invalid_body")
        ) from None
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        reason = "a string holds half a surrogate pair (\\ud800 to \\udfff)" if _has_lone_surrogate(body) else error
        raise InvalidRequestError(
            f"We could not parse the JSON body of your request: {reason}.", code="invalid_json"
        ) from None
    except RecursionError:
        raise InvalidRequestError("The JSON body is nested too deeply.", code="invalid_json") from None


def _has_lone_surrogate(body: bytes) -> bool:
    """Whether that is what is wrong: msgspec calls it truncated input, Python's own parser takes it."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except (ValueError, RecursionError):
        return False
    return any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(slots=True)
class Job:
    """One planned HTTP request: everything that answering needs, in either form."""

    state: GatewayState
    body: SamplingBody
    plan: Plan
    text: TierText
    response_id: str
    created: int
    requests: list[GenerateRequest]
    """Choice `i` belongs to prompt `i // choices_per_prompt`."""
    choices_per_prompt: int

    @property
    def model(self) -> str:
        """The model's name in the answer: as the client wrote it."""
        return self.body.model

    def headers(self) -> dict[str, str]:
        """Who answers and why."""
        return {"x-stepwell-model": self.plan.tier, "x-stepwell-plan": describe_plan(self.plan)}

    def head(self, kind: str) -> dict[str, Any]:
        """The members that every answer begins with."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.text.fingerprint,
        }

    def generation(self) -> Generation:
        """The context that runs the requests; metrics are kept under the resolved name."""
        state = self.state
        return Generation(state.engine, self.requests, state.router.resolve(self.model), state.metrics)

    def usage(self, usages: list[Usage | None]) -> dict[str, object]:
        """OpenAI's `usage` over all choices."""
        return usage_object(usages, self.choices_per_prompt)


def plan_request(state: GatewayState, body: SamplingBody, token_limit: int | None) -> tuple[Plan, TierText]:
    """Route. Raises UnknownModelError."""
    plan = state.router.plan(body.model, Prompt(max_tokens=token_limit))
    return plan, state.texts[plan.tier]


async def build_job(
    request: web.Request,
    body: SamplingBody,
    plan: Plan,
    prompts: list[list[int]],
    *,
    prefix: str,
    param: str,
    token_limit: int | None,
    logprobs: int | None,
) -> Job:
    """Check limits and make one engine request for each choice of each prompt.

    `token_limit` None: to the end of the context. Raises InvalidRequestError, ContextOverflowError,
    EngineUnavailableError.
    """
    state = request.app[STATE]
    text = state.texts[plan.tier]
    choices = body.n or 1
    if (total := len(prompts) * choices) > (limit := state.config.server.max_choices):
        raise InvalidRequestError(
            f"The request asks for {total} answers, at most {limit} are allowed.", "n", "invalid_value"
        )
    _check_token_ids(body, text.vocab_size)
    capacity = await state.capacity.tokens(plan)
    response_id = prefix + secrets.token_hex(12)
    seed = body.seed if body.seed is not None else secrets.randbits(63)
    requests = []
    for prompt_index, ids in enumerate(prompts):
        max_tokens = _fit(ids, token_limit, capacity, param)
        if (body.min_tokens or 0) > max_tokens:
            message = f"'min_tokens' is {body.min_tokens}, above the {max_tokens} tokens that the answer may have."
            raise InvalidRequestError(message, "min_tokens", "invalid_value")
        for choice in range(choices):
            # Choices differ by seed only, so n answers are the n requests with seeds seed, seed + 1, ...
            sampling = sampling_params(body, max_tokens, logprobs, (seed + choice) & MAX_SEED)
            request_id = f"{response_id}-{prompt_index * choices + choice}"
            requests.append(GenerateRequest(request_id, ids, plan, sampling))
    request[LOG_FIELDS] |= {
        "model": state.router.resolve(body.model),
        "plan": describe_plan(plan),
        "prompt_tokens": sum(map(len, prompts)),
        "choices": len(requests),
        "stream": bool(body.stream),
    }
    return Job(state, body, plan, text, response_id, int(time.time()), requests, choices)


def sampling_params(body: SamplingBody, max_tokens: int, logprobs: int | None, seed: int) -> SamplingParams:
    """The engine's form of the body's sampling fields, with OpenAI's defaults."""
    # top_p 0 keeps no mass; what it means is the likeliest token alone, which is top_k 1.
    only_best = body.top_p == 0
    top_p = 1.0 if body.top_p is None or only_best else body.top_p
    return SamplingParams(
        logit_bias={int(key): float(value) for key, value in (body.logit_bias or {}).items()},
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=1 if only_best else max(0, body.top_k or 0),
        top_p=top_p,
        min_p=body.min_p or 0.0,
        seed=seed,
        logprobs=logprobs,
        stop=body.stops,
        stop_token_ids=list(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
    )


def _fit(ids: list[int], token_limit: int | None, capacity: int, param: str) -> int:
    room = capacity - len(ids)
    wanted = token_limit if token_limit is not None else max(1, room)
    if wanted > room:
        raise ContextOverflowError(
            f"This model's maximum context length is {capacity} tokens. However, you requested {len(ids) + wanted} "
            f"tokens ({len(ids)} in the {param}, {wanted} in the completion). Please reduce the length of the "
            f"{param} or completion.",
            param,
        )
    return wanted


def _check_token_ids(body: SamplingBody, vocab_size: int) -> None:
    named: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", map(int, body.logit_bias or ())),
        ("stop_token_ids", body.stop_token_ids or ()),
    ]
    for field, ids in named:
        for id_ in ids:
            if id_ >= vocab_size:
                message = f"'{field}' names token id {id_}; the model's are 0 to {vocab_size - 1}."
                raise InvalidRequestError(message, field, "invalid_value")


def note_usage(request: web.Request, usage: dict[str, object]) -> None:
    """Put the number of generated tokens into the request's log line."""
    request[LOG_FIELDS]["completion_tokens"] = usage["completion_tokens"]


def json_answer(job: Job, answer: dict[str, Any]) -> web.Response:
    """200 with a JSON body."""
    return web.Response(body=msgspec.json.encode(answer), headers=job.headers(), content_type="application/json")
