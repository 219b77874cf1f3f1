"""``/api/now``: all that the live page and ``tokengap top`` show, of one beat, in one answer that stays small.

Streams are the ones that were asked for, the first of an order, and beside them how many there are in all. What is in
trouble is said here, in words, so that the page and the terminal say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokengap import __version__
from tokengap.gpu_readings import ABSENT
from tokengap.series.engines import public_url
from tokengap.topology import ENGINE_HOP, Limits, Topology
from tokengap.view import (
    CLIENTS,
    Accounting,
    BlindSpotView,
    Client,
    EngineState,
    EngineView,
    GpusView,
    Price,
    ProxyView,
    SourceView,
    StreamTable,
    View,
)
from tokengap.web.api import StreamRow, plain, stream_rows

#: The most streams in one answer: some 130 kB.
MOST: Final = 500

#: Engine states that somebody should look at, and the runbook for each.
BAD_STATES: Final[Mapping[EngineState, str]] = {
    "stuck": "TokengapEngineStuck",
    "dead": "TokengapEngineDead",
    "blind": "TokengapEngineBlind",
}

#: The client states of orphans.
ORPHANS: Final[tuple[Client, ...]] = ("vanished", "gone")

#: The share of the newest tokens that makes the hop which lost them one that leaks, although no socket shows it.
#: Clients who leave a proxy that passes it on cost a few tokens each; one that does not costs all of the rest.
LEAKING_SHARE: Final = 0.05

_CODES: Final = np.array([CLIENTS.index(client) for client in ORPHANS])


def _orphan(table: StreamTable) -> NDArray[np.bool_]:
    return np.isin(table["client"], _CODES)


#: Orders of streams by name, as keys of which the last counts most and the smallest value comes first.
_ORDERS: Final[Mapping[str, Callable[[StreamTable], Sequence[NDArray[Any]]]]] = {
    "cost": lambda t: (-t["age"], t["useful"] - t["tokens"], -t["orphaned"], ~_orphan(t)),
    "age": lambda t: (-t["age"],),
    "slack": lambda t: (-t["age"], np.nan_to_num(t["slack"], nan=np.inf)),
    "tokens": lambda t: (-t["age"], -t["tokens"]),
    "client": lambda t: (-t["age"], -t["client"]),
}
ORDERS: Final = tuple(_ORDERS)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which streams are wanted: those whose client is in one of the states, the first ``top`` by an order."""

    sort: str = "cost"
    clients: frozenset[Client] = frozenset(CLIENTS)
    top: int = 100


def wanted(sort: str | None, clients: Sequence[str], top: str | None) -> Wanted:
    """Read what a request says of it; what it does not say is by default. ValueError: what was expected."""
    default = Wanted()
    if sort is not None and sort not in ORDERS:
        raise ValueError(f"sort: expected one of {', '.join(ORDERS)}")
    if not set(clients) <= set(CLIENTS):
        raise ValueError(f"client: expected {', '.join(CLIENTS)}, as often as wanted")
    if top is not None and not (top.isascii() and top.isdigit() and int(top) <= MOST):
        raise ValueError(f"top: expected a number from 0 to {MOST}")
    return Wanted(
        default.sort if sort is None else sort,
        frozenset(cast(Sequence[Client], clients)) or default.clients,
        default.top if top is None else int(top),
    )


def choose(table: StreamTable, want: Wanted) -> tuple[StreamTable, int]:
    """Return the wanted streams in their order, and how many there are of them without ``top``."""
    if want.clients != frozenset(CLIENTS):
        table = table[np.isin(table["client"], [CLIENTS.index(client) for client in want.clients])]
    return table[np.lexsort(_ORDERS[want.sort](table))[: want.top]], len(table)


class Streams(msgspec.Struct, frozen=True):
    """Streams: all that are in flight by client state, how many ``matching`` ones there are, and the first of them."""

    clients: dict[Client, int]
    matching: int
    rows: list[StreamRow]


class HopNow(msgspec.Struct, frozen=True):
    """One hop: where it listens and what it forwards to, its streams by client state, ages of the oldest in seconds.

    ``leaking`` counts streams which it holds on to for nobody, ``orphaned`` the tokens that cost since the exporter
    started. ``leaks``: it does so now.
    """

    name: str
    listen: list[str]
    to: list[str]
    clients: dict[Client, int]
    oldest: float
    oldest_orphan: float
    leaking: int
    orphaned: float
    leaks: bool


class Trouble(msgspec.Struct, frozen=True):
    """Something that somebody should look at: what kind, where, a sentence that does not change while it lasts, and the
    name of the runbook that says what to do."""

    kind: Literal["engine", "leak", "deadline", "queue", "source"]
    where: str
    says: str
    runbook: str


SourceState: TypeAlias = Literal["up", "down", "absent"]


class SourceNow(msgspec.Struct, frozen=True):
    """One source. ``absent``: it is not there, and on this host nobody expects it."""

    source: str
    target: str
    state: SourceState
    seconds: float
    detail: str


class Now(msgspec.Struct, frozen=True):
    """All that is shown of one beat. Times are in seconds, ``wall`` in Unix time; None where something is not known.

    ``at`` is by a clock that does not jump, for rates. ``gpus`` is None where they are not asked for.
    """

    version: str
    at: float
    wall: float
    beats: int
    late_beats: int
    degraded_beats: int
    interval: float
    accounting: Accounting
    limits: Limits
    troubles: list[Trouble]
    engines: list[EngineView]
    hops: list[HopNow]
    streams: Streams
    proxies: list[ProxyView]
    blind_spots: list[BlindSpotView]
    sources: list[SourceNow]
    gpus: GpusView | None
    price: Price | None


def now(view: View, watched: Topology, lost: Mapping[str, float], want: Wanted, *, show_addresses: bool) -> Now:
    """Return what is to be shown of a view. ``lost``: by hop the share of the newest tokens that it lost."""
    table, matching = choose(view.streams, want)
    engines = [replace(engine, url=public_url(engine.url)) for engine in view.engines]
    hops = list(_hops(view, watched, lost))
    sources = [_source(source, view.gpus) for source in view.sources]
    return Now(
        version=__version__,
        at=view.at,
        wall=view.wall,
        beats=view.beats,
        late_beats=view.late_beats,
        degraded_beats=view.degraded_beats,
        interval=view.interval,
        accounting=view.accounting,
        limits=watched.limits,
        troubles=list(_troubles(engines, hops, sources, watched.limits)),
        engines=engines,
        hops=hops,
        streams=Streams(
            clients=_count(view.streams["client"]),
            matching=matching,
            rows=stream_rows(replace(view, streams=table), show_addresses=show_addresses),
        ),
        proxies=list(view.proxies),
        blind_spots=[spot for spot in view.blind_spots if spot.blind],
        sources=sources,
        gpus=view.gpus,
        price=view.price,
    )


def now_json(view: View, watched: Topology, lost: Mapping[str, float], want: Wanted, *, show_addresses: bool) -> bytes:
    """Return ``/api/now``."""
    return msgspec.json.encode(now(view, watched, lost, want, show_addresses=show_addresses), enc_hook=plain)


def _count(clients: NDArray[np.int8]) -> dict[Client, int]:
    return dict(zip(CLIENTS, np.bincount(clients, minlength=len(CLIENTS)).tolist(), strict=True))


def _hops(view: View, watched: Topology, lost: Mapping[str, float]) -> Iterator[HopNow]:
    configured = {hop.name: hop for hop in watched.hops}
    for number, name in enumerate(view.hop_names):
        groups = [group for group in view.groups if group.hop == name]
        hop = configured.get(name)
        leaking = int(np.count_nonzero(view.streams["leaks_at"] == number))
        yield HopNow(
            name=name,
            listen=[str(endpoint) for endpoint in hop.listen] if hop is not None else [],
            to=list(hop.to) if hop is not None else [],
            clients={client: sum(group.count for group in groups if group.client == client) for client in CLIENTS},
            oldest=max((group.age_max for group in groups), default=0.0),
            oldest_orphan=max((group.age_max for group in groups if group.client in ORPHANS), default=0.0),
            leaking=leaking,
            orphaned=sum(engine.tokens.orphaned.get(name, 0.0) for engine in view.engines),
            leaks=leaking > 0 or lost.get(name, 0.0) >= LEAKING_SHARE,
        )


def _source(source: SourceView, gpus: GpusView | None) -> SourceNow:
    state: SourceState = "up" if source.up else "down"
    if source.source == "gpu" and gpus is not None and gpus.reason in ABSENT:
        state = "absent"
    return SourceNow(source.source, source.target, state, source.seconds, source.detail)


def _troubles(
    engines: Sequence[EngineView], hops: Sequence[HopNow], sources: Sequence[SourceNow], limits: Limits
) -> Iterator[Trouble]:
    """Yield what somebody should look at, the worst first."""
    for engine in engines:
        if engine.state in BAD_STATES:
            yield Trouble("engine", engine.name, f"{engine.name} is {engine.state}.", BAD_STATES[engine.state])
    for hop in hops:
        if hop.leaks:
            says = f"{hop.name} leaks: it goes on for clients who have left."
            runbook = "TokengapEngineIgnoresCancel" if hop.name == ENGINE_HOP else "TokengapProxyIgnoresCancel"
            yield Trouble("leak", hop.name, says, runbook)
    for engine in engines:
        for klass in sorted(klass for klass, slack in engine.slack.items() if slack < 0):
            says = f"{engine.name} has missed a deadline: somebody still waits for a first token ({klass})."
            yield Trouble("deadline", engine.name, says, "TokengapQueueWillMissDeadline")
        if engine.queue_age is not None and engine.queue_age > limits.age_cut:
            says = f"The queue of {engine.name} is older than {limits.age_cut:g} s: who joins it will be late."
            yield Trouble("queue", engine.name, says, "TokengapQueueWillMissDeadline")
    for source in sources:
        if source.state == "down":
            name = f"{source.source} {source.target}".strip()
            says = f"The source {name} does not answer: {source.detail or 'no reason given'}."
            yield Trouble("source", name, says, "TokengapSourceFailing")
