"""Which client belongs to which upstream request, from instants and flows alone.

The upstream socket's "last data sent" and the client-facing socket's "last data received" are both the instant of the
request and agree within a few milliseconds on every proxy measured. Requests of one burst look alike at first; the
number of streams without a client is right all the same, and as soon as bytes flow :func:`swap_movers` settles who is
who.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Requests:
    """One side of the requests to be paired: upstream requests, or client sockets. Columns correspond.

    ``asked``: the instant. ``answered``: answer bytes have come, or gone out. ``open``: what may still be paired out of
    order: an upstream request that never had a client; a client socket that was there before this beat.
    """

    asked: NDArray[np.float64]
    answered: NDArray[np.bool_]
    open: NDArray[np.bool_]


def pair(up: Requests, down: Requests, *, tolerance: float) -> list[tuple[int, int]]:
    """Match upstream requests to clients; returns pairs of indices into ``up`` and ``down``.

    First those whose instants lie within ``tolerance`` seconds, and among them those that are both answered, or both
    not. Then what a proxy queued: an upstream request that never had a client goes to the client that has waited
    longest, first in, first out.
    """
    pairs: list[tuple[int, int]] = []
    for phase in (True, False, None):
        free_up = _free(up, [i for i, _ in pairs], phase)
        free_down = _free(down, [j for _, j in pairs], phase)
        pairs += _in_order(up.asked, down.asked, free_up, free_down, tolerance)
    late = [i for i in _free(up, [i for i, _ in pairs], None) if up.open[i]]
    waiting = [j for j in _free(down, [j for _, j in pairs], False) if down.open[j]]
    for i in late:
        if not waiting or down.asked[waiting[0]] > up.asked[i]:
            break
        pairs.append((i, waiting.pop(0)))
    return pairs


def _free(side: Requests, taken: list[int], answered: bool | None) -> list[int]:
    """Return what is not taken, of one phase or (None) of both, oldest first."""
    free = np.ones(len(side.asked), dtype=np.bool_)
    free[taken] = False
    if answered is not None:
        free &= side.answered == answered
    rows = np.flatnonzero(free)
    return [int(i) for i in rows[np.argsort(side.asked[rows], kind="stable")]]


def _in_order(
    up: NDArray[np.float64], down: NDArray[np.float64], free_up: list[int], free_down: list[int], tolerance: float
) -> list[tuple[int, int]]:
    """Match as many as possible within the tolerance: with intervals of equal width, greedy in order is optimal."""
    pairs: list[tuple[int, int]] = []
    j = 0
    for i in free_up:
        while j < len(free_down) and down[free_down[j]] < up[i] - tolerance:
            j += 1
        if j < len(free_down) and down[free_down[j]] <= up[i] + tolerance:
            pairs.append((i, free_down[j]))
            j += 1
    return pairs


def swap_movers(
    went_down: NDArray[np.int64],
    came_up: NDArray[np.float64],
    asked_down: NDArray[np.float64],
    asked_up: NDArray[np.float64],
    *,
    tolerance: float,
) -> list[tuple[int, int]]:
    """Match clients that received bytes with streams that did, both without their partner, by volume.

    Only requests of one burst (instants within ``tolerance`` seconds) can have been confused, and volumes of one beat
    differ by no more than framing, a header and what is under way.
    """
    pairs: list[tuple[int, int]] = []
    free = list(np.argsort(came_up))
    for a in np.argsort(went_down):
        best, smallest = -1, np.inf
        for b in free:
            volume = abs(float(went_down[a]) - float(came_up[b]))
            fits = volume <= 0.25 * max(float(went_down[a]), float(came_up[b])) + 1024
            if fits and abs(asked_down[a] - asked_up[b]) <= tolerance and volume < smallest:
                best, smallest = int(b), volume
        if best >= 0:
            pairs.append((int(a), best))
            free.remove(best)
    return pairs
