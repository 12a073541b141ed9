"""onnxruntime-genai's side of `stepwell bench peers`: the same weights in 4 bits, as its model builder makes them.

`python -m tests.bench.worker_genai DIRECTORY THREADS SEQUENCES`. It gives logits of the last new token only, so that
its `verify` leaves out most of the head and is good for the plot alone; and it cannot go back in a batch, so that
contexts of `decode` grow from CONTEXT by at most GROWTH tokens. What it imports of the project needs no packages.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai  # type: ignore[import-not-found] # in a peer's environment only

from tests.bench.worker import CONTEXT, PREFILL_TOKENS, SEED, ContestantError, Pass, serve

GROWTH = 64
MAX_LENGTH = PREFILL_TOKENS + GROWTH


class Genai:
    """A model and one generator at a time."""

    def __init__(self, directory: Path, threads: int) -> None:
        config = genai.Config(str(directory))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.name = f"onnxruntime-genai {genai.__version__}, int4"
        self._model = genai.Model(config)
        self._ids = np.random.default_rng(SEED).integers(0, 256, MAX_LENGTH).astype(np.int32)
        self._generator: Any = None
        self._sequences = 0

    def one_pass(self, wanted: Pass) -> float:
        """A generator of another batch size is made before the clock starts."""
        kind, size = wanted
        match kind:
            case "decode":
                if self._sequences != size or self._generator.token_count() >= CONTEXT + GROWTH:
                    self._open(size)
                return _seconds(self._generator.generate_next_token)
            case "verify" | "prefill":
                self._open(1)
                self._generator.rewind_to(CONTEXT if kind == "verify" else 0)
                tokens = self._ids[CONTEXT : CONTEXT + size] if kind == "verify" else self._ids[:size]
                return _seconds(lambda: self._next(tokens))
            case "decode_at":
                raise ContestantError("onnxruntime-genai is not measured at long contexts")

    def _next(self, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
        self._generator.append_tokens(tokens)
        self._generator.generate_next_token()

    def _open(self, sequences: int) -> None:
        """CONTEXT tokens in each sequence, and the choice from their logits taken."""
        self._generator = None
        params = genai.GeneratorParams(self._model)
        params.set_search_options(max_length=MAX_LENGTH, min_length=MAX_LENGTH, batch_size=sequences, do_sample=False)
        self._generator, self._sequences = genai.Generator(self._model, params), sequences
        self._generator.append_tokens(np.tile(self._ids[:CONTEXT], (sequences, 1)))
        self._generator.generate_next_token()


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(lambda: Genai(Path(sys.argv[1]), int(sys.argv[2])))
