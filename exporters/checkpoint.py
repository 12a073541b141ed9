"""The common view of a source model, whatever file it came from: GGUF or a Hugging Face directory."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cascade.bundle import Dimensions, Source, sha256_file
from cascade.errors import CheckpointError
from exporters.gguf.blocks import FLOAT_TYPES, Blocks, decode_blocks, dequantize

Architecture = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named weight, still in its file (memory-mapped); nothing is read before it is asked for."""

    name: str
    """Canonical name, such as `layers.3.gate`."""
    shape: tuple[int, int] | tuple[int]
    """(N, K): N output rows of K inputs, torch's Linear order; or (N,) for a vector."""
    type: str
    """A key of `exporters.gguf.blocks.LAYOUTS`."""
    data: NDArray[np.uint8] = field(repr=False)
    """uint8 [N, row_bytes]; a vector has one element a row."""

    def raw(self, rows: slice = ALL_ROWS) -> NDArray[np.uint8]:
        """The file's bytes of these rows: a view, no copy."""
        return self.data[rows]

    def dequantize(self, rows: slice = ALL_ROWS) -> NDArray[np.float32]:
        """float32 [N, K] (or [N]) of these rows. Raises CheckpointError where a number is not finite."""
        values = dequantize(self.type, self.data[rows])
        # A finite sum proves all finite at half the memory of a mask; an overflowing one is looked at closely.
        if not np.isfinite(values.sum(dtype=np.float64)) and not np.isfinite(values).all():
            raise CheckpointError(f"tensor {self.name} ({self.type}): holds a value that is not a finite number")
        return values.reshape(-1) if len(self.shape) == 1 else values

    def blocks(self, rows: slice = ALL_ROWS) -> Blocks:
        """Codes and scales of these rows of a quantized tensor, exactly as in the file.

        Raises CheckpointError for a float type and where a scale is not finite.
        """
        if self.type in FLOAT_TYPES:
            raise CheckpointError(f"tensor {self.name}: type {self.type} has no blocks")
        blocks = decode_blocks(self.type, self.data[rows])
        for part in (blocks.scale, blocks.minimum):
            if part is not None and not np.isfinite(part).all():
                raise CheckpointError(f"tensor {self.name} ({self.type}): holds a scale that is not a finite number")
        return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: angle = position * inv_freq; cos and sin are multiplied by `attention_factor`."""

    theta: float
    dim: int
    """Rotated elements of a head; always the head's size here."""
    interleaved: bool
    """True: pairs are (2i, 2i+1), as llama GGUF stores q and k. False: (i, i + dim/2)."""
    scaling: dict[str, Any] | None = None
    """None, or `type` (linear, yarn, llama3, factors) with numbers under Hugging Face's names."""
    factors: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    """float32 [dim/2], type `factors` only: GGUF's `rope_freqs.weight`, the divisors of the frequencies."""

    def inv_freq(self) -> NDArray[np.float32]:
        """float32 [dim/2]: radians per position, scaling applied."""
        plain: NDArray[np.float64] = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        scaling = self.scaling or {"type": "none"}
        kind = scaling["type"]
        if kind == "none":
            scaled = plain
        elif kind == "linear":
            scaled = plain / float(scaling["factor"])
        elif kind == "yarn":
            scaled = self._yarn(plain, scaling)
        elif kind == "llama3":
            scaled = _llama3(plain, scaling)
        elif kind == "factors" and self.factors is not None:
            scaled = plain / self.factors
        else:
            raise CheckpointError(f"rope scaling type {kind!r} is not supported (none, linear, yarn, llama3)")
        return scaled.astype(np.float32)

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin: 1 but for yarn."""
        scaling = self.scaling or {}
        if scaling.get("type") != "yarn":
            return 1.0
        if scaling.get("attention_factor") is not None:
            return float(scaling["attention_factor"])
        factor = scaling["factor"]
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            return _mscale(factor, scaling["mscale"]) / _mscale(factor, scaling["mscale_all_dim"])
        return _mscale(factor, 1.0)

    def _yarn(self, plain: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
        """High frequencies stay, low ones are divided by the factor, those between are blended (arXiv 2309.00071)."""

        def turns_at(rotations: float) -> float:
            length = scaling["original_max_position_embeddings"]
            return self.dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(turns_at(scaling.get("beta_fast", 32.0))), 0)
        high = min(math.ceil(turns_at(scaling.get("beta_slow", 1.0))), self.dim - 1)
        ramp: NDArray[np.float64] = np.clip((np.arange(self.dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return plain * (1 - ramp) + plain / float(scaling["factor"]) * ramp


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1: wavelengths above the old context over `low_freq_factor` are stretched, blended below it."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep: NDArray[np.float64] = np.clip((turns - low) / (high - low), 0, 1)
    return plain * keep + plain / float(scaling["factor"]) * (1 - keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A decoder-only transformer with everything that an export needs. Tensors stay in their files.

    Canonical names: `embed`, `final_norm`, `head` (absent when tied to `embed`), and for each layer i
    `layers.{i}.` with `attn_norm`, `q`, `k`, `v`, `o`, `ffn_norm`, `gate`, `up`, `down`; where the model has
    them also `q_bias`, `k_bias`, `v_bias`, `q_norm`, `k_norm`. Shapes have been checked against `dimensions`.
    """

    architecture: Architecture
    dimensions: Dimensions
    rms_epsilon: float
    rope: RopeSpec
    tensors: dict[str, Tensor] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    chat_template: str | None = field(repr=False)
    bos_id: int | None
    eos_ids: list[int]
    """Ids that end an answer: end of text, and end of turn where the vocabulary has one."""
    add_bos: bool
    name: str
    licence: str
    files: tuple[Path, ...]
    """The weight files."""

    @property
    def tied(self) -> bool:
        """True when the head is the embedding."""
        return "head" not in self.tensors

    def source(self, origin: str = "local") -> Source:
        """Where the weights came from. Reads every weight file once for its sha256."""
        digests = [sha256_file(path) for path in self.files]
        whole = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        return Source(origin=origin, file=self.files[0].name, sha256=whole, licence=self.licence)


def expected_shapes(
    dimensions: Dimensions, *, attention_bias: bool, head_norms: bool, tied: bool
) -> dict[str, tuple[int, int] | tuple[int]]:
    """Canonical name -> shape of every tensor that such a model has."""
    d = dimensions
    shapes: dict[str, tuple[int, int] | tuple[int]] = {"embed": (d.vocab, d.hidden), "final_norm": (d.hidden,)}
    if not tied:
        shapes["head"] = (d.vocab, d.hidden)
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    for i in range(d.layers):
        layer: dict[str, tuple[int, int] | tuple[int]] = {
            "attn_norm": (d.hidden,),
            "q": (q, d.hidden),
            "k": (kv, d.hidden),
            "v": (kv, d.hidden),
            "o": (d.hidden, q),
            "ffn_norm": (d.hidden,),
            "gate": (d.ffn, d.hidden),
            "up": (d.ffn, d.hidden),
            "down": (d.hidden, d.ffn),
        }
        if attention_bias:
            layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if head_norms:
            layer |= {"q_norm": (d.head_dim,), "k_norm": (d.head_dim,)}
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    return shapes


def check_tensors(where: Path, tensors: dict[str, Tensor], expected: dict[str, tuple[int, int] | tuple[int]]) -> None:
    """Raise CheckpointError for the first tensor that is missing, unexpected or of another shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{where}: tensor {name} is missing")
        if tensors[name].shape != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {tensors[name].shape}, the model needs {shape}")
    for name in tensors:
        if name not in expected:
            raise CheckpointError(f"{where}: tensor {name} has no place in this architecture")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a Hugging Face directory. Raises CheckpointError saying what is wrong with it."""
    # Imported here because both build on this module's types.
    from exporters.gguf.model import open_gguf
    from exporters.hf import open_hf

    if path.is_dir():
        return open_hf(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or directory")
    return open_gguf(path)
