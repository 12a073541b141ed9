"""Prometheus metrics in a registry of our own: what the gateway sees, and the engine's counters at scrape time."""

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cascade.protocol import EngineStats, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Every metric, by the names that dashboards use. Labels are bounded: endpoints, model names, status codes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "stepwell_requests", "HTTP requests answered", ["endpoint", "model", "status"], registry=registry
        )
        self.duration = Histogram(
            "stepwell_request_seconds", "Whole time of a request", ["endpoint"], buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge("stepwell_requests_in_flight", "Requests being answered", registry=registry)
        self.first_token = Histogram(
            "stepwell_time_to_first_token_seconds",
            "From submission to first token",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "stepwell_inter_token_seconds",
            "Time between tokens, spread over the tokens of a step",
            ["model"],
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "stepwell_prompt_tokens", "Prompt tokens of finished answers", ["model"], registry=registry
        )
        self.cached_tokens = Counter(
            "stepwell_cached_prompt_tokens", "Prompt tokens that the prefix cache held", ["model"], registry=registry
        )
        self.generated_tokens = Counter("stepwell_generated_tokens", "Tokens generated", ["model"], registry=registry)
        self.drafted_tokens = Counter(
            "stepwell_drafted_tokens", "Tokens drafted for finished answers", ["model"], registry=registry
        )
        self.accepted_tokens = Counter(
            "stepwell_accepted_tokens", "Drafted tokens that were kept", ["model"], registry=registry
        )
        self.disconnects = Counter(
            "stepwell_client_disconnects", "Requests that their client left", ["endpoint"], registry=registry
        )
        self.engine = _EngineCollector()
        self.registry.register(self.engine)

    def observe_tokens(self, model: str, count: int, seconds: float, *, first: bool) -> None:
        """Tokens of one event, `seconds` after the event before (or the submission)."""
        self.generated_tokens.labels(model).inc(count)
        if first:
            self.first_token.labels(model).observe(seconds)
        else:
            self.inter_token.labels(model).observe(seconds / count)

    def observe_usage(self, model: str, usage: Usage) -> None:
        """Counts of a finished answer."""
        self.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self.cached_tokens.labels(model).inc(usage.cached_tokens)
        self.drafted_tokens.labels(model).inc(usage.drafted_tokens)
        self.accepted_tokens.labels(model).inc(usage.accepted_tokens)

    def render(self, stats: EngineStats | None, *, ready: bool, restarts: int) -> bytes:
        """The text format. `stats` None: the engine did not answer, its own families are left out."""
        self.engine.set(stats, ready=ready, restarts=restarts)
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Turns the last `EngineStats` into metric families; its counters begin again when the engine restarts."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None
        self._ready = False
        self._restarts = 0

    def set(self, stats: EngineStats | None, *, ready: bool, restarts: int) -> None:
        self._stats, self._ready, self._restarts = stats, ready, restarts

    def collect(self) -> Iterator[Metric]:
        yield _gauge("ready", "1 when the engine is loaded and warm", int(self._ready))
        yield _counter("restarts", "Times that the engine process was started again", self._restarts)
        stats = self._stats
        if stats is None:
            return
        yield _gauge("queue_depth", "Requests that wait for admission", stats.waiting)
        yield _gauge("running", "Sequences that hold blocks", stats.running)
        yield _gauge("rss_bytes", "Resident memory of the engine process", stats.rss_bytes)
        yield _gauge("tasks", "asyncio tasks alive in the engine process", stats.tasks)
        blocks = GaugeMetricFamily(
            "stepwell_kv_blocks",
            "K/V blocks: total, free to allocate, cached without an owner",
            labels=["tier", "state"],
        )
        use = GaugeMetricFamily("stepwell_kv_use_ratio", "Share of K/V blocks that sequences hold", labels=["tier"])
        for tier, total in stats.blocks_total.items():
            free = stats.blocks_free.get(tier, 0)
            for state, count in (("total", total), ("free", free), ("cached", stats.blocks_cached.get(tier, 0))):
                blocks.add_metric([tier, state], count)
            use.add_metric([tier], 1 - free / total if total else 0.0)
        yield blocks
        yield use
        yield _counter("steps", "Steps run", stats.steps)
        yield _counter("prompt_tokens", "Prompt tokens admitted", stats.prompt_tokens)
        yield _counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens)
        yield _counter("generated_tokens", "Tokens generated", stats.generated_tokens)
        yield _counter("drafted_tokens", "Tokens drafted", stats.drafted_tokens)
        yield _counter("accepted_tokens", "Drafted tokens accepted", stats.accepted_tokens)
        yield _counter("preemptions", "Sequences preempted", stats.preemptions)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"stepwell_engine_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"stepwell_engine_{name}", text, value=value)
