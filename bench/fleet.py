"""What a fleet of exporters costs the Prometheus that scrapes it.

A real Prometheus with ``deploy/prometheus.yml`` scrapes 200 exporters with 8 engines and 8 GPUs each every 5 s, once
without rules and once with ``alerts/``; before that 50 exporters, with rules. The exporters are one process that
answers at an address each (127.1.0.1 and so on), with the page that :mod:`tokengap.series` renders: its counters grow
and its gauges move, so that nothing is stored for free. There is no load on them: what an exporter itself costs,
``scrape.py`` and ``many_engines.py`` tell.

Each runs for a minute, in which a window of five minutes gets as many samples (12) as it has at an interval of 25 s,
and those of hours no more: on old data rules that look back far cost more than here.

``ratio_samples_to_expected`` is what was stored, to what was there to store; ``ratio_rules_to_interval`` the usual
evaluation of the slowest group of rules, on the clock, to the interval of that group. Above 1 it does not keep up, and
``rule_iterations_missed`` says how often. On a machine that is busy otherwise that says more of the machine:
``cores`` and ``ratio_cores_with_rules`` (with rules to without) are processor time. ``ratio_..._to_small`` is the large
fleet to the small one, a quarter of it.

    python bench/fleet.py [--exporters 200] [--json]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import click
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from scrape import running, view_of
from tokengap.gpu_readings import Gpu
from tokengap.lab.parts import LOOPBACK, Part, free_port
from tokengap.lab.parts import running as part_running
from tokengap.series.render import render
from tokengap.view import AGE_BOUNDS, CLIENTS, Cost, GpusView, GpuView, StreamGroup, Tokens, View

ROOT = Path(__file__).parent.parent
ENGINES = 8
HOPS = ("edge", "engine")
SMALL = 4  # the small fleet is one of so many parts of the large one
WARM_UP, SECONDS = 20.0, 40.0
LOOK_EVERY = 2.0


def fleet_view(host: str, engines: int, gpus: int) -> View:
    """Return what the exporter of one host shows: engines that are busy and leak a little, each with its GPU."""
    base = view_of(0)
    (worker,) = base.engines
    cost = Cost(1, 0, 7200.1, 1440.3, {"full": 3.6e6, "active": 3e6}, {"full": 7.2e5, "active": 6e5, "sole": 3.6e4}, {})
    named = tuple(
        replace(
            worker,
            name=f"{host}-{number}",
            url=f"http://{host}:{8000 + number}",
            tokens=Tokens(16092.5, 15000.5, {"edge": 1000.5, "engine": 41.5}, pending=50.25),
            running=31.0,
            slots=64.0,
            queue_age=0.75,
            slack={"interactive": 7.25},
            cost=cost if gpus else worker.cost,
        )
        for number in range(engines)
    )
    counts = (3,) * (len(AGE_BOUNDS) + 1)
    groups = tuple(
        StreamGroup(engine.name, "edge", client, sum(counts), counts, 61.5, 12.25)
        for engine in named
        for client in CLIENTS
    )
    endings = {
        (engine.name, "edge", how): 64.0 for engine in named for how in ("completed", "cancelled", "orphaned", "failed")
    }
    cards = tuple(_gpu(f"GPU-{host}-{number}", number, f"{host}-{number % max(engines, 1)}") for number in range(gpus))
    return replace(
        base,
        engines=named,
        hop_names=HOPS,
        groups=groups,
        endings=endings,
        gpus=GpusView("ok", "", "nvml", "590.48.01", 1, base.wall, cards),
    )


def _gpu(uuid: str, index: int, engine: str) -> GpuView:
    gpu = Gpu(
        uuid=uuid,
        index=index,
        at=0.0,
        name="NVIDIA H100 80GB HBM3",
        pci=f"00000000:{index:02X}:00.0",
        utilization=0.97,
        memory_used=80_000_000_000,
        memory_total=85_520_809_984,
        power=631.95,
        energy=123_456.789,
        temperature=59.5,
        sm_clock=1.98e9,
        throttled={"hw_thermal": 1.5, "sw_thermal": 0.0, "power_brake": 0.0},
        ecc_uncorrectable=0,
        pcie_replays=3,
        mig=False,
    )
    return GpuView(gpu, True, (engine,), "processes", 0, 71.15, False, 123_456.789, "counter", 0, {})


def samples(page: bytes) -> int:
    """Return how many samples are on a page, each one series in Prometheus."""
    return sum(not line.startswith(b"#") for line in page.splitlines())


class MovingPage:
    """A page whose counters grow and whose gauges move. Rendering it anew for each scrape would be the bottleneck."""

    def __init__(self, view: View) -> None:
        self._lines: list[tuple[bytes, float, float, float]] = []  # what stands before, value, growth, swing
        for number, line in enumerate(render(view).text.splitlines()):
            before, _, value = line.rpartition(b" ")
            if line.startswith(b"#"):
                self._lines.append((line, math.nan, 0.0, 0.0))
                continue
            grows = before.partition(b"{")[0].endswith(b"_total")
            amount = float(value)
            self._lines.append((before, amount, amount / 600 if grows else 0.0, 0.0 if grows else number % 7 / 100))

    def at(self, seconds: float) -> bytes:
        """Return the page so many seconds after it began."""
        swing = math.sin(seconds)
        return b"".join(
            before + b"\n" if value != value else b"%b %.12g\n" % (before, value * (1 + by * swing) + growth * seconds)
            for before, value, growth, by in self._lines
        )


def exporters(count: int, ready: Connection) -> None:
    """Be so many exporters, each at an address of its own and all at one port, which is sent."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    began, port = time.monotonic(), free_port()

    async def serve(host: str) -> asyncio.Server:
        page = MovingPage(fleet_view(host, ENGINES, ENGINES))

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # Prometheus has gone
                while await reader.readuntil(b"\r\n\r\n"):
                    body = page.at(time.monotonic() - began)
                    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n"
                    writer.write(head % len(body) + body)
                    await writer.drain()
            writer.close()

        return await asyncio.start_server(answer, host, port)

    async def run() -> None:
        servers = [await serve(host) for host in hosts(count)]
        ready.send(port)
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(run())


def hosts(count: int) -> Iterator[str]:
    """Yield the addresses of so many exporters; all of 127/8 is this host."""
    yield from (f"127.1.{number // 250}.{number % 250 + 1}" for number in range(count))


@dataclass
class Prometheus:
    """A Prometheus that runs: what it says of itself and of the fleet."""

    url: str
    process: psutil.Process
    session: aiohttp.ClientSession

    async def itself(self) -> dict[tuple[str, str], float]:
        """Return its own series, by name and group of rules."""
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        found: dict[tuple[str, str], float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "quantile" not in sample.labels:
                    found[sample.name, sample.labels.get("rule_group", "").rpartition(";")[2]] += sample.value
        return found

    async def value(self, expression: str) -> float:
        """Return what an expression is, 0 where it is nothing."""
        async with self.session.get(f"{self.url}/api/v1/query", params={"query": expression}) as answer:
            rows = (await answer.json())["data"]["result"]
        return float(rows[0]["value"][1]) if rows else 0.0

    async def rules(self) -> list[tuple[float, str]]:
        """Return how long each rule took last, with its name, the slowest first."""
        async with self.session.get(f"{self.url}/api/v1/rules") as answer:
            groups = (await answer.json())["data"]["groups"]
        return sorted(
            ((rule["evaluationTime"], rule["name"]) for group in groups for rule in group["rules"]), reverse=True
        )


@asynccontextmanager
async def prometheus(port: int, count: int, folder: Path, *, rules: bool) -> AsyncIterator[Prometheus]:
    """Run a Prometheus as ``deploy/`` has it, on so many exporters, while the block lasts."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    targets = [f"{host}:{port}" for host in hosts(count)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets, "labels": {"cluster": "main"}}]
    config["rule_files"] = [str(ROOT / "alerts" / "*.yml")] if rules else []
    del config["alerting"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    own = free_port()
    command = (
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={LOOPBACK}:{own}",
    )
    async with part_running(Part("prometheus", command, (own,)), folder) as part, aiohttp.ClientSession() as session:
        yield Prometheus(f"http://{LOOPBACK}:{own}", psutil.Process(part.process.pid), session)


async def measure(count: int, *, rules: bool) -> dict[str, float]:
    """Measure one fleet, and say on standard error what is slow in it."""
    click.echo(f"{count} exporters, {'with' if rules else 'without'} rules, {WARM_UP + SECONDS:g} s", err=True)
    with running(exporters, count) as (_, port), tempfile.TemporaryDirectory() as folder:
        async with prometheus(port, count, Path(folder), rules=rules) as server:
            await asyncio.sleep(WARM_UP)
            before, began = await server.itself(), time.monotonic()
            cpu = sum(server.process.cpu_times()[:2])
            looks: dict[str, list[float]] = defaultdict(list)
            memory = 0
            while time.monotonic() - began < SECONDS:
                await asyncio.sleep(LOOK_EVERY)
                memory = max(memory, server.process.memory_info().rss)
                for (name, group), value in (await server.itself()).items():
                    if name == "prometheus_rule_group_last_duration_seconds":
                        looks[group].append(value)
            after, seconds = await server.itself(), time.monotonic() - began
            cpu = sum(server.process.cpu_times()[:2]) - cpu
            up = await server.value("count(up == 1)")
            recorded = await server.value("count(engine:tokengap_tokens_out:rate5m)")
            scrape_seconds = await server.value("max(scrape_duration_seconds)")
            scraped = await server.value("sum(scrape_samples_scraped)")
            slow = (await server.rules())[:5]
    for took, name in slow:
        click.echo(f"  {took:8.3f} s  {name}", err=True)
    if up != count or recorded != count * ENGINES * rules:
        sys.exit(f"of {count} exporters {up:g} are up, of {count * ENGINES} engines {recorded:g} are recorded")

    def grown(name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in after.items() if key[0] == name)

    interval = {
        group: value for (name, group), value in after.items() if name == "prometheus_rule_group_interval_seconds"
    }
    series = after["prometheus_tsdb_head_series", ""]
    usual = {group: statistics.median(took) for group, took in looks.items()}
    return {
        "samples_per_second": grown("prometheus_tsdb_head_samples_appended_total") / seconds,
        "expected_per_second": scraped / 5.0,
        "series": series,
        "rule_group_seconds": max(usual.values(), default=0.0),
        "rules_to_interval": max((took / interval[group] for group, took in usual.items()), default=0.0),
        "rule_seconds_per_minute": grown("prometheus_rule_evaluation_duration_seconds_sum") / seconds * 60,
        "rule_iterations_missed": grown("prometheus_rule_group_iterations_missed_total"),
        "scrape_seconds": scrape_seconds,
        "rss_bytes": float(memory),
        "rss_bytes_per_series": memory / series,
        "cores": cpu / seconds,
    }


async def compare(count: int) -> dict[str, float]:
    """Measure a small fleet, and the large one without rules and with them."""
    small = await measure(count // SMALL, rules=True)
    bare = await measure(count, rules=False)
    large = await measure(count, rules=True)
    none, one, two = (samples(render(fleet_view("host", engines, 0)).text) for engines in (0, 1, 2))
    with_gpus = samples(render(fleet_view("host", 1, 2)).text), samples(render(fleet_view("host", 1, 1)).text)
    page = render(fleet_view("host", ENGINES, ENGINES))
    figures = {
        "exporters": float(count),
        "engines": float(count * ENGINES),
        "series_without_engine": float(none),
        "series_per_engine": float(two - one),
        "series_per_gpu": float(with_gpus[0] - with_gpus[1]),
        "series_per_exporter": float(samples(page.text)),
        "page_bytes": float(len(page.text)),
        "page_bytes_gzip": float(len(page.text_gzip)),
        "ratio_gzip_to_text": len(page.text_gzip) / len(page.text),
        "ratio_samples_to_expected": large["samples_per_second"] / large["expected_per_second"],
        "ratio_rules_to_interval": large.pop("rules_to_interval"),
        "ratio_rules_to_small": large["rule_seconds_per_minute"] / small["rule_seconds_per_minute"],
        "ratio_memory_to_small": large["rss_bytes"] / small["rss_bytes"],
        "ratio_cores_to_small": large["cores"] / small["cores"],
        "ratio_cores_with_rules": large["cores"] / bare["cores"],
        "cores_without_rules": bare["cores"],
        "rss_bytes_without_rules": bare["rss_bytes"],
    }
    return {key: float(f"{value:.4g}") for key, value in (figures | large).items()}


@click.command()
@click.option("--exporters", "count", default=200, show_default=True, help="Exporters of the large fleet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(count: int, as_json: bool) -> None:
    """Print what a Prometheus takes for a fleet of exporters."""
    figures = asyncio.run(compare(count))
    if as_json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:28} {value:>12,g}")


if __name__ == "__main__":
    main()
