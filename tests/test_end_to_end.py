"""The exporter as it runs: what it watches dies, and a real Prometheus asks for every series."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from deployed import prometheus_config
from lab.native import answers, runtime_socket
from lab.serving import served
from monitoring import aimed, prometheus
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.gateway import gateway_part
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.lab.nvml.profiles import H100, many
from tokengap.lab.parts import LOOPBACK, Part, RunningPart, free_ports, running
from tokengap.lab.users import User, Visit, crowd
from tokengap.series import SERIES
from tokengap.series.cost import ENGINE_GPUS
from tokengap.series.engines import ENGINE_RESTARTS, ENGINE_STATE
from tokengap.series.streams import STREAMS, STREAMS_ENDED
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT, TOKENS_PENDING, TOKENS_UNATTRIBUTED, TOKENS_USEFUL

pytestmark = pytest.mark.e2e

COUNTERS = tuple(series.name for series in SERIES if series.kind == "counter")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Exporter:
    """A running ``tokengap serve``, scraped all the time: every scrape is answered, and no counter ever falls."""

    url: str
    session: aiohttp.ClientSession
    last: Samples = field(default_factory=dict)

    @property
    def target(self) -> str:
        """What Prometheus is told to scrape."""
        return self.url.removeprefix("http://")

    async def scrape(self) -> Samples:
        async with self.session.get(f"{self.url}/metrics") as answer:
            assert answer.status == 200, "the exporter has stopped serving"
            text = await answer.text()
        now = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        for key, value in self.last.items():
            if key in now or not key[0].startswith("tokengap_gpu_"):  # what a GPU counts goes with it
                assert now.get(key, -1.0) >= value, f"{key} fell from {value} to {now.get(key)}"
        self.last |= {key: value for key, value in now.items() if key[0] in COUNTERS}
        return now

    async def until(self, condition: Callable[[Samples], bool], within: float = 20.0) -> Samples:
        """Scrape until a condition holds of the page."""
        deadline = time.monotonic() + within
        while not condition(page := await self.scrape()):
            assert time.monotonic() < deadline, f"this did not come true in {within} s; {total(page, TOKENS_OUT)} out"
            await asyncio.sleep(0.2)
        return page


def total(page: Samples, series: object, **labels: str) -> float:
    return sum(value for (name, has), value in page.items() if name == str(series) and labels.items() <= set(has))


def state(page: Samples) -> str:
    return next(dict(has)["state"] for (name, has), value in page.items() if name == str(ENGINE_STATE) and value == 1)


def balanced(page: Samples) -> bool:
    parts = (TOKENS_USEFUL, TOKENS_ORPHANED, TOKENS_PENDING, TOKENS_UNATTRIBUTED)
    return total(page, TOKENS_OUT) == pytest.approx(sum(total(page, part) for part in parts), abs=0.01)


@dataclass
class Watched:
    """What is watched, each a process of its own, and the exporter."""

    engine: RunningPart
    edge: RunningPart
    edge_port: int
    exporter: Exporter
    exporter_part: RunningPart

    @asynccontextmanager
    async def crowd(self, count: int, **plan) -> AsyncIterator[list[asyncio.Task]]:
        """Let users come for the length of the block; those who are still there at its end are cut off."""
        tasks = [asyncio.create_task(Visit(user, self.edge_port).run()) for user in crowd(count, 0, **plan)]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def serve_part(port: int, *arguments: str, variables: Mapping[str, str] | None = None) -> Part:
    named = ("env", *(f"{name}={value}" for name, value in variables.items())) if variables else ()
    command = (*named, sys.executable, "-m", "tokengap", "serve", "--listen", f"{LOOPBACK}:{port}", *arguments)
    return Part("exporter", command, (port,))


@asynccontextmanager
async def watched(
    directory: Path,
    knobs: Knobs,
    *more: str,
    variables: Mapping[str, str] | None = None,
    gpus: Sequence[str] = (),
    wrapped: Sequence[str] = (),
    leak: bool = True,
) -> AsyncIterator[Watched]:
    """Run an engine, the gateway and the exporter on them, the exporter with further variables. ``gpus`` are the
    engine's by its settings; ``wrapped`` is a command that becomes the engine's, which it gets as arguments. The
    gateway leaks, unless told otherwise."""
    edge, engine, exporter = free_ports(3)
    url, settings = f"http://{LOOPBACK}:{engine}", directory / "tokengap.yaml"
    named = ("--engine", f"worker={url}")
    if gpus:
        settings.write_text(yaml.safe_dump({"engines": [{"name": "worker", "url": url, "gpus": list(gpus)}]}))
        named = ("--config", str(settings))
    arguments = (*named, "--hop", f"edge={LOOPBACK}:{edge}", *more)
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        part = engine_part(engine, knobs)
        part = replace(part, command=(*wrapped, *part.command))
        one = await stack.enter_async_context(running(part, directory))
        two = await stack.enter_async_context(running(gateway_part(edge, engine, leak=leak), directory))
        part = serve_part(exporter, *arguments, variables=variables)
        three = await stack.enter_async_context(running(part, directory))
        watch = Exporter(f"http://{LOOPBACK}:{exporter}", session)
        deadline = time.monotonic() + 15
        while (await session.get(f"{watch.url}/-/ready")).status != 200:
            assert time.monotonic() < deadline, "the exporter is not ready"
            await asyncio.sleep(0.1)
        yield Watched(one, two, edge, watch, three)


async def test_the_engine_dies_and_comes_back(tmp_path: Path):
    """It is called dead, then restarted; what it generates after that is added to what it had generated before."""
    async with watched(tmp_path, Knobs(rate=50)) as lab:
        async with lab.crowd(6, max_tokens=1000) as users:
            before = await lab.exporter.until(lambda page: total(page, TOKENS_OUT) > 100)
            lab.engine.signal(signal.SIGKILL)
            dead = await lab.exporter.until(lambda page: state(page) == "dead")
            outcomes = await asyncio.gather(*users)
        assert {outcome.how for outcome in outcomes} == {"failed"}
        assert total(dead, TOKENS_OUT) >= total(before, TOKENS_OUT)
        (port,) = lab.engine.part.ports
        async with running(engine_part(port, Knobs(rate=50)), tmp_path):
            # What a new engine has generated when it is first read is its base, and no growth.
            await lab.exporter.until(lambda page: state(page) != "dead")
            async with lab.crowd(2, max_tokens=50) as users:
                await asyncio.gather(*users)
            after = await lab.exporter.until(lambda page: total(page, TOKENS_OUT) == total(dead, TOKENS_OUT) + 100)
        assert total(after, ENGINE_RESTARTS) >= 1
        assert balanced(after)


async def test_the_proxy_dies(tmp_path: Path):
    """Its streams end, for users and for the engine, and the exporter goes on; nothing stays in flight."""
    async with watched(tmp_path, Knobs(rate=50)) as lab, lab.crowd(6, max_tokens=1000) as users:
        await lab.exporter.until(lambda page: total(page, TOKENS_OUT) > 100)
        lab.edge.signal(signal.SIGKILL)
        assert {outcome.how for outcome in await asyncio.gather(*users)} == {"failed"}
        page = await lab.exporter.until(lambda page: total(page, STREAMS) == 0 and state(page) == "idle")
        assert balanced(page)
        assert sum(total(page, STREAMS_ENDED, how=how) for how in ("cancelled", "failed", "orphaned")) >= 4


async def test_all_users_die(tmp_path: Path):
    """At once, without a word: the gateway reads on for them, and what is generated from then on is orphaned."""
    async with watched(tmp_path, Knobs(rate=50)) as lab:
        async with lab.crowd(4, max_tokens=200):
            before = await lab.exporter.until(lambda page: total(page, TOKENS_OUT) > 100)
        assert total(before, TOKENS_ORPHANED) < 8
        await lab.exporter.until(lambda page: total(page, STREAMS, client="gone") == 4)
        page = await lab.exporter.until(lambda page: total(page, STREAMS) == 0 and state(page) == "idle")
        assert total(page, TOKENS_OUT) == 4 * 200
        assert total(page, TOKENS_ORPHANED, hop="edge") > 300
        assert balanced(page)


@asynccontextmanager
async def gated(directory: Path) -> AsyncIterator[tuple[int, int]]:
    """Run an engine and a gateway before it, through which somebody was answered. Yields their ports."""
    behind, gate = free_ports(2)
    command = (
        *(sys.executable, "-m", "tokengap", "admit", "--engine", f"gated=http://{LOOPBACK}:{behind}", "--slots", "1"),
        *("--admit-listen", f"{LOOPBACK}:{gate}", "--admit-control", str(directory / "admit.sock")),
    )
    async with (
        running(engine_part(behind, Knobs()), directory),
        running(Part("admit", command, (gate,)), directory),
    ):
        assert (await Visit(User("served", max_tokens=5), gate).run()).how == "completed"
        yield behind, gate


@asynccontextmanager
async def everything(directory: Path, nvml: FakeNvml) -> AsyncIterator[Watched]:
    """Run what lets the exporter say all it can: GPUs of which one is lost, an XID, a price, HAProxy's own interface,
    a second engine whose page has a line that is none, and a third behind a gateway that has served somebody. One slot:
    whoever comes second waits."""
    one, two = many(replace(H100, utilization=0), 2)  # at rest, so that there is idle power
    nvml.set(one, two)

    async def half_a_page(_: web.Request) -> web.Response:
        return web.Response(text='vllm:num_requests_running{model_name="m"} 0\nvllm:num_requests_waiting{} x\n')

    app = web.Application()
    app.router.add_get("/metrics", half_a_page)
    async with (
        served(app) as spare,
        gated(directory) as (behind, gate),
        runtime_socket(directory / "haproxy.sock", answers()),
        watched(
            directory,
            Knobs(max_num_seqs=1),
            *("--engine", f"spare=http://{LOOPBACK}:{spare}"),
            *("--engine", f"gated=http://{LOOPBACK}:{behind}", "--admit", f"http://{LOOPBACK}:{gate}"),
            *("--haproxy-socket", f"edge={directory}/haproxy.sock"),
            *("--gpu-hour-price", "2.50"),
            variables={name: nvml.environment[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_CONTROL")},
        ) as lab,
    ):
        nvml.set(*(replace(gpu, processes={lab.engine.pid: 1 << 30}) for gpu in (one, two)))
        await lab.exporter.until(lambda page: total(page, ENGINE_GPUS, state="up") == 2)
        nvml.xid(0, 79)
        nvml.lose(1)
        yield lab


async def test_a_real_prometheus_answers_for_every_series(tmp_path: Path, nvml: FakeNvml):
    """Each name of the catalogue, with everything that there can be."""
    async with (
        everything(tmp_path, nvml) as lab,
        lab.crowd(3, max_tokens=5000),
        prometheus(aimed(prometheus_config(), [lab.exporter.target], [], scrape=2), tmp_path) as server,
    ):
        wanted = {f"{series}_bucket" if series.kind == "gaugehistogram" else str(series) for series in SERIES}
        unanswered, deadline = set(wanted), time.monotonic() + 30
        while unanswered and time.monotonic() < deadline:
            unanswered = {name for name in unanswered if not await server.query(name)}
            await asyncio.sleep(0.2)
        assert unanswered == set()
        assert list((await server.values("up")).values()) == [1.0]


async def test_promtool_has_nothing_to_say(tmp_path: Path):
    """About the page of a running exporter, with streams of all kinds in flight."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not installed: apt-get install prometheus"
    async with watched(tmp_path, Knobs(max_num_seqs=1)) as lab, lab.crowd(2, max_tokens=5000):
        left = await Visit(User("left", max_tokens=5000, leave_at=0.1), lab.edge_port).run()
        assert left.how == "left"
        await lab.exporter.until(lambda page: total(page, STREAMS, client="gone") == 1)
        async with lab.exporter.session.get(f"{lab.exporter.url}/metrics") as answer:
            page = await answer.read()
    checked = await asyncio.to_thread(subprocess.run, [promtool, "check", "metrics"], input=page, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
