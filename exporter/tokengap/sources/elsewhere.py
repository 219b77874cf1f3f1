"""The sockets of other network namespaces, read as our own are, and put into one snapshot with them.

Each namespace has a reader of its own. One that cannot be read in a beat says so, and its open sockets stand as they
were: taken for closed they would look like users who left. One that has ended (its process, its name) ends quietly,
after a last look at what closed in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TypeVar

import numpy as np

from tokengap.errors import SourceError, SourceUnusable
from tokengap.readings import LISTEN, Namespace, SocketSnapshot, SocketTable, Way, as_ipv6, no_sockets
from tokengap.sources.host import own_addresses, rows_in
from tokengap.sources.namespaces import Key, Netns, addresses_of, find
from tokengap.sources.sock_diag import Dumper, Ports, open_link

T = TypeVar("T")

#: Seconds between searches for namespaces. One that ended or failed is looked for in the next beat.
LOOK_EVERY: Final = 10.0
#: From the way that tells most to the one that tells least.
_WAYS: Final[tuple[Way, ...]] = ("sock_diag", "proc", "psutil")
#: The kernel numbered sockets per namespace before 5.10. Cookies count up from 1 (and down from 2**64 where an
#: interrupt asked first), so the namespace's number fits into the bits from here on.
_COOKIE_BITS: Final = 48
_MOST_NAMESPACES: Final = 2**15 - 1
_AGES: Final = ("last_data_sent", "last_data_recv", "last_ack_recv")


class Reader(Protocol):
    """One way of reading one namespace."""

    way: Way

    def snapshot(self, ports: Ports) -> SocketSnapshot:
        """Return its sockets. Raises SourceError."""

    def last(self, ports: Ports) -> SocketTable:
        """Return the sockets that closed since the snapshot before."""

    def close(self) -> None:
        """Give back what the kernel holds for us."""


class Place:
    """Where a reader reads: the same namespace, as different processes may stand for it one after the other."""

    def __init__(self, there: Netns) -> None:
        self.there = there

    def enter(self, do: Callable[[], T]) -> T:
        """Call ``do`` inside. Raises OSError."""
        return self.there.enter(do)

    @property
    def net(self) -> Path:
        """The directory of its tables. Raises SourceUnusable where no process shows it."""
        if self.there.net is None:
            raise SourceUnusable("no process is in it that would show its tables")
        return self.there.net


@dataclass
class _Watched:
    """A namespace that is read, with what it told last. ``lost`` is the reader's own count."""

    place: Place
    number: int
    reader: Reader
    addresses: frozenset[int] = frozenset()
    open: SocketTable = field(default_factory=no_sockets)
    at: float = 0.0
    events: bool = False
    lost: int = 0
    stale: bool = False

    def mark(self, rows: SocketTable) -> SocketTable:
        """Say of rows that were read here where they are, and make their cookies unlike any other namespace's."""
        rows["netns"] = self.number
        rows["cookie"] ^= np.uint64(self.number << _COOKIE_BITS)
        return rows

    def read(self, ports: Ports) -> SocketTable:
        """Read it; returns what closed. Raises SourceError."""
        snapshot = self.reader.snapshot(ports)
        self.open, self.at = self.mark(snapshot.open), time.monotonic()
        self.events, self.lost, self.stale = snapshot.events, snapshot.lost, False
        return self.mark(snapshot.closed)

    def as_it_was(self) -> None:
        """Let what was read last stand for now, so much older."""
        now = time.monotonic()
        for column in _AGES:
            ages = self.open[column]
            self.open[column] = np.where(ages >= 0, ages + round(1e3 * (now - self.at)), ages)
        self.at, self.stale = now, True


class Elsewhere:
    """Reads the wanted namespaces (pids, paths, ``all``); used by one thread at a time.

    ``make`` returns a reader of a place, and raises SourceError where it cannot be read. Of those that ``all`` finds,
    only the ones are read in which somebody listens on a watched port: a dump of an empty namespace costs the kernel a
    walk through the sockets of the whole host.
    """

    def __init__(self, wanted: Sequence[str], make: Callable[[Place], Reader], *, every: float = LOOK_EVERY) -> None:
        self._wanted, self._make, self._every = wanted, make, every
        self._watched: dict[Key, _Watched] = {}
        self._not_there: list[str] = []
        self._refused: list[str] = []
        self._own: frozenset[int] = frozenset()
        self._ports: Ports | None = None
        self._due = 0.0
        self._number = 0
        self._lost = 0  # by readers that are closed
        self._dumper = Dumper()

    def add(self, own: SocketSnapshot, ports: Ports) -> SocketSnapshot:
        """Return one snapshot of our own namespace and the others."""
        closed = [own.closed]
        gone = [key for key, watched in self._watched.items() if not watched.place.there.is_there()]
        if gone or ports != self._ports or time.monotonic() >= self._due:
            closed += self._look(ports, gone)
        failed = []
        for watched in self._watched.values():
            try:
                closed.append(watched.read(ports))
            except (SourceError, OSError) as error:
                watched.as_it_was()
                failed.append(f"{watched.place.there.name}: {error}")
                self._due = 0.0
        others = self._watched.values()
        return SocketSnapshot(
            open=np.concatenate([own.open, *(watched.open for watched in others)]),
            closed=np.concatenate(closed),
            way=max([own.way, *(watched.reader.way for watched in others)], key=_WAYS.index),
            events=own.events and all(watched.events for watched in others),
            lost=own.lost + self._lost + sum(watched.lost for watched in others),
            namespaces=(Namespace(0, self._own), *(Namespace(one.number, one.addresses, one.stale) for one in others)),
            unread=(*self._not_there, *self._refused, *failed),
        )

    def close(self) -> None:
        """Close all readers."""
        for watched in self._watched.values():
            watched.reader.close()

    def _look(self, ports: Ports, gone: Sequence[Key]) -> list[SocketTable]:
        """Find out which namespaces there are; returns what closed in those that there are no more."""
        found, self._not_there = find(self._wanted)
        there = {one.key: one for one in found}
        self._own, self._refused, self._ports = _numbers(own_addresses()), [], ports
        closed = [self._leave(key, ports) for key in {*gone, *self._watched} - there.keys()]
        for key, one in there.items():
            watched = self._watched.get(key)
            if watched is not None:
                watched.place.there = one
            elif one.asked or self._listens(one, ports):
                watched = self._come(one)
            if watched is not None:
                watched.addresses = _numbers(addresses_of(one))
        self._due = time.monotonic() + self._every
        return closed

    def _come(self, there: Netns) -> _Watched | None:
        place = Place(there)
        try:
            reader = self._make(place)
        except (SourceError, OSError) as error:
            if there.is_there():
                self._refused.append(f"{there.name}: {error}")
            return None
        taken = {watched.number for watched in self._watched.values()}
        while True:  # in turn, so that the number of one that has just ended is not soon another's
            self._number = self._number % _MOST_NAMESPACES + 1
            if self._number not in taken:
                break
        watched = self._watched[there.key] = _Watched(place, self._number, reader)
        return watched

    def _leave(self, key: Key, ports: Ports) -> SocketTable:
        watched = self._watched.pop(key)
        try:
            return watched.mark(watched.reader.last(ports))
        except (SourceError, OSError):
            return no_sockets()
        finally:
            self._lost += watched.lost
            watched.reader.close()

    def _listens(self, there: Netns, ports: Ports) -> bool:
        """Tell whether anybody in there listens on a watched port; not when it cannot be told."""
        try:
            if there.path is not None:
                with there.enter(open_link) as link:
                    return self._dumper.listens(link, ports)
        except (SourceError, OSError):
            pass  # not permitted, or no sock_diag: its tables say the same
        try:
            return any(row.port in ports.listening for row in rows_in(LISTEN, net=there.net)) if there.net else False
        except (SourceError, OSError):
            return False


def _numbers(addresses: frozenset[str]) -> frozenset[int]:
    return frozenset(as_ipv6(address) for address in addresses if not address.startswith("127.") and address != "::1")
