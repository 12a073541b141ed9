"""EmbedDequant against FORMAT.md: every format's values, and refusals."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from tests.cascade.ops import reference
from tests.cascade.ops.linear_model import FORMATS, random_panels, run_op


@pytest.mark.parametrize("format_", FORMATS)
def test_embedding_rows_are_the_blocks_values(format_: str) -> None:
    rng = np.random.default_rng(1)
    blob = random_panels(format_, 50, 256, rng)
    ids = np.array([0, 49, 17, 16, 15, 17], np.int64)
    (got,) = run_op("EmbedDequant", [ids, blob], [TensorProto.FLOAT], k=256, rows=50, format=format_)
    assert np.array_equal(got, reference.dequantized(blob, format_, 50, 256)[ids])


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_an_id_outside_the_embedding_is_refused_by_name(bad: int) -> None:
    blob = random_panels("q8", 50, 64, np.random.default_rng(2))
    with pytest.raises(Exception, match=rf"ids\[1\] = {bad}, expected 0 to 49"):
        run_op("EmbedDequant", [np.array([3, bad], np.int64), blob], [TensorProto.FLOAT], k=64, rows=50, format="q8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 51 + 16}, r"input weight has shape \[\d+\], expected \[\d+\]"),
        ({"k": 48}, "format q8 needs k to be a multiple of 32, got 48"),
        ({"format": "q9"}, "unknown weight format q9"),
        ({"rows": 0}, "attribute rows is 0"),
    ],
    ids=["rows", "k", "format", "no rows"],
)
def test_attributes_that_do_not_fit_the_weight_are_refused(change: dict[str, Any], message: str) -> None:
    blob = random_panels("q8", 50, 64, np.random.default_rng(3))
    attributes: dict[str, Any] = {"k": 64, "rows": 50, "format": "q8"} | change
    with pytest.raises(Exception, match=message):
        run_op("EmbedDequant", [np.array([3], np.int64), blob], [TensorProto.FLOAT], **attributes)
