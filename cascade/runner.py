"""From "run these tokens of these sequences" to the ragged arrays of the graph (design, section 3) and back."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cascade.token_table import TokenTable

Int32 = NDArray[np.int32]
Logits = NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class Rows:
    """New tokens of one sequence: `tokens` at positions `start`, `start + 1`, ... in `block_table`'s blocks.

    Logits are wanted for the last `num_logits` of them.
    """

    tokens: Sequence[int]
    start: int
    block_table: "array[int]"
    num_logits: int


@dataclass(slots=True, frozen=True)
class RaggedBatch:
    """The graph's inputs; views into the runner's buffers, good until the next batch is built."""

    input_ids: NDArray[np.int64]
    positions: Int32
    slot_mapping: Int32
    cu_seqlens: Int32
    past_lens: Int32
    block_table: Int32
    logit_rows: Int32


class TierModel(Protocol):
    """One loaded model and its K/V pool: what the engine needs of `session.OrtSession`."""

    @property
    def name(self) -> str: ...
    @property
    def bundle_dir(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def context_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> list[int]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def token_table(self) -> TokenTable: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...

    def run(self, batch: RaggedBatch) -> Logits:
        """One forward pass; float32 logits [R, vocab], good until the next run."""
        ...


class Runner:
    """Builds batches for one model in buffers that are allocated once."""

    def __init__(self, model: TierModel, max_batch_tokens: int, max_sequences: int) -> None:
        self._model = model
        width = -(-model.context_length // model.block_size)
        self._input_ids = np.zeros(max_batch_tokens, np.int64)
        self._positions = np.zeros(max_batch_tokens, np.int32)
        self._slots = np.zeros(max_batch_tokens, np.int32)
        self._logit_rows = np.zeros(max_batch_tokens, np.int32)
        self._cu_seqlens = np.zeros(max_sequences + 1, np.int32)
        self._past_lens = np.zeros(max_sequences, np.int32)
        self._tables = np.zeros(max_sequences * width, np.int32)

    def run(self, rows: Sequence[Rows]) -> Logits:
        """Run all rows in one pass; logits [sum of num_logits, vocab] in the order of `rows`."""
        return self._model.run(self.build(rows))

    def build(self, rows: Sequence[Rows]) -> RaggedBatch:
        """The ragged arrays of one pass over `rows` (at least one, each with at least one token)."""
        size = self._model.block_size
        widths = [(row.start + len(row.tokens) + size - 1) // size for row in rows]
        tables = self._tables[: len(rows) * max(widths)].reshape(len(rows), max(widths))
        tables.fill(-1)
        t = r = 0
        for index, row in enumerate(rows):
            count = len(row.tokens)
            end = t + count
            tables[index, : widths[index]] = row.block_table[: widths[index]]
            self._input_ids[t:end] = row.tokens
            if count == 1:
                self._positions[t] = row.start
                self._slots[t] = row.block_table[row.start // size] * size + row.start % size
            else:
                positions = np.arange(row.start, row.start + count, dtype=np.int32)
                self._positions[t:end] = positions
                self._slots[t:end] = tables[index, positions // size] * size + positions % size
            if row.num_logits:
                self._logit_rows[r : r + row.num_logits] = np.arange(end - row.num_logits, end, dtype=np.int32)
                r += row.num_logits
            self._past_lens[index] = row.start
            self._cu_seqlens[index + 1] = end
            t = end
        return RaggedBatch(
            self._input_ids[:t],
            self._positions[:t],
            self._slots[:t],
            self._cu_seqlens[: len(rows) + 1],
            self._past_lens[: len(rows)],
            tables,
            self._logit_rows[:r],
        )
