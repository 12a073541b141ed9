"""From logits to tokens: pure functions of a row, the request's settings and what the sequence holds so far.

Order: logit bias, repetition, presence and frequency penalties, temperature, top-k, top-p, min-p. Ties go to the
lowest token id. Random numbers are counter-based (BLAKE2b over seed, position and purpose), so they do not depend on
batching or on how many were drawn before.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cascade.errors import EngineFailedError
from cascade.protocol import SamplingParams, TokenLogprob

Row = NDArray[np.float32]
Probabilities = NDArray[np.float32]


class SequenceHistory:
    """Tokens that penalties look at: repetition over prompt and answer, presence and frequency over the answer."""

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._prompt = frozenset(prompt_ids)
        self._counts: Counter[int] = Counter()

    def append(self, token: int) -> None:
        """One more token of the answer."""
        self._counts[token] += 1

    def copy(self) -> "SequenceHistory":
        """An independent copy; the prompt's part is shared."""
        other = SequenceHistory()
        other._prompt = self._prompt
        other._counts = self._counts.copy()
        return other

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids of the answer's tokens and how often each came."""
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        return ids, np.fromiter(self._counts.values(), np.float32, len(self._counts))

    def seen(self) -> NDArray[np.int64]:
        """Ids that occur in the prompt or the answer."""
        ids = self._prompt | self._counts.keys()
        return np.fromiter(ids, np.int64, len(ids))


def uniform(seed: int, position: int, stream: int) -> float:
    """The number in [0, 1), with 53 bits, of one position and purpose of a request's seed (any Python int)."""
    key = struct.pack("<Qqq", seed & 0xFFFFFFFFFFFFFFFF, position, stream)
    word = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"stepwell").digest(), "little")
    return (word >> 11) * 2.0**-53


def shaped(logits: Row, params: SamplingParams, history: SequenceHistory) -> Row:
    """Logits [vocab] after bias and penalties; the same array when nothing applies.

    Raises EngineFailedError when the row holds NaN or +inf: the model broke down on this request.
    """
    peak = logits.max()
    if not np.isfinite(peak):
        raise EngineFailedError(f"the model gave logits without a finite maximum ({peak}) for this request")
    bias = params.logit_bias
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    if not bias and not penalised:
        return logits
    logits = logits.copy()
    if bias:
        logits[np.fromiter(bias.keys(), np.int64, len(bias))] += np.fromiter(bias.values(), np.float32, len(bias))
    if params.repetition_penalty != 1.0:
        ids = history.seen()
        values = logits[ids]
        penalty = np.float32(params.repetition_penalty)
        logits[ids] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = history.counts()
        logits[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
    return logits


def greedy(logits: Row, params: SamplingParams, history: SequenceHistory) -> int:
    """The likeliest token after bias and penalties; the lowest id among equals."""
    return int(shaped(logits, params, history).argmax())


def distribution(logits: Row, params: SamplingParams, history: SequenceHistory) -> Probabilities:
    """The distribution [vocab] that the request samples from, float32, summing to 1 up to rounding.

    Temperature 0 gives a one-hot row.
    """
    logits = shaped(logits, params, history)
    if params.temperature == 0.0:
        one_hot = np.zeros(len(logits), np.float32)
        one_hot[logits.argmax()] = 1.0
        return one_hot
    scaled = (logits - logits.max()) / np.float32(params.temperature)
    probs: Probabilities = np.exp(scaled, dtype=np.float32)
    if 0 < params.top_k < len(probs):
        _keep_top_k(probs, params.top_k)
    total = probs.sum(dtype=np.float64)
    if params.top_p < 1.0:
        _keep_top_p(probs, params.top_p * float(total))
    if params.min_p > 0.0:
        probs[probs < np.float32(params.min_p) * probs.max()] = 0.0
    if params.top_p < 1.0 or params.min_p > 0.0:
        total = probs.sum(dtype=np.float64)
    probs *= np.float32(1.0 / total)
    return probs


def _keep_top_k(probs: Probabilities, k: int) -> None:
    """Zero all but the k likeliest, in place; at the border the lowest ids stay."""
    border = np.partition(probs, len(probs) - k)[len(probs) - k]
    above = probs > border
    equal = np.flatnonzero(probs == border)[: k - int(above.sum())]
    keep = above
    keep[equal] = True
    probs[~keep] = 0.0


def _keep_top_p(probs: Probabilities, mass: float) -> None:
    """Zero all but the smallest set of likeliest tokens whose mass reaches `mass`, in place.

    Sorts only as many candidates as it takes: an unsorted tail of small probabilities is the usual case.
    """
    size = len(probs)
    count = min(64, size)
    while True:
        if count < size:
            border = np.partition(probs, size - count)[size - count]
            candidates = np.flatnonzero(probs >= border)
        else:
            candidates = np.arange(size)
        order = candidates[np.argsort(-probs[candidates], kind="stable")]
        cumulative = np.cumsum(probs[order], dtype=np.float64)
        if cumulative[-1] >= mass or count == size:
            break
        count = min(count * 16, size)
    kept = order[: int(np.searchsorted(cumulative, mass, side="left")) + 1]
    values = probs[kept]
    probs[:] = 0.0
    probs[kept] = values


def sample(probs: Probabilities, number: float) -> int:
    """Inverse-CDF sample for `number` in [0, 1), in float64; never an id of probability 0."""
    ids = np.flatnonzero(probs)
    cumulative = np.cumsum(probs[ids], dtype=np.float64)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def logprobs(
    logits: Row, params: SamplingParams, history: SequenceHistory, token: int, count: int
) -> tuple[float, list[TokenLogprob] | None]:
    """Natural-log probability of `token` and the `count` likeliest, after bias and penalties at temperature 1.

    The list is None when `count` is 0; it is in descending order, lower ids first among equals.
    """
    row = shaped(logits, params, history)
    peak = float(row.max())
    normaliser = peak + float(np.log(np.exp(row - np.float32(peak), dtype=np.float32).sum(dtype=np.float64)))
    own = float(row[token]) - normaliser
    if count == 0:
        return own, None
    count = min(count, len(row))
    border = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.flatnonzero(row >= border)
    best = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    return own, [TokenLogprob(int(i), float(row[i]) - normaliser) for i in best]
