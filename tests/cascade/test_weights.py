"""Weights on huge pages: the same numbers as in the file, and clear errors."""

from array import array
from pathlib import Path

import numpy as np
import onnx
import pytest

from cascade import session, weights
from cascade.bundle import MODEL_FILE, WEIGHTS_FILE, load_manifest
from cascade.config import TierConfig
from cascade.errors import BundleError
from cascade.runner import Logits, Rows, Runner
from cascade.session import OrtSession
from cascade.weights import huge_pages_offered, load_weights

PROMPT = list(range(100, 140))


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A graph that says: six floats of WEIGHTS_FILE, from byte 64 on."""
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[2, 3])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": WEIGHTS_FILE, "offset": "64", "length": "24"}.items():
        tensor.external_data.add(key=key, value=value)
    graph = onnx.helper.make_graph([], "g", [], [], [tensor])
    (tmp_path / MODEL_FILE).write_bytes(onnx.helper.make_model(graph).SerializeToString())
    (tmp_path / WEIGHTS_FILE).write_bytes(bytes(64) + np.arange(6, dtype=np.float32).tobytes())
    return tmp_path / MODEL_FILE


def logits_of(bundle: Path) -> Logits:
    tier = OrtSession(TierConfig("t", str(bundle)), load_manifest(bundle), 8, 1)
    return Runner(tier, len(PROMPT), 1).run([Rows(PROMPT, 0, array("i", range(8)), 1)]).copy()


def test_tensors_are_the_files(small_model: Path) -> None:
    assert load_weights(small_model)["w"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_beyond_the_file_is_refused(small_model: Path) -> None:
    with (small_model.parent / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(80)
    with pytest.raises(BundleError, match="w does not lie in"):
        load_weights(small_model)


@pytest.mark.parametrize(
    ("text", "offered"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("madvise [never]", False)],
)
def test_what_the_kernel_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, offered: bool) -> None:
    switch = tmp_path / "enabled"
    switch.write_text(text)
    monkeypatch.setattr(weights, "SWITCH", switch)
    assert huge_pages_offered() is offered


def test_no_such_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SWITCH", tmp_path / "absent")
    assert not huge_pages_offered()


def test_the_copy_gives_the_mapped_files_logits(smol_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "huge_pages_offered", lambda: True)
    copied = logits_of(smol_bundle)
    monkeypatch.setattr(session, "huge_pages_offered", lambda: False)
    assert (logits_of(smol_bundle) == copied).all()


def test_weights_that_do_not_fit_are_mapped(smol_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "huge_pages_offered", lambda: True)
    monkeypatch.setattr(session, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(session, "load_weights", lambda _: pytest.fail("copied"))
    assert np.isfinite(logits_of(smol_bundle)).all()
