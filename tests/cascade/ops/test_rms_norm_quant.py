"""RMSNorm and RMSNormQuant against FORMAT.md, on every ISA."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from tests.cascade.ops import reference
from tests.cascade.ops.linear_model import OTHER_ISAS, run_op

FLOAT, INT8 = TensorProto.FLOAT, TensorProto.INT8


def rows(tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens * k)
    return rng.normal(0, 3, (tokens, k)).astype(np.float32), rng.normal(1, 0.1, k).astype(np.float32)


@given(tokens=st.integers(1, 20), lanes=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_rms_norm_gives_the_bits_that_the_format_states(tokens: int, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, gamma = (rng.normal(0, 3, shape).astype(np.float32) for shape in ((tokens, 16 * lanes), 16 * lanes))
    (got,) = run_op("RMSNorm", [x, gamma], [FLOAT], epsilon=1e-5)
    assert np.array_equal(got, reference.rms_norm(x, gamma, 1e-5))


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
def test_rms_norm(isa: str) -> None:
    x, gamma = rows(19, 576)
    (got,) = run_op("RMSNorm", [x, gamma], [FLOAT], isa=isa, epsilon=1e-5)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * gamma, rtol=1e-6)


@pytest.mark.parametrize("isa", OTHER_ISAS)
@pytest.mark.parametrize("group", [0, 64])
def test_norms_give_the_portable_bits(isa: str, group: int) -> None:
    x, gamma = rows(33, 256)
    for name, outputs, extra in (("RMSNorm", [FLOAT], {}), ("RMSNormQuant", [INT8, FLOAT], {"act_group": group})):
        expected = run_op(name, [x, gamma], outputs, epsilon=1e-6, **extra)
        got = run_op(name, [x, gamma], outputs, isa=isa, threads=2, epsilon=1e-6, **extra)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("group", [0, 32, 256])
def test_rms_norm_quant_quantizes_the_normed_rows(group: int) -> None:
    x, gamma = rows(7, 256)
    (normed,) = run_op("RMSNorm", [x, gamma], [FLOAT], epsilon=1e-6)
    codes, scale = run_op("RMSNormQuant", [x, gamma], [INT8, FLOAT], epsilon=1e-6, act_group=group)
    [(expected_codes, expected_scale)] = reference.quantize_rows(normed, group)
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(scale, expected_scale)


@pytest.mark.parametrize("isa", ["portable", *OTHER_ISAS])
def test_a_row_that_is_not_finite_says_so_in_its_scales(isa: str) -> None:
    x, gamma = rows(3, 64)
    x[1, 5] = np.nan
    _, scale = run_op("RMSNormQuant", [x, gamma], [INT8, FLOAT], isa=isa, epsilon=1e-6, act_group=32)
    assert np.isnan(scale).tolist() == [[False, False], [True, True], [False, False]]


@pytest.mark.parametrize(
    ("op", "x", "gamma", "message"),
    [
        ("RMSNorm", (2, 30), 30, "input x has 30 columns, expected a multiple of 16"),
        ("RMSNorm", (2, 32), 16, r"input gamma has shape \[16\], expected \[32\]"),
        ("RMSNormQuant", (2, 48), 48, "act_group 32"),
    ],
)
def test_bad_norm_input_is_refused(op: str, x: tuple[int, int], gamma: int, message: str) -> None:
    outputs = [FLOAT] if op == "RMSNorm" else [INT8, FLOAT]
    extra = {} if op == "RMSNorm" else {"act_group": 32}
    with pytest.raises(Exception, match=message):
        run_op(op, [np.zeros(x, np.float32), np.zeros(gamma, np.float32)], outputs, epsilon=1e-6, **extra)


@pytest.mark.parametrize("epsilon", [-1e-6, float("nan"), float("inf")])
def test_an_epsilon_that_is_no_small_number_is_refused(epsilon: float) -> None:
    x = np.ones((1, 32), np.float32)
    with pytest.raises(Exception, match="RMSNorm: attribute epsilon is .*, expected a finite number, 0 or more"):
        run_op("RMSNorm", [x, x[0]], [FLOAT], epsilon=epsilon)
