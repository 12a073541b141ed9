"""Cost of one `PagedAttention` node, without the rest of a layer.

- `decode_B_ctxN` (ms): B sequences, one new token each after N - 1 in the cache.
- `prefill_T` (ms): one prompt of T tokens, nothing before it.
- `verify_8_ctxN` (ms): 8 new tokens of one sequence.

At the size of Qwen2.5-Coder-1.5B unless the row's name says otherwise: 12 heads on 2 K/V heads of 128, float16.
"""

import statistics
import time
from dataclasses import replace

import numpy as np

from gateway.cli.report import Report, Row, report, row
from tests.cascade.ops.attention_model import KV_DTYPES, Attention, Geometry, ort_value

QWEN_15 = Geometry(heads=12, kv_heads=2, head_dim=128)
QWEN_05 = Geometry(heads=14, kv_heads=2, head_dim=64)
SMOL = Geometry(heads=9, kv_heads=3, head_dim=64)
BLOCK = 16
SEED = 20

CASES: tuple[tuple[str, Geometry, int, int, int], ...] = (
    ("decode_1_ctx128", QWEN_15, 1, 127, 1),
    ("decode_16_ctx128", QWEN_15, 16, 127, 1),
    ("decode_16_ctx2048", QWEN_15, 16, 2047, 1),
    ("decode_1_ctx8192", QWEN_15, 1, 8191, 1),
    ("verify_8_ctx1024", QWEN_15, 1, 1016, 8),
    ("prefill_512", QWEN_15, 1, 0, 512),
    ("prefill_2048", QWEN_15, 1, 0, 2048),
    ("decode_16_ctx128_bfloat16", replace(QWEN_15, kv_dtype="bfloat16"), 16, 127, 1),
    ("decode_16_ctx128_int8", replace(QWEN_15, kv_dtype="int8"), 16, 127, 1),
    ("prefill_512_int8", replace(QWEN_15, kv_dtype="int8"), 1, 0, 512),
    ("decode_16_ctx128_qwen05", QWEN_05, 16, 127, 1),
    ("prefill_512_qwen05", QWEN_05, 1, 0, 512),
    ("decode_16_ctx128_smol", SMOL, 16, 127, 1),
    ("prefill_512_smol", SMOL, 1, 0, 512),
)
"""Name, geometry, sequences, tokens in the cache, new tokens of each sequence."""


def run(*, threads: int = 2, seconds: float = 0.3, isa: str | None = None) -> list[Row]:
    """Median milliseconds of every case, over `seconds` of calls each."""
    return [
        row(name, "ms", _median_ms(geometry, sequences, past, new, threads, seconds, isa))
        for name, geometry, sequences, past, new in CASES
    ]


def measure_attention(*, threads: int = 2, seconds: float = 0.3) -> Report:
    """`run` in the frame that all benchmarks share."""
    return report("attention", "none (one node)", run(threads=threads, seconds=seconds))


def _median_ms(
    geometry: Geometry, sequences: int, past: int, new: int, threads: int, seconds: float, isa: str | None
) -> float:
    rng = np.random.default_rng(SEED)
    tokens, blocks_each = sequences * new, -(-(past + new) // BLOCK)
    table = rng.permutation(sequences * blocks_each).astype(np.int32).reshape(sequences, blocks_each)
    positions = np.arange(past, past + new)
    slots = (table[:, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32).reshape(-1)
    width = (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
    pool = (sequences * blocks_each, BLOCK, geometry.kv_heads, geometry.head_dim)
    caches = [_cache(rng, geometry.kv_dtype, pool) for _ in range(2)]
    arrays = {
        "qkv": rng.standard_normal((tokens, width), np.float32),
        "rope": rng.standard_normal((tokens, geometry.head_dim), np.float32),
        "slot_mapping": slots,
        "cu_seqlens": np.arange(0, tokens + 1, new, dtype=np.int32),
        "past_lens": np.full(sequences, past, np.int32),
        "block_table": table,
        "key_cache": caches[0],
        "value_cache": caches[1],
    }
    if geometry.kv_dtype == "int8":
        arrays |= {name: rng.random(pool[:3], np.float32) / 64 for name in ("key_scale", "value_scale")}
    attention = Attention(geometry, frozenset(arrays), isa=isa, threads=threads)
    binding = attention.bind({name: ort_value(array) for name, array in arrays.items()})
    times: list[float] = []
    attention.session.run_with_iobinding(binding)
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        attention.session.run_with_iobinding(binding)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _cache(rng: np.random.Generator, kv_dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if kv_dtype == "int8":
        return rng.integers(-127, 128, shape, np.int8)
    values = rng.standard_normal(shape, np.float32)
    if kv_dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(KV_DTYPES[kv_dtype][1])


if __name__ == "__main__":
    for figure in run():
        print(f"{figure['name']:28} {figure['value']:9.3f} {figure['unit']}")
