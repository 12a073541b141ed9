"""A float32 forward pass in NumPy, straight from a checkpoint: what calibration looks at.

Weights are dequantized a slab at a time and thrown away again, so memory stays at one slab and the activations
of the texts, whatever the size of the model; no other library is needed.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from exporters.checkpoint import Checkpoint
from exporters.pages import release_pages

Rows = NDArray[np.float32]
Observer = Callable[[str, Rows], None]
"""Called with a linear's graph name (`layers.0.qkv`) and its input rows [T, K]."""

SLAB_ELEMENTS = 1 << 20
"""Weights dequantized at a time: 1 M, 4 MB, and as much again two or three times while they are decoded."""


def forward(checkpoint: Checkpoint, sequences: list[list[int]], observe: Observer) -> Rows:
    """Run the layers over `sequences` of token ids; `observe` sees the input of every linear.

    Returns the rows [T, hidden] that enter the head, sequences one after another.
    """
    bounds = np.cumsum([0] + [len(sequence) for sequence in sequences])
    spans = [slice(int(start), int(stop)) for start, stop in pairwise(bounds)]
    ids = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
    embed = checkpoint.tensors["embed"]
    hidden = np.concatenate([embed.dequantize(slice(i, i + 1)) for i in ids.tolist()])
    rope = [_rope(checkpoint, len(sequence)) for sequence in sequences]
    for i in range(checkpoint.dimensions.layers):
        layer = f"layers.{i}"
        rows = _rms_norm(checkpoint, f"{layer}.attn_norm", hidden)
        observe(f"{layer}.qkv", rows)
        q, k, v = (_heads(checkpoint, layer, part, rows) for part in "qkv")
        attended = np.concatenate(
            [
                _attend(checkpoint, q[span], k[span], v[span], cos, sin)
                for span, (cos, sin) in zip(spans, rope, strict=True)
            ]
        )
        observe(f"{layer}.o", attended)
        hidden = hidden + _project(checkpoint, f"{layer}.o", attended)
        rows = _rms_norm(checkpoint, f"{layer}.ffn_norm", hidden)
        observe(f"{layer}.gate_up", rows)
        gated = _silu(_project(checkpoint, f"{layer}.gate", rows)) * _project(checkpoint, f"{layer}.up", rows)
        observe(f"{layer}.down", gated)
        hidden = hidden + _project(checkpoint, f"{layer}.down", gated)
        release_pages(checkpoint.tensors[f"{layer}.down"])
    rows = _rms_norm(checkpoint, "final_norm", hidden)
    observe("head", rows)
    return rows


def _project(checkpoint: Checkpoint, name: str, rows: Rows) -> Rows:
    """rows @ weight.T, [T, N]."""
    tensor = checkpoint.tensors[name]
    count = tensor.shape[0]
    out = np.empty((len(rows), count), np.float32)
    step = max(1, SLAB_ELEMENTS // rows.shape[1])
    for start in range(0, count, step):
        part = slice(start, min(count, start + step))
        np.matmul(rows, tensor.dequantize(part).T, out=out[:, part])
    return out


def _heads(checkpoint: Checkpoint, layer: str, part: str, rows: Rows) -> Rows:
    """q, k or v of every head, [T, heads, head_dim]: bias added, head norm applied."""
    projected = _project(checkpoint, f"{layer}.{part}", rows)
    bias = checkpoint.tensors.get(f"{layer}.{part}_bias")
    if bias is not None:
        projected += bias.dequantize()
    heads = projected.reshape(len(rows), -1, checkpoint.dimensions.head_dim)
    norm = f"{layer}.{part}_norm"
    return _rms_norm(checkpoint, norm, heads) if norm in checkpoint.tensors else heads


def _rms_norm(checkpoint: Checkpoint, name: str, x: Rows) -> Rows:
    mean = np.square(x).mean(axis=-1, keepdims=True)
    scaled: Rows = x / np.sqrt(mean + np.float32(checkpoint.rms_epsilon)) * checkpoint.tensors[name].dequantize()
    return scaled


def _silu(x: Rows) -> Rows:
    # exp of a large positive number overflows to infinity, and x / infinity is the right 0.
    with np.errstate(over="ignore"):
        activated: Rows = x / (1 + np.exp(-x))
    return activated


def _rope(checkpoint: Checkpoint, length: int) -> tuple[Rows, Rows]:
    """cos and sin [length, 1, head_dim / 2] of the positions from 0."""
    angles = np.arange(length, dtype=np.float32)[:, None, None] * checkpoint.rope.inv_freq()
    factor = np.float32(checkpoint.rope.attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def _rotate(x: Rows, cos: Rows, sin: Rows, interleaved: bool) -> Rows:
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    # q and k are both laid out in halves afterwards: their products do not depend on the order of the pairs.
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(checkpoint: Checkpoint, q: Rows, k: Rows, v: Rows, cos: Rows, sin: Rows) -> Rows:
    """Causal attention within one sequence: [T, heads * head_dim]."""
    d = checkpoint.dimensions
    q = _rotate(q, cos, sin, checkpoint.rope.interleaved).transpose(1, 0, 2)
    repeats = d.heads // d.kv_heads
    k = _rotate(k, cos, sin, checkpoint.rope.interleaved).transpose(1, 2, 0).repeat(repeats, axis=0)
    v = v.transpose(1, 0, 2).repeat(repeats, axis=0)
    scores = q @ k * np.float32(d.head_dim**-0.5)
    length = scores.shape[1]
    scores = np.where(np.tri(length, dtype=bool), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: Rows = (weights @ v).transpose(1, 0, 2).reshape(length, -1)
    return attended
