"""`stepwell generate PROMPT`: one answer on the terminal, from an engine of its own and without HTTP."""

import asyncio
import secrets
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from cascade.errors import EngineFailedError
from cascade.protocol import GenerateRequest, SamplingParams, Usage
from cascade.supervisor import EngineSupervisor
from gateway.capacity import Capacity
from gateway.cli.bundles import ensure_bundles
from gateway.cli.errors import clean_errors
from gateway.config import AUTO_MODEL, Config, load_config
from gateway.engine_settings import engine_config
from gateway.logs import configure_logs
from gateway.prompts import load_texts
from gateway.router import Prompt, Router, describe_plan


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    config: Annotated[Path | None, typer.Option("-c", "--config", help="Configuration file.")] = None,
    model: Annotated[str, typer.Option("-m", "--model", help="A tier's name, or auto.")] = AUTO_MODEL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and speed to standard error.")] = False,
    pull: Annotated[bool, typer.Option("--pull/--no-pull", help="Fetch bundles that are missing.")] = True,
) -> None:
    """Answer one prompt, token by token."""
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    sampling = SamplingParams(
        temperature=temperature,
        seed=secrets.randbits(63) if seed is None else seed & ((1 << 63) - 1),
        max_tokens=max_tokens,
    )
    with clean_errors("generate"):
        settings = load_config(config)
        configure_logs("warning", "text")
        if pull:
            ensure_bundles(settings)
        uvloop.run(_answer(settings, model, messages, sampling, raw=raw, stats=stats))


async def _answer(
    config: Config, model: str, messages: list[dict[str, str]], sampling: SamplingParams, *, raw: bool, stats: bool
) -> None:
    texts = await asyncio.to_thread(load_texts, config)
    plan = Router(config).plan(model, Prompt(max_tokens=sampling.max_tokens))
    text = texts[plan.tier]
    ids = await (text.encode_text(messages[-1]["content"]) if raw else text.encode_chat(messages))
    supervisor = EngineSupervisor(engine_config(config), start_limit_s=config.engine.start_timeout_s)
    await supervisor.start()
    try:
        room = await Capacity(supervisor, texts).tokens(plan) - len(ids)
        sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, max(1, room)))
        start = time.monotonic()
        usage: Usage | None = None
        async with aclosing(supervisor.generate(GenerateRequest("generate", ids, plan, sampling))) as events:
            async for event in events:
                sys.stdout.write(event.text)
                sys.stdout.flush()
                usage = event.usage or usage
                if event.finish_reason in ("error", "cancelled"):
                    raise EngineFailedError(event.error or "the engine stopped the answer")
        sys.stdout.write("\n")
        if stats and usage is not None:
            seconds = time.monotonic() - start
            typer.echo(
                f"{describe_plan(plan)}: {usage.prompt_tokens} + {usage.completion_tokens} tokens in {seconds:.2f} s "
                f"({usage.completion_tokens / seconds:.1f} tok/s), {usage.accepted_tokens} of "
                f"{usage.drafted_tokens} drafted tokens accepted",
                err=True,
            )
    finally:
        await supervisor.stop()
