"""One beat: take the readings in, update what is remembered, say what is known now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tokengap.join import (
    admitted,
    blind,
    capacity,
    cost,
    endings,
    gpus,
    ledger,
    proxies,
    queue,
    rest,
    silent,
    streams,
    verdict,
)
from tokengap.join.client import CONNECTED, VANISHED
from tokengap.join.segments import Owned, Segments, in_flight, seems_over, stays
from tokengap.readings import EnginePage, GatewayPage, ProcessTable, Reading, Readings, SocketSnapshot, as_ipv6
from tokengap.topology import Engine, Topology
from tokengap.view import (
    AGE_BOUNDS,
    CLIENTS,
    STREAM,
    Accounting,
    Condition,
    Ending,
    EngineView,
    NetnsState,
    Price,
    SlotsFrom,
    SourceView,
    StreamGroup,
    StreamTable,
    View,
)

#: Streams that ended while their engine's page could not be read and are still owed tokens, at most.
MOST_OWED = 20_000


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What is remembered of one engine between beats."""

    ledger: ledger.Ledger = field(default_factory=ledger.Ledger)
    fates: endings.Fates = field(default_factory=endings.Fates)
    curve: queue.Curve = field(default_factory=queue.Curve)
    verdict: verdict.VerdictState = field(default_factory=verdict.VerdictState)
    breach: float = 0.0
    most_running: float | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    restarts: int = 0
    covered: bool = False  # when last it had requests, we saw a socket of each
    counted: admitted.Counted | None = None  # where a gateway counts
    lately: capacity.Lately = field(default_factory=capacity.Lately)


@dataclass(frozen=True, slots=True)
class State:
    """Everything the join remembers. A value: :func:`step` returns a new one and never changes an old one."""

    streams: streams.StreamState
    engines: Mapping[str, EngineMemory]
    gpus: gpus.GpuState = field(default_factory=gpus.GpuState)
    cost: cost.CostState = field(default_factory=cost.CostState)
    proxies: Mapping[str, proxies.ProxyMemory] = field(default_factory=dict)
    blind: Mapping[tuple[str, str], blind.Sign] = field(default_factory=dict)
    at: float | None = None
    beats: int = 0
    late_beats: int = 0
    degraded_beats: int = 0
    events_lost: int = 0


def start(topology: Topology) -> State:
    """Return the state before the first beat."""
    return State(streams.start(topology), {engine.name: EngineMemory() for engine in topology.engines})


def questions(state: State) -> frozenset[int]:
    """Return the socket inodes whose owner would settle something; :class:`ProcessTable.owners` answers."""
    return state.streams.questions


def step(state: State, readings: Readings) -> tuple[State, View]:
    """Take one beat's readings in. Returns the new state and what is known after the beat."""
    topology = readings.topology
    pages = {name: reading.value for name, reading in readings.engines.items()}
    snapshot = readings.sockets.value
    processes = readings.processes.value or ProcessTable()
    dt = 0.0 if state.at is None else max(readings.at - state.at, 0.0)

    if snapshot is not None:
        in_engine = {
            i: _in_engine(page, state.engines[engine.name])
            for i, engine in enumerate(topology.engines)
            if (page := pages.get(engine.name)) is not None and page.running is not None
        }
        sockets = readings.sockets
        stream_state, seen = streams.advance(
            state.streams,
            snapshot,
            sockets.at,
            in_engine,
            processes.owners,
            own=processes.own,
            blur=sockets.took,
            blind=blind.blinded(readings),
        )
    else:
        stream_state, seen = state.streams, None

    hop_names = topology.hop_names
    memories: dict[str, EngineMemory] = {}
    views: list[EngineView] = []
    credited: dict[int, Owned] = {}
    loads: dict[str, cost.Load | None] = {}
    for index, engine in enumerate(topology.engines):
        memory = state.engines.get(engine.name, EngineMemory())
        reading = readings.engines.get(engine.name) or Reading(readings.at, error="not read in this beat")
        memory, view, own, loads[engine.name] = _engine(memory, index, engine, reading, readings, seen, hop_names, dt)
        memories[engine.name] = memory
        views.append(view)
        if own is not None:
            credited[index] = own

    table: StreamTable = np.zeros(0, dtype=STREAM)
    groups: tuple[StreamGroup, ...] = ()
    if seen is not None:
        segments = _put_back(seen.segments, credited)
        stream_state = replace(stream_state, segments=segments[stays(segments)])
        seen = replace(seen, segments=segments)
        table, groups = _streams_now(seen, topology, readings)
    told = readings.gateway.value if readings.gateway is not None else None
    if told is not None and topology.gateway is not None:  # of its own hop it knows each stream itself
        hop = topology.gateway.hop
        elsewhere = (group for group in groups if group.hop != hop)
        groups = (*elsewhere, *admitted.groups(told, hop))
    for index, engine in enumerate(topology.engines):
        memory = memories[engine.name]
        lately, unsafe = _capacity(memory, views[index], engine, groups, topology, readings.at)
        memories[engine.name], views[index] = replace(memory, lately=lately), replace(views[index], unsafe=unsafe)

    memories_of_proxies = proxies.observe(state.proxies, readings)
    signs = seen.signs if seen is not None else None
    without_sockets = frozenset(hop_names[hop] for hop in signs.without_sockets) if signs is not None else frozenset()
    blind_state, blind_spots = blind.observe(state.blind, readings, signs)
    gpu_state, gpus_view, used = gpus.observe(state.gpus, readings)
    costs = cost.account(state.cost, gpus_view, used, loads, dt=dt, interval=topology.interval)
    price = topology.price

    lost = snapshot.lost if snapshot is not None else state.events_lost
    degraded = snapshot is None or lost > state.events_lost or readings.late or None in pages.values()
    degraded |= snapshot is not None and any(one.stale for one in snapshot.namespaces)
    state = State(
        streams=stream_state,
        engines=memories,
        gpus=gpu_state,
        cost=costs,
        proxies=memories_of_proxies,
        blind=blind_state,
        at=readings.at,
        beats=state.beats + 1,
        late_beats=state.late_beats + readings.late,
        degraded_beats=state.degraded_beats + degraded,
        events_lost=lost,
    )
    view_ = View(
        at=readings.at,
        wall=readings.wall,
        beats=state.beats,
        late_beats=state.late_beats,
        degraded_beats=state.degraded_beats,
        interval=topology.interval,
        accounting=_accounting(snapshot),
        namespaces=_namespaces(snapshot),
        events_lost=lost,
        sources=tuple(_sources(readings)),
        engines=tuple(replace(view, cost=costs.accounts.get(view.name)) for view in views),
        hop_names=hop_names,
        groups=groups,
        endings={
            (engine.name, hop, how): n
            for engine in topology.engines
            for (hop, how), n in _endings(memories[engine.name], topology).items()
        },
        streams=table,
        gpus=gpus_view,
        price=None if price.per_hour is None else Price(price.per_hour, price.currency),
        proxies=proxies.views(memories_of_proxies, readings, without_sockets),
        blind_spots=blind_spots,
        admission=None if told is None else admitted.admission(told),
    )
    return state, view_


def _capacity(
    memory: EngineMemory,
    view: EngineView,
    engine: Engine,
    groups: Sequence[StreamGroup],
    topology: Topology,
    at: float,
) -> tuple[capacity.Lately, Mapping[Condition, bool]]:
    """Say whether a free slot of an engine may be given away."""
    ended: Counter[Ending] = Counter()
    for (_, how), count in _endings(memory, topology).items():
        ended[how] += count
    mine = [group for group in groups if group.engine == engine.name]
    streams = sum(group.count for group in mine)
    return capacity.observe(
        memory.lately,
        capacity.Counts(
            at,
            left=ended["cancelled"] + ended["orphaned"],
            ran_on=ended["orphaned"],
            out=view.tokens.out,
            orphaned=sum(view.tokens.orphaned.values()),
        ),
        held=any(group.client in ("vanished", "gone") for group in mine),
        slack=view.slack.get(engine.klass),
        mean_age=sum(group.age_sum for group in mine) / streams if streams else None,
    )


def _endings(memory: EngineMemory, topology: Topology) -> Mapping[tuple[str, Ending], int]:
    """Return how an engine's streams ended, by hop. Where nothing stands before the gateway, its own count is exact."""
    seen = {(topology.hop_names[hop], how): n for (hop, how), n in memory.fates.count.items()}
    if memory.counted is None or topology.gateway is None or topology.before_gateway:
        return seen
    return seen | memory.counted.endings(topology.gateway.hop)


def _counted(
    memory: EngineMemory, book: ledger.Ledger, engine: Engine, page: EnginePage | None, readings: Readings
) -> admitted.Counted | None:
    """Bring the gateway's count of one engine up to date, where there is one."""
    counted, topology = memory.counted, readings.topology
    if counted is not None:
        counted = admitted.owe(counted, book.tokens.out)
    told = readings.gateway.value if readings.gateway is not None else None
    if topology.gateway is None or told is None or engine.name not in told.engines:
        return counted
    outer = {hop: book.tokens.orphaned.get(hop, 0.0) for hop in topology.before_gateway}
    hop = topology.gateway.hop
    if counted is None:
        before = _before_gateway(memory, topology, hop)
        return admitted.begin(book.tokens, outer, before, told, told.engines[engine.name], readings.at)
    return admitted.count(counted, told, engine.name, page, outer, hop, readings.at)


def _before_gateway(memory: EngineMemory, topology: Topology, hop: str) -> Mapping[Ending, int]:
    """Return what was counted of the gateway's hop by its sockets, before it was first read."""
    return {how: n for (index, how), n in memory.fates.count.items() if topology.hop_names[index] == hop}


def _engine(
    memory: EngineMemory,
    index: int,
    engine: Engine,
    reading: Reading[EnginePage],
    readings: Readings,
    seen: streams.Streams | None,
    hop_names: tuple[str, ...],
    dt: float,
) -> tuple[EngineMemory, EngineView, Owned | None, cost.Load | None]:
    """Bring one engine up to date: its streams' tokens and endings, its queue, its verdict, what it ran."""
    page, limits, at = reading.value, readings.topology.limits, readings.at
    own = _own(seen, index)
    flying = own is not None and in_flight(own.segments)
    open_streams = int(np.sum(flying))
    flowing = bool(np.any(flying & (own.segments["fresh"] > 0))) if own is not None else False

    judge, judgement = verdict.judge(
        memory.verdict,
        at=at,
        reading=reading,
        open_streams=open_streams if own is not None and (memory.covered or _is_local(engine, readings)) else None,
        open_flowing=flowing,
        limits=limits,
    )
    says, stale = page, page is not None and page.requests > 0 and judgement.state == "idle"
    if page is not None and stale:  # gauges that a mass abort froze: nobody waits, nothing runs
        page = replace(page, running=0.0, waiting=0.0)
    fates, book = memory.fates, memory.ledger
    if seen is not None:
        book = ledger.take_back(book, seen.returned[seen.returned["engine"] == index])
    gap = endings.Excess()
    if page is not None:
        book = ledger.cross_check(ledger.count(book, page), page)
        if own is not None:
            fates, gap = endings.excess(fates, page, own, readings.sockets.at)
    if own is not None:
        died = reading.refused or judgement.restarts > memory.restarts
        events = readings.sockets.value is None or readings.sockets.value.events
        fates, whole, ran_out = endings.end(
            fates,
            own,
            page,
            gap.leaked,
            died=died,
            at=readings.sockets.at,
            beat=readings.topology.interval,
            last=len(hop_names) - 1,
            at_once=memory.ledger.unstreamed >= silent.FEW_UNSTREAMED,
            events=events,
        )
        own = replace(own, client=np.where(whole, np.int8(CONNECTED), own.client))
        book = ledger.learn_answers(book, own, page, readings.sockets.at, readings.topology.interval)
        limbo = _Limbo(memory.fates.limbo, fates.limbo, ran_out)
        lag = reading.at - readings.sockets.at
        seg = own.segments
        cut = (seg["ended"] == readings.sockets.at) & ~seg["trial"] & (whole | ~np.isnan(seg["answered"]))
        cut &= (seg["arrived"] == 0) & np.array(not events)
        book, own = _account(book, own, page, gap, hop_names, limbo, lag, readings.topology.interval, cut)
        fates = endings.settled(fates, own, readings.sockets.at)

    waits = _waits(own, seen, index, readings, book.unstreamed)
    curve = memory.curve
    if page is not None and page.running is not None and page.waiting is not None:
        curve = queue.observe(curve, reading.at, page.finished, page.running, page.waiting)
    waiting = page.waiting if page is not None else None
    age, age_from = queue.queue_age(curve, at, waiting, waits.in_engine if own is not None else None)
    slack = {klass: queue.slack(deadline, waits.worst.get(klass)) for klass, deadline in limits.deadlines.items()}
    deadline = limits.deadlines.get(engine.klass)
    breach = memory.breach
    if deadline is not None:
        reserve = deadline - limits.age_cut
        breach = queue.breach(breach, dt, age, slack.get(engine.klass), limits.age_cut, reserve)

    most = memory.most_running
    if page is not None and page.running is not None:
        most = max(most or 0.0, page.running)
    slots, slots_from = _slots(engine, readings, most)
    skipped = dict(memory.skipped)
    for reason, n in (page.skipped if page is not None else {}).items():
        skipped[reason] = skipped.get(reason, 0) + n
    models = page.models if page is not None and page.models else memory.models
    covered = memory.covered
    if own is not None and page is not None and (page.running or page.waiting):
        covered = gap.now == 0
    load = None
    if own is not None and page is not None and page.running is not None:
        running, orphans = _running(own, page, fates.limbo[-round(gap.leaked) :] if gap.leaked >= 0.5 else ())
        running = max(page.running, running)
        tokens = book.tokens.out - memory.ledger.tokens.out
        load = cost.Load(running, min(orphans, running), tokens, judgement.state)
    counted = _counted(memory, book, engine, page, readings)
    if load is not None and counted is not None and not readings.topology.before_gateway:
        load = replace(load, orphans=min(counted.last.zombies, load.running))
    memory = EngineMemory(
        *(book, fates, curve, judge, breach, most, skipped, models, judgement.restarts, covered, counted),
        lately=memory.lately,
    )
    view = EngineView(
        name=engine.name,
        url=engine.url,
        models=models,
        family=judge.page.family if judge.page is not None else "",
        state=judgement.state,
        evidence=judgement.evidence,
        tokens=book.tokens if counted is None else counted.shown,
        running=says.running if says is not None else None,
        waiting=says.waiting if says is not None else None,
        stale=stale,
        unfinished_tokens=book.unfinished,
        slots=slots,
        slots_from=slots_from,
        queue_age=age,
        queue_age_from=age_from,
        slack=slack if own is not None or page is not None else {},
        coverage=_coverage(page, open_streams, gap) if own is not None else None,
        open_streams=open_streams,
        progress_age=judgement.progress_age,
        restarts=judgement.restarts,
        ghost_steps=judgement.ghost_steps,
        breach_seconds=breach,
        skipped=skipped,
        restarts_last_hour=judgement.restarts_last_hour,
    )
    return memory, view, own, load


def _running(own: Owned, page: EnginePage, limbo: Sequence[silent.Left]) -> tuple[float, float]:
    """Count the requests that hold a slot of the engine, and those of them that run for nobody.

    Of all that are known, with a socket or in limbo, the queued ones do not: the youngest of those without an answer.
    """
    runs = in_flight(own.segments)
    asked = np.concatenate([own.segments["asked"][runs], [left.asked for left in limbo]])
    answered = np.concatenate([~np.isnan(own.segments["answered"][runs]), [left.answered for left in limbo]])
    orphan = np.concatenate([own.client[runs] >= VANISHED, np.ones(len(limbo), dtype=bool)])
    mute = np.flatnonzero(~answered.astype(bool))
    queued = mute[np.argsort(-asked[mute], kind="stable")][: int(page.waiting or 0)]
    holds = np.ones(len(asked), dtype=bool)
    holds[queued] = False
    return float(holds.sum()), float((holds & orphan).sum())


def _in_engine(page: EnginePage, memory: EngineMemory) -> rest.InEngine:
    # Where most answers come at once, one that came and went may well be what the engine finished.
    lost = 0 if memory.ledger.mostly_at_once else len(memory.fates.limbo)
    return rest.InEngine(page.requests, endings.finished(memory.fates, page), lost)


def _own(seen: streams.Streams | None, index: int) -> Owned | None:
    """Return the streams that go to this engine."""
    if seen is None:
        return None
    mine = seen.segments["engine"] == index
    entered = seen.segments["hop"][seen.path.first[mine]]
    return Owned(seen.segments[mine], seen.path.client[mine], entered, seen.path.leaks_at[mine])


@dataclass(frozen=True, slots=True)
class _Limbo:
    """Requests that lost their socket before their end: a beat ago, still, and those that the engine finished."""

    before: tuple[silent.Left, ...]
    now: tuple[silent.Left, ...]
    ran_out: tuple[silent.Left, ...]


def _account(
    book: ledger.Ledger,
    own: Owned,
    page: EnginePage | None,
    gap: endings.Excess,
    hop_names: tuple[str, ...],
    limbo: _Limbo,
    lag: float,
    beat: float,
    cut: NDArray[np.bool_],
) -> tuple[ledger.Ledger, Owned]:
    """Credit, correct and settle. Without a page nothing is credited: what is in flight keeps its bytes, and what ended
    is owed its tokens until there is a page again. ``cut``: as of :func:`~tokengap.join.silent.sequences`."""
    here = len(own.segments)
    everyone = own if book.owed is None else own.plus(book.owed)
    if page is not None:
        unseen = max(gap.unseen, book.unseen)  # what was there in the beat before has run for a part of this one
        quiet = silent.sequences(
            own,
            page,
            limbo.before,
            limbo.now,
            share=book.unstreamed,
            mostly_at_once=book.mostly_at_once,
            unseen=unseen,
            beat=beat,
            cut=cut,
        )
        book = replace(book, owed=None, unseen=gap.unseen)
        book, everyone = ledger.credit(book, everyone, quiet, hop_names, alone=gap.now == 0, lag=lag, beat=beat)
        book, everyone = ledger.correct(book, everyone, page, limbo.ran_out, beat)
    book, everyone = ledger.settle(book, everyone, hop_names)
    if page is None:
        seg = everyone.segments
        unpaid = everyone.only(~np.isnan(seg["ended"]) & ~seg["draining"] & (seg["fresh"] > 0) & ~seg["trial"])
        book = replace(book, owed=unpaid.only(np.arange(len(unpaid.segments)) < MOST_OWED))
    return book, everyone.only(np.arange(len(everyone.segments)) < here)


@dataclass(frozen=True, slots=True)
class _Waits:
    """Seconds waited by streams without a first byte: towards the engine, and the worst per class that still counts."""

    in_engine: NDArray[np.float64]
    worst: Mapping[str, float]


def _waits(
    own: Owned | None, seen: streams.Streams | None, index: int, readings: Readings, unstreamed: float
) -> _Waits:
    if own is None or seen is None:
        return _Waits(np.zeros(0), {})
    topology, at = readings.topology, readings.at
    seg = own.segments
    mute = in_flight(seg) & np.isnan(seg["answered"])
    first = seen.segments[seen.path.first[seen.segments["engine"] == index]]
    worst: dict[str, float] = {}

    def waits(klass: str, seconds: float) -> None:
        worst[klass] = max(worst.get(klass, 0.0), seconds)

    # A client that left has no deadline any more. Where answers come that are not streamed, one that runs may be such
    # an answer, and who waits for it does not wait for a first token: then only the queued ones are known to wait.
    unanswered_stream = mute & (own.client < VANISHED) & (seg["tokens"] < 2)
    page = readings.engines[topology.engines[index].name].value
    if unstreamed > silent.FEW_UNSTREAMED and page is not None:
        oldest_first = np.flatnonzero(mute)[np.argsort(seg["asked"][mute], kind="stable")]
        runs = max(len(oldest_first) - int(page.waiting or 0), 0)
        unanswered_stream[oldest_first[:runs]] = False
    classes = [hop.klass or topology.engines[index].klass for hop in topology.hops] + [topology.engines[index].klass]
    for hop in np.unique(first["hop"][unanswered_stream]):
        of_hop = unanswered_stream & (first["hop"] == hop)
        waits(classes[hop], float(at - first["asked"][of_hop].min()))
    # What waits inside a proxy may still come here.
    for hop, asked, client in zip(seen.held.hop, seen.held.asked, seen.held.client, strict=True):
        if client < VANISHED and _reaches(topology, int(hop), index):
            waits(classes[hop], float(at - asked))
    # And what the proxy tells, where sockets do not: streams of HTTP/2 in its queue.
    for index_of_hop, hop_ in enumerate(topology.hops):
        reading = readings.proxies.get(hop_.name)
        oldest = reading.value.oldest_queued if reading is not None and reading.value is not None else None
        if oldest and _reaches(topology, index_of_hop, index):
            waits(classes[index_of_hop], oldest)
    return _Waits(at - seg["asked"][mute], worst)


def _reaches(topology: Topology, hop: int, engine: int) -> bool:
    """Tell whether requests of the hop can end at the engine."""
    index = {h.name: i for i, h in enumerate(topology.hops)}
    to_visit, visited = [hop], set()
    while to_visit:
        here = to_visit.pop()
        visited.add(here)
        for name in topology.hops[here].to:
            if name == topology.engines[engine].name:
                return True
            if name in index and index[name] not in visited:
                to_visit.append(index[name])
    return False


def _slots(engine: Engine, readings: Readings, most: float | None) -> tuple[float | None, SlotsFrom | None]:
    """Find ``max_num_seqs``, which is on no vLLM page: settings, the command line, else the most ever seen running."""
    if engine.slots:
        return float(engine.slots), "settings"
    table = readings.processes.value
    if table is not None and table.slots.get(engine.name):
        return float(table.slots[engine.name]), "commandline"
    return (most, "observed") if most else (None, None)


def _is_local(engine: Engine, readings: Readings) -> bool:
    """Tell whether the engine's own sockets are among those we read, so that "no socket" means "no client"."""
    snapshot = readings.sockets.value
    here = [one.addresses for one in snapshot.namespaces] if snapshot is not None else []
    return any(
        endpoint.address is None or any(as_ipv6(endpoint.address) in addresses for addresses in here)
        for endpoint in engine.endpoints
    )


def _coverage(page: EnginePage | None, open_streams: int, gap: endings.Excess) -> float | None:
    """Return the share of the engine's requests that we saw a socket of; 1 at rest: nothing is uncovered."""
    if page is None or page.running is None:
        return None
    return 1.0 if page.requests <= 0 else min((open_streams + gap.leaked) / page.requests, 1.0)


def _put_back(segments: Segments, credited: Mapping[int, Owned]) -> Segments:
    segments = segments.copy()
    for index, own in credited.items():
        segments[segments["engine"] == index] = own.segments
    return segments


def _streams_now(
    seen: streams.Streams, topology: Topology, readings: Readings
) -> tuple[StreamTable, tuple[StreamGroup, ...]]:
    """Make the table of streams (one row a request) and the groups (one row a request at each hop it passes)."""
    seg, path, held, at = seen.segments, seen.path, seen.held, readings.at
    # What has lost its carrier is as good as over; how it ended is decided in the next beat.
    flying = in_flight(seg) & np.isnan(seg["missed"]) & (seg["client"] >= 0) & ~seems_over(seg)
    # A request that passes several hops has a segment at each; the innermost one stands for it.
    inner = path.inner
    innermost = flying & ~((inner >= 0) & flying[inner])
    # A segment at an outer hop goes to the engine that the segment further in goes to.
    engine = seg["engine"].copy()
    for _ in topology.hops:
        engine = np.where((engine < 0) & (inner >= 0), engine[inner], engine)

    rows = np.flatnonzero(innermost)
    top = seg[path.first[rows]]
    table = np.zeros(len(rows) + len(held.hop), dtype=STREAM)
    mine, waiting = table[: len(rows)], table[len(rows) :]
    mine["id"], mine["engine"], mine["hop"] = seg["id"][rows], engine[rows], top["hop"]
    mine["client"], mine["leaks_at"] = path.client[rows], path.leaks_at[rows]
    mine["age"] = at - top["asked"]
    mine["first_byte"] = ~np.isnan(seg["answered"][rows])
    for column in ("tokens", "useful", "orphaned"):
        mine[column] = seg[column][rows]
    for column, source in (("src_hi", "dst_hi"), ("src_lo", "dst_lo"), ("port", "dport")):
        mine[column] = seen.clients[source][rows]
        waiting[column] = held.rows[source]
    waiting["id"], waiting["engine"], waiting["hop"] = -1 - np.arange(len(waiting)), -1, held.hop
    waiting["client"], waiting["leaks_at"], waiting["age"] = held.client, -1, at - held.asked
    _give_slack(table, topology)

    groups: list[StreamGroup] = []
    shown = np.flatnonzero(flying)
    everywhere = np.concatenate([engine[shown], np.full(len(held.hop), -1, dtype=engine.dtype)])
    if len(topology.engines) == 1:
        everywhere[everywhere < 0] = 0
    hops = np.concatenate([seg["hop"][shown], held.hop])
    clients = np.concatenate([seg["client"][shown], held.client])
    ages = at - np.concatenate([seg["asked"][shown], held.asked])
    names = (*(e.name for e in topology.engines), "")
    keys = (everywhere.astype(np.int64) * (len(topology.hops) + 1) + hops) * len(CLIENTS) + clients
    bounds = np.array(AGE_BOUNDS)
    for key in np.unique(keys):
        here = keys == key
        e, h, c = int(everywhere[here][0]), int(hops[here][0]), int(clients[here][0])
        slots = np.bincount(np.searchsorted(bounds, ages[here]), minlength=len(bounds) + 1)
        groups.append(
            StreamGroup(
                engine=names[e],
                hop=topology.hop_names[h],
                client=CLIENTS[c],
                count=int(here.sum()),
                ages=tuple(int(n) for n in slots),
                age_sum=float(ages[here].sum()),
                age_max=float(ages[here].max()),
            )
        )
    return table, tuple(groups)


def _give_slack(table: StreamTable, topology: Topology) -> None:
    """Write each waiting stream's deadline slack: of its hop's class, else its engine's."""
    default = topology.engines[0].klass if topology.engines else ""
    engine_class = np.array([engine.klass for engine in topology.engines] + [default])[table["engine"]]
    hop_class = np.array([hop.klass or "" for hop in topology.hops] + [""])[table["hop"]]
    klass = np.where(hop_class == "", engine_class, hop_class)
    deadline = np.full(len(table), np.nan)
    for name, seconds in topology.limits.deadlines.items():
        deadline[klass == name] = seconds
    table["slack"] = np.where(table["first_byte"], np.nan, deadline - table["age"])


def _accounting(snapshot: SocketSnapshot | None) -> Accounting:
    if snapshot is None:
        return "none"
    if snapshot.way != "sock_diag":
        return "state"
    return "exact" if snapshot.events else "beat"


def _namespaces(snapshot: SocketSnapshot | None) -> Mapping[NetnsState, int]:
    if snapshot is None:
        return {}
    watched = sum(not one.stale for one in snapshot.namespaces) if snapshot.namespaces else 1  # our own
    return {"watched": watched, "failed": len(snapshot.unread)}


def _sources(readings: Readings) -> Iterator[SourceView]:
    sockets = readings.sockets
    way = ""
    if sockets.value is not None:
        way = f"{sockets.value.way}, destroy events {'on' if sockets.value.events else 'off'}"
        if sockets.value.namespaces:
            way += f"; {len(sockets.value.namespaces)} network namespaces"
        way = "; ".join((way, *(f"not read: {why}" for why in sockets.value.unread)))
    yield SourceView("sockets", "", sockets.value is not None, sockets.took, sockets.error or way)
    for name, page in readings.engines.items():
        yield SourceView("engine", name, page.value is not None, page.took, page.error or "")
    for hop, told in readings.proxies.items():
        program = told.value.program if told.value is not None else ""
        yield SourceView("proxy", hop, told.value is not None, told.took, told.error or program)
    if readings.gateway is not None:
        yield _gateway_source(readings.gateway, readings.topology)
    processes = readings.processes
    yield SourceView("processes", "", processes.value is not None, processes.took, processes.error or "")
    if readings.gpu is not None:
        snapshot, took = readings.gpu.value, readings.gpu.took
        if snapshot is None:
            yield SourceView("gpu", "", False, took, readings.gpu.error or "")
        else:
            why = f"{snapshot.reason}: {snapshot.detail}" if snapshot.detail else snapshot.reason
            yield SourceView("gpu", "", snapshot.reason == "ok", took, snapshot.way if why == "ok" else why)


def _gateway_source(reading: Reading[GatewayPage], topology: Topology) -> SourceView:
    """Say whether the gateway tells, and of which engines it does not: their names have to be the same there."""
    hop = topology.gateway.hop if topology.gateway is not None else ""
    if reading.value is None:
        return SourceView("gateway", hop, False, reading.took, reading.error or "")
    unknown = [engine.name for engine in topology.engines if engine.name not in reading.value.engines]
    detail = f"it has no engine named {', '.join(unknown)}, but {', '.join(reading.value.engines)}" if unknown else ""
    return SourceView("gateway", hop, len(unknown) < len(topology.engines), reading.took, detail)
