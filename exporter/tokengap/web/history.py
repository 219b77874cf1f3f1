"""The last minutes of the ledger, a point a beat: what the live chart begins with, and who leaks of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import msgspec

from tokengap.view import View

#: Points that are kept: five minutes of beats of a second.
KEPT: Final = 300

#: A stretch is so many beats: long enough for a batch of tokens to show. What lasts, lasts through so many stretches:
#: the ledger may put a burst of tokens down to the wrong hop, and half a minute later it has not done so again.
STRETCH, STRETCHES = 10, 3


class Point(msgspec.Struct, frozen=True):
    """The ledger of all engines after a beat, as totals since the exporter started. ``at`` is that of the view."""

    beats: int
    at: float
    out: float
    useful: float
    orphaned: Mapping[str, float]  # by hop


class History:
    """The newest points, oldest first."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=KEPT)

    def add(self, view: View) -> None:
        """Take a beat in."""
        orphaned: dict[str, float] = {}
        for engine in view.engines:
            for hop, tokens in engine.tokens.orphaned.items():
                orphaned[hop] = orphaned.get(hop, 0.0) + tokens
        out = sum(engine.tokens.out for engine in view.engines)
        useful = sum(engine.tokens.useful for engine in view.engines)
        self._points.append(Point(view.beats, view.at, out, useful, orphaned))

    def lost(self) -> Mapping[str, float]:
        """Return by hop the share of the newest tokens that it lost, 0 to 1: the least of the newest stretches."""
        points = list(self._points)[-1::-STRETCH][: STRETCHES + 1]
        if len(points) <= STRETCHES:
            return {}
        return {hop: min(_share(hop, old, new) for new, old in pairwise(points)) for hop in points[0].orphaned}

    def json(self) -> bytes:
        """Return ``/api/history``: the points, oldest first."""
        return msgspec.json.encode(list(self._points))


def _share(hop: str, old: Point, new: Point) -> float:
    out = new.out - old.out
    return (new.orphaned.get(hop, 0.0) - old.orphaned.get(hop, 0.0)) / out if out > 0 else 0.0
