"""Recipes: for every linear of a model, the format of each segment and how its input rows are quantized.

- `exact`: the source's own codes and scales, and 16-bit activations (two int8 planes), so that the bundle is the
  source model to within float32 noise. 8-bit activations cost 0.003 KL (groups of 32) to 0.04 (whole rows) on
  SmolLM2-135M, over the parity bar of 0.001.
- `w8a8`: int8 weights with one scale per output channel after SmoothQuant; 8-bit activations in groups of 128 for gate
  and up, half of every layer, and 16-bit ones where 8 bits miss the parity bar (`W8A8_EIGHT_BIT`).
- `w4a8`: the source's own blocks of four to six bits, anything wider quantized to four, and 8-bit activations in
  groups: a four-bit GGUF's own numbers at half the arithmetic of `exact`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from cascade.errors import CheckpointError
from exporters.checkpoint import Checkpoint
from exporters.panels import FLOAT_FORMATS, FORMAT_OF_TYPE, UNIT_K, check_k, matrix_shape

Recipe = Literal["exact", "w8a8", "w4a8"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
ACT_GROUPS = (256, 128, 64, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    """One `QuantLinear` of the graph: the matrices it stacks, their formats, and its activations."""

    segments: tuple[str, ...]
    """Canonical tensor names, in row order."""
    formats: tuple[str, ...]
    rows: tuple[int, ...]
    k: int
    act_group: int
    """Elements along K that share an activation scale; 0: the whole row."""
    act_bits: int
    """8, or 16 for two int8 planes."""

    @property
    def int8_input(self) -> bool:
        """True when the linear takes rows that a norm has quantized already."""
        return self.act_bits == 8 and FLOAT_FORMATS.isdisjoint(self.formats)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What a recipe makes of one checkpoint."""

    recipe: Recipe
    embed_format: str
    linears: dict[str, LinearPlan]
    """By graph name: `layers.{i}.qkv`, `.o`, `.gate_up`, `.down`, and `head`."""
    smooth: bool
    """True when activation outliers are migrated into the weights before they are quantized."""

    def formats(self) -> dict[str, str]:
        """The manifest's table: graph name -> formats of its segments, joined by commas."""
        return {"embed": self.embed_format} | {name: ",".join(plan.formats) for name, plan in self.linears.items()}


STACKS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The four linears of a layer and the matrices that each one stacks."""


def plan_model(checkpoint: Checkpoint, recipe: Recipe) -> ModelPlan:
    """Decide every linear. Raises CheckpointError when a matrix cannot be stored as the recipe wants."""
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
    linears = {}
    for i in range(checkpoint.dimensions.layers):
        for name, parts in STACKS.items():
            segments = tuple(f"layers.{i}.{part}" for part in parts)
            linears[f"layers.{i}.{name}"] = _plan_linear(checkpoint, recipe, name, segments)
    linears["head"] = _plan_linear(checkpoint, recipe, "head", ("embed",) if checkpoint.tied else ("head",))
    return ModelPlan(
        recipe=recipe,
        embed_format=_stored_format(checkpoint, "embed"),
        linears=linears,
        smooth=recipe == "w8a8",
    )


def _plan_linear(checkpoint: Checkpoint, recipe: Recipe, name: str, segments: tuple[str, ...]) -> LinearPlan:
    shapes = [matrix_shape(checkpoint.tensors[segment]) for segment in segments]
    k = shapes[0][1]
    source = tuple(_stored_format(checkpoint, segment) for segment in segments)
    formats, act_group, act_bits = source, 0, 16
    # The head's logits are what everything is judged by, and it is one linear of many: it keeps the source's bits.
    if recipe == "w8a8" and name != "head" and _fits("c8", k):
        formats = ("c8",) * len(segments)
        act_group, act_bits = (_act_group(k, W8A8_ACT_GROUP), 8) if name in W8A8_EIGHT_BIT else (0, 16)
    if recipe == "w4a8" and _fits("q4m", k):
        if name != "head":
            formats = tuple(format_ if format_ in BLOCK_FORMATS else "q4m" for format_ in source)
        if FLOAT_FORMATS.isdisjoint(formats):
            act_group, act_bits = _act_group(k, _w4a8_group(name, checkpoint.dimensions.hidden)), 8
    return LinearPlan(
        segments=segments,
        formats=formats,
        rows=tuple(rows for rows, _ in shapes),
        k=k,
        act_group=act_group,
        act_bits=act_bits,
    )


W8A8_ACT_GROUP = 128
"""A float step costs as much as many products: one AMX core made 812 GMAC/s with steps of 128 and 498 with 64.

KL and top-1 (the bar is 96%): Qwen2.5-Coder-0.5B 0.0015, 97.8% (with 32: 0.0013, 97.7%); SmolLM2-135M, whose 576
columns take 64, 0.0033, 96.6%.
"""
W8A8_EIGHT_BIT = frozenset({"gate_up"})
"""Linears of `w8a8` with 8-bit rows; the others take 16 bits, one scale a row.

On SmolLM2-135M (KL, top-1; the bar is 96%): 16 bits for `down` only 0.0037, 96.4%; for `qkv`, `o` and `down` 0.0031,
96.9%; for all 0.0025, 97.0%, which is what int8 weights cost by themselves. The settings were chosen on the
shipped fidelity texts, so those texts no longer measure them independently.
"""
W4A8_GATE_UP_ACT_GROUP = 64
W4A8_ACT_GROUP = 256
"""Only gate and up feel a wider group: on Qwen2.5-Coder-1.5B all linears at 64 have KL 0.0039, these two 0.0041."""
W4A8_NARROW_ACT_GROUP = 32
W4A8_WIDE_HIDDEN = 1024
"""Narrow models feel 8-bit rows more: all their linears take the smaller group, which costs a quarter of the speed."""
BLOCK_FORMATS = frozenset({"q4", "q4m", "q4k", "q6s", "q6m", "q6k", "q6k2"})
"""What `w4a8` keeps of a source: blocks of up to six bits, for which 8-bit rows are no worse than llama.cpp's own."""


def _act_group(k: int, wanted: int) -> int:
    """The largest allowed group of at most `wanted` elements that divides K; 0 stays 0."""
    return next((group for group in ACT_GROUPS if group <= wanted and k % group == 0), 0)


def _w4a8_group(name: str, hidden: int) -> int:
    if hidden < W4A8_WIDE_HIDDEN:
        return W4A8_NARROW_ACT_GROUP
    return W4A8_GATE_UP_ACT_GROUP if name == "gate_up" else W4A8_ACT_GROUP


def _fits(format_: str, k: int) -> bool:
    return k % UNIT_K.get(format_, 32) == 0


def _stored_format(checkpoint: Checkpoint, name: str) -> str:
    tensor = checkpoint.tensors[name]
    format_ = FORMAT_OF_TYPE.get(tensor.type)
    if format_ is None:
        raise CheckpointError(f"tensor {name}: type {tensor.type} has no weight format")
    try:
        check_k(format_, matrix_shape(tensor)[1])
    except ValueError as error:
        raise CheckpointError(f"tensor {name}: {error}") from error
    return format_
