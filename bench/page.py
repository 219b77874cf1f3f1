"""What the live page costs a browser, with many streams in flight.

The exporter's web application runs in a process of its own; every second it publishes a view in which all streams have
aged and some have got tokens. Chromium, without a window, opens the page at ``/streams``, which shows the most of them,
beside a blank page of the same server: how long until something is painted, until the first beat is there, what JSON
comes each beat, and how much of a core all processes of the browser take while it follows.

    python bench/page.py [--streams 2000] [--json]
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import urllib.request
from dataclasses import replace
from multiprocessing.connection import Connection

import click
import numpy as np
import psutil
from playwright.async_api import Browser, Page, async_playwright

from scrape import running, view_of
from tokengap.view import View
from tokengap.web.now import MOST
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

PAINT = """new Promise((done) => new PerformanceObserver((list) => done(list.getEntries()[0].startTime))
  .observe({ type: "paint", buffered: true }))"""
BEAT = """new Promise((done) => {
  const shown = () => document.getElementById("beat").textContent.startsWith("live");
  const look = () => (shown() ? done(performance.now()) : setTimeout(look, 5));
  look();
})"""


def next_beat(view: View, random: np.random.Generator) -> View:
    """Return the view a second later."""
    streams = view.streams.copy()
    streams["age"] += view.interval
    streams["tokens"] += random.integers(0, 50, len(streams))
    streams["useful"] = np.where(streams["client"] < 2, streams["tokens"], streams["useful"])
    streams["orphaned"] = streams["tokens"] - streams["useful"]
    engine = view.engines[0]
    out = engine.tokens.out + 40.0 * len(streams)
    tokens = replace(engine.tokens, out=out, useful=out / 2, orphaned={"edge": out / 2})
    evidence = f"running {len(streams)}, generation +{40 * len(streams)} in 1.0 s"
    engine = replace(engine, tokens=tokens, evidence=evidence, queue_age=view.beats % 8.0)
    return replace(
        view,
        streams=streams,
        engines=(engine,),
        beats=view.beats + 1,
        at=view.at + view.interval,
        wall=view.wall + view.interval,
    )


def exporter(streams: int, ready: Connection) -> None:
    """Run the exporter's web application, publishing a beat a second; send the port."""

    async def run() -> None:
        random, view = np.random.default_rng(0), view_of(streams)
        serving = Serving()
        for _ in range(300):  # what the chart begins with
            view = next_beat(view, random)
            serving.history.add(view)
        await serving.render_and_publish(view)
        server = Server(make_app(serving))
        await server.start("127.0.0.1", 0)
        ready.send(server.port)
        while True:
            await asyncio.sleep(view.interval)
            view = next_beat(view, random)
            await serving.render_and_publish(view)

    asyncio.run(run())


def fetch(address: str) -> bytes:
    """Return what is answered."""
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read()


async def painted(browser: Browser, address: str) -> tuple[Page, float]:
    """Open an address in a tab of its own; return it, and the seconds until something was painted."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    await page.goto(address)
    return page, await page.evaluate(PAINT) / 1000


def cpu_seconds() -> float:
    """Return the CPU time of all processes of the browser that this process started."""
    browsers = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("chrom")]
    assert browsers, "Chromium runs under another name"
    return sum(sum(one.cpu_times()[:2]) for one in browsers)


async def measure(url: str, streams: int, rounds: int, seconds: float) -> dict[str, object]:
    """Measure the page."""
    program = shutil.which("chromium")
    if program is None:
        raise click.ClickException("needs Chromium: apt-get install -y --no-install-recommends chromium")
    blank, ours, beats = [], [], []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(rounds):
            page, took = await painted(browser, f"{url}/-/healthy")
            blank.append(took)
            await page.close()
            page, took = await painted(browser, f"{url}/streams")
            ours.append(took)
            beats.append(await page.evaluate(BEAT) / 1000)
            await page.close()
        cores = {}
        for path in ("/-/healthy", "/", "/streams"):
            page, _ = await painted(browser, url + path)
            await asyncio.sleep(3)  # what loading costs is not what following costs
            before = cpu_seconds()
            await asyncio.sleep(seconds)
            cores[path] = round((cpu_seconds() - before) / seconds, 3)
            await page.close()
        await browser.close()
    top = len(fetch(f"{url}/api/now?top={MOST}"))
    every_stream = sum(len(fetch(f"{url}/api/streams?offset={offset}")) for offset in range(0, streams, MOST))
    return {
        "streams": streams,
        "cores": cores["/"],
        "cores_500_rows": cores["/streams"],
        "cores_blank": cores["/-/healthy"],
        "first_paint_seconds": round(statistics.median(ours), 3),
        "first_paint_seconds_most": round(max(ours), 3),
        "blank_paint_seconds": round(statistics.median(blank), 3),
        "ratio_paint_to_blank": round(statistics.median(ours) / statistics.median(blank), 2),
        "first_beat_seconds": round(statistics.median(beats), 3),
        "json_bytes": top,
        "json_bytes_every_stream": every_stream,
        "ratio_json_to_every_stream": round(top / every_stream, 3),
    }


@click.command()
@click.option("--streams", default=2000, show_default=True, help="Streams in flight.")
@click.option("--rounds", default=7, show_default=True, help="How often the page is opened.")
@click.option("--seconds", default=15.0, show_default=True, help="For how long it is followed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(streams: int, rounds: int, seconds: float, as_json: bool) -> None:
    """Measure the live page in Chromium."""
    with running(exporter, streams) as (_, port):
        result = asyncio.run(measure(f"http://127.0.0.1:{port}", streams, rounds, seconds))
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, value in result.items():
        click.echo(f"{name:30} {value}")
    click.echo("bar: first_paint_seconds under 1, cores under 0.2, json_bytes under 500,000")


if __name__ == "__main__":
    main()
