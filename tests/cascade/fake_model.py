"""A deterministic model behind the session's seam: its K/V pool is real, its "network" is a hash.

Each slot of the pool stores the token that was written there. The logits of a row are a function of all tokens
that the row's block table leads to, so a wrong slot, table, length or stale block changes the output.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from cascade.runner import Logits, RaggedBatch
from cascade.token_table import TokenTable

VOCAB = 48
EOS = 47


def letters() -> Tokenizer:
    """Token i is the i-th character from "A" on; EOS is special."""
    vocab = {chr(65 + i): i for i in range(VOCAB - 1)} | {"<eos>": EOS}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="A"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


class FakeModel:
    """`agreement` is how often (0 to 1) the likeliest token equals that of every other fake model."""

    def __init__(
        self, name: str, *, num_blocks: int = 64, block_size: int = 4, agreement: float = 1.0, context: int = 256
    ) -> None:
        self.name = name
        self.bundle_dir = "/nowhere"
        self.fingerprint = f"fake-{name}"
        self.context_length = context
        self.vocab_size = VOCAB
        self.eos_ids = [EOS]
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tokenizer = letters()
        self.token_table = TokenTable(self.tokenizer)
        self.agreement = agreement
        self.pool = np.full(num_blocks * block_size, -1, np.int64)
        self.batches: list[list[int]] = []
        """New-token counts of every run's sequences."""
        self.poison: int | None = None
        """A run that sees this token raises."""
        self.nan_after: int | None = None
        """Logits after this token are NaN."""
        self._logits = np.empty((512, VOCAB), np.float32)

    def run(self, batch: RaggedBatch) -> Logits:
        self.batches.append(np.diff(batch.cu_seqlens).tolist())
        if self.poison is not None and self.poison in batch.input_ids:
            raise RuntimeError(f"poisoned token {self.poison}")
        assert (batch.slot_mapping >= 0).all() and (batch.slot_mapping < len(self.pool)).all()
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping), "two tokens in one slot"
        self.pool[batch.slot_mapping] = batch.input_ids
        wanted = {int(t): r for r, t in enumerate(batch.logit_rows)}
        for index in range(len(batch.past_lens)):
            start, end = batch.cu_seqlens[index : index + 2]
            past = int(batch.past_lens[index])
            assert batch.positions[start:end].tolist() == list(range(past, past + end - start))
            context = self._read(batch.block_table[index], past + int(end - start))
            for t in range(start, end):
                if t in wanted:
                    self._logits[wanted[t]] = self.logits(context[: past + t - start + 1])
        return self._logits[: len(wanted)]

    def _read(self, table: NDArray[np.int32], length: int) -> NDArray[np.int64]:
        slots = table[:, None] * self.block_size + np.arange(self.block_size)
        return self.pool[slots.ravel()[:length]]

    def logits(self, context: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits after `context`; EOS is unlikely."""
        state = 0
        for token in context:
            state = (state * 1_000_003 + int(token) + 1) % (1 << 61)
        shared = np.random.default_rng(state)
        logits = shared.normal(size=VOCAB).astype(np.float32) * 2
        own = np.random.default_rng([state, *self.name.encode()])
        if own.random() >= self.agreement:
            logits = own.normal(size=VOCAB).astype(np.float32) * 2
        else:
            logits += own.normal(size=VOCAB).astype(np.float32) * np.float32(0.2)
        logits[EOS] = -4
        if context[-1] == self.nan_after:
            logits[3] = np.nan
        return logits
