"""Faults on the process table, on a replica and in the rules of a network."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from lab import serving
from netns import host
from tokengap.chaos.bench import core_of
from tokengap.chaos.faults import alive, cut_rules
from tokengap.chaos.gateways import Upstream
from tokengap.chaos.replica import replica_part
from tokengap.errors import SetupError
from tokengap.lab.batching import Knobs
from tokengap.lab.parts import LOOPBACK, RunningPart, free_port, running
from tokengap.lab.users import User, Visit

REPLICA = Upstream("a", "127.0.1.1", 8100)


@asynccontextmanager
async def replica(directory: Path, **more: float) -> AsyncIterator[RunningPart]:
    async with running(replica_part("a", free_port(), (LOOPBACK,), Knobs(rate=100.0), **more), directory) as started:
        yield started


async def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    async def holds() -> bool:
        return condition()

    await serving.until(holds, within)


async def health(part: RunningPart) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{LOOPBACK}:{part.part.ports[0]}/health") as answer,
    ):
        return answer.status


@pytest.mark.e2e
async def test_a_core_that_is_killed_is_told_to_everybody(tmp_path: Path):
    """As vLLM does: an error in each stream, 500 to who comes, 503 at /health, and after seconds an end with code 0."""
    async with replica(tmp_path) as part:
        port = part.part.ports[0]
        visits = [Visit(User(f"user-{number}", max_tokens=5000), port) for number in range(3)]
        visiting = [asyncio.create_task(visit.run()) for visit in visits]
        await until(lambda: all(visit.tokens for visit in visits))
        core_of(part.pid).send_signal(signal.SIGBUS)
        outcomes = await asyncio.gather(*visiting)
        assert {(outcome.how, outcome.status) for outcome in outcomes} == {("failed", 200)}
        assert all(visit.answer.said_error and not visit.answer.truncated for visit in visits)
        assert await health(part) == 503
        late = await Visit(User("late"), port).run()
        assert (late.how, late.status) == ("failed", 500)
        assert await asyncio.wait_for(part.process.wait(), 30) == 0


@pytest.mark.e2e
async def test_a_core_that_is_stopped_is_told_to_nobody(tmp_path: Path):
    """/health says 200, no token comes; and afterwards the stream goes on to its end."""
    async with replica(tmp_path) as part:
        visit = Visit(User("user", max_tokens=300), part.part.ports[0])
        visiting = asyncio.create_task(visit.run())
        await until(lambda: visit.tokens > 10)
        core = core_of(part.pid)
        core.suspend()
        await asyncio.sleep(1.5)  # it takes some silence to be taken for stopped
        had = visit.tokens
        await asyncio.sleep(1.0)
        assert visit.tokens == had
        assert await health(part) == 200
        core.resume()
        outcome = await asyncio.wait_for(visiting, 30)
        assert (outcome.how, outcome.tokens, visit.answer.finish_reason) == ("completed", 300, "length")


@pytest.mark.e2e
async def test_nothing_of_a_replica_outlives_it(tmp_path: Path):
    """Its core goes with it, also a stopped one whose front end was killed."""
    async with replica(tmp_path) as part:
        core = core_of(part.pid)
        core.suspend()
        os.kill(part.pid, signal.SIGKILL)
        await until(lambda: not alive(core))


@pytest.mark.e2e
async def test_a_model_is_loaded_before_anybody_is_heard(tmp_path: Path):
    """Connections are refused meanwhile, as vLLM's are."""
    began = asyncio.get_running_loop().time()
    async with replica(tmp_path, load=1.5) as part:
        assert asyncio.get_running_loop().time() - began >= 1.5
        assert await health(part) == 200


def test_a_process_without_a_core_is_not_taken_for_an_engine():
    """What there is instead is named; nothing is ever killed by a pattern of command lines."""
    with subprocess.Popen(
        [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])", "VLLM::EngineCore"]
    ) as process:
        try:
            while not psutil.Process(process.pid).children():
                pass
            with pytest.raises(
                SetupError, match=f"below process {process.pid} there is no VLLM::EngineCor...; there is sleep"
            ):
                core_of(process.pid)
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
    with pytest.raises(SetupError, match="there is no process"):
        core_of(process.pid)


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["drop", "reset"])
@pytest.mark.parametrize("direction", ["both", "to-engine", "to-gateway"])
@pytest.mark.parametrize("after_kb", [None, 20])
def test_nft_takes_the_rules(direction, how, after_kb):
    """Of every kind of cut, in a network namespace of its own."""
    rules = cut_rules(REPLICA, direction, how, after_kb)
    with host() as made:
        space = made.space(address=False)
        ran = subprocess.run(space.command("nft", "-f", "-"), input=rules, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("direction", "has", "has_not"),
    [("both", ("daddr", "saddr"), ()), ("to-engine", ("daddr",), ("saddr",)), ("to-gateway", ("saddr",), ("daddr",))],
)
def test_a_cut_is_of_its_direction_and_of_arriving_packets(direction, has, has_not):
    """Dropped on departure, the sender would hear of it."""
    rules = cut_rules(REPLICA, direction, "drop", None)
    assert "hook input" in rules
    assert all(f"{word} 127.0.1.1 tcp" in rules for word in has)
    assert not any(f"{word} 127.0.1.1 tcp" in rules for word in has_not)
