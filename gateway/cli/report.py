"""The frame that the reports of `bench` and `eval` share (design, section 11)."""

import os
import platform
from typing import TypedDict

import onnxruntime
import psutil

from cascade import ops
from gateway.cli.doctor import processor_name
from gateway.cli.main import version


class Row(TypedDict):
    """One figure. `ratio` is value / peer_value, null without a peer."""

    name: str
    unit: str
    value: float
    peer: str | None
    peer_value: float | None
    ratio: float | None


class Report(TypedDict):
    """What `--json` prints."""

    bench: str
    version: str
    machine: dict[str, str | int]
    model: str
    rows: list[Row]


def row(name: str, unit: str, value: float) -> Row:
    """A figure without a peer, to four significant digits."""
    return Row(name=name, unit=unit, value=float(f"{value:.4g}"), peer=None, peer_value=None, ratio=None)


def report(bench: str, model: str, rows: list[Row]) -> Report:
    """The object to print: `rows` in a frame that says what ran where."""
    return Report(bench=bench, version=version(), machine=describe_machine(), model=model, rows=rows)


def describe_machine() -> dict[str, str | int]:
    """Processor, cores of this process, memory, and what computed."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "isa": ops.isa(),
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
    }


def as_table(report: Report) -> str:
    """The report for people: what ran where, then one line a row."""
    machine = report["machine"]
    head = f"{report['model']} · {machine['processor']}, {machine['cores']} cores, {machine['isa']}"
    return "\n".join([head, *(f"  {row['name']:22} {row['value']:>12.6g} {row['unit']}" for row in report["rows"])])
