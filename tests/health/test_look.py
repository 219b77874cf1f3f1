"""One look at real engines on the wire: each verdict right, and as early as it can be."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from health.looking import WINDOW, at, in_prefill, judged, look, requests_at, working
from lab.serving import engine, gateway, served, until
from tokengap.health.look import GLANCES, MORE_GLANCES, Look, Plan
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import LOOPBACK, RunningPart, free_port, free_ports, running
from tokengap.lab.proxies import PROXIES, Wiring, haproxy_config
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit, crowd

pytestmark = pytest.mark.usefixtures("unhurried")


class TestEngineThatLives:
    async def test_busy_with_all_slots_taken_and_a_queue(self):
        """12 of 12 slots and 8 in the queue: busy, without waiting for a window, and never asked for a completion."""
        async with working(20, max_num_seqs=12) as port:
            finding = await look(port, window=60, ask_within=1)
            assert judged(finding) == ("busy", 0)
            assert finding.evidence.startswith("running 12, waiting 8, generation +")
            assert finding.reads == GLANCES
            assert finding.seconds < 60
            assert await requests_at(port) == 20

    async def test_slow_but_alive(self):
        """A token a window, which glances do not see: busy after one window."""
        async with working(1, rate=1.5 / WINDOW) as port:
            assert judged(await look(port)) == ("busy", 0)

    async def test_a_long_prefill_moves_only_the_cache(self):
        """One prompt of which no token is there for minutes: busy (vLLM issue 51261)."""
        async with engine(prefill_rate=50) as port, in_prefill(port):
            finding = await look(port)
        assert judged(finding) == ("busy", 0)
        assert "KV usage" in finding.evidence

    async def test_idle(self):
        """At rest, at once."""
        async with engine() as port:
            finding = await look(port, window=60)
            assert judged(finding) == ("idle", 0)
            assert (finding.evidence, finding.reads) == ("running 0, waiting 0", GLANCES)

    async def test_sleeping(self):
        """By order, whatever it held when it went to sleep."""
        async with working(2) as port:
            await EngineControl(port).sleep()
            assert judged(await look(port, ask_within=1)) == ("sleeping", 0)
            await EngineControl(port).wake_up()
            assert judged(await look(port)) == ("busy", 0)

    @pytest.mark.e2e
    @pytest.mark.parametrize("seconds", [8, pytest.param(600, marks=pytest.mark.long)])
    async def test_a_mixed_run_is_never_stuck(self, seconds):
        """Users come, leave, queue and are gone, prompts are short and long: looked at all the while."""
        verdicts = set()
        chance = random.Random(4)
        ends = time.monotonic() + seconds
        async with engine(max_num_seqs=3, rate=40, prefill_rate=2000) as port:
            while time.monotonic() < ends:
                tokens, prompt = chance.randint(5, 60), chance.choice((10, 3000))
                users = crowd(
                    chance.randint(1, 9), 1, max_tokens=tokens, prompt_tokens=prompt, leave_at=chance.random()
                )
                crowds = asyncio.gather(*(Visit(user, port).run() for user in users))
                while not crowds.done():
                    verdicts.add((await look(port)).verdict)
                await crowds
        assert verdicts <= {"busy", "idle"}
        assert "busy" in verdicts


class TestStuckEngine:
    @pytest.mark.parametrize("users", [2, 20], ids=["mid-decode", "full-queue"])
    async def test_frozen(self, users):
        """Two windows without progress, no less: stuck."""
        async with working(users, max_num_seqs=12) as port:
            await EngineControl(port).freeze()
            finding = await look(port, ask_within=1)
            assert judged(finding) == ("stuck", 1)
            assert f"running {min(users, 12)}" in finding.evidence
            assert finding.seconds >= 2 * WINDOW
            assert finding.reads == GLANCES + 2
            assert finding.asked.said == "not asked: it has work"
            assert await requests_at(port) == users

    async def test_thawed_in_the_second_window(self, monkeypatch):
        """One window is a pause: busy, with what moved."""
        async with working(2) as port:
            control, waits = EngineControl(port), []
            await control.freeze()

            async def wait(self, seconds):
                waits.append(seconds)
                if waits.count(self.plan.window) == 2:
                    await control.thaw()
                await asyncio.sleep(self.due_in(seconds))

            monkeypatch.setattr(Look, "wait", wait)
            finding = await look(port)
            assert judged(finding) == ("busy", 0)
            assert "generation +" in finding.evidence

    async def test_a_prefill_budget_is_waited_for(self):
        """Where an engine may show nothing of a prompt, it has to be silent for that long; then the verdict falls."""
        async with working(2) as port:
            await EngineControl(port).freeze()
            finding = await look(port, prefill_budget=3 * WINDOW)
            assert judged(finding) == ("stuck", 1)
            assert finding.seconds >= 3 * WINDOW

    async def test_a_first_prompt(self):
        """No token since it began: its first prompt may take the judge's whole budget, and nothing is claimed."""
        async with engine(prefill_rate=50) as port, in_prefill(port):
            await EngineControl(port).freeze()
            finding = await look(port)
        assert judged(finding) == ("busy", 0)
        assert "a prompt may be in the making (stuck from 120 s)" in finding.evidence

    async def test_gauges_that_a_mass_abort_left_behind(self):
        """The page says running for ever, and nobody is connected: idle (vLLM issue 22545)."""
        async with engine() as port:
            async with working(3, port=port):
                await EngineControl(port).freeze()
            finding = await look(port, ask_within=1)
        assert judged(finding) == ("idle", 0)
        assert finding.evidence.startswith("stale gauges: running 3, nothing moved for ")
        assert finding.evidence.endswith("0 open sockets")
        assert finding.asked.said == "not asked: it has work"

    async def test_such_gauges_where_somebody_is_connected(self):
        """A connection at rest and a stream look alike to one look: stuck, as the page says."""
        async with engine() as port, aiohttp.ClientSession(at(port)) as session:
            await (await session.get("/version")).read()
            async with working(3, port=port):
                await EngineControl(port).freeze()
            assert judged(await look(port)) == ("stuck", 1)

    async def test_such_gauges_and_a_scraper(self, monkeypatch):
        """One read at which nobody is connected is enough: who comes later is not what the page shows."""
        async with engine() as port, AsyncExitStack() as scraper:
            async with working(3, port=port):
                await EngineControl(port).freeze()

            async def scrape() -> None:
                session = await scraper.enter_async_context(aiohttp.ClientSession(at(port)))
                await (await session.get("/metrics")).read()

            Interruption(monkeypatch, scrape)
            finding = await look(port)
        assert judged(finding) == ("idle", 0)
        assert finding.evidence.startswith("stale gauges: ")

    async def test_such_gauges_where_the_server_is_behind_a_door(self, monkeypatch):
        """Connections to a container are not in our books: that there is none means nothing."""
        monkeypatch.setattr("tokengap.health.others.CONTAINER_DOORS", frozenset(map(program_name, [os.getpid()])))
        async with engine() as port:
            async with working(3, port=port):
                await EngineControl(port).freeze()
            assert judged(await look(port)) == ("stuck", 1)


def program_name(pid: int) -> str:
    return psutil.Process(pid).name()


@asynccontextmanager
async def an_engine(directory: Path, port: int, **knobs) -> AsyncIterator[RunningPart]:
    """Run an engine as a process of its own, with a start time of its own."""
    async with running(engine_part(port, Knobs(**knobs)), directory) as part:
        yield part


class Interruption:
    """Does something instead of waiting for the next window, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Awaitable[object]]) -> None:
        self.acts = [act]
        real = Look.wait

        async def wait(look: Look, seconds: float) -> None:
            if seconds == look.plan.window and self.acts:
                await self.acts.pop()()
            else:
                await real(look, seconds)

        monkeypatch.setattr(Look, "wait", wait)


@pytest.mark.e2e
class TestEngineThatEnds:
    async def test_killed(self, tmp_path: Path):
        """Nobody listens: dead, after a second and a third try; and so when it happens between two reads."""
        port = free_port()
        async with an_engine(tmp_path, port):
            await EngineControl(port).crash()
        finding = await look(port, window=60)
        assert judged(finding) == ("dead", 2)
        assert (finding.evidence[:18], finding.reads) == ("connection refused", GLANCES)

    async def test_killed_between_two_reads(self, tmp_path: Path, monkeypatch):
        """It was frozen, and then it was gone."""
        port = free_port()
        async with an_engine(tmp_path, port) as part, working(2, port=port):
            await EngineControl(port).freeze()

            async def kill() -> None:
                part.signal(signal.SIGKILL)
                await part.process.wait()

            Interruption(monkeypatch, kill)
            assert judged(await look(port)) == ("dead", 2)

    async def test_restarted_between_two_reads(self, tmp_path: Path, monkeypatch):
        """A new start time that stays: restarted, which is healthy, also for --ask."""
        port = free_port()
        async with AsyncExitStack() as lives:
            first = await lives.enter_async_context(an_engine(tmp_path, port))
            await lives.enter_async_context(working(2, port=port))
            await EngineControl(port).freeze()

            async def restart() -> None:
                await first.stop()
                await lives.enter_async_context(an_engine(tmp_path, port))

            Interruption(monkeypatch, restart)
            finding = await look(port, window=30, ask_within=1)
            assert judged(finding) == ("restarted", 0)
            assert finding.evidence.startswith("a new process")
            assert (finding.restarts, finding.reads) == (1, GLANCES + 1 + MORE_GLANCES)
            assert finding.asked.said == "not asked: it has just started"
            assert await requests_at(port) == 0

    async def test_requests_that_a_restart_failed_are_no_evidence(self, tmp_path: Path):
        """All that were in flight fail, and all that come fail too: the new engine is healthy at every look."""
        port = free_port()
        async with an_engine(tmp_path, port):
            visits = [asyncio.create_task(Visit(User(f"u{n}", max_tokens=9000), port).run()) for n in range(4)]

            async def all_run() -> bool:
                return (await EngineControl(port).truth()).now.running == 4

            await until(all_run)
            await EngineControl(port).crash()
            assert {visit.how for visit in await asyncio.gather(*visits)} == {"failed"}
        async with an_engine(tmp_path, port), aiohttp.ClientSession(at(port)) as session:
            for _ in range(3):
                async with session.post("/v1/completions", data=b"{}") as answer:
                    assert answer.status == 400
                assert judged(await look(port))[1] == 0


class TestWhatCannotBeTold:
    async def test_log_stats_are_off(self):
        """A page without the engine: blind, never idle and never dead."""
        async with working(1, disable_log_stats=True) as port:
            finding = await look(port)
        assert judged(finding) == ("blind", 3)
        assert finding.evidence.startswith("no series of an engine on the page")

    async def test_a_server_that_fails(self):
        """HTTP 500 for the page."""
        async with served(web.Application()) as port:
            finding = await look(port)
        assert judged(finding) == ("blind", 3)
        assert finding.evidence.startswith("HTTP 404")

    async def test_one_that_hangs_delays_no_other(self):
        """It accepts and says nothing: blind after two timeouts; the others were shown long before."""
        shown = []
        async with engine() as port:
            with socket.create_server((LOOPBACK, 0)) as hung:  # the kernel accepts, and nobody answers
                findings = await look(hung.getsockname()[1], port, show=shown.append, timeout=1)
        assert [judged(finding) for finding in findings] == [("blind", 3), ("idle", 0)]
        assert findings[0].evidence.startswith("no page within 1 s")
        assert [finding.verdict for finding in shown] == ["idle", "blind"]
        assert findings[1].seconds < findings[0].seconds
        assert findings[0].seconds > 2

    @pytest.mark.parametrize("running", [0, 3])
    async def test_backends_whose_pages_do_not_say_when_they_started(self, running):
        """Counters that rise and fall in turn: a page of the larger set looks like progress, and is none."""
        turns = itertools.cycle((100, 9000))

        async def page(_: web.Request) -> web.Response:
            return web.Response(
                text=f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
                f"vllm:generation_tokens_total {next(turns)}\n"
            )

        app = web.Application()
        app.add_routes([web.get("/metrics", page)])
        async with served(app) as port:
            finding = await look(port, window=60)
        assert judged(finding) == ("blind", 3)
        assert finding.evidence.startswith("several backends behind this address; check each directly")

    @pytest.mark.e2e
    async def test_two_engines_behind_a_least_connection_proxy(self, tmp_path: Path):
        """HAProxy gives the reads to both in turn: blind, whatever they do, and nobody is asked for a completion."""
        edge, *ports = free_ports(3)
        async with AsyncExitStack() as parts:
            for port in ports:
                directory = tmp_path / str(port)
                directory.mkdir()
                await parts.enter_async_context(an_engine(directory, port))
            wiring = Wiring(edge, ports[0], leak=False, directory=tmp_path)
            balanced = replace(
                PROXIES["haproxy"],
                config=lambda wiring: (
                    haproxy_config(wiring) + f"    server other {LOOPBACK}:{ports[1]}\n    balance leastconn\n"
                ),
            )
            await parts.enter_async_context(running(balanced.part(wiring), tmp_path))
            for users in (0, 3):
                for port in ports:
                    await parts.enter_async_context(working(users, port=port))
                finding = await look(edge, window=30, ask_within=1)
                assert judged(finding) == ("blind", 3)
                assert finding.evidence.startswith("several backends behind this address; check each directly")
            assert [await requests_at(port) for port in ports] == [3, 3]


class TestProxy:
    async def test_that_works(self):
        """The list of models comes through, and nothing else was asked for."""
        async with engine() as port, gateway(port, leak=False) as edge:
            finding = await look(proxies=[edge])
            assert judged(finding) == ("answers", 0)
            assert finding.evidence == "/v1/models lists tokengap-lab"
            assert await requests_at(port) == 0

    async def test_whose_engine_is_gone(self):
        """It answers with a 502: blind, since the proxy itself lives."""
        async with gateway(free_port(), leak=False) as edge:
            finding = await look(proxies=[edge])
        assert judged(finding) == ("blind", 3)
        assert finding.evidence.startswith("/v1/models: HTTP 502")

    async def test_that_is_gone_or_is_none(self):
        """A refused connection is dead; a page that is no list of models is blind."""

        async def no_models(_: web.Request) -> web.Response:
            return web.json_response({"data": [1]})

        app = web.Application()
        app.add_routes([web.get("/v1/models", no_models)])
        async with served(app) as port:
            gone, none = await look(proxies=[free_port(), port])
        assert judged(gone) == ("dead", 2)
        assert judged(none) == ("blind", 3)
        assert none.evidence == "/v1/models: the answer is no list of models"


def test_the_plan():
    """Two windows, or as many as the budget takes; glances within a short window."""
    assert Plan().windows == 2
    assert Plan(window=10, prefill_budget=35).windows == 4
    assert Plan(window=1).glance == 0.05
