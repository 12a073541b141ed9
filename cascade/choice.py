"""One sequence's choices: the sampler applied to its settings, its history and its own random numbers.

Every random number is keyed by (seed, output position, stream): it does not depend on batches, chunks, caches
or on how many numbers were drawn before.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from enum import IntEnum

import numpy as np

from cascade import sampler
from cascade.protocol import Token, TokenFate
from cascade.sampler import Probabilities, Row
from cascade.sequence import Sequence


class Stream(IntEnum):
    """What a random number is for; each purpose has its own sequence of numbers."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


class Chooser:
    """Chooses for one sequence. `ahead` are tokens drafted or accepted before the row but not yet committed."""

    def __init__(self, sequence: Sequence, eos_ids: Items[int]) -> None:
        self._sequence = sequence
        self._params = sequence.request.sampling
        self._history = sampler.SequenceHistory(sequence.request.prompt_ids)
        self._ending = np.array(sorted({*eos_ids, *self._params.stop_token_ids}), np.int64)

    def advance(self, tokens: Iterable[int]) -> None:
        """Tokens were committed: penalties count them from now on."""
        for token in tokens:
            self._history.append(token)

    def greedy(self, logits: Row, best: int, ahead: Items[int]) -> int:
        """The likeliest token after bias and penalties; `best` is the argmax of the raw row."""
        if not self._shaped() and not self._too_early(ahead):
            return best
        return sampler.greedy(self._masked(logits, ahead), self._params, self._seen(ahead))

    def distribution(self, logits: Row, ahead: Items[int]) -> Probabilities:
        """The request's distribution [vocab] after all of its settings, drafter's or verifier's alike."""
        return sampler.distribution(self._masked(logits, ahead), self._params, self._seen(ahead))

    def draw(self, probs: Probabilities, stream: Stream, ahead: Items[int]) -> int:
        """Sample from `probs` with the random number of the position after `ahead`."""
        return sampler.sample(probs, self.uniform(stream, len(ahead)))

    def uniform(self, stream: Stream, ahead: int) -> float:
        """The random number in [0, 1) of the output position `ahead` tokens past the committed ones."""
        return sampler.uniform(self._params.seed, self._sequence.num_generated + ahead, stream)

    def describe(self, token: int, tier: str, fate: TokenFate, logits: Row, ahead: Items[int]) -> Token:
        """The token as it is sent, with log-probabilities where the request wants them."""
        if self._params.logprobs is None:
            return Token(token, tier, fate)
        logprob, top = sampler.logprobs(
            self._masked(logits, ahead), self._params, self._seen(ahead), token, self._params.logprobs
        )
        return Token(token, tier, fate, logprob, top)

    def _shaped(self) -> bool:
        p = self._params
        return bool(p.logit_bias or p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty)

    def _seen(self, ahead: Items[int]) -> sampler.SequenceHistory:
        if not ahead:
            return self._history
        history = self._history.copy()
        for token in ahead:
            history.append(token)
        return history

    def _too_early(self, ahead: Items[int]) -> bool:
        """Is this position before `min_tokens`, where no token may end the answer?"""
        return self._sequence.num_generated + len(ahead) < self._params.min_tokens

    def _masked(self, logits: Row, ahead: Items[int]) -> Row:
        if not self._too_early(ahead):
            return logits
        masked = logits.copy()
        masked[self._ending] = -np.inf
        return masked
