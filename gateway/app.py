"""The aiohttp application: routes and middleware over a `GatewayState`."""

from aiohttp import web

from gateway.api import chat, completions, health, models
from gateway.auth import KeyRing, load_keys
from gateway.capacity import Capacity
from gateway.config import Config
from gateway.engine import EngineHandle
from gateway.middleware import add_headers, around
from gateway.prompts import TierText, load_texts
from gateway.router import Router
from gateway.state import STATE, GatewayState


def create_app(
    config: Config,
    engine: EngineHandle,
    *,
    texts: dict[str, TierText] | None = None,
    keys: KeyRing | None = None,
) -> web.Application:
    """Build the application. `texts` and `keys` are loaded as the configuration says when not given.

    Raises ConfigError and BundleError: a gateway that could not answer does not start.
    """
    texts = load_texts(config) if texts is None else texts
    app = web.Application(middlewares=[around], client_max_size=config.server.max_body)
    app[STATE] = GatewayState(
        config=config,
        engine=engine,
        router=Router(config),
        texts=texts,
        capacity=Capacity(engine, texts),
        keys=load_keys(config) if keys is None else keys,
    )
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat.chat_completions),
            web.post("/v1/completions", completions.completions),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{model:.+}", models.get_model),
            web.get("/healthz", health.healthz),
            web.get("/readyz", health.readyz),
            web.get("/metrics", health.metrics),
        ]
    )
    return app
