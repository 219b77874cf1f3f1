"""``tokengap drill --matrix``: every way to an engine, every way to leave, and how exact the exporter is in each.

A row is put up once, and its cells are played on it one after the other: users come, some leave, the engine comes to
rest, and what the exporter counted meanwhile is laid beside what happened. Who is connected is read from
``/api/streams`` all the while, against the users' own times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pwd
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from tokengap.errors import SettingsError, SetupError
from tokengap.lab import litellm, progress
from tokengap.lab.accuracy import Cell, Mode, Run, Split
from tokengap.lab.engine import engine_part
from tokengap.lab.network import Network, own_network
from tokengap.lab.parts import LOOPBACK, Part, free_ports
from tokengap.lab.proxies import Wiring
from tokengap.lab.scrape import Exporter, Scrape
from tokengap.lab.stage import beside, serve_arguments, staged
from tokengap.lab.truth import EngineControl, RequestTruth
from tokengap.lab.users import Outcome, Visit
from tokengap.lab.ways import APART, COLUMNS, Column, Kind, Way

#: The exporter as a program to start; what it is asked to do follows.
TOKENGAP = (sys.executable, "-m", "tokengap")

#: Beats after rest until a cell's last reading, and how often it is read who is connected, seconds.
BEATS_AT_REST, LOOK_EVERY = 3, 0.05

#: Seconds after which a cell is given up.
PATIENCE = 90.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Which cells, and how the exporter is started. ``litellm`` installs LiteLLM, which takes minutes once."""

    ways: tuple[Way, ...]
    columns: tuple[Column, ...]
    kinds: tuple[Kind, ...]
    mode: Mode = "plain"
    litellm: bool = False
    command: tuple[str, ...] = TOKENGAP

    @property
    def cells(self) -> list[tuple[Column, Kind]]:
        """The cells of each row."""
        return [(column, kind) for kind in self.kinds for column in self.columns]


@dataclass(frozen=True, slots=True)
class Look:
    """Who is connected, as ``/api/streams`` said at one instant: the client's state by its port."""

    at: float
    states: Mapping[int, str]


class _Row(msgspec.Struct):
    hop: str
    client: str
    client_address: str | None


def read_look(at: float, data: bytes, hop: str) -> Look:
    """Read ``/api/streams`` as far as it tells of clients of the outermost ``hop``."""
    rows = msgspec.json.decode(data, type=list[_Row])
    ports = ((row, row.client_address.rpartition(":")[2]) for row in rows if row.client_address and row.hop == hop)
    return Look(at, {int(port): row.client for row, port in ports})


def right_after(
    looks: Sequence[Look], outcome: Outcome, request: RequestTruth | None, column: Column, until: float
) -> float | None:
    """Return after how many seconds the state of one who left was right, and stayed so; None: never.

    The clock starts when it left; of one who vanished or stalled, when something is sent to it that it cannot take.
    ``until``: from when on it is another story. ``request``: what the engine says of it, where it knows whose it was.
    """
    assert outcome.left is not None
    since, ended = outcome.left, until
    if request is None:
        shown = [look.at for look in looks if outcome.port in look.states]
        ended = shown[-1] if shown else until
    elif request.ended is not None:
        ended = request.ended
    if outcome.user.leaving == "stall":
        until = min(until, ended)  # then it is no stream any more, but an answer in buffers
    if outcome.user.leaving in ("vanish", "stall") and request is not None:
        since = max(since, (request.first_token if outcome.user.stream else request.ended) or since)

    def right(look: Look) -> bool:
        state = look.states.get(outcome.port)
        if state is None:  # the proxy has told the engine, or the engine was done
            return column.absent
        return state in column.states

    last_wrong, first = None, None
    for look in looks:
        if since <= look.at <= until:
            if not right(look):
                last_wrong, first = look.at, None
            elif first is None:
                first = look.at
    if first is None:
        return None
    return 0.0 if last_wrong is None else first - since


def wrongly_gone(looks: Sequence[Look], outcomes: Sequence[Outcome]) -> float:
    """Return for how many seconds in all those who were there were called gone or vanished."""
    there = {outcome.port: (outcome.sent, outcome.ended) for outcome in outcomes if outcome.how == "completed"}
    wrong = 0.0
    for before, look in itertools.pairwise(looks):
        for port, state in look.states.items():
            came, went = there.get(port, (0.0, 0.0))
            if came <= look.at < went and state in ("gone", "vanished"):
                wrong += look.at - before.at
    return wrong


@dataclass(slots=True)
class Stand:
    """A row that is up: what the cells are played on."""

    way: Way
    entry: int
    engine: EngineControl
    exporter: Exporter
    session: aiohttp.ClientSession
    network: Network | None
    looks: list[Look] = field(default_factory=list)

    @property
    def watched_hop(self) -> str:
        """The hop whose clients the users are."""
        return self.way.places[0]

    async def play(self, column: Column, kind: Kind) -> Cell:
        """Play one cell. Raises TimeoutError when it does not come to its end."""
        async with asyncio.timeout(PATIENCE):
            await self.engine.turn(**asdict(column.knobs(kind, engine_leaks=self.way.engine_leaks)))
            before = await self.exporter.beats(1)
            generated = (await self.engine.truth(since=time.monotonic())).generated
            await asyncio.sleep(_phase(self.way, column, kind))
            self.looks.clear()
            looking = asyncio.create_task(self._look_for_ever())
            try:
                outcomes = await self._visits(column, kind)
                after = await self._rest()
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                if self.network is not None and column.network:
                    await self.network.mend()
        truth = await self.engine.truth(since=time.monotonic())
        return self._cell(column, kind, outcomes, truth.requests, truth.generated - generated, before, after)

    async def _visits(self, column: Column, kind: Kind) -> list[Outcome]:
        users = column.users(f"{self.way.name}-{column.name}-{kind}", kind)
        cut = self.network.cut if self.network is not None else None
        visits = [Visit(user, self.entry, cut=cut) for user in users]

        async def come(number: int) -> Outcome:
            await asyncio.sleep(number * APART)
            return await visits[number].run()

        return list(await asyncio.gather(*map(come, range(len(visits)))))

    async def _rest(self) -> Scrape:
        """Wait until the engine has nothing to do, and three beats more; again, when something came meanwhile."""
        while True:
            now = await self.engine.truth(since=time.monotonic())
            if now.now.running + now.now.waiting:
                await asyncio.sleep(0.1)
                continue
            scrape = await self.exporter.beats(BEATS_AT_REST)
            if (await self.engine.truth(since=time.monotonic())).generated == now.generated:
                return scrape

    async def _look_for_ever(self) -> None:
        while True:
            async with self.session.get(f"{self.exporter.url}/api/streams") as answer:
                self.looks.append(read_look(time.monotonic(), await answer.read(), self.watched_hop))
            await asyncio.sleep(LOOK_EVERY)

    def _cell(
        self,
        column: Column,
        kind: Kind,
        outcomes: Sequence[Outcome],
        requests: Mapping[str, RequestTruth],
        generated: int,
        before: Scrape,
        after: Scrape,
    ) -> Cell:
        useful = sum(outcome.tokens for outcome in outcomes)
        by_hop = {hop: n - before.tokens_orphaned.get(hop, 0.0) for hop, n in after.tokens_orphaned.items()}
        end = self.looks[-1].at if self.looks else 0.0
        seconds = []
        if column.within is not None:
            for outcome in outcomes:
                stalls = outcome.user.leaving == "stall"
                if outcome.left is not None and (outcome.user.stream or not stalls):
                    until = outcome.left + outcome.user.stalls if stalls else end
                    request = requests.get(outcome.user.id)
                    if stalls and request is not None and (request.first_token or until) > until - column.within:
                        continue  # it waited in a queue while it stalled: there was too little for it to read
                    seconds.append(right_after(self.looks, outcome, request, column, until))
        return Cell(
            way=self.way.name,
            column=column.name,
            kind=kind,
            truth=Split(generated, useful, generated - useful),
            measured=Split(
                _grown(before.tokens_out, after.tokens_out),
                _grown(before.tokens_useful, after.tokens_useful),
                sum(by_hop.values()),
            ),
            by_hop={hop: round(n, 3) for hop, n in by_hop.items()},
            pending=_grown(before.tokens_pending, after.tokens_pending),
            unattributed=_grown(before.tokens_unattributed, after.tokens_unattributed),
            seconds=tuple(None if each is None else round(each, 2) for each in seconds),
            wrongly_gone=round(wrongly_gone(self.looks, outcomes), 2),
            late_beats=after.late_beats - before.late_beats,
        )


def _phase(way: Way, column: Column, kind: Kind) -> float:
    """Return where between two beats a cell begins, as a share of a beat: any, but the same each time."""
    return zlib.crc32(f"{way.name} {column.name} {kind}".encode()) % 1000 / 1000


def _grown(before: float | None, after: float | None) -> float:
    return round((after or 0.0) - (before or 0.0), 3)


@dataclass(slots=True)
class Matrix:
    """A matrix under way: its cells so far, and what it is at."""

    plan: Plan
    network: Network | str
    say: Callable[[str], None]
    cells: list[Cell] = field(default_factory=list)
    programs: dict[str, str] = field(default_factory=dict)
    at: str = ""

    @property
    def line(self) -> str:
        """How far it is, in a line."""
        whole = len(self.plan.ways) * len(self.plan.cells)
        missed = sum(bool(cell.misses()) for cell in self.cells)
        return f"{len(self.cells)} of {whole} cells, {missed} miss a bar; {self.at}"

    async def play(self, directory: Path) -> None:
        """Play all rows."""
        for way in self.plan.ways:
            todo = self.plan.cells
            try:
                self._versions(way)
            except SetupError as missing:
                self._skip(way, todo, str(missing))
                continue
            while todo:
                own = Path(tempfile.mkdtemp(prefix=f"{way.name}-", dir=directory))
                try:
                    todo = await self._row(way, todo, own)
                except SetupError as trouble:
                    if not way.optional:
                        raise
                    # Of programs that are installed as they come, some do not start.
                    done = sum(cell.way == way.name for cell in self.cells)
                    self._skip(way, self.plan.cells[done:], str(trouble).splitlines()[0])
                    break

    def _versions(self, way: Way) -> None:
        for proxy, _ in way.hops:
            if way.optional:
                if not self.plan.litellm:
                    raise SetupError("it is installed and run only with --litellm")
                release = proxy.name.partition("-")[2]
                self.at = f"installing LiteLLM, {release}"
                if why := litellm.prepare(release):
                    raise SetupError(why)
                self.programs[proxy.name] = litellm.installed(release)
            else:
                self.programs[proxy.name] = proxy.version()

    def _skip(self, way: Way, cells: Sequence[tuple[Column, Kind]], why: str) -> None:
        self.say(f"{way.title}: not run: {why}")
        self.cells += [Cell(way.name, column.name, kind, skipped=why) for column, kind in cells]

    async def _row(self, way: Way, todo: list[tuple[Column, Kind]], directory: Path) -> list[tuple[Column, Kind]]:
        """Put a row up and play its cells. Returns what is left to do after a cell that did not come to its end."""
        entry, *others = free_ports(len(way.hops) + 2)
        engine, exporter = others[-2:] if way.hops else (entry, others[0])
        parts = [engine_part(engine, COLUMNS["none"].knobs("streamed", engine_leaks=way.engine_leaks))]
        parts += _proxies(way, [entry, *others[:-1]] if way.hops else [entry], directory)
        parts.append(self._exporter(way, [entry, *others[:-2]], engine, exporter))
        async with staged(parts, directory) as stage, aiohttp.ClientSession() as session:
            watch = Exporter(f"http://{LOOPBACK}:{exporter}", session)
            await watch.ready()
            network = self.network if isinstance(self.network, Network) else None
            stand = Stand(way, entry, EngineControl(engine), watch, session, network)
            for number, (column, kind) in enumerate(todo):
                self.at = f"{way.title}: {column.title}, {kind}"
                if column.network and network is None:
                    cell = Cell(way.name, column.name, kind, skipped=str(self.network))
                else:
                    try:
                        cell = await beside(stand.play(column, kind), stage.guard())
                    except TimeoutError:
                        cell = Cell(way.name, column.name, kind, failed=f"not at its end after {PATIENCE:g} s")
                self.cells.append(cell)
                self.say(f"{self.at}: {_said(cell)}")
                if cell.failed:
                    return todo[number + 1 :]
        return []

    def _exporter(self, way: Way, entries: Sequence[int], engine: int, port: int) -> Part:
        hops = {name: f"{LOOPBACK}:{at}" for name, at in zip(way.hop_names, entries, strict=False)}
        arguments = serve_arguments(port, f"http://{LOOPBACK}:{engine}", hops)
        command = (*self.plan.command, *arguments, "--show-addresses")
        if self.plan.mode == "no-events":
            command += ("--no-events",)
        if self.plan.mode == "unprivileged":
            command = (*unprivileged(), *command)
        return Part("exporter", command, (port,))


def _said(cell: Cell) -> str:
    if cell.error is None:
        return cell.failed or f"not run: {cell.skipped}"
    seconds = ""
    if cell.seconds:
        seconds = ", state right after " + ", ".join("never" if s is None else f"{s:.1f}" for s in cell.seconds) + " s"
    late = f", {cell.late_beats} late beats" if cell.late_beats else ""
    missed = "".join(f"\n    (!) {miss}" for miss in cell.misses())
    return f"off by {cell.error:.2%}{seconds}{late}{missed}"


def _proxies(way: Way, ports: Sequence[int], directory: Path) -> list[Part]:
    """Return the proxies of a way, innermost first. ``ports`` are theirs, outermost first, and last the engine's."""
    parts = []
    for (proxy, leaks), name, port, upstream in zip(way.hops, way.hop_names, ports, ports[1:], strict=False):
        own = directory / name
        own.mkdir()
        part = proxy.part(Wiring(port, upstream, leaks and proxy.leaks is not None, own))
        parts.append(replace(part, name=f"{proxy.name}-{name}"))
    return parts[::-1]


#: What takes every privilege from a program and keeps it tied to the process that starts it: a change of user would
#: undo that (prctl(2), PR_SET_PDEATHSIG).
NO_CAPABILITIES = (
    *("setpriv", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"),
    *("--no-new-privs", "--pdeathsig=KILL"),
)
_NOBODY = ("--reuid=65534", "--regid=65534")


def unprivileged() -> tuple[str, ...]:
    """Return what to put before a command so that it may do nothing: as nobody, who owns nothing.

    Where nobody may not enter the folder of this Python, as the same user, without any capability.
    """
    for command in ((*NO_CAPABILITIES, *_NOBODY), NO_CAPABILITIES):
        try:
            tried = subprocess.run(  # noqa: S603 - setpriv, and this Python
                [*command, sys.executable, "-c", "import tokengap"], capture_output=True, timeout=30, check=False
            )
        except OSError as error:
            raise SetupError(f"setpriv cannot be run: {error.strerror}; apt-get install util-linux") from error
        if tried.returncode == 0:
            return command
    raise SetupError(f"setpriv may not drop privileges here: {tried.stderr.decode(errors='replace').strip()}")


def _user(mode: Mode) -> str:
    if mode == "unprivileged":
        if set(_NOBODY) <= set(unprivileged()):
            return "nobody, without any capability"
        return f"{_own_name()}, without any capability"
    return _own_name()


def _own_name() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"uid {os.getuid()}"


async def measure(plan: Plan, say: Callable[[str], None]) -> Run:
    """Play a plan; ``say`` hears of each cell."""
    needs_network = any(column.network for column in plan.columns)
    network = await own_network() if needs_network else "no column asks for it"
    if needs_network and isinstance(network, str):
        say(f"nobody can vanish: {network}")
    matrix = Matrix(plan, network, say)
    load, began = os.getloadavg()[0], datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="tokengap-matrix-") as directory:
        await beside(matrix.play(Path(directory)), progress.show(Console(stderr=True), lambda: matrix.line))
    return Run(
        mode=plan.mode,
        user=_user(plan.mode),
        date=began.strftime("%Y-%m-%d"),
        kernel=os.uname().release,
        cores=os.cpu_count() or 1,
        load=(load, os.getloadavg()[0]),
        programs=matrix.programs,
        cells=tuple(matrix.cells),
    )


def chosen(what: str, wanted: str | None, known: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of ``known`` that a list of names chooses, all when there is none."""
    if wanted is None:
        return tuple(known.values())
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise SettingsError(f"--{what}: {name!r}; expected some of {', '.join(known)}")
    return tuple(value for name, value in known.items() if name in names)
