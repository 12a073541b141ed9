"""Stepwell's engine, below its scheduler, against llama.cpp on the same GGUF: interleaved in one run, medians, ratios.

Rows, with the passes as `tests.bench.worker` defines them; a bundle's own figure has its recipe at the end of the name:

- `prefill_512`, `decode_16`, `decode_1`, `decode_4` (tok/s): the best of the bundles.
- `decode_1_roofline` (share): bytes of weights that `decode_1` streams in a second, over the read bandwidth that was
  measured between its passes.
- `verify_8_cost`, `verify_16_cost` (x): a verify in one-token steps; without a recipe, of the `w8a8` bundle.
- `decode_ctx4000_cost` (x): a step at 4,000 tokens of context in steps at 128, of the bundle behind `decode_1`.
- `rss_over_file` (x): resident memory of a process that has loaded a bundle (`exact`, if there) and run one pass, over
  the size of its weights.

The peer of a row is the build of llama.cpp that is fastest at it, on its default settings with as many threads; costs
are in its own one-token steps. With onnxruntime-genai there are also `prefill_512_genai` and so on, against it: its
weights are of 4 bits throughout, fewer than in a Q4_K_M file. Peers are found, not installed:
`tests/bench/fetch_peers.py` does that. STEPWELL_ISA limits both sides: see LIMITED_BACKENDS.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from cascade.bundle import MODEL_FILE, WEIGHTS_FILE, Manifest, load_manifest, sha256_file
from cascade.errors import StepwellError
from cascade.session import default_threads
from exporters.sources import fetch
from exporters.sources.catalogue import load_catalogue
from gateway.cli.report import Report, report
from tests.bench.contest import Command, Contest
from tests.bench.fetch_peers import genai_model, genai_python, llama_python, node_libraries
from tests.bench.machine import ReadBandwidth, int8_macs_per_s, processor_flags
from tests.bench.peer_rows import LONG, STEP, THROUGHPUT, VERIFY, Measured, fastest, make_rows
from tests.bench.plot import line_chart
from tests.bench.worker import Pass

PLOTTED = tuple(Pass("verify", rows) for rows in (1, 2, 4, 8, 16, 32, 64))
LIMITED_BACKENDS = {"avx2": ("haswell",), "avx512vnni": ("zen4", "icelake")}
"""STEPWELL_ISA -> llama.cpp's CPU backends with those instructions, best first."""
BUSY_SHARE = 0.02
"""llama.cpp's threads wait for each other by spinning: beside other load it is many times slower, not a little."""

LLAMA, GENAI = "tests.bench.worker_llama", "tests.bench.worker_genai"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: its Python, the worker's module, arguments before and after those of every worker."""

    name: str
    python: Path
    module: str
    before: Sequence[str | Path] = ()
    after: Sequence[str] = ()
    model: Path | None = None
    """Its own form of the model; None: it reads the GGUF."""

    @property
    def is_llama(self) -> bool:
        """Whether it is a build of llama.cpp, which can do all passes."""
        return self.model is None

    def command(self, gguf: Path, threads: int) -> Command:
        """How its worker is started."""
        start = (self.python, "-m", self.module, *self.before, self.model or gguf, str(threads))
        return lambda sequences: [*start, str(sequences), *self.after]

    def weights_bytes(self, gguf: Path) -> int:
        """Size of what it loads."""
        return gguf.stat().st_size if self.model is None else sum(f.stat().st_size for f in self.model.iterdir())


def measure_peers(
    bundles: Sequence[Path],
    peers_directory: Path,
    *,
    gguf: Path | None = None,
    threads: int | None = None,
    seconds: float = 2.0,
    plot: Path | None = None,
    say: Say,
) -> Report:
    """Measure all rows, `seconds` a figure and contestant; `plot` is written as SVG.

    `bundles`: of one model, each of another recipe. `gguf`: the file that they were made from; by default the
    catalogue's. `say` gets progress and what is missing, a line at a time. Raises StepwellError.
    """
    threads = threads or default_threads()
    paths, manifests = _by_recipe(bundles)
    peers = find_peers(peers_directory, next(iter(manifests.values())).source.sha256, say)
    commands = {recipe: _our_command(path, threads) for recipe, path in paths.items()}
    weights = {recipe: manifest.files[WEIGHTS_FILE].size for recipe, manifest in manifests.items()}
    if peers:
        source = _source(next(iter(manifests.values())), gguf)
        commands |= {peer.name: peer.command(source, threads) for peer in peers}
        weights |= {peer.name: peer.weights_bytes(source) for peer in peers}
    with Contest(commands, [peer.name for peer in peers], say) as contest:
        llamas = [peer.name for peer in peers if peer.is_llama and peer.name in contest.names]
        measured = _measure(contest, paths, llamas, weights, threads, seconds, PLOTTED if plot else ())
        other_load = contest.load.share()
    if other_load > BUSY_SHARE:
        say(f"other processes took {other_load:.0%} of the processors: measure again on a quiet machine")
    if plot:
        plot.write_text(cost_against_rows(measured))
    made = ", ".join(f"{recipe} {manifest.fingerprint[:12]}" for recipe, manifest in manifests.items())
    result = report("peers", f"{next(iter(manifests.values())).source.file}: {made}", make_rows(measured))
    result["machine"] |= {
        "flags": processor_flags(),
        "threads": threads,
        "read_bytes_per_s": round(measured.read_bytes_per_s),
        "int8_macs_per_s": round(int8_macs_per_s(threads)),
        "other_load_percent": round(100 * other_load),
    }
    return result


def _measure(
    contest: Contest,
    paths: Mapping[str, Path],
    llamas: Sequence[str],
    weights: Mapping[str, int],
    threads: int,
    seconds: float,
    more: Sequence[Pass],
) -> Measured:
    """All figures of all contestants, and `more` passes of all.

    `paths`: our bundles; `llamas`: the builds of llama.cpp; `weights`: bytes, by contestant.
    """
    bandwidth = ReadBandwidth(threads)
    medians: dict[str, dict[Pass, float]] = {name: {} for name in contest.names}

    def measure(wanted: Pass, names: Iterable[str]) -> None:
        between = bandwidth.measure if wanted == STEP else None
        for name, median in contest.medians(wanted, seconds, names, between).items():
            medians[name][wanted] = median

    for wanted in dict.fromkeys((*THROUGHPUT, *VERIFY, *more)):
        measure(wanted, contest.names if wanted in (*THROUGHPUT, *more) else (*paths, *llamas))
    ours = {recipe: medians[recipe] for recipe in paths}
    measure(LONG, [fastest(ours, STEP), *llamas])
    described = {name: name if name in paths else contest.describe(name) for name in contest.names}
    return Measured(
        ours=ours,
        llamas={described[name]: medians[name] for name in llamas},
        others={described[name]: medians[name] for name in contest.names if name not in (*paths, *llamas)},
        streamed_bytes={recipe: streamed_bytes(path) for recipe, path in paths.items()},
        read_bytes_per_s=bandwidth.bytes_per_s(),
        resident={described[name]: size / weights[name] for name, size in contest.resident.items()},
    )


def cost_against_rows(measured: Measured) -> str:
    """The plot: milliseconds of a pass by its rows, a line for every recipe and peer. Needs the passes PLOTTED."""
    lines = {f"Stepwell {recipe}": seconds for recipe, seconds in measured.ours.items()} | dict(measured.llamas)
    lines |= {f"{name} (last logits)": seconds for name, seconds in measured.others.items()}
    points = {name: {wanted.size: 1000 * seconds[wanted] for wanted in PLOTTED} for name, seconds in lines.items()}
    return line_chart("Cost of a pass", "rows: new tokens of one sequence, with logits", "milliseconds", points)


def find_peers(directory: Path, source_sha256: str, say: Say) -> list[Peer]:
    """The engines below `directory` that STEPWELL_ISA allows; says how to get what is not there."""
    limited = LIMITED_BACKENDS.get(os.environ.get("STEPWELL_ISA", ""), ())
    libraries, python, genai = node_libraries(directory), llama_python(directory), genai_model(directory, source_sha256)
    found = []
    if libraries.exists():
        found.append(Peer("node-llama-cpp", Path(sys.executable), LLAMA, (libraries,), limited))
    if python.exists() and not limited:
        found.append(Peer("llama-cpp-python", python, LLAMA, ("llama-cpp-python",)))
    if genai.exists() and not limited:
        found.append(Peer("onnxruntime-genai", genai_python(directory), GENAI, model=genai))
    if missing := [path for path in (libraries, python, genai) if not path.exists()]:
        install = f"`python -m tests.bench.fetch_peers {directory} [--genai GGUF]` installs peers there"
        rest = "" if found else "; until then the rows have no peer"
        say(f"not there: {', '.join(str(path) for path in missing)}; {install}{rest}")
    return found


def streamed_bytes(bundle: Path) -> int:
    """Bytes of weights that every pass reads: those of all linears, but no table that only gives rows."""
    graph = onnx.load(str(bundle / MODEL_FILE), load_external_data=False).graph
    read = {name for node in graph.node if node.op_type == "QuantLinear" for name in node.input}
    lengths = {
        tensor.name: int(entry.value)
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    }
    return sum(length for name, length in lengths.items() if name in read)


def _by_recipe(bundles: Sequence[Path]) -> tuple[dict[str, Path], dict[str, Manifest]]:
    paths, manifests = dict[str, Path](), dict[str, Manifest]()
    for path in bundles:
        manifest = load_manifest(path)
        if manifest.recipe in paths:
            raise StepwellError(f"{path} and {paths[manifest.recipe]} are both {manifest.recipe}; give one a recipe")
        paths[manifest.recipe], manifests[manifest.recipe] = path, manifest
    if len({manifest.source.sha256 for manifest in manifests.values()}) > 1:
        raise StepwellError("the bundles are not of the same model: " + ", ".join(str(path) for path in bundles))
    return paths, manifests


def _our_command(bundle: Path, threads: int) -> Command:
    return lambda sequences: [sys.executable, "-m", "tests.bench.worker_stepwell", bundle, str(threads), str(sequences)]


def _source(manifest: Manifest, gguf: Path | None) -> Path:
    """The GGUF that a bundle was made from: the one given, or else the catalogue's."""
    wanted = manifest.source.sha256
    if gguf is None:
        known = [name for name, model in load_catalogue().models.items() if model.sha256 == wanted]
        if not known:
            raise StepwellError(f"{manifest.source.file} is in no catalogue: name the bundle's source with --gguf")
        return fetch(known[0])
    if not gguf.is_file():
        raise StepwellError(f"{gguf}: no such file")
    if sha256_file(gguf) != wanted:
        raise StepwellError(f"{gguf} is not the file that the bundle {manifest.name} was made from")
    return gguf
