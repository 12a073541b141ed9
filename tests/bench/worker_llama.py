"""llama.cpp's side of `stepwell bench peers`: one `llama_decode` a pass, on its default settings.

`python -m tests.bench.worker_llama SOURCE GGUF THREADS SEQUENCES [BACKEND...]`. SOURCE is the directory of
node-llama-cpp's libraries, or `llama-cpp-python`: the package of that name in the Python that runs this. With 0
sequences, only what a one-token pass needs is set up. What it imports of the project needs no packages, so that it
runs in a peer's environment.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.llama_abi import open_library
from tests.bench.worker import (
    CONTEXT,
    LONG_CONTEXT,
    MAX_SEQUENCES,
    MAX_VERIFY,
    PREFILL_TOKENS,
    SEED,
    ContestantError,
    Pass,
    serve,
)

TOKENS_EACH = max(PREFILL_TOKENS, CONTEXT + MAX_VERIFY)


class LlamaCpp:
    """A model and one context at a time: for many short sequences, or for the long one."""

    def __init__(self, source: str, gguf: Path, threads: int, sequences: int, backends: Sequence[str]) -> None:
        self._llama, self.name = _open(source, backends)
        self._threads = threads
        self._model = self._llama.llama_model_load_from_file(
            str(gguf).encode(), self._llama.llama_model_default_params()
        )
        if not self._model:
            raise ContestantError(f"cannot load {gguf}")
        self._vocab = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))
        self._batch = self._llama.llama_batch_init(PREFILL_TOKENS, 0, 1)
        self._ids = np.random.default_rng(SEED).integers(0, 256, LONG_CONTEXT + 1).tolist()
        self._context: Any = None
        self._sequences = max(1, sequences)
        self._is_long = False
        self._open_short(TOKENS_EACH if sequences else 2 * CONTEXT)

    def one_pass(self, wanted: Pass) -> float:
        """Tokens of earlier passes are removed before the clock starts."""
        kind, size = wanted
        self._switch(long=kind == "decode_at")
        match kind:
            case "decode":
                self._keep(CONTEXT, size)
                return self._run([(sequence, CONTEXT, 1) for sequence in range(size)], size)
            case "verify":
                self._keep(CONTEXT, 1)
                return self._run([(0, CONTEXT, size)], size)
            case "prefill":
                self._keep(0, 1)
                return self._run([(0, 0, size)], 1)
            case "decode_at":
                self._keep(size, 1)
                return self._run([(0, size, 1)], 1)

    def _switch(self, *, long: bool) -> None:
        if long and not self._is_long:
            self._open_context(1, LONG_CONTEXT + CONTEXT)
            for start in range(0, LONG_CONTEXT, PREFILL_TOKENS):
                self._run([(0, start, min(PREFILL_TOKENS, LONG_CONTEXT - start))], 0)
        elif self._is_long and not long:
            self._open_short(TOKENS_EACH)
        self._is_long = long

    def _open_short(self, tokens_each: int) -> None:
        self._open_context(self._sequences, tokens_each)
        self._run([(0, 0, CONTEXT)], 0)
        for sequence in range(1, self._sequences):
            self._llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _open_context(self, sequences: int, tokens_each: int) -> None:
        if self._context:
            self._llama.llama_free(self._context)
        params = self._llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * tokens_each, sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.n_outputs_max = params.n_outputs_max_per_seq = MAX_VERIFY
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise ContestantError("no context: not enough memory?")
        self._memory = self._llama.llama_get_memory(self._context)

    def _keep(self, tokens: int, sequences: int) -> None:
        for sequence in range(sequences):
            self._llama.llama_memory_seq_rm(self._memory, sequence, tokens, -1)

    def _run(self, rows: list[tuple[int, int, int]], logits: int) -> float:
        """One pass over (sequence, first position, tokens); the last `logits` rows give logits."""
        batch = self._batch
        flat = [(sequence, start + i) for sequence, start, count in rows for i in range(count)]
        for i, (sequence, position) in enumerate(flat):
            batch.token[i], batch.pos[i] = self._ids[position], position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i >= len(flat) - logits
        batch.n_tokens = len(flat)
        start_time = time.perf_counter()
        status = self._llama.llama_decode(self._context, batch)
        if status:
            raise ContestantError(f"llama_decode ended with status {status}")
        if logits:
            found = self._llama.llama_get_logits(self._context)
            np.ctypeslib.as_array(found, (logits, self._vocab)).argmax(axis=1)
        return time.perf_counter() - start_time


def _open(source: str, backends: Sequence[str]) -> tuple[Any, str]:
    """Something with llama.cpp's functions as attributes, and what it is."""
    if source != "llama-cpp-python":
        library, backend = open_library(Path(source), backends)
        package = json.loads((Path(source).parents[1] / "package.json").read_text())
        return library, f"llama.cpp (node-llama-cpp {package['version']}, {backend})"
    import llama_cpp  # type: ignore[import-not-found] # in a peer's environment only

    return llama_cpp, f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"


def make(source: str, gguf: str, threads: str, sequences: str, *backends: str) -> LlamaCpp:
    """From the command line."""
    assert int(sequences) <= MAX_SEQUENCES
    return LlamaCpp(source, Path(gguf), int(threads), int(sequences), backends)


if __name__ == "__main__":
    serve(lambda: make(*sys.argv[1:]))
