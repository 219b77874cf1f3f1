"""Which client belongs to which upstream request, from instants and flows alone.

The upstream socket's "last data sent" and the client-facing socket's "last data received" are both the instant of the
request and agree within a few milliseconds on every proxy measured. Requests of one burst look alike at first; the
number of streams without a client is right all the same, and as soon as bytes flow :func:`by_volume` settles who is
who.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

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


@dataclass(frozen=True, slots=True)
class Requests:
    """One side of the requests to be paired: upstream requests, or client sockets. Columns correspond.

    ``asked``: the instant. ``inode``: of the socket; in the order of their making, where instants (ticks of 4 ms)
    are alike. ``size``: its bytes. ``answered``: answer bytes have come, or gone out. ``open``: what may still be
    paired out of order: an upstream request that never had a client; a client socket that was there before this beat
    and has got nothing since it asked, or is getting an answer.
    """

    asked: NDArray[np.float64]
    inode: NDArray[np.uint64]
    size: NDArray[np.int64]
    answered: NDArray[np.bool_]
    open: NDArray[np.bool_]


def pair(up: Requests, down: Requests, *, tolerance: float, blur: float = 0.0) -> list[tuple[int, int]]:
    """Match upstream requests to clients; returns pairs of indices into ``up`` and ``down``.

    First those whose instants lie within ``tolerance`` seconds, of equal size where that will do, the client's not
    after the proxy's, and among them those that are both answered, or both not. Then those that a slow proxy sent on
    late, and what it queued: an upstream request that never had a client goes to the client that has waited longest,
    first in, first out. ``blur`` is the seconds that the dump of the sockets took.
    """
    pairs: list[tuple[int, int]] = []
    at_once = AT_ONCE + blur
    phases = ((True, at_once), (False, at_once), (True, tolerance), (False, tolerance), (None, tolerance))
    for alike, (phase, after) in product((True, False), phases):
        free_up = _free(up, [i for i, _ in pairs], phase)
        free_down = _free(down, [j for _, j in pairs], phase)
        found = in_order(
            up.asked[free_up],
            down.asked[free_down],
            tolerance,
            after,
            _alike(up.size[free_up], down.size[free_down]) if alike else None,
        )
        pairs += [(free_up[i], free_down[j]) for i, j in found]
    pairs += _delayed(up, down, pairs)
    late = [i for i in _free(up, [i for i, _ in pairs], None) if up.open[i]]
    waiting = [j for j in _free(down, [j for _, j in pairs], False) if down.open[j]]
    for i in late:
        if not waiting or down.asked[waiting[0]] > up.asked[i]:
            break
        pairs.append((i, waiting.pop(0)))
    return pairs


def _delayed(up: Requests, down: Requests, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Match answers that flow to clients that get one, where the proxy took its time to ask: in their order, and none
    before its client had asked."""
    flowing = [j for j in _free(down, [j for _, j in pairs], True) if down.open[j]]
    found: list[tuple[int, int]] = []
    for i in _free(up, [i for i, _ in pairs], True):
        if not up.open[i]:
            continue
        while flowing and down.asked[flowing[0]] < up.asked[i] - SLOWEST_PROXY:
            flowing.pop(0)
        if flowing and down.asked[flowing[0]] <= up.asked[i]:
            found.append((i, flowing.pop(0)))
    return found


def _free(side: Requests, taken: list[int], answered: bool | None) -> list[int]:
    """Return what is not taken, of one phase or (None) of both, oldest first."""
    free = np.ones(len(side.asked), dtype=np.bool_)
    free[taken] = False
    if answered is not None:
        free &= side.answered == answered
    rows = np.flatnonzero(free)
    return [int(i) for i in rows[np.lexsort((side.inode[rows], side.asked[rows]))]]


def _alike(up: NDArray[np.int64], down: NDArray[np.int64]) -> Callable[[int, int], bool]:
    """Return what tells whether an upstream request is as large as a client's, but for some headers."""
    return lambda i, j: bool(abs(up[i] - down[j]) <= REWRITTEN_BYTES + REWRITTEN_SHARE * down[j])


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


@dataclass(frozen=True, slots=True)
class Amounts:
    """One side of answers to be compared: bytes of the whole answer so far, of these since the beat before, and when
    it was asked for. Columns correspond."""

    whole: NDArray[np.float64]
    lately: NDArray[np.float64]
    asked: NDArray[np.float64]


def by_volume(up: Amounts, down: Amounts, *, tolerance: float, partly: bool = False) -> list[tuple[int, int]]:
    """Match streams with the clients of one burst by the bytes they brought and got; pairs (up, down), best first.

    Only requests whose instants lie within ``tolerance`` seconds can have been confused. Volumes agree but for
    framing, what is under way, and a chunk or two; of several that agree, what moved in this beat decides. ``partly``:
    the client may have got only the beginning.
    """
    brought, got = up.whole[:, None], down.whole[None, :]
    most = np.maximum(brought, got)
    near = np.minimum(0.03 * most + 1024, 0.1 * most + 256)
    fits = brought >= got - near if partly else np.abs(brought - got) <= near
    fits &= np.abs(up.asked[:, None] - down.asked[None, :]) <= tolerance
    gap = np.abs(brought - got) + np.abs(up.lately[:, None] - down.lately[None, :])
    pairs: list[tuple[int, int]] = []
    candidates = np.argwhere(fits)
    for i, j in candidates[np.argsort(gap[fits], kind="stable")]:
        if all(i != a and j != b for a, b in pairs):
            pairs.append((int(i), int(j)))
    return pairs
