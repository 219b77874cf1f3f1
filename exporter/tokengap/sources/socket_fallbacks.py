"""TCP sockets where the kernel offers no sock_diag: ``/proc/<pid>/net/tcp``, and last psutil.

``/proc`` (gVisor, kernels without INET_DIAG) tells states, queues, the timer and retransmissions, so clients that are
gone, vanished or stalled are still seen; it has no byte counters and no times. The table of ``/proc/<pid>`` is that of
the process's network namespace, and reading it needs no privilege. Its format is in proc(5) and, in full, in
``get_tcp4_sock()`` of ``net/ipv4/tcp_ipv4.c``. psutil tells states only, and runs on macOS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from tokengap.errors import SourceRefused, SourceUnusable
from tokengap.readings import CLOSE_WAIT, ESTABLISHED, FIN_WAIT1, SOCKET, UNKNOWN, V4_MAPPED, SocketTable, as_ipv6
from tokengap.sources.host import packed_address

#: The tables of our own network namespace.
OWN_NAMESPACE: Final = Path("/proc/self/net")

_STATES: Final = frozenset((ESTABLISHED, CLOSE_WAIT, FIN_WAIT1))
_PSUTIL_STATES: Final = {
    psutil.CONN_ESTABLISHED: ESTABLISHED,
    psutil.CONN_CLOSE_WAIT: CLOSE_WAIT,
    psutil.CONN_FIN_WAIT1: FIN_WAIT1,
}
_HALF: Final = 2**64 - 1
_TICK_US: Final = 1_000_000 // os.sysconf("SC_CLK_TCK")


def read_proc(listening: frozenset[int], targets: frozenset[int], net: Path = OWN_NAMESPACE) -> SocketTable:
    """Read ``tcp`` and ``tcp6`` of a directory ``/proc/<pid>/net``. Blocks: some 9 ms per 1,000 sockets.

    Raises:
        SourceRefused: there is no such table, or not for us.
        SourceUnusable: a line is not of this format.
    """
    try:
        text = (net / "tcp").read_text("ascii", errors="replace")
        if (net / "tcp6").exists():  # not where IPv6 is switched off
            text += (net / "tcp6").read_text("ascii", errors="replace")
    except OSError as error:
        raise SourceRefused(f"{error.filename}: {error.strerror}") from error
    return parse_proc(text, listening, targets)


def parse_proc(text: str, listening: frozenset[int], targets: frozenset[int]) -> SocketTable:
    """Return the wanted sockets of such tables, one behind the other, headings included.

    Raises:
        SourceUnusable: a line is not of this format.
    """
    rows = []
    for line in text.splitlines():
        if line.lstrip().startswith("sl "):
            continue
        try:
            row = _proc_row(line.split(), listening, targets)
            if row is not None:
                rows.append(row)
        except (ValueError, IndexError, OverflowError) as error:
            raise SourceUnusable(f"not a line of /proc/net/tcp: {line[:80]!r}") from error
    try:
        return _table(rows)
    except OverflowError as error:
        raise SourceUnusable("a number in /proc/net/tcp is too large") from error


def read_psutil(listening: frozenset[int], targets: frozenset[int]) -> SocketTable:
    """Ask psutil, which looks at every open file of every process on Linux. Blocks: some 22 ms per 1,000 sockets.

    Raises:
        SourceRefused: this system tells it to root only (macOS).
    """
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied as error:
        raise SourceRefused("this system tells sockets to root only") from error
    rows = {}
    for connection in connections:
        local, remote, state = connection.laddr, connection.raddr, _PSUTIL_STATES.get(connection.status)
        if state and local and remote and (local.port in listening or remote.port in targets):
            # By address, since a socket that several processes hold is told several times.
            rows[local, remote] = _row(as_ipv6(local.ip), local.port, as_ipv6(remote.ip), remote.port, state)
    return _table(rows.values())


def _proc_row(fields: list[str], listening: frozenset[int], targets: frozenset[int]) -> dict[str, int] | None:
    # sl local:port remote:port state tx_queue:rx_queue timer:when retransmits uid probes inode refs pointer rto ...
    (source, sport), (destination, dport) = (field.split(":") for field in fields[1:3])
    local, remote, state = int(sport, 16), int(dport, 16), int(fields[3], 16)
    if state not in _STATES or not (local in listening or remote in targets):
        return None
    wqueue, rqueue = fields[4].split(":")
    return _row(_words(source), local, _words(destination), remote, state, int(fields[9])) | {
        "timer": int(fields[5].split(":")[0], 16),
        "retransmits": int(fields[6], 16),
        "rto_us": int(fields[12]) * _TICK_US if len(fields) > 12 else UNKNOWN,
        "rqueue": int(rqueue, 16),
        "wqueue": int(wqueue, 16),
    }


def _words(digits: str) -> int:
    """Return an address of /proc as the number of an IPv6 address."""
    packed = packed_address(digits)
    return int.from_bytes(packed) | (V4_MAPPED if len(packed) == 4 else 0)


def _row(source: int, sport: int, destination: int, dport: int, state: int, inode: int = 0) -> dict[str, int]:
    """Return what each of the two tells of a socket.

    ``cookie`` is the inode. A socket without one (not accepted yet; closed with data unsent; all of psutil's) gets a
    number made of its addresses, which stay the same for its life, with the highest bit set, where no inode is.
    """
    name = b"".join((source.to_bytes(16), sport.to_bytes(2), destination.to_bytes(16), dport.to_bytes(2)))
    return {
        "cookie": inode or int.from_bytes(blake2b(name, digest_size=8).digest()) | 1 << 63,
        "inode": inode,
        "src_hi": source >> 64,
        "src_lo": source & _HALF,
        "dst_hi": destination >> 64,
        "dst_lo": destination & _HALF,
        "sport": sport,
        "dport": dport,
        "state": state,
    }


def _table(rows: Iterable[dict[str, int]]) -> SocketTable:
    """Make rows a table; what they lack is unknown."""
    nothing = {name: UNKNOWN if SOCKET[name] == np.int64 else 0 for name in SOCKET.names or ()}
    return np.array([tuple((nothing | row).values()) for row in rows], dtype=SOCKET)
