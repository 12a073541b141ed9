"""Text to token ids: plain prompts and chats, with users' text never mistaken for a model's control tokens.

A chat template puts control tokens such as `<|im_end|>` around what users wrote. If a user writes that very
text, it must stay text, or anyone can forge a system turn. So a *break*, a secret string of private-use
characters, is put inside every control token that occurs in users' strings before the template sees them. The
tokenizer looks for control tokens in the text as it is, where broken ones do not match; its normalizer, which
runs on what lies between them, then takes the breaks out. One pass, the tokenizer's own rules for
everything else, and nothing to change where users' text holds no control token.

Added tokens that are not special (`<tool_call>`) are found in any text, as transformers and llama.cpp do.
"""

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, normalizers

from cascade.errors import BundleError, InvalidRequestError

_PRIVATE_USE = range(0xE000, 0xF900)
_BREAK_LENGTH = 8
"""Eight of 6400 private-use characters: 101 bits that nobody outside the process can know."""


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer that takes breaks out of text. `tokenizer` decodes as ever; encode through this module."""

    tokenizer: Tokenizer
    separator: str = field(repr=False)
    """The break."""
    _special: re.Pattern[str] | None = field(repr=False)
    """Any special token."""
    _overlapping: re.Pattern[str] | None = field(repr=False)
    """The place where any special token begins, also inside another."""
    _prefixes: frozenset[str] = field(repr=False)
    """Proper beginnings of special tokens."""
    _longest: int = field(repr=False)

    def guard(self, text: str, *, joined: bool = False) -> str:
        """`text` with a break inside every special token.

        `joined`: other text may follow, so the beginning of a special token at the end is broken as well.
        """
        if self._special is None or self._overlapping is None:
            return text
        cuts: set[int] = set()
        if self._special.search(text):
            cuts = {match.start() + 1 for match in self._overlapping.finditer(text)}
        if joined:
            tails = range(1, min(self._longest, len(text) + 1))
            cuts |= {len(text) - n + 1 for n in tails if text[-n:] in self._prefixes}
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return self.separator.join(text[a:b] for a, b in itertools.pairwise(edges))

    def encode(self, text: str) -> list[int]:
        """Ids of text that has been guarded where it must be; no BOS is added."""
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can carry half a surrogate pair; it becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # The batch form lets other threads run meanwhile, which `encode` does not; `fast` leaves out the offsets.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def load_tokenizer(path: Path) -> TextTokenizer:
    """Load a `tokenizer.json`. Raises BundleError naming the file."""
    try:
        content = json.loads(path.read_bytes())
        # A special token met after normalization would be met where a break has been taken out.
        for token in content.get("added_tokens", []):
            token["normalized"] = token["normalized"] and not token["special"]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # OSError, ValueError, and the library's bare Exception
        raise BundleError(f"{path}: not a usable tokenizer: {error}") from error
    special = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    if any(len(token) < 2 for token in special):
        raise BundleError(f"{path}: a special token of one character cannot be told apart from text")
    taken = set("".join(special))
    letters = [chr(code) for code in _PRIVATE_USE if chr(code) not in taken]
    separator = "".join(secrets.choice(letters) for _ in range(_BREAK_LENGTH))
    strip = normalizers.Replace(separator, "")
    old = tokenizer.normalizer
    tokenizer.normalizer = strip if old is None else normalizers.Sequence([strip, old])
    # No padding or cutting: a saved tokenizer may have them on.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pattern = "|".join(re.escape(token) for token in special)
    return TextTokenizer(
        tokenizer=tokenizer,
        separator=separator,
        _special=re.compile(pattern) if special else None,
        _overlapping=re.compile(f"(?={pattern})") if special else None,
        _prefixes=frozenset(token[:n] for token in special for n in range(1, len(token))),
        _longest=max(map(len, special), default=0),
    )


def encode_text(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Ids of a plain prompt; special tokens in it are text. No BOS is added: `Manifest.add_bos` says whether to."""
    return tokenizer.encode(tokenizer.guard(text))


def encode_chat(
    tokenizer: TextTokenizer,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> list[int]:
    """Ids of a chat rendered by its model's template.

    `messages` and `variables` (`tools`, ...) are users' data: special tokens in them are text, those that the
    template writes are not. `special_tokens` (`bos_token`, `eos_token`) are what the template may write by
    name. Raises InvalidRequestError when the template refuses the messages, BundleError when it is broken.
    """
    guarded = _guard(tokenizer, {**variables, "messages": list(messages)})
    try:
        text = render_chat(
            template,
            guarded.pop("messages"),
            add_generation_prompt=add_generation_prompt,
            special_tokens=special_tokens,
            **guarded,
        )
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error).replace(tokenizer.separator, ""), error.param) from error
    return tokenizer.encode(text)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> str:
    """The chat as text, as transformers' `apply_chat_template(tokenize=False)` gives it. Errors as `encode_chat`."""
    names = {**variables, **(special_tokens or {})}
    names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    compiled = _compile(template)
    try:
        return compiled.render(names)
    except TemplateError as error:
        raise InvalidRequestError(f"the chat template refuses the messages: {error}", "messages") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"the chat template cannot render the messages: {error}", "messages") from error


def _guard(tokenizer: TextTokenizer, value: Any) -> Any:
    """A copy with every string guarded, keys as well."""
    if isinstance(value, str):
        return tokenizer.guard(value, joined=True)
    if isinstance(value, Mapping):
        return {_guard(tokenizer, key): _guard(tokenizer, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guard(tokenizer, item) for item in value]
    return value


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise BundleError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
