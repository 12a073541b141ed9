"""`GET /v1/models` and `/v1/models/{id}`."""

from typing import Any

from aiohttp import web

from cascade.errors import EngineUnavailableError
from gateway.router import Prompt
from gateway.state import STATE, GatewayState


async def list_models(request: web.Request) -> web.Response:
    """`auto` and every tier."""
    state = request.app[STATE]
    data = [await _describe(state, name, name) for name in state.router.models()]
    return web.json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.Response:
    """One of them. Raises UnknownModelError (404)."""
    state = request.app[STATE]
    asked = request.match_info["model"]
    return web.json_response(await _describe(state, asked, state.router.resolve(asked)))


async def _describe(state: GatewayState, shown: str, name: str) -> dict[str, Any]:
    plan = state.router.plan(name, Prompt())
    text = state.texts[plan.tier]
    try:
        # What requests are held to: the K/V pool may hold less than the model's context.
        limit = await state.capacity.tokens(plan)
    except EngineUnavailableError:
        limit = text.context_length
    return {
        "id": shown,
        "object": "model",
        "created": text.created,
        "owned_by": "stepwell",
        "context_length": limit,
    }
