"""Which client belongs to which upstream request, from instants and flows alone.

The upstream socket's "last data sent" and the client-facing socket's "last data received" are both the instant of the
request and agree within a few milliseconds on every proxy measured. Requests of one burst look alike at first; the
number of streams without a client is right all the same, and as soon as bytes flow :func:`by_volume` settles who is
who.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

#: Seconds by which a client's request may seem to come after the proxy's, beside what a dump blurs: some ticks of the
#: kernel. More are seen where a request comes in pieces.
AT_ONCE = 0.012

#: What proxies add to a request, or leave out of it: some headers.
REWRITTEN_BYTES, REWRITTEN_SHARE = 64, 0.03

#: Seconds for which a proxy may hold a request back: in its queue, or because it is slow (LiteLLM with eight requests
#: at once: 0.35).
SLOWEST_PROXY = 120.0

#: Bytes by which an answer on its way differs at both sides of a proxy that passes it on as it comes.
NEARLY_BYTES = 256

#: Bytes of an answer, header included, from which on others are hardly as long to the byte.
TELLING_BYTES = 1024

#: How many times as much as the other one side may have of an answer that a proxy writes anew, while it is not known
#: what its bytes are worth (LiteLLM in its first second: 2.8).
UNTOLD_TIMES = 4.0

#: Requests to be looked at for such exchanges, in one beat.
MOST_STEPS = 10_000

#: Seconds that it may take to send on a request that it does not hold back.
SLOW_REQUEST = 0.5

#: Seconds that a slow one may take to pass an answer on.
SLOW_ANSWER = 0.3


@dataclass(frozen=True, slots=True)
class Requests:
    """One side of the requests to be paired: upstream requests, or client sockets. Columns correspond.

    ``asked``: the instant. ``inode``: of the socket; in the order of their making, where instants (ticks of 4 ms)
    are alike. ``size``: its bytes. ``answered``: answer bytes have come, or gone out. ``open``: what may still be
    paired out of order: an upstream request that never had a client; a client socket that was there before this beat
    and has got nothing since it asked, or is getting an answer. ``got``: the bytes of the answer so far, header
    included, and ``heard``: the instant of the newest of them, NaN where they are not to be compared. ``asks``: it
    waits for an answer or is getting one; what may have had a small one is paired by what it heard alone.
    """

    asked: NDArray[np.float64]
    inode: NDArray[np.uint64]
    size: NDArray[np.int64]
    answered: NDArray[np.bool_]
    open: NDArray[np.bool_]
    got: NDArray[np.float64]
    heard: NDArray[np.float64]
    asks: NDArray[np.bool_]

    def only(self, rows: list[int]) -> Requests:
        """Return the requests at these indices."""
        return Requests(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


def pair(up: Requests, down: Requests, *, tolerance: float, blur: float = 0.0) -> list[tuple[int, int]]:
    """Match upstream requests to clients; returns pairs of indices into ``up`` and ``down``.

    First those whose instants lie within ``tolerance`` seconds, the client's not after the proxy's, and among them
    those that are both answered, or both not. Then those that a slow proxy sent on late: by the instant of their
    answers, or of their headers, if these are as long. Both first with questions and answers of equal size, then
    without; and last those whose answers a proxy that stood still passed on much later. And what a proxy queued: those
    whose answers are as long to the byte; else an upstream request that never had a client goes to the client that has
    waited longest, first in, first out. ``blur`` is the seconds that the dump of the sockets took.
    """
    pairs = _asked_together(up, down, [], tolerance, blur, alike=True)
    by_answer = _heard_together(up, down, pairs, tolerance)
    by_instant = _asked_together(up, down, pairs + by_answer, tolerance, blur, alike=False)
    loose = _exchanged(up, down, by_answer + by_instant, pairs, tolerance, blur)
    pairs += _exchanged_late(up, down, loose, pairs, blur)
    pairs += _delayed(up, down, pairs)
    stalled = replace(down, heard=np.where(down.asks, down.heard, np.nan))
    pairs += _heard_together(up, stalled, pairs, tolerance, SLOWEST_PROXY)
    pairs += _to_the_byte(up, down, pairs)
    late = [i for i in _free(up, [i for i, _ in pairs], None) if up.open[i]]
    waiting = [j for j in _free(down, [j for _, j in pairs], False) if down.open[j]]
    for i in late:
        if not waiting or down.asked[waiting[0]] > up.asked[i]:
            break
        pairs.append((i, waiting.pop(0)))
    return pairs


def _asked_together(
    up: Requests, down: Requests, taken: list[tuple[int, int]], tolerance: float, blur: float, *, alike: bool
) -> list[tuple[int, int]]:
    """Match requests by their instants; of equal amounts only, where ``alike``."""
    found: list[tuple[int, int]] = []
    at_once = AT_ONCE + blur
    phases = [(phase, after) for after in (at_once, tolerance) for phase in (True, False, None)]
    for phase, after in phases:
        ups = _free(up, [i for i, _ in taken + found], phase)
        downs = _free(down, [j for _, j in taken + found], phase)
        fits = partial(_alike, up.only(ups), down.only(downs)) if alike else None
        pairs = in_order(up.asked[ups], down.asked[downs], tolerance, after, fits)
        found += [(ups[i], downs[j]) for i, j in pairs]
    return found


def _exchanged(
    up: Requests,
    down: Requests,
    pairs: list[tuple[int, int]],
    taken: list[tuple[int, int]],
    tolerance: float,
    blur: float,
) -> list[tuple[int, int]]:
    """Exchange clients, all within the instants, until no request and no client are left that this would pair.

    From each request without a client by way of those that have one which it might have, to a client without a request:
    an augmenting path, breadth first.
    """
    alone = _free(up, [i for i, _ in pairs + taken], None)
    if not alone:
        return pairs
    client, request = dict(pairs), {j: i for i, j in pairs}
    asking = down.asks.copy()
    asking[[j for _, j in taken]] = False
    clients = np.flatnonzero(asking)[np.argsort(down.asked[asking], kind="stable")]
    asked = down.asked[clients]
    first = np.searchsorted(asked, up.asked - tolerance)
    last = np.searchsorted(asked, up.asked + AT_ONCE + blur, side="right")
    tried = np.zeros(len(clients), dtype=np.bool_)  # what leads nowhere does so from everywhere
    steps = 0
    for start in alone:
        came_from: dict[int, int] = {}
        way = deque([start])
        found: int | None = None
        while way and found is None and steps < MOST_STEPS:
            i, steps = way.popleft(), steps + 1
            near = first[i] + np.flatnonzero(~tried[first[i] : last[i]])
            tried[near] = True
            for j in clients[near].tolist():
                came_from[j] = i
                if j not in request:
                    found = j
                    break
                way.append(request[j])
        if found is not None:
            tried[:] = False
        while found is not None:
            i = came_from[found]
            given_up = client.get(i)
            client[i], request[found] = found, i
            found = given_up
    return list(client.items())


def _exchanged_late(
    up: Requests, down: Requests, pairs: list[tuple[int, int]], taken: list[tuple[int, int]], blur: float
) -> list[tuple[int, int]]:
    """Exchange among long answers that flow, where as many on both sides are left, as if the proxy had been slow to
    ask: by chance answers of one burst are as long as others of it."""
    if not _as_many(up, down, *_left_flowing(up, down, pairs + taken)):
        return pairs
    long_up, long_down = (replace(side, asks=_flows(side)) for side in (up, down))
    flowing: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for i, j in pairs:
        (flowing if long_up.asks[i] and long_down.asks[j] else others).append((i, j))
    return others + _exchanged(long_up, long_down, flowing, taken + others, SLOW_REQUEST, blur)


def _flows(side: Requests) -> NDArray[np.bool_]:
    """Mark who has an answer so long that it is no poll's, and gets it now."""
    return side.answered & side.asks & (side.got > TELLING_BYTES)


def _left_flowing(
    up: Requests, down: Requests, pairs: list[tuple[int, int]]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Mark, on both sides, the long answers that flow and are in no pair."""
    left_up, left_down = _flows(up), _flows(down)
    left_up[[i for i, _ in pairs]] = left_down[[j for _, j in pairs]] = False
    return left_up, left_down


def _as_many(up: Requests, down: Requests, ups: NDArray[np.bool_], downs: NDArray[np.bool_]) -> bool:
    """Tell whether as many answers are marked on both sides, any at all, and about as long as each other."""
    came, got = np.sort(up.got[ups]), np.sort(down.got[downs])
    alike = len(came) == len(got) and bool((np.maximum(came, got) <= UNTOLD_TIMES * np.minimum(came, got)).all())
    return alike and len(came) > 0


def _heard_together(
    up: Requests, down: Requests, pairs: list[tuple[int, int]], tolerance: float, slow: float = SLOW_ANSWER
) -> list[tuple[int, int]]:
    """Match answers, or headers, that came and were passed on within ``slow`` seconds, and are as long, the equal ones
    first; in the order in which they were asked for."""

    def fits(i: int, clients: NDArray[np.intp]) -> NDArray[np.bool_]:
        later, got = down.heard[clients] - up.heard[i], np.maximum(down.got[clients], up.got[i])
        together = (later >= -tolerance) & (later <= tolerance + slow) & (_off(up, down, i, clients) <= _slip(got))
        return np.asarray(together & _asked_before(up, down, i, clients, AT_ONCE), dtype=np.bool_)

    return _in_turn(up, down, ~np.isnan(up.heard), ~np.isnan(down.heard), pairs, fits)


def _delayed(up: Requests, down: Requests, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Match answers that flow to clients that get one, where the proxy took its time to ask: those that are equally
    long, then in their order; none before its client had asked. Where as many long ones flow on both sides, about as
    long as each other, they are each other's, whatever else is known of them."""
    flows_up, flows_down = _left_flowing(up, down, pairs)
    if not _as_many(up, down, flows_up, flows_down):
        flows_up, flows_down = (side.answered & side.asks & side.open for side in (up, down))
    return _in_turn(up, down, flows_up, flows_down, pairs, partial(_asked_before, up, down, after=0.0))


def _to_the_byte(up: Requests, down: Requests, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Match what has so much of its answer that equal amounts are no chance."""

    def fits(i: int, clients: NDArray[np.intp]) -> NDArray[np.bool_]:
        return (_off(up, down, i, clients) <= 1) & _asked_before(up, down, i, clients, 0.0)

    return _in_turn(up, down, up.got > TELLING_BYTES, down.open & (down.got > TELLING_BYTES), pairs, fits)


def _in_turn(
    up: Requests,
    down: Requests,
    ups: NDArray[np.bool_],
    downs: NDArray[np.bool_],
    pairs: list[tuple[int, int]],
    fits: Callable[[int, NDArray[np.intp]], NDArray[np.bool_]],
) -> list[tuple[int, int]]:
    """Match what is marked and in no pair, each in its turn with the first that ``fits``; equal amounts first."""
    found: list[tuple[int, int]] = []
    for nearly in (NEARLY_BYTES, np.inf):
        clients = _oldest_first(down, downs, [j for _, j in pairs + found])
        for i in _oldest_first(up, ups, [i for i, _ in pairs + found]):
            fit = fits(int(i), clients) & (_off(up, down, i, clients) <= nearly)
            if fit.any():
                found.append((int(i), int(clients[fit.argmax()])))
                clients = np.delete(clients, fit.argmax())
    return found


def _off(up: Requests, down: Requests, i: int, clients: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return by how much the amounts of an answer and of these clients' differ."""
    return np.asarray(np.abs(down.got[clients] - up.got[i]), dtype=np.float64)


def _asked_before(up: Requests, down: Requests, i: int, clients: NDArray[np.intp], after: float) -> NDArray[np.bool_]:
    """Mark the clients who asked before the proxy did, or so many seconds ``after``, and not too long before."""
    asked = down.asked[clients]
    return np.asarray((asked <= up.asked[i] + after) & (asked >= up.asked[i] - SLOWEST_PROXY), dtype=np.bool_)


def _free(side: Requests, taken: list[int], answered: bool | None) -> list[int]:
    """Return what asks and is not taken, of one phase or (None) of both, oldest first."""
    phase = side.asks if answered is None else side.asks & (side.answered == answered)
    return [int(i) for i in _oldest_first(side, phase, taken)]


def _oldest_first(side: Requests, mask: NDArray[np.bool_], taken: list[int]) -> NDArray[np.intp]:
    """Return what is marked and not taken."""
    free = mask.copy()
    free[taken] = False
    rows = np.flatnonzero(free)
    return rows[np.lexsort((side.inode[rows], side.asked[rows]))]


def _alike(up: Requests, down: Requests, i: int, j: int) -> bool:
    """Tell whether an upstream request is as large as a client's, but for some headers, and its answer as its own."""
    asked = abs(up.size[i] - down.size[j]) <= REWRITTEN_BYTES + REWRITTEN_SHARE * down.size[j]
    return bool(asked and abs(up.got[i] - down.got[j]) <= _slip(np.maximum(up.got[i], down.got[j])))


def in_order(
    up: NDArray[np.float64],
    down: NDArray[np.float64],
    tolerance: float,
    after: float | None = None,
    fits: Callable[[int, int], bool] | None = None,
) -> list[tuple[int, int]]:
    """Match as many instants as possible, the second at most ``tolerance`` before the first and ``after`` after it (as
    long by default); pairs of indices. ``fits``: which pairs may be, all by default.

    With intervals of equal width, greedy in order is optimal. Equal instants keep the order they are given in.
    """
    up_order, down_order = np.argsort(up, kind="stable"), np.argsort(down, kind="stable")
    pairs: list[tuple[int, int]] = []
    waiting: deque[int] = deque()  # within the tolerance, and not taken yet
    j = 0
    for i in up_order:
        while j < len(down_order) and down[down_order[j]] <= up[i] + (tolerance if after is None else after):
            waiting.append(int(down_order[j]))
            j += 1
        while waiting and down[waiting[0]] < up[i] - tolerance:
            waiting.popleft()
        found = next((one for one in waiting if fits is None or fits(int(i), one)), None)
        if found is not None:
            waiting.remove(found)
            pairs.append((int(i), found))
    return pairs


def _slip(most: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how many bytes two amounts of one answer may differ: framing, what is under way, a chunk or two."""
    return np.minimum(0.03 * most + 1024, 0.1 * most + 256)


@dataclass(frozen=True, slots=True)
class Amounts:
    """One side of answers to be compared: bytes of the whole answer so far, of these since the beat before, and when
    it was asked for. Columns correspond."""

    whole: NDArray[np.float64]
    lately: NDArray[np.float64]
    asked: NDArray[np.float64]


def by_volume(
    up: Amounts, down: Amounts, *, tolerance: float, slow: NDArray[np.float64] | float = 0.0, partly: bool = False
) -> list[tuple[int, int]]:
    """Match streams with the clients of one burst by the bytes they brought and got; pairs (up, down), best first.

    Only requests whose instants lie within ``tolerance`` seconds can have been confused, where the proxy sends them on
    at once; a slow one may take ``slow`` seconds (for each of ``down``, or for all). Volumes agree but for
    framing, what is under way, and a chunk or two; of several that agree, what moved in this beat decides. ``partly``:
    the client may have got only the beginning.
    """
    brought, got = up.whole[:, None], down.whole[None, :]
    near = _slip(np.maximum(brought, got))
    fits = brought >= got - near if partly else np.abs(brought - got) <= near
    later = up.asked[:, None] - down.asked[None, :]
    fits &= (later >= -tolerance) & (later <= tolerance + slow)
    gap = np.abs(brought - got) + np.abs(up.lately[:, None] - down.lately[None, :])
    pairs: list[tuple[int, int]] = []
    candidates = np.argwhere(fits)
    for i, j in candidates[np.argsort(gap[fits], kind="stable")]:
        if all(i != a and j != b for a, b in pairs):
            pairs.append((int(i), int(j)))
    return pairs
