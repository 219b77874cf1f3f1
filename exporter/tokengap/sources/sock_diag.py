"""The kernel's own table of TCP sockets: ``NETLINK_SOCK_DIAG``, read into columns.

Three things are asked of it, none of which needs a privilege:

- a **dump** of the sockets in three states, those of the watched ports only (a small program runs in the kernel for
  each socket), each with its ``struct tcp_info``;
- **destroy events**: for each socket that ends, its final ``tcp_info`` (multicast groups of ``sock_diag.h``);
- both decoded by :func:`decode`, a pure function from bytes to a table, without a step of Python per socket.

Numbers and layouts are those of ``linux/netlink.h``, ``sock_diag.h``, ``inet_diag.h``, ``tcp.h`` and ``filter.h``. The
manual page is sock_diag(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokengap.errors import SourceUnusable
from tokengap.readings import (
    CLOSE_WAIT,
    ESTABLISHED,
    FIN_WAIT1,
    LISTEN,
    SOCKET,
    UNKNOWN,
    V4_MAPPED,
    SocketTable,
    no_sockets,
)

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
#: Multicast groups SKNLGRP_INET_TCP_DESTROY (1) and SKNLGRP_INET6_TCP_DESTROY (3) as a mask for bind().
DESTROY_GROUPS: Final = 1 << 0 | 1 << 2
#: States of a socket that may carry a stream. A closing socket with unsent data is in FIN-WAIT-1.
STATES: Final = 1 << ESTABLISHED | 1 << CLOSE_WAIT | 1 << FIN_WAIT1

# linux/netlink.h
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_NLMSG_NOOP, _NLMSG_ERROR, _NLMSG_DONE, _NLMSG_OVERRUN = 1, 2, 3, 4
_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_NLA_TYPE_MASK = 0x3FFF

# asm-generic/socket.h; the socket module has no names for these
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_RCVBUFFORCE = 26, 27, 33

# linux/inet_diag.h
_INET_DIAG_REQ_BYTECODE = 1
_INET_DIAG_INFO = 2
_BC_JMP, _BC_S_GE, _BC_S_LE, _BC_D_GE, _BC_D_LE, _BC_S_EQ, _BC_D_EQ = 1, 2, 3, 4, 5, 11, 12

#: A kernel program is checked in quadratic time and runs once per socket of the host: with more ports than this the
#: whole table is cheaper, and the rows are picked here.
MAX_FILTERED_PORTS: Final = 128

#: One part of a dump is at most 32 KiB (netlink_recvmsg() in net/netlink/af_netlink.c); room for twice that is kept.
_PART = 64 * 1024
_SMALLEST_INBOX = 1024 * 1024
_LARGEST_INBOX = 1024 * 1024 * 1024
#: Taken per drain; what is left then waits in the kernel for the next one.
_EVENTS_PER_DRAIN = 32 * 1024 * 1024
#: Asked for; without CAP_NET_ADMIN the kernel grants net.core.rmem_max. It is a limit, not an allocation.
_EVENTS_BACKLOG = 32 * 1024 * 1024
_ATTEMPTS = 3
_LONG_RUN = 256
_BLOCK = 2048  # messages, about 800 kB

# Offsets from the start of a netlink message: 16 bytes of nlmsghdr, then struct inet_diag_msg.
_ATTRIBUTES_AT = 88
#: (column, format, offset) of struct inet_diag_msg.
_MESSAGE_FIELDS: Final = (
    ("family", "u1", 16),
    ("state", "u1", 17),
    ("timer", "u1", 18),
    ("sport", ">u2", 20),
    ("dport", ">u2", 22),
    ("src_hi", ">u8", 24),
    ("src_lo", ">u8", 32),
    ("dst_hi", ">u8", 40),
    ("dst_lo", ">u8", 48),
    ("cookie", "u8", 60),
    ("rqueue", "u4", 72),
    ("wqueue", "u4", 76),
    ("inode", "u4", 84),
)
#: (column, format, offset) of struct tcp_info. It only ever grew at its end, so an older kernel lacks the later ones:
#: bytes_* came with 4.1, notsent with 4.6, rwnd_limited with 4.10, bytes_sent with 4.19.
TCP_INFO_FIELDS: Final = (
    ("retransmits", "u1", 2),
    ("backoff", "u1", 4),
    ("rto_us", "u4", 8),
    ("unacked", "u4", 24),
    ("last_data_sent", "u4", 44),
    ("last_data_recv", "u4", 52),
    ("last_ack_recv", "u4", 56),
    ("bytes_acked", "u8", 120),
    ("bytes_received", "u8", 128),
    ("notsent", "u4", 144),
    ("rwnd_limited_us", "u8", 176),
    ("bytes_sent", "u8", 200),
)
_ADDRESSES = (("src_hi", "src_lo"), ("dst_hi", "dst_lo"))
_ZERO = np.uint64(0)
_V4_MAPPED = np.uint64(V4_MAPPED)
_LARGEST = np.uint64(2**63 - 1)

_Words = NDArray[np.uint32]


class Link(Protocol):
    """The part of a netlink socket that is used here. Tests put recorded bytes behind it."""

    def send(self, data: bytes, /) -> int:
        """Hand one request to the kernel."""

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int, /) -> int:
        """Receive one datagram, and return its length."""

    def close(self) -> None:
        """Give the socket back."""


class DumpInterrupted(SourceUnusable):
    """The table changed under a dump in a way that may have hidden rows (NLM_F_DUMP_INTR)."""


def open_link() -> socket.socket:
    """Open a netlink socket; it stays in the network namespace of the thread that opened it.

    Raises:
        OSError: this is no Linux, or it does not permit it.
    """
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError(errno.EPROTONOSUPPORT, "netlink is Linux only")
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)


# --- what is asked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ports:
    """The watched ports: a socket is wanted when its local port is listened on, or its remote port is a target."""

    listening: frozenset[int]
    targets: frozenset[int]

    def __len__(self) -> int:
        return len(self.listening) + len(self.targets)

    def pick(self, rows: SocketTable) -> SocketTable:
        """Return the rows of these ports. A socket that is connected to nothing (remote port 0) is of none."""
        local, remote = _port_maps(self)
        wanted = (local[rows["sport"]] | remote[rows["dport"]]) & (rows["dport"] != 0)
        return rows if wanted.all() else rows[wanted]


@lru_cache(maxsize=4)
def _port_maps(ports: Ports) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    local, remote = np.zeros(1 << 16, dtype=bool), np.zeros(1 << 16, dtype=bool)
    local[list(ports.listening)] = True
    remote[list(ports.targets)] = True
    return local, remote


def dump_program(ports: Ports, *, equal: bool = True) -> bytes:
    """Return the program that lets a dump's kernel side pass the sockets of ``ports``.

    An ``inet_diag_bc_op`` is code, jump if yes, jump if no, in bytes from itself; a comparison's port stands in the
    ``no`` of a second one. Jumping to the end passes the socket, jumping 4 bytes past it drops it. ``equal`` uses
    S_EQ and D_EQ; kernels before 4.16 know only >= and <=.
    """
    conditions: list[bytes] = []
    for codes, wanted in (
        ((_BC_S_EQ,) if equal else (_BC_S_GE, _BC_S_LE), ports.listening),
        ((_BC_D_EQ,) if equal else (_BC_D_GE, _BC_D_LE), ports.targets),
    ):
        for port in sorted(wanted):
            tests = len(codes)
            conditions.append(
                b"".join(
                    # On "no": past the remaining tests of this port and past the jump that follows them.
                    struct.pack("=BBHBBH", code, 8, 8 * (tests - i) + 4, 0, 0, port)
                    for i, code in enumerate(codes)
                )
            )
    program = conditions.pop() if conditions else b""
    for condition in reversed(conditions):
        program = condition + struct.pack("=BBH", _BC_JMP, 4, 4 + len(program)) + program
    return program


def dump_request(family: int, program: bytes = b"", states: int = STATES) -> bytes:
    """Return the request for a dump of one address family (``struct inet_diag_req_v2``), with ``tcp_info``."""
    body = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, states)
    if program:
        body += struct.pack("=HH", 4 + len(program), _INET_DIAG_REQ_BYTECODE) + program
    return _HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + body


def event_filter(ports: Ports) -> bytes:
    """Return the socket filter (classic BPF) that lets destroy events of ``ports`` pass, and no others.

    A kernel that closes 10,000 sockets of other programs a second would otherwise fill our queue with them.
    """
    load_half, equal, give = 0x28, 0x15, 0x06  # BPF_LD|BPF_H|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
    program: list[bytes] = []
    for offset, wanted in ((20, ports.listening), (22, ports.targets)):
        program.append(struct.pack("=HBBI", load_half, 0, 0, offset))
        for port in sorted(wanted):
            program.append(struct.pack("=HBBI", equal, 0, 1, port))
            program.append(struct.pack("=HBBI", give, 0, 0, 0xFFFF_FFFF))
    program.append(struct.pack("=HBBI", give, 0, 0, 0))
    return b"".join(program)


# --- what comes back ------------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Consecutive messages that agree in length, type and flags: one, or, in a dump, nearly all.

    ``step`` is the length with its padding. A named tuple, since thousands of runs are made where lengths alternate.
    """

    kind: int
    flags: int
    offset: int
    many: int
    length: int
    step: int


def decode(buffer: bytes | bytearray | memoryview) -> SocketTable:
    """Decode netlink messages into a table: each ``inet_diag_msg`` is a row, in no promised order.

    Columns that the kernel did not send are :data:`UNKNOWN`. Counters that do not fit 63 bits are cut to that.

    Raises:
        OSError: the kernel answered with an error number (NLMSG_ERROR, or one inside NLMSG_DONE).
        DumpInterrupted: the dump may lack rows.
        SourceUnusable: the bytes end inside a message, or are not messages at all.
    """
    view = memoryview(buffer)
    data: list[_Run] = []
    for run in _runs(view):
        if run.kind in (SOCK_DIAG_BY_FAMILY, _NLMSG_DONE) and run.flags & _NLM_F_DUMP_INTR:
            raise DumpInterrupted("the kernel's socket table changed during the dump (NLM_F_DUMP_INTR)")
        if run.kind == SOCK_DIAG_BY_FAMILY:
            if run.length < _ATTRIBUTES_AT:
                raise SourceUnusable(f"a socket message of {run.length} bytes, {_ATTRIBUTES_AT} are the least")
            data.append(run)
        elif run.kind in (_NLMSG_ERROR, _NLMSG_DONE):
            _raise_error(view, run)
        elif run.kind == _NLMSG_OVERRUN:
            raise SourceUnusable("netlink lost data (NLMSG_OVERRUN)")
    if not data:
        return no_sockets()
    table = np.empty(sum(run.many for run in data), dtype=SOCKET)
    table["netns"] = 0  # the bytes do not tell; who asked in another namespace knows
    filled = 0
    for words in _messages(view, data):
        for alike, info_at, info_size in _layouts(words):
            # In blocks that stay in the processor's cache while column after column is taken from them: 2.4x faster.
            for start in range(0, len(alike), _BLOCK):
                block = alike[start : start + _BLOCK]
                _fill(table[filled : filled + len(block)], block, info_at, info_size)
                filled += len(block)
    return table


def ended(buffer: bytes | bytearray | memoryview) -> bool:
    """Return whether the messages end with the one that ends a dump."""
    runs = list(_runs(memoryview(buffer)))
    return bool(runs) and runs[-1].kind == _NLMSG_DONE


def _runs(view: memoryview) -> Iterator[_Run]:
    size = len(view)
    offset = 0
    while offset < size:
        if size - offset < _HEADER.size:
            raise SourceUnusable(f"netlink bytes end inside a header, {offset} of {size} were read")
        length, kind, flags, _, _ = _HEADER.unpack_from(view, offset)
        step = (length + 3) & ~3
        if length < _HEADER.size or step > size - offset:
            raise SourceUnusable(f"a netlink message of {length} bytes where {size - offset} are left")
        count = _alike(view, offset, step)
        yield _Run(kind, flags, offset, count, length, step)
        offset += count * step


def _alike(view: memoryview, offset: int, step: int) -> int:
    """Count the messages from ``offset`` on, ``step`` bytes apart, that have the same length, type and flags.

    A message's first 8 bytes are just these. They are compared in strides that grow: one numpy call for thousands of
    messages that are alike, and none where each differs from the next.
    """
    most = (len(view) - offset) // step
    first = bytes(view[offset : offset + 8])
    if most == 1 or view[offset + step : offset + step + 8] != first:
        return 1
    wanted = np.frombuffer(first, dtype=np.uint64)[0]
    count, stride = 2, 64
    while count < most:
        stride = min(stride * 4, most - count)
        heads: NDArray[np.uint64] = np.ndarray((stride,), np.uint64, view, offset + count * step, (step,))
        differs = heads != wanted
        if differs.any():
            return count + int(differs.argmax())
        count += stride
    return count


def _raise_error(view: memoryview, run: _Run) -> None:
    """Raise what NLMSG_ERROR or NLMSG_DONE report: a negative error number, 0 or nothing for success."""
    for index in range(run.many if run.length >= _HEADER.size + 4 else 0):
        (code,) = struct.unpack_from("=i", view, run.offset + index * run.step + _HEADER.size)
        if code < 0:
            # -(-2**31) fits no C int; os.strerror() refuses it.
            number = min(-code, 2**31 - 1)
            raise OSError(number, os.strerror(number))


def _messages(view: memoryview, runs: list[_Run]) -> Iterator[_Words]:
    """Return messages as rows of words: a long run in place, short ones of one width gathered into one copy."""
    short: dict[int, list[int]] = {}
    words = np.frombuffer(view[: len(view) & ~3], dtype=np.uint32)
    for run in runs:
        width, first = run.step // 4, run.offset // 4
        if run.many < _LONG_RUN:
            short.setdefault(width, []).extend(range(first, first + run.many * width, width))
        else:
            yield words[first : first + run.many * width].reshape(run.many, width)
    for width, firsts in short.items():
        yield words[np.array(firsts)[:, np.newaxis] + np.arange(width)]


def _layouts(words: _Words) -> Iterator[tuple[_Words, int, int]]:
    """Split messages of one width by where their ``tcp_info`` starts: (messages, offset, size); size 0 for none.

    The attributes of the first message are walked. Those that have the very same attribute headers up to its
    ``tcp_info`` have theirs in the same place; the others are looked at in the next turn.
    """
    while len(words):
        first = words[0].tobytes()
        headers, info_at, info_size = _walk(first)
        same = np.ones(len(words), dtype=bool)
        for at in headers:
            same &= words[:, at // 4] == words[0, at // 4]
        if same.all():
            yield words, info_at, info_size
            return
        yield words[same], info_at, info_size
        words = words[~same]


def _walk(message: bytes) -> tuple[list[int], int, int]:
    """Return the offsets of a message's attribute headers, and where its ``tcp_info`` starts and how long it is."""
    headers: list[int] = []
    at = _ATTRIBUTES_AT
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        headers.append(at)
        if size < 4 or at + size > len(message):
            break
        if kind & _NLA_TYPE_MASK == _INET_DIAG_INFO:
            return headers, at + 4, size - 4
        at += (size + 3) & ~3
    return headers, 0, 0


@lru_cache(maxsize=64)
def _row_layout(width: int, info_at: int, info_size: int) -> tuple[np.dtype[np.void], tuple[str, ...]]:
    """Return a message as a numpy record, and the columns that it lacks."""
    known = [(name, kind, info_at + at) for name, kind, at in TCP_INFO_FIELDS if at + int(kind[-1]) <= info_size]
    names, formats, offsets = zip(*_MESSAGE_FIELDS, *known, strict=True)
    layout = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": width})
    return layout, tuple(name for name, _, _ in TCP_INFO_FIELDS if name not in names)


def _fill(table: SocketTable, words: _Words, info_at: int, info_size: int) -> None:
    """Copy messages of one layout into as many rows of the table, column by column."""
    layout, lacking = _row_layout(words.shape[1] * 4, info_at, info_size)
    rows = words.view(layout)[:, 0]
    four = rows["family"] == socket.AF_INET
    for high, low in _ADDRESSES:
        # An IPv4 address is the first 4 of 16 bytes; the rest is zero.
        table[high] = np.where(four, _ZERO, rows[high])
        table[low] = np.where(four, _V4_MAPPED | rows[high] >> np.uint64(32), rows[low])
    for name in layout.names or ():
        column = rows[name]
        if name == "family" or name[:3] in ("src", "dst"):
            continue
        if column.dtype == np.uint64 and name != "cookie":
            column = np.minimum(column, _LARGEST)
        table[name] = column
    for name in lacking:
        table[name] = UNKNOWN


# --- asking ---------------------------------------------------------------------------------------------------------


class _Inbox:
    """A buffer that datagrams are received into one behind the other; it grows, and is used again."""

    def __init__(self) -> None:
        self._buffer = bytearray(_SMALLEST_INBOX)
        self._end = 0

    def clear(self) -> None:
        self._end = 0

    def received(self) -> memoryview:
        return memoryview(self._buffer)[: self._end]

    def receive(self, link: Link, most: int = _LARGEST_INBOX) -> None:
        """Receive what waits, without blocking; stop behind ``most`` bytes."""
        flags = socket.MSG_DONTWAIT | socket.MSG_TRUNC  # MSG_TRUNC: tell the real length of a datagram that was cut
        view = memoryview(self._buffer)
        while self._end < most:
            if len(view) - self._end < _PART:
                grown = bytearray(2 * len(view))
                grown[: self._end] = view[: self._end]
                self._buffer, view = grown, memoryview(grown)
            try:
                length = link.recv_into(view[self._end : self._end + _PART], _PART, flags)
            except BlockingIOError:
                return
            if length > _PART:
                raise SourceUnusable(f"a netlink datagram of {length} bytes, {_PART} are the most")
            self._end += length


class Dumper:
    """Dumps the sockets of the watched ports; keeps the buffer, and what was learned about this kernel."""

    def __init__(self) -> None:
        self._inbox = _Inbox()
        self._equal = True

    def dump(self, link: Link, ports: Ports) -> SocketTable:
        """Return the sockets of ``ports`` in both families.

        Raises:
            OSError: the kernel refused, with its error number.
            SourceUnusable: no whole dump came.
        """
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(DumpInterrupted):
                return ports.pick(self._dump(link, ports))
        return ports.pick(self._dump(link, ports))

    def listens(self, link: Link, ports: Ports) -> bool:
        """Tell whether anybody listens on one of ``ports.listening``. The kernel walks its few listeners only.

        Raises as :meth:`dump` does.
        """
        listeners = self._ask(link, b"", 1 << LISTEN)
        return bool(np.isin(listeners["sport"], list(ports.listening)).any())

    def _dump(self, link: Link, ports: Ports) -> SocketTable:
        if not len(ports):
            return no_sockets()
        if len(ports) > MAX_FILTERED_PORTS:
            return self._ask(link, b"")
        try:
            return self._ask(link, dump_program(ports, equal=self._equal))
        except OSError as error:
            if error.errno != errno.EINVAL or not self._equal:
                raise
        rows = self._ask(link, dump_program(ports, equal=False))
        self._equal = False
        return rows

    def _ask(self, link: Link, program: bytes, states: int = STATES) -> SocketTable:
        # The kernel makes a part of a dump inside the recv() of the part before, the first inside send(): a queue
        # that is empty means that the dump has ended (net/netlink/af_netlink.c, netlink_recvmsg()). The message that
        # says so is looked for all the same.
        tables = []
        for family in (socket.AF_INET, socket.AF_INET6):
            self._inbox.clear()
            link.send(dump_request(family, program, states))
            self._inbox.receive(link)
            received = self._inbox.received()
            rows = decode(received)
            if not ended(received):
                raise SourceUnusable(f"a dump of {len(received)} bytes stopped before its end")
            tables.append(rows)
        return tables[0] if not len(tables[1]) else np.concatenate(tables)


class DestroyEvents:
    """The final counters of sockets that ended: what came since the drain before.

    An event is sent when the kernel frees a socket: on the way into TIME-WAIT, after a reset, after the last
    acknowledgement; from a work queue, so a moment after the socket left the table. A socket that was reset by its peer
    leaves the table at once, but is freed only when its process closes it: until then it is in neither.

    Rows differ from those of a dump, seen on 6.18: the state is CLOSE, timer, inode and backoff are 0, ``last_*`` count
    back from the event, ``bytes_acked`` counts our own FIN too, and after a reset ``unacked`` is 0 while ``wqueue``
    keeps what was never acknowledged. A socket whose owner reset it (SO_LINGER 0) or never got it connected was wiped
    before it was freed: its remote port and all its counters are 0, so it tells nothing and is left out.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._inbox = _Inbox()
        self._ports: Ports | None = None
        self.lost = 0

    @classmethod
    def open(cls) -> DestroyEvents:
        """Subscribe.

        Raises:
            OSError: the kernel does not offer the events, or not to us.
        """
        link = open_link()
        try:
            try:
                link.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _EVENTS_BACKLOG)
            except OSError:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _EVENTS_BACKLOG)
            _attach_filter(link, event_filter(Ports(frozenset(), frozenset())))
            link.bind((0, DESTROY_GROUPS))
        except OSError:
            link.close()
            raise
        return cls(link)

    def watch(self, ports: Ports) -> None:
        """Let the events of ``ports`` through from now on."""
        if ports != self._ports:
            _attach_filter(self._link, event_filter(ports))
            self._ports = ports

    def drain(self, ports: Ports) -> SocketTable:
        """Return the events of ``ports`` that wait; count in ``lost`` how often the kernel had to drop some."""
        self._inbox.clear()
        while True:
            try:
                self._inbox.receive(self._link, _EVENTS_PER_DRAIN)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self.lost += 1
            else:
                return ports.pick(decode(self._inbox.received()))

    @property
    def room(self) -> int:
        """How many events fit into the kernel's queue: one takes 1,280 bytes of it (6.18)."""
        return self._link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 1280

    def fileno(self) -> int:
        """Return the descriptor, for select()."""
        return self._link.fileno()

    def close(self) -> None:
        """Unsubscribe."""
        self._link.close()


def _attach_filter(link: socket.socket, program: bytes) -> None:
    """Replace the socket's filter; without one where the kernel refuses it, since rows are picked here anyway."""
    code = ctypes.create_string_buffer(program, len(program))
    program_at = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    try:
        link.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program_at)
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # there was none
            link.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
