"""Speed of one bundle below the scheduler: forward passes with their greedy choice, and nothing else.

- `decode_B` (tok/s): B sequences, one token each a pass, 128 tokens of context at the start.
- `prefill_512` (tok/s): one prompt of 512 tokens in one pass.
- `verify_N` (x): a pass over N new tokens of one sequence with logits for all, as a multiple of `decode_1`'s pass.

Every figure is a median over passes, after one that does not count.
"""

import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cascade.bundle import load_manifest
from cascade.config import EngineConfig, TierConfig
from cascade.runner import Rows, Runner
from cascade.session import OrtSession, default_threads
from gateway.cli.report import Report, report, row

CONTEXT = 128
DECODE_SEQUENCES = (1, 4, 16)
VERIFY_TOKENS = (8, 16)
PREFILL_TOKENS = 512
MAX_PASSES = 128
"""Passes of one figure: contexts grow by a token each, so no more than this many."""
SEED = 20


def measure_engine(bundle: Path, *, threads: int | None = None, seconds: float = 3.0) -> Report:
    """Run all rows on one bundle; at least `seconds` or MAX_PASSES passes each. Raises BundleError."""
    manifest = load_manifest(bundle)
    bench = _EngineBench(bundle, threads or default_threads(), seconds)
    rows = []
    single = bench.decode_pass_s(1)
    rows.append(row("decode_1", "tok/s", 1 / single))
    rows += [row(f"decode_{n}", "tok/s", n / bench.decode_pass_s(n)) for n in DECODE_SEQUENCES[1:]]
    rows.append(row(f"prefill_{PREFILL_TOKENS}", "tok/s", PREFILL_TOKENS / bench.prefill_pass_s(PREFILL_TOKENS)))
    rows += [row(f"verify_{n}", "x", bench.verify_pass_s(n) / single) for n in VERIFY_TOKENS]
    return report("engine", f"{manifest.name} {manifest.recipe} {manifest.fingerprint[:12]}", rows)


class _EngineBench:
    """One session with room for the widest row; sequence i owns a fixed range of blocks."""

    def __init__(self, bundle: Path, threads: int, seconds: float) -> None:
        manifest = load_manifest(bundle)
        self._tokens_each = max(CONTEXT + MAX_PASSES, PREFILL_TOKENS, CONTEXT + max(VERIFY_TOKENS))
        self._blocks_each = -(-self._tokens_each // manifest.block_size)
        sequences = max(DECODE_SEQUENCES)
        config = EngineConfig(
            tiers=[TierConfig(name="bench", bundle_dir=str(bundle), kv_blocks=sequences * self._blocks_each)],
            threads=threads,
            max_batch_tokens=max(PREFILL_TOKENS, 2 * sequences),
            max_sequences=sequences,
        )
        session = OrtSession(config.tiers[0], manifest, sequences * self._blocks_each, threads)
        self._runner = Runner(session, config.max_batch_tokens, sequences)
        self._seconds = seconds
        # Which tokens does not matter to the cost; ids below 256 exist in every vocabulary.
        self._ids = np.random.default_rng(SEED).integers(0, 256, self._tokens_each).tolist()
        for sequence in range(sequences):
            self._run([self._rows(sequence, 0, CONTEXT, 0)])

    def decode_pass_s(self, sequences: int) -> float:
        """Median seconds of a pass that gives each of `sequences` its next token."""

        def one_pass(index: int) -> None:
            self._run([self._rows(sequence, CONTEXT + index, 1, 1) for sequence in range(sequences)])

        return self._median(one_pass)

    def prefill_pass_s(self, tokens: int) -> float:
        """Median seconds of a pass over a whole prompt with the logits of its last token."""
        median = self._median(lambda _: self._run([self._rows(0, 0, tokens, 1)]))
        self._run([self._rows(0, 0, CONTEXT, 0)])
        return median

    def verify_pass_s(self, tokens: int) -> float:
        """Median seconds of a pass over `tokens` new tokens with logits for all."""
        return self._median(lambda _: self._run([self._rows(0, CONTEXT, tokens, tokens)]))

    def _rows(self, sequence: int, start: int, count: int, num_logits: int) -> Rows:
        first = sequence * self._blocks_each
        table = array("i", range(first, first + self._blocks_each))
        return Rows(self._ids[start : start + count], start, table, num_logits)

    def _run(self, rows: list[Rows]) -> None:
        logits = self._runner.run(rows)
        if len(logits):
            logits.argmax(axis=1)

    def _median(self, one_pass: Callable[[int], None]) -> float:
        one_pass(0)
        times: list[float] = []
        while len(times) < MAX_PASSES and (sum(times) < self._seconds or len(times) < 3):
            start = time.perf_counter()
            one_pass(len(times))
            times.append(time.perf_counter() - start)
        return statistics.median(times)
