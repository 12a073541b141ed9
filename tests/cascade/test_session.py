"""Sizes of the K/V pools, and bundles that do not fit their description."""

import pytest

from cascade.bundle import Dimensions, Manifest, Source
from cascade.config import EngineConfig, TierConfig
from cascade.session import kv_blocks, kv_bytes_per_token

GIB = 1 << 30


def manifest_of(
    layers: int = 28, kv_heads: int = 2, head_dim: int = 128, context: int = 32768, kv: str = "float16"
) -> Manifest:
    dimensions = Dimensions(
        layers=layers,
        hidden=1536,
        heads=12,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=8960,
        vocab=151936,
        context_length=context,
    )
    return Manifest(
        format_version=1,
        name="m",
        architecture="qwen2",
        flavour="cpu",
        dimensions=dimensions,
        recipe="exact",
        formats={},
        kv_dtype=kv,  # type: ignore[arg-type]
        block_size=16,
        bos_id=None,
        eos_ids=[0],
        add_bos=False,
        source=Source(origin="local", file="f", sha256="0", licence="none"),
        files={},
        fingerprint="f",
    )


def config_of(*tiers: TierConfig, memory: int | None = None, max_sequences: int = 64) -> EngineConfig:
    return EngineConfig(list(tiers), kv_memory_bytes=memory, max_sequences=max_sequences)


@pytest.mark.parametrize(("kv", "expected"), [("float16", 28672), ("bfloat16", 28672), ("int8", 14336 + 448)])
def test_bytes_per_token_count_keys_values_and_scales(kv: str, expected: int) -> None:
    assert kv_bytes_per_token(manifest_of(kv=kv)) == expected


def test_a_quarter_of_memory_is_shared_so_that_tiers_hold_equal_tokens() -> None:
    manifests = [manifest_of(layers=24, head_dim=64), manifest_of()]
    blocks = kv_blocks(config_of(TierConfig("a", ""), TierConfig("b", "")), manifests, 16 * GIB)
    assert blocks[0] == blocks[1]
    used = sum(b * 16 * kv_bytes_per_token(m) for b, m in zip(blocks, manifests, strict=True))
    assert 0.99 * 4 * GIB < used <= 4 * GIB


def test_default_holds_one_full_context_even_when_memory_is_short() -> None:
    assert kv_blocks(config_of(TierConfig("a", "")), [manifest_of()], GIB) == [32768 // 16]


def test_explicit_memory_is_kept_to() -> None:
    assert kv_blocks(config_of(TierConfig("a", ""), memory=16 * 28672 * 10), [manifest_of()], 64 * GIB) == [10]


def test_no_more_than_every_sequence_can_use() -> None:
    blocks = kv_blocks(config_of(TierConfig("a", ""), max_sequences=2), [manifest_of(context=100)], 64 * GIB)
    assert blocks == [2 * 7]


def test_explicit_blocks_win() -> None:
    assert kv_blocks(config_of(TierConfig("a", "", kv_blocks=5)), [manifest_of()], 64 * GIB) == [5]
