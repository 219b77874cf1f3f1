"""The last minutes of the ledger, a point a beat: the live chart, rates, and who leaks of late.

A token is generated in one beat and booked in another: useful when a client has acknowledged its bytes, and until then
pending. The chart shows each token when it was generated, as what became of it, so that the parts of a moment never are
more than its whole. For that, tokens are taken to be booked in the order in which they were generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokengap.view import View

#: Points that are kept: five minutes of beats of a second.
KEPT: Final = 300

#: A stretch is so many beats: long enough for a batch of tokens to show. What lasts, lasts through so many stretches:
#: the ledger may put a burst of tokens down to the wrong hop, and half a minute later it has not done so again.
STRETCH, STRETCHES = 10, 3

#: Seconds over which a rate is taken: engines count in steps, and beats cut them.
SMOOTH: Final = 5.0


class Point(msgspec.Struct, frozen=True):
    """The ledger of all engines after a beat, as totals since the exporter started. ``at`` is that of the view."""

    at: float
    out: float
    useful: float
    orphaned: dict[str, float]
    unattributed: float


class Rates(msgspec.Struct, frozen=True):
    """Tokens a second: all that were ``generated``, and the four parts of them."""

    generated: float
    useful: float
    orphaned: float
    pending: float
    unattributed: float


@dataclass(frozen=True, slots=True)
class Trend:
    """What the newest points tell: by hop the share of tokens that it lost, 0 to 1, and the rates of all engines.

    None, and no hop: too few beats yet.
    """

    lost: Mapping[str, float] = field(default_factory=dict)
    rates: Rates | None = None


class Curves(msgspec.Struct, frozen=True):
    """The rates of :class:`Rates` at each time of ``at``, oldest first."""

    at: list[float]
    generated: list[float]
    useful: list[float]
    orphaned: list[float]
    pending: list[float]
    unattributed: list[float]


class History:
    """The newest points, oldest first."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=KEPT)
        self._curves: Curves | None = None

    def add(self, view: View) -> None:
        """Take a beat in."""
        orphaned: dict[str, float] = {}
        for engine in view.engines:
            for hop, tokens in engine.tokens.orphaned.items():
                orphaned[hop] = orphaned.get(hop, 0.0) + tokens
        self._points.append(
            Point(
                at=view.at,
                out=sum(engine.tokens.out for engine in view.engines),
                useful=sum(engine.tokens.useful for engine in view.engines),
                orphaned=orphaned,
                unattributed=sum(engine.tokens.unattributed for engine in view.engines),
            )
        )
        self._curves = None

    def trend(self) -> Trend:
        """Return what the newest points tell."""
        curves = self.curves()
        newest = Rates(*(getattr(curves, name)[-1] for name in Rates.__struct_fields__)) if curves.at else None
        return Trend(self._lost(), newest)

    def curves(self) -> Curves:
        """Return the rates at each point but the first."""
        if self._curves is None:
            self._curves = _curves(self._points)
        return self._curves

    def json(self) -> bytes:
        """Return ``/api/history``: the rates, as columns."""
        return msgspec.json.encode(self.curves())

    def _lost(self) -> Mapping[str, float]:
        """Return the least share of the newest stretches."""
        points = list(self._points)[-1::-STRETCH][: STRETCHES + 1]
        if len(points) <= STRETCHES:
            return {}
        return {hop: min(_share(hop, old, new) for new, old in pairwise(points)) for hop in points[0].orphaned}


def _share(hop: str, old: Point, new: Point) -> float:
    out = new.out - old.out
    return (new.orphaned.get(hop, 0.0) - old.orphaned.get(hop, 0.0)) / out if out > 0 else 0.0


def _curves(points: deque[Point]) -> Curves:
    if len(points) < 2:
        return Curves(*([] for _ in Curves.__struct_fields__))
    rows = [(point.at, point.out, point.useful, sum(point.orphaned.values()), point.unattributed) for point in points]
    at, out, *parts = np.array(rows).T
    booked = np.maximum.accumulate(sum(parts))
    # Of all that had been generated at a point: what became of it, as far as it is booked by now.
    useful, orphaned, unattributed = (np.interp(out, booked, part) for part in parts)
    pending = out - useful - orphaned - unattributed
    begin = np.maximum(np.searchsorted(at, at - SMOOTH, side="right") - 1, 0)

    def rate(total: NDArray[np.float64]) -> list[float]:
        grown = (total - total[begin])[1:] / (at - at[begin])[1:]
        return [round(max(value, 0.0), 2) for value in grown.tolist()]

    return Curves(at[1:].tolist(), *map(rate, (out, useful, orphaned, pending, unattributed)))
