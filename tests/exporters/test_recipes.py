"""Recipes: which format, activation group and bits every linear gets."""

from pathlib import Path

import pytest

from cascade.errors import CheckpointError
from exporters.checkpoint import Checkpoint, open_checkpoint
from exporters.panels import FORMAT_OF_TYPE
from exporters.recipes import RECIPES, Recipe, plan_model
from tests.exporters.gguf_writer import tiny_model


def checkpoint(directory: Path, architecture: str = "llama", type_name: str = "Q4_K", tied: bool = True) -> Checkpoint:
    path = directory / "tiny.gguf"
    tiny_model(architecture, type_name, tied=tied).write(path)
    return open_checkpoint(path)


@pytest.mark.parametrize("type_name", sorted(FORMAT_OF_TYPE))
def test_exact_keeps_the_sources_formats(tmp_path: Path, type_name: str) -> None:
    plan = plan_model(checkpoint(tmp_path, type_name=type_name), "exact")
    formats = {name for linear in plan.linears.values() for name in linear.formats} | {plan.embed_format}
    assert formats == {FORMAT_OF_TYPE[type_name]}


def test_exact_rows_are_sixteen_bits_with_one_scale(tmp_path: Path) -> None:
    plan = plan_model(checkpoint(tmp_path), "exact")
    assert {(linear.act_group, linear.act_bits) for linear in plan.linears.values()} == {(0, 16)}


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "BF16"])
def test_w8a8_stores_every_layer_by_channel(tmp_path: Path, type_name: str) -> None:
    plan = plan_model(checkpoint(tmp_path, type_name=type_name), "w8a8")
    layers = [linear.formats for name, linear in plan.linears.items() if name != "head"]
    assert {format_ for formats in layers for format_ in formats} == {"c8"}


def test_w8a8_quantizes_gate_and_up_rows_to_eight_bits(tmp_path: Path) -> None:
    linears = plan_model(checkpoint(tmp_path), "w8a8").linears
    assert {name.rpartition(".")[2] for name, linear in linears.items() if linear.act_bits == 8} == {"gate_up"}


@pytest.mark.parametrize(
    ("type_name", "format_"), [("Q4_K", "q4k"), ("Q5_0", "q6s"), ("Q6_K", "q6k"), ("Q8_0", "q4m"), ("BF16", "q4m")]
)
def test_w4a8_keeps_blocks_of_up_to_six_bits_and_quantizes_the_rest(
    tmp_path: Path, type_name: str, format_: str
) -> None:
    linears = plan_model(checkpoint(tmp_path, type_name=type_name), "w4a8").linears
    assert linears["layers.0.qkv"].formats == (format_,) * 3


def test_w4a8_rows_of_a_narrow_model_are_eight_bits_in_groups_of_32(tmp_path: Path) -> None:
    linears = plan_model(checkpoint(tmp_path), "w4a8").linears
    assert {(linear.act_group, linear.act_bits) for linear in linears.values()} == {(32, 8)}


def test_w4a8_multiplies_a_float_head_by_float_rows(tmp_path: Path) -> None:
    head = plan_model(checkpoint(tmp_path, type_name="BF16"), "w4a8").linears["head"]
    assert (head.formats, head.int8_input) == (("bf16",), False)


@pytest.mark.parametrize(("recipe", "act_bits"), [("exact", 16), ("w8a8", 16), ("w4a8", 8)])
def test_head_keeps_the_sources_bits(tmp_path: Path, recipe: Recipe, act_bits: int) -> None:
    head = plan_model(checkpoint(tmp_path, type_name="Q6_K"), recipe).linears["head"]
    assert (head.formats, head.act_bits) == (("q6k",), act_bits)


def test_tied_head_multiplies_the_embedding(tmp_path: Path) -> None:
    assert plan_model(checkpoint(tmp_path, tied=True), "exact").linears["head"].segments == ("embed",)


def test_untied_head_has_its_own_matrix(tmp_path: Path) -> None:
    assert plan_model(checkpoint(tmp_path, tied=False), "exact").linears["head"].segments == ("head",)


def test_linears_stack_their_matrices_in_order(tmp_path: Path) -> None:
    linears = plan_model(checkpoint(tmp_path), "exact").linears
    assert linears["layers.1.qkv"].segments == ("layers.1.q", "layers.1.k", "layers.1.v")
    assert linears["layers.1.gate_up"].segments == ("layers.1.gate", "layers.1.up")


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_groups_divide_the_row(tmp_path: Path, recipe: str) -> None:
    for linear in plan_model(checkpoint(tmp_path), recipe).linears.values():
        assert linear.act_group == 0 or linear.k % linear.act_group == 0


def test_float_weights_take_float_rows(tmp_path: Path) -> None:
    plan = plan_model(checkpoint(tmp_path, type_name="F16"), "exact")
    assert not any(linear.int8_input for linear in plan.linears.values())


def test_manifest_formats_name_every_segment(tmp_path: Path) -> None:
    formats = plan_model(checkpoint(tmp_path), "exact").formats()
    assert formats["layers.0.qkv"] == "q4k,q4k,q4k"
    assert formats["embed"] == "q4k"


def test_unknown_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ValueError, CheckpointError), match="unknown recipe 'w1a1'"):
        plan_model(checkpoint(tmp_path), "w1a1")  # type: ignore[arg-type]
