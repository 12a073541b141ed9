"""The choice of ISA: the best of the machine, or what STEPWELL_ISA names when a kernel is created."""

import numpy as np
import pytest
from onnx import TensorProto

from cascade import ops
from cascade.errors import StepwellError
from tests.cascade.ops.linear_model import isa_named, run_op


@pytest.mark.parametrize("isa", ops.available_isas())
def test_stepwell_isa_forces_an_available_isa(isa: str) -> None:
    with isa_named(isa):
        assert ops.isa() == isa


def test_an_unavailable_isa_is_an_error() -> None:
    with isa_named("sse9"), pytest.raises(StepwellError, match="portable"):
        ops.isa()


def test_a_session_with_an_unavailable_isa_is_refused() -> None:
    x, gamma = np.ones((1, 16), np.float32), np.ones(16, np.float32)
    with pytest.raises(Exception, match="STEPWELL_ISA=sse9 is not available on this machine; available: .*portable"):
        run_op("RMSNorm", [x, gamma], [TensorProto.FLOAT], isa="sse9", epsilon=1e-6)


def test_a_named_library_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_OPS_LIBRARY", "/no/such/library.so")
    with pytest.raises(StepwellError, match="STEPWELL_OPS_LIBRARY names /no/such/library.so, which is not a file"):
        ops.library_path()
