"""``tokengap drill``: the exercise of the source article, with a truth of its own.

Users come all at once, some leave, and when the engine is at rest again, what the exporter says is laid beside what
happened. By default everything is started for it on loopback; with ``--target`` users are sent to a system that is
there already, which has to be asked for in so many words.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from tokengap.errors import SettingsError, SetupError
from tokengap.lab import progress
from tokengap.lab.batching import Knobs
from tokengap.lab.matrix import TOKENGAP, chosen, measure
from tokengap.lab.matrix import Plan as MatrixPlan
from tokengap.lab.parts import LOOPBACK, Part
from tokengap.lab.report import Comparison, Fields, Report, bar, became_of, last_leave, measured, moments, truth_of_lab
from tokengap.lab.scrape import Exporter, Scrape
from tokengap.lab.stage import (
    LEAKS,
    Leak,
    Plan,
    beside,
    exporter_part,
    lab_parts,
    ports,
    read_through,
    run,
    serve_arguments,
    staged,
)
from tokengap.lab.target import PageWitness, read_target
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import Outcome, User, Visit, crowd
from tokengap.lab.ways import COLUMNS, KINDS, WAYS
from tokengap.view import MODES, AdmitMode

#: The exporter's page is read twice a beat (1 s), so that no beat is missed.
READ_EVERY = 0.5

#: Beats after the engine came to rest until the final reading: the last sockets have closed and tokens are settled.
BEATS_AT_REST = 3

#: Seconds after which a drill is given up, beyond what the engine needs for all tokens.
PATIENCE = 60.0

#: Options that say how the lab is put up, and mean nothing where a system is there already.
_OF_THE_LAB = ("through", "leak", "slots", "rate", "seed", "mode", "side_by_side")

#: What ``--side-by-side`` plays: its name, through what, and in which mode that admits.
SIDES: tuple[tuple[str, str, AdmitMode], ...] = (
    ("admit, by age", "admit", "age"),
    ("admit, when busy", "admit", "busy"),
    ("naive gateway", "naive", "age"),
)

#: Options of ``--matrix``, which mean nothing without it.
_OF_THE_MATRIX = ("rows", "columns", "kinds", "main", "litellm", "unprivileged", "no_events", "exporter")


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    through: str
    users: int
    leave: int
    leave_at: float
    max_tokens: int
    prompt_tokens: int
    slots: int
    rate: float
    stream: bool
    leak: Leak | None
    ports: Literal["usual", "auto"]
    scrape_every: float
    seed: int
    mode: AdmitMode = "age"

    def __post_init__(self) -> None:
        if self.leave > self.users:
            raise SettingsError(f"--leave {self.leave}: expected at most --users, which is {self.users}")

    def crowd(self, **more: Any) -> list[User]:
        """Return the users."""
        same = {"max_tokens": self.max_tokens, "prompt_tokens": self.prompt_tokens, "stream": self.stream}
        return crowd(self.users, self.leave, leave_at=self.leave_at, **same, **more)

    def plan(self) -> Plan:
        """Return what is put up for the drill."""
        through = read_through(self.through)
        return Plan(
            through=through,
            leak=self.leak or Plan.usual_leak(through),
            knobs=Knobs(max_num_seqs=self.slots, rate=self.rate, ignore_disconnects=self.leak == "engine"),
            ports=ports(self.ports),
            seed=self.seed,
            mode=self.mode,
        )

    @property
    def rest_within(self) -> float:
        """Seconds within which the engine is done with everybody, or something is wrong."""
        each = self.max_tokens / self.rate + self.prompt_tokens / Knobs().prefill_rate
        return PATIENCE + self.leave_at + self.users * each / self.slots


class Witness(Protocol):
    """Who knows the truth about the engine."""

    async def at_rest(self) -> bool:
        """Tell whether the engine has no request."""

    async def truth(self, outcomes: Sequence[Outcome], scrapes: Sequence[Scrape], /) -> Fields:
        """Return what happened; at the instants of ``scrapes``, where a field has an instant."""


@dataclass(frozen=True, slots=True)
class LabWitness:
    """The stand-in engine, which knows everything."""

    engine: EngineControl
    plan: Plan

    async def at_rest(self) -> bool:
        """Tell whether nothing runs and nothing waits."""
        try:
            now = (await self.engine.truth(since=time.monotonic())).now
        except aiohttp.ClientError as error:
            raise SetupError(f"the engine does not answer any more: {error}") from error
        return now.running + now.waiting == 0

    async def truth(self, outcomes: Sequence[Outcome], scrapes: Sequence[Scrape]) -> Fields:
        """Return every field."""
        instants = [scrape.beat_at for scrape in scrapes]
        return truth_of_lab(outcomes, await self.engine.truth(), self.plan, instants)


@dataclass(slots=True)
class Drill:
    """A drill under way: its users, what was seen of it so far, and what it waits for."""

    visits: Sequence[Visit]
    scrapes: list[Scrape] = field(default_factory=list)
    slow_scrapes: list[Scrape] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    waits_for: str = ""

    async def act(self, witness: Witness, exporter: Exporter, rest_within: float) -> list[Outcome]:
        """Let the users come, wait until the engine is at rest and the exporter has seen it, and read a last time."""
        self.began = time.monotonic()
        try:
            async with asyncio.timeout(rest_within):
                outcomes = await asyncio.gather(*(visit.run() for visit in self.visits))
                self.waits_for = "; the engine comes to rest"
                await rest(witness, self.scrapes)
        except TimeoutError:
            raise SetupError(f"the engine is not at rest after {rest_within:.0f} s: {self.line()}") from None
        self.waits_for = f"; at rest, {BEATS_AT_REST} beats more"
        self.scrapes.append(await exporter.beats(BEATS_AT_REST))
        return outcomes

    def line(self) -> str:
        """Say how far it is: the users, and what the exporter makes of it."""
        states = Counter(_state(visit) for visit in self.visits)
        users = ", ".join(f"{states[state]} {state}" for state in _STATES if states[state] or state != "failed")
        received = sum(visit.tokens for visit in self.visits)
        line = f"{time.monotonic() - self.began:5.1f} s: {users}; tokens: {received:,} received"
        if self.scrapes:
            last = self.scrapes[-1]
            line += f", {last.tokens_out or 0:,.0f} out, {last.gap or 0:,.0f} orphaned"
        return line + self.waits_for


async def rest(witness: Witness, scrapes: Sequence[Scrape]) -> None:
    """Wait until the engine has no request.

    It is asked only when the exporter takes it to be at rest, or does not know: asking is traffic too, and real engines
    are not asked four times a second.
    """
    while True:
        if not scrapes[-1].requests and await witness.at_rest():
            return
        await asyncio.sleep(0.25)


_STATES = ("waiting", "streaming", "done", "left", "failed")


def _state(visit: Visit) -> str:
    if visit.outcome is not None:
        return "done" if visit.outcome.how == "completed" else visit.outcome.how
    return "waiting" if visit.first_token is None else "streaming"


async def on_the_lab(options: Options) -> Report:
    """Drill what is started for it on loopback."""
    plan = options.plan()
    with tempfile.TemporaryDirectory(prefix="tokengap-drill-") as directory:
        async with aiohttp.ClientSession() as session:
            parts = lab_parts(plan, Path(directory))
            for line in plan.announcement():
                say(line)
            drill = Drill([Visit(user, plan.entry) for user in options.crowd()])
            witness = LabWitness(EngineControl(plan.ports.engine), plan)
            exporter = Exporter(f"http://{LOOPBACK}:{plan.ports.exporter}", session)
            return await _play(drill, parts, witness, exporter, Path(directory), options)


async def on_my_system(options: Options, target: str, engine: str) -> Report:
    """Drill a system that runs already; only the exporter is started."""
    system = await read_target(target, engine)
    port = ports(options.ports).exporter
    with tempfile.TemporaryDirectory(prefix="tokengap-drill-") as directory:
        async with aiohttp.ClientSession() as session:
            witness = PageWitness(system.engine_url, session)
            await witness.begin()
            users = options.crowd(model=witness.model, exact=True)
            drill = Drill([Visit(user, system.port, system.address) for user in users])
            exporter = Exporter(f"http://{LOOPBACK}:{port}", session)
            parts = [exporter_part(port, serve_arguments(port, system.engine_url, system.hops))]
            return await _play(drill, parts, witness, exporter, Path(directory), options)


async def _play(
    drill: Drill, parts: Sequence[Part], witness: Witness, exporter: Exporter, directory: Path, options: Options
) -> Report:
    """Start the parts, drill, and report."""
    async with staged(parts, directory) as stage:
        await exporter.ready()
        outcomes = await beside(
            drill.act(witness, exporter, options.rest_within),
            exporter.scrape_for_ever(READ_EVERY, drill.scrapes.append),
            exporter.scrape_for_ever(options.scrape_every, drill.slow_scrapes.append),
            progress.show(Console(stderr=True), drill.line),
            stage.guard(),
        )
        for failed in [outcome for outcome in outcomes if outcome.how == "failed" and not outcome.refused][:1]:
            say(f"{failed.user.id} failed, and perhaps others: {failed.detail}")
        left = last_leave(outcomes)
        return Report(
            truth=await witness.truth(outcomes, moments(drill.scrapes, left)),
            measured=measured(drill.scrapes, left),
            bar=bar(streamed=options.stream, engine_leaks=options.leak == "engine"),
            scraped=measured(drill.slow_scrapes, left),
            scrape_every=options.scrape_every,
            scrapes=len(drill.slow_scrapes),
            users=became_of(outcomes),
        )


async def compare(options: Options) -> Comparison:
    """Drill the same three ways: refused by age, refused when busy, and taken in and never let go."""
    reports = {}
    for way, through, mode in SIDES:
        reports[way] = await on_the_lab(replace(options, through=through, mode=mode))
    return Comparison(reports)


def say(text: str) -> None:
    """Tell a person something, on standard error: standard output is the result."""
    click.echo(text, err=True)


@click.command(short_help="Prove on a bench what this exporter sees of a leak.")
@click.option(
    "--through",
    default="naive",
    show_default=True,
    help="naive, nginx, haproxy, envoy, admit or direct; or two in a row, the edge first: nginx,admit.",
)
@click.option("--users", type=click.IntRange(1), default=20, show_default=True, help="They come all at once.")
@click.option("--leave", type=click.IntRange(0), default=8, show_default=True, help="How many of them leave.")
@click.option("--leave-at", type=click.FloatRange(0), default=1.5, show_default=True, help="After so many seconds.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Of each answer.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=400, show_default=True, help="Of each question.")
@click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="What the engine runs at once.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=200.0,
    show_default=True,
    help="Tokens a second of each slot. As it is, a drill that leaks lasts half a minute.",
)
@click.option("--stream/--no-stream", default=True, show_default=True, help="How users ask for their answers.")
@click.option(
    "--leak",
    type=click.Choice(LEAKS),
    default=None,
    help="Who holds on to clients that left (admit: the second of two). Default: a naive gateway, else none.",
)
@click.option("--mode", type=click.Choice(MODES), default="age", show_default=True, help="How admit decides.")
@click.option(
    "--side-by-side", is_flag=True, help="Play it through admit in both modes and through naive, and compare."
)
@click.option("--scrape-every", type=click.FloatRange(0.1), default=15.0, show_default=True, help="Of the collector.")
@click.option(
    "--ports", type=click.Choice(["usual", "auto"]), default="usual", show_default=True, help="auto: any free."
)
@click.option("--seed", default=0, show_default=True, help="Of the engine's ids and texts.")
@click.option("--target", metavar="URL", help="Send the users to this system instead. With the next two only.")
@click.option("--engine", metavar="URL", help="The engine behind --target, which must have nothing to do.")
@click.option("--this-is-my-system", is_flag=True, help="It is, and I may make it generate tokens for nobody.")
@click.option("--matrix", is_flag=True, help="Play every way to an engine and to leave it instead. With the next only.")
@click.option("--rows", metavar="NAMES", help="Of the matrix: these, and not all.")
@click.option("--columns", metavar="NAMES", help="Of the matrix: these, and not all.")
@click.option("--kinds", metavar="NAMES", help="Of answers: streamed, whole, or both.")
@click.option("--main", is_flag=True, help="The main rows only.")
@click.option("--litellm", is_flag=True, help="Install LiteLLM from PyPI, in the user's cache, and run its rows.")
@click.option("--unprivileged", is_flag=True, help="Run the exporter as a user who may do nothing.")
@click.option("--no-events", is_flag=True, help="Run the exporter without events of closed sockets.")
@click.option("--exporter", metavar="COMMAND", help="Judge this one, and not the tokengap that runs the matrix.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
def drill(
    context: click.Context,
    /,
    target: str | None,
    engine: str | None,
    this_is_my_system: bool,
    matrix: bool,
    side_by_side: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Let users come and leave, and lay what the exporter says beside what happened.

    Exits with 0 when the measured gap is within 1 % of the tokens out (5 % with --no-stream), with 1 when it is not,
    and with 2 when something is missing or wrong.
    """
    given = {name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE} - {
        "matrix",
        "as_json",
    }
    of_matrix = {name: options.pop(name) for name in _OF_THE_MATRIX}
    for name in sorted(given - set(_OF_THE_MATRIX) if matrix else given & set(_OF_THE_MATRIX)):
        raise SettingsError(f"--{name.replace('_', '-')}: {'not with --matrix' if matrix else 'only with --matrix'}")
    if matrix:
        sys.exit(_matrix(as_json=as_json, **of_matrix))
    asked = Options(**options)
    if target is None and engine is None and not this_is_my_system:
        report: Report | Comparison = run(compare(asked)) if side_by_side else run(on_the_lab(asked))
    elif target is None or engine is None or not this_is_my_system:
        raise SettingsError(
            "a system that is there already is drilled with all of --target, --engine, --this-is-my-system"
        )
    else:
        for name in _OF_THE_LAB:
            if name in given:
                raise SettingsError(f"--{name}: the system behind --target is as it is")
        report = run(on_my_system(asked, target, engine))
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        report.print()
    sys.exit(0 if report.passed else 1)


def _matrix(
    *,
    rows: str | None,
    columns: str | None,
    kinds: str | None,
    main: bool,
    litellm: bool,
    unprivileged: bool,
    no_events: bool,
    exporter: str | None,
    as_json: bool,
) -> int:
    """Play the matrix, print it, and return the exit code."""
    if unprivileged and no_events:
        raise SettingsError("--unprivileged, --no-events: one of them")
    ways = chosen("rows", rows, WAYS)
    result = run(
        measure(
            MatrixPlan(
                ways=tuple(way for way in ways if way.main or not main),
                columns=chosen("columns", columns, COLUMNS),
                kinds=chosen("kinds", kinds, {kind: kind for kind in KINDS}),
                mode="unprivileged" if unprivileged else "no-events" if no_events else "plain",
                litellm=litellm,
                command=TOKENGAP if exporter is None else tuple(shlex.split(exporter)),
            ),
            say,
        )
    )
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        for table in result.tables():
            console.print(table)
    return 0 if result.passed else 1
