"""Runs the choices of one HTTP request on the engine, each its own sequence, merged into one stream of batches."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from cascade.errors import EngineFailedError
from cascade.protocol import FinishReason, GenerateRequest, Token, TokenEvent, Usage
from gateway.engine import EngineHandle
from gateway.logprobs import visible_tokens
from gateway.metrics import Metrics

QUEUE_EVENTS = 64
"""Events that wait for a slow client before its sequences are no longer read, and so run out of credit."""

Item = tuple[int, TokenEvent]


class Generation:
    """An async context: leaving it, in whatever way, cancels every choice that is still running.

    `requests` are the choices in the order of their index.
    """

    def __init__(self, engine: EngineHandle, requests: list[GenerateRequest], model: str, metrics: Metrics) -> None:
        self._engine = engine
        self._requests = requests
        self._model = model
        self._metrics = metrics
        self._queue: asyncio.Queue[Item | Exception] = asyncio.Queue(QUEUE_EVENTS)
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._requests))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def batches(self, wait_s: float | None = None) -> AsyncGenerator[list[Item], None]:
        """Whatever events are there, at least one; an empty list when none came for `wait_s` seconds.

        Ends when every choice has finished. Raises the first failure of any choice.
        """
        open_choices = len(self._requests)
        while open_choices:
            batch: list[Item] = []
            try:
                async with asyncio.timeout(wait_s):
                    item = await self._queue.get()
            except TimeoutError:
                yield batch
                continue
            while True:
                if isinstance(item, Exception):
                    if batch:
                        yield batch
                    raise item
                batch.append(item)
                open_choices -= item[1].finish_reason is not None
                if self._queue.empty():
                    break
                item = self._queue.get_nowait()
            yield batch

    async def _pump(self, index: int) -> None:
        try:
            request = self._requests[index]
            previous = time.monotonic()
            first = True
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if event.finish_reason in ("error", "cancelled"):
                        raise EngineFailedError(event.error or "The engine stopped this request.")
                    now = time.monotonic()
                    if event.tokens:
                        self._metrics.observe_tokens(self._model, len(event.tokens), now - previous, first=first)
                        previous, first = now, False
                    if event.usage is not None:
                        self._metrics.observe_usage(self._model, event.usage)
                    await self._queue.put((index, event))
                    if event.finish_reason is not None:
                        return
            raise EngineFailedError("The engine ended the answer without a reason.")
        except Exception as error:
            await self._queue.put(error)


@dataclass(slots=True)
class Choice:
    """One finished answer."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)


async def collect(generation: Generation, count: int, *, keep_tokens: bool) -> list[Choice]:
    """Wait for every choice. Tokens are kept only where log-probabilities are wanted."""
    choices = [Choice() for _ in range(count)]
    async for batch in generation.batches():
        for index, event in batch:
            absorb(choices[index], event, keep_tokens=keep_tokens)
    return choices


def absorb(choice: Choice, event: TokenEvent, *, keep_tokens: bool) -> None:
    """Add one event to an answer."""
    choice.texts.append(event.text)
    if keep_tokens:
        choice.tokens.extend(visible_tokens(event))
    if event.finish_reason is not None:
        choice.finish_reason = event.finish_reason
        choice.usage = event.usage


def usage_object(usages: list[Usage | None], choices_per_prompt: int) -> dict[str, object]:
    """OpenAI's `usage`: a prompt counts once however many choices it has, every choice's tokens count.

    `accepted_prediction_tokens` is about the client's own `prediction`, never about our drafts: zero.
    """
    prompts = [usage for usage in usages[::choices_per_prompt] if usage is not None]
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in usages if usage is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
