"""Tokenizers built from GGUF metadata: ids identical to llama.cpp's and SentencePiece's, and clear refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer

from cascade.errors import CheckpointError
from cascade.text import encode_text, load_tokenizer
from exporters.checkpoint import open_checkpoint
from exporters.tokenizer import Vocabulary, build_tokenizer
from tests.exporters.gguf_writer import tiny_model, tokenizer_metadata
from tests.exporters.llama_cpp_reference import DATA, KINDS, digest
from tests.exporters.varied_strings import reference_strings, varied_strings

REFERENCE = json.loads(DATA.read_text())


def ids_of(tokenizer: Tokenizer, strings: list[str], folder: Path) -> list[list[int]]:
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    loaded = load_tokenizer(path)
    return [encode_text(loaded, text) for text in strings]


def build(metadata: dict[str, Any]) -> Vocabulary:
    """The tokenizer of metadata as the reader would hand it over."""
    arrays = {
        key: np.array(item) if isinstance(item, list) and item and not isinstance(item[0], str) else item
        for key, item in metadata.items()
    }
    return build_tokenizer(Path("m.gguf"), arrays, len(metadata["tokenizer.ggml.tokens"]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_llama_cpps_ids(kind: str, tmp_path: Path) -> None:
    """5,000 strings, over merges that cross every border that a kind may cut at."""
    tokenizer = build(tokenizer_metadata(kind, REFERENCE["merges"])).tokenizer
    ids = ids_of(tokenizer, reference_strings(nfc=kind == "qwen2"), tmp_path)
    assert digest(ids) == REFERENCE["digests"][f"kind {kind}"]


def test_smollm_gives_llama_cpps_ids(smol_gguf: Path, tmp_path: Path) -> None:
    ids = ids_of(open_checkpoint(smol_gguf).tokenizer, reference_strings(), tmp_path)
    assert digest(ids) == REFERENCE["digests"]["smollm2"]


@pytest.mark.qwen
def test_qwen_gives_llama_cpps_ids(qwen_pair: tuple[Path, Path]) -> None:
    """Both of the pair; their tokenizers are the one published for Qwen2.5."""
    for bundle in qwen_pair:
        loaded = load_tokenizer(bundle / "tokenizer.json")
        ids = [encode_text(loaded, text) for text in reference_strings(nfc=True)]
        assert digest(ids) == REFERENCE["digests"]["qwen2.5-coder"]


def test_qwen_text_is_normalized_as_published() -> None:
    tokenizer = build(tokenizer_metadata("qwen2")).tokenizer
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_text_survives_a_round_trip() -> None:
    tokenizer = build(tokenizer_metadata("llama-bpe", REFERENCE["merges"])).tokenizer
    for text in varied_strings(3, 500):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_end_answers() -> None:
    vocabulary = build(tokenizer_metadata())
    assert vocabulary.tokenizer.encode("a<|im_end|>").ids[-1] == 1
    assert vocabulary.tokenizer.decode([1]) == ""
    assert (vocabulary.bos_id, vocabulary.eos_ids, vocabulary.add_bos) == (0, [1], False)


def test_end_tokens_of_chats_are_found_beside_the_files_own() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.eos_token_id": 0}
    assert build(metadata).eos_ids == [0, 1]


def test_an_end_token_that_is_not_a_control_token_does_not_end_answers() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.eos_token_id": 0}
    metadata["tokenizer.ggml.token_type"][1] = 4
    assert build(metadata).eos_ids == [0]


def test_unused_tokens_at_the_end_are_left_out() -> None:
    metadata = tokenizer_metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    assert build(metadata).tokenizer.get_vocab_size() == size


def _set(key: str, item: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": item})


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "unknown model": (_set("model", "bert"), "model 'bert' is not supported; supported are gpt2, llama"),
    "unknown kind": (_set("pre", "tekken"), "'tekken' is not supported; supported are default, gpt-2, llama-bpe"),
    "merge of unknown tokens": (_set("merges", ["h e", "zz q"]), "merge 1, 'zz q'"),
    "merge of one part": (_set("merges", ["hello"]), "merge 0, 'hello'"),
    "types for other tokens": (_set("token_type", [1, 2, 3]), "'tokenizer.ggml.token_type' has 3 entries for"),
    "types that are not numbers": (_set("token_type", "x"), "token_type' is missing or not"),
    "eos outside of the vocabulary": (_set("eos_token_id", 99999), "eos_token_id is 99999, the vocabulary has"),
    "bos that is no id": (_set("bos_token_id", "x"), "bos_token_id is 'x'"),
    "no scores": (_set("model", "llama"), "'tokenizer.ggml.scores' is missing"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_wrong_is_named(case: str) -> None:
    change, message = REFUSALS[case]
    metadata = tokenizer_metadata()
    change(metadata)
    with pytest.raises(CheckpointError, match=message):
        build(metadata)


def test_a_token_that_appears_twice_is_refused() -> None:
    metadata = tokenizer_metadata()
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(CheckpointError, match="appears twice"):
        build(metadata)


def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.metadata["tokenizer.ggml.tokens"] = model.metadata["tokenizer.ggml.tokens"][:-1]
    model.metadata["tokenizer.ggml.token_type"] = model.metadata["tokenizer.ggml.token_type"][:-1]
    with pytest.raises(CheckpointError, match="embed has shape"):
        open_checkpoint(model.write(tmp_path / "m.gguf"))


# SentencePiece


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A small BPE model with byte fallback, trained here."""
    folder = tmp_path_factory.mktemp("pieces")
    lines = [line for text in varied_strings(2, 3000, control=False) for line in text.splitlines() if line.strip()]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=3500,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def piece_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    def kind(i: int) -> int:
        return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1

    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }


def test_sentence_piece_ids_equal_the_library(
    piece_model: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    vocabulary = build(piece_metadata(piece_model))
    strings = [text for text in varied_strings(11, 2000, control=False) if "\u2581" not in text]
    assert ids_of(vocabulary.tokenizer, strings, tmp_path) == [piece_model.encode(text) for text in strings]
    assert (vocabulary.add_bos, vocabulary.bos_id, vocabulary.eos_ids) == (True, 1, [2])


def test_sentence_piece_text_survives_a_round_trip(
    piece_model: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    tokenizer = build(piece_metadata(piece_model)).tokenizer
    strings = varied_strings(12, 300, control=False)
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in ids_of(tokenizer, strings, tmp_path)]
    assert decoded == strings


def test_scores_that_are_not_finite_are_refused(piece_model: sentencepiece.SentencePieceProcessor) -> None:
    metadata = piece_metadata(piece_model)
    metadata["tokenizer.ggml.scores"][300] = float("nan")
    with pytest.raises(CheckpointError, match="not a finite number"):
        build(metadata)
