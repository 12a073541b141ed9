"""Bytes of single tokens, over both kinds of vocabulary."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cascade.token_table import TokenTable
from tests.gateway.support import bytes_to_characters


def byte_level() -> Tokenizer:
    vocab = {character: index for index, character in enumerate(bytes_to_characters())}
    vocab |= {"Ġt": 256, "th": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|é|>", special=True)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "é": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


BYTE_LEVEL, BYTE_TABLE = byte_level(), TokenTable(byte_level())
SENTENCE_PIECE, PIECE_TABLE = sentence_piece(), TokenTable(sentence_piece())


@given(st.text())
def test_byte_level_pieces_join_to_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text.replace("<|é|>", "")).ids
    assert b"".join(map(BYTE_TABLE.bytes_of, ids)).decode() == text.replace("<|é|>", "")


@given(st.text(alphabet="a é漢😀"))
def test_sentence_pieces_join_to_the_text(text: str) -> None:
    ids = SENTENCE_PIECE.encode(text).ids
    assert b"".join(map(PIECE_TABLE.bytes_of, ids)).decode() == text


def test_special_tokens_are_their_own_text() -> None:
    assert BYTE_TABLE.bytes_of(258) == "<|é|>".encode()


def test_an_id_past_the_vocabulary_is_empty() -> None:
    assert BYTE_TABLE.bytes_of(9999) == b""


def test_a_piece_of_a_character_shows_as_a_replacement() -> None:
    assert BYTE_TABLE.text_of(0xC3) == "\N{REPLACEMENT CHARACTER}"
