"""Steps for `PagedAttention` tests: ragged batches over random block tables, whole or cut into chunks."""

from dataclasses import dataclass, field

import numpy as np

from tests.cascade.ops.attention_model import KV_DTYPES, Array, Attention, Geometry, ort_value
from tests.cascade.ops.attention_reference import stored

GARBAGE = {"float16": 0x7E00, "bfloat16": 0x7FC0}
"""NaN, which fills slots that nobody wrote: reading one spoils a result."""


@dataclass(slots=True)
class Tokens:
    """The qkv and rope rows of one sequence's tokens from its first on."""

    qkv: Array
    rope: Array


@dataclass(slots=True)
class Pool:
    """Caches of one layer, with a block table for each sequence."""

    geometry: Geometry
    block_size: int
    tables: list[Array]
    num_blocks: int
    arrays: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        kv, shape = self.geometry.kv_dtype, (self.num_blocks, self.block_size, self.geometry.kv_heads)
        self.arrays = {}
        for name in ("key", "value"):
            cache = np.zeros((*shape, self.geometry.head_dim), KV_DTYPES[kv][1])
            if kv in GARBAGE:
                cache.view(np.uint16)[:] = GARBAGE[kv]
            else:
                self.arrays[f"{name}_scale"] = np.full(shape, np.nan, np.float32)
            self.arrays[f"{name}_cache"] = cache

    def slots(self, sequence: int, start: int, count: int) -> Array:
        positions = np.arange(start, start + count)
        blocks = self.tables[sequence][positions // self.block_size].astype(np.int64)
        return (blocks * self.block_size + positions % self.block_size).astype(np.int32)

    def fill(self, sequence: int, count: int, rng: np.random.Generator) -> None:
        """Random K/V at the sequence's first `count` positions."""
        slots = self.slots(sequence, 0, count)
        for name in ("key", "value"):
            rows = rng.standard_normal((count, self.geometry.kv_heads, self.geometry.head_dim), np.float32)
            cache, scale = stored(rows, self.geometry.kv_dtype)
            self.arrays[f"{name}_cache"].reshape(-1, *cache.shape[1:])[slots] = cache
            if scale is not None:
                self.arrays[f"{name}_scale"].reshape(-1, self.geometry.kv_heads)[slots] = scale


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens [start, start + count) of a sequence."""

    sequence: int
    start: int
    count: int


def make_tokens(geometry: Geometry, count: int, rng: np.random.Generator) -> Tokens:
    width = (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
    angles = np.arange(count)[:, None] * 10000.0 ** (-np.arange(geometry.head_dim // 2) / (geometry.head_dim / 2))
    rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return Tokens(rng.standard_normal((count, width), np.float32), rope)


def make_pool(geometry: Geometry, lengths: list[int], rng: np.random.Generator, block_size: int = 16) -> Pool:
    """Room for sequences of `lengths`, their blocks scattered over a pool with a few to spare."""
    needed = [-(-length // block_size) for length in lengths]
    order = rng.permutation(sum(needed) + 3).astype(np.int32)
    tables = [order[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(needed))]
    return Pool(geometry, block_size, tables, len(order))


def step_inputs(
    pool: Pool, tokens: list[Tokens], parts: list[Part], extra: dict[str, Array] | None = None
) -> dict[str, Array]:
    """The op's inputs for one step over `parts`, on the pool's own arrays."""
    block_size = pool.block_size
    widths = [-(-(p.start + p.count) // block_size) for p in parts]
    table = np.full((len(parts), max(widths, default=0)), -1, np.int32)
    for row, (part, width) in enumerate(zip(parts, widths, strict=True)):
        table[row, :width] = pool.tables[part.sequence][:width]

    def joined(rows: list[Array]) -> Array:
        return np.ascontiguousarray(np.concatenate(rows))

    return {
        "qkv": joined([tokens[p.sequence].qkv[p.start : p.start + p.count] for p in parts]),
        "rope": joined([tokens[p.sequence].rope[p.start : p.start + p.count] for p in parts]),
        "slot_mapping": joined([pool.slots(p.sequence, p.start, p.count) for p in parts]),
        "cu_seqlens": np.cumsum([0, *(p.count for p in parts)]).astype(np.int32),
        "past_lens": np.array([p.start for p in parts], np.int32),
        "block_table": table,
        **pool.arrays,
        **(extra or {}),
    }


def run(attention: Attention, arrays: dict[str, Array]) -> Array:
    """Run one step; the pool's arrays among `arrays` are updated."""
    return attention.run({name: ort_value(array) for name, array in arrays.items()})


def optional_names(geometry: Geometry, *names: str) -> frozenset[str]:
    """The optional inputs of a node: `names`, and scales where the caches are int8."""
    scales = ("key_scale", "value_scale") if geometry.kv_dtype == "int8" else ()
    return frozenset({*scales, *names})
