"""The rows of `stepwell bench peers` from medians: plain arithmetic. What the rows mean stands in `peers.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.cli.report import Row, row
from tests.bench.worker import LONG_CONTEXT, MAX_SEQUENCES, PREFILL_TOKENS, Pass

STEP = Pass("decode", 1)
THROUGHPUT = (Pass("prefill", PREFILL_TOKENS), Pass("decode", MAX_SEQUENCES), STEP, Pass("decode", 4))
VERIFY = (Pass("verify", 8), Pass("verify", 16))
LONG = Pass("decode_at", LONG_CONTEXT)

Seconds = Mapping[Pass, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """All that the rows are made of.

    `ours`, `llamas`, `others`: recipe or peer -> medians; `others` lack VERIFY and LONG. `streamed_bytes`: recipe ->
    what a one-token step reads. `resident`: recipe or peer -> memory over the size of the weights.
    """

    ours: Mapping[str, Seconds]
    llamas: Mapping[str, Seconds]
    others: Mapping[str, Seconds]
    streamed_bytes: Mapping[str, int]
    read_bytes_per_s: float
    resident: Mapping[str, float]


def fastest(contestants: Mapping[str, Seconds], wanted: Pass) -> str:
    """The name with the shortest pass."""
    return min(contestants, key=lambda name: contestants[name][wanted])


def make_rows(measured: Measured) -> list[Row]:
    """All rows, in the order in which `--json` prints them."""
    ours, llamas, others = measured.ours, measured.llamas, measured.others
    step_recipe = fastest(ours, STEP)
    verify_recipe = "w8a8" if "w8a8" in ours else fastest(ours, Pass("decode", MAX_SEQUENCES))
    suffixes = {recipe: f"_{recipe}" for recipe in ours}
    rows: list[Row] = []
    for wanted in THROUGHPUT:
        name = f"{wanted.kind}_{wanted.size}"
        best = fastest(ours, wanted)
        rows.append(_tokens_per_s(name, wanted, ours[best], llamas))
        rows += [_tokens_per_s(name + suffixes[recipe], wanted, ours[recipe], llamas) for recipe in ours]
        if others:
            rows.append(_tokens_per_s(f"{name}_genai", wanted, ours[best], others))
    streamed = measured.streamed_bytes[step_recipe] / ours[step_recipe][STEP]
    rows.append(row("decode_1_roofline", "share", streamed / measured.read_bytes_per_s))
    for wanted in VERIFY:
        name = f"{wanted.kind}_{wanted.size}_cost"
        rows.append(_steps(name, wanted, ours[verify_recipe], llamas))
        rows += [_steps(name + suffixes[recipe], wanted, ours[recipe], llamas) for recipe in ours]
    rows.append(_steps(f"decode_ctx{LONG.size}_cost", LONG, ours[step_recipe], llamas))
    resident = measured.resident
    lightest = min(llamas, key=lambda peer: resident[peer], default=None)
    mine = resident["exact" if "exact" in ours else step_recipe]
    rows.append(_against("rss_over_file", "x", mine, lightest, resident[lightest] if lightest else 0))
    return rows


def _tokens_per_s(name: str, wanted: Pass, mine: Seconds, peers: Mapping[str, Seconds]) -> Row:
    return _beside_fastest(name, "tok/s", wanted, mine, peers, lambda seconds: wanted.size / seconds[wanted])


def _steps(name: str, wanted: Pass, mine: Seconds, peers: Mapping[str, Seconds]) -> Row:
    return _beside_fastest(name, "x", wanted, mine, peers, lambda seconds: seconds[wanted] / seconds[STEP])


def _beside_fastest(
    name: str,
    unit: str,
    wanted: Pass,
    mine: Seconds,
    peers: Mapping[str, Seconds],
    figure: Callable[[Seconds], float],
) -> Row:
    if not peers:
        return row(name, unit, figure(mine))
    peer = fastest(peers, wanted)
    return _against(name, unit, figure(mine), peer, figure(peers[peer]))


def _against(name: str, unit: str, mine: float, peer: str | None, theirs: float) -> Row:
    """A figure beside a peer's, to four significant digits both; without `peer` the figure alone."""
    made = row(name, unit, mine)
    if peer is not None:
        made |= {"peer": peer, "peer_value": row(name, unit, theirs)["value"], "ratio": float(f"{mine / theirs:.4g}")}
    return made
