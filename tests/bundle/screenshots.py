"""``make screenshots``: the pictures of the README, from a lab under way and a real Prometheus.

A calm, then many impatient people, who leave a gateway that reads on for them; the pictures are taken in the middle of
that. Everything is as it is anywhere (the gateway, the exporter, Prometheus with the alert rules); only the engine and
NVIDIA's library are stand-ins.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import click

from bundle.panels import Span, panels, shown
from bundle.pictures import Shown, draw
from deployed import prometheus_config
from monitoring import Prometheus, aimed, prometheus
from tokengap.bundle.boards import boards
from tokengap.bundle.render.dashboards import dashboard
from tokengap.bundle.render.file import as_yaml
from tokengap.bundle.render.rules import alerts
from tokengap.bundle.site import Site
from tokengap.lab.batching import Knobs
from tokengap.lab.demo import Time
from tokengap.lab.nvml.fake import FakeNvml, compile_library
from tokengap.lab.nvml.profiles import H100, FakeGpu, many
from tokengap.lab.parts import LOOPBACK, Part
from tokengap.lab.scrape import Exporter
from tokengap.lab.stage import Plan, beside, lab_parts, ports, run, staged
from tokengap.lab.users import Outcome, Visit, passers_by

#: Seconds between two scrapes, and between two points of a graph.
SCRAPE: Final = 2.0

#: What is drawn of each dashboard; None: all of it.
PICTURES: Final[dict[str, tuple[str, ...] | None]] = {
    "oncall": ("Decide", "What rings", "The deadline", "Whom it serves"),
    "money": ("In the time shown", "Where it leaks", "What it costs"),
}

#: A GPU before anybody comes: what it draws then is its idle power.
_AT_REST: Final = replace(H100, utilization=0, power=118.0)

_CRITICAL: Final = 'max(ALERTS{alertname=~"Tokengap.+",alertstate="firing",severity="critical"})'


@dataclass(frozen=True, slots=True)
class _Weather:
    """How people come for a part of the time: one in ``every`` seconds, and the share of them that leaves early."""

    part: float
    every: float
    leaving: float


_STORY: Final = (_Weather(0.45, 1.3, 0.1), _Weather(0.55, 0.85, 0.55))


@asynccontextmanager
async def _people(entry: int) -> AsyncIterator[Callable[[float], Coroutine[Any, Any, None]]]:
    """Yield what lets people come for so many seconds, as the story goes. Who is still there at the end leaves."""
    visits: list[asyncio.Task[Outcome]] = []

    async def come(lasts: float) -> None:
        for number, weather in enumerate(_STORY):
            deadline = time.monotonic() + weather.part * lasts
            for pause, user in passers_by(number, every=weather.every, leaving_ratio=weather.leaving):
                await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
                if time.monotonic() >= deadline:
                    break
                visits.append(asyncio.create_task(Visit(replace(user, id=f"{number}-{user.id}"), entry).run()))

    try:
        yield come
    finally:
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)


async def _photograph(lasts: float, out: Path) -> None:
    """Run the story and draw the pictures into a folder."""
    plan = Plan(through=("naive",), leak="edge", knobs=Knobs(), ports=ports("auto"))
    with tempfile.TemporaryDirectory(prefix="tokengap-screenshots-") as name:
        directory = Path(name)
        gpus = FakeNvml(compile_library(directory), directory / "nvml.control")
        made = time.monotonic()
        rules = directory / "alerts.yml"
        rules.write_text(as_yaml(alerts(Site(scrape=SCRAPE))))
        config = aimed(prometheus_config(), [f"{LOOPBACK}:{plan.ports.exporter}"], [rules], SCRAPE)
        async with (
            aiohttp.ClientSession() as session,
            staged(_parts(plan, gpus, directory), directory) as stage,
            prometheus(config, directory) as asked,
            _people(plan.entry) as come,
        ):
            exporter = Exporter(f"http://{LOOPBACK}:{plan.ports.exporter}", session)
            await exporter.ready()
            await exporter.beats(3)
            gpus.set(*many(_at_work(stage.parts[0].pid, time.monotonic() - made), 2))
            begin = time.time()
            await beside(come(lasts), stage.guard())
            span = Span(begin + 5, time.time(), SCRAPE, SCRAPE)
            for shot in await _shots(asked, span):
                path = out / f"{shot.dashboard['uid'].removeprefix('tokengap-')}.png"
                draw(shot, path, PICTURES[path.stem])
                click.echo(f"{path}: {path.stat().st_size // 1024} KiB")


def _at_work(pid: int, rested: float) -> FakeGpu:
    """Return a GPU that computes for a process after so many seconds at rest. Its energy counter goes on from there."""
    joules = H100.energy + (_AT_REST.power - H100.power) * rested
    return replace(H100, energy=joules, processes={pid: 60 << 30})


def _parts(plan: Plan, gpus: FakeNvml, directory: Path) -> list[Part]:
    """Return the lab's parts, the exporter with GPUs and a price."""
    gpus.set(*many(_AT_REST, 2))
    *others, _ = lab_parts(plan, directory)
    variables = (f"{name}={gpus.environment[name]}" for name in ("LD_LIBRARY_PATH", "FAKE_NVML_CONTROL"))
    serve = (sys.executable, "-m", "tokengap", *plan.serve, "--gpu-hour-price", "2.50")
    return [*others, Part("exporter", ("env", *variables, *serve), (plan.ports.exporter,))]


async def _shots(asked: Prometheus, span: Span) -> list[Shown]:
    site = Site(scrape=SCRAPE)
    times = {"start": span.begin, "end": span.end, "step": span.step}
    fired = [
        (row["values"][0][0], row["values"][-1][0]) for row in await asked.ask("query_range", query=_CRITICAL, **times)
    ]
    shots = []
    for board in boards(site):
        if board.name in PICTURES:
            json = dashboard(site, board)
            lines = {panel["id"]: await shown(panel, asked, span) for panel in panels(json)}
            shots.append(Shown(json, lines, span, fired))
    return shots


@click.command()
@click.option("--for", "lasts", type=Time(), default="330s", show_default=True, help="How long people come.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default="docs/images", show_default=True)
def main(lasts: float, out: Path) -> None:
    """Draw the dashboards of a lab under way into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    click.echo(f"people come for {lasts:g} s; then the pictures are drawn")
    run(_photograph(lasts, out))


if __name__ == "__main__":
    main()
