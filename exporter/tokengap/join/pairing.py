"""Which client belongs to which upstream request, from instants and flows alone.

The upstream socket's "last data sent" and the client-facing socket's "last data received" are both the instant of the
request and agree within a few milliseconds on every proxy measured. Requests of one burst look alike at first; the
number of streams without a client is right all the same, and as soon as bytes flow :func:`swap_movers` settles who is
who.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pair(
    up: NDArray[np.float64],
    down: NDArray[np.float64],
    *,
    never: NDArray[np.bool_],
    held: NDArray[np.bool_],
    tolerance: float,
) -> list[tuple[int, int]]:
    """Match upstream requests to clients; returns pairs of indices into ``up`` and ``down`` (request instants).

    First those within ``tolerance`` seconds, in order, as many as possible (for intervals of equal width, greedy in
    order is optimal). Then what a proxy queued: an upstream request that ``never`` had a client goes to the client
    that has been ``held`` longest, first in, first out.
    """
    up_order, down_order = np.argsort(up, kind="stable"), np.argsort(down, kind="stable")
    pairs: list[tuple[int, int]] = []
    j = 0
    for i in up_order:
        while j < len(down_order) and down[down_order[j]] < up[i] - tolerance:
            j += 1
        if j < len(down_order) and down[down_order[j]] <= up[i] + tolerance:
            pairs.append((int(i), int(down_order[j])))
            j += 1
    up_done, down_done = {i for i, _ in pairs}, {j for _, j in pairs}
    waiting = [j for j in down_order if held[j] and j not in down_done]
    for i in (i for i in up_order if never[i] and i not in up_done):
        if not waiting or down[waiting[0]] > up[i]:
            break
        pairs.append((int(i), int(waiting.pop(0))))
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
