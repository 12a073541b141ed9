"""QuantLinear against FORMAT.md: values, every ISA bit for bit, independence of rows, and refusals."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from exporters.panels import unit_dtype
from tests.cascade.ops import reference
from tests.cascade.ops.linear_model import (
    FLOAT_FORMATS,
    FORMATS,
    INTEGER_FORMATS,
    OTHER_ISAS,
    limit_codes,
    quant_linear,
    random_panels,
    run_op,
)

SETTINGS = settings(deadline=None, max_examples=25)


def case(format_: str, tokens: int, rows: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, (tokens, k)).astype(np.float32), random_panels(format_, rows, k, rng)


def assert_close(got: np.ndarray, expected: np.ndarray, magnitude: np.ndarray) -> None:
    """Within float32 accumulation error: 2e-6 of the sum of magnitudes."""
    assert (np.abs(got - expected) <= 2e-6 * magnitude + 1e-7).all()


@pytest.mark.parametrize("format_", FORMATS)
@given(
    tokens=st.integers(1, 9),
    rows=st.integers(1, 40),
    units=st.integers(1, 3),
    group=st.sampled_from([0, 32, 64, 128, 256]),
    bits=st.sampled_from([8, 16]),
    spread=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**32 - 1),
)
@SETTINGS
def test_portable_gives_the_bits_that_the_format_states(
    format_: str, tokens: int, rows: int, units: int, group: int, bits: int, spread: float, seed: int
) -> None:
    k = 256 * units
    x, blob = case(format_, tokens, rows, k, seed)
    x *= np.float32(spread)
    got = quant_linear(x, blob, k=k, rows=[rows], formats=[format_], act_group=group, act_bits=bits)
    assert np.array_equal(got, reference.product(x, blob, format_, rows, group=group, bits=bits))


@pytest.mark.parametrize("format_", ["q4", "q4m", "q6s", "q6m", "q8", "c8", *FLOAT_FORMATS])
def test_k_need_not_be_a_multiple_of_256(format_: str) -> None:
    x, blob = case(format_, 3, 24, 96, 3)
    for isa in ("portable", *OTHER_ISAS):
        got = quant_linear(x, blob, isa=isa, k=96, rows=[24], formats=[format_], act_group=32)
        assert np.array_equal(got, reference.product(x, blob, format_, 24, group=32))


@pytest.mark.parametrize("format_", FLOAT_FORMATS)
def test_float_weights_take_any_k_and_ignore_how_rows_are_quantized(format_: str) -> None:
    x, blob = case(format_, 3, 24, 37, 16)
    got = quant_linear(x, blob, k=37, rows=[24], formats=[format_], act_group=32, act_bits=16)
    assert np.array_equal(got, reference.product(x, blob, format_, 24))


@pytest.mark.parametrize("format_", FORMATS)
def test_sixteen_bit_rows_are_nearly_exact(format_: str) -> None:
    x, blob = case(format_, 3, 32, 256, 2)
    weights = reference.dequantized(blob, format_, 32, 256).astype(np.float64)
    got = quant_linear(x, blob, k=256, rows=[32], formats=[format_], act_bits=16)
    magnitude = np.abs(x) @ np.abs(weights.T)
    assert (np.abs(got - x @ weights.T) <= 4e-5 * magnitude).all()


@pytest.mark.parametrize("isa", OTHER_ISAS)
@pytest.mark.parametrize("format_", FORMATS)
@given(
    tokens=st.integers(1, 35),
    panels=st.integers(1, 4),
    units=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@SETTINGS
def test_every_isa_gives_the_portable_bits(
    isa: str, format_: str, tokens: int, panels: int, units: int, seed: int, data: Any
) -> None:
    k, rows = 256 * units, 16 * panels - data.draw(st.integers(0, 15))
    x, blob = case(format_, tokens, rows, k, seed)
    keywords: dict[str, Any] = {"k": k, "rows": [rows], "formats": [format_]}
    keywords["act_bits"] = data.draw(st.sampled_from([8, 16]))
    keywords["act_group"] = data.draw(st.sampled_from([0, 32, 64, 128, 256]))
    expected = quant_linear(x, blob, **keywords)
    assert np.array_equal(quant_linear(x, blob, isa=isa, **keywords), expected)


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
@pytest.mark.parametrize("format_", INTEGER_FORMATS)
def test_extreme_codes_do_not_saturate(isa: str, format_: str) -> None:
    x = np.where(np.arange(256) % 3 == 0, -1.0, 1.0).astype(np.float32)[None].repeat(20, 0)
    blob = random_panels(format_, 16, 256, np.random.default_rng(4))
    units = blob.view(unit_dtype(format_, 256))
    units["codes"][...] = 0xFFFFFFFF
    limit_codes(units, format_)
    weights = reference.dequantized(blob, format_, 16, 256).astype(np.float64)
    got = quant_linear(x, blob, isa=isa, k=256, rows=[16], formats=[format_])
    assert_close(got, x @ weights.T, np.abs(x) @ np.abs(weights.T))


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_rows_bits_do_not_depend_on_its_neighbours(isa: str, format_: str, bits: int) -> None:
    x, blob = case(format_, 70, 80, 256, 5)
    keywords: dict[str, Any] = {"isa": isa, "k": 256, "rows": [80], "formats": [format_], "act_bits": bits}
    together = quant_linear(x, blob, threads=2, **keywords)
    alone = np.concatenate([quant_linear(x[i : i + 1], blob, **keywords) for i in (0, 1, 8, 15, 16, 33, 69)])
    assert np.array_equal(together[[0, 1, 8, 15, 16, 33, 69]], alone)


def test_segments_of_different_formats_stand_side_by_side() -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=(3, 256)).astype(np.float32)
    blobs = [random_panels(f, 32, 256, rng) for f in ("q4k", "f16", "q6k")]
    together = quant_linear(x, np.concatenate(blobs), k=256, rows=[32, 32, 32], formats=["q4k", "f16", "q6k"])
    apart = [
        quant_linear(x, b, k=256, rows=[32], formats=[f]) for b, f in zip(blobs, ("q4k", "f16", "q6k"), strict=True)
    ]
    assert np.array_equal(together, np.concatenate(apart, 1))


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
def test_bias_and_residual_are_added_in_float32(isa: str) -> None:
    x, blob = case("q8", 9, 40, 64, 7)
    rng = np.random.default_rng(8)
    bias, residual = rng.normal(size=40).astype(np.float32), rng.normal(size=(9, 40)).astype(np.float32)
    plain = quant_linear(x, blob, isa=isa, k=64, rows=[40], formats=["q8"])
    got = quant_linear(x, blob, isa=isa, k=64, rows=[40], formats=["q8"], bias=bias, residual=residual)
    assert np.array_equal(got, (plain + bias) + residual)


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
def test_swiglu_joins_gate_and_up(isa: str) -> None:
    rng = np.random.default_rng(9)
    x = (rng.normal(size=(4, 256)) * 20).astype(np.float32)
    gate, up = random_panels("q4k", 48, 256, rng), random_panels("q6k", 48, 256, rng)
    g = quant_linear(x, gate, k=256, rows=[48], formats=["q4k"]).astype(np.float64)
    u = quant_linear(x, up, k=256, rows=[48], formats=["q6k"]).astype(np.float64)
    got = quant_linear(x, np.concatenate([gate, up]), isa=isa, k=256, rows=[48, 48], formats=["q4k", "q6k"], swiglu=1)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(got, g / (1 + np.exp(-g)) * u, rtol=2e-6, atol=1e-30)


def test_int8_rows_give_what_float_rows_give() -> None:
    x, blob = case("q4m", 4, 32, 128, 10)
    [(codes, scale)] = reference.quantize_rows(x, 64)
    keywords: dict[str, Any] = {"k": 128, "rows": [32], "formats": ["q4m"], "act_group": 64}
    assert np.array_equal(quant_linear(codes, blob, x_scale=scale, **keywords), quant_linear(x, blob, **keywords))


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
@pytest.mark.parametrize("value", [0.0, 1e-42])
def test_rows_without_a_scale_are_zero(isa: str, value: float) -> None:
    _, blob = case("q4k", 1, 16, 256, 11)
    x = np.full((2, 256), value, np.float32)
    assert not quant_linear(x, blob, isa=isa, k=256, rows=[16], formats=["q4k"]).any()


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [slice(0, 1), slice(255, 256), slice(None)], ids=["first", "last", "all"])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_its_neighbours_alone(
    isa: str, bits: int, value: float, where: slice
) -> None:
    x, blob = case("q4k", 20, 16, 256, 17)
    keywords: dict[str, Any] = {"isa": isa, "k": 256, "rows": [16], "formats": ["q4k"], "act_bits": bits}
    expected = quant_linear(x, blob, **keywords)
    x[3, where] = value
    got = quant_linear(x, blob, **keywords)
    assert np.isnan(got[3]).all()
    assert np.array_equal(np.delete(got, 3, 0), np.delete(expected, 3, 0))


def test_no_rows_give_no_rows() -> None:
    _, blob = case("q4k", 1, 16, 256, 12)
    assert quant_linear(np.zeros((0, 256), np.float32), blob, k=256, rows=[16], formats=["q4k"]).shape == (0, 16)


GOOD: dict[str, Any] = {"k": 256, "rows": [32], "formats": ["q4k"]}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("k", {"k": 128}, "multiple of 256"),
    ("format", {"formats": ["q3"]}, "unknown weight format q3"),
    ("rows", {"rows": [48]}, r"input weight has shape \[\d+\], expected \[\d+\]"),
    ("no rows", {"rows": [0]}, "attribute rows is 0"),
    ("huge rows", {"rows": [2**40]}, "attribute rows is 1099511627776"),
    ("huge k", {"k": 2**31}, "attribute k is 2147483648"),
    ("many segments", {"rows": [16] * 65, "formats": ["q4k"] * 65}, "65 segments, expected up to 64"),
    ("segments", {"rows": [16, 16]}, "2 rows and 1 formats"),
    ("ragged segment", {"rows": [8, 24], "formats": ["q4k", "q4k"]}, "segment 0 has 8 rows"),
    ("group", {"act_group": 48}, "act_group 48"),
    ("bits", {"act_bits": 4}, "act_bits is 4"),
    ("swiglu", {"swiglu": 1}, "two segments"),
    ("bias", {"bias": np.zeros(31, np.float32)}, r"input bias has shape \[31\], expected \[32\]"),
    (
        "residual",
        {"residual": np.zeros((1, 32), np.float32)},
        r"input residual has shape \[1, 32\], expected \[2, 32\]",
    ),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_an_error_that_names_it(change: dict[str, Any], message: str) -> None:
    x, blob = case("q4k", 2, 32, 256, 13)
    with pytest.raises(Exception, match=message):
        quant_linear(x, blob, **(GOOD | change))


def test_columns_that_are_not_k_are_refused() -> None:
    _, blob = case("q4k", 2, 32, 256, 14)
    with pytest.raises(Exception, match=r"input x has shape \[2, 255\], expected \[any, 256\]"):
        quant_linear(np.zeros((2, 255), np.float32), blob, **GOOD)


def test_int8_rows_without_scales_are_refused() -> None:
    _, blob = case("q4k", 2, 32, 256, 15)
    with pytest.raises(Exception, match="input x_scale is missing"):
        quant_linear(np.zeros((2, 256), np.int8), blob, **GOOD)


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
def test_a_code_of_minus_128_is_refused(isa: str) -> None:
    x, blob = case("q4k", 2, 32, 256, 18)
    [(codes, scale)] = reference.quantize_rows(x, 0)
    codes[1, 7] = -128
    with pytest.raises(Exception, match="QuantLinear: input x holds -128 in row 1, expected codes from -127 to 127"):
        quant_linear(codes, blob, isa=isa, x_scale=scale, **GOOD)


def test_scales_are_checked_without_rows_too() -> None:
    _, blob = case("q4k", 2, 32, 256, 19)
    with pytest.raises(Exception, match=r"input x_scale has shape \[1, 1\], expected \[0, 1\]"):
        quant_linear(np.zeros((0, 256), np.int8), blob, x_scale=np.ones((1, 1), np.float32), **GOOD)


@pytest.mark.parametrize("attribute", ["k", "rows", "formats", "act_group", "act_bits", "swiglu"])
def test_an_attribute_of_another_type_is_refused_by_name(attribute: str) -> None:
    x, blob = case("q4k", 2, 32, 256, 20)
    attributes = {"k": 256, "rows": [32], "formats": "q4k", "act_group": 0, "act_bits": 8, "swiglu": 0}
    with pytest.raises(Exception, match=f"QuantLinear: attribute {attribute}: "):
        run_op("QuantLinear", [x, None, blob], [TensorProto.FLOAT], **(attributes | {attribute: 0.5}))
