"""What is watched: engines, the hops in front of them, and the limits that make a stream late.

A topology is data. It is made from settings (or found by ``--auto``), handed to the sources, which need to know
where to look, and carried inside every :class:`~tokengap.readings.Readings`, so that a recorded beat can be replayed
without any settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: The class of a stream that says nothing else: a person is waiting for it.
INTERACTIVE = "interactive"

#: The class of a stream that nobody waits for. The gateway has it also where no setting names it, without a deadline.
BATCH = "batch"

#: The name under which an engine itself appears as a hop: clients that connect to it directly, and requests it still
#: runs although no socket is open for them.
ENGINE_HOP = "engine"

#: The name under which the gateway appears as a hop, where settings give it no other.
GATEWAY_HOP = "admit"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address. ``address`` is an IP literal (IPv4 or IPv6), or None for "any address of this host"."""

    address: str | None
    port: int

    def __str__(self) -> str:
        if self.address is None:
            return f":{self.port}"
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Hop:
    """One proxy process group on the path.

    ``listen`` are the addresses its clients connect to. ``to`` names what it forwards to: engines, or the next hop.
    ``klass`` is the deadline class of streams that enter here; None takes the engine's.
    """

    name: str
    listen: tuple[Endpoint, ...]
    to: tuple[str, ...]
    klass: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """One ``/metrics`` page of one model server process.

    ``endpoints`` are the addresses at which its API is reached (the URL's host resolved, and any configured
    ``addresses``); an endpoint with address None matches by port on this host. ``slots`` is the configured
    ``max_num_seqs``, summed over data-parallel ranks, None when not configured. ``gpus`` are the UUIDs of the GPUs (or
    MIG instances) it computes on, where configured; empty: those on which its processes are seen.
    """

    name: str
    url: str
    endpoints: tuple[Endpoint, ...]
    slots: int | None = None
    klass: str = INTERACTIVE
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProxyInterface:
    """Where the proxy of a hop tells about itself: HAProxy's runtime socket (a path, or ``HOST:PORT``), Envoy's admin
    interface or nginx's page of ``stub_status`` (a URL)."""

    hop: str
    program: Literal["haproxy", "envoy", "nginx"]
    address: str


@dataclass(frozen=True, slots=True)
class Gateway:
    """A ``tokengap admit`` that is asked for its own counts: its address, and the hop that it is."""

    url: str
    hop: str


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """What a GPU costs: ``per_hour`` in ``currency`` for one GPU, power included, None where no price is set.

    ``idle_power`` is the watts that a GPU draws for doing nothing; None takes the least that was seen of each.
    """

    per_hour: float | None = None
    currency: str = "USD"
    idle_power: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that turn a wait into a breach and silence into a fault. All in seconds.

    ``deadlines``: by class, the time within which a stream's first token must come. ``age_cut``: the queue age past
    which a new stream cannot be expected to make it; deadline minus age cut is the reserve. ``window``: one window of
    no progress (two make an engine stuck). ``prefill_budget``: how long an engine that shows nothing at all may be
    computing a prompt before silence counts.
    """

    deadlines: Mapping[str, float] = field(default_factory=lambda: {INTERACTIVE: 8.0})
    age_cut: float = 6.0
    window: float = 10.0
    prefill_budget: float = 120.0


@dataclass(frozen=True, slots=True)
class Topology:
    """Engines, hops (outermost first) and limits. ``interval`` is the beat in seconds. ``interfaces`` are those of
    proxies that may be asked, at most one a hop."""

    engines: tuple[Engine, ...] = ()
    hops: tuple[Hop, ...] = ()
    limits: Limits = field(default_factory=Limits)
    interval: float = 1.0
    price: GpuPrice = field(default_factory=GpuPrice)
    interfaces: tuple[ProxyInterface, ...] = ()
    gateway: Gateway | None = None

    @property
    def hop_names(self) -> tuple[str, ...]:
        """The hops' names, and last the one under which engines appear as a hop."""
        return (*(hop.name for hop in self.hops), ENGINE_HOP)

    @property
    def before_gateway(self) -> tuple[str, ...]:
        """The hops that a request passes before the gateway."""
        if self.gateway is None:
            return ()
        before: dict[str, None] = {}
        inside = {self.gateway.hop}
        for hop in reversed(self.hops):  # the innermost first
            if inside & set(hop.to):
                before[hop.name] = None
                inside.add(hop.name)
        return tuple(reversed(before))

    def listening_ports(self) -> frozenset[int]:
        """Ports whose accepted sockets are wanted: those of hops, and of engines (clients that come directly)."""
        hops = {endpoint.port for hop in self.hops for endpoint in hop.listen}
        return frozenset(hops | self.engine_ports())

    def target_ports(self) -> frozenset[int]:
        """Ports that hops connect *to*: those of engines, and of hops that are the next hop of another."""
        named = {name for hop in self.hops for name in hop.to}
        next_hops = {endpoint.port for hop in self.hops if hop.name in named for endpoint in hop.listen}
        return frozenset(next_hops | self.engine_ports())

    def engine_ports(self) -> frozenset[int]:
        """Ports at which engines serve their API."""
        return frozenset(endpoint.port for engine in self.engines for endpoint in engine.endpoints)
