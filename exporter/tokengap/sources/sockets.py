"""The sockets of the watched ports, from the best way that this host offers.

=============  ========================================================  =====================================
way            tells                                                     serves
=============  ========================================================  =====================================
``sock_diag``  every column, and final counters of sockets that ended    Linux, without any privilege
``proc``       states, queues, timers, retransmissions                   kernels without sock_diag (gVisor)
``psutil``     states                                                    other systems, for development
=============  ========================================================  =====================================

The way is chosen once, when :class:`Sockets` is made; :meth:`Sockets.describe` says which, and why. In each further
network namespace the first two are tried in turn, when it is found (:mod:`~tokengap.sources.elsewhere`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import platform
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

import numpy as np

from tokengap.errors import SourceRefused, SourceUnusable
from tokengap.readings import SocketSnapshot, SocketTable, Way, no_sockets
from tokengap.sources.elsewhere import LOOK_EVERY, Elsewhere, Place
from tokengap.sources.elsewhere import Reader as OtherReader
from tokengap.sources.namespaces import why_not_enter
from tokengap.sources.sock_diag import DestroyEvents, Dumper, Ports, open_link
from tokengap.sources.socket_fallbacks import OWN_NAMESPACE, read_proc, read_psutil
from tokengap.topology import Topology

T = TypeVar("T")

#: Errors by which a kernel, a sandbox or a container says: not here, or not you. Others are a bad moment.
_REFUSALS: Final = frozenset(
    (errno.EPERM, errno.EACCES, errno.ENOENT, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.ENOSYS)
)
#: How long a probe waits for the destroy event of its own connection.
_EVENT_WITHIN: Final = 0.5


class Sockets:
    """Reads the sockets of the watched ports, again and again.

    ``events`` asks for the final counters of sockets that end; where the kernel refuses them the rest goes on, and
    :meth:`describe` says so. ``way`` forces one of the ways; ``auto`` takes the first that is permitted. ``netns`` are
    further network namespaces: pids, paths, or ``all``; they are looked for anew every ``look_every`` seconds.

    Bound to no event loop. Snapshots are taken one at a time; a second caller waits for the first.

    Raises:
        SourceRefused: the forced way is not permitted here.
    """

    def __init__(
        self,
        *,
        events: bool = True,
        way: Literal["auto"] | Way = "auto",
        netns: Sequence[str] = (),
        look_every: float = LOOK_EVERY,
    ) -> None:
        self._lock = threading.Lock()
        self._reader, self._refused = _choose(way, events=events)
        self._elsewhere = Elsewhere(netns, partial(_read_elsewhere, events=events), every=look_every) if netns else None

    def snapshot(self, listening: frozenset[int], targets: frozenset[int]) -> SocketSnapshot:
        """Return the sockets whose local port is in ``listening`` or whose remote port is in ``targets``. Blocks.

        Raises:
            SourceRefused: the kernel does not permit it, or no longer.
            SourceUnusable: no whole table came.
        """
        ports = Ports(listening, targets)
        with self._lock:
            own = self._reader.snapshot(ports)
            return own if self._elsewhere is None else self._elsewhere.add(own, ports)

    async def read(self, topology: Topology) -> SocketSnapshot:
        """Take a snapshot of the ports of ``topology``, in a thread."""
        return await asyncio.to_thread(self.snapshot, topology.listening_ports(), topology.target_ports())

    def describe(self) -> str:
        """Say in one line what serves and why: ``sock_diag, destroy events on``."""
        return "; ".join((self._reader.describe(), *self._refused))

    def limits(self) -> str:
        """Say in one line what other network namespaces do not tell, empty where they tell everything or are not asked
        for."""
        why = why_not_enter() if self._elsewhere is not None else ""
        return f"netns: {why}; states and queues of their sockets are read from /proc/PID/net, no bytes" if why else ""

    def close(self) -> None:
        """Give back what the kernel holds for us."""
        with self._lock:
            self._reader.close()
            if self._elsewhere is not None:
                self._elsewhere.close()


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """What this host allows, for ``tokengap doctor``. ``*_reason`` is empty where the answer is yes.

    ``way`` is the one that serves. ``events_room`` is how many sockets can end within one beat before the kernel
    drops events (by ``net.core.rmem_max``; with CAP_NET_ADMIN that does not bind). ``tcp_info`` is the size of the
    kernel's ``struct tcp_info`` in bytes; 208 hold every column of :data:`~tokengap.readings.SOCKET`.
    """

    kernel: str
    way: Way
    sock_diag: bool
    sock_diag_reason: str
    events: bool
    events_reason: str
    events_room: int | None
    tcp_info: int | None


def probe() -> SocketAccess:
    """Try each thing on a loopback connection of our own. Takes milliseconds; half a second if no event comes."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        reader = _SockDiag(events=True)
    except SourceRefused as refused:
        fallback, _ = _choose("auto", events=False)
        return SocketAccess(kernel, fallback.way, False, str(refused), False, "they need sock_diag", None, None)
    with contextlib.closing(reader):
        reason, tcp_info = reader.events_refused, None
        try:
            tcp_info = _end_a_connection(reader)
        except (OSError, SourceUnusable) as error:
            reason = reason or str(error)
        room = reader.events.room if reader.events else None
        return SocketAccess(kernel, reader.way, True, "", not reason, reason, room, tcp_info)


def _end_a_connection(reader: _SockDiag) -> int:
    """Open and close a connection, see its destroy event come, and return the size of the kernel's ``tcp_info``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = Ports(frozenset({server.getsockname()[1]}), frozenset())
        reader.snapshot(ports)
        with socket.create_connection(server.getsockname()) as client, server.accept()[0]:
            size = len(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1024))
    if reader.events is not None:
        give_up = time.monotonic() + _EVENT_WITHIN
        while not len(reader.snapshot(ports).closed):
            left = give_up - time.monotonic()
            if left <= 0 or not select.select([reader.events], [], [], left)[0]:
                raise SourceUnusable(f"permitted, but none came within {_EVENT_WITHIN} s")
    return size


class _Reader(Protocol):
    """One way of reading."""

    way: Way

    def snapshot(self, ports: Ports) -> SocketSnapshot: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...


def _choose(way: Literal["auto"] | Way, *, events: bool) -> tuple[_Reader, tuple[str, ...]]:
    """Return the first way that this host permits, and for each one before it why it does not."""
    refused: list[str] = []
    if way in ("auto", "sock_diag"):
        try:
            return _SockDiag(events=events), ()
        except SourceRefused as error:
            if way == "sock_diag":
                raise
            refused.append(f"sock_diag refused: {error}")
    if way in ("auto", "proc"):
        try:
            return _Proc(), tuple(refused)
        except SourceRefused as error:
            if way == "proc":
                raise
            refused.append(f"proc refused: {error}")
    return _Psutil(), tuple(refused)


def _read_elsewhere(place: Place, *, events: bool) -> OtherReader:
    """Return the best reader that a namespace other than our own permits."""
    try:
        return _SockDiag(events=events, place=place)
    except SourceRefused:
        if place.there.net is None:
            raise
        return _Proc(place)


class _SockDiag:
    """``place`` is where netlink sockets are opened; they stay there. None is our own namespace."""

    way: Way = "sock_diag"

    def __init__(self, *, events: bool, place: Place | None = None) -> None:
        self._place = place
        self._dumper = Dumper()
        with contextlib.suppress(SourceUnusable), _source_errors():  # a bad moment is no refusal
            self._dump(Ports(frozenset({0}), frozenset()))
        self.events: DestroyEvents | None = None
        self.events_refused = "not asked for"
        if events:
            try:
                self.events = self._inside(DestroyEvents.open)
                self.events_refused = ""
            except OSError as error:
                self.events_refused = error.strerror or str(error)

    def snapshot(self, ports: Ports) -> SocketSnapshot:
        with _source_errors():
            if self.events is None:
                return SocketSnapshot(self._dump(ports))
            self.events.watch(ports)
            rows = self._dump(ports)
            # Drained after the dump: a socket that ended in between is in both, and is closed. One that ends later
            # is closed in the next snapshot.
            closed = self.events.drain(ports)
            if len(closed):
                rows = rows[~np.isin(rows["cookie"], closed["cookie"])]
            return SocketSnapshot(rows, closed, events=True, lost=self.events.lost)

    def last(self, ports: Ports) -> SocketTable:
        """Return what closed since then, when there is no more to dump."""
        with _source_errors():
            return no_sockets() if self.events is None else self.events.drain(ports)

    def _dump(self, ports: Ports) -> SocketTable:
        # A new netlink socket each time costs 20 us (150 us in another namespace) and carries nothing over from a dump
        # that failed.
        with contextlib.closing(self._inside(open_link)) as link:
            return self._dumper.dump(link, ports)

    def _inside(self, do: Callable[[], T]) -> T:
        return do() if self._place is None else self._place.enter(do)

    def describe(self) -> str:
        return f"sock_diag, destroy events {f'off ({self.events_refused})' if self.events_refused else 'on'}"

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


class _Proc:
    way: Way = "proc"

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        if not (self._net / "tcp").exists():
            raise SourceRefused(f"no {self._net}/tcp")

    @property
    def _net(self) -> Path:
        return OWN_NAMESPACE if self._place is None else self._place.net

    def snapshot(self, ports: Ports) -> SocketSnapshot:
        return SocketSnapshot(read_proc(ports.listening, ports.targets, self._net), way=self.way)

    def last(self, _: Ports) -> SocketTable:
        return no_sockets()

    def describe(self) -> str:
        return "proc, no byte counters"

    def close(self) -> None:
        pass


class _Psutil:
    way: Way = "psutil"

    def snapshot(self, ports: Ports) -> SocketSnapshot:
        return SocketSnapshot(read_psutil(ports.listening, ports.targets), way=self.way)

    def describe(self) -> str:
        return "psutil, states only"

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _source_errors() -> Iterator[None]:
    """Turn the kernel's error numbers into the errors of a source."""
    try:
        yield
    except OSError as error:
        kind = SourceRefused if error.errno in _REFUSALS else SourceUnusable
        raise kind(error.strerror or str(error)) from error
