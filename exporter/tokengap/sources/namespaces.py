"""Other network namespaces of this host: which there are, how to be inside one for a moment, what is there.

A container or pod has a network namespace of its own (network_namespaces(7)): its own sockets, ports and addresses. Two
things reach in from outside:

- ``setns`` moves one thread into it (CAP_SYS_ADMIN); what that thread opens there, such as a netlink socket, stays
  bound to that namespace when the thread has ended;
- ``/proc/PID/net`` shows the tables of a process's namespace to everybody: states and queues of sockets, no bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from tokengap.errors import SourceError, SourceRefused
from tokengap.readings import LISTEN
from tokengap.sources.host import Row, is_own, own_addresses, rows_in

T = TypeVar("T")

#: The word that asks for every namespace.
ALL: Final = "all"
#: Where ``ip netns`` and others keep namespaces by name, with or without a process in them.
NAMED: Final = Path("/run/netns")
#: What the thread that looks at it sees, wherever it is.
_HERE: Final = Path("/proc/thread-self/net")
_NOT_PERMITTED: Final = "entering other network namespaces needs CAP_SYS_ADMIN"
_CLONE_NEWNET: Final = 0x40000000  # linux/sched.h

#: A device and an inode.
Key: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Netns:
    """A network namespace other than our own.

    ``name`` is what people call it. ``path`` opens it; None where we may not look at it. ``pid`` is a process in it;
    None where none is known. ``key`` tells namespaces apart: the inode behind ``path``, or else that of the table
    ``/proc/PID/net/tcp``, which is one per namespace and open to everybody. ``asked``: it was named, not just found.
    """

    name: str
    key: Key
    path: str | None
    pid: int | None
    asked: bool = True

    @property
    def net(self) -> Path | None:
        """The directory of its tables, where a process shows it."""
        return None if self.pid is None else Path(f"/proc/{self.pid}/net")

    def is_there(self) -> bool:
        """Tell whether what stood for it still does: a process may have ended, a name may have been removed."""
        return _key(self.path or f"/proc/{self.pid}/net/tcp") == self.key

    def enter(self, do: Callable[[], T]) -> T:
        """Call ``do`` inside the namespace, in a thread of its own that ends with it.

        Raises what ``do`` raises, and OSError: the namespace is gone, or entering it is not permitted.
        """
        if self.path is None:
            raise PermissionError(errno.EPERM, _NOT_PERMITTED)
        results: list[T] = []
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                _join(self.path or "", self.key)
                results.append(do())
            except BaseException as error:  # raised again below, in the thread that asked
                errors.append(error)

        thread = threading.Thread(target=inside, name="netns")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def _join(path: str, key: Key) -> None:
    """Move this thread into the namespace at a path, if it is still that one. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "setns"):  # os.setns() came with Python 3.12
        raise OSError(errno.ENOSYS, "network namespaces are Linux only")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _key(fd) != key:
            raise FileNotFoundError(errno.ENOENT, "another namespace has its place")
        if libc.setns(fd, _CLONE_NEWNET):
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                raise OSError(errno.EOPNOTSUPP, "not a network namespace")
            raise OSError(number, _NOT_PERMITTED if number == errno.EPERM else os.strerror(number))
    finally:
        os.close(fd)


def why_not_enter() -> str:
    """Return why other namespaces may not be entered from here, empty where they may: to re-enter our own tells."""
    try:
        Netns("our own", _key("/proc/self/ns/net") or (0, 0), "/proc/self/ns/net", None).enter(lambda: None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


# --- which there are ------------------------------------------------------------------------------------------------


def find(wanted: Sequence[str]) -> tuple[list[Netns], list[str]]:
    """Return the wanted namespaces that are there, each once and without our own, and why others are not.

    ``wanted`` are pids, paths, or :data:`ALL`. Blocks for some 10 us per process of the host.
    """
    shown = _shown_by_processes()
    found: dict[Key, Netns] = {}
    problems: list[str] = []
    for word in wanted:
        if word == ALL:
            continue
        try:
            there = _of_process(int(word), shown) if word.isdecimal() else _at_path(word, shown)
        except SourceError as error:
            problems.append(str(error))
        else:
            found.setdefault(there.key, there)
    if ALL in wanted:
        for there in (*_named(shown), *shown.values()):
            found.setdefault(there.key, replace(there, asked=False))
    own = {_key("/proc/self/ns/net"), _key("/proc/self/net/tcp")}
    return [there for key, there in found.items() if key not in own], problems


def _shown_by_processes() -> dict[Key, Netns]:
    """Return the namespace of each process, our own too: one that may be entered wherever one of them may be."""
    may: dict[Key, Netns] = {}
    tables: dict[Key, Netns] = {}
    covered: set[Key] = set()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):  # noqa: PTH208 - many of them
        path, table = f"/proc/{pid}/ns/net", f"/proc/{pid}/net/tcp"
        key = _key(path)
        if key in may:
            continue
        shown = _key(table)
        if key is not None:
            may[key] = Netns(f"pid {pid}", key, path, pid)
            if shown is not None:
                covered.add(shown)
        elif shown is not None and shown not in tables:
            tables[shown] = Netns(f"pid {pid}", shown, None, pid)
    return may | {key: there for key, there in tables.items() if key not in covered}


def _of_process(pid: int, shown: dict[Key, Netns]) -> Netns:
    path, table = f"/proc/{pid}/ns/net", f"/proc/{pid}/net/tcp"
    if (key := _key(path)) is not None:
        return Netns(f"pid {pid}", key, path, pid)
    if (key := _key(table)) is None:
        raise SourceRefused(f"pid {pid}: no such process")
    # Another process of the same namespace may be one that we may look into.
    neighbour = next((one for one in shown.values() if one.path and _key(f"/proc/{one.pid}/net/tcp") == key), None)
    return neighbour or Netns(f"pid {pid}", key, None, pid)


def _at_path(path: str, shown: dict[Key, Netns]) -> Netns:
    key = _key(path)
    if key is None:
        raise SourceRefused(f"{path}: no such file, or not for us")
    ours = _key("/proc/self/ns/net")
    if ours is not None and key[0] != ours[0]:  # every namespace is a file of one file system, nsfs
        raise SourceRefused(f"{path}: not a network namespace")
    return Netns(path, key, path, shown[key].pid if key in shown else None)


def _named(shown: dict[Key, Netns]) -> Iterator[Netns]:
    try:
        names = sorted(path.name for path in NAMED.iterdir())
    except OSError:  # no `ip netns` was ever used here
        return
    for name in names:
        try:
            yield _at_path(str(NAMED / name), shown)
        except SourceError:  # a name whose namespace is being made or removed
            continue


def _key(file: str | int) -> Key | None:
    try:
        status = os.stat(file)  # noqa: PTH116 - thousands of times, and of descriptors
    except OSError:  # it ended, or we may not look
        return None
    return status.st_dev, status.st_ino


# --- what is there --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listening:
    """The listeners of one namespace and the addresses of its interfaces, as IP literals; None is our own."""

    there: Netns | None
    rows: Sequence[Row]
    addresses: frozenset[str]

    def has(self, address: str) -> bool:
        """Tell whether an IP literal reaches this namespace from inside it."""
        return is_own(address, self.addresses)


def look_inside(wanted: Sequence[str]) -> list[Listening]:
    """Return listeners and addresses of our own namespace and of the wanted ones, as far as a process shows them.

    Raises SourceError where there is no ``/proc``.
    """
    spaces = [Listening(None, rows_in(LISTEN), own_addresses())]
    for there in find(wanted)[0] if wanted else ():
        try:
            if there.net is not None:
                spaces.append(Listening(there, rows_in(LISTEN, net=there.net), addresses_in(there.net)))
        except (SourceError, OSError):  # its process has ended
            continue
    return spaces


def addresses_of(there: Netns) -> frozenset[str]:
    """Return the addresses of a namespace's interfaces, loopback left out; none where it cannot be looked into."""
    if there.path is not None:
        with suppress(OSError, ValueError):
            return there.enter(lambda: addresses_in(_HERE))
    if there.net is not None:
        with suppress(OSError, ValueError):
            return addresses_in(there.net)
    return frozenset()


def addresses_in(net: Path) -> frozenset[str]:
    """Read a namespace's own addresses from a directory ``/proc/PID/net``, loopback left out.

    IPv4 from the local routes in ``fib_trie`` (fib_trie_seq_show() in net/ipv4/fib_trie.c), IPv6 from ``if_inet6``.
    Raises OSError.
    """
    found, address = set(), ""
    for line in (net / "fib_trie").read_text("ascii", errors="replace").splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            address = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"] and not address.startswith("127."):
            found.add(address)
    if (net / "if_inet6").exists():
        for line in (net / "if_inet6").read_text("ascii", errors="replace").splitlines():
            found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return frozenset(found - {"::1"})
