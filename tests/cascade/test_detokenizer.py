"""Incremental text: whole characters, stop strings over tokens, nothing lost and nothing twice."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cascade.detokenizer import Detokenizer
from cascade.token_table import TokenTable
from exporters.checkpoint import open_checkpoint
from tests.conftest import model_file


@cache
def bytewise() -> Tokenizer:
    """A byte-level vocabulary of the 256 bytes, `ab`, and one control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)} | {"ab": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@cache
def ids_of_bytes() -> dict[int, int]:
    table = TokenTable(bytewise())
    return {table.bytes_of(i)[0]: i for i in range(256)}


def ids(data: bytes) -> list[int]:
    return [ids_of_bytes()[b] for b in data]


def stream(tokens: list[int], stop: list[str], sizes: list[int]) -> tuple[list[str], str | None]:
    """Push in pieces of the given sizes, then flush."""
    detokenizer = Detokenizer(TokenTable(bytewise()), stop)
    pieces: list[str] = []
    at = 0
    for size in [*sizes, len(tokens)]:
        text, hit = detokenizer.push(tokens[at : at + size])
        pieces.append(text)
        if hit is not None:
            return pieces, hit
        at += size
    return [*pieces, detokenizer.flush()], None


@given(st.binary(max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_any_bytes_give_the_text_of_the_whole(data: bytes, sizes: list[int]) -> None:
    pieces, _ = stream(ids(data), [], sizes)
    assert "".join(pieces) == data.decode("utf-8", "replace")


@given(st.text(max_size=30), st.lists(st.integers(1, 3), max_size=30))
def test_no_piece_holds_half_a_character(text: str, sizes: list[int]) -> None:
    pieces, _ = stream(ids(text.encode()), [], sizes)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4)),
)
def test_text_ends_before_the_stop_string_that_is_complete_first(text: str, stop: list[str], sizes: list[int]) -> None:
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    pieces, hit = stream(ids(text.encode()), stop, sizes)
    if ends:
        _, at, expected = min(ends)
        assert ("".join(pieces), hit) == (text[:at], expected)
    else:
        assert ("".join(pieces), hit) == (text, None)


def test_a_possible_beginning_is_held_back_and_released_when_it_is_none() -> None:
    detokenizer = Detokenizer(TokenTable(bytewise()), ["END"])
    assert detokenizer.push(ids(b"xE")) == ("x", None)
    assert detokenizer.push(ids(b"N")) == ("", None)
    assert detokenizer.push(ids(b"d")) == ("ENd", None)


def test_held_text_comes_with_the_flush() -> None:
    detokenizer = Detokenizer(TokenTable(bytewise()), ["END"])
    detokenizer.push(ids(b"xEN"))
    assert detokenizer.flush() == "EN"


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(TokenTable(bytewise()))
    assert detokenizer.push(ids("é".encode()[:1])) == ("", None)
    assert detokenizer.flush() == "\ufffd"


def test_control_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(TokenTable(bytewise()))
    end = bytewise().token_to_id("<end>")
    assert end is not None
    assert detokenizer.push([*ids(b"a"), end, *ids(b"b")]) == ("ab", None)


def test_ids_outside_of_the_vocabulary_have_no_text() -> None:
    assert Detokenizer(TokenTable(bytewise())).push([100_000]) == ("", None)


@cache
def pieces(prefix: bool) -> Tokenizer:
    """A SentencePiece-like vocabulary with all byte tokens, as the exporter builds it with and without a prefix."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {token: 256 + i for i, token in enumerate(["\u2581", "a", "\u2581a", "é", "\u2581\u2581", "b"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def streamed(table: TokenTable, tokens: list[int]) -> str:
    """Token by token, then the flush."""
    detokenizer = Detokenizer(table)
    return "".join(detokenizer.push([token])[0] for token in tokens) + detokenizer.flush()


whole_pieces = st.lists(
    st.integers(256, 262).map(lambda i: [i]) | st.characters(codec="utf-8").map(lambda c: list(c.encode())), max_size=30
).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("prefix", [True, False])
@given(tokens=whole_pieces)
def test_byte_fallback_streams_what_it_decodes(prefix: bool, tokens: list[int]) -> None:
    tokenizer = pieces(prefix)
    assert streamed(TokenTable(tokenizer), tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.integers(0, 262), max_size=40))
def test_byte_fallback_replaces_only_what_is_not_utf8(tokens: list[int]) -> None:
    """Unlike tokenizers' own decoder, which replaces every byte of a run of bytes when one of them is wrong."""
    table = TokenTable(pieces(False))
    data = b"".join(table.bytes_of(token) for token in tokens if not table.is_special(token))
    assert streamed(table, tokens) == data.decode("utf-8", "replace")


@given(st.text("abé漢", max_size=30), st.lists(st.text("bé漢", min_size=1, max_size=3), min_size=1, max_size=3))
def test_stop_strings_of_many_bytes(text: str, stop: list[str]) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    pieces_, _ = stream(ids(text.encode()), stop, [1] * 100)
    assert "".join(pieces_) == (text[: min(ends)[1]] if ends else text)


@pytest.fixture(scope="module")
def smol(smol_gguf: Path) -> Tokenizer:
    return open_checkpoint(smol_gguf).tokenizer


@pytest.fixture(scope="module")
def smol_table(smol: Tokenizer) -> TokenTable:
    return TokenTable(smol)


@given(tokens=st.lists(st.integers(0, 49151), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_real_vocabulary_streams_what_it_decodes(smol: Tokenizer, smol_table: TokenTable, tokens: list[int]) -> None:
    assert streamed(smol_table, tokens) == smol.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    return open_checkpoint(model_file("qwen2.5-coder-0.5b")).tokenizer


@pytest.fixture(scope="module")
def qwen_table(qwen: Tokenizer) -> TokenTable:
    return TokenTable(qwen)


@pytest.mark.qwen
@given(tokens=st.lists(st.integers(0, 151664) | st.integers(151640, 151664), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_qwen_vocabulary_streams_what_it_decodes(
    qwen: Tokenizer, qwen_table: TokenTable, tokens: list[int]
) -> None:
    assert streamed(qwen_table, tokens) == qwen.decode(tokens, skip_special_tokens=True)


@given(text=st.text(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_text_survives_a_real_vocabulary(smol: Tokenizer, smol_table: TokenTable, text: str) -> None:
    tokens = smol.encode(text, add_special_tokens=False).ids
    assert streamed(smol_table, tokens) == smol.decode(tokens, skip_special_tokens=True)
