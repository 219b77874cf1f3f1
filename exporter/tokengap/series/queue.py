"""The wait: the age of the queue, the slots it waits for, and what is left of the deadline."""

from __future__ import annotations

from collections.abc import Iterable

from tokengap.series.declare import Sample, Series, one_of, per_engine
from tokengap.view import QUEUE_AGES_FROM, View


def _queue_age_source(view: View) -> Iterable[Sample]:
    for engine in view.engines:
        yield from one_of(QUEUE_AGES_FROM, engine.queue_age_from, engine.name)


def _slots(view: View) -> Iterable[Sample]:
    for engine in view.engines:
        if engine.slots is not None and engine.slots_from is not None:
            yield Sample((engine.name, engine.slots_from), engine.slots)


def _slack(view: View) -> Iterable[Sample]:
    for engine in view.engines:
        for klass, seconds in engine.slack.items():
            yield Sample((engine.name, klass), seconds)


def _unsafe(view: View) -> Iterable[Sample]:
    for engine in view.engines:
        for condition, holds in engine.unsafe.items():
            yield Sample((engine.name, condition), float(holds))


QUEUE_AGE = Series(
    name="tokengap_queue_age_seconds",
    kind="gauge",
    help="How long the head of the engine's queue has waited, in seconds; 0 when nothing waits. Page on this before "
    "slot utilization: full slots are normal, a queue that ages is not.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.queue_age),
)

QUEUE_AGE_SOURCE = Series(
    name="tokengap_queue_age_source",
    kind="gauge",
    help="What the queue age was taken from, 1 for the one in use: sockets (exact) or curve (from arrivals and "
    "departures on the engine's page). All 0 when the queue age is not known.",
    labels=("engine", "source"),
    read=_queue_age_source,
)

SLOTS = Series(
    name="tokengap_slots",
    kind="gauge",
    help="Sequences the engine can run at once (max_num_seqs). Source: settings, commandline, or observed, the highest "
    "number seen running, which is only a lower bound.",
    labels=("engine", "source"),
    read=_slots,
)

SLOT_UTILIZATION = Series(
    name="tokengap_slot_utilization_ratio",
    kind="gauge",
    help="Running sequences over slots, 0 to 1. High is what you pay for, whoever the slots work for: never page on it "
    "alone, compare it with the tokens orphaned.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.utilization),
)

DEADLINE_SLACK = Series(
    name="tokengap_deadline_slack_seconds",
    kind="gauge",
    help="Deadline minus time waited of the worst stream that still waits for its first token, in seconds; the full "
    "deadline when nobody waits, negative once it is missed.",
    labels=("engine", "class"),
    read=_slack,
)

DEADLINE_BREACH = Series(
    name="tokengap_deadline_breach_seconds_total",
    kind="counter",
    help="Seconds in which the queue was older than the age cut and slack was below the reserve. A counter keeps what "
    "falls between two scrapes: alert on its increase().",
    labels=("engine",),
    read=per_engine(lambda engine: engine.breach_seconds),
)

FREE_CAPACITY_UNSAFE = Series(
    name="tokengap_free_capacity_unsafe",
    kind="gauge",
    help="Why a free slot must not be given away, 1 for each condition that holds: no_cancel (clients left and their "
    "streams ran on), not_tied (tokens are generated for nobody), slack_short (less slack than the mean stream age). "
    "Missing while it is not known: nobody left, nothing was generated, no stream is in flight.",
    labels=("engine", "reason"),
    read=_unsafe,
)

QUEUE = (QUEUE_AGE, QUEUE_AGE_SOURCE, SLOTS, SLOT_UTILIZATION, DEADLINE_SLACK, DEADLINE_BREACH, FREE_CAPACITY_UNSAFE)
