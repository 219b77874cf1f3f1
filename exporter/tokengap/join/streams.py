"""Streams: one row per request in flight at a hop, made from nothing but sockets.

The row of a hop's stream hangs on its *carrier*, the socket on which the answer arrives: the hop's upstream socket, or,
for clients that connect to the engine directly, the engine's accepted socket. Requests are told apart by what the
carrier sent, answers by what it received (for an engine's socket: the reverse).

In flight or idle? One rule, stated here and applied in :func:`_at_rest`. A keep-alive upstream that carried an answer
and is quiet now (no byte for a beat) has either finished or is paused, and the kernel shows both alike:

=====================================  ========================================================================
situation                              decision
=====================================  ========================================================================
request sent, no answer byte yet       in flight (queued or prefill, or an answer that is not streamed)
a header and no more                   as "quiet" below: a small page answered at once looks the same
answer bytes since the beat before     in flight
a new request on the same socket       the old stream has ended, a new one begins
carrier destroyed, or in CLOSE-WAIT    ended
quiet, or its client just closed, and  in flight while the engine has requests to account for, the least silent first;
engine's running + waiting known       else ended
silent, and the engine finished more   ended, the most silent first
than we saw end
quiet, engine's counts not known       in flight for :data:`QUIET_PATIENCE`, then ended
quiet, the client sends a new request  ended
=====================================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import CONNECTED, GONE, VANISHED, Downstream, client_states
from tokengap.join.pairing import Amounts, Requests, by_volume, in_order, pair
from tokengap.join.sockets import Sides, Tracked, connection_keys, follow, locate, nobody, sides
from tokengap.readings import CLOSE_WAIT, ESTABLISHED, FIN_WAIT1, SocketSnapshot
from tokengap.topology import Topology

#: A client we never saw: not known to be there, not known to be gone. Never published as a client state.
UNSEEN = -1

#: Seconds for which a quiet stream counts as in flight when the engine does not say how many it has.
QUIET_PATIENCE = 30.0

#: Seconds of silence from which on a stream may have finished: longer than between two tokens of a busy engine.
SILENT_SECONDS = 0.1

#: Seconds after which an upstream request that a hop surely owns and that never had a client is an orphan: it was left
#: before this exporter started, or within its first beat.
NEVER_PAIRED_SECONDS = 2.0

#: vLLM (any Starlette application) sends the header of a streamed answer when the request is accepted, long before the
#: first token: at most so many bytes, within so many seconds. They are no sign of life of the model.
HEADER_MOST, HEADER_SECONDS = 1024, 0.1

#: The size of such a header where none was seen on its own.
HEADER_USUAL = 200

#: The share of received bytes by which a client may seem to fall behind without being behind: a proxy that re-frames
#: the chunks acknowledges slightly other numbers of bytes than it received.
REFRAMING = 0.03

#: Seconds by which two sockets may disagree about the instant of the same request (a few ms through every proxy
#: measured, 4 ms ticks, a busy event loop in between).
SAME_INSTANT = 0.05

#: Bytes that a proxy may hold back from a client that it serves (nginx with proxy_buffering on: two buffers of 8 KB).
HELD_BACK = 16 * 1024

UNKNOWN_OWNER, OWNED, FOREIGN = 0, 1, 2

#: One request at one hop. Instants are monotonic seconds, NaN for "not yet".
SEGMENT = np.dtype(
    [
        ("id", "i8"),
        ("hop", "i4"),  # index of the hop; len(hops) for "directly at the engine"; -1 while no partner told
        ("engine", "i4"),  # index of the engine it goes to; -1 when it goes to another hop
        ("to_hop", "i4"),
        ("carrier", "u8"),  # cookie of the socket the answer comes by
        ("far_end", "u8"),  # the connection as seen from its other end (connection_keys)
        ("down", "u8"),  # cookie of the client-facing socket; 0 never seen
        ("asked", "f8"),
        ("born", "f8"),  # first seen
        ("answered", "f8"),  # first bytes beyond the header seen: its first token
        ("grew", "f8"),  # newest answer byte seen
        ("missed", "f8"),  # since when its carrier is closing, closed, or in no table
        ("ended", "f8"),
        ("gone", "f8"),  # since when the client is known to be gone or vanished, at this hop
        ("client", "i1"),  # code of the client facing this hop, or UNSEEN
        ("owner", "i1"),
        ("no_room", "?"),  # in the beat before, the engine's count left no room for it
        ("trial", "?"),  # may yet turn out to be a poll of some page, not a stream: no tokens are credited
        ("draining", "?"),  # ended, but its client has not acknowledged all yet and is still there
        ("shared", "?"),  # its client multiplexes several requests on one socket (HTTP/2)
        ("base_up", "i8"),  # bytes on the carrier before this request
        ("header", "i8"),  # bytes of the header, 0 while not seen on its own
        ("supply", "i8"),  # answer bytes so far, header included
        ("arrived", "i8"),  # of these, since the beat before
        ("acked", "i8"),  # bytes acknowledged by the client facing this hop, since it was found
        ("fresh", "f8"),  # answer bytes, header excluded, not yet credited with tokens
        ("lag", "f8"),  # answer bytes minus what the outermost client acknowledged, in upstream bytes, since paired
        ("level", "f8"),  # the lag at which all was delivered
        ("behind", "f8"),  # answer bytes not yet acknowledged by the outermost client
        ("tokens", "f8"),
        ("useful", "f8"),
        ("orphaned", "f8"),
    ]
)

Segments = NDArray[Any]


def body(segments: Segments) -> NDArray[np.int64]:
    """Return the answer bytes of each stream that are not its header."""
    header = np.where(segments["header"] > 0, segments["header"], HEADER_USUAL)
    return np.asarray(np.maximum(segments["supply"] - header, 0), dtype=np.int64)


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
    edges: frozenset[tuple[int, int, bool]]  # (hop, target, target is a hop): who forwards where
    ratio: NDArray[np.float64]
    headers: NDArray[np.int64]  # size of the header that each engine sends before the first token, 0 not known
    questions: frozenset[int]  # inodes of carriers whose owner would settle something


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


@dataclass(frozen=True, slots=True)
class InEngine:
    """How many requests an engine has, running and waiting, and how many it finished since the beat before."""

    requests: float
    finished: float


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
        edges=frozenset(edges),
        ratio=np.full((len(topology.hops) + 1, 2), 65536.0),
        headers=np.zeros(len(topology.engines), dtype=np.int64),
        questions=frozenset(),
    )


def advance(
    state: StreamState,
    snapshot: SocketSnapshot,
    at: float,
    engines: Mapping[int, InEngine],
    owners: Mapping[int, str],
    *,
    blur: float = 0.0,
) -> tuple[StreamState, Streams]:
    """Take one snapshot in. ``engines``: what each engine's page says, by index, where it could be read. ``owners``:
    answers to the questions of earlier beats. ``blur``: how long the dump lasted, the uncertainty of its ages."""
    topology = state.topology
    both = np.concatenate([snapshot.open, snapshot.closed, nobody()])
    order = np.argsort(both["cookie"], kind="stable")
    both, ended = both[order], order >= len(snapshot.open)
    side = sides(both, topology)
    now = follow(state.track, both, ended, (side.down >= 0) | (side.engine_side >= 0), at)

    seg, foreign, edges = _hear_owners(state, owners, now)
    carriers = _carriers(now, side, foreign, edges)
    # No hop's after all, or an engine's socket whose other end is a hop's, where it is followed.
    row = now.find(seg["carrier"])
    ours = (seg["owner"] != FOREIGN) & ((row < 0) | carriers.is_carrier[row])
    seg, returned = seg[ours], seg[~ours]
    seg, taken = _grow(seg, now, carriers, side.engine_side >= 0, state.at, at, events=snapshot.events)
    _await_clients(seg, now, engines, at)
    headers = _learn_headers(seg, state.headers, at)
    seg, next_id = _born(state, seg, now, side, carriers, taken, headers, at)
    _find_clients(seg, now, side, edges, state.ratio, at, blur)
    parent, inner = _links(seg, now)
    seg = _at_rest(seg, now, inner, engines, headers, at, topology.interval)
    _believe_brief(seg, engines, edges, at)
    seg = _own(seg, at)
    seg = _see_clients(seg, now, at, topology.interval)
    path = _chain(seg, parent, inner)
    seg, ratio = _deliver(seg, path, now, state.ratio)

    asking = np.isnan(seg["ended"]) & (seg["down"] == 0) & (seg["owner"] == UNKNOWN_OWNER)
    rows = now.find(seg["carrier"][asking])
    questions = frozenset(int(inode) for inode in now.rows["inode"][rows[rows >= 0]] if inode)

    state = replace(
        state,
        segments=seg[stays(seg)],
        track=now.track[~now.ended],
        at=at,
        next_id=next_id,
        foreign=np.intersect1d(foreign, now.rows["cookie"]),
        edges=edges,
        ratio=ratio,
        headers=headers,
        questions=questions,
    )
    clients = now.rows[now.find(seg[path.first]["down"])]
    return state, Streams(seg, path, _held(seg, now, side, at, topology.interval), clients, returned)


def stays(seg: Segments) -> NDArray[np.bool_]:
    """Mark the streams that the next beat needs: in flight, or not wholly delivered."""
    return np.asarray(np.isnan(seg["ended"]) | seg["draining"], dtype=np.bool_)


def _hear_owners(
    state: StreamState, owners: Mapping[int, str], now: Tracked
) -> tuple[Segments, NDArray[np.uint64], frozenset[tuple[int, int, bool]]]:
    """Take the answers about owners in: mark what no hop owns (and remember it), learn who forwards where."""
    seg = state.segments.copy()
    names = {hop.name: i for i, hop in enumerate(state.topology.hops)}
    edges = set(state.edges)
    rows = now.find(seg["carrier"])
    asked = (seg["down"] == 0) & (rows >= 0) & (seg["owner"] == UNKNOWN_OWNER)
    for i in np.flatnonzero(asked) if owners else ():
        owner = owners.get(int(now.rows["inode"][rows[i]]))
        if owner in names:
            seg["owner"][i] = OWNED
            seg["hop"][i] = names[owner]
            to_hop = bool(seg["to_hop"][i] >= 0)
            edges.add((names[owner], int(seg["to_hop"][i] if to_hop else seg["engine"][i]), to_hop))
        elif owner is not None:
            seg["owner"][i] = FOREIGN
    no_hops = [inode for inode, owner in owners.items() if owner not in names]
    strangers = now.rows["cookie"][np.isin(now.rows["inode"], no_hops)]
    foreign = np.union1d(np.union1d(state.foreign, strangers), seg["carrier"][seg["owner"] == FOREIGN])
    return seg, foreign, frozenset(edges)


@dataclass(frozen=True, slots=True)
class _Carriers:
    """Per socket row: is it a carrier, does it belong to the engine itself, how much question and answer it carried.

    ``early``: the newest answer byte came right after the newest question, as a header does. ``waiting``: a question
    was sent and its answer, other than a header, has not begun. ``asked``: any question was ever sent.
    """

    is_carrier: NDArray[np.bool_]
    direct: NDArray[np.bool_]
    d_question: NDArray[np.int64]
    d_answer: NDArray[np.int64]
    answer: NDArray[np.int64]
    early: NDArray[np.bool_]
    waiting: NDArray[np.bool_]
    asked: NDArray[np.bool_]


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

    d_question = np.where(direct, now.d_received, now.d_sent)
    d_answer = np.where(direct, now.d_written, now.d_received)
    answer = np.where(direct, now.track["written"], now.track["received"])
    question_age = np.where(direct, rows["last_data_recv"], rows["last_data_sent"])
    answer_age = np.where(direct, rows["last_data_sent"], rows["last_data_recv"])
    # A question of this beat may have its header already. An older one with a small early answer looks the same as a
    # poll that was answered at once: that is for :func:`_at_rest` to tell.
    early = answer_age >= question_age - 1e3 * HEADER_SECONDS
    recent = ~now.known | (d_question > 0)
    small = np.where(now.known, d_answer, answer) <= HEADER_MOST
    waiting = (question_age < answer_age) | (recent & early & small) | (question_age < 0)
    asked = np.where(direct, rows["bytes_received"], rows["bytes_sent"]) != 0
    return _Carriers(upstream | direct, direct, d_question, d_answer, answer, early, waiting & asked, asked)


def _grow(
    seg: Segments,
    now: Tracked,
    carriers: _Carriers,
    engine_side: NDArray[np.bool_],
    before: float,
    at: float,
    *,
    events: bool,
) -> tuple[Segments, NDArray[np.int64]]:
    """Add what arrived to the streams in flight; end those whose socket is destroyed or carries a new request.

    Returns also, for each socket, how much of what arrived on it is taken.
    """
    rows = now.find(seg["carrier"])
    here = rows >= 0
    state = now.rows["state"][rows]
    closing = here & ~now.ended[rows] & ((state == FIN_WAIT1) | ((state == CLOSE_WAIT) & ~carriers.direct[rows]))
    flying = np.isnan(seg["ended"])
    arrived = np.where(flying, carriers.d_answer[rows], 0)
    arrived = np.where(closing & (arrived == 1), 0, arrived)  # the peer's FIN counts as a byte
    # A socket that its own process reset (HAProxy does) is wiped before its end is told. The engine's end is not.
    ends = now.rows[now.ended & engine_side]
    keys = connection_keys(ends)
    order = np.argsort(keys)
    far = locate(keys[order], seg["far_end"])
    told = flying & ~here & (far >= 0)
    if told.any():
        end = ends[order][far[told]]
        total = np.minimum(end["bytes_acked"], end["bytes_sent"]) - seg["base_up"][told]
        arrived[told] = np.maximum(total - seg["supply"][told], 0)
    spoken = (seg["supply"] > 0) | ~np.isnan(seg["answered"])
    asked_again = flying & here & spoken & (carriers.d_question[rows] > 0)
    asked_again &= now.track["asked"][rows] > seg["asked"] + 0.1
    # Of what came since the beat before, the old answer has what came before the new question, by time.
    share = np.clip((now.track["asked"][rows] - before) / max(at - before, 1e-9), 0, 1)
    arrived = np.where(asked_again & ~carriers.early[rows], np.round(arrived * share).astype(np.int64), arrived)

    before_ = body(seg)
    seg["supply"] += arrived
    seg["arrived"] = arrived
    mute = flying & np.isnan(seg["answered"])
    header = mute & here & ~now.ended[rows] & carriers.early[rows] & (seg["supply"] <= HEADER_MOST)
    seg["header"] = np.where(header, seg["supply"], seg["header"])
    seg["fresh"] += body(seg) - before_
    first = mute & (arrived > 0) & ~header
    seg["answered"] = np.where(first, at, seg["answered"])
    seg["grew"] = np.where(arrived > 0, at, seg["grew"])

    # A dump is not atomic, and the event of a socket's end may come a moment after the socket is gone.
    missed = flying & (~here | closing | now.ended[rows])
    down = now.find(seg["down"])
    both = (seg["down"] > 0) & ((down < 0) | now.ended[down])
    over = missed & (here | told | both | ~events | ~np.isnan(seg["missed"]))
    seg["missed"] = np.where(missed, np.where(np.isnan(seg["missed"]), at, seg["missed"]), np.nan)
    seg["ended"] = np.where((over | asked_again) & flying, at, seg["ended"])
    # A request that came in pieces is complete with its last one.
    still_asking = here & flying & (seg["supply"] == 0) & ~now.ended[rows]
    seg["asked"] = np.where(still_asking, now.track["asked"][rows], seg["asked"])
    taken = np.zeros(len(now.rows), dtype=np.int64)
    taken[rows[here]] = arrived[here]
    return seg, taken


def _learn_headers(seg: Segments, headers: NDArray[np.int64], at: float) -> NDArray[np.int64]:
    """Note the size of the header that an engine sent before the tokens that came now."""
    headers = headers.copy()
    told = (seg["answered"] == at) & (seg["header"] > 0) & (seg["engine"] >= 0)
    headers[seg["engine"][told]] = seg["header"][told]
    return headers


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
    carrying = locate(np.sort(seg["carrier"][np.isnan(seg["ended"])]), rows["cookie"]) >= 0
    replaced = locate(np.sort(seg["carrier"][seg["ended"] == at]), rows["cookie"]) >= 0

    new = ~now.known & carriers.asked
    if first_beat:  # an old connection that is quiet after an answer is at rest
        new &= carriers.waiting | (now.track["grew"] > at - 1.5 * state.topology.interval)
    after_stream = locate(np.sort(seg["carrier"][(seg["ended"] == at) & ~seg["trial"]]), rows["cookie"]) >= 0
    waiting = carriers.waiting | (after_stream & carriers.early)
    asks = waiting | (carriers.d_question > 0)
    resumes = (carriers.d_answer > 1) & ~replaced  # 1: the peer's FIN
    begin = carriers.is_carrier & ~carrying & (new | (now.known & ~now.ended & (asks | resumes)))
    begin &= (rows["state"] == ESTABLISHED) | (now.ended & ~now.known)

    at_rows = np.flatnonzero(begin)
    born = np.zeros(len(at_rows), dtype=SEGMENT)
    answer = np.maximum(carriers.answer[at_rows], 0)
    # Answer bytes of this beat are the new stream's, less what a stream that ended in this beat has taken.
    base = answer - carriers.d_answer[at_rows] + taken[at_rows]
    if first_beat:
        base = answer
    born["id"] = state.next_id + np.arange(len(at_rows))
    born["carrier"] = rows["cookie"][at_rows]
    born["far_end"] = connection_keys(rows[at_rows], reverse=True)
    direct = carriers.direct[at_rows]
    born["down"] = np.where(direct, born["carrier"], 0)
    born["hop"] = np.where(direct, len(state.topology.hops), -1)
    born["to_hop"] = np.where(direct, -1, side.to_hop[at_rows])
    born["engine"] = np.where(direct, side.engine_side[at_rows], side.to_engine[at_rows])
    born["owner"] = np.where(direct, OWNED, UNKNOWN_OWNER)
    born["asked"] = now.track["asked"][at_rows]
    born["born"] = at
    born["base_up"] = base
    born["supply"] = born["arrived"] = answer - base
    waiting = waiting[at_rows] & (born["supply"] <= HEADER_MOST)
    known_header = headers[born["engine"]] if len(headers) else 0
    born["header"] = np.where(waiting, born["supply"], np.where(born["engine"] >= 0, known_header, 0))
    born["fresh"] = np.where(waiting, 0, body(born))
    born["answered"] = np.where(waiting, np.nan, at)
    born["grew"] = now.track["grew"][at_rows]
    born["grew"] = np.where(born["supply"] > 0, at, born["grew"])
    born["missed"] = np.nan
    born["ended"] = np.where(now.ended[at_rows], at, np.nan)
    born["gone"] = np.nan
    born["lag"] = np.nan
    born["client"] = UNSEEN
    header_like = (born["supply"] == 0) | (born["supply"] == known_header)
    born["trial"] = ~(waiting & header_like)
    return np.concatenate([seg, born]), state.next_id + len(at_rows)


def _find_clients(
    seg: Segments,
    now: Tracked,
    side: Sides,
    edges: frozenset[tuple[int, int, bool]],
    ratio: NDArray[np.float64],
    at: float,
    blur: float,
) -> None:
    """Give each upstream request its client-facing socket: by the request instant, then by who moves with whom."""
    for hop in np.unique(side.down[side.down >= 0]):
        mine = (seg["hop"] == hop) | (seg["hop"] == UNSEEN)
        targets = [(target, "to_hop" if is_hop else "engine") for h, target, is_hop in edges if h == hop]
        mine &= np.any([seg[column] == target for target, column in targets], axis=0) if targets else False
        # First with the clients of before, for those that have closed by now still tell whose they were.
        _sort_out(seg, now, mine, int(hop), ratio, at, blur)
        _claim_closed(seg, now, side, mine, int(hop), ratio, at)
        _pair_free(seg, now, side, mine, int(hop), at, blur)
        _sort_out(seg, now, mine, int(hop), ratio, at, blur)
        burst = _burst(seg, now, mine, int(hop), ratio, at)
        left = burst.rows[burst.over & burst.hungry]  # it ran to its end for somebody who was gone
        seg["down"][left], seg["client"][left], seg["gone"][left] = 0, GONE, at


def _claim_closed(
    seg: Segments,
    now: Tracked,
    side: Sides,
    mine: NDArray[np.bool_],
    hop: int,
    ratio: NDArray[np.float64],
    at: float,
) -> None:
    """Give clients that came and went within one beat, or lost their stream to a wrong guess, the stream whose bytes
    they got. Their instants are not known, but the amount of a whole answer is."""
    loose = (side.down == hop) & now.ended & (locate(np.unique(seg["down"]), now.rows["cookie"]) < 0)
    per_byte = ratio[hop, 1] / ratio[hop, 0]
    got = (now.track["written"] - now.track["begun"]) * per_byte
    clients = np.flatnonzero(loose & (got > HEADER_MOST))
    burst = _burst(seg, now, mine, hop, ratio, at)
    asking = np.flatnonzero(~burst.mute & (burst.hungry | (seg["down"][burst.rows] == 0)))
    if len(clients) and len(asking):
        anytime = np.zeros(max(len(asking), len(clients)))
        up = Amounts(burst.came_up[asking], burst.came_lately[asking], anytime[: len(asking)])
        down = Amounts(got[clients], now.d_written[clients] * per_byte, anytime[: len(clients)])
        pairs = by_volume(up, down, tolerance=0.0)
        for i, j in pairs:
            _join(seg, burst.rows[asking[i]], now, clients[j], hop)


def _pair_free(
    seg: Segments, now: Tracked, side: Sides, mine: NDArray[np.bool_], hop: int, at: float, blur: float
) -> None:
    """Pair the streams of a hop that have no client with its clients that have no stream."""
    flying = np.isnan(seg["ended"])
    fresh_end = seg["ended"] == at
    rows = now.find(seg["down"])
    listens = ~now.ended[rows] & (now.rows["state"][rows] == ESTABLISHED)
    needy = mine & ~listens & (seg["carrier"] != seg["down"]) & (flying | (fresh_end & (seg["down"] == 0)))
    # A client that closes having got what its stream brought was its client: it left, or had everything.
    got = now.track["written"][rows] - now.track["begun"][rows]
    settled = now.ended[rows] & (rows >= 0) & ~np.isnan(seg["answered"]) & (got > HEADER_MOST)
    needy &= ~(settled & (np.abs(got - seg["supply"]) <= 0.1 * seg["supply"] + 2 * HEADER_MOST))

    # Free is a client without a stream that waits for an answer or is getting one. One whose stream is over does
    # neither, and must not be taken for the client of another stream of the same burst.
    asks_the_same = np.abs(now.track["asked"][rows] - seg["asked"]) <= 2 * SAME_INSTANT + blur
    held = listens & (flying | (fresh_end & asks_the_same))
    busy = locate(np.unique(seg["down"][held]), now.rows["cookie"]) >= 0
    waits = now.rows["last_data_sent"] >= now.rows["last_data_recv"] - 1e3 * HEADER_SECONDS
    free = (side.down == hop) & ~now.ended & ~busy & (now.rows["bytes_received"] != 0)
    free &= (~now.known | waits | (now.d_written > 0)) & ((now.rows["state"] == ESTABLISHED) | ~now.known)

    wanting, candidates = np.flatnonzero(needy), np.flatnonzero(free)
    if len(wanting) and len(candidates):
        matches = pair(
            Requests(
                seg["asked"][wanting],
                now.rows["inode"][now.find(seg["carrier"][wanting])],
                ~np.isnan(seg["answered"][wanting]),
                (seg["down"][wanting] == 0) & ~seg["trial"][wanting],
            ),
            Requests(
                now.track["asked"][candidates],
                now.rows["inode"][candidates],
                ~waits[candidates],
                now.known[candidates],
            ),
            tolerance=SAME_INSTANT + blur,
        )
        for i, j in matches:
            _join(seg, wanting[i], now, candidates[j], hop)
    _share(seg, now, side, hop, needy, blur)


def _join(seg: Segments, i: np.intp, now: Tracked, row: np.intp, hop: int) -> None:
    """Write the pair down: stream ``i`` has the client on socket ``row`` of ``hop``."""
    seg["down"][i] = now.rows["cookie"][row]
    seg["hop"][i] = hop
    seg["owner"][i] = OWNED
    seg["trial"][i] = False
    seg["gone"][i] = np.nan
    seg["client"][i] = CONNECTED
    seg["acked"][i] = 0
    seg["lag"][i] = np.nan


def _share(seg: Segments, now: Tracked, side: Sides, hop: int, needy: NDArray[np.bool_], blur: float) -> None:
    """Several requests on one client socket (HTTP/2): the kernel tells the newest one's instant, so find those."""
    alone = np.flatnonzero(needy & (seg["down"] == 0) & np.isnan(seg["ended"]))
    if not len(alone):
        return
    busy = locate(np.sort(seg["down"][np.isnan(seg["ended"])]), now.rows["cookie"]) >= 0
    asking = (side.down == hop) & ~now.ended & (now.rows["state"] == ESTABLISHED) & now.known & (now.d_received > 1)
    sockets = np.flatnonzero(asking & busy)
    for i in alone if len(sockets) else ():
        gap = np.abs(now.track["asked"][sockets] - seg["asked"][i])
        if gap.min() <= SAME_INSTANT + blur:
            row = sockets[gap.argmin()]
            _join(seg, i, now, row, hop)
            seg["shared"] |= seg["down"] == now.rows["cookie"][row]


def _sort_out(
    seg: Segments, now: Tracked, mine: NDArray[np.bool_], hop: int, ratio: NDArray[np.float64], at: float, blur: float
) -> None:
    """Correct the pairs of requests that came in one burst, where instants alone did not tell whose client is whose.

    ====================================================  ====================================================
    what contradicts the pair                             what is exchanged
    ====================================================  ====================================================
    a waiting stream ended, its client is still there;    their clients: the proxy closed both sides of one
    another waits on, and its client is gone
    the client got other amounts than its stream          clients between streams, so that amounts agree
    a client that closed had got what its stream did not  clients, so that it had a stream that brought as much or more
    more arrived than any proxy holds back, and the       the client goes to a stream that waits without one;
    client never got a token                              if there is none and the stream is over: it had left
    ====================================================  ====================================================
    """
    tolerance = 2 * SAME_INSTANT + blur
    for rule in (_cut_together, _by_amount, _left_midway, _never_fed):
        burst = _burst(seg, now, mine, hop, ratio, at)
        if len(burst.rows) < 2:
            return
        for a, b in rule(burst, tolerance):
            both = np.array([burst.rows[a], burst.rows[b]])
            for column in ("down", "acked", "client", "gone"):
                seg[column][both] = seg[column][both[::-1]]
            # Measured anew: what came, less what this client had acknowledged, both as of the beat before.
            came = seg["supply"][both] - seg["arrived"][both]
            seg["lag"][both] = came - seg["acked"][both] * ratio[hop, 1] / ratio[hop, 0]
            seg["level"][both] = 0.0
            seg["hop"][both], seg["owner"][both], seg["trial"][both] = hop, OWNED, False


@dataclass(frozen=True, slots=True)
class _Burst:
    """The streams of one hop, with their clients, as far as pairs can be confused. ``rows`` are rows of the segments.

    ``there``: the client is connected. ``waits``: it got no more than a header. ``mute``: its stream brought no more.
    ``over``: its stream's carrier has closed. ``amiss``: amounts differ by more than framing and what is under way.
    ``hungry``: more came than any proxy holds back, and it got nothing.
    """

    rows: NDArray[np.intp]
    asked_up: NDArray[np.float64]
    asked_down: NDArray[np.float64]
    came_up: NDArray[np.float64]
    came_lately: NDArray[np.float64]
    went_down: NDArray[np.float64]
    went_lately: NDArray[np.float64]
    seen: NDArray[np.bool_]
    there: NDArray[np.bool_]
    waits: NDArray[np.bool_]
    mute: NDArray[np.bool_]
    over: NDArray[np.bool_]
    amiss: NDArray[np.bool_]
    hungry: NDArray[np.bool_]


def _burst(
    seg: Segments, now: Tracked, mine: NDArray[np.bool_], hop: int, ratio: NDArray[np.float64], at: float
) -> _Burst:
    over = (seg["ended"] == at) | (np.isnan(seg["ended"]) & ~np.isnan(seg["missed"]))
    rows = np.flatnonzero(mine & (np.isnan(seg["ended"]) | over) & ~seg["shared"] & (seg["carrier"] != seg["down"]))
    some, down = seg[rows], now.find(seg["down"][rows])
    track = now.track[down]
    seen = down >= 0
    there = seen & ~now.ended[down] & (now.rows["state"][down] == ESTABLISHED)
    per_byte = ratio[hop, 1] / ratio[hop, 0]
    went_down = np.where(seen, track["written"] - track["begun"], 0) * per_byte
    waits = went_down <= HEADER_MOST
    came_up = some["supply"].astype(np.float64)
    return _Burst(
        rows=rows,
        asked_up=some["asked"],
        asked_down=track["asked"],
        came_up=came_up,
        came_lately=some["arrived"].astype(np.float64),
        went_down=went_down,
        went_lately=np.where(seen, now.d_written[down], 0) * per_byte,
        seen=seen,
        there=there,
        waits=waits,
        mute=np.isnan(some["answered"]),
        over=over[rows],
        amiss=np.abs(went_down - came_up) > 0.1 * np.maximum(went_down, came_up) + 2 * HEADER_MOST,
        hungry=there & waits & (some["acked"] <= HEADER_MOST) & (some["supply"] > HELD_BACK),
    )


def _cut_together(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    cut = np.flatnonzero(burst.over & burst.mute & burst.there & burst.waits)
    left = np.flatnonzero(~burst.over & burst.mute & ~burst.there)
    for i, j in in_order(burst.asked_up[left], burst.asked_down[cut], tolerance):
        yield cut[j], left[i]


def _by_amount(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    fed, flowing = burst.amiss & burst.seen & ~burst.waits, burst.amiss & ~burst.mute
    yield from _as_amounts_agree(burst, fed, flowing, tolerance, partly=False)


def _left_midway(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    closed = burst.amiss & burst.seen & ~burst.waits & burst.mute & ~burst.there
    yield from _as_amounts_agree(burst, closed, burst.amiss & ~burst.mute & burst.waits, tolerance, partly=True)


def _as_amounts_agree(
    burst: _Burst, clients: NDArray[np.bool_], streams: NDArray[np.bool_], tolerance: float, *, partly: bool
) -> Iterator[tuple[np.intp, np.intp]]:
    fed, flowing = np.flatnonzero(clients), np.flatnonzero(streams)
    up = Amounts(burst.came_up[flowing], burst.came_lately[flowing], burst.asked_up[flowing])
    down = Amounts(burst.went_down[fed], burst.went_lately[fed], burst.asked_down[fed])
    pairs = by_volume(up, down, tolerance=tolerance, partly=partly)
    holder = {int(row): int(row) for row in fed}  # which stream has the client that this one had at first
    for i, j in pairs:
        stream, client = int(flowing[i]), int(fed[j])
        if holder[client] != stream:
            yield np.intp(holder[client]), np.intp(stream)
            moved = next((at_first for at_first, now_at in holder.items() if now_at == stream), None)
            if moved is not None:
                holder[moved] = holder[client]
            holder[client] = stream


def _never_fed(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    hungry = np.flatnonzero(burst.hungry)
    lonely = np.flatnonzero(~burst.over & burst.mute & ~burst.there)
    for i, j in in_order(burst.asked_up[lonely], burst.asked_down[hungry], tolerance):
        yield hungry[j], lonely[i]


def _at_rest(
    seg: Segments,
    now: Tracked,
    inner: NDArray[np.intp],
    engines: Mapping[int, InEngine],
    headers: NDArray[np.int64],
    at: float,
    interval: float,
) -> Segments:
    """End the streams that have finished on a socket that stays (the table in this module's docstring)."""
    flying = np.isnan(seg["ended"])
    mute = np.isnan(seg["answered"])
    counted = flying & np.isnan(seg["missed"])  # the others are closing
    answered = counted & (seg["supply"] > 0)  # if only by what may be a header, or all of a small answer
    carrier = now.rows[now.find(seg["carrier"])]
    answer_age = np.where(seg["carrier"] == seg["down"], carrier["last_data_sent"], carrier["last_data_recv"])
    silence = np.where(answer_age >= 0, answer_age / 1e3, at - seg["grew"])
    quiet = answered & (silence >= 0.9 * interval) & (seg["grew"] < at)
    question_age = np.where(seg["carrier"] == seg["down"], carrier["last_data_recv"], carrier["last_data_sent"])
    at_once = answer_age >= question_age - 1e3 * HEADER_SECONDS

    rows = now.find(seg["down"])
    moved_on = (rows >= 0) & (seg["carrier"] != seg["down"]) & ~seg["shared"]
    moved_on &= now.track["asked"][rows] > seg["grew"]
    carried_on = (inner >= 0) & flying[inner]
    over = quiet & (moved_on | (seg["trial"] & ~mute) | ((seg["to_hop"] >= 0) & ~carried_on))

    # A header of the size that this engine is known to send belongs to a stream that waits; an answer that is as small
    # and is not that is likely a poll.
    known_header = headers[seg["engine"]] if len(headers) else np.zeros(len(seg), dtype=np.int64)
    as_known = mute & (known_header > 0) & (seg["supply"] == known_header)
    just_closed = (seg["down"] > 0) & np.isnan(seg["gone"]) & ((rows < 0) | now.ended[rows])
    cut = just_closed & now.ended[now.find(seg["carrier"])]  # both sides at once: finished, or not
    just_closed &= ~mute | ((known_header > 0) & ~as_known)  # a stream that waits has not finished
    rank = np.where(as_known, 0.0, silence + SAME_INSTANT * just_closed)
    rank += np.where(mute & ~as_known & (known_header > 0), 1e6, 0.0) + np.where(mute & (seg["down"] == 0), 1e3, 0.0)

    denied = seg["no_room"].copy()
    seg["no_room"] = False
    undecided = answered & ~over & (seg["engine"] >= 0)
    for engine in np.unique(seg["engine"][undecided]):
        mine = np.flatnonzero(undecided & (seg["engine"] == engine))
        if engine not in engines:
            over[mine] = quiet[mine] & (silence[mine] > QUIET_PATIENCE)
            continue
        here = (seg["engine"] == engine) & ~seg["trial"]
        room = max(int(engines[engine].requests) - int((here & counted & ~answered).sum()), 0)
        by_rank = mine[np.argsort(rank[mine], kind="stable")]
        no_room = by_rank[room:]
        # Twice for those that are merely quiet: the page is read after the sockets, and may know of an end elsewhere.
        over[no_room] = (quiet[no_room] & denied[no_room]) | just_closed[no_room]
        seg["no_room"][no_room] = True
        # There is room for this one, and was in the beat before, or for all: it is what the engine counts. Unless its
        # answer came at once, as that of a poll does: then only more of it will tell.
        fits, poll_like = by_rank[:room], at_once & ~mute
        crowded = bool((~poll_like[no_room]).any())
        seg["trial"][fits] &= ((seg["born"][fits] >= at) & crowded) | poll_like[fits]
        # The engine finished more than we saw end: the longest silent of these, without waiting for another beat.
        unexplained = int(engines[engine].finished) - int((here & (over | (seg["ended"] == at)) & ~cut).sum())
        silent = no_room[(silence[no_room] >= SILENT_SECONDS) & ~over[no_room]]
        over[silent[::-1][: max(unexplained, 0)]] = True
    seg["ended"] = np.where(over, at, seg["ended"])
    return seg


def _await_clients(seg: Segments, now: Tracked, engines: Mapping[int, InEngine], at: float) -> None:
    """Put off the end of streams whose upstream closed while their client is still there, for one beat, unless the
    engine finished as many: the client may be closing at this moment, and then it had left."""
    down = now.find(seg["down"])
    there = (down >= 0) & ~now.ended[down] & (now.rows["state"][down] == ESTABLISHED) & (seg["carrier"] != seg["down"])
    doubtful = (seg["ended"] == at) & (seg["missed"] == at) & there & (seg["engine"] >= 0)
    for engine in np.unique(seg["engine"][doubtful]):
        mine = doubtful & (seg["engine"] == engine)
        if engine in engines and int(mine.sum()) > engines[engine].finished:
            seg["ended"][mine] = np.nan


def _believe_brief(
    seg: Segments, engines: Mapping[int, InEngine], edges: frozenset[tuple[int, int, bool]], at: float
) -> None:
    """Take what came and went within one beat for streams, the longest answers first, as far as the engine finished
    more requests than we saw end. The others were polls."""
    over = (seg["ended"] == at) & (seg["engine"] >= 0)
    brief = over & seg["trial"] & (seg["born"] == at) & ~np.isnan(seg["answered"])
    for engine in np.unique(seg["engine"][brief]):
        mine = seg["engine"] == engine
        if engine in engines:
            unexplained = int(engines[engine].finished) - int((over & mine & ~seg["trial"]).sum())
            longest = np.flatnonzero(brief & mine)[np.argsort(-seg["supply"][brief & mine], kind="stable")]
            believed = longest[: max(unexplained, 0)]
            seg["trial"][believed] = False
            # Nobody saw its client. It was answered to the end, so it is taken for one that stayed.
            alone = believed[seg["down"][believed] == 0]
            hops = [hop for hop, target, is_hop in sorted(edges) if target == engine and not is_hop]
            if hops:
                seg["client"][alone], seg["hop"][alone] = CONNECTED, hops[0]


def _own(seg: Segments, at: float) -> Segments:
    """Decide about upstream requests that never had a client: the hop's orphan, or not known."""
    flying = np.isnan(seg["ended"])
    alone = flying & (seg["down"] == 0) & (seg["owner"] == OWNED)
    mixed = np.unique(seg["hop"][seg["shared"] & flying])
    alone &= ~np.isin(seg["hop"], mixed)  # with HTTP/2 clients at this hop, "no socket of its own" proves nothing
    left = alone & (at - seg["asked"] > NEVER_PAIRED_SECONDS)
    seg["client"] = np.where(left, GONE, seg["client"])
    seg["gone"] = np.where(left & np.isnan(seg["gone"]), at, seg["gone"])
    # What keeps answering without being asked again is a stream, not a poll.
    seg["trial"] &= ~((seg["grew"] == at) & (seg["born"] < at) & flying)
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
        leaks_at[linked] = np.where(leaks_at[before] >= 0, leaks_at[before], leaks_at[linked])
    return Path(first, leaks_at, client, inner)


def _deliver(seg: Segments, path: Path, now: Tracked, ratio: NDArray[np.float64]) -> tuple[Segments, NDArray[Any]]:
    """Measure how far each client is behind: what arrived for it and is not acknowledged, in upstream bytes."""
    top = seg[path.first]
    hop = np.where(top["hop"] >= 0, top["hop"], len(ratio) - 1)
    direct = seg["carrier"] == seg["down"]
    down = now.find(top["down"])
    arrived, d_acked = seg["arrived"], now.d_acked[down]

    # Headers differ by an unknown constant, and chunks are re-framed. So while the client is there the smallest lag is
    # taken for "all delivered" and may drift a little; on the engine's own socket both sides are the same bytes.
    seen = top["down"] > 0
    first = np.isnan(seg["lag"])
    listening = (path.client >= 0) & (path.client < VANISHED)
    seg["lag"] = np.where(first & seen, 0.0, seg["lag"] + arrived - d_acked * ratio[hop, 1] / ratio[hop, 0])
    drift = np.where(direct, 0.0, REFRAMING * arrived)
    level = np.where(listening, np.minimum(seg["lag"], seg["level"] + drift), seg["level"])
    seg["level"] = np.where(first, 0.0, level)
    everything = body(seg)
    seg["behind"] = np.where(seen, np.clip(seg["lag"] - seg["level"], 0, everything), everything)

    # What has ended is settled when all was acknowledged, or its client is gone; until then the kernel still delivers.
    undelivered = ~now.ended[down] & (now.rows["wqueue"][down] > 0) & (seg["behind"] > 0)
    seg["draining"] = ~np.isnan(seg["ended"]) & listening & undelivered & (seg["engine"] >= 0)

    # Pairs of one burst may still be confused: believe a pair that agrees with what is known, and all pairs of a hop
    # where nobody left, for then confusion does not change the sums.
    drained = (now.rows["wqueue"][down] == 0) & (path.client == CONNECTED) & ~direct & ~top["shared"]
    flows = drained & (d_acked > 0) & (arrived > 0)
    expected = arrived * ratio[hop, 0] / ratio[hop, 1]
    agrees = np.abs(d_acked - expected) <= 0.3 * expected
    calm = ~np.isin(hop, np.unique(hop[(path.client != CONNECTED) & ~direct]))
    flows &= agrees | calm
    ratio = ratio.copy()
    np.add.at(ratio, (hop[flows], 0), d_acked[flows])
    np.add.at(ratio, (hop[flows], 1), arrived[flows])
    return seg, ratio


def _held(seg: Segments, now: Tracked, side: Sides, at: float, interval: float) -> Held:
    """Find the requests that wait inside a hop: asked, nothing sent back, and no stream carries them on."""
    rows = now.rows
    asks = (side.down >= 0) & ~now.ended & (rows["state"] == ESTABLISHED) & (rows["bytes_received"] > 0)
    asks &= (rows["last_data_recv"] >= 0) & (rows["last_data_recv"] <= rows["last_data_sent"])
    asks &= at - now.track["asked"] >= interval
    served = locate(np.sort(seg["down"][np.isnan(seg["ended"])]), rows["cookie"]) >= 0
    waiting = np.flatnonzero(asks & ~served)
    still = at - now.track["moved"][waiting]
    states = client_states(Downstream(rows[waiting], still, np.zeros(len(waiting)), interval))
    return Held(side.down[waiting], now.track["asked"][waiting], states, rows[waiting])
