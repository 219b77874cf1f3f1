"""What a scrape of /metrics costs beside a static answer of the same size.

Two servers run, each in its own process: the exporter's web application, with a view of ``--streams`` streams that is
published anew every second as the beat does, and a bare aiohttp application that answers constant bytes. Both are
asked over kept-alive connections in interleaved rounds, plain and gzipped; a claim is the median over the rounds.

    python bench/scrape.py [--streams 9000] [--json]
    python bench/scrape.py --url http://127.0.0.1:10788/metrics --pid PID    # an exporter that runs already
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import click
import numpy as np
import psutil
from aiohttp import web
from yarl import URL

from tokengap.view import AGE_BOUNDS, CLIENTS, STREAM, EngineView, SourceView, StreamGroup, Tokens, View
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

CONNECTIONS = 8
CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def view_of(streams: int) -> View:
    """Return a view of one engine behind two hops with this many streams, in all client states."""
    hops = ("edge", "admit", "engine")
    table = np.zeros(streams, dtype=STREAM)
    number = np.arange(streams)
    table["id"], table["hop"], table["client"] = number, number % len(hops), number % len(CLIENTS)
    table["leaks_at"], table["slack"] = -1, np.nan
    table["age"] = number * 0.003
    groups = []
    for hop, name in enumerate(hops):
        for code, client in enumerate(CLIENTS):
            ages = table["age"][(table["hop"] == hop) & (table["client"] == code)]
            counts = np.histogram(ages, bins=(0.0, *AGE_BOUNDS, np.inf))[0]
            oldest = float(ages.max(initial=0.0))
            groups.append(StreamGroup("worker", name, client, len(ages), tuple(counts.tolist()), ages.sum(), oldest))
    worker = EngineView(
        name="worker",
        url="http://127.0.0.1:8100/metrics",
        models=("org/model-8b",),
        state="busy",
        evidence="tokens rise",
        tokens=Tokens(out=16092.0, useful=15100.0, orphaned={"edge": 992.0}),
        running=float(streams),
        waiting=0.0,
        slots=float(streams),
        slots_from="settings",
        queue_age=0.0,
        queue_age_from="sockets",
        slack={"interactive": 8.0},
        coverage=1.0,
        open_streams=streams,
        progress_age=0.0,
        restarts=0,
        ghost_steps=0.0,
        breach_seconds=0.0,
        skipped={},
    )
    return View(
        at=0.0,
        wall=1_764_000_000.0,
        beats=1,
        late_beats=0,
        degraded_beats=0,
        interval=1.0,
        accounting="exact",
        events_lost=0,
        sources=(SourceView("sockets", "", True, 0.02, ""), SourceView("engine", "worker", True, 0.004, "")),
        engines=(worker,),
        hop_names=hops,
        groups=tuple(groups),
        endings={},
        streams=table,
    )


def exporter(streams: int, ready: Connection) -> None:
    """Run the exporter's web application, publishing a beat a second; send the port."""

    async def run() -> None:
        view = view_of(streams)
        serving = Serving()
        await serving.render_and_publish(view)
        server = Server(make_app(serving))
        await server.start("127.0.0.1", 0)
        ready.send(server.port)
        while True:
            await asyncio.sleep(view.interval)
            view = replace(view, beats=view.beats + 1, wall=view.wall + view.interval)
            await serving.render_and_publish(view)

    asyncio.run(run())


def static(bodies: dict[str, bytes], ready: Connection) -> None:
    """Run an application that answers each path with constant bytes; send the port."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=bodies[request.path], content_type="text/plain")

    async def run() -> None:
        app = web.Application()
        for path in bodies:
            app.router.add_get(path, answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def running(target: object, *args: object) -> Iterator[tuple[int, int]]:
    """Run one of the servers in a process of its own; give its pid and port."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=target, args=(*args, sender), daemon=True)
    process.start()
    sender.close()
    try:
        yield process.pid, receiver.recv()
    finally:
        process.terminate()
        process.join()


class Asker(asyncio.Protocol):
    """One kept-alive connection that asks again as soon as it has the answer. Cheap, so that the server is measured."""

    def __init__(self, request: bytes):
        self.request = request
        self.answers = 0
        self.failed: Exception | None = None
        self._head = bytearray()
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first time."""
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Count what arrives down to the end of the answer, then ask again."""
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            if not self._head.startswith(b"HTTP/1.1 200"):
                self.failed = RuntimeError(self._head[:end].decode())
                self.transport.close()
                return
            self._missing = int(CONTENT_LENGTH.search(self._head)[1]) - (len(self._head) - end - 4)
            self._head.clear()
        if self._missing == 0:
            self.answers += 1
            self.transport.write(self.request)


@dataclass
class Target:
    """A URL that is measured, and what was measured: requests per second and CPU time per request, by round."""

    url: URL
    pid: int | None
    gzip: bool
    per_second: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    async def round(self, seconds: float) -> None:
        """Ask over all connections for so many seconds."""
        encoding = "Accept-Encoding: gzip\r\n" if self.gzip else ""
        request = f"GET {self.url.raw_path_qs} HTTP/1.1\r\nHost: {self.url.authority}\r\n{encoding}\r\n".encode()
        loop = asyncio.get_running_loop()
        askers = [
            (await loop.create_connection(lambda: Asker(request), self.url.host, self.url.port))[1]
            for _ in range(CONNECTIONS)
        ]
        process = psutil.Process(self.pid) if self.pid else None
        answers, start = sum(asker.answers for asker in askers), time.perf_counter()
        cpu = sum(process.cpu_times()[:2]) if process else 0.0
        await asyncio.sleep(seconds)
        answers, took = sum(asker.answers for asker in askers) - answers, time.perf_counter() - start
        for asker in askers:
            asker.transport.close()
            if asker.failed is not None:
                raise asker.failed
        self.per_second.append(answers / took)
        if process:
            self.cpu_us.append((sum(process.cpu_times()[:2]) - cpu) / answers * 1e6)


def fetch(url: URL, *, gzip: bool) -> bytes:
    """Return what the exporter answers, as it goes over the wire."""
    request = urllib.request.Request(str(url), headers={"Accept-Encoding": "gzip"} if gzip else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def measure(url: URL, pid: int | None, rounds: int, seconds: float) -> dict[str, object]:
    """Measure the exporter at ``url`` against static answers of the same size."""
    bodies = {"/plain": fetch(url, gzip=False), "/gzip": fetch(url, gzip=True)}
    result: dict[str, object] = {}
    with running(static, bodies) as (static_pid, port):
        for path, body in bodies.items():
            scrape = Target(url, pid, path == "/gzip")
            plain = Target(URL(f"http://127.0.0.1:{port}{path}"), static_pid, path == "/gzip")
            for number in range(rounds + 1):
                for target in (scrape, plain) if number % 2 else (plain, scrape):
                    asyncio.run(target.round(seconds if number else 0.3))
            ratios = [a / b for a, b in zip(scrape.per_second[1:], plain.per_second[1:], strict=True)]
            suffix = "" if path == "/plain" else "_gzip"
            result |= {
                f"ratio_scrape_to_static{suffix}": round(statistics.median(ratios), 3),
                f"scrapes_per_second{suffix}": round(statistics.median(scrape.per_second[1:])),
                f"static_per_second{suffix}": round(statistics.median(plain.per_second[1:])),
                f"scrape_cpu_us{suffix}": round(statistics.median(scrape.cpu_us[1:])) if pid else None,
                f"static_cpu_us{suffix}": round(statistics.median(plain.cpu_us[1:])),
                f"page_bytes{suffix}": len(body),
            }
    return result | {"rss_bytes": psutil.Process(pid).memory_info().rss if pid else None}


@click.command()
@click.option("--streams", default=9000, show_default=True, help="Streams in the view that is served.")
@click.option("--rounds", default=25, show_default=True, help="Rounds of each kind.")
@click.option("--seconds", default=0.4, show_default=True, help="Length of a round.")
@click.option("--url", help="Measure this running exporter instead of starting one.")
@click.option("--pid", type=int, help="The process of --url, for its memory and CPU time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(streams: int, rounds: int, seconds: float, url: str | None, pid: int | None, as_json: bool) -> None:
    """Measure scrapes of /metrics against static answers of the same size."""
    if url:
        result = measure(URL(url), pid, rounds, seconds)
    else:
        with running(exporter, streams) as (exporter_pid, port):
            result = measure(URL(f"http://127.0.0.1:{port}/metrics"), exporter_pid, rounds, seconds)
        result = {"streams": streams} | result
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, value in result.items():
        click.echo(f"{name:30} {value}")
    click.echo("bar: both ratios at least 0.8; aim: rss_bytes under 150,000,000")


if __name__ == "__main__":
    main()
