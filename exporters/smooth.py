"""SmoothQuant: moving activation outliers into the weights before both are quantized (arXiv 2211.10438).

A channel j of a linear's input is divided by s[j] and column j of its weights multiplied by it, which changes
nothing but the ranges that the quantizers see. The division costs nothing at run time, because it is folded
into whatever produced the channel: the norm's gamma for q, k, v and gate, up; the rows of `up` for `down`
(its input is silu(gate) * up); the rows of `v` for `o` (attention only averages them), where all the query
heads of a group share the factor of their v channel.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporters.checkpoint import Checkpoint
from exporters.forward import SLAB_ELEMENTS, forward
from exporters.pages import release_pages
from exporters.recipes import STACKS
from exporters.texts import calibration_texts

Vector = NDArray[np.float32]

POWER = 8
"""A power of two: the norm that stands in for a row's largest weight, see `smoothing_factor`.

Mean KL on SmolLM2-135M of int8 weights alone / with int8 activations: 4: 0.0034 / 0.0049, 8: 0.0025 / 0.0042,
14: 0.0027 / 0.0061; the paper's own factors (peaks, exponent 0.5): 0.0036 / 0.0052; none at all: 0.0040 / 0.0068."""
CALIBRATION_TEXTS = 32
CALIBRATION_TOKENS = 40
"""Tokens taken of each text: 1,200 in all, 35 s for 1.5 B parameters on two cores."""
SMALLEST = 1e-6
"""Floor of peaks and shares: a channel that never carries anything keeps a finite factor."""


@dataclass(frozen=True, slots=True)
class Migration:
    """Factors that leave the model's function as it is: what a producer is divided by multiplies its consumer."""

    columns: dict[str, Vector] = field(default_factory=dict)
    """Matrix -> factor [K] of its input channels."""
    rows: dict[str, Vector] = field(default_factory=dict)
    """Matrix (`v`, `up`) -> factor [N] of its output channels."""
    norms: dict[str, Vector] = field(default_factory=dict)
    """Norm -> factor [hidden] of its gamma."""

    def norm(self, name: str, gamma: Vector) -> Vector:
        """The norm's weight after migration."""
        return gamma * self.norms[name] if name in self.norms else gamma


def calibrate_migration(checkpoint: Checkpoint) -> Migration:
    """Run the calibration texts through the checkpoint and choose the factors of every layer."""
    sequences = [
        checkpoint.tokenizer.encode(text.text, add_special_tokens=False).ids[:CALIBRATION_TOKENS]
        for text in calibration_texts()[:CALIBRATION_TEXTS]
    ]
    peaks: dict[str, Vector] = {}

    def observe(linear: str, rows: NDArray[np.float32]) -> None:
        peaks[linear] = np.abs(rows).max(axis=0)

    forward(checkpoint, sequences, observe)
    return choose_migration(checkpoint, peaks)


def choose_migration(checkpoint: Checkpoint, peaks: dict[str, Vector]) -> Migration:
    """The factors that follow from the peaks [K] of every linear's input channels."""
    migration = Migration()
    for i in range(checkpoint.dimensions.layers):
        layer = f"layers.{i}"
        for linear, parts in STACKS.items():
            matrices = [f"{layer}.{part}" for part in parts]
            weight_share = np.sum([_column_share(checkpoint, matrix) for matrix in matrices], axis=0)
            input_peaks = peaks[f"{layer}.{linear}"]
            if linear == "o":
                input_peaks, weight_share = (_shared_by_group(checkpoint, x) for x in (input_peaks, weight_share))
            factor = smoothing_factor(input_peaks, weight_share)
            inverse = np.reciprocal(factor)
            migration.columns.update(dict.fromkeys(matrices, factor))
            if linear == "qkv":
                migration.norms[f"{layer}.attn_norm"] = inverse
            elif linear == "gate_up":
                migration.norms[f"{layer}.ffn_norm"] = inverse
            elif linear == "down":
                migration.rows[f"{layer}.up"] = inverse
            else:
                migration.rows[f"{layer}.v"] = _of_value_channels(checkpoint, inverse)
    return migration


def smoothing_factor(input_peaks: Vector, weight_share: NDArray[np.floating[Any]]) -> Vector:
    """s [K] of the least weight error.

    Rounding row n to int8 adds noise in proportion to R[n]^2 * sum_j (x[j] / s[j])^2, where R[n] is the row's largest
    |w[n, j]| * s[j]. With the POWER-norm in the place of the maximum, the derivative vanishes where
    s[j]^(POWER + 2) = x[j]^2 / sum_n (|w[n, j]| / R[n])^POWER, up to a common factor.
    `weight_share` is that sum, with R before smoothing (solving again with R after it gains nothing).
    """
    inputs = np.maximum(input_peaks.astype(np.float64), SMALLEST)
    exponent = (2 * np.log(inputs) - np.log(np.maximum(weight_share, SMALLEST**POWER))) / (POWER + 2)
    # The common factor is free: a geometric mean of one keeps the numbers where they were.
    factor: Vector = np.exp(exponent - exponent.mean()).astype(np.float32)
    return factor


def _column_share(checkpoint: Checkpoint, matrix: str) -> NDArray[np.float64]:
    """How much every input channel counts among the large weights of its rows: sum_n (|w| / max|w[n]|)^POWER, [K]."""
    tensor = checkpoint.tensors[matrix]
    share = np.zeros(tensor.shape[-1], np.float64)
    step = max(1, SLAB_ELEMENTS // tensor.shape[-1])
    for start in range(0, tensor.shape[0], step):
        slab = np.abs(tensor.dequantize(slice(start, start + step)))
        slab /= np.maximum(slab.max(axis=1, keepdims=True), np.float32(1e-30))
        for _ in range(POWER.bit_length() - 1):
            np.square(slab, out=slab)
        share += slab.sum(axis=0)
    release_pages(tensor)
    return share


def _shared_by_group(checkpoint: Checkpoint, channels: NDArray[Any]) -> NDArray[Any]:
    """The largest value over the query heads of a group, for each of them: [heads * head_dim]."""
    d = checkpoint.dimensions
    groups = channels.reshape(d.kv_heads, d.heads // d.kv_heads, d.head_dim)
    return np.broadcast_to(groups.max(axis=1, keepdims=True), groups.shape).reshape(-1)


def _of_value_channels(checkpoint: Checkpoint, channels: Vector) -> Vector:
    """One value for each channel of v, [kv_heads * head_dim], of channels shared by groups."""
    d = checkpoint.dimensions
    return channels.reshape(d.kv_heads, d.heads // d.kv_heads, d.head_dim)[:, 0].reshape(-1)
