"""Sockets of a hop's processes that no table of TCP shows: UDP ports for HTTP/3, connections to unix-domain sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tokengap.readings import CLOSE, ESTABLISHED
from tokengap.sources.host import PROC_NET, Row, parse_rows
from tokengap.sources.sock_diag import NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY

#: What services are connected to anyway: the journal takes their output, the bus their messages.
_OF_THE_SYSTEM = ("/run/systemd/", "/run/dbus/", "/dev/log")

# linux/netlink.h, linux/unix_diag.h
_HEADER = struct.Struct("=IHHII")
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST_DUMP = 0x301
_REQUEST = struct.Struct("=BBHIIIII")  # family, protocol, pad, states, inode, show, cookie
_SHOW_NAME, _SHOW_PEER = 1, 4
_MESSAGE = struct.Struct("=BBBBIII")  # family, type, state, pad, inode, cookie
_ATTRIBUTE = struct.Struct("=HH")
_NAME, _PEER = 0, 2
_TALKING = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """One connected unix-domain socket: its path (``@...`` where abstract, empty without one), and its peer's inode."""

    inode: int
    path: str
    peer: int


def udp_rows() -> list[Row]:
    """Return the UDP sockets of this network namespace that are bound and not connected: those that wait for anyone."""
    rows: list[Row] = []
    for name in ("udp", "udp6"):
        with contextlib.suppress(FileNotFoundError), (PROC_NET / name).open("rb") as lines:
            rows += parse_rows(lines, frozenset({CLOSE}))
    return rows


def unix_sockets() -> list[UnixSocket] | None:
    """Ask the kernel for the connected unix-domain sockets here, None where it does not tell (unix_diag)."""
    states = 1 << ESTABLISHED
    body = _REQUEST.pack(socket.AF_UNIX, 0, 0, states, 0, _SHOW_NAME | _SHOW_PEER, 0, 0)
    header = _HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as link:
            link.settimeout(2.0)
            link.send(header + body)
            found: list[UnixSocket] = []
            while (part := parse_unix_diag(link.recv(1 << 18))) is not None:
                found += part
            return found
    except (OSError, ValueError):
        return None


def parse_unix_diag(datagram: bytes) -> list[UnixSocket] | None:
    """Read one part of a dump; None: it was the last. Raises ValueError when the kernel refused, or it is malformed."""
    found: list[UnixSocket] = []
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, *_ = _HEADER.unpack_from(datagram, at)
        if kind == _NLMSG_DONE and not found:
            return None
        if kind == _NLMSG_ERROR or length < _HEADER.size or at + length > len(datagram):
            raise ValueError("no answer of unix_diag")
        if kind == SOCK_DIAG_BY_FAMILY and length >= _HEADER.size + _MESSAGE.size:
            start = at + _HEADER.size
            _, type_, _, _, inode, *_ = _MESSAGE.unpack_from(datagram, start)
            attributes = dict(_attributes(datagram[start + _MESSAGE.size : at + length]))
            if type_ in _TALKING and len(attributes.get(_PEER, b"")) == 4:
                (peer,) = struct.unpack("=I", attributes[_PEER])
                found.append(UnixSocket(inode, _path(attributes.get(_NAME, b"")), peer))
        at += length + 3 & ~3
    return found


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += length + 3 & ~3


def _path(name: bytes) -> str:
    text = name.rstrip(b"\0").decode(errors="replace")
    return f"@{text[1:]}" if text.startswith("\0") else text


def quic_ports(rows: Iterable[Row], listening: frozenset[int], held: frozenset[int]) -> tuple[int, ...]:
    """Return the UDP ports, of those a hop listens on with TCP, at which its processes (they hold ``held``) wait."""
    return tuple(sorted({row.port for row in rows if row.port in listening and row.inode in held}))


def connected_to(sockets: Iterable[UnixSocket], held: frozenset[int]) -> tuple[str, ...]:
    """Return the paths at which other processes listen and those that hold ``held`` are connected."""
    by_inode: Mapping[int, UnixSocket] = {one.inode: one for one in sockets}
    peers = (by_inode[by_inode[inode].peer] for inode in held & by_inode.keys() if by_inode[inode].peer in by_inode)
    paths = {peer.path for peer in peers if peer.path and peer.inode not in held}
    return tuple(sorted(path for path in paths if not path.startswith(_OF_THE_SYSTEM)))
