"""When will a slot be free? Pure: no clock, no I/O.

The question of every arrival is how long it would wait at its place in the queue. Three things are known: how long
recent streams held their slots, the ages of those that hold one now, and how many are ahead.

The estimate
------------

While anybody waits, each slot is a renewal process: whoever ends is followed at once by the next. So the *expected
number of releases* by a time ``t`` is a sum over slots, exact whatever the distribution, and needs no simulation (the
renewal function of a delayed renewal process; D. R. Cox, "Renewal Theory", 1962, chapter 4)::

    N(t) = sum over running streams of  P(duration <= age + t | duration > age)  convolved with  1 + f + f*f + ...

with ``f`` the measured distribution of durations. Conditioning on the age is what free slots alone do not tell: it is
the mean-residual-life idea, and a stream that has outlived the others is not due any moment.

A request with ``k`` ahead of it starts at release ``k + 1``. Its expected start is where ``N`` passes ``k + 1/2``: the
median of the start for one slot and regular streams, and within some percent of the mean for many slots. (To take each
stream's mean residual life instead, as in the usual estimate from the length of the queue, is wrong for many slots:
the first of 64 to end does not take a mean duration. See R. Ibrahim and W. Whitt, "Real-time delay estimation based on
delay history", 2009, for how estimates from queue length compare.)

What is not known
-----------------

* With nothing measured there is no estimate, and nobody is refused on a guess.
* A stream older than all that were measured is taken to be half way through: its residual life has its age as median
  (the Pareto law of exponent 1). So a stuck stream pushes the estimate out as it ages.
* Durations are measured when streams end: what is still running is not among them, which its age makes up for in part.
* Arrivals of a more urgent class that come later are not foreseen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Durations remembered per class.
WINDOW = 200
#: Steps of time in which durations are counted.
CELLS = 128

_Cells = NDArray[np.float64]


class Durations:
    """How long recent streams of one class held their slots, in seconds."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        """Remember one."""
        self._recent.append(max(seconds, 0.0))

    @property
    def known(self) -> Sequence[float]:
        """Return those remembered, the oldest first."""
        return self._recent

    @property
    def mean(self) -> float | None:
        """Return their mean; None while there are none."""
        return sum(self._recent) / len(self._recent) if self._recent else None


@dataclass(frozen=True, slots=True)
class Occupied:
    """Slots taken by streams of one kind: what was measured of such streams, and the ages of these, in seconds."""

    known: Sequence[float]
    ages: Sequence[float]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected number of slot releases from an instant on.

    ``releases`` at the ends of steps of ``step`` seconds, the first at 0; afterwards ``rate`` a second.
    """

    step: float
    releases: _Cells
    rate: float

    def start(self, ahead: float) -> float:
        """Return in how many seconds a request with ``ahead`` others before it is expected to start.

        Infinite where no slot is ever expected to be released.
        """
        due = ahead + 0.5
        last = float(self.releases[-1])
        if due > last:
            return self.step * (CELLS - 1) + (due - last) / self.rate if self.rate > 0 else float("inf")
        if due <= self.releases[0]:
            return 0.0
        # What is counted at the end of a step happened around it: half a step on either side.
        return float(np.interp(due, self.releases, (np.arange(CELLS) + 0.5) * self.step))


def forecast(occupied: Iterable[Occupied], free: int, next_ones: Sequence[float], horizon: float) -> Forecast | None:
    """Return the forecast for slots that are ``occupied`` or ``free``; None while nothing is measured.

    ``next_ones`` are durations such as those of the streams that wait. ``horizon``, in seconds, is how far it should be
    fine; it is drawn out to several mean durations where these are long.
    """
    if not next_ones:
        return None
    taken = list(occupied)
    mean = sum(next_ones) / len(next_ones)
    step = max(horizon, 4 * mean) / (CELLS - 1)
    released = np.zeros(CELLS)
    released[0] = free
    for kind in taken:
        released += _residual(kind, step)
    renewals = _renewals(_spread(next_ones, step) / len(next_ones))
    slots = free + sum(len(kind.ages) for kind in taken)
    rate = slots / mean if mean > 0 else float("inf")
    return Forecast(step, np.cumsum(np.convolve(released, renewals)[:CELLS]), rate)


def _spread(seconds: Sequence[float] | _Cells, step: float) -> _Cells:
    """Count values per step. Each is divided between its two neighbours so that means are kept; what is past the end
    is left out."""
    where = np.asarray(seconds, dtype=np.float64) / step
    where = where[where < CELLS - 1]
    below = where.astype(np.intp)
    part = where - below
    cells: _Cells = np.bincount(below, 1 - part, CELLS) + np.bincount(below + 1, part, CELLS)
    return cells


def _residual(kind: Occupied, step: float) -> _Cells:
    """Return how many of these slots are expected to be released in each step."""
    ages = np.asarray(kind.ages, dtype=np.float64)
    if not len(ages):
        return np.zeros(CELLS)
    known = np.sort(np.asarray(kind.known, dtype=np.float64))
    outlived = len(known) - np.searchsorted(known, ages, side="right") == 0
    return _of_ages(known, ages[~outlived], step) + _half_way(ages[outlived], step)


def _of_ages(known: _Cells, ages: _Cells, step: float) -> _Cells:
    """Return the releases of streams of these ages, each like one of those known that lived longer."""
    released = np.zeros(CELLS)
    for age in _few(ages, step):
        longer = known[known > age.at]
        released += age.count * _spread(longer - age.at, step) / len(longer)
    return released


@dataclass(frozen=True, slots=True)
class _Age:
    at: float
    count: int


def _few(ages: _Cells, step: float) -> Iterable[_Age]:
    """Merge ages that fall into one step, so that the cost does not grow with the number of slots."""
    bins = (ages / step).astype(np.intp)
    for one in np.unique(bins):
        mine = ages[bins == one]
        yield _Age(float(mine.min()), len(mine))


def _half_way(ages: _Cells, step: float) -> _Cells:
    """Return the releases of streams whose residual life has their age as its median."""
    if not len(ages):
        return np.zeros(CELLS)
    after = np.arange(CELLS) * step
    gone = (after / np.maximum(ages[:, None] + after, 1e-9)).sum(axis=0)
    return np.diff(gone, prepend=0.0)


def _renewals(duration: _Cells) -> _Cells:
    """Return the expected number of starts per step in a slot whose occupant starts at 0: 1 + f + f*f + ..."""
    at_once = min(float(duration[0]), 0.99)
    starts = np.zeros(CELLS)
    starts[0] = 1 / (1 - at_once)
    for i in range(1, CELLS):
        starts[i] = np.dot(starts[:i], duration[i:0:-1]) / (1 - at_once)
    return starts
