"""Fixtures of the gateway's tests: a byte-level tokenizer, and served applications."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cascade.text import load_tokenizer
from cascade.token_table import TokenTable
from gateway.app import create_app
from gateway.auth import KeyRing
from gateway.config import Config
from gateway.prompts import TierText
from gateway.state import STATE
from tests.gateway.support import (
    CONTEXT,
    TEMPLATE,
    Gateway,
    ScriptedEngine,
    Serve,
    bytes_to_characters,
    make_config,
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A byte-level vocabulary: id = byte + 2; 0 and 1 are the chat marks."""
    alphabet = bytes_to_characters()
    vocab = {character: index + 2 for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={"<|im_start|>": 0, "<|im_end|>": 1} | vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


@pytest.fixture(scope="session")
def tier_text(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TierText:
    path = tmp_path_factory.mktemp("tier") / "tokenizer.json"
    path.write_text(byte_tokenizer.to_str())
    return TierText(
        tokenizer=load_tokenizer(path),
        template=TEMPLATE,
        table=TokenTable(byte_tokenizer),
        bos_id=None,
        special_tokens={"eos_token": "<|im_end|>"},
        context_length=CONTEXT,
        block_size=16,
        vocab_size=258,
        fingerprint="fp_0123456789ab",
        created=1_700_000_000,
    )


@pytest_asyncio.fixture
async def serve(tier_text: TierText) -> AsyncIterator[Serve]:
    """A function that starts a gateway: `await serve(engine=..., config=..., keys=...)`."""
    clients: list[TestClient[web.Request, web.Application]] = []

    async def start(
        engine: ScriptedEngine | None = None, config: Config | None = None, keys: KeyRing | None = None
    ) -> Gateway:
        engine = engine or ScriptedEngine()
        config = config or make_config()
        texts = dict.fromkeys(config.tiers, tier_text)
        app = create_app(config, engine, texts=texts, keys=keys or KeyRing())
        client = TestClient(TestServer(app))
        clients.append(client)
        await client.start_server()
        return Gateway(client, engine, app[STATE])

    yield start
    for client in clients:
        await client.close()


@pytest_asyncio.fixture
async def gateway(serve: Serve) -> Gateway:
    """The gateway over a well-behaved engine."""
    return await serve()
