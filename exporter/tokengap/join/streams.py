"""Streams: one row per request in flight at a hop, made from nothing but sockets.

The row of a hop's stream hangs on its *carrier*, the socket on which the answer arrives: the hop's upstream socket, or,
for clients that connect to the engine directly, the engine's accepted socket. Requests are told apart by what the
carrier sent, answers by what it received (for an engine's socket: the reverse).

:func:`advance` is one beat: what grew, what began (here), whose client is whose (``matching``), what has finished
(``rest``), how each client is (``client``) and how far behind (``delivery``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import GONE, VANISHED, Downstream, client_states
from tokengap.join.delivery import UNTOLD_BYTES, deliver, learn_ratio
from tokengap.join.growth import HEADERS_KEPT, Before, Carriers, find_carriers, grow, hear_headers, usual
from tokengap.join.matching import find_clients
from tokengap.join.rest import InEngine, await_clients, believe_brief, end_finished
from tokengap.join.segments import (
    FOREIGN,
    HEADER_MOST,
    HEADER_USUAL,
    OWNED,
    SAME_INSTANT,
    SEGMENT,
    UNKNOWN_OWNER,
    UNSEEN,
    Segments,
    all_but_the_last,
    body,
    headers_of,
    stays,
)
from tokengap.join.signs import Signs, Talk, listen, note_leavers, signs
from tokengap.join.sockets import (
    TICKS,
    Sides,
    Tracked,
    ages,
    connection_keys,
    follow,
    locate,
    locate_among,
    nobody,
    remember,
    sides,
)
from tokengap.readings import ESTABLISHED, SocketSnapshot, SocketTable
from tokengap.topology import Topology

#: Seconds after which an upstream request that a hop surely owns and that never had a client is an orphan: it was left
#: before this exporter started, or within its first beat.
NEVER_PAIRED_SECONDS = 2.0

#: Beats without a look at the sockets from which on a request that came and went between two looks may have lost its
#: client: its tokens are then nobody's (unattributed).
UNSEEN_BEATS = 2.5

#: The same for requests that were there before the exporter: their instants do not tell whether clients share a
#: connection (HTTP/2), the frames that these send meanwhile will.
NEVER_PAIRED_BEFORE_SECONDS = 10.0

#: Seconds within which the process table answers its first question, if it ever does.
FIRST_ANSWER_SECONDS = 2.5

#: An upstream socket, by cookie, and the index of the hop that owns it.
HOME = np.dtype([("cookie", "u8"), ("hop", "i4")])


@dataclass(frozen=True, slots=True)
class StreamState:
    """What is remembered between beats. ``ratio`` holds, per hop (and last the engine), the bytes acknowledged by
    clients and the bytes received for them while both flowed."""

    topology: Topology
    segments: Segments
    track: NDArray[np.void] | None
    at: float
    next_id: int
    foreign: NDArray[np.uint64]  # cookies of upstream-looking sockets that no hop owns
    homes: NDArray[Any]  # of HOME: upstream sockets of which the process table said which hop's they are
    strangers: frozenset[tuple[int, bool]]  # (target, target is a hop) that others than hops call, too
    edges: frozenset[tuple[int, int, bool]]  # (hop, target, target is a hop): who forwards where
    ratio: NDArray[np.float64]
    headers: NDArray[np.int64]  # sizes of the headers that each engine sent before a first token, the newest last
    questions: frozenset[int]  # inodes of carriers whose owner would settle something
    talk: Talk = field(default_factory=Talk)
    began: float = 0.0  # the first beat
    own: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))  # cookies, both ends


@dataclass(frozen=True, slots=True)
class Path:
    """How each segment hangs in its chain of hops; index-aligned with the segments.

    ``first``: the row of the outermost segment that this one is part of. ``leaks_at``: the outermost hop on the way
    which holds on to a client that is gone, -1 none. ``client``: the outermost client's state. ``inner``: the row of
    the segment at the next hop that carries this request on, -1 none.
    """

    first: NDArray[np.intp]
    leaks_at: NDArray[np.int32]
    client: NDArray[np.int8]
    inner: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Held:
    """Requests that a hop has accepted and not passed on: the queue inside the proxy. Columns correspond."""

    hop: NDArray[np.int32]
    asked: NDArray[np.float64]
    client: NDArray[np.int8]
    rows: NDArray[Any]  # of readings.SOCKET


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of this beat: in flight, and those that ended since the beat before (``ended`` is set)."""

    segments: Segments
    path: Path
    held: Held
    clients: NDArray[Any]  # the outermost client's socket row of each segment (readings.SOCKET), zeros when not seen
    returned: Segments  # what turned out to be no stream of ours; its tokens go back to whoever earned them
    signs: Signs = field(default_factory=Signs)


def start(topology: Topology) -> StreamState:
    """Return the state before the first beat. Hops without better knowledge forward where the topology says."""
    hop_index = {hop.name: i for i, hop in enumerate(topology.hops)}
    engine_index = {engine.name: i for i, engine in enumerate(topology.engines)}
    edges = {
        (i, hop_index.get(name, engine_index.get(name, -1)), name in hop_index)
        for i, hop in enumerate(topology.hops)
        for name in hop.to
    }
    return StreamState(
        topology=topology,
        segments=np.zeros(0, dtype=SEGMENT),
        track=None,
        at=0.0,
        next_id=1,
        foreign=np.zeros(0, dtype=np.uint64),
        homes=np.zeros(0, dtype=HOME),
        strangers=frozenset(),
        edges=frozenset(edges),
        ratio=np.full((len(topology.hops) + 1, 2), UNTOLD_BYTES),
        headers=np.zeros((len(topology.engines), HEADERS_KEPT), dtype=np.int64),
        questions=frozenset(),
    )


def advance(
    state: StreamState,
    snapshot: SocketSnapshot,
    at: float,
    engines: Mapping[int, InEngine],
    owners: Mapping[int, str],
    *,
    own: frozenset[int] = frozenset(),
    blur: float = 0.0,
    blind: frozenset[int] = frozenset(),
) -> tuple[StreamState, Streams]:
    """Take one snapshot in. ``engines``: what each engine's page says, by index, where it could be read. ``owners``:
    answers to the questions of earlier beats. ``own``: inodes of sockets by which we ask ourselves. ``blur``: how long
    the dump lasted, the uncertainty of its ages. ``blind``: the hops, by index, that have clients whose requests no
    socket of theirs tells apart."""
    topology = state.topology
    both = np.concatenate([snapshot.open, snapshot.closed, nobody()])
    ours = _our_own(both, state.own, own)
    state = replace(state, own=np.sort(both["cookie"][ours]))
    order = np.argsort(both["cookie"], kind="stable")
    order = order[~ours[order]]
    both, ended = both[order], order >= len(snapshot.open)
    side = sides(both, topology, snapshot.namespaces)
    now = follow(state.track, both, ended, (side.down >= 0) | (side.engine_side >= 0), at)

    state, seg = _hear_owners(state, owners, now)
    foreign, edges = state.foreign, state.edges
    carriers = find_carriers(now, side, foreign, edges)
    _move_to_engines(seg, now, carriers, len(state.topology.hops))
    # No hop's after all, or an engine's socket whose other end is a hop's, where it is followed.
    row = now.find(seg["carrier"])
    ours = (seg["owner"] != FOREIGN) & ((row < 0) | carriers.is_carrier[row])
    seg, returned = seg[ours], seg[~ours]
    headers = usual(state.headers)
    before = Before(state.track, state.at, state.ratio)
    seg, taken = grow(before, seg, now, carriers, side.engine_side >= 0, headers, at, events=snapshot.events)
    await_clients(seg, now, engines, at)
    heard = hear_headers(seg, state.headers, at)
    headers = usual(heard)
    seg, next_id = _born(state, seg, now, side, carriers, taken, headers, at)
    guess = _guesses(state, seg, at)
    find_clients(seg, now, side, edges, state.ratio, at, blur, state.talk.frames, state.at, guess)
    note_leavers(seg, now, side, state.at, events=snapshot.events, first=state.track is None)
    talk = listen(state.talk, now, side, seg)
    parent, inner = _links(seg, now)
    seg = end_finished(seg, now, inner, engines, headers, at, topology.interval)
    unseen = state.track is not None and at - state.at > UNSEEN_BEATS * topology.interval
    believe_brief(seg, engines, edges, at, unseen=unseen)
    began = at if state.track is None else state.began
    many = blind.union(side.down[np.isin(now.rows["cookie"], talk.frames)].tolist())
    seg = _own(seg, now, side, at, began, many, max(NEVER_PAIRED_SECONDS, 2 * topology.interval))
    seg = _see_clients(seg, now, at, topology.interval)
    path = _chain(seg, parent, inner)
    seg, to = deliver(seg, path.first, path.client, now, state.ratio, at, events=snapshot.events)
    ratio = learn_ratio(state.ratio, seg, to, now, at)
    doubtful = _guesses(state, seg, at) & (path.client >= VANISHED) & ~all_but_the_last(seg)
    path = replace(path, client=np.where(doubtful, np.int8(UNSEEN), path.client))

    questions = _questions(state, seg, now)
    kept = seg[stays(seg)]
    state = replace(
        state,
        segments=kept,
        track=remember(state.track, now, kept["down"]),
        at=at,
        next_id=next_id,
        foreign=np.intersect1d(foreign, now.rows["cookie"]),
        homes=state.homes[now.find(state.homes["cookie"]) >= 0],
        ratio=ratio,
        headers=heard,
        questions=questions,
        talk=talk,
        began=began,
    )
    held = _held(seg, now, side, at, topology.interval, talk.murmurs)
    seen = signs(talk, now, side, seg, held.hop, len(topology.hops))
    clients = now.rows[now.find(seg[path.first]["down"])]
    return state, Streams(seg, path, held, clients, returned, seen)


def _our_own(rows: SocketTable, before: NDArray[np.uint64], inodes: frozenset[int]) -> NDArray[np.bool_]:
    """Mark both ends of the connections by which this exporter asks engines and proxies: no client's, no stream.

    A socket that is destroyed has no inode any more: then its cookie of ``before`` tells.
    """
    ours = np.isin(rows["inode"], list(inodes)) | (locate(before, rows["cookie"]) >= 0)
    others = np.flatnonzero(np.isin(rows["dport"], rows["sport"][ours]))  # of few only the whole address is compared
    keys = np.sort(connection_keys(rows[ours], reverse=True))
    ours[others] |= locate(keys, connection_keys(rows[others])) >= 0
    return np.asarray(ours, dtype=np.bool_)


def _hear_owners(state: StreamState, owners: Mapping[int, str], now: Tracked) -> tuple[StreamState, Segments]:
    """Take the answers about owners in, and remember them: what is no hop's, and who forwards where.

    A client of another hop than the one that the request turns out to be of was not its client.
    """
    seg = state.segments.copy()
    names = {hop.name: i for i, hop in enumerate(state.topology.hops)}
    edges, strangers, homes = set(state.edges), set(state.strangers), []
    rows = now.find(seg["carrier"])
    asked = (seg["carrier"] != seg["down"]) & (rows >= 0) & ~seg["owner_told"]
    for i in np.flatnonzero(asked) if owners else ():
        owner = owners.get(int(now.rows["inode"][rows[i]]))
        if owner is None:
            continue
        to_hop = bool(seg["to_hop"][i] >= 0)
        target = int(seg["to_hop"][i] if to_hop else seg["engine"][i])
        seg["owner_told"][i] = True
        if owner not in names:
            seg["owner"][i] = FOREIGN
            strangers.add((target, to_hop))
            continue
        hop = names[owner]
        if seg["down"][i] and seg["hop"][i] != hop:
            seg["down"][i], seg["client"][i], seg["gone"][i], seg["lag"][i] = 0, UNSEEN, np.nan, np.nan
            seg["shared"][i] = False
        seg["owner"][i], seg["hop"][i] = OWNED, hop
        edges.add((hop, target, to_hop))
        homes.append((seg["carrier"][i], hop))
    no_hops = [inode for inode, owner in owners.items() if owner not in names]
    others = now.rows["cookie"][np.isin(now.rows["inode"], no_hops)]
    state = replace(
        state,
        foreign=np.union1d(np.union1d(state.foreign, others), seg["carrier"][seg["owner"] == FOREIGN]),
        homes=np.unique(np.concatenate([state.homes, np.array(homes, dtype=HOME)])),
        strangers=frozenset(strangers),
        edges=frozenset(edges),
    )
    return state, seg


def _move_to_engines(seg: Segments, now: Tracked, carriers: Carriers, hop: int) -> None:
    """Follow what is no hop's, but of a client on this host, at the engine's end of its connection from now on.

    ``hop``: the index that stands for "directly at the engine"."""
    moving = np.flatnonzero(seg["owner"] == FOREIGN)
    ends = np.flatnonzero(carriers.direct & ~now.ended)
    if not len(moving) or not len(ends):
        return
    found = locate_among(connection_keys(now.rows[ends]), seg["far_end"][moving])
    moving, ends = moving[found >= 0], ends[found[found >= 0]]
    fresh = ~now.among(seg["carrier"][np.isnan(seg["ended"])])[ends]
    moving, ends = moving[fresh], ends[fresh]
    seg["far_end"][moving] = connection_keys(now.rows[ends], reverse=True)
    seg["carrier"][moving] = seg["down"][moving] = now.rows["cookie"][ends]
    seg["hop"][moving], seg["owner"][moving], seg["owner_told"][moving] = hop, OWNED, True
    seg["client"][moving], seg["shared"][moving] = UNSEEN, False
    seg["acked"][moving] = seg["supply"][moving]
    seg["gone"][moving] = seg["lag"][moving] = np.nan


def _questions(state: StreamState, seg: Segments, now: Tracked) -> frozenset[int]:
    """Return the inodes of carriers whose owner would settle something: those without a client, and all that go where
    more than one hop, or others than hops, call as well."""
    asking = np.isnan(seg["ended"]) & (seg["carrier"] != seg["down"]) & ~seg["owner_told"]
    asking &= _disputed(state, seg, state.strangers) | ((seg["down"] == 0) & (seg["owner"] == UNKNOWN_OWNER))
    rows = now.find(seg["carrier"][asking])
    return frozenset(int(inode) for inode in now.rows["inode"][rows[rows >= 0]] if inode)


def _disputed(state: StreamState, seg: Segments, strangers: frozenset[tuple[int, bool]]) -> NDArray[np.bool_]:
    """Mark the requests that go where more than one hop, or ``strangers``, call."""
    callers = Counter((target, to_hop) for _, target, to_hop in state.edges) + Counter(strangers)
    engines = [target for (target, to_hop), n in callers.items() if n > 1 and not to_hop]
    hops = [target for (target, to_hop), n in callers.items() if n > 1 and to_hop]
    return np.asarray(np.isin(seg["engine"], engines) | np.isin(seg["to_hop"], hops), dtype=np.bool_)


def _guesses(state: StreamState, seg: Segments, at: float) -> NDArray[np.bool_]:
    """Mark the requests of which only instants tell whose they are, where the process table will tell. Till then none
    is an orphan: who left may be somebody else's client."""
    if len(state.homes):
        disputed = _disputed(state, seg, state.strangers)
    elif state.track is None or at - state.began < FIRST_ANSWER_SECONDS:
        disputed = _disputed(state, seg, frozenset())
    else:
        return np.zeros(len(seg), dtype=np.bool_)
    return np.asarray(disputed & (seg["carrier"] != seg["down"]) & ~seg["owner_told"], dtype=np.bool_)


def _born(
    state: StreamState,
    seg: Segments,
    now: Tracked,
    side: Sides,
    carriers: Carriers,
    taken: NDArray[np.int64],
    headers: NDArray[np.int64],
    at: float,
) -> tuple[Segments, int]:
    """Begin a stream for every carrier with a request and no stream."""
    rows, first_beat = now.rows, state.track is None
    carrying = now.among(seg["carrier"][np.isnan(seg["ended"])])
    replaced = now.among(seg["carrier"][seg["ended"] == at])

    new = ~now.known & carriers.asked
    if first_beat:  # an old connection that is quiet after an answer is at rest
        new &= carriers.waiting | (now.track["grew"] > at - 1.5 * state.topology.interval)
    after_stream = now.among(seg["carrier"][(seg["ended"] == at) & ~seg["trial"]])
    waiting = carriers.waiting | (after_stream & carriers.early)
    asks = waiting | (carriers.d_question > 0)
    resumes = (carriers.d_answer > 1) & ~replaced  # 1: the peer's FIN
    begin = carriers.is_carrier & ~carrying & (new | (now.known & ~now.ended & (asks | resumes)))
    begin &= (rows["state"] == ESTABLISHED) | (now.ended & ~now.known)
    # What an old connection brought after the stream that ended with it came and went since the beat before.
    begin |= carriers.is_carrier & replaced & now.known & now.ended & (carriers.d_answer - taken > HEADER_MOST)

    at_rows = np.flatnonzero(begin)
    born = np.zeros(len(at_rows), dtype=SEGMENT)
    born["engine"] = np.where(carriers.direct[at_rows], side.engine_side[at_rows], side.to_engine[at_rows])
    answer = np.maximum(carriers.answer[at_rows], 0)
    # Answer bytes of this beat are the new stream's, less what a stream that ended in this beat has taken.
    base = answer - carriers.d_answer[at_rows] + taken[at_rows]
    if first_beat:  # what came before is not ours; a header, or what looks like one, tells that it may be over
        base = np.where(waiting[at_rows] & (answer <= HEADER_MOST), 0, answer)
    # Where they came before the newest question, they are of a request that came and went since the beat before.
    question_age, answer_age = ages(rows[at_rows], carriers.direct[at_rows])
    passed = ~now.ended[at_rows] & (question_age >= 0) & (not first_beat)
    whole = passed & (answer_age > question_age + TICKS)
    # The newest of them may be this one's header: what came in one tick with the question is no more.
    known_header = headers_of(born, headers)
    but_header = passed & ~whole & (answer_age >= question_age - TICKS) & (known_header > 0)
    but_header &= answer - base > known_header
    passed_by = np.where(whole, answer - base, np.where(but_header, answer - base - known_header, 0))
    base += passed_by
    born["id"] = state.next_id + np.arange(len(at_rows))
    born["carrier"] = rows["cookie"][at_rows]
    born["netns"] = rows["netns"][at_rows]
    born["far_end"] = connection_keys(rows[at_rows], reverse=True)
    direct = (carriers.direct & ~carriers.cut)[at_rows]
    born["down"] = np.where(direct, born["carrier"], 0)
    born["hop"] = np.where(direct, len(state.topology.hops), -1)
    born["to_hop"] = np.where(direct, -1, side.to_hop[at_rows])
    at_home = locate(state.homes["cookie"], born["carrier"])
    born["owner_told"] = at_home >= 0
    if len(state.homes):  # nothing can be taken from an empty table
        born["hop"] = np.where(born["owner_told"], state.homes["hop"][at_home], born["hop"])
    born["owner"] = np.where(direct | born["owner_told"], OWNED, UNKNOWN_OWNER)
    born["asked"] = now.track["asked"][at_rows]
    born["born"] = at
    born["base_up"] = base
    born["supply"] = born["arrived"] = answer - base
    waiting = waiting[at_rows] & (born["supply"] <= HEADER_MOST)
    born["header"] = np.where(waiting, born["supply"], known_header)
    born["fresh"] = np.where(waiting, 0, body(born))
    born["answered"] = np.where(waiting, np.nan, at)
    born["grew"] = now.track["grew"][at_rows]
    born["grew"] = np.where(born["supply"] > 0, at, born["grew"])
    born["missed"] = np.nan
    born["ended"] = np.where(now.ended[at_rows], at, np.nan)
    born["gone"] = np.nan
    born["left"] = np.nan
    born["lag"] = np.nan
    born["client"] = UNSEEN
    header_like = (born["supply"] == 0) | (born["supply"] == known_header)
    born["trial"] = ~(waiting & header_like) | (replaced & carriers.early | carriers.cut)[at_rows] | but_header
    more = passed_by > HEADER_MOST
    brief = born[more]
    brief["id"] = state.next_id + len(born) + np.arange(len(brief))
    brief["supply"] = brief["arrived"] = passed_by[more]
    brief["base_up"] -= brief["supply"]
    brief["asked"] = brief["answered"] = brief["grew"] = brief["ended"] = at
    brief["header"] = HEADER_USUAL
    brief["fresh"] = body(brief)
    brief["trial"] = brief["reused"] = True
    return np.concatenate([seg, born, brief]), state.next_id + len(born) + len(brief)


def _own(
    seg: Segments, now: Tracked, side: Sides, at: float, began: float, blind: frozenset[int], patience: float
) -> Segments:
    """Decide about upstream requests that never had a client: the hop's orphan, or not known.

    It is one where a client may have left before we looked, and where each client that is there has its own stream.
    ``blind``: hops with clients on HTTP/2 or 3. There "no socket of its own" proves nothing, and what was taken for an
    orphan before that was known is none. ``patience``: seconds for which a client may yet be found.
    """
    busy = now.among(seg["down"][np.isnan(seg["ended"])])
    free = np.unique(side.down[~now.ended & ~busy & (now.rows["state"] == ESTABLISHED)])
    nobody_else = seg["maybe_left"] | ~np.isin(seg["hop"], free)
    flying = np.isnan(seg["ended"])
    alone = flying & (seg["down"] == 0) & (seg["owner"] == OWNED)
    unknown = np.isin(seg["hop"], list(blind))
    wait = np.where(seg["born"] <= began, began - seg["asked"] + NEVER_PAIRED_BEFORE_SECONDS, patience)
    left = alone & ~unknown & nobody_else & (at - seg["asked"] > wait)
    seg["client"] = np.where(left, GONE, np.where(alone & unknown, UNSEEN, seg["client"]))
    seg["gone"] = np.where(left & np.isnan(seg["gone"]), at, seg["gone"])
    # What keeps answering without being asked again is a stream, not a poll.
    seg["trial"] &= ~((seg["grew"] == at) & (seg["answered"] < at) & flying)
    return seg


def _see_clients(seg: Segments, now: Tracked, at: float, interval: float) -> Segments:
    """Read each client's state off its socket; a client once seen and without a socket now is gone."""
    has = seg["down"] > 0
    rows = now.find(seg["down"])
    here = (rows >= 0) & ~now.ended[rows]
    seg["acked"] += now.d_acked[rows]

    states = np.where(has, np.int8(GONE), seg["client"])
    there = rows[here]
    behind = np.where(seg["shared"][here], 0, seg["behind"][here])
    still = at - now.track["moved"][there]
    states[here] = client_states(Downstream(now.rows[there], still, behind, interval))
    left = states >= VANISHED
    since = np.where(np.isnan(seg["gone"]), at, seg["gone"])
    seg["client"] = states
    seg["gone"] = np.where(left, since, np.nan)
    # A socket's end tells how long before it the request had come.
    ends = now.ended[rows] & has & np.isnan(seg["left"]) & (now.rows["last_data_recv"][rows] >= 0)
    asked = np.where(now.known[rows], now.track["asked"][rows], seg["asked"])
    end = np.minimum(asked + now.rows["last_data_recv"][rows] / 1e3, at)
    seg["left"] = np.where(ends, end, np.where(here, np.nan, seg["left"]))
    carrier = now.find(seg["carrier"])
    flows = (carrier >= 0) & ~now.ended[carrier] & (now.track["grew"][carrier] > seg["left"] + SAME_INSTANT)
    seg["flowed_on"] = (seg["flowed_on"] | flows) & ~here
    return seg


def _links(seg: Segments, now: Tracked) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Link the segments of one request across hops: a hop's client-facing socket is the other end of the carrier of
    the hop before. Returns for each segment the row of the one before it and of the one after it, or -1."""
    parent = np.full(len(seg), -1, dtype=np.intp)
    inner = np.full(len(seg), -1, dtype=np.intp)
    outer = np.flatnonzero((seg["to_hop"] >= 0) & (now.find(seg["carrier"]) >= 0))
    if len(outer):
        keys = connection_keys(now.rows[now.find(seg["carrier"][outer])], reverse=True)
        order = np.lexsort((-seg["id"][outer], keys))  # of several requests on one connection, the newest first
        outer, keys = outer[order], keys[order]
        fed = np.flatnonzero(now.find(seg["down"]) >= 0)
        found = locate(keys, connection_keys(now.rows[now.find(seg["down"][fed])]))
        fed, found = fed[found >= 0], found[found >= 0]
        parent[fed] = outer[found]
        inner[outer[found]] = fed
    return parent, inner


def _chain(seg: Segments, parent: NDArray[np.intp], inner: NDArray[np.intp]) -> Path:
    """Follow the links: who is the client at the outer end, and which hop is the first to hold on to one that left."""
    first = np.arange(len(seg))
    client = seg["client"].copy()
    leaks_at = np.where(client >= VANISHED, seg["hop"], UNSEEN).astype(np.int32)
    linked = parent >= 0
    for _ in range(int(seg["hop"].max(initial=0))):
        before = parent[linked]
        first[linked] = first[before]
        client[linked] = np.where(client[before] != UNSEEN, client[before], client[linked])
        # A hop that let go in this beat while the next one goes on does not hold on: the next one does. Where both
        # ended in it, the outer one held on to the end.
        let_go = ~np.isnan(seg["ended"][before]) & np.isnan(seg["ended"][linked]) & (leaks_at[linked] >= 0)
        holds = (leaks_at[before] >= 0) & ~let_go
        leaks_at[linked] = np.where(holds, leaks_at[before], leaks_at[linked])
    return Path(first, leaks_at, client, inner)


def _held(seg: Segments, now: Tracked, side: Sides, at: float, interval: float, murmurs: NDArray[np.uint64]) -> Held:
    """Find the requests that wait inside a hop: asked, nothing sent back, and no stream carries them on.

    ``murmurs``: sockets on which the newest word was none: a frame of HTTP/2.
    """
    rows = now.rows
    asks = (side.down >= 0) & ~now.ended & (rows["state"] == ESTABLISHED) & (rows["bytes_received"] > 0)
    asks &= (rows["last_data_recv"] >= 0) & (rows["last_data_recv"] <= rows["last_data_sent"])
    asks &= (at - now.track["asked"] >= interval) & ~np.isin(rows["cookie"], murmurs)
    served = now.among(seg["down"][np.isnan(seg["ended"])])
    waiting = np.flatnonzero(asks & ~served)
    still = at - now.track["moved"][waiting]
    states = client_states(Downstream(rows[waiting], still, np.zeros(len(waiting)), interval))
    return Held(side.down[waiting], now.track["asked"][waiting], states, rows[waiting])
