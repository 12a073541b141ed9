"""One sequence's choices: the sampler applied to its settings, its history and its own random numbers.

Every random number is keyed by (seed, output position, stream): it does not depend on batches, chunks, caches
or on how many numbers were drawn before.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cascade import sampler
from cascade.protocol import Token, TokenFate
from cascade.sequence import Sequence
from cascade.speculation import Distribution, draw

Row = NDArray[np.float32]
"""Logits [vocab]."""


class Stream(IntEnum):
    """What a random number is for; each purpose has its own sequence of numbers."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
