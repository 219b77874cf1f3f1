"""The stand-in engine under everything that looks like a hang and is none: no false `stuck`, and a true one in time.

Ten minutes in `make test-long`; half a minute, with windows of two seconds for ten, in `make test`.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lab.serving import until
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.gateway import gateway_part
from tokengap.lab.parts import LOOPBACK, Part, free_ports, running
from tokengap.lab.replay import Replay, page, replaying
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit, crowd

pytestmark = pytest.mark.e2e

V0 = (Path(__file__).parent / "recorded" / "vllm-written" / "vllm-0.6.6-v0-idle-00s.prom").read_bytes()
KNOBS = Knobs(max_num_seqs=4, rate=40.0, prefill_rate=2000.0)
BEAT = 0.5


@dataclass
class Watched:
    """The exporter's verdicts on two engines, read four times a beat: each change, with when and why."""

    url: str
    session: aiohttp.ClientSession
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    changes: list[tuple[float, str, str, str]] = field(default_factory=list)

    async def look_on(self) -> None:
        while True:
            async with self.session.get(f"{self.url}/api/engines") as answer:
                now = {each["name"]: each for each in await answer.json()} if answer.status == 200 else {}
            for name, each in now.items():
                if self.engines.get(name, {}).get("state") != each["state"]:
                    self.changes.append((time.monotonic(), name, each["state"], each["evidence"]))
            self.engines = now or self.engines
            await asyncio.sleep(BEAT / 4)

    def states(self, name: str) -> set[str]:
        return {state for _, of, state, _ in self.changes if of == name}

    async def until(self, state: str, within: float) -> float:
        """Wait until the engine is in this state, and return when that was first seen."""

        async def true() -> bool:
            return self.engines.get("worker", {}).get("state") == state

        await until(true, within)
        return max(at for at, name, of, _ in self.changes if (name, of) == ("worker", state))


@dataclass
class Lab:
    """What runs, and how long a window is."""

    control: EngineControl
    ports: tuple[int, int]
    watched: Watched
    window: float
    chance: random.Random

    def visit(self, user: User) -> asyncio.Task[object]:
        """Let a user come, to the engine or to the gateway in front of it that reads on for those who left."""
        return asyncio.create_task(Visit(user, self.chance.choice(self.ports)).run())


async def burst(lab: Lab) -> None:
    """More than it has slots for, all at once."""
    await asyncio.gather(*(lab.visit(user) for user in crowd(12, 0, max_tokens=20)))


async def pause(lab: Lab) -> None:
    """Nobody, for longer than a window, once the last orphan is generated."""
    await lab.watched.until("idle", 60)
    await asyncio.sleep(1.2 * lab.window)


async def long_prefill(lab: Lab) -> None:
    """One prompt that takes two windows and a half, in which only KV usage moves."""
    prompt = int(2.5 * lab.window * KNOBS.prefill_rate)
    await lab.visit(User("long", prompt_tokens=prompt, max_tokens=10))


async def aborts(lab: Lab) -> None:
    """All leave, in the queue, in prefill and in decode, by FIN and by RST."""
    leavers = [
        User(f"leaver-{n}", 2000, 400, leave_at=lab.chance.uniform(0, 2.5), leaving=lab.chance.choice(["fin", "rst"]))
        for n in range(8)
    ]
    await asyncio.gather(*map(lab.visit, leavers))


async def slow(lab: Lab) -> None:
    """A token in two thirds of a window."""
    await lab.control.turn(rate=1.5 / lab.window)
    task = lab.visit(User("slow", prompt_tokens=10, max_tokens=3))
    await task
    await lab.control.turn(rate=KNOBS.rate)


async def whole(lab: Lab) -> None:
    """Answers that are not streamed: not a byte until their end."""
    await asyncio.gather(*(lab.visit(user) for user in crowd(4, 0, max_tokens=60, stream=False)))


ACTS: tuple[Callable[[Lab], Awaitable[None]], ...] = (burst, long_prefill, aborts, slow, pause, whole)


@asynccontextmanager
async def lab_of(directory: Path, window: float) -> AsyncIterator[Lab]:
    """Run the engine, a gateway that leaks, a V0 engine at rest, and an exporter on them."""
    engine, edge, exporter = free_ports(3)

    def tick(n: int) -> bytes:
        return re.sub(rb"(iteration_tokens_total_count\S*) 3\.0", rb"\1 %d.0" % (3 + n), V0)

    async with AsyncExitStack() as stack:
        ticks = [page(window * n, tick(n)) for n in range(1000)]
        idle: Replay = await stack.enter_async_context(replaying(ticks))
        await stack.enter_async_context(running(engine_part(engine, KNOBS), directory))
        await stack.enter_async_context(running(gateway_part(edge, engine, leak=True), directory))
        command = (
            *(sys.executable, "-m", "tokengap", "serve", "--listen", f"{LOOPBACK}:{exporter}"),
            *("--engine", f"worker=http://{LOOPBACK}:{engine}", "--engine", f"v0={idle.url}"),
            *("--hop", f"edge={LOOPBACK}:{edge}"),
            *("--window", f"{window:g}s", "--prefill-budget", f"{window:g}s", "--interval", f"{BEAT:g}s"),
        )
        await stack.enter_async_context(running(Part("exporter", command, (exporter,)), directory))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        watched = Watched(f"http://{LOOPBACK}:{exporter}", session)
        looking = asyncio.create_task(watched.look_on())
        try:
            yield Lab(EngineControl(engine), (engine, edge), watched, window, random.Random(7))
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


async def run(lab: Lab, seconds: float) -> list[str]:
    """Do one act after the other, each at least once, until the time is over; then freeze the engine at work."""
    done: list[str] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(done) < len(ACTS):
        act = ACTS[len(done)] if len(done) < len(ACTS) else lab.chance.choice(ACTS)
        await act(lab)
        done.append(act.__name__)
    assert "stuck" not in lab.watched.states("worker"), lab.watched.changes
    assert {"busy", "idle"} <= lab.watched.states("worker")
    assert lab.watched.states("v0") == {"idle"}
    return done


async def freeze(lab: Lab) -> None:
    """The engine stops in mid-decode with a full queue: stuck within two windows (and two beats), not before, and busy
    again when it goes on."""
    users = [lab.visit(user) for user in crowd(9, 0, max_tokens=100)]

    async def at_work() -> bool:
        truth = await lab.control.truth()
        return truth.now.running == KNOBS.max_num_seqs and truth.generated > 0

    await until(at_work)
    await asyncio.sleep(3 * BEAT)
    await lab.control.freeze()
    frozen = time.monotonic()
    stuck = await lab.watched.until("stuck", 4 * lab.window)
    assert 2 * lab.window - 2 * BEAT <= stuck - frozen <= 2 * lab.window + 3 * BEAT
    assert re.match(r"running 4, waiting \d+, nothing moved for", lab.watched.engines["worker"]["evidence"])
    await lab.control.thaw()
    await lab.watched.until("busy", 2 * lab.window)
    outcomes = await asyncio.gather(*users)
    assert {outcome.how for outcome in outcomes} == {"completed"}
    assert lab.watched.engines["worker"]["restarts"] == 0


@pytest.mark.alone
async def test_half_a_minute_of_everything(tmp_path: Path):
    """Every act once or more, no false alarm; then a true one."""
    async with lab_of(tmp_path, window=2.0) as lab:
        await run(lab, 12)
        await freeze(lab)


@pytest.mark.long
async def test_ten_minutes_of_everything(tmp_path: Path):
    """The same with the default window of 10 s, for ten minutes; then a true alarm."""
    async with lab_of(tmp_path, window=10.0) as lab:
        await run(lab, 600)
        await freeze(lab)
