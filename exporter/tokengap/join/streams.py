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
from tokengap.join.matching import find_clients
from tokengap.join.rest import InEngine, await_clients, believe_brief, end_finished
from tokengap.join.segments import (
    FOREIGN,
    HEADER_MOST,
    HEADER_SECONDS,
    HEADER_USUAL,
    OWNED,
    SAME_INSTANT,
    SEGMENT,
    UNKNOWN_OWNER,
    UNSEEN,
    Segments,
    all_but_the_last,
    body,
    got_more_than_came,
    seems_over,
    stays,
)
from tokengap.join.signs import Signs, Talk, listen, note_leavers, signs
from tokengap.join.sockets import (
    TICKS,
    Sides,
    Tracked,
    ages,
    caller_keys,
    connection_keys,
    follow,
    locate,
    nobody,
    on_this_host,
    remember,
    sides,
)
from tokengap.readings import CLOSE_WAIT, ESTABLISHED, FIN_WAIT1, SocketSnapshot, SocketTable
from tokengap.topology import Topology

#: Seconds after which an upstream request that a hop surely owns and that never had a client is an orphan: it was left
#: before this exporter started, or within its first beat.
NEVER_PAIRED_SECONDS = 2.0

#: Bytes by which headers differ on both sides of a proxy, about.
SLIP = 32

#: How many of an engine's headers are remembered.
HEADERS_KEPT = 32

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
    carriers = _carriers(now, side, foreign, edges)
    _move_to_engines(seg, now, carriers, len(state.topology.hops))
    # No hop's after all, or an engine's socket whose other end is a hop's, where it is followed.
    row = now.find(seg["carrier"])
    ours = (seg["owner"] != FOREIGN) & ((row < 0) | carriers.is_carrier[row])
    seg, returned = seg[ours], seg[~ours]
    headers = _usual(state.headers)
    seg, taken = _grow(state, seg, now, carriers, side.engine_side >= 0, headers, at, events=snapshot.events)
    await_clients(seg, now, engines, at)
    heard = _hear_headers(seg, state.headers, at)
    headers = _usual(heard)
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


def _move_to_engines(seg: Segments, now: Tracked, carriers: _Carriers, hop: int) -> None:
    """Follow what is no hop's, but of a client on this host, at the engine's end of its connection from now on.

    ``hop``: the index that stands for "directly at the engine"."""
    moving = np.flatnonzero(seg["owner"] == FOREIGN)
    ends = np.flatnonzero(carriers.direct & ~now.ended)
    if not len(moving) or not len(ends):
        return
    keys = connection_keys(now.rows[ends])
    order = np.argsort(keys)
    found = locate(keys[order], seg["far_end"][moving])
    moving, ends = moving[found >= 0], ends[order[found[found >= 0]]]
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


@dataclass(frozen=True, slots=True)
class _Carriers:
    """Per socket row: is it a carrier, does it belong to the engine itself, how much question and answer it carried.

    ``early``: the newest answer byte came right after the newest question, as a header does. ``waiting``: a question
    was sent and its answer, other than a header, has not begun. ``asked``: any question was ever sent. ``cut``: the
    engine's end of a connection that came and went since the beat before, of whose other end, on this host, nothing
    was told: HAProxy lets go of an engine by a reset, which wipes its own socket.
    """

    is_carrier: NDArray[np.bool_]
    direct: NDArray[np.bool_]
    d_question: NDArray[np.int64]
    d_answer: NDArray[np.int64]
    answer: NDArray[np.int64]
    early: NDArray[np.bool_]
    waiting: NDArray[np.bool_]
    asked: NDArray[np.bool_]
    cut: NDArray[np.bool_]


def _carriers(
    now: Tracked, side: Sides, foreign: NDArray[np.uint64], edges: frozenset[tuple[int, int, bool]]
) -> _Carriers:
    """Tell which sockets carry answers, and which way round question and answer go on each."""
    rows = now.rows
    fronted = [target for _, target, is_hop in edges if not is_hop]
    upstream = (np.isin(side.to_engine, fronted) | (side.to_hop >= 0)) & ~np.isin(rows["cookie"], foreign)

    # An engine's own socket counts only when its other end is not an upstream socket that is followed already.
    direct = side.engine_side >= 0
    if direct.any() and upstream.any():
        followed = np.sort(connection_keys(rows[upstream], reverse=True))
        direct[direct] = locate(followed, connection_keys(rows[direct])) < 0
        if rows["netns"].any():  # between namespaces addresses may be translated
            followed = np.sort(caller_keys(rows[upstream], "src", side.to_engine[upstream]))
            direct[direct] = locate(followed, caller_keys(rows[direct], "dst", side.engine_side[direct])) < 0

    cut = direct & now.ended & ~now.known & np.isin(side.engine_side, fronted) & on_this_host(rows, "dst")
    if cut.any():
        cut[cut] = locate(np.sort(connection_keys(rows, reverse=True)), connection_keys(rows[cut])) < 0

    d_question = np.where(direct, now.d_received, now.d_sent)
    d_answer = np.where(direct, now.d_written, now.d_received)
    answer = np.where(direct, now.track["written"], now.track["received"])
    question_age, answer_age = ages(rows, direct)
    # A question of this beat may have its header already. An older one with a small early answer looks the same as a
    # poll that was answered at once: that is for :func:`~tokengap.join.rest.end_finished` to tell.
    early = answer_age >= question_age - 1e3 * HEADER_SECONDS
    recent = ~now.known | (d_question > 0)
    small = np.where(now.known, d_answer, answer) <= HEADER_MOST
    waiting = (question_age < answer_age) | (recent & early & small) | (question_age < 0)
    asked = np.where(direct, rows["bytes_received"], rows["bytes_sent"]) != 0
    return _Carriers(upstream | direct, direct, d_question, d_answer, answer, early, waiting & asked, asked, cut)


def _grow(
    state: StreamState,
    seg: Segments,
    now: Tracked,
    carriers: _Carriers,
    engine_side: NDArray[np.bool_],
    headers: NDArray[np.int64],
    at: float,
    *,
    events: bool,
) -> tuple[Segments, NDArray[np.int64]]:
    """Add what arrived to the streams in flight; end those whose socket is destroyed or carries a new request.

    Returns also, for each socket, how much of what arrived on it is taken.
    """
    rows, before = now.find(seg["carrier"]), state.at
    here = rows >= 0
    tcp = now.rows["state"][rows]
    closing = here & ~now.ended[rows] & ((tcp == FIN_WAIT1) | ((tcp == CLOSE_WAIT) & ~carriers.direct[rows]))
    flying = np.isnan(seg["ended"])
    arrived = np.where(flying, carriers.d_answer[rows], 0)
    arrived = np.where(closing & (arrived == 1), 0, arrived)  # the peer's FIN counts as a byte
    # A socket that its own process reset (HAProxy does) is wiped before its end is told. The engine's end is not.
    ends = now.rows[now.ended & engine_side]
    keys = connection_keys(ends)
    order = np.argsort(keys)
    far = locate(keys[order], seg["far_end"])
    told = flying & ~here & (far >= 0)
    asked = carriers.d_question[rows]
    if told.any() and state.track is not None:
        end = ends[order][far[told]]
        past = state.track[locate(state.track["cookie"], seg["carrier"][told])]
        asked[told] = end["bytes_received"] - np.where(
            past["cookie"] == seg["carrier"][told], past["sent"], end["bytes_received"]
        )
        total = np.minimum(end["bytes_acked"], end["bytes_sent"]) - seg["base_up"][told]
        arrived[told] = np.maximum(total - seg["supply"][told], 0)
    # More than a header is an answer, and so is anything to a question that stood for a while. What was asked after it
    # is another question.
    known_header = headers[seg["engine"]] if len(headers) else np.zeros(len(seg), dtype=np.int64)
    most = np.where((seg["engine"] >= 0) & (known_header > 0), 2 * known_header, HEADER_MOST)
    answered = ~np.isnan(seg["answered"])
    mute = flying & ~answered
    stood = seg["asked"] < before - (at - before) / 2
    spoken = (seg["supply"] > 0) | answered | (arrived > most) | ((arrived > 0) & stood)
    # So is what the request before it was given, for it came in one beat with that one's.
    passed_by = mute & (seg["supply"] == 0) & (seg["base_up"] > 0) & (seg["grew"] >= seg["asked"])
    spoken |= passed_by
    asked_again = flying & (here | told) & spoken & (asked > 0)
    # Of a socket that is destroyed the instant is not known, and a FIN counts as a byte.
    destroyed = now.ended[rows] | told
    asked_again &= np.where(destroyed, asked > 1, now.track["asked"][rows] > seg["asked"] + 0.1)
    old = _of_the_old(state, seg, now, carriers, arrived, known_header, at)
    # A poll's answer came at once, as the next one's did now.
    poll = asked_again & passed_by & (arrived <= most)
    arrived = np.where(poll, 0, np.where(asked_again, old, arrived))
    seg["trial"] |= poll

    before_ = body(seg)
    seg["supply"] += arrived
    seg["arrived"] = arrived
    alone = mute & here & ~now.ended[rows] & ~asked_again & carriers.early[rows] & (seg["supply"] <= most)
    seg["header"] = np.where(alone, seg["supply"], seg["header"])
    seg["fresh"] += body(seg) - before_
    first = mute & (arrived > 0) & ~alone
    seg["answered"] = np.where(first, at, seg["answered"])
    seg["grew"] = np.where(arrived > 0, at, seg["grew"])

    # A dump is not atomic, and the event of a socket's end may come a moment after the socket is gone.
    missed = flying & (~here | closing | now.ended[rows])
    down = now.find(seg["down"])
    both = (seg["down"] > 0) & ((down < 0) | now.ended[down])
    over = missed & (here | told | both | ~events | ~np.isnan(seg["missed"]))
    seg["missed"] = np.where(missed, np.where(np.isnan(seg["missed"]), at, seg["missed"]), np.nan)
    seg["ended"] = np.where((over | asked_again) & flying, at, seg["ended"])
    seg["reused"] |= asked_again
    # A request that came in pieces is complete with its last one.
    still_asking = here & flying & (seg["supply"] == 0) & ~now.ended[rows] & ~asked_again
    seg["asked"] = np.where(still_asking, now.track["asked"][rows], seg["asked"])
    taken = np.zeros(len(now.rows), dtype=np.int64)
    taken[rows[here]] = arrived[here]
    return seg, taken


def _of_the_old(
    state: StreamState,
    seg: Segments,
    now: Tracked,
    carriers: _Carriers,
    arrived: NDArray[np.int64],
    known_header: NDArray[np.int64],
    at: float,
) -> NDArray[np.int64]:
    """Return how much of what arrived is of each answer, and not of the one to a new question on its carrier.

    As much as its client got, where that is told: one that asks nothing new, that closed just now, or that had closed
    when it lacked nothing. Else what came before the new question, by time.
    """
    rows, down = now.find(seg["carrier"]), now.find(seg["down"])
    asked, before = now.track["asked"][rows], state.at
    share = np.clip((asked - before) / max(at - before, 1e-9), 0, 1)
    by_time = np.where(carriers.early[rows], arrived, np.round(arrived * share)).astype(np.int64)

    track, ended = now.track[down], now.ended[down]
    alone = (track["asked"] <= seg["asked"] + 2 * SAME_INSTANT) | (track["begun"] == track["written"])
    served = (seg["behind"] <= 0) & (~np.isnan(seg["answered"]) | got_more_than_came(seg))
    served = (seg["client"] == GONE) & (served | seems_over(seg))
    told = np.where(down < 0, served, (ended & now.known[down]) | (~ended & alone))
    told &= ~np.isnan(seg["lag"]) & (seg["measured"] == seg["down"]) & ~seg["shared"] & (seg["carrier"] != seg["down"])
    got = seg["acked"] + now.d_acked[down] + np.where(ended, 0, np.maximum(now.rows["wqueue"][down], 0))
    worth = state.ratio[seg["hop"], 1] / state.ratio[seg["hop"], 0]
    whole = seg["from_up"] + (got - seg["from_down"]) * worth - seg["owed"] + np.minimum(seg["level"], 0)
    old = np.where(told, np.clip(np.round(whole - seg["supply"]), 0, arrived), by_time).astype(np.int64)
    # The beginning of the new one may be its header.
    header = told & (known_header > 0) & (np.abs(arrived - old - known_header) <= SLIP)
    return np.where(header, np.maximum(arrived - known_header, 0), old)


def _hear_headers(seg: Segments, headers: NDArray[np.int64], at: float) -> NDArray[np.int64]:
    """Note the sizes of the headers that engines sent before the tokens that came now."""
    told = (seg["answered"] == at) & (seg["header"] > 0) & (seg["engine"] >= 0) & ~seg["reused"]
    headers = headers.copy()
    for engine in np.unique(seg["engine"][told]):
        sizes = seg["header"][told & (seg["engine"] == engine)]
        headers[engine] = np.concatenate([headers[engine], sizes])[-HEADERS_KEPT:]
    return headers


def _usual(headers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the size of each engine's header, 0 not known: of those noted the most frequent one, for the answer to a
    poll that a request followed at once looks like one."""
    usual = np.zeros(len(headers), dtype=np.int64)
    for engine, noted in enumerate(headers):
        sizes, times = np.unique(noted[noted > 0], return_counts=True)
        if len(sizes):
            usual[engine] = sizes[times.argmax()]
    return usual


def _born(
    state: StreamState,
    seg: Segments,
    now: Tracked,
    side: Sides,
    carriers: _Carriers,
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
    known_header = np.where(born["engine"] >= 0, headers[born["engine"]], 0) if len(headers) else np.zeros(len(born))
    but_header = passed & ~whole & (answer_age >= question_age - TICKS) & (known_header > 0)
    but_header &= answer - base > known_header
    passed_by = np.where(whole, answer - base, np.where(but_header, answer - base - known_header, 0)).astype(np.int64)
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
    born["header"] = np.where(waiting, born["supply"], np.where(born["engine"] >= 0, known_header, 0))
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
