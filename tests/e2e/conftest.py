"""A real gateway: `stepwell serve` as a process of its own, with its engine process, on a free port."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

START_LIMIT_S = 120.0


@dataclass
class LiveGateway:
    """A running gateway and how to talk to it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def engine_processes(self) -> list[psutil.Process]:
        """Children of the gateway: the engine, and nothing else."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
        matching = [s.value for s in samples if labels.items() <= s.labels.items()]
        assert matching, f"no sample of {name} with {labels} in\n{text}"
        return sum(matching)

    def wait(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Poll until the condition holds; fails with the gateway's log when it never does."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"the gateway ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"waited {limit_s} s in vain:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


Start = Callable[..., LiveGateway]


@pytest.fixture(scope="module")
def start_gateway(smol_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`start_gateway()` -> a gateway that is ready, with SmolLM2 as both tiers; it ends with the module."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*, drain_timeout_s: float = 20, wait_ready: bool = True) -> LiveGateway:
        directory = tmp_path_factory.mktemp("gateway")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = directory / "stepwell.yaml"
        config.write_text(
            f"server: {{port: {port}, drain_timeout_s: {drain_timeout_s}}}\n"
            f"tiers: {{small: {{bundle: {smol_bundle}}}, large: {{bundle: {smol_bundle}}}}}\n"
            "policies: [{name: pair, route: {speculate: {draft: small, verify: large}}}]\n"
            "engine: {kv_memory: 256MiB, threads: 2}\n"
        )
        log = directory / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "gateway.cli.main", "serve", "-c", str(config), "--no-pull"],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                cwd=Path(__file__).parents[2],
            )
        started.append(process)
        gateway = LiveGateway(f"http://127.0.0.1:{port}", process, log)
        if wait_ready:
            gateway.wait(gateway.ready, START_LIMIT_S)
        return gateway

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
    for process in started:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def live(start_gateway: Start) -> LiveGateway:
    """One gateway for the tests of a module, that leave it as they found it."""
    return start_gateway()
