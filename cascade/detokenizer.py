"""Tokens to text as they come: never half a character, never a possible beginning of a stop string."""

import codecs
from collections.abc import Iterable, Sequence

from cascade.token_table import TokenTable


class Detokenizer:
    """One answer's text. Concatenated, what it releases is the decoded answer up to the first stop string.

    Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid part, as a decoder of the whole answer
    would do. Control tokens have no text. The work per token does not grow with the answer.
    """

    def __init__(self, table: TokenTable, stop: Sequence[str] = ()) -> None:
        self._table = table
        self._stops = [s for s in stop if s]
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        """Decoded text that may still be the beginning of a stop string."""
        self._strip = table.strips_first_space

    def push(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """Take tokens; returns the text they settle and the stop string that ended the answer, if one did.

        The stop string that is complete first counts (the longest among those that end together); neither it
        nor what follows is released.
        """
        data = b"".join(self._table.bytes_of(i) for i in token_ids if not self._table.is_special(i))
        return self._release(self._decoder.decode(data))

    def flush(self) -> str:
        """The rest of the text at the end of an answer: what was held back, an unfinished character as U+FFFD."""
        text, stop = self._release(self._decoder.decode(b"", final=True))
        if stop is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, text: str) -> tuple[str, str | None]:
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        if not self._stops:
            return text, None
        self._held += text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            _, at, stop = min(hits)
            released, self._held = self._held[:at], ""
            return released, stop
        keep = self._possible_beginning()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released, None

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that is a proper beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
