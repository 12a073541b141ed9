"""Structured logs on standard error. Events have fields; prompts and answers are never among them."""

import json
import logging
import sys
import time
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

logger = logging.getLogger("stepwell")


class _Formatter(logging.Formatter):
    """`json`: one object a line. Otherwise time, level, event and `key=value` pairs."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        message = record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            entry = {"time": stamp, "level": record.levelname.lower(), "event": message, **fields}
            if trace:
                entry["traceback"] = trace
            return json.dumps(entry, ensure_ascii=False, default=str)
        pairs = "".join(f" {key}={_plain(value)}" for key, value in fields.items() if value is not None)
        return f"{stamp} {record.levelname.lower():7} {message}{pairs}" + (f"\n{trace}" if trace else "")


def _plain(value: Any) -> str:
    """Quoted where a bare word would be ambiguous or could forge a second line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


class _ClientFaults(logging.Filter):
    """What a client sent that is not HTTP is the client's fault: one line, no traceback of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        fault = record.exc_info[1] if record.exc_info else None
        if isinstance(fault, HttpProcessingError):
            record.msg, record.args = "not a valid HTTP request: %s", (type(fault).__name__,)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def configure_logs(level: str, form: str) -> None:
    """Send everything to standard error; idempotent."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(as_json=form == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.server").filters[:] = [_ClientFaults()]
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def log_event(event: str, *, level: int = logging.INFO, failure: BaseException | None = None, **fields: Any) -> None:
    """One event with its fields; `failure` adds a traceback."""
    logger.log(level, event, extra={"fields": fields}, exc_info=failure)
