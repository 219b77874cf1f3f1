"""The loop: read all sources, join, hand the view on. One beat serves every scraper.

Each source has a deadline of its own and fails alone: an answer, or the reason why there is none, goes into the
readings, and the beat goes on. A source that hangs is not asked again until it has answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tokengap.errors import SourceError, SourceRefused, SourceTimeout
from tokengap.gpu_readings import GpuSnapshot
from tokengap.readings import EnginePage, GatewayPage, ProcessTable, ProxySnapshot, Reading, Readings, SocketSnapshot
from tokengap.topology import Topology
from tokengap.view import View

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds for which what the process table told stands in for a walk that takes longer than a beat.
PROCESSES_VALID = 60.0


def deadline(interval: float) -> float:
    """Return the seconds that one source may take: most of an interval, the rest is for the join and the page.

    At most 10: however rare the beats, somebody may be waiting for the page.
    """
    return min(0.8 * interval, 10.0)


class SocketSource(Protocol):
    """What the beat needs of :class:`tokengap.sources.sockets.Sockets`."""

    async def read(self, topology: Topology) -> SocketSnapshot:
        """Return the watched sockets as they are now."""


class PageSource(Protocol):
    """What the beat needs of :class:`tokengap.sources.engine.EngineSource`."""

    @property
    def takes_its_time(self) -> bool:
        """A page of it that came after the beat's deadline is the next beat's."""

    async def read(self) -> EnginePage:
        """Return the engine's page."""


class ProcessSource(Protocol):
    """What the beat needs of :class:`tokengap.sources.processes.Processes`."""

    async def read(self, topology: Topology, questions: frozenset[int]) -> ProcessTable:
        """Return what the process table tells, and whose sockets those inodes are."""


class GpuSource(Protocol):
    """What the beat needs of :class:`tokengap.sources.gpu.NvmlReader` or :class:`tokengap.sources.dcgm.DcgmPage`."""

    async def read(self) -> GpuSnapshot:
        """Return the GPUs as they were last read, or why there are none."""


class ProxySource(Protocol):
    """What the beat needs of :mod:`tokengap.sources.haproxy`, ``envoy`` and ``nginx``."""

    async def read(self) -> ProxySnapshot:
        """Return what a proxy tells about itself."""


class GatewaySource(Protocol):
    """What the beat needs of :class:`tokengap.sources.gateway.GatewaySource`."""

    async def read(self) -> GatewayPage:
        """Return what a gateway counted."""


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources of one exporter; the engines' pages by engine name, proxies by that of their hop. ``gpu`` and
    ``gateway`` are None where they are not asked for."""

    sockets: SocketSource
    engines: Mapping[str, PageSource]
    processes: ProcessSource
    gpu: GpuSource | None = None
    proxies: Mapping[str, ProxySource] = field(default_factory=dict)
    gateway: GatewaySource | None = None


class Join(Protocol):
    """The fold that turns readings into views: :mod:`tokengap.join`, or a test's own."""

    def start(self, topology: Topology) -> Any:
        """Return the state before the first beat."""

    def step(self, state: Any, readings: Readings) -> tuple[Any, View]:
        """Take one beat's readings in."""

    def questions(self, state: Any) -> frozenset[int]:
        """Return the socket inodes whose owner the join wants to know."""


class Asker(Generic[T]):
    """Asks one source, again and again, and never has two questions out at once.

    ``keep_late`` (may be changed): an answer that came after its deadline is the next beat's, and not thrown away.
    ``valid``: for so many seconds an answer stands in for one that is not there yet.
    """

    def __init__(self, name: str, *, keep_late: bool = False, valid: float = 0.0) -> None:
        self._name, self.keep_late, self._valid = name, keep_late, valid
        self._asked: asyncio.Task[Reading[T]] | None = None
        self._was_late = False
        self._last: Reading[T] | None = None
        self._bugs: set[str] = set()

    async def ask(self, question: Callable[[], Awaitable[T]], deadline: float) -> Reading[T]:
        """Return the answer, or the reason why there is none within ``deadline`` seconds."""
        began = time.monotonic()
        if self._asked is not None and not self._asked.done():
            return self._instead(began, began, "still no answer to an earlier read")
        if self._asked is None or not (self._was_late and self.keep_late):
            self._asked = asyncio.create_task(self._answer(question))
        self._was_late = not (await asyncio.wait([self._asked], timeout=deadline))[0]
        if self._was_late:
            return self._instead(began, time.monotonic(), f"no answer within {deadline:.1f} s")
        reading = self._asked.result()
        if reading.value is not None:
            self._last = reading
        return reading

    def cancel(self) -> None:
        """Give up what is still asked."""
        if self._asked is not None:
            self._asked.cancel()

    async def _answer(self, question: Callable[[], Awaitable[T]]) -> Reading[T]:
        began = time.monotonic()
        try:
            value = await question()
        except SourceError as error:
            now = time.monotonic()
            late = isinstance(error, SourceTimeout)
            return Reading(now, now - began, error=str(error), refused=isinstance(error, SourceRefused), late=late)
        except Exception as error:
            self._note_bug(error)
            now = time.monotonic()
            return Reading(now, now - began, error=f"bug: {type(error).__name__}: {error}".splitlines()[0])
        now = time.monotonic()
        return Reading(now, now - began, value=value)

    def _instead(self, began: float, now: float, error: str) -> Reading[T]:
        """Return what there is in place of an answer."""
        if self._last is not None and now - self._last.at < self._valid:
            return self._last
        return Reading(now, now - began, error=error, late=True)

    def _note_bug(self, error: BaseException) -> None:
        """Log an error that no source should raise, with its traceback, once each."""
        if (kind := repr(error)) not in self._bugs:
            self._bugs.add(kind)
            log.error("a source failed in a way it should not", extra={"source": self._name}, exc_info=error)


class Beat:
    """One exporter's heart. ``publish`` gets each view; it may render for a while, the next beat waits for it."""

    def __init__(
        self, topology: Topology, sources: Sources, join: Join, publish: Callable[[View], Awaitable[None]]
    ) -> None:
        self._topology, self._sources, self._join, self._publish = topology, sources, join, publish
        # A snapshot thrown away would take with it the sockets that ended before it: nothing tells of them again.
        self._sockets: Asker[SocketSnapshot] = Asker("sockets", keep_late=True)
        self._pages: dict[str, Asker[EnginePage]] = {name: Asker(f"engine {name}") for name in sources.engines}
        # A walk through the processes of a large host takes seconds, and what it finds changes rarely.
        self._processes: Asker[ProcessTable] = Asker("processes", keep_late=True, valid=PROCESSES_VALID)
        self._proxies: dict[str, Asker[ProxySnapshot]] = {hop: Asker(f"proxy {hop}") for hop in sources.proxies}
        self._gpu: Asker[GpuSnapshot] = Asker("gpu", keep_late=True)
        self._gateway: Asker[GatewayPage] = Asker("gateway")
        self._state = join.start(topology)

    async def run(self) -> None:
        """Beat until cancelled, on a monotonic grid. Missed beats are skipped; the one after them is marked late."""
        interval = self._topology.interval
        expected = time.monotonic()
        try:
            while True:
                late = time.monotonic() - expected > interval / 2
                # Where on the grid this beat stands: the nearest point, so that a short delay costs no beat.
                due = expected + interval * round((time.monotonic() - expected) / interval)
                await self.once(late=late)
                expected = due + interval
                missed = round(max(time.monotonic() - expected, 0.0) / interval)
                await asyncio.sleep(max(expected + missed * interval - time.monotonic(), 0.0))
        finally:
            self._sockets.cancel()
            self._processes.cancel()
            self._gpu.cancel()
            self._gateway.cancel()
            for page in self._pages.values():
                page.cancel()
            for proxy in self._proxies.values():
                proxy.cancel()

    async def once(self, *, late: bool = False) -> View:
        """Read, join and publish once."""
        readings = await self._read(late=late)
        self._state, view = await asyncio.to_thread(self._join.step, self._state, readings)
        await self._publish(view)
        return view

    async def _page(self, name: str, source: PageSource, within: float) -> Reading[EnginePage]:
        # Thrown away, because it was taken before this beat's sockets: but where each page takes longer than a beat,
        # there would never be one.
        self._pages[name].keep_late = source.takes_its_time
        return await self._pages[name].ask(source.read, within)

    async def _read(self, *, late: bool) -> Readings:
        within = deadline(self._topology.interval)
        # The sockets first, then the pages: so a token that is counted has, if anything, bytes that were not seen yet,
        # and never the reverse. What a page knows more than the sockets is made up for by the next beat's bytes.
        # A gateway's counts likewise: of what it wrote the engine's page knows.
        counts = self._sources.gateway
        sockets, gateway = await asyncio.gather(
            self._sockets.ask(lambda: self._sources.sockets.read(self._topology), within),
            self._gateway.ask(counts.read, within) if counts is not None else _nothing(),
        )
        questions = self._join.questions(self._state)
        gpu = self._sources.gpu
        processes, gpus, pages, proxies = await asyncio.gather(
            self._processes.ask(lambda: self._sources.processes.read(self._topology, questions), within),
            self._gpu.ask(gpu.read, within) if gpu is not None else _nothing(),
            asyncio.gather(*(self._page(name, source, within) for name, source in self._sources.engines.items())),
            asyncio.gather(
                *(self._proxies[hop].ask(source.read, within) for hop, source in self._sources.proxies.items())
            ),
        )
        for warning in gpus.value.warnings if gpus is not None and gpus.value is not None else ():
            log.warning(warning, extra={"source": "gpu"})
        if sockets.value is not None:  # its ages are those of the middle of the dump
            sockets = Reading(sockets.at - sockets.took / 2, sockets.took, sockets.value)
        return Readings(
            at=time.monotonic(),
            wall=time.time(),
            topology=self._topology,
            sockets=sockets,
            engines=dict(zip(self._sources.engines, pages, strict=True)),
            processes=processes,
            gpu=gpus,
            proxies=dict(zip(self._sources.proxies, proxies, strict=True)),
            gateway=gateway,
            late=late,
        )


async def _nothing() -> None:
    """Stand in for a question that is not asked."""
