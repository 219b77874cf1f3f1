"""The admission: what was decided, who waits, and what the slots of each engine are taken by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokengap.series.declare import Sample, Series, one_of
from tokengap.view import DECISIONS, MODES, AdmissionView, View


def _of_gateway(read: Callable[[AdmissionView], Iterable[Sample]]) -> Callable[[View], Iterable[Sample]]:
    """Return a ``read`` that yields nothing where there is no gateway."""
    return lambda view: () if view.admission is None else read(view.admission)


def _each(values: Callable[[AdmissionView], Mapping[Any, float]]) -> Callable[[View], Iterable[Sample]]:
    """Return a ``read`` for a mapping from labels to values."""

    def read(admission: AdmissionView) -> Iterable[Sample]:
        for labels, value in values(admission).items():
            yield Sample(labels if isinstance(labels, tuple) else (labels,), float(value))

    return _of_gateway(read)


def _decisions(admission: AdmissionView) -> Iterable[Sample]:
    for klass in admission.waiting:
        for decision in DECISIONS:
            yield Sample((klass, decision), admission.decisions.get((klass, decision), 0))


ADMISSIONS = Series(
    name="tokengap_admissions_total",
    kind="counter",
    help="Decisions of the gateway about requests, by class: admitted, rejected_age (it could not start in time), "
    "rejected_busy (no free slot, or too many wait), rejected_retry (the request before it still holds its slot), "
    "rejected_closed (shutting down, or no engine).",
    labels=("class", "decision"),
    read=_of_gateway(_decisions),
)

ADMIT_MODE = Series(
    name="tokengap_admit_mode",
    kind="gauge",
    help="1 for the mode of the gateway: age (refuse whom the deadline is lost for) or busy (refuse when no slot is "
    "free, the rollback).",
    labels=("mode",),
    read=_of_gateway(lambda admission: one_of(MODES, admission.mode)),
)

ADMIT_WAITING = Series(
    name="tokengap_admit_waiting",
    kind="gauge",
    help="Requests that wait in the gateway for a slot, by class.",
    labels=("class",),
    read=_each(lambda admission: admission.waiting),
)

ADMIT_QUEUE_AGE = Series(
    name="tokengap_admit_queue_age_seconds",
    kind="gauge",
    help="How long the oldest request of a class has waited in the gateway, in seconds; 0 when none waits.",
    labels=("class",),
    read=_each(lambda admission: admission.queue_ages),
)

ADMIT_EXPECTED_START = Series(
    name="tokengap_admit_expected_start_seconds",
    kind="gauge",
    help="In how many seconds a request that came now would start, by class. Missing until a stream has ended.",
    labels=("class",),
    read=_each(lambda admission: admission.expected_starts),
)

ADMIT_SLOTS = Series(
    name="tokengap_admit_slots",
    kind="gauge",
    help="Slots of an engine by what they are taken by: free, streaming, or a stream without a client that is being "
    "taken apart: cancelling, closing, draining, and held, which is one that the engine works on although it was told.",
    labels=("engine", "state"),
    read=_each(lambda admission: admission.slots),
)

ADMIT_HELD = Series(
    name="tokengap_admit_slot_held_seconds",
    kind="gauge",
    help="How long ago the client left of the stream that holds a slot longest against its cancel, in seconds; 0 when "
    "there is none. Not 0: the engine ignores cancels, which is the leak.",
    labels=("engine",),
    read=_each(lambda admission: admission.held_for),
)

ADMIT_ENGINE_UP = Series(
    name="tokengap_admit_engine_up",
    kind="gauge",
    help="Whether an engine takes connections, as far as the gateway knows.",
    labels=("engine",),
    read=_each(lambda admission: admission.engines_up),
)

ADMIT_MOVES = Series(
    name="tokengap_admit_moves_total",
    kind="counter",
    help="Moves of streams between states at the gateway, by event. docs/admit.md has the table.",
    labels=("before", "event", "after"),
    read=_each(lambda admission: admission.moves),
)

ADMISSION = (
    *(ADMISSIONS, ADMIT_MODE, ADMIT_WAITING, ADMIT_QUEUE_AGE, ADMIT_EXPECTED_START),
    *(ADMIT_SLOTS, ADMIT_HELD, ADMIT_ENGINE_UP, ADMIT_MOVES),
)
