"""Whose client is whose: every upstream request finds its client-facing socket, and keeps it while nothing contradicts.

Instants propose, amounts decide (:mod:`tokengap.join.pairing` has the comparisons; here they meet the records).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import CONNECTED, GONE
from tokengap.join.pairing import SLOW_REQUEST, TELLING_BYTES, Amounts, Requests, by_volume, in_order, pair
from tokengap.join.segments import (
    HEADER_MOST,
    HEADER_SECONDS,
    HEADER_SLIP,
    HEADER_USUAL,
    HELD_BACK,
    OWNED,
    SAME_INSTANT,
    UNSEEN,
    Segments,
)
from tokengap.join.sockets import Sides, Tracked
from tokengap.readings import CLOSE_WAIT, ESTABLISHED

#: How many times as much as one request a client's socket has received that carried several, at least.
SEVERAL = 1.5

#: Bytes through a hop from which on it is known what it makes of them.
RATIO_TOLD = 256 * 1024

#: Bytes that the header of an answer has at least.
HEADER_LEAST = 128


def find_clients(
    seg: Segments,
    now: Tracked,
    side: Sides,
    edges: frozenset[tuple[int, int, bool]],
    ratio: NDArray[np.float64],
    at: float,
    blur: float,
    frames: NDArray[np.uint64],
    before: float,
    guess: NDArray[np.bool_],
) -> None:
    """Give each upstream request its client-facing socket: by the request instant, then by who moves with whom.

    A process has its sockets in one network namespace, so a hop that runs in several is matched in each alone.
    ``frames``: client-facing sockets, by cookie, that are known to carry several requests at once. ``before``: when the
    beat before was. ``guess``: requests that may be another hop's: they are paired by their instants alone.
    """
    netns = now.rows["netns"]
    if not netns.any():
        everywhere = np.ones(len(seg), dtype=np.bool_)
        _find_clients(seg, now, side, everywhere, edges, ratio, at, blur, frames, before, guess)
        return
    for number in np.unique(netns):
        down = np.where(netns == number, side.down, -1)
        here = seg["netns"] == number
        _find_clients(seg, now, replace(side, down=down), here, edges, ratio, at, blur, frames, before, guess)


def _find_clients(
    seg: Segments,
    now: Tracked,
    side: Sides,
    here: NDArray[np.bool_],
    edges: frozenset[tuple[int, int, bool]],
    ratio: NDArray[np.float64],
    at: float,
    blur: float,
    frames: NDArray[np.uint64],
    before: float,
    guess: NDArray[np.bool_],
) -> None:
    for hop in np.unique(side.down[side.down >= 0]):
        mine = here & ((seg["hop"] == hop) | (seg["hop"] == UNSEEN))
        targets = [(target, "to_hop" if is_hop else "engine") for h, target, is_hop in edges if h == hop]
        mine &= np.any([seg[column] == target for target, column in targets], axis=0) if targets else False
        trial = seg["trial"].copy()
        # First with the clients of before, for those that have closed by now still tell whose they were.
        burst = _sort_out(seg, now, mine, int(hop), ratio, at, blur)
        _claim_closed(seg, now, side, burst, int(hop), ratio, brief_of_over=True)
        _pair_free(seg, now, side, mine, int(hop), ratio, at, blur, guess)
        _share(seg, now, side, mine & ~guess, int(hop), before, at, blur, frames)
        burst = _sort_out(seg, now, mine, int(hop), ratio, at, blur)
        _claim_closed(seg, now, side, burst, int(hop), ratio)  # whom that left without a stream
        left = burst.rows[burst.over & burst.hungry]  # it ran to its end for somebody else, who had left if anybody had
        seg["down"][left] = 0
        seg["trial"][left] |= trial[left]
        seg["client"][left] = np.where(seg["maybe_left"][left], np.int8(GONE), np.int8(UNSEEN))
        seg["gone"][left] = np.where(seg["maybe_left"][left], at, np.nan)


def _claim_closed(
    seg: Segments,
    now: Tracked,
    side: Sides,
    burst: _Burst,
    hop: int,
    ratio: NDArray[np.float64],
    *,
    brief_of_over: bool = False,
) -> None:
    """Give clients that came and went within one beat, or lost their stream to a wrong guess, the stream whose bytes
    they got. Their instants are not known, but the amount of a whole answer is; a small one, that may be a poll's, has
    to agree to the byte. ``brief_of_over``: those who came and went within the beat are given what is over only, for
    what flows may be of a client that is there."""
    loose = np.flatnonzero((side.down == hop) & now.ended & ~now.among(seg["down"]))
    if not len(loose):
        return
    per_byte = ratio[hop, 1] / ratio[hop, 0]
    got = (now.track["written"] - now.track["begun"]) * per_byte
    at_once = burst.came_up[~burst.mute & (burst.came_lately == burst.came_up)]
    to_the_byte = (np.abs(now.d_written[loose][:, None] - at_once[None, :]) <= 1).any(axis=1)
    clients = loose[(got[loose] > HEADER_MOST) | ((got[loose] > HEADER_USUAL) & to_the_byte)]
    asking = np.flatnonzero(~burst.mute & (burst.hungry | (seg["down"][burst.rows] == 0)))
    if len(clients) and len(asking):
        anytime = np.zeros(max(len(asking), len(clients)))
        up = Amounts(burst.came_up[asking], burst.came_lately[asking], anytime[: len(asking)])
        down = Amounts(got[clients], now.d_written[clients] * per_byte, anytime[: len(clients)])
        ends = now.track["asked"][clients] + now.rows["last_data_recv"][clients] / 1e3
        carriers = now.find(seg["carrier"][burst.rows[asking]])
        brief = (carriers >= 0) & now.ended[carriers] & ~now.known[carriers]
        earliest = np.where(brief, -np.inf, burst.asked_up[asking])
        over = ~np.isnan(seg["ended"][burst.rows[asking]]) | burst.over[asking]
        newest = np.where(over | (carriers < 0), -np.inf, now.track["grew"][carriers])
        for i, j in by_volume(up, down, tolerance=0.0):
            if brief_of_over and not now.known[clients[j]] and not over[i]:
                continue
            # Else it had left by then, or it would have bytes that came after it had. Where it has as many to the byte
            # instants may be farther apart: a dump takes its time.
            slip = 3 * SAME_INSTANT if abs(up.whole[i] - down.whole[j]) <= HEADER_SLIP else SAME_INSTANT
            if not now.known[clients[j]] or earliest[i] <= ends[j] >= newest[i] - slip:
                _join(seg, burst.rows[asking[i]], now, clients[j], hop)


def _pair_free(
    seg: Segments,
    now: Tracked,
    side: Sides,
    mine: NDArray[np.bool_],
    hop: int,
    ratio: NDArray[np.float64],
    at: float,
    blur: float,
    guess: NDArray[np.bool_],
) -> None:
    """Pair the streams of a hop that have no client with its clients that have no stream."""
    needy = _needy(seg, now, mine, at)
    # Free is a client without a stream that waits for an answer or is getting one. One whose stream is over does
    # neither, and must not be taken for the client of another stream of the same burst; unless what it has is no more
    # than a header, which a slow proxy passes on late. Then the instant of that tells.
    sent, received = now.rows["last_data_sent"], now.rows["last_data_recv"]
    passed_on = now.track["written"] - now.track["begun"]
    waits = sent >= received - 1e3 * HEADER_SECONDS
    silent = (sent > received) | (now.rows["bytes_sent"] == 0)  # since it asked: a poll has had its answer
    asks = ~now.known | waits | (now.d_written > 0)
    free = (side.down == hop) & ~now.ended & ~_busy(seg, now, at, blur) & (now.rows["bytes_received"] != 0)
    # One that half-closed while the proxy queued it is served all the same, and nobody else's.
    half_closed = (now.rows["state"] == CLOSE_WAIT) & (now.d_written > 0) & ~now.among(seg["down"])
    free &= (asks | (passed_on <= HEADER_MOST)) & ((now.rows["state"] == ESTABLISHED) | ~now.known | half_closed)

    wanting, candidates = np.flatnonzero(needy), np.flatnonzero(free)
    if not len(wanting) or not len(candidates):
        return
    carriers, some = now.find(seg["carrier"][wanting]), seg[wanting]
    lonely = (some["down"] == 0) & ~guess[wanting]
    matches = pair(
        Requests(
            asked=some["asked"],
            inode=now.rows["inode"][carriers],
            size=now.track["question"][carriers],
            answered=~np.isnan(some["answered"]),
            open=lonely & ~some["trial"],
            got=some["supply"].astype(np.float64),
            heard=np.where(lonely & (some["supply"] > 0), now.track["grew"][carriers], np.nan),
            asks=np.ones(len(wanting), dtype=np.bool_),
        ),
        Requests(
            asked=now.track["asked"][candidates],
            inode=now.rows["inode"][candidates],
            size=now.track["question"][candidates],
            answered=~waits[candidates],
            open=(now.known & (silent | ~waits))[candidates],
            got=passed_on[candidates] * ratio[hop, 1] / ratio[hop, 0],
            heard=np.where(passed_on > 0, at - sent / 1e3, np.nan)[candidates],
            asks=asks[candidates],
        ),
        tolerance=SAME_INSTANT + blur,
        blur=blur,
    )
    trial = seg["trial"].copy()
    for i, j in matches:
        _join(seg, wanting[i], now, candidates[j], hop)
    seg["trial"] |= trial & guess


def _needy(seg: Segments, now: Tracked, mine: NDArray[np.bool_], at: float) -> NDArray[np.bool_]:
    """Mark the streams that want a client: they have none, or one that is not there."""
    rows = now.find(seg["down"])
    listens = ~now.ended[rows] & (now.rows["state"][rows] == ESTABLISHED)
    fresh_end = (seg["ended"] == at) & (seg["down"] == 0)
    needy = mine & ~listens & (seg["carrier"] != seg["down"]) & (np.isnan(seg["ended"]) | fresh_end)
    # A client that closes having got what its stream brought was its client: it left, or had everything.
    got = now.track["written"][rows] - now.track["begun"][rows]
    settled = now.ended[rows] & (rows >= 0) & ~np.isnan(seg["answered"]) & (got > HEADER_MOST)
    settled &= np.abs(got - seg["supply"]) <= 0.1 * seg["supply"] + 2 * HEADER_MOST
    return np.asarray(needy & ~settled, dtype=np.bool_)


def _busy(seg: Segments, now: Tracked, at: float, blur: float) -> NDArray[np.bool_]:
    """Mark the sockets whose client has a stream, or had the one that ended in this beat."""
    rows = now.find(seg["down"])
    listens = ~now.ended[rows] & (now.rows["state"][rows] == ESTABLISHED)
    asks_the_same = np.abs(now.track["asked"][rows] - seg["asked"]) <= 2 * SAME_INSTANT + blur
    held = listens & (np.isnan(seg["ended"]) | ((seg["ended"] == at) & asks_the_same))
    return now.among(seg["down"][held])


def _join(seg: Segments, i: np.intp, now: Tracked, row: np.intp, hop: int) -> None:
    """Write the pair down: stream ``i`` has the client on socket ``row`` of ``hop``."""
    seg["down"][i] = now.rows["cookie"][row]
    seg["hop"][i] = hop
    seg["owner"][i] = OWNED
    seg["trial"][i] = False
    seg["gone"][i] = np.nan
    seg["client"][i] = CONNECTED
    before = now.track["acked"][row] - now.d_acked[row] - now.track["begun"][row]  # had it this answer already
    seg["acked"][i] = max(before, 0)
    seg["lag"][i] = np.nan


def _share(
    seg: Segments,
    now: Tracked,
    side: Sides,
    mine: NDArray[np.bool_],
    hop: int,
    before: float,
    at: float,
    blur: float,
    frames: NDArray[np.uint64],
) -> None:
    """Find the requests that share a client's socket (HTTP/2). The kernel tells the instant of the newest piece on it.

    ===================================================  ==========================================================
    a request without a client of its own                whose it is
    ===================================================  ==========================================================
    came when a socket that is busy already was asked    that socket's
    is surely the hop's, for two beats, and nobody left  that of a busy socket that was asked at that instant,
    when it came                                         and that received as much as several requests
    is surely the hop's, and one socket that carries     that socket's; of several the kernel does not tell which,
    several requests was asked then, or spoke since      and its client stays unseen
    ===================================================  ==========================================================
    """
    alone = np.flatnonzero(mine & (seg["down"] == 0) & np.isnan(seg["ended"]) & (seg["client"] == UNSEEN))
    if not len(alone):
        return
    cookies, asked = now.rows["cookie"], now.track["asked"]
    listening = (side.down == hop) & ~now.ended & (now.rows["state"] == ESTABLISHED)
    busy = listening & now.among(seg["down"][np.isnan(seg["ended"])])
    older = np.isnan(seg["ended"]) & (seg["asked"] < before)
    asked_again = np.flatnonzero(busy & np.isin(cookies, seg["down"][older]) & now.known & (now.d_received > 1))
    at_once, framed = np.flatnonzero(busy), np.flatnonzero(listening & np.isin(cookies, frames))
    for i in alone:
        owned = bool(seg["owner"][i] == OWNED)
        sure = owned and seg["born"][i] < before and not seg["maybe_left"][i]
        # A socket that several requests came by has received more than one of them is.
        one = now.rows["bytes_sent"][now.find(seg["carrier"][i : i + 1])][0]
        several = at_once[now.rows["bytes_received"][at_once] >= SEVERAL * one]
        row = _nearest(asked, several if sure else asked_again, seg["asked"][i], SAME_INSTANT + blur)
        if row is None and owned:
            since = framed[asked[framed] >= seg["asked"][i] - SAME_INSTANT - blur]
            row = since[0] if len(since) == 1 else None
        if row is not None:
            before_it = np.isnan(seg["ended"]) & (seg["down"] == cookies[row])
            _join(seg, i, now, row, hop)
            # On HTTP/1 a client asks again when it has its answer: then the request before is at its end, and none of
            # that shows but here.
            grew = now.track["grew"][now.find(seg["carrier"][before_it])]
            waits = np.isnan(seg["answered"][before_it])
            if row in framed or (waits | (grew > seg["asked"][i] + SAME_INSTANT + blur)).any():
                seg["shared"] |= seg["down"] == cookies[row]
            else:
                seg["ended"][before_it] = at


def _nearest(asked: NDArray[np.float64], rows: NDArray[np.intp], instant: float, tolerance: float) -> np.intp | None:
    """Return which of the sockets was asked nearest to an instant, None where none was within the tolerance."""
    if not len(rows):
        return None
    gap = np.abs(asked[rows] - instant)
    return rows[gap.argmin()] if gap.min() <= tolerance else None


def _sort_out(
    seg: Segments, now: Tracked, mine: NDArray[np.bool_], hop: int, ratio: NDArray[np.float64], at: float, blur: float
) -> _Burst:
    """Correct the pairs of requests that came in one burst, where instants alone did not tell whose client is whose.
    Returns them as they are then.

    ====================================================  ====================================================
    what contradicts the pair                             what is exchanged
    ====================================================  ====================================================
    a waiting stream ended, its client is still there;    their clients: the proxy closed both sides of one
    another waits on, and its client is gone
    the first bytes of a stream came, its client got      their clients: the bytes went where they came from
    none; a client got as many, whose stream brought none
    the client got other amounts than its stream          clients between streams, so that amounts agree
    of two each got what the other's stream brought, to   their clients
    the byte, in all or, where that is amiss, lately
    a client that closed had got what its stream did not  clients, so that it had a stream that brought as much or more
    more arrived than any proxy holds back, or a whole    the client goes to a stream that waits without one;
    answer, and the client never got a token              if there is none and the stream is over: it had left
    ====================================================  ====================================================
    """
    tolerance = 2 * SAME_INSTANT + blur
    burst = _burst(seg, now, mine, hop, ratio, at, blur)
    for rule in (
        _cut_together,
        _by_first_bytes,
        _by_amount,
        _to_the_byte,
        _lately_to_the_byte,
        _left_midway,
        _never_fed,
    ):
        if len(burst.rows) < 2:
            break
        exchanged = list(rule(burst, tolerance))
        for a, b in exchanged:
            both = np.array([burst.rows[a], burst.rows[b]])
            for column in ("down", "acked", "client", "gone", "maybe_left"):
                seg[column][both] = seg[column][both[::-1]]
            # Measured anew: what came, less what this client had acknowledged, both as of the beat before.
            came = seg["supply"][both] - seg["arrived"][both]
            seg["lag"][both] = came - seg["acked"][both] * ratio[hop, 1] / ratio[hop, 0]
            seg["measured"][both] = seg["down"][both]
            for column in ("level", "from_up", "from_down", "owed"):
                seg[column][both] = 0
            seg["hop"][both], seg["owner"][both], seg["trial"][both] = hop, OWNED, False
        if exchanged:
            burst = _burst(seg, now, mine, hop, ratio, at, blur)
    return burst


@dataclass(frozen=True, slots=True)
class _Burst:
    """The streams of one hop, with their clients, as far as pairs can be confused. ``rows`` are rows of the segments.

    ``bytes_down`` and ``bytes_lately`` are ``went_down`` and ``went_lately`` as counted, not in upstream bytes.
    ``there``: the client is connected. ``waits``: it got no more than a header. ``mute``: its stream brought no more.
    ``over``: its stream's carrier has closed. ``amiss``: amounts differ by more than framing and what is under way.
    ``hungry``: more came than any proxy holds back, or a whole answer at once, and it got nothing. ``unfed``: all bytes
    of its stream came at once, and it got none. ``overfed``: it got more than its stream brought. ``slow``: seconds for
    which requests may have been on their way through the proxy and amounts yet tell whose they are, for what bytes are
    worth behind it is known.
    """

    rows: NDArray[np.intp]
    asked_up: NDArray[np.float64]
    asked_down: NDArray[np.float64]
    came_up: NDArray[np.float64]
    came_lately: NDArray[np.float64]
    bytes_down: NDArray[np.float64]
    bytes_lately: NDArray[np.float64]
    went_down: NDArray[np.float64]
    went_lately: NDArray[np.float64]
    seen: NDArray[np.bool_]
    there: NDArray[np.bool_]
    waits: NDArray[np.bool_]
    mute: NDArray[np.bool_]
    over: NDArray[np.bool_]
    amiss: NDArray[np.bool_]
    hungry: NDArray[np.bool_]
    unfed: NDArray[np.bool_]
    overfed: NDArray[np.bool_]
    slow: float


def _burst(
    seg: Segments, now: Tracked, mine: NDArray[np.bool_], hop: int, ratio: NDArray[np.float64], at: float, blur: float
) -> _Burst:
    over = (seg["ended"] == at) | (np.isnan(seg["ended"]) & ~np.isnan(seg["missed"]))
    rows = np.flatnonzero(mine & (np.isnan(seg["ended"]) | over) & ~seg["shared"] & (seg["carrier"] != seg["down"]))
    down = now.find(seg["down"][rows])
    # A client that asks anew has what it had asked for before.
    same = (down < 0) | (now.track["asked"][down] <= seg["asked"][rows] + 2 * SAME_INSTANT + blur)
    rows, down = rows[same], down[same]
    some, track = seg[rows], now.track[down]
    seen = down >= 0
    there = seen & ~now.ended[down] & (now.rows["state"][down] == ESTABLISHED)
    per_byte = ratio[hop, 1] / ratio[hop, 0]
    bytes_down = np.where(seen, track["written"] - track["begun"], 0).astype(np.float64)
    went_down = bytes_down * per_byte
    waits = went_down <= HEADER_MOST
    bytes_lately = np.where(seen, now.d_written[down], 0).astype(np.float64)
    came_up = some["supply"].astype(np.float64)
    mute = np.isnan(some["answered"])
    unfed = ~mute & (some["grew"] == some["answered"]) & (went_down < came_up / 2)
    much = some["supply"] > HELD_BACK
    # A socket's end tells how long before it the request had gone out. One that came to its end just now may yet be
    # passed on.
    carrier = now.find(some["carrier"])
    lasted = np.where(now.ended[carrier] & (carrier >= 0), now.rows["last_data_sent"][carrier] / 1e3, 0.0)
    passed = over[rows] & (some["asked"] + lasted < at - SAME_INSTANT)
    return _Burst(
        rows=rows,
        asked_up=some["asked"],
        asked_down=track["asked"],
        came_up=came_up,
        came_lately=some["arrived"].astype(np.float64),
        bytes_down=bytes_down,
        bytes_lately=bytes_lately,
        went_down=went_down,
        went_lately=bytes_lately * per_byte,
        seen=seen,
        there=there,
        waits=waits,
        mute=mute,
        over=over[rows],
        amiss=np.abs(went_down - came_up) > 0.1 * np.maximum(went_down, came_up) + 2 * HEADER_MOST,
        hungry=there & waits & (some["acked"] <= HEADER_MOST) & (much | (unfed & passed)),
        unfed=unfed,
        overfed=seen & (went_down / 2 > came_up + HEADER_LEAST),
        slow=SLOW_REQUEST if ratio[hop, 1] >= RATIO_TOLD else 0.0,
    )


def _cut_together(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    cut = np.flatnonzero(burst.over & burst.mute & burst.there & burst.waits)
    left = np.flatnonzero(~burst.over & burst.mute & ~burst.there)
    for i, j in in_order(burst.asked_up[left], burst.asked_down[cut], tolerance):
        yield cut[j], left[i]


def _by_first_bytes(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    yield from _as_amounts_agree(burst, burst.overfed, burst.unfed & burst.seen, tolerance, partly=False)


def _by_amount(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    fed, flowing = burst.amiss & burst.seen & ~burst.waits, burst.amiss & ~burst.mute
    yield from _as_amounts_agree(burst, fed, flowing, tolerance, partly=False)


def _to_the_byte(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    yield from _crossed(burst, np.flatnonzero(burst.seen), burst.came_up, burst.bytes_down, tolerance)


def _lately_to_the_byte(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    rows = np.flatnonzero(
        burst.seen & burst.amiss & (np.maximum(burst.came_lately, burst.bytes_lately) > TELLING_BYTES)
    )
    yield from _crossed(burst, rows, burst.came_lately, burst.bytes_lately, tolerance)


def _crossed(
    burst: _Burst,
    rows: NDArray[np.intp],
    came: NDArray[np.float64],
    got: NDArray[np.float64],
    tolerance: float,
) -> Iterator[tuple[np.intp, np.intp]]:
    if not len(rows):
        return
    came, got = came[rows], got[rows]
    in_order = np.argsort(got, kind="stable")
    other = in_order[np.clip(np.searchsorted(got[in_order], came - 1), 0, len(rows) - 1)]
    # 1: a FIN counts as a byte. Both ways, for many have as much as many others.
    crossed = (np.abs(got[other] - came) <= 1) & (np.abs(got - came[other]) <= 1) & (np.abs(got - came) > 1)
    crossed &= burst.asked_down[rows][other] <= burst.asked_up[rows] + tolerance
    crossed &= burst.asked_down[rows] <= burst.asked_up[rows][other] + tolerance
    for i in np.flatnonzero(crossed & (other[other] == np.arange(len(rows)))):
        if i < other[i]:
            yield rows[i], rows[other[i]]


def _left_midway(burst: _Burst, tolerance: float) -> Iterator[tuple[np.intp, np.intp]]:
    closed = burst.amiss & burst.seen & ~burst.waits & burst.mute & ~burst.there
    yield from _as_amounts_agree(burst, closed, burst.amiss & ~burst.mute & burst.waits, tolerance, partly=True)


def _as_amounts_agree(
    burst: _Burst, clients: NDArray[np.bool_], streams: NDArray[np.bool_], tolerance: float, *, partly: bool
) -> Iterator[tuple[np.intp, np.intp]]:
    fed, flowing = np.flatnonzero(clients), np.flatnonzero(streams)
    up = Amounts(burst.came_up[flowing], burst.came_lately[flowing], burst.asked_up[flowing])
    down = Amounts(burst.went_down[fed], burst.went_lately[fed], burst.asked_down[fed])
    # One that got less than its stream brought may only be behind; more it cannot have got.
    slow = np.where(burst.amiss & (burst.went_down > burst.came_up), burst.slow, 0.0)[fed]
    pairs = by_volume(up, down, tolerance=tolerance, slow=slow, partly=partly)
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
