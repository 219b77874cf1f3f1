"""A run: steady state, baseline, fault, recovery, rest.

The fault is healed however the run ends. A fault that cannot be shown to have been there, and to be gone, ends it with
:class:`Unproven`: what it would say means nothing then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Never

from rich.console import Console

from tokengap.chaos.bench import OTHER, TARGET, Bench, Plan, put_up
from tokengap.chaos.checks import Limits, checks
from tokengap.chaos.evidence import Evidence, Span
from tokengap.chaos.experiments import Experiment, Options
from tokengap.chaos.faults import Fault, NotProven
from tokengap.chaos.looks import read_look
from tokengap.chaos.report import Report
from tokengap.chaos.timeline import Timeline
from tokengap.errors import SetupError
from tokengap.lab import progress
from tokengap.lab.drill import BEATS_AT_REST
from tokengap.lab.network import Network, own_network
from tokengap.lab.stage import beside

#: Seconds within which the bench must run steadily, a fault must show, and a healed one must be gone.
STEADY_WITHIN, SHOWS_WITHIN, GONE_WITHIN = 30.0, 10.0, 60.0

#: Seconds after the last question by which everything must be at rest.
REST_WITHIN = 90.0


class Unproven(Exception):
    """The fault did not apply, or did not go away. ``str()`` says what was seen instead."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of each phase."""

    baseline: float = 15.0
    fault: float = 30.0
    recovery: float = 15.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.baseline + self.fault + self.recovery


@dataclass(slots=True)
class Run:
    """A run under way."""

    bench: Bench
    fault: Fault
    phases: Phases
    timeline: Timeline
    doing: str = "starting"

    def line(self) -> str:
        """Say how far it is."""
        asks, here = self.bench.crowd.asks, len(self.bench.crowd.here)
        line = f"{self.doing}: {len(asks)} questions, {here} streams, {self.bench.crowd.received:,} tokens received"
        if self.bench.looks:
            states = ", ".join(f"{name} {each.state}" for name, each in self.bench.looks[-1].engines.items())
            line += f"; {states}"
        return line

    async def act(self) -> Evidence:
        """Play it. Raises Unproven, and SetupError when there is no steady state to begin with."""
        crowd, note = self.bench.crowd, self.timeline.note
        coming = asyncio.create_task(crowd.come())
        try:
            await self._steady()
            baseline = Span(self._phase("baseline"), time.monotonic() + self.phases.baseline)
            await asyncio.sleep(self.phases.baseline)
            broken = await self._break()
            healed = time.monotonic()
            note("phase", "recovery")
            self.doing = "recovery"
            await asyncio.sleep(self.phases.recovery)
            crowd.close()
            self.doing = "rest"
            rested = await self._rest(coming)
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        note("phase", "at rest")
        return Evidence(
            asks=crowd.asks,
            looks=self.bench.looks,
            baseline=replace(baseline, end=broken),
            fault=Span(broken, healed),
            recovery=Span(healed, time.monotonic()),
            at_rest=rested,
            first_token_again=await self._first_token_again(broken),
        )

    def _phase(self, name: str) -> float:
        self.doing = name
        return self.timeline.note("phase", name)

    async def _steady(self) -> None:
        """Wait until both replicas generate for clients who were answered, and the exporter says so too."""
        self._phase("steady state")
        deadline = time.monotonic() + STEADY_WITHIN
        while not self._is_steady():
            if time.monotonic() > deadline:
                failed = [a.detail for ask in self.bench.crowd.asks for a in ask.attempts if a.detail]
                why = f"; a request failed: {failed[0]}" if failed else ""
                raise SetupError(f"there is no steady state after {STEADY_WITHIN:g} s: {self.line()}{why}")
            await asyncio.sleep(0.2)

    def _is_steady(self) -> bool:
        if not self.bench.looks:
            return False
        answered = sum(bool(ask.attempts) and ask.answered for ask in self.bench.crowd.asks)
        engines = self.bench.looks[-1].engines
        busy = all(engines[name].state == "busy" and engines[name].running for name in (TARGET, OTHER))
        return busy and answered >= self.bench.plan.load.users

    async def _break(self) -> float:
        """Apply the fault, keep it for its time, and heal it, whatever happens. Return when it was applied."""
        note = self.timeline.note
        self._phase("fault")
        broken = time.monotonic()
        try:
            broken = note("fault", await self.fault.apply(self.bench))
            note("proof", await self._proven(self.fault.applied, SHOWS_WITHIN, "the fault did not apply"))
            await asyncio.sleep(max(0.0, broken + self.phases.fault - time.monotonic()))
            note("proof", await self._proven(self.fault.applied, SHOWS_WITHIN, "the fault did not last"))
        finally:
            self.doing = "healing"
            note("heal", await self.fault.heal(self.bench))
        note("heal", await self._proven(self.fault.healed, GONE_WITHIN, "the fault did not go away"))
        return broken

    async def _proven(self, ask: Callable[[Bench], Awaitable[str]], within: float, otherwise: str) -> str:
        deadline = time.monotonic() + within
        while True:
            try:
                return await ask(self.bench)
            except NotProven as missing:
                if time.monotonic() > deadline:
                    raise Unproven(f"{otherwise}: {missing}") from None
            await asyncio.sleep(0.2)

    async def _rest(self, coming: asyncio.Task[None]) -> dict[str, int]:
        """Wait until nobody is here, and return what the replicas hold then, if possible nothing."""
        deadline = time.monotonic() + REST_WITHIN
        try:
            async with asyncio.timeout(REST_WITHIN):
                await coming
        except TimeoutError:
            raise SetupError(f"clients are not done {REST_WITHIN:g} s after the last question: {self.line()}") from None
        while any((held := await self._held()).values()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.25)
        await self.bench.exporter.beats(BEATS_AT_REST)
        self.bench.looks.append(await self.bench.exporter.read(read_look))
        return held

    async def _held(self) -> dict[str, int]:
        held = {}
        for name in self.bench.upstreams:
            now = (await self.bench.engine(name).truth(since=time.monotonic())).now
            held[name] = now.running + now.waiting
        return held

    async def _first_token_again(self, broken: float) -> float | None:
        """Return when the replica that was broken gave a token again, if it had to be started again."""
        if not self.fault.restarts:
            return None
        requests = (await self.bench.engine(TARGET).truth(since=time.monotonic())).requests.values()
        firsts = [request.first_token for request in requests if request.first_token is not None]
        return min((at for at in firsts if at > broken), default=None)

    async def tell_verdicts(self) -> Never:
        """Tell what the exporter says of each engine, whenever it says something else."""
        told: dict[str, str] = {}
        seen = 0
        while True:
            for look in self.bench.looks[seen:]:
                for name, engine in look.engines.items():
                    if told.get(name) != engine.state:
                        told[name] = engine.state
                        self.timeline.note("verdict", f"tokengap says that {name} is {engine.state}")
            seen = len(self.bench.looks)
            await asyncio.sleep(0.1)


async def play(
    experiment: Experiment,
    options: Options,
    plan: Plan,
    phases: Phases,
    limits: Limits,
    timeline: Timeline,
    out: Path,
    after: Callable[[Report, Bench], Awaitable[None]],
) -> Report:
    """Put the bench up, run an experiment on it, and report. What the parts write goes to ``out``. Raises SetupError.

    ``after`` is called with the report while the bench is still up. To be called in the main thread before anything
    else was started: the bench may move into a network of its own.
    """
    network = await _network(experiment)
    fault = experiment.fault(options)
    report = Report(experiment.name, plan.through, plan.seed, timeline)
    async with put_up(plan, out, network) as bench:
        timeline.note("note", bench.where())
        run = Run(bench, fault, phases, timeline)
        try:
            evidence = await beside(
                run.act(),
                bench.look_for_ever(fault.kills),
                run.tell_verdicts(),
                progress.show(Console(stderr=True), run.line),
                bench.guard(fault.kills),
            )
        except Unproven as missing:
            timeline.note("note", str(missing))
            report = replace(report, unproven=str(missing))
        else:
            found = checks(evidence, limits, experiment.verdict(options), experiment.shown)
            report = replace(report, evidence=evidence, checks=tuple(found))
        await after(report, bench)
    return report


async def _network(experiment: Experiment) -> Network | None:
    if not experiment.network:
        return None
    network = await own_network()
    if isinstance(network, str):
        raise SetupError(f"{experiment.name}: {network}")
    return network
