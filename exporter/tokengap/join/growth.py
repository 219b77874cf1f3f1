"""What the answers' sockets brought since the beat before, and which request it is of.

A connection that is kept carries one request after the other, and several of them come and go within a beat. What the
kernel tells are sums, and the ages of the newest byte each way; whose bytes they are follows from these, from how long
the engine's headers are, and from what each client got.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import GONE
from tokengap.join.segments import (
    HEADER_MOST,
    HEADER_SECONDS,
    HEADER_SLIP,
    SAME_INSTANT,
    Segments,
    body,
    got_more_than_came,
    headers_of,
    passed_by,
    seems_over,
)
from tokengap.join.sockets import Sides, Tracked, ages, caller_keys, connection_keys, locate, locate_among, on_this_host
from tokengap.readings import CLOSE_WAIT, FIN_WAIT1

#: Seconds after a question from which on what is sent is another one, if an answer came in between.
ANOTHER = 0.1

#: How many of an engine's headers are remembered.
HEADERS_KEPT = 32


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of the beat before: its sockets, its instant, what a hop's bytes were worth."""

    track: NDArray[np.void] | None
    at: float
    ratio: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Carriers:
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


def find_carriers(
    now: Tracked, side: Sides, foreign: NDArray[np.uint64], edges: frozenset[tuple[int, int, bool]]
) -> Carriers:
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
    return Carriers(upstream | direct, direct, d_question, d_answer, answer, early, waiting & asked, asked, cut)


def grow(
    before: Before,
    seg: Segments,
    now: Tracked,
    carriers: Carriers,
    engine_side: NDArray[np.bool_],
    headers: NDArray[np.int64],
    at: float,
    *,
    events: bool,
) -> tuple[Segments, NDArray[np.int64]]:
    """Add what arrived to the streams in flight; end those whose socket is destroyed or carries a new request.

    Returns also, for each socket, how much of what arrived on it is taken.
    """
    rows = now.find(seg["carrier"])
    here, flying, mute = rows >= 0, np.isnan(seg["ended"]), np.isnan(seg["answered"])
    tcp = now.rows["state"][rows]
    closing = here & ~now.ended[rows] & ((tcp == FIN_WAIT1) | ((tcp == CLOSE_WAIT) & ~carriers.direct[rows]))
    came = _came(before, seg, now, carriers, engine_side)
    arrived = np.where(closing & (came.answer == 1), 0, came.answer)  # the peer's FIN counts as a byte
    came = replace(came, answer=arrived)
    header = headers_of(seg, headers)
    most = np.where(header > 0, 2 * header, HEADER_MOST)
    unseen = flying & mute & passed_by(seg)
    asked_again = _asked_again(before, seg, now, came, unseen, arrived > most, at)
    # A poll's answer came at once, as the next one's did now.
    at_once = unseen | (mute & (seg["supply"] <= most) & (header > 0) & carriers.early[rows])
    poll = asked_again & at_once & (arrived <= most)
    if asked_again.any():
        old = _of_the_old(before, seg, now, carriers, arrived, header, at)
        arrived = np.where(poll, 0, np.where(asked_again, old, arrived))
    seg["trial"] |= poll

    already = body(seg)
    seg["supply"] += arrived
    seg["arrived"] = arrived
    alone = flying & mute & here & ~now.ended[rows] & ~asked_again & carriers.early[rows] & (seg["supply"] <= most)
    seg["header"] = np.where(alone, seg["supply"], seg["header"])
    seg["fresh"] += body(seg) - already
    seg["answered"] = np.where(flying & mute & (arrived > 0) & ~alone, at, seg["answered"])
    seg["grew"] = np.where(arrived > 0, at, seg["grew"])

    # A dump is not atomic, and the event of a socket's end may come a moment after the socket is gone.
    missed = flying & (~here | closing | now.ended[rows])
    down = now.find(seg["down"])
    both = (seg["down"] > 0) & ((down < 0) | now.ended[down])
    over = missed & (here | came.told | both | ~events | ~np.isnan(seg["missed"]))
    seg["missed"] = np.where(missed, np.where(np.isnan(seg["missed"]), at, seg["missed"]), np.nan)
    seg["ended"] = np.where((over | asked_again) & flying, at, seg["ended"])
    seg["reused"] |= asked_again
    # A request that came in pieces is complete with its last one.
    still_asking = here & flying & (seg["supply"] == 0) & ~now.ended[rows] & ~asked_again
    seg["asked"] = np.where(still_asking, now.track["asked"][rows], seg["asked"])
    taken = np.zeros(len(now.rows), dtype=np.int64)
    taken[rows[here]] = arrived[here]
    return seg, taken


@dataclass(frozen=True, slots=True)
class _Came:
    """What moved on the carrier of each stream: bytes of questions and of answers. ``told``: by its other end."""

    question: NDArray[np.int64]
    answer: NDArray[np.int64]
    told: NDArray[np.bool_]


def _came(before: Before, seg: Segments, now: Tracked, carriers: Carriers, engine_side: NDArray[np.bool_]) -> _Came:
    rows, flying = now.find(seg["carrier"]), np.isnan(seg["ended"])
    question = carriers.d_question[rows]
    answer = np.where(flying, carriers.d_answer[rows], 0)
    # A socket that its own process reset (HAProxy does) is wiped before its end is told. The engine's end is not.
    ends = now.rows[now.ended & engine_side]
    far = locate_among(connection_keys(ends), seg["far_end"])
    told = flying & (rows < 0) & (far >= 0)
    if told.any() and before.track is not None:
        end = ends[far[told]]
        past = before.track[locate(before.track["cookie"], seg["carrier"][told])]
        sent = np.where(past["cookie"] == seg["carrier"][told], past["sent"], end["bytes_received"])
        question[told] = end["bytes_received"] - sent
        total = np.minimum(end["bytes_acked"], end["bytes_sent"]) - seg["base_up"][told]
        answer[told] = np.maximum(total - seg["supply"][told], 0)
    return _Came(question, answer, told)


def _asked_again(
    before: Before,
    seg: Segments,
    now: Tracked,
    came: _Came,
    unseen: NDArray[np.bool_],
    much: NDArray[np.bool_],
    at: float,
) -> NDArray[np.bool_]:
    """Mark the streams whose carrier brought another question.

    More than a header (``much``) is an answer, as is anything to a question that stood for a while, and one that was
    given to the request before it (``unseen``). What was asked after it is another question.
    """
    rows = now.find(seg["carrier"])
    flying, answered = np.isnan(seg["ended"]), ~np.isnan(seg["answered"])
    stood = seg["asked"] < before.at - (at - before.at) / 2
    spoken = (seg["supply"] > 0) | answered | much | ((came.answer > 0) & stood) | unseen
    # Of a socket that is destroyed the instant is not known, and a FIN counts as a byte.
    destroyed = now.ended[rows] | came.told
    later = np.where(destroyed, came.question > 1, now.track["asked"][rows] > seg["asked"] + ANOTHER)
    asked = flying & ((rows >= 0) | came.told) & (came.question > 0)
    return np.asarray(asked & later & spoken, dtype=np.bool_)


def _of_the_old(
    before: Before,
    seg: Segments,
    now: Tracked,
    carriers: Carriers,
    arrived: NDArray[np.int64],
    known_header: NDArray[np.int64],
    at: float,
) -> NDArray[np.int64]:
    """Return how much of what arrived is of each answer, and not of the one to a new question on its carrier.

    As much as its client got, where that is told: one that asks nothing new, that closed just now, or that had closed
    when it lacked nothing. Else what came before the new question, by time.
    """
    rows, down = now.find(seg["carrier"]), now.find(seg["down"])
    asked = now.track["asked"][rows]
    share = np.clip((asked - before.at) / max(at - before.at, 1e-9), 0, 1)
    by_time = np.where(carriers.early[rows], arrived, np.round(arrived * share)).astype(np.int64)

    track, ended = now.track[down], now.ended[down]
    alone = (track["asked"] <= seg["asked"] + 2 * SAME_INSTANT) | (track["begun"] == track["written"])
    served = (seg["behind"] <= 0) & (~np.isnan(seg["answered"]) | got_more_than_came(seg))
    served = (seg["client"] == GONE) & (served | seems_over(seg))
    told = np.where(down < 0, served, (ended & now.known[down]) | (~ended & alone))
    told &= ~np.isnan(seg["lag"]) & (seg["measured"] == seg["down"]) & ~seg["shared"] & (seg["carrier"] != seg["down"])
    got = seg["acked"] + now.d_acked[down] + np.where(ended, 0, np.maximum(now.rows["wqueue"][down], 0))
    worth = before.ratio[seg["hop"], 1] / before.ratio[seg["hop"], 0]
    whole = seg["from_up"] + (got - seg["from_down"]) * worth - seg["owed"] + np.minimum(seg["level"], 0)
    old = np.where(told, np.clip(np.round(whole - seg["supply"]), 0, arrived), by_time).astype(np.int64)
    # The beginning of the new one may be its header.
    header = told & (known_header > 0) & (np.abs(arrived - old - known_header) <= HEADER_SLIP)
    return np.where(header, np.maximum(arrived - known_header, 0), old)


def hear_headers(seg: Segments, headers: NDArray[np.int64], at: float) -> NDArray[np.int64]:
    """Note the sizes of the headers that engines sent before the tokens that came now."""
    told = (seg["answered"] == at) & (seg["header"] > 0) & (seg["engine"] >= 0) & ~seg["reused"]
    headers = headers.copy()
    for engine in np.unique(seg["engine"][told]):
        sizes = seg["header"][told & (seg["engine"] == engine)]
        headers[engine] = np.concatenate([headers[engine], sizes])[-HEADERS_KEPT:]
    return headers


def usual(headers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the size of each engine's header, 0 not known: of those noted the most frequent one, for the answer to a
    poll that a request followed at once looks like one."""
    usual = np.zeros(len(headers), dtype=np.int64)
    for engine, noted in enumerate(headers):
        sizes, times = np.unique(noted[noted > 0], return_counts=True)
        if len(sizes):
            usual[engine] = sizes[times.argmax()]
    return usual
