"""One request's answer as it grows: text, finish rules, counts. Turns chosen tokens into `TokenEvent`s."""

from collections.abc import Sequence as Items

from cascade.detokenizer import Detokenizer
from cascade.protocol import FinishReason, Token, TokenEvent, Usage
from cascade.sequence import Sequence


class Answer:
    """Owns the detokenizer and the end of one sequence."""

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer, eos_ids: Items[int]) -> None:
        sampling = sequence.request.sampling
        self.sequence = sequence
        self.finished = False
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._eos_ids = frozenset() if sampling.ignore_eos else frozenset(eos_ids)

    def extend(self, tokens: Items[Token]) -> TokenEvent:
        """Append the tokens of one step up to the first that ends the answer; the rest is dropped.

        An EOS or stop token is counted and listed but has no text.
        """
        sequence = self.sequence
        emitted: list[Token] = []
        text = ""
        for token in tokens:
            sequence.tokens.append(token.id)
            emitted.append(token)
            if token.id in self._eos_ids:
                return self._finish("stop", emitted, text + self._detokenizer.flush())
            if token.id in self._stop_ids:
                return self._finish("stop", emitted, text + self._detokenizer.flush(), stop_reason=token.id)
            piece, stop = self._detokenizer.push([token.id])
            text += piece
            if stop is not None:
                return self._finish("stop", emitted, text, stop_reason=stop)
            if sequence.remaining <= 0:
                return self._finish("length", emitted, text + self._detokenizer.flush())
        return TokenEvent(sequence.request_id, emitted, text)

    def end(self, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """End without a token: cancelled or failed. Text that was held back is released."""
        text = self._detokenizer.flush() if reason == "cancelled" else ""
        return self._finish(reason, [], text, error=error)

    def _finish(
        self,
        reason: FinishReason,
        tokens: list[Token],
        text: str,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        self.finished = True
        sequence = self.sequence
        usage = Usage(
            sequence.prompt_length,
            sequence.num_generated,
            sequence.cached_tokens,
            sequence.drafted_tokens,
            sequence.accepted_tokens,
        )
        return TokenEvent(sequence.request_id, tokens, text, reason, error, stop_reason, usage)
