"""The gateway's configuration -> the engine process's."""

from cascade.config import EngineConfig, TierConfig
from gateway.config import Config


def engine_config(config: Config) -> EngineConfig:
    """The engine process's part of the configuration."""
    engine = config.engine
    return EngineConfig(
        tiers=[TierConfig(name=name, bundle_dir=str(config.bundle_path(name))) for name in config.tiers],
        kv_memory_bytes=engine.kv_memory,
        threads=engine.threads,
        max_batch_tokens=engine.max_batch_tokens,
        max_sequences=engine.max_sequences,
        max_waiting=engine.max_waiting,
        draft_tokens=engine.draft_tokens,
    )
