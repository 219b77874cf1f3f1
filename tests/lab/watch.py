"""The real sources and the join, beat by beat, inside a test: no page and no waiting for a timer."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
from aiohappyeyeballs import AddrInfoType

import tokengap.join
from tokengap.beat import Beat, Sources
from tokengap.readings import ProcessTable
from tokengap.sources.engine import EngineSource
from tokengap.sources.processes import Processes
from tokengap.sources.proxies import proxy_source
from tokengap.sources.sockets import Sockets
from tokengap.topology import Topology
from tokengap.view import CLIENTS, View


@dataclass
class Watch:
    """An exporter's heart. ``views`` are all that there were."""

    beat: Beat
    interval: float
    views: list[View] = field(default_factory=list)
    due: float = field(default_factory=time.monotonic)

    async def once(self) -> View:
        """Wait for the next beat, and return what is known after it."""
        self.due += self.interval
        await asyncio.sleep(max(self.due - time.monotonic(), 0.0))
        self.due = max(self.due, time.monotonic() - self.interval / 2)
        self.views.append(await self.beat.once())
        return self.views[-1]

    async def until(self, condition: Callable[[View], bool], within: float = 20.0) -> View:
        """Beat until a condition holds; fail when it does not within so many seconds."""
        deadline = time.monotonic() + within
        while not condition(view := await self.once()):
            assert time.monotonic() < deadline, f"this did not come true in {within:g} s: {view}"
        return view


def clients(view: View) -> dict[str, int]:
    """Return how many streams there are by the state of their client, those that are none left out."""
    counts = {name: int((view.streams["client"] == code).sum()) for code, name in enumerate(CLIENTS)}
    return {name: count for name, count in counts.items() if count}


def blind_spots(view: View) -> dict[str, bool | None]:
    """Return the blind spots of the first hop, by kind."""
    return {spot.kind: spot.blind for spot in view.blind_spots if spot.hop == view.hop_names[0]}


class _OneOfTwo(Processes):
    """Our users are in the same process, and not the exporter's: its own sockets are those that it opened itself."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: set[int] = set()

    def socket(self, address: AddrInfoType) -> socket.socket:
        """Open one for the exporter."""
        family, kind, protocol, *_ = address
        opened = socket.socket(family, kind, protocol)
        self._opened.add(os.fstat(opened.fileno()).st_ino)
        return opened

    async def read(self, topology: Topology, questions: frozenset[int]) -> ProcessTable:
        table = await super().read(topology, questions)
        return replace(table, own=table.own & self._opened)


async def _nowhere(_: View) -> None:
    return None


@asynccontextmanager
async def watching(topology: Topology) -> AsyncIterator[Watch]:
    """Watch with the sources that `serve` uses."""
    sockets, processes = Sockets(), _OneOfTwo()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=processes.socket)) as session:
            sources = Sources(
                sockets=sockets,
                engines={e.name: EngineSource(e, session, deadline=5.0) for e in topology.engines},
                processes=processes,
                proxies={one.hop: proxy_source(one, session, deadline=5.0) for one in topology.interfaces},
            )
            yield Watch(Beat(topology, sources, tokengap.join, _nowhere), topology.interval)
    finally:
        sockets.close()
