"""The last minutes of the ledger, a point a beat: what the live chart begins with, and who leaks of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from tokengap.view import View

#: Points that are kept: five minutes of beats of a second.
KEPT: Final = 300

#: Beats that are "of late": long enough for a batch of tokens to show, short enough that a leak that ended is over.
LATELY: Final = 10


class Point(msgspec.Struct, frozen=True):
    """The ledger of all engines after a beat, as totals since the exporter started. ``at`` is that of the view."""

    beats: int
    at: float
    out: float
    useful: float
    orphaned: Mapping[str, float]  # by hop


@dataclass(frozen=True, slots=True)
class Leaked:
    """What was generated of late, and what of it each hop lost."""

    out: float = 0.0
    orphaned: Mapping[str, float] | None = None

    def share(self, hop: str) -> float:
        """Return the part of it that this hop lost, 0 to 1."""
        return (self.orphaned or {}).get(hop, 0.0) / self.out if self.out > 0 else 0.0


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

    def leaked(self) -> Leaked:
        """Return what the newest beats show."""
        if not self._points:
            return Leaked()
        new, old = self._points[-1], self._points[max(len(self._points) - 1 - LATELY, 0)]
        lost = {hop: tokens - old.orphaned.get(hop, 0.0) for hop, tokens in new.orphaned.items()}
        return Leaked(new.out - old.out, lost)

    def json(self) -> bytes:
        """Return ``/api/history``: the points, oldest first."""
        return msgspec.json.encode(list(self._points))
