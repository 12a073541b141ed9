"""From logits to tokens: pure functions of a row, the request's settings and what the sequence holds so far.

Order: logit bias, repetition, presence and frequency penalties, temperature, top-k, top-p, min-p. Ties go to the
lowest token id. Random numbers are counter-based (BLAKE2b over seed, position and purpose), so they do not depend on
batching or on how many were drawn before.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cascade.errors import EngineFailedError
from cascade.protocol import SamplingParams, TokenLogprob

Row = NDArray[np.float32]
Probabilities = NDArray[np.float32]

MIN_TEMPERATURE = 1e-5
"""Below it only the likeliest tokens are left anyway, and float32 would overflow."""
LANES = 64
SPAN = 512
FEW = 64
"""Top-p looks at this many tokens first: a model that is sure of itself needs no more."""


class SequenceHistory:
    """Tokens that penalties look at: repetition over prompt and answer, presence and frequency over the answer."""

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._prompt = frozenset(prompt_ids)
        self._prompt_ids = np.fromiter(self._prompt, np.int64, len(self._prompt))
        self._counts: Counter[int] = Counter()
        self._new: list[int] = []
        """Ids of the answer that the prompt does not have."""

    def append(self, token: int) -> None:
        """One more token of the answer."""
        if token not in self._counts and token not in self._prompt:
            self._new.append(token)
        self._counts[token] += 1

    def copy(self) -> "SequenceHistory":
        """An independent copy; the prompt's part is shared."""
        other = SequenceHistory()
        other._prompt, other._prompt_ids = self._prompt, self._prompt_ids
        other._counts, other._new = self._counts.copy(), self._new.copy()
        return other

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids of the answer's tokens and how often each came."""
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        return ids, np.fromiter(self._counts.values(), np.float32, len(self._counts))

    def seen(self) -> NDArray[np.int64]:
        """Ids that occur in the prompt or the answer, each once."""
        return np.concatenate((self._prompt_ids, np.array(self._new, np.int64)))


def uniform(seed: int, position: int, stream: int) -> float:
    """The number in [0, 1), with 53 bits, of one position and purpose of a request's seed (any Python int)."""
    key = struct.pack("<Qqq", seed & 0xFFFFFFFFFFFFFFFF, position, stream)
    word = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"stepwell").digest(), "little")
    return (word >> 11) * 2.0**-53


def shaped(logits: Row, params: SamplingParams, history: SequenceHistory) -> Row:
    """Logits [vocab] after bias and penalties; the same array when nothing applies.

    Raises EngineFailedError when the row holds NaN or +inf (the model broke down on this request), or when bias
    and penalties are too extreme for float32.
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
        with np.errstate(all="ignore"):  # what overflows is found below
            logits[ids] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = history.counts()
        logits[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
    if not np.isfinite(peak := logits.max()):
        raise EngineFailedError(f"bias and penalties left logits without a finite maximum ({peak})")
    return logits


def greedy(logits: Row, params: SamplingParams, history: SequenceHistory) -> int:
    """The likeliest token after bias and penalties; the lowest id among equals."""
    return int(shaped(logits, params, history).argmax())


def distribution(logits: Row, params: SamplingParams, history: SequenceHistory) -> Probabilities:
    """The distribution [vocab] that the request samples from, float32, summing to 1 up to rounding.

    Temperature 0 gives a one-hot row. Raises EngineFailedError as `shaped` does.
    """
    logits = shaped(logits, params, history)
    if params.temperature == 0.0:
        one_hot = np.zeros(len(logits), np.float32)
        one_hot[logits.argmax()] = 1.0
        return one_hot
    scaled = (logits - logits.max()) / np.float32(max(params.temperature, MIN_TEMPERATURE))
    probs: Probabilities = np.exp(scaled, dtype=np.float32)
    ids: NDArray[np.int64] | None = None
    if 0 < params.top_k < len(probs):
        ids = _likeliest(logits, params.top_k)
    if params.top_p < 1.0:
        ids = _top_p(logits, probs, params.top_p) if ids is None else _reaching(ids, probs, params.top_p)
    if ids is not None:
        values = probs[ids]
        probs = np.zeros_like(probs)
        probs[ids] = values
    if params.min_p > 0.0:
        probs[probs < np.float32(params.min_p)] = 0.0  # the likeliest is exactly 1 here
    probs *= np.float32(1.0 / float(probs.sum(dtype=np.float64)))
    return probs


def _likeliest(row: Row, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest values, in descending order, lower ids first among equals; -inf is left out.

    A full partition of 152k values takes 1 ms. Instead: the maxima of `LANES`-element groups are `count` values
    that lie at least that high, so all candidates are at or above the count-th largest of the maxima.
    """
    size = len(row)
    groups = size // LANES
    source = row
    if 4 * count <= groups:
        source = row[: groups * LANES].reshape(LANES, groups).max(axis=0)
    count = min(count, size)
    floor = np.partition(source, len(source) - count)[len(source) - count]
    candidates = np.flatnonzero(row >= floor if np.isfinite(floor) else row > floor)
    best: NDArray[np.int64] = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    return best


def _reaching(ids: NDArray[np.int64], probs: Probabilities, share: float) -> NDArray[np.int64]:
    """The shortest beginning of `ids`, in descending order, that holds `share` of the ids' mass."""
    cumulative = np.cumsum(probs[ids], dtype=np.float64)
    return ids[: int(np.searchsorted(cumulative, share * cumulative[-1], side="left")) + 1]


def _top_p(logits: Row, probs: Probabilities, share: float) -> NDArray[np.int64]:
    """Ids of the smallest set of likeliest tokens that holds `share` of the mass; lowest ids among equals.

    Mostly a few tokens are enough. Where not, two histograms over the upper and the lower halves of the floats'
    bits (which order as the values do) find the smallest value that is kept, without sorting the vocabulary.
    """
    mass = share * float(probs.sum(dtype=np.float64))
    ids = _likeliest(logits, FEW)
    cumulative = np.cumsum(probs[ids], dtype=np.float64)
    if cumulative[-1] >= mass:
        return ids[: int(np.searchsorted(cumulative, mass, side="left")) + 1]
    bits = probs.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.int64)
    bucket, above = _border(upper, probs, mass, 0.0)
    inside = np.flatnonzero(upper == bucket)
    lower = (bits[inside] & np.uint32(0xFFFF)).astype(np.int64)
    bucket, above = _border(lower, probs[inside], mass, above)
    equal = inside[lower == bucket]
    value = probs[equal[0]]
    missing = math.ceil((mass - above) / float(value)) if value > 0 else 1
    return np.concatenate((np.flatnonzero(probs > value), equal[: max(1, missing)]))


def _border(keys: NDArray[np.int64], values: Probabilities, mass: float, above: float) -> tuple[int, float]:
    """The highest key down to which the values' sum, on top of `above`, reaches `mass`; and the sum above that key.

    When rounding keeps the sum just short of `mass`, the lowest key.
    """
    descending = np.bincount(keys, weights=values)[::-1]
    cumulative = above + np.cumsum(descending)
    index = min(int(np.searchsorted(cumulative, mass, side="left")), len(descending) - 1 - int(keys.min()))
    return len(descending) - 1 - index, float(cumulative[index - 1]) if index else above


def sample(probs: Probabilities, number: float) -> int:
    """Inverse-CDF sample for `number` in [0, 1), in float64; never an id of probability 0.

    Sums of `SPAN` ids first, then within one span: a running sum over the whole row would take 2 ms.
    """
    sums = np.add.reduceat(probs, np.arange(0, len(probs), SPAN), dtype=np.float64)
    cumulative = np.cumsum(sums)
    target = number * cumulative[-1]
    span = int(np.searchsorted(cumulative, target, side="right"))
    if span == len(sums):  # the product was rounded up to the whole
        span = int(np.flatnonzero(sums)[-1])
    start = span * SPAN
    before = cumulative[span - 1] if span else 0.0
    inner = before + np.cumsum(probs[start : start + SPAN], dtype=np.float64)
    index = int(np.searchsorted(inner, max(target, before), side="right"))
    if index == len(inner):  # the two sums were rounded differently
        index = int(np.flatnonzero(probs[start : start + SPAN])[-1])
    return start + index


def logprobs(
    logits: Row, params: SamplingParams, history: SequenceHistory, token: int, count: int
) -> tuple[float, list[TokenLogprob] | None]:
    """Natural-log probability of `token` and the `count` likeliest, after bias and penalties at temperature 1.

    The list is None when `count` is 0; it is in descending order, lower ids first among equals, without tokens
    that cannot come.
    """
    row = shaped(logits, params, history)
    peak = float(row.max())
    normaliser = peak + float(np.log(np.exp(row - np.float32(peak), dtype=np.float32).sum(dtype=np.float64)))
    own = float(row[token]) - normaliser
    if count == 0:
        return own, None
    return own, [TokenLogprob(int(i), float(row[i]) - normaliser) for i in _likeliest(row, count)]
