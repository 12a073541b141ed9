"""The graph: valid ONNX with the signature and the nodes of the design."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporters.checkpoint import open_checkpoint
from exporters.export import export_bundle
from exporters.recipes import RECIPES, Recipe
from tests.exporters.gguf_writer import tiny_model


def exported(directory: Path, architecture: str = "llama", recipe: Recipe = "exact", **options: Any) -> Path:
    path = directory / "tiny.gguf"
    tiny_model(architecture, "Q8_0").write(path)
    export_bundle(path, directory / "out", recipe, **options)
    return directory / "out" / "model.onnx"


def graph_of(path: Path) -> onnx.GraphProto:
    return onnx.load(str(path), load_external_data=False).graph


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checker_accepts_it(tmp_path: Path, architecture: str, recipe: Recipe) -> None:
    onnx.checker.check_model(str(exported(tmp_path, architecture, recipe)), full_check=False)


def test_inputs_are_the_designs(tmp_path: Path) -> None:
    graph = graph_of(exported(tmp_path))
    names = [value.name for value in graph.input]
    ragged = ["input_ids", "positions", "slot_mapping", "cu_seqlens", "past_lens", "block_table", "logit_rows"]
    assert names == [*ragged, "key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1"]


def test_integer_caches_come_with_scales(tmp_path: Path) -> None:
    graph = graph_of(exported(tmp_path, kv_dtype="int8"))
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    assert types["key_cache.1"] == TensorProto.INT8
    assert types["value_scale.1"] == TensorProto.FLOAT


def test_cache_shape_carries_the_block_size(tmp_path: Path) -> None:
    graph = graph_of(exported(tmp_path, block_size=64))
    cache = next(value for value in graph.input if value.name == "key_cache.0")
    assert [dim.dim_value or dim.dim_param for dim in cache.type.tensor_type.shape.dim] == ["num_blocks", 64, 2, 64]


def test_a_layer_is_seven_nodes(tmp_path: Path) -> None:
    counts = Counter(node.op_type for node in graph_of(exported(tmp_path)).node if node.domain == "stepwell")
    assert counts == {"EmbedDequant": 1, "RMSNorm": 5, "QuantLinear": 9, "PagedAttention": 2}


def test_eight_bit_layers_quantize_in_the_norm(tmp_path: Path) -> None:
    counts = Counter(node.op_type for node in graph_of(exported(tmp_path, recipe="w8a8")).node)
    assert (counts["RMSNormQuant"], counts["RMSNorm"]) == (2, 3)


def test_tied_head_and_embedding_share_one_initializer(tmp_path: Path) -> None:
    nodes = {node.name: node for node in graph_of(exported(tmp_path)).node}
    assert nodes["logits"].input[2] == nodes["embedding"].input[1] == "embed"


def test_residuals_go_round_attention_and_ffn(tmp_path: Path) -> None:
    nodes = {node.name: node for node in graph_of(exported(tmp_path)).node}
    assert nodes["layers.0.o.out"].input[4] == "embedding"
    assert nodes["layers.0.down.out"].input[4] == "layers.0.o.out"
    assert nodes["layers.1.o.out"].input[4] == "layers.0.down.out"


@pytest.mark.parametrize(("architecture", "inputs"), [("llama", 3), ("qwen2", 4)])
def test_only_models_with_biases_have_them(tmp_path: Path, architecture: str, inputs: int) -> None:
    nodes = {node.name: node for node in graph_of(exported(tmp_path, architecture)).node}
    assert len(nodes["layers.0.qkv.out"].input) == inputs


def test_head_norms_reach_attention(tmp_path: Path) -> None:
    nodes = {node.name: node for node in graph_of(exported(tmp_path, "qwen3")).node}
    assert list(nodes["layers.1.attention"].input[10:]) == ["layers.1.q_norm", "layers.1.k_norm"]


@pytest.mark.parametrize(("architecture", "interleaved"), [("llama", 1), ("qwen2", 0)])
def test_rope_pairs_follow_the_source(tmp_path: Path, architecture: str, interleaved: int) -> None:
    nodes = {node.name: node for node in graph_of(exported(tmp_path, architecture)).node}
    assert attributes(nodes["layers.0.attention"])["rope_interleaved"] == interleaved


def test_rope_frequencies_are_the_checkpoints(tmp_path: Path) -> None:
    graph = graph_of(exported(tmp_path))
    inline = {tensor.name: tensor for tensor in graph.initializer}
    expected = open_checkpoint(tmp_path / "tiny.gguf").rope.inv_freq()
    np.testing.assert_array_equal(numpy_helper.to_array(inline["rope.inv_freq"])[0], expected)


def test_only_asked_rows_go_through_the_head(tmp_path: Path) -> None:
    nodes = {node.name: node for node in graph_of(exported(tmp_path)).node}
    assert list(nodes["last_hidden"].input) == ["layers.1.down.out", "logit_rows"]
    assert nodes["final_norm.rows"].input[0] == "last_hidden"
