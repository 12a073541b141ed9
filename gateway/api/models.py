"""`GET /v1/models` and `/v1/models/{id}`."""

from typing import Any

from aiohttp import web

from gateway.state import STATE, GatewayState


async def list_models(request: web.Request) -> web.Response:
    """`auto` and every tier."""
    state = request.app[STATE]
    data = [_describe(state, name, name) for name in state.router.models()]
    return web.json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.Response:
    """One of them. Raises UnknownModelError (404)."""
    state = request.app[STATE]
    asked = request.match_info["model"]
    return web.json_response(_describe(state, asked, state.router.resolve(asked)))


def _describe(state: GatewayState, shown: str, name: str) -> dict[str, Any]:
    text = state.texts[state.router.answering_tier(name)]
    return {
        "id": shown,
        "object": "model",
        "created": text.created,
        "owned_by": "stepwell",
        "context_length": text.context_length,
    }
