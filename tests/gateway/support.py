"""The HTTP side over an engine in the same process, which answers what a test tells it to.

It stands at the socket's place: what crosses there are the protocol's own types. `tests/e2e` runs the real one.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestClient

from cascade.errors import EngineUnavailableError
from cascade.protocol import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    Token,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from gateway.config import Config, parse_config
from gateway.state import GatewayState
from gateway.yaml_source import parse_yaml

CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO_TIERS = "tiers: {small: {bundle: tiny-model}, large: {bundle: big-model}}\n"


def bytes_to_characters() -> list[str]:
    """GPT-2's character for each of the 256 bytes, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


@dataclass
class ScriptedEngine:
    """Answers every request with `answer`, one token a byte of each text's first character; faults on demand."""

    answer: Sequence[str] = "Hello wörld"
    """The texts of successive events."""
    reject: Exception | None = None
    fail_after: int | None = None
    fail_with: Exception = field(default_factory=lambda: RuntimeError("boom"))
    hold_after: int | None = None
    """Wait for `release` after that many events."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = True
    restarts: int = 0
    blocks: dict[str, int] = field(default_factory=lambda: {"large": 20, "small": 20})
    requests: list[GenerateRequest] = field(default_factory=list)
    sent: int = 0
    """Events that were asked for."""
    running: set[str] = field(default_factory=set)
    cancelled: list[str] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        if self.reject is not None:
            raise self.reject
        self.running.add(request.request_id)
        try:
            async for event in self._events(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)

    async def _events(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        pieces = list(self.answer)[: request.sampling.max_tokens]
        ended = len(pieces) == len(self.answer)
        generated = 0
        for index, piece in enumerate(pieces):
            if self.fail_after == index:
                raise self.fail_with
            if self.hold_after == index:
                await self.release.wait()
            await asyncio.sleep(0)
            tokens = [self._token(byte + 2, request) for byte in piece[:1].encode()]
            generated += len(tokens)
            self.sent += 1
            yield TokenEvent(request.request_id, tokens, piece)
        usage = Usage(len(request.prompt_ids), generated, cached_tokens=3, drafted_tokens=4, accepted_tokens=2)
        reason: FinishReason = "stop" if ended else "length"
        yield TokenEvent(request.request_id, [], "", finish_reason=reason, usage=usage)

    def _token(self, id_: int, request: GenerateRequest) -> Token:
        count = request.sampling.logprobs
        if count is None:
            return Token(id_, "large", "decoded")
        top = [TokenLogprob(id_ if rank == 0 else rank + 1, -0.5 - rank) for rank in range(count)]
        return Token(id_, "large", "decoded", logprob=-0.5, top=top)

    async def stats(self) -> EngineStats:
        if not self.ready:
            raise EngineUnavailableError("down")
        return EngineStats(
            waiting=3,
            running=len(self.running),
            blocks_total=self.blocks,
            blocks_free={"large": 4, "small": 16},
            blocks_cached={"large": 2, "small": 0},
            steps=7,
            prompt_tokens=100,
            prefix_hit_tokens=40,
            generated_tokens=50,
            drafted_tokens=30,
            accepted_tokens=20,
            preemptions=1,
            tasks=5,
            rss_bytes=1 << 20,
        )


@dataclass
class Gateway:
    """A served application with its engine."""

    client: TestClient[web.Request, web.Application]
    engine: ScriptedEngine
    state: GatewayState


Serve = Callable[..., Awaitable[Gateway]]


def make_config(text: str = "") -> Config:
    """A two-tier configuration with extra YAML."""
    return parse_config(parse_yaml(TWO_TIERS + text, "test.yaml"), Path())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks bring about; the test's own timeout ends a vain wait."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def events_of(raw: bytes) -> list[bytes]:
    """The `data:` payloads of an SSE body, which must consist of nothing else."""
    blocks = raw.split(b"\n\n")
    assert blocks.pop() == b""
    assert all(block.startswith(b"data: ") for block in blocks)
    return [block.removeprefix(b"data: ") for block in blocks]
