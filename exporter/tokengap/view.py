"""What the join knows after a beat. Frozen data; series, pages and JSON are read from it and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokengap.gpu_readings import Gpu, GpuReason

Client: TypeAlias = Literal["connected", "stalled", "vanished", "gone"]
#: Client states in the order of their codes in :data:`STREAM`.
CLIENTS: tuple[Client, ...] = ("connected", "stalled", "vanished", "gone")

EngineState: TypeAlias = Literal["busy", "idle", "stuck", "restarted", "dead", "blind", "sleeping"]
ENGINE_STATES: tuple[EngineState, ...] = ("busy", "idle", "stuck", "restarted", "dead", "blind", "sleeping")

Accounting: TypeAlias = Literal["exact", "beat", "state", "none"]
#: How exact the ledger is, from best to worst.
ACCOUNTINGS: tuple[Accounting, ...] = ("exact", "beat", "state", "none")

NetnsState: TypeAlias = Literal["watched", "failed"]

QueueAgeFrom: TypeAlias = Literal["sockets", "curve"]
QUEUE_AGES_FROM: tuple[QueueAgeFrom, ...] = ("sockets", "curve")

SlotsFrom: TypeAlias = Literal["settings", "commandline", "observed"]

Ending: TypeAlias = Literal["completed", "cancelled", "orphaned", "failed"]
ENDINGS: tuple[Ending, ...] = ("completed", "cancelled", "orphaned", "failed")

JoinedBy: TypeAlias = Literal["settings", "processes"]

EnergySource: TypeAlias = Literal["counter", "power_integral"]

Joules: TypeAlias = Literal["full", "active"]
OrphanJoules: TypeAlias = Literal["full", "active", "sole"]

#: Why GPU-seconds were not accounted: the GPU could not be read or is lost; the engine's page or its sockets could not
#: be read; the beat lasted too long; it is a MIG instance, and nobody can say what part of the whole it costs.
Unaccounted: TypeAlias = Literal["gpu", "engine", "late", "mig"]

#: What cannot be seen of a hop: requests of HTTP/2 clients one by one; clients on HTTP/3 (UDP); the engine's side where
#: it is a unix-domain socket; who is behind a load balancer, a CDN or another gateway.
BlindSpot: TypeAlias = Literal["http2_clients", "http3_clients", "unix_upstream", "load_balancer"]
BLIND_SPOTS: tuple[BlindSpot, ...] = ("http2_clients", "http3_clients", "unix_upstream", "load_balancer")

#: Why a free slot must not be given away; see :mod:`tokengap.join.capacity`.
Condition: TypeAlias = Literal["no_cancel", "not_tied", "slack_short"]

AdmitMode: TypeAlias = Literal["age", "busy"]
MODES: tuple[AdmitMode, ...] = ("age", "busy")

Decision: TypeAlias = Literal["admitted", "rejected_age", "rejected_busy", "rejected_retry", "rejected_closed"]
DECISIONS: tuple[Decision, ...] = ("admitted", "rejected_age", "rejected_busy", "rejected_retry", "rejected_closed")

#: Upper bounds of the stream-age distribution, seconds. 6 and 8 are the default age cut and deadline.
AGE_BOUNDS: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)

#: One stream in flight at one hop, for the per-stream JSON and page.
STREAM = np.dtype(
    [
        ("id", "i8"),
        ("engine", "i4"),  # index into View.engines; -1 not known (queued inside the proxy)
        ("hop", "i4"),  # index into View.hop_names
        ("client", "i1"),  # index into CLIENTS: the state of the client at the outermost hop seen
        ("leaks_at", "i4"),  # index into View.hop_names of the hop that holds on to a gone client; -1 none
        ("age", "f8"),  # seconds since the request
        ("first_byte", "?"),  # an answer has begun
        ("tokens", "f8"),
        ("useful", "f8"),
        ("orphaned", "f8"),
        ("slack", "f8"),  # deadline minus time waited; NaN once the first byte came or the class has no deadline
        ("src_hi", "u8"),  # the client's address, as in readings.SOCKET
        ("src_lo", "u8"),
        ("port", "u2"),
    ]
)
#: Rows of :data:`STREAM`.
StreamTable: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SourceView:
    """One source after a beat: up or not, how long it took, and in words what serves or what is wrong."""

    source: str  # sockets, engine, proxy, processes, gpu
    target: str  # the engine's or the hop's name; empty for sources of which there is one
    up: bool
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class StreamGroup:
    """Streams in flight at a hop towards an engine, with one client state. ``ages``: per AGE_BOUNDS, then above."""

    engine: str
    hop: str
    client: Client
    count: int
    ages: tuple[int, ...]
    age_sum: float
    age_max: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ledger of one engine since the exporter started: ``out = useful + orphaned + pending + unattributed``."""

    out: float = 0.0
    useful: float = 0.0
    orphaned: Mapping[str, float] = field(default_factory=dict)  # by the hop that leaks
    pending: float = 0.0
    unattributed: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What an engine's GPUs spent since the exporter started, and how much of it on orphans.

    ``gpus_up`` and ``gpus_lost`` count its GPUs now. ``joules`` and ``orphan_joules`` are by basis: ``full`` all that
    was drawn, ``active`` what exceeds idle power, ``sole`` only intervals in which nothing but orphans ran. What was
    never known is missing, GPU-seconds (None) included. ``unaccounted`` is GPU-seconds by the reason why they are in
    none of the others.
    ``busy_without_tokens`` is seconds in which a GPU worked while the engine was idle or stuck.
    """

    gpus_up: int = 0
    gpus_lost: int = 0
    gpu_seconds: float | None = None
    orphan_gpu_seconds: float | None = None
    joules: Mapping[Joules, float] = field(default_factory=dict)
    orphan_joules: Mapping[OrphanJoules, float] = field(default_factory=dict)
    unaccounted: Mapping[Unaccounted, float] = field(default_factory=dict)
    busy_without_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class XidView:
    """An XID of one GPU: incidents since the exporter started, and when it was last reported (Unix time)."""

    incidents: int
    last: float


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU, or MIG instance, after a beat.

    ``row`` is what was read, of a GPU that is lost or could not be read only what does not change. ``up`` is None where
    nothing could be read. ``engines`` compute on it, ``joined_by`` settings or processes; empty: not known.
    ``other_processes`` counts those of no watched engine. ``latched``: its utilization is no work. ``energy`` is
    joules, the driver's counter or our own sum of power over time.
    """

    row: Gpu
    up: bool | None
    engines: tuple[str, ...]
    joined_by: JoinedBy | None
    other_processes: int | None
    idle_power: float | None
    latched: bool | None
    energy: float | None
    energy_source: EnergySource | None
    energy_resets: int
    xids: Mapping[int, XidView]


@dataclass(frozen=True, slots=True)
class GpusView:
    """The GPUs of this host, or why there are none. ``read_at`` is when they were last read, Unix time."""

    reason: GpuReason
    detail: str
    way: str
    driver: str
    readers: int
    read_at: float | None
    gpus: tuple[GpuView, ...]


@dataclass(frozen=True, slots=True)
class ProxyView:
    """What the proxy of a hop tells about itself, as :class:`~tokengap.readings.ProxySnapshot`. None: not told in this
    beat. ``client_aborts`` and ``resets`` count from when this exporter read it first, and never fall. ``stale``: it
    counts streams although no client is connected and none goes to an engine, a count that leaked."""

    hop: str
    program: str
    streams: int | None = None
    queued: int | None = None
    oldest_queued: float | None = None
    client_aborts: float | None = None
    resets: float | None = None
    h2_connections: int | None = None
    h2_streams: int | None = None
    stale: bool = False


@dataclass(frozen=True, slots=True)
class BlindSpotView:
    """Whether a hop has a blind spot: True, False, None where that is not known. ``why``, in words."""

    hop: str
    kind: BlindSpot
    blind: bool | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Price:
    """What one GPU costs an hour."""

    per_hour: float
    currency: str


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine after a beat. None: not known in this beat, and not published. ``cost``: None until a GPU is its.

    ``family`` is the kind of engine by its page (``vllm``, ``sglang``, ...), empty until a page was read. ``stale``:
    what the page says of requests is left from before they were aborted; there are none. ``unfinished_tokens`` are
    those of requests that never finished, by the engine's own counters when it was last at rest. ``unsafe`` tells of
    each condition that is known whether it holds.
    """

    name: str
    url: str
    models: tuple[str, ...]
    state: EngineState
    evidence: str
    tokens: Tokens
    running: float | None
    waiting: float | None
    slots: float | None
    slots_from: SlotsFrom | None
    queue_age: float | None
    queue_age_from: QueueAgeFrom | None
    slack: Mapping[str, float]  # by class
    coverage: float | None
    open_streams: int
    progress_age: float | None
    restarts: int
    ghost_steps: float
    breach_seconds: float
    skipped: Mapping[str, int]
    cost: Cost | None = None
    restarts_last_hour: int = 0
    family: str = ""
    stale: bool = False
    unfinished_tokens: float | None = None
    unsafe: Mapping[Condition, bool] = field(default_factory=dict)

    @property
    def utilization(self) -> float | None:
        """Running sequences over slots, 0 where they are stale, None when either is not known."""
        if self.running is None or not self.slots:
            return None
        return 0.0 if self.stale else self.running / self.slots


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """What the gateway decided and whom it keeps waiting.

    ``closed``: it admits nobody, since it is shutting down. ``decisions`` by (class, decision) and ``moves`` by (state
    before, event, state after) count since its start. ``waiting``, ``queue_ages`` and ``expected_starts`` (seconds) are
    by class, ``slots`` by (engine, what takes them), ``held_for`` (seconds) and ``engines_up`` by engine.
    """

    mode: AdmitMode
    closed: bool
    decisions: Mapping[tuple[str, Decision], int]
    moves: Mapping[tuple[str, str, str], int]
    waiting: Mapping[str, int]
    queue_ages: Mapping[str, float]
    expected_starts: Mapping[str, float]
    slots: Mapping[tuple[str, str], int]
    held_for: Mapping[str, float]
    engines_up: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class View:
    """Everything known after a beat.

    ``hop_names`` are the configured hops, outermost first, and last ``engine``. ``endings`` counts ended streams since
    start by (engine, hop, ending). ``accounting`` is ``exact`` while the kernel tells the final counters of closing
    sockets, ``beat`` when up to one beat of a closing socket is missed, ``state`` when a fallback tells no bytes at
    all, ``none`` when no sockets could be read. ``namespaces`` counts network namespaces, our own included, by whether
    their sockets are read; empty when no sockets could be read. ``gpus`` is None where they are not asked for,
    ``price`` where none is set, ``admission`` where there is no gateway.
    """

    at: float
    wall: float
    beats: int
    late_beats: int
    degraded_beats: int
    interval: float
    accounting: Accounting
    events_lost: int
    sources: tuple[SourceView, ...]
    engines: tuple[EngineView, ...]
    hop_names: tuple[str, ...]
    groups: tuple[StreamGroup, ...]
    endings: Mapping[tuple[str, str, Ending], int]
    streams: StreamTable
    gpus: GpusView | None = None
    price: Price | None = None
    namespaces: Mapping[NetnsState, int] = field(default_factory=dict)
    proxies: tuple[ProxyView, ...] = ()
    blind_spots: tuple[BlindSpotView, ...] = ()
    admission: AdmissionView | None = None
