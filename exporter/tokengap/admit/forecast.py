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

A request with ``k`` ahead of it starts at release ``k + 1``. Its expected start is where ``N`` passes ``k + 1/2``, the
middle of what happens (the tests play queues out and compare). Not before the first release of all, though: half of the
time that has come where the streams that hold a slot now are expected to release ``c (1 - 2^(-1/c))`` of ``c`` slots.

To take each stream's mean residual life instead, as in the usual estimate from the length of the queue, is wrong for
many slots: the first of 64 to end does not take a mean duration (for estimates from queue length see R. Ibrahim and
W. Whitt, "Real-time delay estimation based on delay history", 2009).

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
#: Steps of time in which durations are counted; a power of two.
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
    """The releases of slots to expect from an instant on.

    ``first`` and ``all``: how many by the ends of steps of ``step`` seconds, the first at 0; ``first`` counts only
    those of streams that hold a slot now. After the last step ``rate`` a second. ``slots`` are those that are counted.
    """

    step: float
    first: _Cells
    all: _Cells
    slots: int
    rate: float

    def start(self, ahead: float) -> float:
        """Return in how many seconds a request with ``ahead`` others before it is expected to start.

        Infinite where no slot is ever expected to be released.
        """
        if not self.slots:
            return float("inf")
        first_of_all = self.slots * (1 - 0.5 ** (1 / self.slots))
        return max(self._when(self.first, first_of_all), self._when(self.all, ahead + 0.5))

    def _when(self, releases: _Cells, due: float) -> float:
        if due <= releases[0]:
            return 0.0
        if due > releases[-1]:
            return self.step * (CELLS - 1) + (due - float(releases[-1])) / self.rate
        # What is counted at the end of a step happened around it: half a step on either side.
        return float(np.interp(due, releases, (np.arange(CELLS) + 0.5) * self.step))


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
    every = np.convolve(released, renewals)[:CELLS]
    return Forecast(step, np.cumsum(released), np.cumsum(every), slots, slots / max(mean, step))


def _spread(seconds: Sequence[float] | _Cells, step: float) -> _Cells:
    """Count values per step. Each is divided between its two neighbours so that means are kept; what is past the end
    is left out."""
    where = np.asarray(seconds, dtype=np.float64) / step
    where = where[where < CELLS - 1]
    below = where.astype(np.intp)
    part = where - below
    cells = np.zeros(CELLS)
    np.add.at(cells, below, 1 - part)
    np.add.at(cells, below + 1, part)
    return cells


def _residual(kind: Occupied, step: float) -> _Cells:
    """Return how many of these slots are expected to be released in each step."""
    ages = np.asarray(kind.ages, dtype=np.float64)
    longest = max(kind.known, default=0.0)
    return _like_those_known(kind.known, ages[ages < longest], step) + _half_way(ages[ages >= longest], step)


def _like_those_known(known: Sequence[float], ages: _Cells, step: float) -> _Cells:
    """Return the releases of streams of these ages, each like one of those known that lived longer."""
    lives, at = _spread(known, step), _spread(ages, step)
    longer = len(known) - np.cumsum(lives)
    some = longer > 1e-6
    each = np.divide(at, longer, out=np.zeros(CELLS), where=some)
    released: _Cells = np.correlate(lives, each, "full")[
        CELLS - 1 :
    ]  # at t: the sum over ages of each * lives[age + t]
    released[0] = at[~some].sum()
    return released


def _half_way(ages: _Cells, step: float) -> _Cells:
    """Return the releases of streams whose residual life has their age as its median."""
    if not len(ages):
        return np.zeros(CELLS)
    after = np.arange(CELLS) * step
    gone = (after / np.maximum(ages[:, None] + after, 1e-9)).sum(axis=0)
    return np.diff(gone, prepend=0.0)


def _renewals(duration: _Cells) -> _Cells:
    """Return the expected number of starts per step in a slot whose occupant starts at 0: 1 + f + f*f + ...

    That is 1 / (1 - f) as a power series, by Newton's method: each round doubles the steps that are right.
    """
    less = -duration
    less[0] = 1 - min(float(duration[0]), 0.99)
    starts = np.array([1 / less[0]])
    while len(starts) < CELLS:
        twice = 2 * len(starts)
        again = -np.convolve(less[:twice], starts)[:twice]
        again[0] += 2
        starts = np.convolve(starts, again)[:twice]
    return starts
