"""Every error that Stepwell raises on purpose; `gateway.errors` maps them to HTTP in one place."""


class StepwellError(Exception):
    """Base of all deliberate errors. The message says what, where and what to do."""


class InvalidRequestError(StepwellError):
    """The request cannot be served as it was written (HTTP 400). `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextOverflowError(InvalidRequestError):
    """Prompt plus requested tokens do not fit the model's context (HTTP 400, `context_length_exceeded`)."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, param, "context_length_exceeded")


class UnknownModelError(StepwellError):
    """No tier or model of that name (HTTP 404)."""


class QueueFullError(StepwellError):
    """The engine's queue is full (HTTP 429). `retry_after_s` is a whole number of seconds, at least 1."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(StepwellError):
    """The engine process is starting, restarting or gone (HTTP 503)."""


class EngineFailedError(StepwellError):
    """The engine failed while this request was in flight (HTTP 500)."""


class BundleError(StepwellError):
    """A bundle is missing a file, is damaged, or does not fit its own description."""


class CheckpointError(StepwellError):
    """A source checkpoint (GGUF, safetensors) is damaged, hostile or of an unsupported kind."""


class SourceError(StepwellError):
    """A model could not be fetched: unknown name, offline, truncated, wrong hash, no space."""


class ConfigError(StepwellError):
    """A configuration or policy file is wrong; the message carries file, line and a suggestion."""
