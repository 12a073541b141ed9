"""What the engine process is started with: a JSON file that the supervisor writes and the process reads once."""

from pathlib import Path

import msgspec

from cascade.bundle import KvDtype
from cascade.errors import ConfigError

MAX_DRAFT_TOKENS = 32


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model to load. `kv_blocks` None: this tier's share of `kv_memory_bytes`.

    `kv_dtype` None: what the bundle was exported for; anything else must equal it (the graph fixes the type).
    """

    name: str
    bundle_dir: str
    kv_blocks: int | None = None
    kv_dtype: KvDtype | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("tier name is empty")
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise ConfigError(f"tier {self.name}: kv_blocks is {self.kv_blocks}, must be at least 1")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and limits of one engine process.

    `kv_memory_bytes` None: a quarter of the available memory, but at least one full context per tier.
    `threads` None: one per processor that the process may run on. `max_batch_tokens` bounds the new tokens of one
    step per tier, `interleaved_prefill_tokens` those of prompts in a step that also decodes (what a long prompt may
    add to the time between two tokens of another answer). `max_sequences` bounds the sequences that hold blocks,
    `max_waiting` the queue behind them.
    """

    tiers: list[TierConfig]
    kv_memory_bytes: int | None = None
    threads: int | None = None
    max_batch_tokens: int = 512
    interleaved_prefill_tokens: int = 128
    max_sequences: int = 64
    max_waiting: int = 256
    draft_tokens: int = 8
    warm_up: bool = True

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ConfigError("the engine needs at least one tier")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ConfigError(f"tier names repeat: {', '.join(sorted(names))}")
        for field in ("max_batch_tokens", "interleaved_prefill_tokens", "max_sequences", "max_waiting"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}, must be at least 1")
        if self.max_batch_tokens < 2 * self.max_sequences:
            raise ConfigError(
                f"max_batch_tokens {self.max_batch_tokens} is under twice max_sequences {self.max_sequences}: "
                "running sequences would leave no room for new prompts"
            )
        if not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}, must be 0 to {MAX_DRAFT_TOKENS}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads is {self.threads}, must be at least 1")
        if self.kv_memory_bytes is not None and self.kv_memory_bytes < 1:
            raise ConfigError(f"kv_memory_bytes is {self.kv_memory_bytes}, must be positive")


def load_config(path: Path) -> EngineConfig:
    """Read the JSON file; raises ConfigError naming the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def save_config(path: Path, config: EngineConfig) -> None:
    """Write the JSON file that `load_config` reads."""
    path.write_bytes(msgspec.json.encode(config))
