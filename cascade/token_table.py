"""The bytes of single tokens: what incremental detokenization adds up and log-probabilities are reported with."""

from functools import lru_cache

import tokenizers


@lru_cache(maxsize=1)
def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: the character that byte-level vocabularies write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenTable:
    """Token id -> bytes of its text, for byte-level and for SentencePiece-like (`▁`, `<0x0A>`) vocabularies."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        characters = _byte_characters()
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._byte_level = all(character in characters for token in vocabulary for character in token)
        self._strips = not self._byte_level and _strips_first_space(tokenizer, vocabulary)
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; special tokens give their own text, ids outside of the vocabulary nothing."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._compute(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        """Is this a control token, which has no text in an answer?"""
        return token_id in self._special

    @property
    def strips_first_space(self) -> bool:
        """Does a text's first space belong to the vocabulary's word marker and not to the text?"""
        return self._strips

    def text_of(self, token_id: int) -> str:
        """The token's text; where it is part of a character, the replacement character stands for it."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _compute(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            characters = _byte_characters()
            return bytes(characters[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def _strips_first_space(tokenizer: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Asked of the decoder itself: vocabularies with the marker but without a prefix (Gemma's) keep a first space."""
    spaced = next(((token, id_) for token, id_ in vocabulary.items() if token.startswith("\u2581")), None)
    return spaced is not None and tokenizer.decode([spaced[1]]) == spaced[0].replace("\u2581", " ")[1:]
