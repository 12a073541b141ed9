"""`GET /healthz`, `/readyz` and `/metrics`: for supervisors, balancers and Prometheus; never behind keys."""

import asyncio

from aiohttp import web

from cascade.errors import StepwellError
from gateway.metrics import CONTENT_TYPE
from gateway.state import STATE

STATS_TIMEOUT_S = 2.0
"""A scrape must not hang on a busy engine: without an answer the engine's own families are left out."""


async def healthz(request: web.Request) -> web.Response:
    """200 as long as the gateway itself runs."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """200 when requests will be answered: the engine is warm and no drain has begun."""
    state = request.app[STATE]
    if state.draining:
        return web.json_response({"status": "draining"}, status=503)
    if not state.engine.ready:
        status = "restarting" if state.engine.restarts else "starting"
        return web.json_response({"status": status}, status=503, headers={"Retry-After": "1"})
    return web.json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus's text format."""
    state = request.app[STATE]
    engine = state.engine
    stats = None
    if engine.ready:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await engine.stats()
        except (StepwellError, TimeoutError):
            pass  # died or busy between the two lines: the gauge `ready` and the missing families say so
    body = state.metrics.render(stats, ready=engine.ready, restarts=engine.restarts)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
