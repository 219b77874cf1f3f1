"""How long the head of an engine's queue has waited, and what that does to the deadline.

The engine's page shows counts, never ages (no vLLM has an oldest-queued age). The age is derived twice: from the
sockets, where they cover the engine, and otherwise from the cumulative curves of its counts.

The curves
----------

``A = finished + running + waiting`` counts arrivals, ``S = finished + running`` counts starts. The queue is first in,
first out, so its head is arrival number ``S + 1``, and it has waited since ``A`` passed that number. Between two reads
all that is known is *that* it did; halfway is the guess with the smallest worst error, half the time between them.

What moves the curves without being an arrival or a start:

* **Departures.** A request that is aborted leaves no trace in any counter (vLLM issues 31503, 55634), so ``A`` falls.
  What fell is taken out of both curves: where the queue got shorter by it, it lost its oldest.
* **Preemptions.** The last that was started is put back at the front of the queue: ``S`` moves back, and the head is
  that request again, with the arrival it had.
* **Restarts and resets.** The counters fell: nothing before is compared with anything after.

What cannot be known from counts:

* Who left. Where aborts shorten the queue its oldest are taken to have gone, which is right for the impatient, and for
  aborted running requests whose slot the head took over. Where younger ones left, the age is too low.
* An abort and an arrival between the same two reads cancel: nothing moves, and the age is too high by one place.
* A finish that is counted later than ``running`` fell (several API servers write one page, a few ms apart) looks, in
  the rare read between, like an abort and then an arrival that started at once: the age is too low by one place. To
  take a late finish for granted would miscount the next arrival after each real abort, and these are not rare.
* A preempted request older than another that started after it and has finished is taken for that one.
* When those arrived who already waited at the first read: while one of them is the head, the age is unknown.
* Which rank's queue: the ranks of one page are summed, and their queues taken for one.

These errors end when the queue is next seen empty, and without preemptions the age is never higher than the time since
it last was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengap.view import QueueAgeFrom

#: Steps kept of the arrival curve. Past that two are merged where it blurs the age least: an hour of arrivals at one
#: read a second is then off by under one percent of the age.
MAX_STEPS = 512

#: When an arrival came that was there before we were.
BEFORE = -math.inf


@dataclass(frozen=True, slots=True)
class Step:
    """``count`` requests arrived after ``since`` and not after ``until`` (monotonic seconds)."""

    since: float
    until: float
    count: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The arrival curve of one engine as far as it still matters, and the page it was last brought up to.

    ``steps``, oldest first, hold the arrivals of everything that waits and, before them, of the last ``started`` that
    were started: as many as run, since any of them may be preempted.
    """

    at: float | None = None
    finished: float | None = None
    running: float = 0.0
    waiting: float = 0.0
    steps: tuple[Step, ...] = ()
    started: float = 0.0


def observe(curve: Curve, at: float, finished: float | None, running: float, waiting: float) -> Curve:
    """Return the curve after one read of the engine's page.

    ``at`` is when the page was read; a read that is not newer than the last changes nothing. ``finished`` is None
    while the page does not show it: a page that lacks it once is passed over, and while none ever showed it nothing
    can be told about a queue that was not empty before.
    """
    if curve.at is not None and (at <= curve.at or (finished is None and curve.finished is not None)):
        return curve
    if curve.at is None or curve.finished is None or finished is None or finished < curve.finished:
        return _begin(curve, at, finished, running, waiting)

    grown = (finished + running + waiting) - (curve.finished + curve.running + curve.waiting)
    arrived = max(grown, 0.0)  # it falls by what departed
    # Of the two curves only the queue between them is certain: what did not stay in it was started, or left. Negative
    # when requests came back into it.
    started = curve.started + arrived - (waiting - curve.waiting)

    steps = curve.steps
    if arrived > 0:
        steps = (*steps, Step(curve.at, at, arrived))
    if started < 0:  # more came back than are remembered
        steps = (Step(BEFORE, curve.at, -started), *steps)
        started = 0.0
    steps, started = _forget(steps, started, keep=running)
    return Curve(at, finished, running, waiting, steps, started)


def head_age(curve: Curve, at: float) -> float | None:
    """Return how long, at ``at``, the head of the queue has waited, in seconds.

    0.0 when nobody waits; None when that is not known: no page was read yet, or the head was there before the first.
    """
    if curve.at is None:
        return None
    if curve.waiting <= 0:
        return 0.0
    passed = 0.0
    for step in curve.steps:
        passed += step.count
        if passed > curve.started:
            return None if step.since == BEFORE else max(0.0, at - (step.since + step.until) / 2)
    return None


def _begin(curve: Curve, at: float, finished: float | None, running: float, waiting: float) -> Curve:
    """Start over from this page: it cannot be compared with the one before, if there was one."""
    # Whoever waits now, where nobody waited at the read before, came since then, whatever the counters did.
    since = BEFORE if curve.at is None or curve.waiting > 0 else curve.at
    before = (Step(BEFORE, at, running),) if running > 0 else ()
    queue = (Step(since, at, waiting),) if waiting > 0 else ()
    return Curve(at, finished, running, waiting, before + queue, started=max(running, 0.0))


def _forget(steps: tuple[Step, ...], started: float, keep: float) -> tuple[tuple[Step, ...], float]:
    """Drop the oldest started arrivals but the last ``keep``, and merge steps where there are too many."""
    drop = max(started - keep, 0.0)
    started -= drop
    first = 0
    while first < len(steps) and steps[first].count <= drop:
        drop -= steps[first].count
        first += 1
    steps = steps[first:]
    if drop > 0 and steps:
        steps = (replace(steps[0], count=steps[0].count - drop), *steps[1:])
    if len(steps) > MAX_STEPS:
        steps = _merged(steps)
    return steps, started


def _merged(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Merge the two neighbours that together span the least for their age."""
    now = steps[-1].until

    def blur(i: int) -> float:
        since = steps[i].since
        return math.inf if since == BEFORE else (steps[i + 1].until - since) / (now - since)

    i = min(range(len(steps) - 1), key=blur)
    a, b = steps[i], steps[i + 1]
    return (*steps[:i], Step(a.since, b.until, a.count + b.count), *steps[i + 2 :])


def head_age_from_waits(waits: NDArray[Any], waiting: float) -> float | None:
    """Return the head's wait from the sockets, in seconds.

    ``waits`` are the ages, seconds since the request, of the engine's streams that have no first byte yet: those in
    prefill and those in the queue. The queue is first in, first out, so the ``waiting`` youngest are the queued ones,
    and the oldest of these is the head. 0.0 when nobody waits; None when fewer streams than wait are seen: part of
    the queue came another way, or sent one request for several sequences.
    """
    queued = math.ceil(waiting)
    if queued <= 0:
        return 0.0
    known = waits[np.isfinite(waits)]
    if len(known) < queued:
        return None
    return max(0.0, float(np.partition(known, queued - 1)[queued - 1]))


def queue_age(
    curve: Curve, at: float, waiting: float | None, waits: NDArray[Any] | None
) -> tuple[float | None, QueueAgeFrom | None]:
    """Return the queue age at ``at`` and what it was taken from; (None, None) when it is not known.

    ``waiting`` is None when the engine's page was not read in this beat, ``waits`` (as in :func:`head_age_from_waits`)
    when the sockets were not. The sockets win where they cover the queue; the curve serves otherwise.
    """
    if waiting is None:
        return None, None
    age = None if waits is None else head_age_from_waits(waits, waiting)
    if age is not None:
        return age, "sockets"
    age = head_age(curve, at) if waiting > 0 else 0.0
    return age, None if age is None else "curve"


def slack(deadline: float, worst_wait: float | None) -> float:
    """Return the deadline less the longest wait for a first token, in seconds: the whole deadline when nobody waits."""
    return deadline - (worst_wait or 0.0)


def breach(
    seconds: float, dt: float, queue_age: float | None, slack: float | None, age_cut: float, reserve: float
) -> float:
    """Return the seconds spent in breach, brought forward by ``dt``.

    In breach, both: the queue is older than ``age_cut``, so a stream that is queued now will not make it, and less
    than ``reserve`` (deadline minus age cut) is left to the worst one that waits. What is not known is not a breach.
    """
    late = queue_age is not None and slack is not None and queue_age > age_cut and slack < reserve
    return seconds + max(dt, 0.0) if late else seconds
