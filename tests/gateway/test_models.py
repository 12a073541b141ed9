"""`GET /v1/models`."""

import pytest

from tests.gateway.support import Gateway, ScriptedEngine, Serve

pytestmark = pytest.mark.asyncio


async def test_list_is_auto_and_the_tiers(gateway: Gateway) -> None:
    value = await (await gateway.client.get("/v1/models")).json()
    assert value["object"] == "list"
    assert [model["id"] for model in value["data"]] == ["auto", "small", "large"]
    assert all(model["object"] == "model" and model["owned_by"] == "stepwell" for model in value["data"])
    assert {model["created"] for model in value["data"]} == {1_700_000_000}


@pytest.mark.parametrize("name", ["auto", "large", "tiny-model"])
async def test_one_model(gateway: Gateway, name: str) -> None:
    value = await (await gateway.client.get(f"/v1/models/{name}")).json()
    assert (value["id"], value["context_length"]) == (name, 256)


@pytest.mark.parametrize("name", ["gpt-4", "org/model"])
async def test_unknown_model(gateway: Gateway, name: str) -> None:
    response = await gateway.client.get(f"/v1/models/{name}")
    assert response.status == 404
    assert (await response.json())["error"]["code"] == "model_not_found"


async def test_context_is_what_the_pool_can_hold(serve: Serve) -> None:
    gateway = await serve(engine=ScriptedEngine(blocks={"large": 4, "small": 5}))
    value = await (await gateway.client.get("/v1/models/auto")).json()
    assert value["context_length"] == 4 * 16
