"""Real engine processes with a real model: killed, stopped, refused, orphaned."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

import cascade.supervisor
from cascade.client import EngineClient
from cascade.config import EngineConfig, TierConfig, save_config
from cascade.errors import EngineFailedError, EngineUnavailableError
from cascade.protocol import GenerateRequest, Plan, SamplingParams
from cascade.supervisor import EngineSupervisor
from tests.cascade.serving import collect, connected, idle_stats, ids_of

START_LIMIT_S = 120.0
GONE_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def config(smol_bundle: Path) -> EngineConfig:
    return EngineConfig([TierConfig("small", str(smol_bundle), kv_blocks=64)], threads=1)


@contextlib.asynccontextmanager
async def supervised(config: EngineConfig, *, heartbeat_limit_s: float = 60.0) -> AsyncIterator[EngineSupervisor]:
    supervisor = EngineSupervisor(config, start_limit_s=START_LIMIT_S, heartbeat_limit_s=heartbeat_limit_s)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


def long_request(request_id: str, max_tokens: int = 400) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id, [504, 338, 253, 1838], Plan("direct", "small"), sampling)


def engine_process() -> psutil.Process:
    (process,) = psutil.Process().children()
    return process


def socket_of(process: psutil.Process) -> Path:
    return Path(next(str(c.laddr) for c in process.net_connections("unix") if c.laddr))


async def until_ready(supervisor: EngineSupervisor, restarts: int) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        while not (supervisor.ready and supervisor.restarts >= restarts):
            await asyncio.sleep(0.02)


async def test_a_killed_engine_fails_its_streams_and_comes_back(config: EngineConfig) -> None:
    async with supervised(config) as supervisor:
        before = await collect(supervisor.client, long_request("before", 12))
        streams = [supervisor.generate(long_request(name)) for name in ("a", "b")]
        for stream in streams:
            await anext(stream)
        engine_process().kill()
        for stream in streams:
            with pytest.raises(EngineFailedError):
                async for _ in stream:
                    pass
        await until_ready(supervisor, 1)
        assert supervisor.restarts == 1
        after = await collect(supervisor.client, long_request("after", 12))
        assert ids_of(after) == ids_of(before)


async def test_between_two_engines_there_is_none(config: EngineConfig) -> None:
    async with supervised(config) as supervisor:
        client = supervisor.client
        engine_process().kill()
        await client.wait_lost()
        with pytest.raises(EngineUnavailableError):
            await collect(client, long_request("a"))
        with pytest.raises(EngineUnavailableError):
            await supervisor.stats()


async def test_a_hung_engine_is_replaced(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade.supervisor, "TERMINATE_LIMIT_S", 0.2)
    async with supervised(config, heartbeat_limit_s=4.0) as supervisor:
        stream = supervisor.generate(long_request("a"))
        await anext(stream)
        hung = engine_process()
        hung.suspend()
        with pytest.raises(EngineFailedError):
            async for _ in stream:
                pass
        await until_ready(supervisor, 1)
        assert engine_process().pid != hung.pid
        assert len(ids_of(await collect(supervisor.client, long_request("b", 5)))) == 5


async def test_stopping_ends_the_process_and_removes_the_socket(config: EngineConfig) -> None:
    async with supervised(config) as supervisor:
        process = engine_process()
        socket = socket_of(process)
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        await supervisor.stop()
        assert not process.is_running()
        assert not socket.parent.exists()
        await supervisor.stop()


async def test_stopping_kills_an_engine_that_does_not_listen(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade.supervisor, "TERMINATE_LIMIT_S", 0.2)
    async with supervised(config) as supervisor:
        process = engine_process()
        process.suspend()
        await supervisor.stop()
        assert not process.is_running()


async def test_stopping_while_a_dead_engine_is_being_replaced_leaves_none(config: EngineConfig) -> None:
    async with supervised(config) as supervisor:
        client = supervisor.client
        engine_process().kill()
        await client.wait_lost()
        while supervisor.restarts == 0:
            await asyncio.sleep(0.01)
        await supervisor.stop()
        assert psutil.Process().children() == []


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    supervisor = EngineSupervisor(EngineConfig([TierConfig("small", str(tmp_path / "nowhere"))]))
    with pytest.raises(EngineUnavailableError, match="nowhere"):
        await supervisor.start()
    assert psutil.Process().children() == []


async def test_an_engine_that_takes_too_long_to_start_is_ended(config: EngineConfig) -> None:
    supervisor = EngineSupervisor(config, start_limit_s=0.05)
    with pytest.raises(EngineUnavailableError, match="not ready within"):
        await supervisor.start()
    assert psutil.Process().children() == []


async def test_back_off_grows_and_starts_at_once(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(config) as supervisor:
        monkeypatch.setattr(cascade.supervisor, "CONNECT_INTERVAL_S", 0.001)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        engine_process().kill()
        while supervisor.restarts < 3:
            await asyncio.sleep(0.01)
        tries = [message for message in caplog.messages if "next try in" in message]
        assert [message.rsplit(maxsplit=2)[1] for message in tries[:2]] == ["0.5", "1.0"]
        monkeypatch.undo()
        await until_ready(supervisor, 4)


@pytest.fixture
def private_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sw-") as directory:
        yield Path(directory)


def start_server(config: EngineConfig, directory: Path) -> subprocess.Popen[str]:
    save_config(directory / "engine.json", config)
    arguments = ["--socket", str(directory / "engine.sock"), "--config", str(directory / "engine.json")]
    return subprocess.Popen(
        [sys.executable, "-m", "cascade.server", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


async def test_sigterm_mid_stream_ends_the_engine_in_order(config: EngineConfig, private_directory: Path) -> None:
    process = start_server(config, private_directory)
    path = private_directory / "engine.sock"
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not path.exists():
                assert process.poll() is None, process.communicate()[1]
                await asyncio.sleep(0.02)
        async with connected(path) as client:
            stream = client.generate(long_request("a"))
            await anext(stream)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(EngineFailedError):
                async for _ in stream:
                    pass
        assert await asyncio.to_thread(process.wait, GONE_LIMIT_S) == 0
        assert "Traceback" not in process.communicate()[1]
    finally:
        process.kill()
        process.wait()


def test_a_directory_open_to_others_is_refused(config: EngineConfig, private_directory: Path) -> None:
    private_directory.chmod(0o755)
    process = start_server(config, private_directory)
    _, errors = process.communicate(timeout=GONE_LIMIT_S)
    assert process.returncode == 1
    assert "chmod 700" in errors


def test_a_socket_that_cannot_be_bound_is_one_line(config: EngineConfig, private_directory: Path) -> None:
    long_path = private_directory / ("x" * 120)
    long_path.mkdir(mode=0o700)
    process = start_server(config, long_path)
    _, errors = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in errors


PARENT = """
import asyncio, sys
from pathlib import Path
from cascade.config import load_config
from cascade.supervisor import EngineSupervisor

async def main():
    supervisor = EngineSupervisor(load_config(Path(sys.argv[1])))
    await supervisor.start()
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_parent(config: EngineConfig, private_directory: Path) -> None:
    save_config(private_directory / "engine.json", config)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(private_directory / "engine.json")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(private_directory)},
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (engine,) = psutil.Process(parent.pid).children()
        parent.kill()
        deadline = time.monotonic() + GONE_LIMIT_S
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        pass  # gone between two looks
    finally:
        parent.kill()
        parent.communicate()


async def test_a_second_client_shares_the_engine(config: EngineConfig) -> None:
    async with supervised(config) as supervisor:
        other = await EngineClient.connect(socket_of(engine_process()))
        mine, theirs = await asyncio.gather(
            collect(supervisor.client, long_request("same", 20)), collect(other, long_request("same", 20))
        )
        assert ids_of(mine) == ids_of(theirs)
        await other.close()


async def test_random_cancels_of_a_real_model_leave_nothing(config: EngineConfig) -> None:
    chance = random.Random(11)

    async def one(client: EngineClient, index: int) -> None:
        sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=index, max_tokens=12, ignore_eos=True)
        prompt = [chance.randrange(20, 49000) for _ in range(chance.randrange(1, 40))]
        patience = chance.randrange(0, 16)
        async with contextlib.aclosing(
            client.generate(GenerateRequest(str(index), prompt, Plan("direct", "small"), sampling))
        ) as events:
            async for _ in events:
                patience -= 1
                if patience < 0:
                    break

    async with supervised(config) as supervisor:
        tasks = (await supervisor.stats()).tasks
        await asyncio.gather(*(one(supervisor.client, index) for index in range(100)))
        stats = await idle_stats(supervisor.client)
        assert stats.blocks_free == stats.blocks_total
        assert stats.tasks == tasks
