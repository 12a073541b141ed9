"""`GET /metrics`: the numbers that dashboards and leak checks read."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cascade.errors import EngineUnavailableError
from tests.gateway.support import Gateway, ScriptedEngine, Serve

pytestmark = pytest.mark.asyncio
BODY = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}


async def scrape(gateway: Gateway) -> dict[tuple[str, tuple[str, ...]], float]:
    """(sample name, label values) -> value."""
    text = await (await gateway.client.get("/metrics")).text()
    return {
        (sample.name, tuple(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_requests_are_counted_by_endpoint_model_and_status(gateway: Gateway) -> None:
    await gateway.client.post("/v1/chat/completions", json=BODY)
    await gateway.client.post("/v1/chat/completions", json=BODY | {"model": "nope"})
    await gateway.client.get("/wp-login.php")
    found = await scrape(gateway)
    assert found["stepwell_requests_total", ("/v1/chat/completions", "auto", "200")] == 1
    assert found["stepwell_requests_total", ("/v1/chat/completions", "", "404")] == 1
    assert found["stepwell_requests_total", ("unknown", "", "404")] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_and_times(gateway: Gateway, stream: bool) -> None:
    await (await gateway.client.post("/v1/chat/completions", json=BODY | {"stream": stream})).read()
    found = await scrape(gateway)
    assert found["stepwell_generated_tokens_total", ("auto",)] == 12
    assert found["stepwell_prompt_tokens_total", ("auto",)] == len(gateway.engine.requests[0].prompt_ids)
    assert found["stepwell_drafted_tokens_total", ("auto",)] == 4
    assert found["stepwell_accepted_tokens_total", ("auto",)] == 2
    assert found["stepwell_cached_prompt_tokens_total", ("auto",)] == 3
    assert found["stepwell_time_to_first_token_seconds_count", ("auto",)] == 1
    assert found["stepwell_inter_token_seconds_count", ("auto",)] == 10


async def test_engine_gauges(gateway: Gateway) -> None:
    gateway.engine.restarts = 2
    found = await scrape(gateway)
    assert found["stepwell_engine_queue_depth", ()] == 3
    assert found["stepwell_engine_restarts_total", ()] == 2
    assert found["stepwell_kv_blocks", ("free", "large")] == 4
    assert found["stepwell_kv_blocks", ("total", "large")] == 20
    assert found["stepwell_kv_use_ratio", ("large",)] == pytest.approx(0.8)
    assert found["stepwell_engine_prefix_hit_tokens_total", ()] == 40
    assert found["stepwell_engine_drafted_tokens_total", ()] == 30


async def test_scrape_without_an_engine_still_answers(serve: Serve) -> None:
    found = await scrape(await serve(engine=ScriptedEngine(ready=False)))
    assert found["stepwell_engine_ready", ()] == 0
    assert ("stepwell_engine_queue_depth", ()) not in found


async def test_scrape_survives_an_engine_that_dies_meanwhile(serve: Serve) -> None:
    class Dying(ScriptedEngine):
        async def stats(self) -> object:  # type: ignore[override]
            raise EngineUnavailableError("gone")

    gateway = await serve(engine=Dying())
    assert (await gateway.client.get("/metrics")).status == 200


async def test_each_gateway_has_its_own_registry(serve: Serve) -> None:
    first, second = await serve(), await serve()
    await first.client.post("/v1/chat/completions", json=BODY)
    assert ("stepwell_requests_total", ("/v1/chat/completions", "auto", "200")) not in await scrape(second)
