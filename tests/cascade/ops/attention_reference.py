"""`PagedAttention` in NumPy float64, written from FORMAT.md and not from the kernels: one query row at a time."""

import numpy as np
from numpy.typing import NDArray

from tests.cascade.ops.attention_model import Array, Geometry

Floats = NDArray[np.float64]


def rotate(x: Floats, rope: Floats, interleaved: bool) -> Floats:
    """RoPE of heads [..., head_dim] by a row of cosines, then sines."""
    half = x.shape[-1] // 2
    cosine, sine = rope[:half], rope[half:]
    pairs = x.reshape(*x.shape[:-1], half, 2) if interleaved else np.stack([x[..., :half], x[..., half:]], axis=-1)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = np.stack([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    return turned.reshape(x.shape) if interleaved else np.concatenate([turned[..., 0], turned[..., 1]], axis=-1)


def rms_norm(x: Floats, gamma: Floats, epsilon: float) -> Floats:
    """RMSNorm over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * gamma


def stored(rows: NDArray[np.float32], kv_dtype: str) -> tuple[Array, Array | None]:
    """Rows [..., head_dim] as a cache holds them, and their scales if it is int8."""
    if kv_dtype == "float16":
        return rows.astype(np.float16), None
    if kv_dtype == "bfloat16":
        bits = rows.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), None
    scale = np.abs(rows).max(axis=-1).astype(np.float64) / 127
    codes = np.rint(rows / np.where(scale == 0, 1, scale)[..., None])
    return codes.astype(np.int8), scale.astype(np.float32)


def read(cache: Array, scale: Array | None) -> Floats:
    """What a cache's rows are worth."""
    if cache.dtype == np.uint16:
        return (cache.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    values = cache.astype(np.float64)
    return values if scale is None else values * scale[..., None].astype(np.float64)


def new_rows(geometry: Geometry, inputs: dict[str, Array]) -> tuple[Floats, Floats, Floats]:
    """Queries [T, heads, d] (normed, rotated, scaled), keys and values [T, kv_heads, d] of the step's tokens."""
    heads, kv_heads = geometry.heads, geometry.kv_heads
    qkv = inputs["qkv"].astype(np.float64).reshape(len(inputs["qkv"]), heads + 2 * kv_heads, geometry.head_dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if "q_norm" in inputs:
        q = rms_norm(q, inputs["q_norm"].astype(np.float64), geometry.epsilon)
    if "k_norm" in inputs:
        k = rms_norm(k, inputs["k_norm"].astype(np.float64), geometry.epsilon)
    rope = inputs["rope"].astype(np.float64)
    q = np.stack([rotate(x, r, geometry.rope_interleaved) for x, r in zip(q, rope, strict=True)]).reshape(q.shape)
    k = np.stack([rotate(x, r, geometry.rope_interleaved) for x, r in zip(k, rope, strict=True)]).reshape(k.shape)
    return q * np.float64(np.float32(geometry.softmax_scale)), k, v


def visible_keys(geometry: Geometry, past: int, token: int, mask: Array | None) -> list[int]:
    """Indices in the sequence that new token `token` sees. Its branch counts as its whole sequence under a mask."""
    branch = list(range(token + 1)) if mask is None else [j for j, shown in enumerate(mask) if shown]
    chain = [*range(past), *(past + j for j in branch)]
    if geometry.window == 0:
        return chain
    first = len(chain) - geometry.window
    return [key for rank, key in enumerate(chain) if rank >= first or rank < geometry.sinks]


def attend(geometry: Geometry, inputs: dict[str, Array]) -> Floats:
    """Output [T, heads * d] from the K/V that `inputs` hold: run it on the caches as the op left them."""
    q, _, _ = new_rows(geometry, inputs)
    group = geometry.heads // geometry.kv_heads
    block_size = inputs["key_cache"].shape[1]
    keys, values = (read(inputs[f"{k}_cache"], inputs.get(f"{k}_scale")) for k in ("key", "value"))
    keys, values = (x.reshape(-1, geometry.kv_heads, geometry.head_dim) for x in (keys, values))
    out = np.zeros((len(q), geometry.heads, geometry.head_dim))
    starts = inputs["cu_seqlens"]
    for b, past in enumerate(inputs["past_lens"].tolist()):
        count = int(starts[b + 1] - starts[b])
        for token in range(count):
            t = int(starts[b]) + token
            mask = inputs["tree_mask"][t][:count] if "tree_mask" in inputs else None
            seen = np.array(visible_keys(geometry, past, token, mask), dtype=np.int64)
            if not len(seen):
                continue
            slots = inputs["block_table"][b][seen // block_size].astype(np.int64) * block_size + seen % block_size
            for h in range(geometry.heads):
                scores = keys[slots, h // group] @ q[t, h]
                weights = np.exp(scores - scores.max())
                out[t, h] = weights @ values[slots, h // group] / weights.sum()
    return out.reshape(len(q), -1)
