"""Request bodies: every field of OpenAI's two endpoints is served, ignored on purpose, or refused by name."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from cascade.errors import InvalidRequestError
from gateway.config import suggest

MAX_TOKENS = 1 << 31
"""Above any context: larger numbers are typing errors."""

MAX_SEED = (1 << 63) - 1
MISSING = "missing_required_parameter"
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 16384
MAX_PARTS = 4096
SupportedRole = Literal["system", "developer", "user", "assistant"]
StopStrings = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16, fail_fast=True)]
"""Lists fail at their first fault: a body of a million wrong items must not cost a million errors on the event loop."""


class _Body(BaseModel):
    """Unknown fields are refused before validation, the first alone: `_refuse_unknown`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class StreamOptions(_Body):
    """`include_obfuscation` is OpenAI's padding against traffic analysis; it changes no content."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(_Body):
    """What both endpoints share. None means absent, as in OpenAI's schema."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Annotated[str, Field(min_length=1, max_length=256)] | StopStrings | None = None
    # Extensions that local engines share.
    top_k: int | None = Field(default=None, ge=-1, le=1 << 20)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64, fail_fast=True)] | None = None
    # Accepted and without effect here: the caller's own book-keeping.
    user: Any = None

    _unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Field -> the values of it that ask for nothing, and pass."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"it has {len(bias)} tokens, at most {MAX_LOGIT_BIAS} are allowed")
        return bias

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key, value in (bias or {}).items():
            if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
                raise ValueError(f"keys must be token ids, {key[:32]!r} is none")
            if not -100 <= value <= 100:
                raise ValueError(f"the bias of token {key} is {value:g}, the range is -100 to 100")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is true.")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class FieldError(ValueError):
    """A fault that a check over several fields found, with the field to name."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TextPart(BaseModel):
    """A content part; `type` other than text is refused by `ChatMessage`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message. Fields of answers that clients send back (refusal, annotations, ...) are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    role: str
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role in ("tool", "function"):
            raise FieldError("role", f"Messages of role '{self.role}' are not supported yet.")
        if self.role not in SupportedRole.__args__:  # type: ignore[attr-defined]
            supported = "system, developer, user, assistant"
            raise FieldError("role", f"Invalid value: '{self.role[:64]}'. Supported values: {supported}.")
        for field in ("tool_calls", "function_call"):
            if getattr(self, field):
                raise FieldError(field, f"'{field}' is not supported yet.")
        if "content" not in self.model_fields_set:
            raise FieldError("content", "Missing required parameter.", MISSING)
        if self.content is None:
            raise FieldError("content", "Invalid value for 'content': expected a string or text parts, got null.")
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    raise FieldError("content", f"Content parts of type '{part.type[:64]}' are not supported.")
                if part.text is None:
                    raise FieldError("content", "A text part must have 'text'.")
        return self

    def as_template_input(self) -> dict[str, str]:
        """Role and text as chat templates know them: `developer` is the newer name of `system`."""
        text = self.content if isinstance(self.content, str) else "".join(p.text or "" for p in self.content or ())
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    # Without effect on the tokens of a local model.
    metadata: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    # Refused by `_refuse_unsupported` unless they ask for nothing.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    web_search_options: Any = None

    _unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "web_search_options": (),
    }

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
        return self

    @property
    def token_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", bound=SamplingBody)


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[Any], Field(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1)
    suffix: Any = None

    _unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", "'best_of' other than 'n' is not supported.")
        if self.echo and self.logprobs is not None:
            raise FieldError("echo", "'echo' together with 'logprobs' is not supported.")
        self.prompts()
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or token ids. Raises FieldError for a list that mixes them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        first = self.prompt[0]
        if isinstance(first, int):
            return [_token_ids(self.prompt)]
        if isinstance(first, str) and all(isinstance(item, str) for item in self.prompt):
            return list(self.prompt)
        if isinstance(first, list) and all(isinstance(item, list) for item in self.prompt):
            return [_token_ids(item) for item in self.prompt]
        raise FieldError("prompt", "'prompt' must be a string, token ids, or a list of one of them.")


def _token_ids(items: list[Any]) -> list[int]:
    if not items or not all(type(item) is int and item >= 0 for item in items):
        raise FieldError("prompt", "Token ids of 'prompt' must be non-negative integers, at least one of them.")
    if (largest := max(items)) >= MAX_TOKENS:
        raise FieldError("prompt", f"'prompt' has token id {largest}, which is larger than any model's.")
    return items


def parse_request(kind: type[Body], data: Any) -> Body:
    """Validate a decoded JSON body. Raises InvalidRequestError naming the first field at fault."""
    if not isinstance(data, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    _refuse_unknown(kind, data)
    if isinstance(options := data.get("stream_options"), dict):
        _refuse_unknown(StreamOptions, options, "stream_options.")
    _refuse_unsupported(kind, data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _invalid(error) from None


def _refuse_unknown(kind: type[BaseModel], data: dict[str, Any], prefix: str = "") -> None:
    known = kind.model_fields
    name = next((key for key in data if key not in known), None)
    if name is not None:
        path, hint = f"{prefix}{name[:96]}", suggest(name[:64], known)
        message = (
            f"Unrecognized request argument supplied: {path or repr(path)}{hint if 'did you mean' in hint else ''}"
        )
        raise InvalidRequestError(message, path, "unknown_parameter")


def _refuse_unsupported(kind: type[SamplingBody], data: dict[str, Any]) -> None:
    for field, harmless in kind._unsupported.items():
        value = data.get(field)
        if value is not None and value not in harmless:
            hint = "; only {'type': 'text'} is" if field == "response_format" else ""
            raise InvalidRequestError(f"'{field}' is not supported yet{hint}.", field, "unsupported_parameter")


def _invalid(error: ValidationError) -> InvalidRequestError:
    faults = error.errors(include_url=False)
    # Of the branches of a union, the one that got furthest into the value is the one that was meant.
    same_field = [f for f in faults if f["loc"][:1] == faults[0]["loc"][:1]]
    fault = max(same_field, key=lambda f: (len(f["loc"]), not f["type"].endswith("_type")))
    location = _field_path(fault["loc"])
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = f"{location}.{cause.param}" if location else cause.param
        message = f"Missing required parameter: '{param}'." if cause.code == MISSING else str(cause)
        return InvalidRequestError(message, param, cause.code)
    if fault["type"] == "missing":
        return InvalidRequestError(f"Missing required parameter: '{location}'.", location, MISSING)
    code = "invalid_type" if fault["type"].endswith("_type") else "invalid_value"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if code == "invalid_type":  # of a union every branch says what it would have taken
        expected = [
            str(f["msg"]).removeprefix("Input should be ") for f in same_field if _field_path(f["loc"]) == location
        ]
        message = f"it should be {' or '.join(expected)}"
    message = re.sub(r"^(Input|List|String|Dictionary) should", "it should", message)
    message = re.sub(r"a valid dictionary.*|an object", "an object", message)
    return InvalidRequestError(f"Invalid value for '{location}': {message}.", location, code)


def _field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content", "str")` -> `messages[0].content`: pydantic's union tags are dropped."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}" if path else part
        elif not path:
            path = part
    return path
