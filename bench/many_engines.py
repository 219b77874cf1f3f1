"""What 64 engines cost that are read once a second, and whether one that hangs delays the others or a scrape.

Real HTTP on loopback: the engines are servers in a process of their own, each with a busy page of vLLM 0.32.0 (50 kB)
behind a port of its own; one more accepts connections and never answers. With it and without take turns.

``core_share`` is processor time of the reading process over time on the clock, in the same run: the beat with its 64
engine sources and nothing else. ``cpu_seconds`` and ``reads`` are what it is made of. ``core_share_of_exporter`` is the
same of a whole ``tokengap serve`` with them, its join and its page of all these engines included.

``ratio_read_with_hung`` compares how long the others' reads take with the hung engine among the sources and without,
``ratio_scrape_with_hung`` how long a scrape of the exporter takes; medians, and the 95th percentiles beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import psutil

from tokengap.beat import Beat, Sources, deadline
from tokengap.lab.parts import LOOPBACK, free_port
from tokengap.readings import SOCKET, ProcessTable, Readings, SocketSnapshot
from tokengap.sources.engine import EngineSource
from tokengap.topology import Endpoint, Engine, Topology

PAGE = Path(__file__).parent.parent / "tests" / "recorded" / "vllm-0.32.0" / "busy-1.prom"
ENGINES = 64
ROUNDS = 8
SECONDS = 3.0  # a round
EXPORTERS = 2
SCRAPES = 100  # an exporter


async def be_engines(count: int) -> None:
    """Serve ``count`` engines and one that hangs, and print their ports; the last one hangs."""
    page = PAGE.read_bytes()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % len(page)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the reader has gone
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head + page)
                await writer.drain()
        writer.close()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)
        writer.close()

    servers = [await asyncio.start_server(answer, LOOPBACK, 0) for _ in range(count)]
    servers.append(await asyncio.start_server(hang, LOOPBACK, 0))
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


class Nothing:
    """Sources that cost nothing, and a join that keeps how long the pages took."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.reads = 0
        self.failed = 0

    async def read(self, *_: object) -> Any:
        """Answer as either source."""
        return SocketSnapshot(np.zeros(0, dtype=SOCKET)) if len(_) == 1 else ProcessTable()

    def start(self, _: Topology) -> None:
        """Remember nothing."""

    def questions(self, _: object) -> frozenset[int]:
        """Ask nothing."""
        return frozenset()

    def step(self, state: object, readings: Readings) -> tuple[object, Any]:
        """Keep how long each page took."""
        good = [reading for reading in readings.engines.values() if reading.value is not None]
        self.took += [reading.took for reading in good]
        self.reads += len(good)
        self.failed += len(readings.engines) - len(good)
        return state, SimpleNamespace()

    async def publish(self, _: object) -> None:
        """Tell nobody."""


async def read_for(nothing: Nothing, ports: Sequence[int], seconds: float) -> tuple[float, float]:
    """Let a beat read engines for so long; return the processor seconds and those on the clock."""
    engines = tuple(Engine(f"e{port}", f"http://{LOOPBACK}:{port}", (Endpoint(None, port),)) for port in ports)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        pages = {engine.name: EngineSource(engine, session, deadline=deadline(1.0)) for engine in engines}
        beat = Beat(Topology(engines), Sources(nothing, pages, nothing), nothing, nothing.publish)
        kept = len(nothing.took), nothing.reads, nothing.failed
        await beat.once()  # connections are opened, patterns compiled
        del nothing.took[kept[0] :]
        nothing.reads, nothing.failed = kept[1:]
        cpu, clock = time.process_time(), time.monotonic()
        beating = asyncio.create_task(beat.run())
        await asyncio.sleep(seconds)
        cpu, clock = time.process_time() - cpu, time.monotonic() - clock
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    return cpu, clock


@asynccontextmanager
async def exporting(ports: Sequence[int]) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Run ``tokengap serve`` on engines; yield its page and its process."""
    port = free_port()
    command = [sys.executable, "-m", "tokengap", "serve", "--listen", f"{LOOPBACK}:{port}", "--log-level", "error"]
    for each in ports:
        command += ["--engine", f"e{each}=http://{LOOPBACK}:{each}"]
    process = await asyncio.create_subprocess_exec(*command)
    url = f"http://{LOOPBACK}:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"{url}/-/ready") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        yield f"{url}/metrics", psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def scrape(url: str, process: psutil.Process) -> tuple[list[float], float]:
    """Scrape ten times a second; return how long each took, and the exporter's share of a core meanwhile."""
    took = []
    async with aiohttp.ClientSession() as session:
        await asyncio.sleep(2)
        before, began = process.cpu_times(), time.monotonic()
        for _ in range(SCRAPES):
            started = time.perf_counter()
            async with session.get(url, headers={"Accept-Encoding": "gzip"}) as answer:
                await answer.read()
            took.append(time.perf_counter() - started)
            await asyncio.sleep(0.1)
        after, seconds = process.cpu_times(), time.monotonic() - began
    return took, (after.user + after.system - before.user - before.system) / seconds


def high(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


async def measure() -> dict[str, float]:
    """Measure everything once."""
    command = (sys.executable, os.fspath(Path(__file__)), "--engines", str(ENGINES))
    servers = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert servers.stdout is not None
    try:
        *ports, hung = json.loads(await servers.stdout.readline())
        well, ill, cpu, clock, shares = Nothing(), Nothing(), 0.0, 0.0, []
        scrapes: list[float] = []
        scrapes_ill: list[float] = []
        for _ in range(ROUNDS):
            used, lasted = await read_for(well, ports, SECONDS)
            cpu, clock = cpu + used, clock + lasted
            await read_for(ill, [*ports, hung], SECONDS)
        for _ in range(EXPORTERS):
            async with exporting(ports) as (url, process):
                took, share = await scrape(url, process)
            scrapes += took
            shares.append(share)
            async with exporting([*ports, hung]) as (url, process):
                scrapes_ill += (await scrape(url, process))[0]
    finally:
        servers.kill()
        await servers.wait()
    assert well.failed == 0
    assert ill.reads > 0
    median = statistics.median
    return {
        "core_share": round(cpu / clock, 3),
        "cpu_seconds": round(cpu, 2),
        "seconds": round(clock, 1),
        "reads": well.reads,
        "reads_with_hung": ill.reads,
        "core_share_of_exporter": round(statistics.mean(shares), 3),
        "ratio_read_with_hung": round(median(ill.took) / median(well.took), 2),
        "ratio_read_with_hung_p95": round(high(ill.took) / high(well.took), 2),
        "read_ms": round(median(well.took) * 1e3, 2),
        "read_ms_p95": round(high(well.took) * 1e3, 2),
        "ratio_scrape_with_hung": round(median(scrapes_ill) / median(scrapes), 2),
        "ratio_scrape_with_hung_p95": round(high(scrapes_ill) / high(scrapes), 2),
        "scrape_ms": round(median(scrapes) * 1e3, 2),
        "scrape_ms_p95": round(high(scrapes) * 1e3, 2),
    }


def main() -> None:
    """Print the figures as a table, or as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engines", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if arguments.engines:
        asyncio.run(be_engines(arguments.engines))
        return
    figures = asyncio.run(measure())
    if arguments.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:32} {value:>10g}")


if __name__ == "__main__":
    main()
