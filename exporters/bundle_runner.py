"""Running one sequence through a bundle, all logits out: no engine, no batch, a fresh K/V pool every time."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from cascade.bundle import MODEL_FILE, load_manifest
from cascade.ops import library_path

_ELEMENT_TYPES = {"float16": 10, "bfloat16": 16, "int8": 3}
"""K/V dtype -> ONNX element type."""


class BundleRunner:
    """A bundle in an onnxruntime session of its own. Raises BundleError when the directory is not a bundle."""

    def __init__(self, directory: Path, threads: int = 0) -> None:
        self.manifest = load_manifest(directory)
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library_path()))
        options.intra_op_num_threads = threads
        # Threads that spin between runs would take the cores from the reference model.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(str(directory / MODEL_FILE), options, providers=["CPUExecutionProvider"])

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """float32 [T, vocab]: the logits after every token of one sequence."""
        count, block_size = len(ids), self.manifest.block_size
        blocks = -(-count // block_size)
        positions = np.arange(count, dtype=np.int32)
        feeds = {
            "input_ids": np.array(ids, np.int64),
            "positions": positions,
            "slot_mapping": positions,
            "cu_seqlens": np.array([0, count], np.int32),
            "past_lens": np.zeros(1, np.int32),
            "block_table": np.arange(blocks, dtype=np.int32)[None, :],
            "logit_rows": positions,
        }
        binding = self._session.io_binding()
        # Attention writes into the caches, so they are OrtValues of our own, never arrays that ORT may copy.
        for name, values in (feeds | self._scales(blocks)).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values))
        d = self.manifest.dimensions
        for layer in range(d.layers):
            for side in ("key", "value"):
                shape = [blocks, block_size, d.kv_heads, d.head_dim]
                cache = ort.OrtValue.ortvalue_from_shape_and_type(shape, _ELEMENT_TYPES[self.manifest.kv_dtype])
                binding.bind_ortvalue_input(f"{side}_cache.{layer}", cache)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        rows: NDArray[np.float32] = binding.get_outputs()[0].numpy()
        return rows

    def _scales(self, blocks: int) -> dict[str, NDArray[np.float32]]:
        """Scale pools of an int8 cache; none for the other dtypes."""
        if self.manifest.kv_dtype != "int8":
            return {}
        d = self.manifest.dimensions
        shape = (blocks, self.manifest.block_size, d.kv_heads)
        names = [f"{side}_scale.{layer}" for layer in range(d.layers) for side in ("key", "value")]
        return {name: np.zeros(shape, np.float32) for name in names}
