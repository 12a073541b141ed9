"""RMSNorm, RMSNormQuant, EmbedDequant and the choice of ISA."""

import numpy as np
import pytest
from onnx import TensorProto

from cascade import ops
from cascade.errors import StepwellError
from exporters.panels import unpack
from tests.cascade.ops.linear_model import FORMATS, OTHER_ISAS, isa_named, quantize_rows, random_panels, run_op

FLOAT, INT8 = TensorProto.FLOAT, TensorProto.INT8


def rows(tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens * k)
    return rng.normal(0, 3, (tokens, k)).astype(np.float32), rng.normal(1, 0.1, k).astype(np.float32)


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
    expected_codes, expected_scale = quantize_rows(normed, group)
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(scale, expected_scale)


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


@pytest.mark.parametrize("format_", FORMATS)
def test_embedding_rows_are_the_blocks_values(format_: str) -> None:
    rng = np.random.default_rng(1)
    blob = random_panels(format_, 50, 256, rng)
    ids = np.array([0, 49, 17, 16, 15, 17], np.int64)
    (got,) = run_op("EmbedDequant", [ids, blob], [FLOAT], k=256, rows=50, format=format_)
    assert np.array_equal(got, unpack(blob, format_, 50, 256)[ids])


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_an_id_outside_the_embedding_is_refused_by_name(bad: int) -> None:
    blob = random_panels("q8", 50, 64, np.random.default_rng(2))
    with pytest.raises(Exception, match=rf"ids\[1\] = {bad}, expected 0 to 49"):
        run_op("EmbedDequant", [np.array([3, bad], np.int64), blob], [FLOAT], k=64, rows=50, format="q8")


@pytest.mark.parametrize("isa", ops.available_isas())
def test_stepwell_isa_forces_an_available_isa(isa: str) -> None:
    with isa_named(isa):
        assert ops.isa() == isa


def test_an_unavailable_isa_is_an_error() -> None:
    with isa_named("sse9"), pytest.raises(StepwellError, match="portable"):
        ops.isa()


def test_a_session_with_an_unavailable_isa_is_refused() -> None:
    x, gamma = rows(1, 16)
    with pytest.raises(Exception, match="STEPWELL_ISA=sse9 is not available on this machine; available: .*portable"):
        run_op("RMSNorm", [x, gamma], [FLOAT], isa="sse9", epsilon=1e-6)
