"""Stepwell's own side of `stepwell bench peers`: the runner and its session, below the scheduler.

`python -m tests.bench.worker_stepwell BUNDLE THREADS SEQUENCES`: with 0 sequences, only what a one-token pass needs
is set up (to see the memory of a loaded bundle without the benchmark's K/V pool).
"""

import sys
import time
from array import array
from pathlib import Path

import numpy as np

from cascade import ops
from cascade.bundle import load_manifest
from cascade.config import EngineConfig, TierConfig
from cascade.errors import StepwellError
from cascade.runner import Rows, Runner
from cascade.session import OrtSession
from tests.bench.worker import (
    CONTEXT,
    LONG_CONTEXT,
    MAX_VERIFY,
    PREFILL_TOKENS,
    SEED,
    ContestantError,
    Pass,
    serve,
)

TOKENS_EACH = max(PREFILL_TOKENS, CONTEXT + MAX_VERIFY)


class Stepwell:
    """One session; sequence i owns a fixed range of blocks, the last one has room for the long context."""

    def __init__(self, bundle: Path, threads: int, sequences: int) -> None:
        manifest = load_manifest(bundle)
        self.name = f"{manifest.recipe} on {ops.isa()}"
        self._blocks_each = -(-TOKENS_EACH // manifest.block_size)
        self._long = max(1, sequences)
        blocks = self._blocks_each * self._long
        if sequences:
            blocks += -(-(LONG_CONTEXT + 1) // manifest.block_size)
        tier = TierConfig(name="bench", bundle_dir=str(bundle), kv_blocks=blocks)
        config = EngineConfig(
            tiers=[tier], threads=threads, max_batch_tokens=PREFILL_TOKENS, max_sequences=self._long + 1
        )
        session = OrtSession(tier, manifest, blocks, threads)
        self._runner = Runner(session, config.max_batch_tokens, config.max_sequences)
        self._blocks = blocks
        self._ids = np.random.default_rng(SEED).integers(0, 256, LONG_CONTEXT + 1).tolist()
        self._long_is_filled = False
        for sequence in range(self._long):
            self._run([self._rows(sequence, 0, CONTEXT, 0)])

    def one_pass(self, wanted: Pass) -> float:
        """A pass writes K/V after the tokens that later passes read; a prefill writes what was there before."""
        kind, size = wanted
        match kind:
            case "decode":
                return self._run([self._rows(sequence, CONTEXT, 1, 1) for sequence in range(size)])
            case "verify":
                return self._run([self._rows(0, CONTEXT, size, size)])
            case "prefill":
                return self._run([self._rows(0, 0, size, 1)])
            case "decode_at":
                self._fill_long()
                return self._run([self._rows(self._long, size, 1, 1)])

    def _fill_long(self) -> None:
        if not self._long_is_filled:
            for start in range(0, LONG_CONTEXT, PREFILL_TOKENS):
                self._run([self._rows(self._long, start, min(PREFILL_TOKENS, LONG_CONTEXT - start), 0)])
            self._long_is_filled = True

    def _rows(self, sequence: int, start: int, count: int, num_logits: int) -> Rows:
        first = sequence * self._blocks_each
        last = self._blocks if sequence == self._long else first + self._blocks_each
        return Rows(self._ids[start : start + count], start, array("i", range(first, last)), num_logits)

    def _run(self, rows: list[Rows]) -> float:
        start = time.perf_counter()
        logits = self._runner.run(rows)
        if len(logits):
            logits.argmax(axis=1)
        return time.perf_counter() - start


def make(bundle: str, threads: str, sequences: str) -> Stepwell:
    """From the command line."""
    try:
        return Stepwell(Path(bundle), int(threads), int(sequences))
    except StepwellError as error:
        raise ContestantError(str(error)) from error


if __name__ == "__main__":
    serve(lambda: make(*sys.argv[1:]))
