"""``tokengap serve`` on servers that answer as recorded ones did: every verdict over real HTTP, on the clock."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lab.serving import until
from tokengap.lab.parts import LOOPBACK, Part, free_port, running
from tokengap.lab.replay import Phase, Replay, hang, page, refuse, status

pytestmark = pytest.mark.e2e

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.prom").read_bytes()


@dataclass
class Watched:
    """A running exporter and what it has said of its one engine, in order, each verdict once.

    ``judged`` is what it said when it had the page: on a machine that stalls for the time of a beat there is none.
    """

    url: str
    session: aiohttp.ClientSession
    said: list[str] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def judged(self) -> list[str]:
        seen = [state for state in self.said if state != "blind"]
        return [state for state, before in zip(seen, [None, *seen], strict=False) if state != before]

    async def look(self) -> None:
        async with self.session.get(f"{self.url}/api/engines") as answer:
            if answer.status != 200:
                return  # before the first beat
            (self.engine,) = await answer.json()
        if self.said[-1:] != [self.engine["state"]]:
            self.said.append(self.engine["state"])

    async def look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.05)

    async def until(self, state: str, evidence: str = "", within: float = 30.0) -> dict[str, Any]:
        """Wait until the verdict is this, and what it rests on matches."""

        async def true() -> bool:
            return self.engine.get("state") == state and bool(re.search(evidence, self.engine["evidence"]))

        try:
            await until(true, within)
        except AssertionError:
            raise AssertionError(f"not {state} within {within} s, but {self.said}: {self.engine}") from None
        return self.engine


@asynccontextmanager
async def serving(directory: Path, replay: Replay, *settings: str) -> AsyncIterator[str]:
    """Run an exporter on a replay, four beats a second, and yield its address."""
    port = free_port()
    command = (
        *(sys.executable, "-m", "tokengap", "serve", "--listen", f"{LOOPBACK}:{port}", "--engine", f"e={replay.url}"),
        *("--interval", "0.25s", *settings),
    )
    async with running(Part("exporter", command, (port,)), directory):
        yield f"http://{LOOPBACK}:{port}"


@asynccontextmanager
async def watching(directory: Path, replay: Replay, *settings: str, streams: int = 0) -> AsyncIterator[Watched]:
    """Run an exporter on a replay, with so many streams open to it."""
    async with aiohttp.ClientSession() as session:
        held = [await session.post(f"{replay.url}/v1/completions", json={}) for _ in range(streams)]
        async with serving(directory, replay, *settings) as url:
            watched = Watched(url, session)
            looking = asyncio.create_task(watched.look_on())
            try:
                yield watched
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                for answer in held:
                    answer.close()


def only_its_page(replay: Replay, streams: int = 0) -> bool:
    """Tell whether nothing was asked of the engine but its page (and what the test itself asked)."""
    return replay.count("GET") == replay.count("GET", "/metrics") and len(replay.asked) == replay.count("GET") + streams


@pytest.mark.parametrize("streams", [0, 1], ids=["no socket", "its socket"])
async def test_the_long_prefill_of_vllm_0_32_0_is_busy(tmp_path: Path, streams: int):
    """Every counter at 0 for 25 s (in 6), KV usage moves: busy throughout, without the help of a prefill budget. When
    it stands still as well, with its socket open, the same engine is stuck."""
    seconds = (1, 5, 10, 15, 20, 25)
    phases = [page(at - 1, recorded(f"vllm-0.32.0/long-prefill-{at:02}s")) for at in seconds]
    async with Replay([phases[0]]) as replay:
        replay.phases = tuple(phases)
        async with watching(tmp_path, replay, "--window", "2.5s", "--prefill-budget", "1s", streams=streams) as watched:
            await watched.until("busy")
            await replay.play(faster=4)
            assert watched.judged == ["busy"]
            after = await watched.until("stuck" if streams else "idle")
        assert after["evidence"].startswith("running 1, nothing moved" if streams else "stale gauges: running 1")
        assert after["family"] == "vllm"
        assert only_its_page(replay, streams)


async def test_the_core_of_vllm_0_32_0_is_killed(tmp_path: Path):
    """Frozen values for 3 s, then refused: busy, then dead, and never stuck on the way."""
    at = (0.0, 0.9, 1.5, 2.1, 2.6)
    phases: Sequence[Phase] = [page(t, recorded(f"vllm-0.32.0/core-killed-{n}")) for n, t in enumerate(at)]
    async with Replay(phases[:1]) as replay:
        replay.phases = (*phases, refuse(3.1))
        async with watching(tmp_path, replay, streams=4) as watched:
            await watched.until("busy")
            await replay.play()
            dead = await watched.until("dead")
            assert watched.judged == ["busy", "dead"]
            assert dead["evidence"].startswith("connection refused")
            assert dead["restarts"] == 0


async def test_fastllm_proxy_19_a_dead_backend_and_its_restart(tmp_path: Path):
    """85 minutes (here: two windows of a second) of 0 tokens, refused, and up with a new start time: stuck, dead,
    restarted; counted once, and idle in the end."""
    async with Replay([page(0, recorded("vllm-0.32.0/busy-0"))]) as replay:
        async with watching(tmp_path, replay, "--window", "1s", "--prefill-budget", "1s", streams=2) as watched:
            stuck = await watched.until("stuck")
            assert re.fullmatch(r"running 4, waiting 5, nothing moved for \d\.\d s, 2 open sockets", stuck["evidence"])
            await replay.show(refuse(1))
            await watched.until("dead")
            await replay.show(page(2, recorded("vllm-0.32.0/fresh")))
            up = await watched.until("restarted")
            assert (up["restarts"], up["family"]) == (1, "vllm")
            await watched.until("idle")
            assert watched.judged == ["busy", "stuck", "dead", "restarted", "idle"]
        assert only_its_page(replay, streams=2)


async def test_v0_idle_ticks_are_idle(tmp_path: Path):
    """A step without tokens each 10 s (here: each half second), for a minute: idle and nothing else."""
    first = recorded("vllm-written/vllm-0.6.6-v0-idle-00s")

    def after(ticks: int) -> bytes:
        return re.sub(rb"(iteration_tokens_total_count\S*) 3\.0", rb"\1 %d.0" % (3 + ticks), first)

    assert after(6) != first
    async with Replay([page(0, first)]) as replay:
        replay.phases = tuple(page(10 * n, after(n)) for n in range(7))
        async with watching(tmp_path, replay, "--window", "1s") as watched:
            await watched.until("idle")
            await replay.play(faster=20)
            assert watched.judged == ["idle"]
            assert watched.engine["restarts"] == 0
        assert only_its_page(replay)


async def test_a_page_that_fails_and_one_that_hangs_are_blind(tmp_path: Path):
    """HTTP 500 with streams open (vLLM 49983), silence, no page: blind each time, and well again at once."""
    busy = page(0, recorded("vllm-0.32.0/busy-0"))
    async with Replay([busy]) as replay, watching(tmp_path, replay, streams=1) as watched:
        for phase, evidence in (
            (status(1, 500), "HTTP 500"),
            (hang(2), "no page within"),
            (page(3, recorded("vllm-0.32.0/nostats")), "no series of an engine on the page"),
        ):
            await replay.show(busy)
            await watched.until("busy")
            await replay.show(phase)
            blind = await watched.until("blind")
            assert evidence in blind["evidence"] or "no answer within" in blind["evidence"]
        assert set(watched.said) == {"busy", "blind"}


async def test_llama_cpp_in_a_long_step_is_busy_and_asked_once(tmp_path: Path):
    """Its page waits behind a step of many seconds: busy meanwhile, by one question and no other; then by its page."""
    busy, later = (page(n, recorded(f"llamacpp-pages/busy-{n}")) for n in (0, 1))
    async with Replay([busy]) as replay:
        async with watching(tmp_path, replay, "--window", "1s", streams=1) as watched:
            await watched.until("busy")
            await replay.show(hang(1))
            await watched.until("busy", "waits for the step")
            asked = replay.count("GET", "/metrics")
            await asyncio.sleep(3)  # twelve beats, three windows
            assert replay.count("GET", "/metrics") == asked
            assert watched.said == ["busy"]
            await replay.show(later)
            await watched.until("busy", "^running 4, waiting 2")
            assert watched.said == ["busy"]
            assert watched.engine["family"] == "llamacpp"
        assert only_its_page(replay, streams=1)


async def test_llama_cpp_hung_is_stuck(tmp_path: Path):
    """The same, and it does not end: stuck when the prefill budget is spent without a byte."""
    async with Replay([page(0, recorded("llamacpp-pages/busy-0"))]) as replay:
        async with watching(tmp_path, replay, "--window", "1s", "--prefill-budget", "3s", streams=1) as watched:
            await watched.until("busy")
            await replay.show(hang(1))
            stuck = await watched.until("stuck")
        assert stuck["evidence"].startswith("no page for")
        assert watched.judged == ["busy", "stuck"]


async def test_other_engines_are_known_by_their_pages_and_asked_for_nothing_else(tmp_path: Path):
    """No setting says what they are. In particular SGLang's /health, which generates a token, is never called."""
    families = ("sglang", "tgi", "trtllm", "triton", "lmdeploy")
    async with AsyncExitStack() as stack:
        replays = {
            family: await stack.enter_async_context(Replay([page(0, recorded(f"{family}-pages/busy-0"))]))
            for family in families
        }
        session = await stack.enter_async_context(aiohttp.ClientSession())
        paths = {"trtllm": "/prometheus/metrics"}  # its /metrics is something else
        urls = [f"{name}={replay.url}{paths.get(name, '')}" for name, replay in replays.items()]
        more = [word for url in urls for word in ("--engine", url)]
        first = await stack.enter_async_context(Replay([page(0, recorded("vllm-0.32.0/busy-0"))]))
        url = await stack.enter_async_context(serving(tmp_path, first, *more))

        async def all_busy() -> bool:
            async with session.get(f"{url}/api/engines") as answer:
                found = await answer.json() if answer.status == 200 else []
            return {each["name"]: each["family"] for each in found if each["state"] == "busy"} == {
                "e": "vllm",
                **{family: family for family in families},
            }

        await until(all_busy, 30)
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text()
        assert [family for family in families if f'family="{family}"' not in text] == []
        asked = {name: set(replay.asked) for name, replay in replays.items()}
        assert asked == {name: {("GET", paths.get(name, "/metrics"))} for name in families}
