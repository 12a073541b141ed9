"""Random calls of every op, half of them with a fault: right calls give the portable bits, wrong ones an error by name.

`make sanitize` runs 10,000 of them under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
from onnx import TensorProto

from cascade import ops
from tests.cascade.ops.attention_model import Array, Attention, Geometry
from tests.cascade.ops.attention_steps import Part, make_pool, make_tokens, optional_names, run, step_inputs
from tests.cascade.ops.linear_model import (
    FLOAT_FORMATS,
    FORMATS,
    INTEGER_FORMATS,
    op_session,
    random_panels,
    run_session,
)

CASES = int(os.environ.get("STEPWELL_FUZZ_CASES", 400))
RUNS = 20
CALLS = 10
"""Of a session, before another one is made."""

FLOAT, INT8 = TensorProto.FLOAT, TensorProto.INT8
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 3, 31, 33, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
INDICES = (-(2**31), -2, 10**6, 2**31 - 1)
"""No slot, block or length of a case is one of these, nor may be."""

REFUSAL = r"Status Message: (QuantLinear|EmbedDequant|RMSNorm|RMSNormQuant|PagedAttention): "

Rng = np.random.Generator
T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One call of an op; `twin` gives what it has to give, None where that is not known or the call is wrong."""

    run: Callable[[], list[Array]]
    twin: Callable[[], list[Array]] | None


def pick(rng: Rng, choices: tuple[T, ...]) -> T:
    return choices[rng.integers(len(choices))]


def pair(isa: str, make: Callable[..., T]) -> tuple[T, T]:
    """A session on `isa` with two threads, and a portable one with one thread to compare it with."""
    return make(isa=isa, threads=2), make(isa="portable", threads=1)


def resized(array: Array, rng: Rng) -> Array:
    """The array with another shape: an axis longer, shorter or empty, or one axis more or less."""
    axis = int(rng.integers(array.ndim))
    match rng.integers(5):
        case 0:
            return np.take(array, range(array.shape[axis] - 1), axis) if array.shape[axis] else array[None]
        case 1:
            return np.concatenate([array, np.take(array, [0], axis)], axis) if array.shape[axis] else array[None]
        case 2:
            return array[None]
        case 3:
            return array.reshape(-1, 1) if array.ndim == 1 else array.reshape(-1)
        case _:
            return np.take(array, [], axis) if array.shape[axis] else array[None]


def values(rng: Rng, shape: tuple[int, ...]) -> Array:
    """Float32 of any scale, at times with zeros, denormals, infinities and NaNs."""
    x = (rng.normal(size=shape) * 10.0 ** rng.integers(-12, 6)).astype(np.float32)
    if rng.random() < 0.3:
        special = np.array([0, -0.0, 1e-42, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
        where = rng.random(shape) < 0.05
        x[where] = rng.choice(special, int(where.sum()))
    return x


class Linear:
    """QuantLinear with float32 or int8 rows, one to three segments, or gate and up."""

    def __init__(self, rng: Rng, isa: str) -> None:
        swiglu = bool(rng.random() < 0.3)
        self.quantized = bool(rng.random() < 0.3)
        self.group = pick(rng, (0, 32, 64, 128, 256))
        formats = INTEGER_FORMATS if self.quantized else FORMATS
        count = 2 if swiglu else int(rng.integers(1, 4))
        self.formats = [pick(rng, formats) for _ in range(count)]
        self.k = 256 * int(rng.integers(1, 4))
        if set(self.formats) <= set(FLOAT_FORMATS):
            self.k = int(rng.integers(1, 300))
        last = int(rng.integers(1, 50))
        self.rows = [last] * 2 if swiglu else [16 * int(rng.integers(1, 4)) for _ in self.formats[1:]] + [last]
        self.outputs = last if swiglu else sum(self.rows)
        # Codes and scales of any bits whatever in some: a weight is data, not to be trusted either.
        self.raw = bool(rng.random() < 0.3)
        panels = [random_panels(f, r, self.k, rng) for f, r in zip(self.formats, self.rows, strict=True)]
        self.weight = np.concatenate(panels)
        if self.raw:
            self.weight = rng.integers(0, 256, self.weight.shape, np.uint8)
        self.bias = not swiglu and bool(rng.random() < 0.5)
        self.residual = bool(rng.random() < 0.5)
        attributes: dict[str, Any] = {
            "k": self.k,
            "rows": self.rows,
            "formats": ",".join(self.formats),
            "act_group": self.group,
            "act_bits": 8 if self.quantized else pick(rng, (8, 16)),
            "swiglu": int(swiglu),
        }
        dtypes = [array.dtype if array is not None else None for array in self.inputs(rng)]
        self.session, self.twin = pair(isa, partial(op_session, "QuantLinear", dtypes, [FLOAT], **attributes))

    def inputs(self, rng: Rng) -> list[Array | None]:
        tokens = int(rng.integers(0, 40))
        x = values(rng, (tokens, self.k))
        scale = None
        if self.quantized:
            x = rng.integers(-127, 128, x.shape).astype(np.int8)
            scale = values(rng, (tokens, self.k // (self.group or self.k)))
        bias = values(rng, (self.outputs,)) if self.bias else None
        residual = values(rng, (tokens, self.outputs)) if self.residual else None
        return [x, scale, self.weight, bias, residual]

    def call(self, rng: Rng, fault: bool) -> Call:
        arrays = self.inputs(rng)
        if not fault:
            twin = None if self.raw else lambda: run_session(self.twin, arrays)
            return Call(lambda: run_session(self.session, arrays), twin)
        at = pick(rng, tuple(i for i, array in enumerate(arrays) if array is not None))
        tokens = len(arrays[0]) if arrays[0] is not None else 0
        if self.quantized and tokens and rng.random() < 0.3:
            arrays[0][rng.integers(tokens), rng.integers(self.k)] = -128
        else:
            while (changed := resized(arrays[at], rng)).shape == arrays[at].shape or only_rows(self, at, changed):
                pass
            arrays[at] = changed
        return Call(lambda: run_session(self.session, arrays), None)


def only_rows(linear: Linear, at: int, x: Array) -> bool:
    """Whether a changed x still is one: with more or fewer rows and nothing beside that must have as many."""
    return at == 0 and x.ndim == 2 and x.shape[1] == linear.k and not linear.quantized and not linear.residual


class Embedding:
    """EmbedDequant."""

    def __init__(self, rng: Rng, isa: str) -> None:
        self.format, self.rows = pick(rng, FORMATS), int(rng.integers(1, 60))
        self.k = 256 * int(rng.integers(1, 3))
        self.weight = random_panels(self.format, self.rows, self.k, rng)
        dtypes = [np.dtype(np.int64), np.dtype(np.uint8)]
        attributes: dict[str, Any] = {"k": self.k, "rows": self.rows, "format": self.format}
        self.session, self.twin = pair(isa, partial(op_session, "EmbedDequant", dtypes, [FLOAT], **attributes))

    def call(self, rng: Rng, fault: bool) -> Call:
        ids = rng.integers(0, self.rows, int(rng.integers(1, 20)))
        weight = self.weight
        if not fault:
            return Call(lambda: run_session(self.session, [ids, weight]), lambda: run_session(self.twin, [ids, weight]))
        match rng.integers(3):
            case 0:
                ids[rng.integers(len(ids))] = pick(rng, (-1, self.rows, *EXTREMES[:2], *EXTREMES[-4:]))
            case 1:
                weight = resized(weight, rng)
            case _:
                ids = ids[None]
        return Call(lambda: run_session(self.session, [ids, weight]), None)


class Norm:
    """RMSNorm and RMSNormQuant."""

    def __init__(self, rng: Rng, isa: str) -> None:
        self.k = 256 * int(rng.integers(1, 4))
        dtypes = [np.dtype(np.float32)] * 2
        outputs, attributes = [FLOAT], {"epsilon": float(pick(rng, (0.0, 1e-6, 1e-5)))}
        name = "RMSNorm"
        if rng.random() < 0.5:
            name, outputs = "RMSNormQuant", [INT8, FLOAT]
            attributes["act_group"] = pick(rng, (0, 32, 64, 128, 256))
        self.session, self.twin = pair(isa, partial(op_session, name, dtypes, outputs, **attributes))

    def call(self, rng: Rng, fault: bool) -> Call:
        arrays = [values(rng, (int(rng.integers(0, 40)), self.k)), values(rng, (self.k,))]
        if not fault:
            return Call(lambda: run_session(self.session, arrays), lambda: run_session(self.twin, arrays))
        at = int(rng.integers(2))
        while (changed := resized(arrays[at], rng)).shape[-1] == self.k and changed.ndim == arrays[at].ndim:
            pass
        arrays[at] = changed
        return Call(lambda: run_session(self.session, arrays), None)


class Paged:
    """PagedAttention over a ragged batch, its caches among what has to be equal."""

    def __init__(self, rng: Rng, isa: str) -> None:
        kv_heads = int(rng.integers(1, 4))
        self.geometry = Geometry(
            heads=kv_heads * int(rng.integers(1, 5)),
            kv_heads=kv_heads,
            head_dim=8 * int(rng.integers(1, 17)),
            kv_dtype=pick(rng, ("float16", "bfloat16", "int8")),
            rope_interleaved=bool(rng.integers(2)),
            window=pick(rng, (0, 0, 1, 7, 300, 2**63 - 1)),
            sinks=pick(rng, (0, 4, 2**63 - 1)),
        )
        self.extra = tuple(n for n in ("q_norm", "k_norm", "tree_mask") if rng.random() < 0.3)
        names = optional_names(self.geometry, *self.extra)
        self.session, self.twin = pair(isa, partial(Attention, self.geometry, names))

    def inputs(self, rng: Rng) -> dict[str, Array]:
        count = int(rng.integers(1, 5))
        past = [int(rng.integers(0, 60)) * int(rng.integers(0, 2)) for _ in range(count)]
        new = [int(rng.integers(0, 12)) for _ in range(count)]
        new[0] += 1
        lengths = [p + n for p, n in zip(past, new, strict=True)]
        pool = make_pool(self.geometry, lengths, rng, block_size=pick(rng, (1, 3, 16)))
        tokens = [make_tokens(self.geometry, length, rng) for length in lengths]
        for sequence, length in enumerate(past):
            pool.fill(sequence, length, rng)
        extra: dict[str, Array] = {}
        for name in self.extra:
            if name == "tree_mask":
                mask = rng.integers(0, 256, (sum(new), max(new) + int(rng.integers(0, 3)))) * rng.integers(0, 2)
                extra[name] = mask.astype(np.uint8)
            else:
                extra[name] = rng.normal(1, 0.1, self.geometry.head_dim).astype(np.float32)
        arrays = step_inputs(pool, tokens, [Part(*part) for part in zip(range(count), past, new, strict=True)], extra)
        if rng.random() < 0.2:
            arrays["qkv"] = values(rng, arrays["qkv"].shape)
        if rng.random() < 0.2:
            arrays["slot_mapping"][rng.random(sum(new)) < 0.3] = -1
        return arrays

    def call(self, rng: Rng, fault: bool) -> Call:
        arrays = self.inputs(rng)

        def run_on(attention: Attention, arrays: dict[str, Array]) -> list[Array]:
            out = run(attention, arrays)
            return [out, *(arrays[name] for name in sorted(arrays) if name.endswith(("_cache", "_scale")))]

        if not fault:
            copy = {name: array.copy() for name, array in arrays.items()}
            return Call(lambda: run_on(self.session, arrays), lambda: run_on(self.twin, copy))
        if rng.random() < 0.6:
            name = pick(rng, ("slot_mapping", "cu_seqlens", "past_lens", "block_table"))
            # The first sequence has new tokens, so all of its entries count.
            places: dict[str, Any] = {
                "slot_mapping": rng.integers(len(arrays["slot_mapping"])),
                "cu_seqlens": rng.integers(len(arrays["cu_seqlens"])),
                "past_lens": 0,
                "block_table": (0, rng.integers(needed(arrays))),
            }
            arrays[name][places[name]] = pick(rng, INDICES)
        else:
            name = pick(rng, tuple(sorted(arrays)))
            arrays[name] = shrunk(arrays[name], name, rng)
        return Call(lambda: run_on(self.session, arrays), None)


def needed(arrays: dict[str, Array]) -> int:
    """Blocks of the first sequence."""
    keys = int(arrays["past_lens"][0] + arrays["cu_seqlens"][1])
    return -(-keys // arrays["key_cache"].shape[1])


def shrunk(array: Array, name: str, rng: Rng) -> Array:
    """The array without the end of an axis that counts, of the same rank: ONNX Runtime itself refuses another."""
    axis = {"tree_mask": 0, "block_table": 0}.get(name, int(rng.integers(array.ndim)))
    return np.ascontiguousarray(np.take(array, range(array.shape[axis] - 1), axis))


@pytest.mark.parametrize("run_number", range(RUNS))
@pytest.mark.parametrize("op", [Linear, Embedding, Norm, Paged])
def test_right_calls_give_the_portable_bits_and_wrong_ones_an_error_that_names_the_op(
    op: type[Linear | Embedding | Norm | Paged], run_number: int
) -> None:
    rng = np.random.default_rng([run_number, *op.__name__.encode()])
    isas = tuple(ops.available_isas())
    subject: Any = None
    for case in range(CASES // (4 * RUNS)):
        if case % CALLS == 0:
            subject = op(rng, pick(rng, isas))
        call = subject.call(rng, fault=bool(case % 2))
        if case % 2:
            with pytest.raises(Exception, match=REFUSAL):
                call.run()
            continue
        got = call.run()
        if call.twin is not None:
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, call.twin(), strict=True)), (
                f"case {case}"
            )


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "QuantLinear": {"k": 256, "rows": [32], "formats": "q4k", "act_group": 0, "act_bits": 8, "swiglu": 0},
    "EmbedDequant": {"k": 256, "rows": 32, "format": "q4k"},
    "RMSNormQuant": {"epsilon": 1e-6, "act_group": 32},
    "RMSNorm": {"epsilon": 1e-6},
}


@pytest.mark.parametrize(
    "value", [*EXTREMES, 1.5, float("nan"), float("inf"), "", "q4k,", ",", "q4k\0", [2**63 - 1] * 3, None]
)
@pytest.mark.parametrize(("op", "attribute"), [(op, name) for op, given in ATTRIBUTES.items() for name in given])
def test_an_attribute_of_any_value_is_taken_or_refused_by_name(op: str, attribute: str, value: Any) -> None:
    attributes = {**ATTRIBUTES[op], attribute: value}
    if value is None:
        del attributes[attribute]
    weight = random_panels("q4k", 32, 256, np.random.default_rng(0))
    x = np.ones((2, 256), np.float32)
    inputs, outputs = {
        "QuantLinear": ([x, None, weight], [FLOAT]),
        "EmbedDequant": ([np.array([0, 31], np.int64), weight], [FLOAT]),
        "RMSNormQuant": ([x, x[0]], [INT8, FLOAT]),
        "RMSNorm": ([x, x[0]], [FLOAT]),
    }[op]
    message = ""
    try:
        session = op_session(op, [None if a is None else a.dtype for a in inputs], outputs, **attributes)
        run_session(session, inputs)
    except Exception as error:
        message = str(error)
    assert not message or f"{op}: " in message
