"""``/api/now``: all that the live page and ``tokengap top`` show, of one beat, in one answer that stays small.

Of streams, engines, troubles and sources the first of an order are in it, and beside them how many there are in all.
What is in trouble is said here, in words, so that the page and the terminal say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
import numpy as np
from multidict import MultiMapping
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
from tokengap.web.history import Rates, Trend

#: The most streams in one answer: some 150 kB.
MOST: Final = 500

#: The most of what else there may be hundreds of: another 200 kB, where every engine is in trouble.
MOST_ENGINES: Final = 50
MOST_TROUBLES: Final = 50
MOST_SOURCES: Final = 100
MOST_TARGETS: Final = 50

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
    """Which streams are wanted: those whose client is in one of the states, ``top`` of an order behind ``offset``."""

    sort: str = "cost"
    clients: frozenset[Client] = frozenset(CLIENTS)
    top: int = 100
    offset: int = 0


def wanted(query: MultiMapping[str]) -> Wanted:
    """Read what a request for ``/api/now`` says; what it does not say is by default. ValueError: what was expected."""
    return _wanted(query, _number(query, "top", Wanted().top, MOST), 0)


def wanted_page(query: MultiMapping[str]) -> Wanted:
    """Read what a request for ``/api/streams`` says, as :func:`wanted`."""
    return _wanted(query, *paged(query, MOST))


def paged(query: MultiMapping[str], most: int) -> tuple[int, int]:
    """Return the ``limit``, at most and by default ``most``, and the ``offset`` of a list. ValueError as above."""
    return _number(query, "limit", most, most), _number(query, "offset", 0, 10**9)


def _number(query: MultiMapping[str], name: str, default: int, most: int) -> int:
    """Return a number of a request. ValueError as above."""
    text = query.get(name, f"{default}")
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= most):
        raise ValueError(f"{name}: expected a number from 0 to {most}")
    return int(text)


def _wanted(query: MultiMapping[str], top: int, offset: int) -> Wanted:
    sort, clients = query.get("sort", Wanted().sort), query.getall("client", [])
    if sort not in ORDERS:
        raise ValueError(f"sort: expected one of {', '.join(ORDERS)}")
    if not set(clients) <= set(CLIENTS):
        raise ValueError(f"client: expected {', '.join(CLIENTS)}, as often as wanted")
    return Wanted(sort, frozenset(cast(Sequence[Client], clients)) or Wanted().clients, top, offset)


def matching(table: StreamTable, want: Wanted) -> StreamTable:
    """Return the streams with a client in one of the wanted states."""
    if want.clients == frozenset(CLIENTS):
        return table
    return table[np.isin(table["client"], [CLIENTS.index(client) for client in want.clients])]


def choose(table: StreamTable, want: Wanted) -> tuple[StreamTable, int]:
    """Return the wanted streams in their order, and how many there are of them in all."""
    table = matching(table, want)
    return table[np.lexsort(_ORDERS[want.sort](table))[want.offset : want.offset + want.top]], len(table)


class Streams(msgspec.Struct, frozen=True):
    """Streams: all that are in flight by client state, how many ``matching`` ones there are, and the first of them."""

    clients: dict[Client, int]
    matching: int
    rows: list[StreamRow]


class HopNow(msgspec.Struct, frozen=True):
    """One hop: where it listens and what it forwards to (hops, then the first engines), its streams by client state,
    ages of the oldest in seconds.

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

    ``at`` is by a clock that does not jump. ``engines`` are those that most need a look, ``troubles`` the worst and
    ``sources`` first those that are down; how many there are in all is beside each. ``rates`` are those of all engines.
    ``gpus`` is None where they are not asked for.
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
    rates: Rates | None
    troubles: list[Trouble]
    troubles_in_all: int
    engines: list[EngineView]
    engine_states: dict[EngineState, int]
    hops: list[HopNow]
    streams: Streams
    proxies: list[ProxyView]
    blind_spots: list[BlindSpotView]
    sources: list[SourceNow]
    source_states: dict[SourceState, int]
    gpus: GpusView | None
    price: Price | None


def now(view: View, watched: Topology, trend: Trend, want: Wanted, *, show_addresses: bool) -> Now:
    """Return what is to be shown of a view."""
    table, in_all = choose(view.streams, want)
    engines = [replace(engine, url=public_url(engine.url)) for engine in view.engines]
    engines.sort(key=partial(_calm, limits=watched.limits))
    hops = list(_hops(view, watched, trend.lost))
    sources = sorted((_source(source, view.gpus) for source in view.sources), key=lambda source: source.state != "down")
    troubles = list(_troubles(engines, hops, sources, watched.limits))
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
        rates=trend.rates,
        troubles=troubles[:MOST_TROUBLES],
        troubles_in_all=len(troubles),
        engines=engines[:MOST_ENGINES],
        engine_states=Counter(engine.state for engine in engines),
        hops=hops,
        streams=Streams(
            clients=_count(view.streams["client"]),
            matching=in_all,
            rows=stream_rows(replace(view, streams=table), show_addresses=show_addresses),
        ),
        proxies=list(view.proxies),
        blind_spots=[spot for spot in view.blind_spots if spot.blind],
        sources=sources[:MOST_SOURCES],
        source_states=Counter(source.state for source in sources),
        gpus=view.gpus,
        price=view.price,
    )


def now_json(view: View, watched: Topology, trend: Trend, want: Wanted, *, show_addresses: bool) -> bytes:
    """Return ``/api/now``."""
    return msgspec.json.encode(now(view, watched, trend, want, show_addresses=show_addresses), enc_hook=plain)


def streams_json(view: View, want: Wanted, *, show_addresses: bool) -> bytes:
    """Return ``/api/streams``: a list with a row for each stream that is wanted."""
    table, _ = choose(view.streams, want)
    return msgspec.json.encode(stream_rows(replace(view, streams=table), show_addresses=show_addresses))


def _calm(engine: EngineView, limits: Limits) -> tuple[bool, bool, float]:
    """Return what is the greater, the less somebody has to look at an engine: its state, who is late, what it lost."""
    late = _late(engine, limits) or any(slack < 0 for slack in engine.slack.values())
    return engine.state not in BAD_STATES, not late, -sum(engine.tokens.orphaned.values())


def _late(engine: EngineView, limits: Limits) -> bool:
    return engine.queue_age is not None and engine.queue_age > limits.age_cut


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
            to=sorted(hop.to, key=lambda to: to not in configured)[:MOST_TARGETS] if hop is not None else [],
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
        if _late(engine, limits):
            says = f"The queue of {engine.name} is older than {limits.age_cut:g} s: who joins it will be late."
            yield Trouble("queue", engine.name, says, "TokengapQueueWillMissDeadline")
    for source in sources:
        if source.state == "down":
            name = f"{source.source} {source.target}".strip()
            says = f"The source {name} does not answer: {source.detail or 'no reason given'}."
            yield Trouble("source", name, says, "TokengapSourceFailing")
