"""The ONNX Runtime session of one tier: graph, op library, K/V pool, and persistent I/O binding."""

import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
import psutil
from numpy.typing import NDArray

from cascade import ops
from cascade.bundle import MODEL_FILE, TOKENIZER_FILE, WEIGHTS_FILE, Manifest, load_manifest
from cascade.config import EngineConfig, TierConfig
from cascade.errors import BundleError
from cascade.runner import Logits, RaggedBatch
from cascade.text import load_tokenizer
from cascade.token_table import TokenTable
from cascade.weights import huge_pages_offered, load_weights

SPIN_MICROSECONDS = 100
"""How long a worker thread spins for the next parallel section before it sleeps.

Long enough to bridge the gaps between the nodes of one step, short enough that an idle engine costs nothing.
"""

_KV_TYPES = {
    "float16": (10, 2, "tensor(float16)"),
    "bfloat16": (16, 2, "tensor(bfloat16)"),
    "int8": (3, 1, "tensor(int8)"),
}
"""K/V dtype -> ONNX element type, bytes per element, ORT's type name."""

_RAGGED = ("input_ids", "positions", "slot_mapping", "cu_seqlens", "past_lens", "block_table", "logit_rows")


def default_threads() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes that can be used: the machine's available memory, or what is left of the cgroup's limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def kv_bytes_per_token(manifest: Manifest) -> int:
    """Bytes of K and V of one token over all layers, scales of an int8 pool included."""
    d = manifest.dimensions
    per_head = d.head_dim * _KV_TYPES[manifest.kv_dtype][1] + (4 if manifest.kv_dtype == "int8" else 0)
    return 2 * d.layers * d.kv_heads * per_head


def kv_blocks(config: EngineConfig, manifests: list[Manifest], available: int) -> list[int]:
    """Blocks of each tier's pool.

    The memory is shared so that every tier holds the same number of tokens, and none more than
    `max_sequences` full contexts. Without an explicit size, each holds at least one full context.
    """
    memory = available // 4 if config.kv_memory_bytes is None else config.kv_memory_bytes
    tokens = memory // sum(kv_bytes_per_token(m) for m in manifests)
    blocks = []
    for tier, manifest in zip(config.tiers, manifests, strict=True):
        context = -(-manifest.dimensions.context_length // manifest.block_size)
        count = min(tokens // manifest.block_size, config.max_sequences * context)
        if config.kv_memory_bytes is None:
            count = max(count, context)
        blocks.append(max(1, count) if tier.kv_blocks is None else tier.kv_blocks)
    return blocks


class OrtSession:
    """One tier's model. Raises BundleError when the graph does not fit the bundle's description.

    Ragged inputs are bound by address (the runner's buffers), the K/V pool as OrtValues that attention
    updates in place; nothing is copied or allocated per step but what ORT's arena holds already.
    """

    def __init__(self, tier: TierConfig, manifest: Manifest, num_blocks: int, threads: int) -> None:
        if tier.kv_dtype is not None and tier.kv_dtype != manifest.kv_dtype:
            raise BundleError(f"{tier.bundle_dir}: K/V is {manifest.kv_dtype}, the configuration says {tier.kv_dtype}")
        if manifest.flavour != "cpu":
            raise BundleError(f"{tier.bundle_dir}: flavour {manifest.flavour}; this engine runs cpu bundles")
        self.name = tier.name
        self.bundle_dir = tier.bundle_dir
        self.manifest = manifest
        self.fingerprint = manifest.fingerprint
        self.context_length = manifest.dimensions.context_length
        self.vocab_size = manifest.dimensions.vocab
        self.eos_ids = list(manifest.eos_ids)
        self.block_size = manifest.block_size
        self.tokenizer = load_tokenizer(Path(tier.bundle_dir) / TOKENIZER_FILE).tokenizer
        self.token_table = TokenTable(self.tokenizer)
        self.num_blocks = num_blocks
        self._weights = _weights_on_huge_pages(manifest, Path(tier.bundle_dir) / MODEL_FILE)
        self._session = _open(Path(tier.bundle_dir) / MODEL_FILE, threads, self._weights)
        self._check_graph()
        self._binding = self._session.io_binding()
        self._bind_pool()
        self._logits = np.empty((0, self.vocab_size), np.float32)

    def run(self, batch: RaggedBatch) -> Logits:
        """One forward pass; float32 logits [R, vocab], a view that the next run overwrites."""
        for name in _RAGGED:
            self._bind(name, getattr(batch, name))
        rows = batch.logit_rows.size
        if rows > len(self._logits):
            self._logits = np.empty((-(-rows // 16) * 16, self.vocab_size), np.float32)
        logits = self._logits[:rows]
        if rows:
            address = logits.ctypes.data
            self._binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, address)
        else:
            self._binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(self._binding)
        return logits

    def _bind(self, name: str, values: NDArray[np.generic]) -> None:
        self._binding.bind_input(name, "cpu", 0, values.dtype.type, values.shape, values.ctypes.data)

    def _bind_pool(self) -> None:
        d = self.manifest.dimensions
        shape = [self.num_blocks, self.block_size, d.kv_heads, d.head_dim]
        element_type = _KV_TYPES[self.manifest.kv_dtype][0]
        self._pool: list[ort.OrtValue] = []
        for layer in range(d.layers):
            for kind in ("key", "value"):
                self._bind_cache(f"{kind}_cache.{layer}", shape, element_type)
                if self.manifest.kv_dtype == "int8":
                    self._bind_cache(f"{kind}_scale.{layer}", shape[:3], 1)

    def _bind_cache(self, name: str, shape: list[int], element_type: int) -> None:
        value = ort.OrtValue.ortvalue_from_shape_and_type(shape, element_type)
        self._pool.append(value)
        self._binding.bind_ortvalue_input(name, value)

    def _check_graph(self) -> None:
        """Compare the graph's inputs and output with the manifest's dimensions."""
        d = self.manifest.dimensions
        expected: dict[str, tuple[str, list[int | None]]] = {
            name: (
                "tensor(int64)" if name == "input_ids" else "tensor(int32)",
                [None, None] if name == "block_table" else [None],
            )
            for name in _RAGGED
        }
        cache_type = _KV_TYPES[self.manifest.kv_dtype][2]
        for layer in range(d.layers):
            for kind in ("key", "value"):
                expected[f"{kind}_cache.{layer}"] = (cache_type, [None, self.block_size, d.kv_heads, d.head_dim])
                if self.manifest.kv_dtype == "int8":
                    expected[f"{kind}_scale.{layer}"] = ("tensor(float)", [None, self.block_size, d.kv_heads])
        inputs = {i.name: (i.type, i.shape) for i in self._session.get_inputs()}
        if inputs.keys() != expected.keys():
            missing, extra = sorted(expected.keys() - inputs.keys()), sorted(inputs.keys() - expected.keys())
            raise BundleError(f"{self.bundle_dir}: graph inputs missing: {missing}, unexpected: {extra}")
        outputs = {o.name: (o.type, o.shape) for o in self._session.get_outputs()}
        if "logits" not in outputs:
            raise BundleError(f"{self.bundle_dir}: graph has no output `logits`, only {sorted(outputs)}")
        expected["logits"] = ("tensor(float)", [None, d.vocab])
        for name, (dtype, shape) in expected.items():
            found_type, found_shape = {**inputs, **outputs}[name]
            fits = len(found_shape) == len(shape) and all(
                want is None or not isinstance(got, int) or got == want
                for got, want in zip(found_shape, shape, strict=True)
            )
            if found_type != dtype or not fits:
                raise BundleError(
                    f"{self.bundle_dir}: graph `{name}` is {found_type} {found_shape}, "
                    f"the manifest says {dtype} {shape}"
                )


def _weights_on_huge_pages(manifest: Manifest, model: Path) -> dict[str, ort.OrtValue]:
    """The weights to hand to ONNX Runtime; none when it shall map the file (see `cascade.weights`)."""
    size = manifest.files[WEIGHTS_FILE].size
    # Half of what is free: K/V takes a quarter, and the other tiers want theirs.
    if not huge_pages_offered() or size > available_memory() // 2:
        return {}
    return load_weights(model)


def _open(model: Path, threads: int, weights: dict[str, ort.OrtValue]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    for name, value in weights.items():
        options.add_initializer(name, value)
    options.register_custom_ops_library(str(ops.library_path()))
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    try:
        # Without the fallback ORT tries the same provider again and prints to stdout.
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:  # ORT raises many unrelated types for a bad model
        raise BundleError(f"{model}: {error}") from error


def load_tiers(config: EngineConfig) -> list[OrtSession]:
    """Check the bundles, size their pools and open their sessions, in the order of the configuration."""
    manifests = [load_manifest(Path(tier.bundle_dir)) for tier in config.tiers]
    blocks = kv_blocks(config, manifests, available_memory())
    threads = config.threads or default_threads()
    return [
        OrtSession(tier, manifest, count, threads)
        for tier, manifest, count in zip(config.tiers, manifests, blocks, strict=True)
    ]
