"""What was read in one beat: values, when they were taken on our own monotonic clock, or why there are none.

Everything the join may know stands here, *now* included; it has no other input. Values are data only: no methods that
read, no handles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokengap.gpu_readings import GpuSnapshot
from tokengap.topology import Topology

T = TypeVar("T")

#: In an integer column of a socket table: the kernel did not tell (an older ``tcp_info``, or a fallback source).
UNKNOWN = -1

# States of include/net/tcp_states.h
ESTABLISHED, FIN_WAIT1, CLOSE, CLOSE_WAIT, LISTEN = 1, 4, 7, 8, 10

# Timers of include/linux/inet_diag.h (idiag_timer)
TIMER_NONE, TIMER_RETRANSMIT, TIMER_KEEPALIVE, TIMER_TIMEWAIT, TIMER_PROBE = 0, 1, 2, 3, 4

#: One TCP socket, as ``struct inet_diag_msg`` and ``struct tcp_info`` give it, in host byte order.
#:
#: Addresses are IPv6, two 64-bit halves, IPv4 as ``::ffff:a.b.c.d``, so that one comparison serves both families and
#: dual-stack listeners. ``cookie`` is the socket's identity for its life, unique among all network namespaces (for
#: fallbacks: its inode). ``netns`` numbers the namespace it is in, 0 is the exporter's own: an address means something
#: only there. Times are milliseconds before the snapshot, sizes are bytes, :data:`UNKNOWN` where not told.
SOCKET = np.dtype(
    [
        ("cookie", "u8"),
        ("inode", "u8"),
        ("src_hi", "u8"),
        ("src_lo", "u8"),
        ("dst_hi", "u8"),
        ("dst_lo", "u8"),
        ("sport", "u2"),
        ("dport", "u2"),
        ("netns", "u2"),
        ("state", "u1"),
        ("timer", "u1"),
        ("retransmits", "i8"),
        ("backoff", "i8"),
        ("unacked", "i8"),
        ("rto_us", "i8"),
        ("rqueue", "i8"),  # received and not yet read by the process; an unread FIN counts as 1
        ("wqueue", "i8"),  # written and not yet acknowledged by the peer
        ("notsent", "i8"),
        ("last_data_sent", "i8"),
        ("last_data_recv", "i8"),
        ("last_ack_recv", "i8"),
        ("bytes_sent", "i8"),
        ("bytes_acked", "i8"),  # one too many on sockets that connected (the SYN)
        ("bytes_received", "i8"),  # one too many once the peer sent its FIN
        ("rwnd_limited_us", "i8"),  # time spent with a closed receive window
    ]
)

#: Rows of :data:`SOCKET`.
SocketTable: TypeAlias = NDArray[Any]


#: IPv4 addresses as IPv6 ones, ``::ffff:0:0/96`` (RFC 4291, 2.5.5.2): what stands before the 32 bits.
V4_MAPPED = 0xFFFF << 32


def as_ipv6(address: str) -> int:
    """Return an IP literal as the number of an IPv6 address, IPv4 mapped. Raises ValueError."""
    ip = ip_address(address)
    return int(ip) if ip.version == 6 else V4_MAPPED | int(ip)


def no_sockets() -> SocketTable:
    """Return a table without rows."""
    return np.zeros(0, dtype=SOCKET)


#: The ways of reading sockets, from best to worst.
Way: TypeAlias = Literal["sock_diag", "proc", "psutil"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace whose sockets are in a snapshot.

    ``number`` stands in the column ``netns``. ``addresses`` are those of its interfaces, loopback left out, as numbers
    of IPv6 addresses (:func:`as_ipv6`). ``stale``: it could not be read this time, and its open sockets are those of
    the time before.
    """

    number: int
    addresses: frozenset[int] = frozenset()
    stale: bool = False


@dataclass(frozen=True, slots=True)
class SocketSnapshot:
    """The sockets of the watched ports at one instant.

    ``open`` are sockets in ESTABLISHED, CLOSE-WAIT and FIN-WAIT-1. ``closed`` are those that were destroyed since the
    snapshot before, with their final counters; empty where ``events`` is False. ``way`` says what served. ``lost``
    counts, since start, how often the kernel dropped destroy events because we were slow (ENOBUFS).

    ``namespaces`` are those that are watched, our own first; empty where only our own is asked for. ``unread`` says, a
    sentence each, which of the namespaces that were asked for were not read this time, and why. ``way`` and ``events``
    are those of the one that tells least.
    """

    open: SocketTable
    closed: SocketTable = field(default_factory=no_sockets)
    way: Way = "sock_diag"
    events: bool = False
    lost: int = 0
    namespaces: tuple[Namespace, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnginePage:
    """What the join needs of one engine's page, summed over data-parallel ranks.

    None means: not on the page. ``finished`` counts finished requests of all reasons but abort (never shown for
    clients that leave: vLLM issues 31503, 55634); ``finished_tokens`` is ``request_generation_tokens_sum``.
    ``steps`` and ``step_tokens`` are ``iteration_tokens_total_count`` and ``_sum``. ``kv_usage`` is the highest of the
    ranks, 0 to 1. ``asleep`` is True when ``engine_sleep_state`` says anything but awake. ``created`` is the newest
    ``_created`` of the token counter: the start time where ``process_start_time_seconds`` is not shown. ``skipped``
    counts lines that were left out, by reason.

    ``deferred`` are those of ``waiting`` that wait for something outside the scheduler: KV blocks of another node, a
    grammar, an adapter. ``first_tokens`` counts requests whose prompt was finished, at that moment. ``work`` is any
    count that moves only while the engine computes, whatever it counts. ``family`` is the kind of engine (``vllm``,
    ``sglang``, ...), empty where nobody said. ``live``: something on the page moves while a request runs, not only when
    one ends. ``between_steps``: the engine makes the page between two steps of its inference loop, so that it comes as
    late as the step is long.
    """

    running: float | None = None
    waiting: float | None = None
    deferred: float | None = None
    generation_tokens: float | None = None
    prompt_tokens: float | None = None
    first_tokens: float | None = None
    steps: float | None = None
    step_tokens: float | None = None
    work: float | None = None
    preemptions: float | None = None
    finished: float | None = None
    finished_tokens: float | None = None
    kv_usage: float | None = None
    asleep: bool | None = None
    start_time: float | None = None
    created: float | None = None
    models: tuple[str, ...] = ()
    ranks: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    family: str = ""
    live: bool = True
    between_steps: bool = False

    @property
    def requests(self) -> float:
        """Requests in the engine: running plus waiting, of which what is not on the page counts as none."""
        return (self.running or 0.0) + (self.waiting or 0.0)

    @property
    def done(self) -> tuple[float | None, ...]:
        """What moves while the engine works: where two pages have the same, it did nothing in between."""
        return (
            *(self.generation_tokens, self.prompt_tokens, self.first_tokens, self.steps, self.step_tokens),
            *(self.work, self.preemptions, self.finished, self.kv_usage),
        )


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """What the process table of this host says about the topology. Refreshed rarely.

    ``owners`` answers the questions of the join: for an asked socket inode the hop whose processes hold it, or ``""``
    when another process does, or nobody known does; an inode is missing while it is not answered (no permission).
    ``own`` are the inodes of the exporter's own sockets.
    ``slots`` is ``--max-num-seqs`` times data-parallel size from an engine's command line, by engine name, where it
    stands there. ``families`` are, by engine name, the processes of an engine on this host: those that hold its API's
    listener, their master and all that descend from it; its GPU work is in one of them. ``unseen`` is, by hop name,
    what its processes hold that is not TCP.
    """

    owners: Mapping[int, str] = field(default_factory=dict)
    own: frozenset[int] = frozenset()
    slots: Mapping[str, int] = field(default_factory=dict)
    families: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unseen: Mapping[str, UnseenSockets] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnseenSockets:
    """Sockets of one hop's processes that no table of TCP shows. None: not known, the processes may not be looked into.

    ``quic`` are UDP ports at which it takes HTTP/3 clients: those on which it listens with TCP as well. ``unix`` are
    the paths of unix-domain sockets it is connected *to*, where another process listens.
    """

    quic: tuple[int, ...] | None = None
    unix: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProxySnapshot:
    """What a proxy tells about itself, over all its listeners. None: this program does not tell.

    ``uptime`` is seconds since its process started: when it falls, the totals began anew. ``connections`` are open
    client connections, ``streams`` requests in flight by the proxy's own count, ``queued`` those of them that wait
    inside it for a server, ``oldest_queued`` the age of the oldest of these in seconds. ``client_aborts`` is the total
    of requests whose client left before the end, ``resets`` the total of HTTP/2 streams that clients reset (with both,
    a reset counts in both). ``h2_connections`` and ``h2_streams`` are those of clients, ``h3_connections`` likewise.
    """

    program: str
    uptime: float | None = None
    connections: int | None = None
    streams: int | None = None
    queued: int | None = None
    oldest_queued: float | None = None
    client_aborts: int | None = None
    resets: int | None = None
    h2_connections: int | None = None
    h2_streams: int | None = None
    h3_connections: int | None = None

    @property
    def multiplexes(self) -> bool | None:
        """Whether clients send several requests over one connection now (HTTP/2), None where that is not told."""
        if self.h2_connections is not None:
            return self.h2_connections > 0
        if self.streams is None or self.connections is None:
            return None
        return self.streams > self.connections


@dataclass(frozen=True, slots=True)
class GatewayEngine:
    """One engine as a ``tokengap admit`` has it, counted since its start.

    ``out`` tokens were written to clients, of which ``useful`` were acknowledged and ``orphaned`` never will be.
    ``ended`` counts streams by how they ended. ``slots`` counts its slots by what they are taken by, ``free`` among
    them; ``held_for`` is how long ago, in seconds, the client of the oldest held one left, 0 while none is held.
    """

    out: float
    useful: float
    orphaned: float
    ended: Mapping[str, int]
    slots: Mapping[str, int]
    held_for: float
    up: bool

    @property
    def pending(self) -> float:
        """Tokens written and neither acknowledged nor lost."""
        return self.out - self.useful - self.orphaned

    @property
    def zombies(self) -> int:
        """Slots taken by streams whose client left."""
        return sum(self.slots.values()) - self.slots.get("free", 0) - self.slots.get("streaming", 0)


@dataclass(frozen=True, slots=True)
class GatewayClass:
    """The queue of one class in a gateway: how many wait, the age of the oldest, in how many seconds one that came now
    would start (None: not known), and what was decided since its start."""

    waiting: int
    queue_age: float
    expected_start: float | None
    decisions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GatewayStreams:
    """Streams in flight in a gateway towards an engine (empty: it waits for one), with one client state: how many, and
    of their ages in seconds how many are in each bin of ``view.AGE_BOUNDS``, the sum, and the highest."""

    engine: str
    client: str
    count: int
    ages: tuple[int, ...]
    age_sum: float
    age_max: float


@dataclass(frozen=True, slots=True)
class GatewayPage:
    """What a ``tokengap admit`` says about itself. ``started`` (Unix time) tells one process from the next; ``moves``
    are (state before, event, state after, how often)."""

    started: float
    mode: str
    closed: bool
    engines: Mapping[str, GatewayEngine]
    classes: Mapping[str, GatewayClass]
    moves: tuple[tuple[str, str, str, int], ...] = ()
    streams: tuple[GatewayStreams, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """One source's answer in one beat, or why there is none.

    ``at`` is when the value was taken (monotonic seconds), ``took`` how long reading lasted. Exactly one of ``value``
    and ``error`` is set. ``refused`` tells a dead peer (connection refused) from a failing read, ``late`` one that has
    not answered yet.
    """

    at: float
    took: float = 0.0
    value: T | None = None
    error: str | None = None
    refused: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything read in one beat.

    ``at`` is *now*, monotonic; ``wall`` the same instant as Unix time, for people and timestamps only. ``late`` is True
    when this beat came more than half an interval after it was due (a suspended process, a starved host). ``gpu`` is
    None where GPUs are not asked for (``--no-gpu``); on a host without any it has a value that says so. ``proxies`` is
    by hop, for those whose own interface was named, ``gateway`` None where none was.
    """

    at: float
    wall: float
    topology: Topology
    sockets: Reading[SocketSnapshot]
    engines: Mapping[str, Reading[EnginePage]]
    processes: Reading[ProcessTable]
    gpu: Reading[GpuSnapshot] | None = None
    proxies: Mapping[str, Reading[ProxySnapshot]] = field(default_factory=dict)
    gateway: Reading[GatewayPage] | None = None
    late: bool = False
