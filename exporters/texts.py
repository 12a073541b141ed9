"""The texts that ship with the package: for calibrating quantizers, and for measuring fidelity.

They are our own words and do not overlap. A file is a sequence of records, each headed by `=== kind`.
"""

import re
from importlib.resources import files
from typing import NamedTuple


class Text(NamedTuple):
    """One text and what kind it is (`python`, `story`, `german`, ...)."""

    kind: str
    text: str


def calibration_texts() -> list[Text]:
    """About forty short texts of many kinds, some 50 tokens each."""
    return _read("calibration.txt")


def fidelity_texts() -> list[Text]:
    """Twenty texts of different kinds, each of at least 100 tokens with the supported tokenizers."""
    return _read("fidelity.txt")


def _read(name: str) -> list[Text]:
    content = (files("exporters") / "data" / name).read_text(encoding="utf-8")
    records = re.split(r"^=== (\w+)\n", content, flags=re.MULTILINE)[1:]
    return [Text(kind, text.strip()) for kind, text in zip(records[::2], records[1::2], strict=True)]
