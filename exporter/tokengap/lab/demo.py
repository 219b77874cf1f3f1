"""``tokengap demo``: the exporter on a lab that leaks, to look at.

Passers-by come for ever and some leave; the gateway reads on for them. What the exporter makes of it is on its page.
With ``--for`` it ends by itself and lays the truth beside it, as a drill does.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.console import Console

from tokengap.config.values import Seconds
from tokengap.errors import SetupError
from tokengap.lab import progress
from tokengap.lab.batching import Knobs
from tokengap.lab.drill import BEATS_AT_REST, READ_EVERY, LabWitness, rest
from tokengap.lab.parts import LOOPBACK, free_port, taken
from tokengap.lab.report import Report, bar, became_of, measured
from tokengap.lab.scrape import Exporter, Scrape
from tokengap.lab.stage import Plan, beside, lab_parts, ports, read_through, run, staged
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import Outcome, Visit, passers_by

#: One passer-by comes in so many seconds on average: four slots of 50 tokens a second are busy, and at times a queue.
EVERY = 1.0


@dataclass(slots=True)
class Demo:
    """A demo under way. ``lasts``: seconds for which passers-by come, None for ever; only then is anything kept."""

    port: int
    seed: int
    lasts: float | None
    here: set[Visit] = field(default_factory=set)
    outcomes: list[Outcome] = field(default_factory=list)
    scrapes: list[Scrape] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    waits_for: str = ""

    async def act(self, witness: LabWitness, exporter: Exporter) -> Report:
        """Let passers-by come; when they come no more, wait until all is at rest, and report."""
        self.began = time.monotonic()
        async with asyncio.TaskGroup() as visits:
            try:
                async with asyncio.timeout(self.lasts):
                    for pause, user in passers_by(self.seed, every=EVERY):
                        await asyncio.sleep(pause)
                        visits.create_task(self._visit(Visit(user, self.port)))
            except TimeoutError:
                self.waits_for = "; no more users come"
        await rest(witness, self.scrapes)
        self.scrapes.append(await exporter.beats(BEATS_AT_REST))
        truth = await witness.truth(self.outcomes, self.scrapes)
        return Report(truth, measured(self.scrapes), bar(streamed=False), users=became_of(self.outcomes))

    async def _visit(self, visit: Visit) -> None:
        self.here.add(visit)
        outcome = await visit.run()
        self.here.discard(visit)
        if self.lasts is not None:
            self.outcomes.append(outcome)

    def see(self, scrape: Scrape) -> None:
        """Take a scrape in."""
        if self.lasts is None:
            self.scrapes.clear()
        self.scrapes.append(scrape)

    def line(self) -> str:
        """Say what the exporter says now."""
        line = f"{time.monotonic() - self.began:5.1f} s: {len(self.here)} users here"
        if not self.scrapes:
            return line
        now = self.scrapes[-1]
        out, useful, gap = now.tokens_out or 0.0, now.tokens_useful or 0.0, now.gap or 0.0
        tokens = f"{out:,.0f} out, {useful:,.0f} useful, {gap:,.0f} orphaned ({gap / max(out, 1.0):.0%})"
        return f"{line}, {now.orphans} orphans; tokens: {tokens}{self.waits_for}"


async def on_the_lab(plan: Plan, lasts: float | None, say: Callable[[str], None]) -> Report:
    """Run the demo, and report if it ends by itself."""
    url = f"http://{LOOPBACK}:{plan.ports.exporter}"
    with tempfile.TemporaryDirectory(prefix="tokengap-demo-") as name:
        async with (
            aiohttp.ClientSession() as session,
            staged(lab_parts(plan, Path(name)), Path(name)) as stage,
        ):
            exporter = Exporter(url, session)
            await exporter.ready()
            say(WELCOME.format(url=url, path=plan.path()))
            demo = Demo(plan.entry, plan.seed, lasts)
            return await beside(
                demo.act(LabWitness(EngineControl(plan.ports.engine), plan), exporter),
                exporter.scrape_for_ever(READ_EVERY, demo.see),
                progress.show(Console(stderr=True), demo.line),
                stage.guard(),
            )


WELCOME = """\
tokengap watches {path}
Passers-by ask for answers, four in ten leave before theirs is whole, and what leaks goes on without them.

  {url}/            a live page: what leaks where, who waits for what; tokengap top is the same in a terminal
  {url}/metrics     the series; for a start:
      curl -s {url}/metrics | grep -E '^tokengap_(tokens|streams|queue_age)'
      tokengap_tokens_out_total         all that the engine generated
      tokengap_tokens_orphaned_total    of it for users who had left, by the hop that held on
      tokengap_streams{{client="gone"}}   streams that are held for nobody now
  {url}/api/streams every stream in flight

Ctrl-C ends it and leaves nothing behind."""


class Time(click.ParamType[float]):
    """A time such as ``30s``, as in the exporter's settings."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return it in seconds."""
        try:
            return Seconds.read(value)
        except ValueError:
            self.fail(f"{value!r}; expected {Seconds.expects}", param, ctx)


@click.command(short_help="Show this exporter at work on a lab that leaks.")
@click.option("--for", "lasts", type=Time(), metavar="TIME", help="End after this, as in 30s, and print the truth.")
@click.option("--port", type=click.IntRange(0, 65535), default=10788, show_default=True, help="Of the page; 0: any.")
@click.option("--through", default="naive", show_default=True, help="As of tokengap drill.")
@click.option("--seed", default=0, show_default=True, help="Of the passers-by: the same seed, the same users.")
@click.option("--json", "as_json", is_flag=True, help="With --for: print the result as one JSON object.")
def demo(lasts: float | None, port: int, through: str, seed: int, as_json: bool) -> None:
    """Start a stand-in engine, a gateway that leaks, users who leave, and the exporter on them."""
    if port and taken(port):
        raise SetupError(f"port {port} on {LOOPBACK} is taken: choose another with --port")
    read = read_through(through)
    plan = Plan(
        through=read,
        leak=Plan.usual_leak(read),
        knobs=Knobs(),
        ports=replace(ports("usual"), exporter=port or free_port()),
        seed=seed,
    )
    report = run(on_the_lab(plan, lasts, partial(click.echo, err=as_json)), interrupted=0)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        report.print()
