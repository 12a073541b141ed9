"""GGUF `tokenizer.ggml.*` metadata -> a `tokenizers.Tokenizer` that gives the same ids as the published one.

Two families: `gpt2` (byte-level BPE with a list of merges; `tokenizer.ggml.pre` names how text is cut into words
first) and `llama` (SentencePiece BPE, whose merge order follows from the scores).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from cascade.errors import CheckpointError
from exporters.gguf.reader import Value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Tokens that end an answer wherever a vocabulary has them as control tokens; the file's own eos id comes first.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _isolated(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


# Kind -> the cuts, in order. Each cuts further what the one before left whole.
_CUTS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _isolated(_GPT2),
    "qwen2": _isolated(_WORDS % r"\p{N}"),
    "llama-bpe": _isolated(_WORDS % r"\p{N}{1,3}"),
    "smollm": [pre_tokenizers.Digits(individual_digits=True), *_isolated(_GPT2)],
    # What llama.cpp does for files that name no kind.
    "default": _isolated(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {"gpt2": "gpt-2", "deepseek-r1-qwen": "qwen2", "llama-v3": "llama-bpe", "llama3": "llama-bpe"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and the ids that frame a text."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_ids: list[int]
    add_bos: bool


def build_tokenizer(path: Path, metadata: dict[str, Value], vocab_size: int) -> Vocabulary:
    """Build the tokenizer of a GGUF file with `vocab_size` embedding rows.

    Trailing tokens that the file marks as unused (padding of the embedding) are left out, as they are in the
    published tokenizers. Raises CheckpointError for an unsupported kind and for inconsistent lists.
    """
    reader = _Reader(path, metadata, vocab_size)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, default_bos = _byte_level(reader)
    elif model == "llama":
        tokenizer, default_bos = _sentence_piece(reader), True
    else:
        raise reader.fail(f"tokenizer model {model!r} is not supported; supported are gpt2, llama")
    _add_tokens(reader, tokenizer)
    bos_id = reader.token_id("bos")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos)
    return Vocabulary(tokenizer, bos_id, _eos_ids(reader), bool(add_bos) and bos_id is not None)


class _Reader:
    """The checked lists of `tokenizer.ggml.*`."""

    def __init__(self, path: Path, metadata: dict[str, Value], vocab_size: int) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens = self.strings("tokens")
        if len(self.tokens) != vocab_size:
            raise self.fail(f"{len(self.tokens)} tokens for a vocabulary of {vocab_size}")
        types = self.numbers("token_type", integer=True) if "tokenizer.ggml.token_type" in metadata else None
        self.types: list[int] = [NORMAL] * vocab_size if types is None else [int(kind) for kind in types]
        used = [i for i, kind in enumerate(self.types) if kind != UNUSED]
        if not used:
            raise self.fail("every token is marked as unused")
        self.vocab = {token: i for i, token in enumerate(self.tokens[: used[-1] + 1])}
        if len(self.vocab) != used[-1] + 1:
            twice = next(token for i, token in enumerate(self.tokens) if self.vocab[token] != i)
            raise self.fail(f"token {twice!r} appears twice")

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: tokenizer: {message}")

    def strings(self, name: str) -> list[str]:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list):
            raise self.fail(f"'tokenizer.ggml.{name}' is missing or not an array of strings")
        return value

    def numbers(self, name: str, *, integer: bool = False) -> Sequence[int | float]:
        """A list with one number a token."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, np.ndarray) or (integer and value.dtype.kind not in "iu"):
            raise self.fail(f"'tokenizer.ggml.{name}' is missing or not an array of {'whole ' * integer}numbers")
        if len(value) != len(self.tokens):
            raise self.fail(f"'tokenizer.ggml.{name}' has {len(value)} entries for {len(self.tokens)} tokens")
        numbers: list[int | float] = value.tolist()
        return numbers

    def token_id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.fail(f"{name}_token_id is {value!r}, the vocabulary has {len(self.tokens)} tokens")
        return value


def _byte_level(reader: _Reader) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its kind begins texts with BOS by default."""
    named = reader.metadata.get("tokenizer.ggml.pre", "default")
    kind = _ALIASES.get(str(named), str(named))
    if kind not in _CUTS:
        raise reader.fail(f"pre-tokenizer kind {named!r} is not supported; supported are {', '.join(sorted(_CUTS))}")
    merges: list[tuple[str, str]] = []
    for i, merge in enumerate(reader.strings("merges")):
        left, _, right = merge.partition(" ")
        if left not in reader.vocab or right not in reader.vocab or left + right not in reader.vocab:
            raise reader.fail(f"merge {i}, {merge[:80]!r}, joins or gives what is not in the vocabulary")
        merges.append((left, right))
    tokenizer = _bpe(reader, merges, ignore_merges=kind == "llama-bpe")
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as published; llama.cpp leaves it out
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_CUTS[kind], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind == "llama-bpe"


def _sentence_piece(reader: _Reader) -> Tokenizer:
    scores = reader.numbers("scores")
    if not all(np.isfinite(scores)):
        raise reader.fail("'tokenizer.ggml.scores' holds a score that is not a finite number")
    # SentencePiece joins the neighbours whose union scores best: the same as merges in descending score.
    ranked: list[tuple[float, int, str, str]] = []
    vocab = reader.vocab
    for token, i in vocab.items():
        if reader.types[i] in (NORMAL, USER_DEFINED):
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    ranked.append((-scores[i], i, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    unknown = next((token for token, i in vocab.items() if reader.types[i] == UNKNOWN), None)
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    merges = [(left, right) for _, _, left, right in ranked]
    tokenizer = _bpe(reader, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    prefix = bool(reader.metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _bpe(reader: _Reader, merges: list[tuple[str, str]], **options: bool | str | None) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab=reader.vocab, merges=merges, **options))
    except Exception as error:  # the library raises no narrower class
        raise reader.fail(str(error)) from error


def _add_tokens(reader: _Reader, tokenizer: Tokenizer) -> None:
    """Control tokens become special ones; user-defined ones are found in any text."""
    added = []
    for token, i in reader.vocab.items():
        kind = reader.types[i]
        if kind in (CONTROL, USER_DEFINED):
            if not token:
                raise reader.fail(f"token {i} is marked as special and is empty")
            # A SentencePiece token with its space mark is met only after normalization.
            normalized = kind == USER_DEFINED and "▁" in token
            added.append(AddedToken(token, normalized=normalized, special=kind == CONTROL))
    tokenizer.add_tokens(added)


def _eos_ids(reader: _Reader) -> list[int]:
    found = [reader.token_id(name) for name in ("eos", "eot", "eom")]
    found += [reader.vocab[token] for token in END_TOKENS if token in reader.vocab and _is_control(reader, token)]
    ids = [i for i in dict.fromkeys(found) if i is not None]
    if not ids:
        raise reader.fail("no token ends an answer: 'tokenizer.ggml.eos_token_id' is missing")
    return ids


def _is_control(reader: _Reader, token: str) -> bool:
    return reader.types[reader.vocab[token]] == CONTROL
