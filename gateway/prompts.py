"""Text <-> tokens on the gateway's side: a tier's tokenizer and chat template, read from its bundle."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cascade.bundle import MANIFEST_FILE, TEMPLATE_FILE, TOKENIZER_FILE, load_manifest
from cascade.errors import BundleError, ConfigError, InvalidRequestError
from cascade.text import TextTokenizer, encode_chat, encode_text, load_tokenizer
from cascade.token_table import TokenTable
from gateway.config import Config

OFF_LOOP_CHARACTERS = 4096
"""Longer texts are encoded in a thread, without the GIL: about 2 ms, what the other streams can wait unnoticed."""

TEMPLATE_CHARACTERS = 32
"""What rendering one message costs beside its text, in characters to encode."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TierText:
    """Everything about a tier that answering needs besides the engine."""

    tokenizer: TextTokenizer
    template: str | None
    """Jinja source of the chat template."""
    table: TokenTable
    bos_id: int | None
    """What a bare prompt begins with; templates write their own."""
    special_tokens: dict[str, str]
    """`bos_token` and `eos_token`, as templates name them."""
    context_length: int
    block_size: int
    """Tokens of one K/V block."""
    vocab_size: int
    fingerprint: str
    """OpenAI's `system_fingerprint`: changes with the weights, tokenizer or recipe."""
    created: int
    """Seconds since the epoch."""

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Render the template and tokenize. Special tokens in the messages' text stay text.

        Raises InvalidRequestError when the template refuses the conversation, or there is none.
        """
        template = self.template
        if template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", "model")
        size = sum(len(message["content"]) + TEMPLATE_CHARACTERS for message in messages)
        return await _run(
            size, lambda: encode_chat(self.tokenizer, template, messages, special_tokens=self.special_tokens)
        )

    async def encode_text(self, text: str) -> list[int]:
        """Tokenize a bare prompt, with the model's BOS in front where it has one."""
        ids = await _run(len(text), lambda: encode_text(self.tokenizer, text))
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special ones included."""
        return self.tokenizer.tokenizer.decode(ids, skip_special_tokens=False)


async def _run(size: int, work: Callable[[], Result]) -> Result:
    return work() if size <= OFF_LOOP_CHARACTERS else await asyncio.to_thread(work)


def load_text(directory: Path) -> TierText:
    """Read a bundle's text side. Raises BundleError."""
    manifest = load_manifest(directory)
    text_tokenizer = load_tokenizer(directory / TOKENIZER_FILE)
    tokenizer = text_tokenizer.tokenizer
    named = {"bos_token": manifest.bos_id, "eos_token": manifest.eos_ids[0] if manifest.eos_ids else None}
    special = {name: tokenizer.id_to_token(id_) for name, id_ in named.items() if id_ is not None}
    return TierText(
        tokenizer=text_tokenizer,
        template=_read_template(directory / TEMPLATE_FILE),
        table=TokenTable(tokenizer),
        bos_id=manifest.bos_id if manifest.add_bos else None,
        special_tokens={name: token for name, token in special.items() if token is not None},
        context_length=manifest.dimensions.context_length,
        block_size=manifest.block_size,
        vocab_size=manifest.dimensions.vocab,
        fingerprint=f"fp_{manifest.fingerprint[:12]}",
        created=int((directory / MANIFEST_FILE).stat().st_mtime),
    )


def _read_template(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error


def load_texts(config: Config) -> dict[str, TierText]:
    """The text side of every tier; tiers of one bundle share it.

    Raises BundleError, and ConfigError for a pair that cannot speculate: drafts are token ids, so both tiers
    must number their tokens alike.
    """
    by_path: dict[Path, TierText] = {}
    texts: dict[str, TierText] = {}
    for tier in config.tiers:
        path = config.bundle_path(tier)
        if path not in by_path:
            by_path[path] = load_text(path)
        texts[tier] = by_path[path]
    for policy in config.policies:
        if (pair := policy.route.speculate) is not None:
            draft, verify = texts[pair.draft], texts[pair.verify]
            if draft is not verify and _vocabulary(draft) != _vocabulary(verify):
                fault = f"{pair.draft!r} cannot draft for {pair.verify!r}, their vocabularies differ"
                raise ConfigError(f"policy {policy.name!r}: {fault}")
    return texts


def _vocabulary(text: TierText) -> dict[str, int]:
    return text.tokenizer.tokenizer.get_vocab()
