"""The report of `stepwell bench peers`: its shape and arithmetic, never how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.contest import ROOT, Contest
from tests.bench.peer_rows import LONG, STEP, THROUGHPUT, Measured, make_rows
from tests.bench.peers import find_peers
from tests.bench.plot import line_chart
from tests.bench.worker import ContestantError, Pass, Worker, resident_bytes

STEPS = {Pass("prefill", 512): 100.0, Pass("decode", 16): 4.0, Pass("decode", 4): 2.0, STEP: 1.0}
STEPS |= {Pass("verify", 8): 3.0, Pass("verify", 16): 5.0, LONG: 1.5}
"""Seconds of every pass where a one-token step takes one."""

OF_EACH = ("prefill_512", "decode_16", "decode_1", "decode_4", "verify_8_cost", "verify_16_cost")
NAMES = [name + suffix for name in OF_EACH[:4] for suffix in ("", "_exact", "_w8a8")]
NAMES += ["decode_1_roofline"]
NAMES += [name + suffix for name in OF_EACH[4:] for suffix in ("", "_exact", "_w8a8")]
NAMES += ["decode_ctx4000_cost", "rss_over_file"]


def slower(factor: float) -> dict[Pass, float]:
    """STEPS on an engine that is slower at everything."""
    return {wanted: factor * seconds for wanted, seconds in STEPS.items()}


def measured(llamas: dict[str, dict[Pass, float]], others: dict[str, dict[Pass, float]] | None = None) -> Measured:
    """Two recipes: `exact` is twice as fast at one token, `w8a8` at everything else."""
    return Measured(
        ours={"exact": slower(2) | {STEP: 1.0, LONG: 3.0}, "w8a8": slower(1) | {STEP: 2.0}},
        llamas=llamas,
        others=others or {},
        streamed_bytes={"exact": 10, "w8a8": 20},
        read_bytes_per_s=40,
        resident={"exact": 1.1, "w8a8": 1.2} | dict.fromkeys(llamas, 1.7),
    )


def test_names_are_stable() -> None:
    assert [row["name"] for row in make_rows(measured({}))] == NAMES


def test_without_peers_their_fields_are_null() -> None:
    assert {(row["peer"], row["peer_value"], row["ratio"]) for row in make_rows(measured({}))} == {(None, None, None)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_512", 5.12),
        ("prefill_512_exact", 2.56),
        ("decode_1", 1),
        ("decode_1_roofline", 0.25),
        ("verify_8_cost", 1.5),
        ("verify_8_cost_exact", 6),
        ("decode_ctx4000_cost", 3),
        ("rss_over_file", 1.1),
    ],
)
def test_which_bundle_a_row_is_about(name: str, value: float) -> None:
    assert {row["name"]: row["value"] for row in make_rows(measured({}))}[name] == value


def test_peer_is_the_faster_build_row_by_row() -> None:
    rows = {row["name"]: row for row in make_rows(measured({"a": slower(4) | {STEP: 0.5}, "b": slower(3)}))}
    found = {name: (rows[name]["peer"], rows[name]["ratio"]) for name in ("prefill_512", "decode_1", "verify_8_cost")}
    assert found == {"prefill_512": ("b", 3), "decode_1": ("a", 0.5), "verify_8_cost": ("b", 0.5)}


def test_genai_has_rows_of_its_own() -> None:
    rows = {row["name"]: row for row in make_rows(measured({"a": slower(2)}, {"genai": slower(5)}))}
    genai = {name: row["ratio"] for name, row in rows.items() if row["peer"] == "genai"}
    expected = {f"{wanted.kind}_{wanted.size}_genai": 5 for wanted in THROUGHPUT}
    assert genai == expected


def test_missing_peers_are_named_with_the_way_to_get_them(tmp_path: Path) -> None:
    said: list[str] = []
    assert find_peers(tmp_path, "0" * 64, said.append) == []
    assert [f"fetch_peers {tmp_path}" in line and "rows have no peer" in line for line in said] == [True]


def test_a_child_that_ends_leaves_its_last_words() -> None:
    with pytest.raises(ContestantError, match="^no such engine$"):
        Worker([sys.executable, "-c", "import sys; sys.exit('noise\\nno such engine')"], ROOT)


def test_a_peer_that_does_not_run_is_left_out() -> None:
    said: list[str] = []
    command = [sys.executable, "-c", "import sys; sys.exit('wrong processor')"]
    with Contest({"peer": lambda _: command}, ["peer"], said.append) as contest:
        assert (contest.names, "wrong processor" in said[-1]) == ([], True)


def test_pages_of_a_file_that_is_mapped_twice_count_once(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8192))
    mapping = f"7f00-7f02 r--p 00000000 fe:00 77 {' ' * 10}{file}\nSize: 8 kB\nRss: 8 kB\nPss: 4 kB\n"
    heap = "5500-5600 rw-p 00000000 00:00 0 [heap]\nRss: 100 kB\n"
    assert resident_bytes(2 * mapping + heap) == 8192 + 100 * 1024


def test_plot_has_a_line_and_a_label_for_every_engine() -> None:
    series = {"ours <1>": {1: 10.0, 2: 11.0, 64: 90.0}, "peer": {1: 9.0, 2: 18.0, 64: 600.0}}
    tree = ElementTree.fromstring(line_chart("t", "x", "y", series))
    tags = [element.tag.rpartition("}")[2] for element in tree.iter()]
    labels = {element.text for element in tree.iter() if element.text}
    assert (tags.count("polyline"), tags.count("circle"), series.keys() <= labels) == (2, 6, True)


def test_command_prints_one_object(smol_bundle: Path, tmp_path: Path) -> None:
    plot = tmp_path / "cost.svg"
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli.main", "bench", "peers", str(smol_bundle), "--json"]
        + ["--seconds", "0.1", "--plot", str(plot), "--peers", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout)
    names = [name for name in NAMES if not name.endswith("_w8a8")]
    assert (report["bench"], [row["name"] for row in report["rows"]]) == ("peers", names), done.stderr
    assert {"flags", "threads", "read_bytes_per_s", "int8_macs_per_s", "onnxruntime"} <= report["machine"].keys()
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_two_bundles_of_one_recipe_are_refused(smol_bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli.main", "bench", "peers", str(smol_bundle), str(smol_bundle)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "are both exact" in done.stderr, "Traceback" in done.stderr) == (1, True, False)
