"""What a drill and a demo play on: the engine, the proxies in front of it, and the exporter that watches them.

::

    users --> edge :8080 --> (admit :8090) --> engine "worker" :8100
                 |                 |                |
                 +-- sockets ------+----------------+-- /metrics --> tokengap serve :10788

Each is a program of its own on loopback, the exporter included: it is started with the command that a user would type.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Never, TypeAlias, TypeVar

from tokengap.errors import SettingsError, SetupError
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import LOOPBACK, Part, RunningPart, free_ports, listens, running, taken
from tokengap.lab.proxies import ADMIT, ENGINE, GATES, Wiring
from tokengap.topology import ENGINE_HOP
from tokengap.view import AdmitMode

T = TypeVar("T")

#: Where a client that left is held on to; "none": nowhere.
Leak: TypeAlias = Literal["edge", "admit", "engine", "none"]
LEAKS: tuple[Leak, ...] = ("edge", "admit", "engine", "none")

#: The names of the hops, outermost first.
HOPS: tuple[Leak, ...] = ("edge", "admit")

#: ``--through`` without a proxy.
DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on loopback. The defaults are those of the source article, and the exporter's own."""

    edge: int = 8080
    admit: int = 8090
    engine: int = 8100
    exporter: int = 10788


def ports(which: Literal["usual", "auto"], wanted: Ports = Ports()) -> Ports:
    """Return ports to use: ``auto``, any that are free; ``usual``, those wanted, and a free one where one is taken."""
    others = Ports(*free_ports(4))
    if which == "auto":
        return others
    mine = asdict(others)
    return Ports(**{name: mine[name] if taken(port) else port for name, port in asdict(wanted).items()})


@dataclass(frozen=True, slots=True)
class Plan:
    """What is put up. ``through`` are proxies by name, the edge first; none: clients call the engine directly.

    ``mode`` is that of the gateway that admits, where it is one of them.
    """

    through: tuple[str, ...]
    leak: Leak
    knobs: Knobs
    ports: Ports
    seed: int = 0
    mode: AdmitMode = "age"

    @staticmethod
    def usual_leak(through: Sequence[str]) -> Leak:
        """Return where it leaks unless told otherwise: at the naive gateway, the outer one of two, else nowhere."""
        return next((hop for hop, name in zip(HOPS, through, strict=False) if name == "naive"), "none")

    @property
    def hops(self) -> dict[str, int]:
        """The hops by name, outermost first, and their ports."""
        names = (ADMIT.name,) if self.through == (ADMIT.name,) else HOPS
        return {name: getattr(self.ports, name) for name, _ in zip(names, self.through, strict=False)}

    @property
    def entry(self) -> int:
        """The port that clients call."""
        return next(iter(self.hops.values()), self.ports.engine)

    @property
    def places(self) -> tuple[str, ...]:
        """Where tokens can be lost: the hops, and the engine itself."""
        return (*self.hops, ENGINE_HOP)

    @property
    def leaks_at(self) -> str:
        """The hop to whose account goes what is generated for nobody: the outermost, where nothing leaks."""
        return self.places[0] if self.leak == "none" else self.leak

    @property
    def serve(self) -> list[str]:
        """The arguments of ``tokengap serve`` for it."""
        hops = {name: f"{LOOPBACK}:{port}" for name, port in self.hops.items()}
        arguments = serve_arguments(self.ports.exporter, f"http://{LOOPBACK}:{self.ports.engine}", hops)
        gateways = [port for port, name in zip(self.hops.values(), self.through, strict=True) if name == ADMIT.name]
        return arguments + [f"--admit=http://{LOOPBACK}:{port}" for port in gateways]

    def path(self) -> str:
        """Return the way of a request, in words."""
        hops = [
            f"{hop} :{port} ({name} {GATES[name].version()}{', leaks' if hop == self.leak else ''})"
            for (hop, port), name in zip(self.hops.items(), self.through, strict=True)
        ]
        slots = self.knobs.max_num_seqs
        engine = f"{ENGINE} :{self.ports.engine} (stand-in vLLM, {slots} {'slot' if slots == 1 else 'slots'}"
        return " -> ".join(("users", *hops, engine + (", leaks)" if self.leak == "engine" else ")")))

    def announcement(self) -> list[str]:
        """Return lines that say what is put up, and with which command it is watched."""
        lines = [self.path(), "watched by: tokengap " + " ".join(self.serve)]
        moved = [str(port) for name, port in asdict(Ports()).items() if port != getattr(self.ports, name)]
        if moved:
            lines.append(f"note: not on the usual ports ({', '.join(moved)})")
        return lines


def read_through(text: str) -> tuple[str, ...]:
    """Read ``direct``, ``nginx`` or ``nginx,naive``. SettingsError says what is expected."""
    names = tuple(name.strip() for name in text.split(","))
    if names == (DIRECT,):
        return ()
    if len(names) > len(HOPS) or any(name not in GATES for name in names):
        known = ", ".join((*GATES, DIRECT))
        raise SettingsError(f"--through: {text!r}; expected one of {known}, or two proxies, as in nginx,naive")
    return names


def lab_parts(plan: Plan, directory: Path) -> list[Part]:
    """Return all parts, in the order in which they start: what is called before who calls it."""
    engine = engine_part(plan.ports.engine, plan.knobs, seed=plan.seed)
    exporter = exporter_part(plan.ports.exporter, plan.serve)
    return [engine, *reversed(proxy_parts(plan, directory)), exporter]


def proxy_parts(plan: Plan, directory: Path) -> list[Part]:
    """Return the proxies, outermost first. Raises SetupError when one is missing or cannot leak as asked."""
    if plan.leak in HOPS and plan.leak not in plan.hops:
        raise SettingsError(f"--leak {plan.leak}: there is no such hop in front of the engine")
    ports = [*plan.hops.values(), plan.ports.engine]
    parts = []
    for (hop, port), upstream, name in zip(plan.hops.items(), ports[1:], plan.through, strict=True):
        own = directory / hop
        own.mkdir()
        wiring = Wiring(port, upstream, hop == plan.leak, own, plan.knobs.max_num_seqs, plan.mode)
        part = GATES[name].part(wiring)
        parts.append(replace(part, name=f"{name}-{hop}"))
    return parts


def serve_arguments(port: int, engine_url: str, hops: Mapping[str, str]) -> list[str]:
    """Return the arguments of a ``tokengap serve``. ``hops`` are listening addresses by name, outermost first."""
    arguments = ["serve", "--listen", f"{LOOPBACK}:{port}", "--engine", f"{ENGINE}={engine_url}"]
    for name, address in hops.items():
        arguments += ["--hop", f"{name}={address}"]
    return arguments


def exporter_part(port: int, arguments: Sequence[str]) -> Part:
    """Return the exporter, run as a user runs it."""
    return Part("exporter", (sys.executable, "-m", "tokengap", *arguments), (port,))


@dataclass(frozen=True, slots=True)
class Stage:
    """The running parts."""

    parts: tuple[RunningPart, ...]

    async def guard(self, spared: Collection[str] = ()) -> Never:
        """Raise SetupError as soon as a part has ended, with the last it said. Those named ``spared`` may end."""
        while True:
            for started in self.parts:
                if started.ended and started.part.name not in spared:
                    said = started.last_lines() or "it said nothing"
                    ended_with = started.process.returncode
                    raise SetupError(f"{started.part.name} ended with {ended_with} before its time:\n{said}")
            await asyncio.sleep(0.1)


@asynccontextmanager
async def staged(parts: Sequence[Part], directory: Path) -> AsyncIterator[Stage]:
    """Run the parts, started in this order and ended in the reverse, while the block lasts.

    However the block ends, nothing listens on their ports afterwards, or SetupError says what does.
    """
    started: list[RunningPart] = []
    try:
        async with AsyncExitStack() as stack:
            for part in parts:
                started += [await stack.enter_async_context(running(part, directory))]
            yield Stage(tuple(started))
    finally:
        # Parts check this themselves, but not when the block was cancelled.
        for ended in started:
            for port in ended.part.ports:
                if await listens(port):
                    raise SetupError(f"{ended.part.name} was stopped and something still listens on {LOOPBACK}:{port}")


async def beside(main: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, Never]) -> T:
    """Return what ``main`` returns, with the endless ``others`` running beside it. The first error ends them all."""
    tasks = [asyncio.create_task(each) for each in (main, *others)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {tasks[0]}:
            task.result()  # raises: these have no other end
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(main: Coroutine[Any, Any, T], *, interrupted: int | None = None) -> T:
    """Run ``main`` as the whole program. Ctrl-C and SIGTERM cancel it, so that everything is put away.

    Exits then with ``interrupted``, or with 130 or 143, as a shell says it of a program that a signal ended.
    """

    async def until_told() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return asyncio.run(until_told())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT if interrupted is None else interrupted)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM if interrupted is None else interrupted)
