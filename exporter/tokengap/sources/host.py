"""What this host's kernel says about its addresses, listeners, processes, and who holds which socket.

The link between a port and a process is the socket's inode: ``/proc/net/tcp`` shows it for each listener, and
``/proc/PID/fd`` shows who holds it. To look into processes of other users takes root, or CAP_SYS_PTRACE together with
CAP_DAC_READ_SEARCH: the directory is closed to others by its mode, its links by ``ptrace_may_access`` (proc_pid_fd(5)).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tokengap.errors import SourceError
from tokengap.sources.commandlines import is_interpreter
from tokengap.topology import Endpoint

#: The tables of our own network namespace.
PROC_NET = Path("/proc/net")

#: A listener at these takes connections to every address of the host.
ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - compared with, never bound to


@dataclass(frozen=True, slots=True)
class Row:
    """One socket in ``/proc/net/tcp`` or ``tcp6``; addresses are IP literals, IPv4 also where mapped into IPv6."""

    address: str
    port: int
    remote: str
    remote_port: int
    state: int
    inode: int


def parse_rows(lines: Iterable[bytes], states: frozenset[int]) -> Iterator[Row]:
    """Read the lines of ``/proc/net/tcp`` that are in the wanted states (proc(5), get_tcp4_sock in net/ipv4)."""
    marks = tuple(b" %02X " % state for state in states)
    for line in lines:
        if not any(mark in line for mark in marks):
            continue
        words = line.split()
        if len(words) < 10 or not words[0].endswith(b":") or int(words[3], 16) not in states:
            continue
        address, port = _address(words[1])
        remote, remote_port = _address(words[2])
        yield Row(address, port, remote, remote_port, int(words[3], 16), int(words[9]))


def _address(text: bytes) -> tuple[str, int]:
    """Decode ``0100007F:1F90``."""
    digits, _, port = text.partition(b":")
    packed = packed_address(digits)
    address = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return address.removeprefix("::ffff:"), int(port, 16)


def packed_address(digits: str | bytes) -> bytes:
    """Return an address of ``/proc/net/tcp``, 4 or 16 bytes: 32-bit words, each printed as a number in this host's
    byte order."""
    words = (int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    return b"".join(word.to_bytes(4, sys.byteorder) for word in words)


def rows_in(*states: int, net: Path | None = None) -> list[Row]:
    """Return the sockets in some states of our network namespace, or of that whose ``/proc/PID/net`` is given.

    Raises SourceError where there is no such table.
    """
    rows: list[Row] = []
    for name in ("tcp", "tcp6"):
        try:
            with ((net or PROC_NET) / name).open("rb") as lines:
                rows += parse_rows(lines, frozenset(states))
        except FileNotFoundError:
            if name == "tcp":  # tcp6 is missing where IPv6 is switched off
                raise SourceError("no /proc/net/tcp: the process table needs Linux") from None
    return rows


def listens(row: Row, endpoint: Endpoint) -> bool:
    """Tell whether connections to an endpoint arrive at a listening socket."""
    return row.port == endpoint.port and (endpoint.address in (None, row.address) or row.address in ANY_ADDRESS)


def own_addresses() -> frozenset[str]:
    """Return every address of this host's interfaces."""
    every = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
    return frozenset(a.address.partition("%")[0] for a in every if a.family in (socket.AF_INET, socket.AF_INET6))


def is_own(address: str, own: frozenset[str]) -> bool:
    """Tell whether an IP literal reaches this host, given its own addresses."""
    ip = ipaddress.ip_address(address)
    return ip.is_loopback or ip.is_unspecified or address in own


@dataclass(frozen=True, slots=True)
class Held:
    """Pids by the inode of the socket they hold, and ``hidden``, the processes that may not be looked into."""

    pids: Mapping[int, frozenset[int]] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()


def holders(pids: Iterable[int], inodes: frozenset[int] | None) -> Held:
    """Look through the open files of processes for sockets; None looks for all. Processes may end meanwhile."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    hidden = set()
    for pid in pids:
        directory = f"/proc/{pid}/fd"
        try:
            for fd in os.listdir(directory):  # noqa: PTH208 - Path objects would double the time of a walk
                try:
                    target = os.readlink(f"{directory}/{fd}")  # noqa: PTH115 - as above
                except FileNotFoundError:
                    continue
                if target.startswith("socket:["):
                    inode = int(target[8:-1])
                    if inodes is None or inode in inodes:
                        found[inode].add(pid)
        except PermissionError:
            hidden.add(pid)
        except OSError:  # ENOENT or ESRCH: it ended
            continue
    return Held({inode: frozenset(of) for inode, of in found.items()}, frozenset(hidden))


class Tree:
    """The processes as they stood at one instant: parents, names, and command lines (read when asked for)."""

    def __init__(self) -> None:
        self._processes = {p.pid: p for p in psutil.process_iter(["ppid", "name"])}
        self._parents = {pid: p.info["ppid"] or 0 for pid, p in self._processes.items()}
        self._argv: dict[int, list[str]] = {}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, parent in self._parents.items():
            self._children[parent].append(pid)

    @property
    def pids(self) -> frozenset[int]:
        """All processes."""
        return frozenset(self._processes)

    def name(self, pid: int) -> str:
        """Return the name of a process, empty where it is not known."""
        return self._processes[pid].info["name"] or "" if pid in self._processes else ""

    def argv(self, pid: int) -> list[str]:
        """Return the command line, empty where the process ended or hides it."""
        if pid not in self._argv:
            try:
                self._argv[pid] = self._processes[pid].cmdline() if pid in self._processes else []
            except psutil.Error:
                self._argv[pid] = []
        return self._argv[pid]

    def ancestors(self, pid: int) -> Iterator[int]:
        """Yield the parent, its parent and so on."""
        seen = {pid, 0}
        while (pid := self._parents.get(pid, 0)) not in seen:
            seen.add(pid)
            yield pid

    def descendants(self, pids: Iterable[int], stop: frozenset[int] = frozenset()) -> set[int]:
        """Return processes and all that descend from them, without those in ``stop`` and what descends from these."""
        found: set[int] = set()
        waiting = list(pids)
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting += (child for child in self._children[pid] if child not in stop)
        return found

    def same_program(self, one: int, other: int) -> bool:
        """Tell master and worker from launcher and launched: equal names, and equal arguments of an interpreter."""
        name = self.name(one)
        if not name or name != self.name(other):
            return False
        return not is_interpreter(name) or self.argv(one) == self.argv(other)

    def family(self, holders: frozenset[int], stop: frozenset[int] = frozenset()) -> set[int]:
        """Return the processes of the program that holds a listener: those that do, their master, all descendants.

        Descendants matter: after a reload nginx's old workers have closed the listener and still serve their streams.
        A process that only lends the socket (systemd, a supervisor) is an ancestor of a holder and another program.
        """
        lenders = {
            ancestor
            for holder in holders
            for ancestor in self.ancestors(holder)
            if ancestor in holders and not self.same_program(ancestor, holder)
        }
        kept = set(holders - lenders)
        for pid in holders - lenders:
            for ancestor in self.ancestors(pid):
                if not self.same_program(ancestor, pid):
                    break
                kept.add(ancestor)
        return self.descendants(kept, stop - kept)
