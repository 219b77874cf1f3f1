"""The gateway as a view, so that its page has the exporter's own series, exact where the exporter estimates. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from tokengap.admit.books import Books
from tokengap.admit.gate import EngineNow, GateView
from tokengap.admit.states import State
from tokengap.readings import GatewayClass, GatewayEngine, GatewayPage, GatewayStreams
from tokengap.series.admit import ADMISSION
from tokengap.series.declare import Series
from tokengap.series.itself import BEAT_INTERVAL, BUILD_INFO, LAST_BEAT
from tokengap.series.queue import DEADLINE_SLACK, QUEUE_AGE, SLOT_UTILIZATION, SLOTS
from tokengap.series.streams import STREAMS_IN_FLIGHT
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT, TOKENS_PENDING, TOKENS_USEFUL
from tokengap.topology import GATEWAY_HOP, Engine
from tokengap.view import AGE_BOUNDS, DECISIONS, ENDINGS, STREAM, AdmissionView, Client, EngineView, StreamGroup, View

#: Seconds for which a page is served again.
EVERY: Final = 1.0

#: An age of exactly a bound belongs below it.
_BINS: Final = (0.0, *np.nextafter(AGE_BOUNDS, np.inf), np.inf)

#: What is on the page of the gateway: of the exporter's series those that it knows by itself, and its own.
SERIES: Final[tuple[Series, ...]] = (
    *(TOKENS_OUT, TOKENS_USEFUL, TOKENS_ORPHANED, TOKENS_PENDING),
    *STREAMS_IN_FLIGHT,
    *(QUEUE_AGE, SLOTS, SLOT_UTILIZATION, DEADLINE_SLACK),
    *ADMISSION,
    *(LAST_BEAT, BEAT_INTERVAL, BUILD_INFO),
)


def page_of(gate: GateView, books: Books, started: float, now: float) -> GatewayPage:
    """Return what an exporter is told (``tokengap serve --admit``). ``started`` is Unix time, ``now`` monotonic."""
    return GatewayPage(
        started=started,
        mode=gate.mode,
        closed=gate.closed,
        engines={engine.name: _told(engine, books) for engine in gate.engines},
        classes={
            one.name: GatewayClass(
                waiting=one.waiting,
                queue_age=one.queue_age,
                expected_start=_known(one.expected_start),
                decisions={decision: gate.decisions.get((one.name, decision), 0) for decision in DECISIONS},
            )
            for one in gate.classes
        },
        moves=tuple((str(a), str(b), str(c), times) for (a, b, c), times in gate.moves.items()),
        streams=tuple(
            GatewayStreams(one.engine, one.client, one.count, one.ages, one.age_sum, one.age_max)
            for one in _groups(books, now)
        ),
    )


def _known(seconds: float | None) -> float | None:
    """Return a time that JSON can tell: it has no infinity, which is to no slot being ever expected to be free."""
    return None if seconds is None or math.isinf(seconds) else seconds


def _told(engine: EngineNow, books: Books) -> GatewayEngine:
    tokens = books.tokens(engine.name)
    return GatewayEngine(
        out=tokens.out,
        useful=tokens.useful,
        orphaned=sum(tokens.orphaned.values()),
        ended={how: books.endings[engine.name, how] for how in ENDINGS},
        slots=engine.states,
        held_for=engine.held_for,
        up=engine.up,
    )


def view_of(
    gate: GateView,
    books: Books,
    engines: Sequence[Engine],
    models: Mapping[str, tuple[str, ...]],
    deadlines: Mapping[str, float],
    *,
    now: float,
    wall: float,
    beats: int,
) -> View:
    """Return what is known now (monotonic; ``wall`` is Unix time). ``models`` by engine, from their pages.

    ``deadlines`` by class, in seconds.
    """
    by_name = {engine.name: engine for engine in gate.engines}
    queue_age = max((one.queue_age for one in gate.classes), default=0.0)
    waiting = sum(one.waiting for one in gate.classes)
    slack = _slack(books, deadlines, now)
    return View(
        at=now,
        wall=wall,
        beats=beats,
        late_beats=0,
        degraded_beats=0,
        interval=EVERY,
        accounting="exact",
        events_lost=0,
        sources=(),
        engines=tuple(
            _engine(engine, by_name[engine.name], books, models.get(engine.name, ()), waiting, queue_age, slack)
            for engine in engines
        ),
        hop_names=(GATEWAY_HOP,),
        groups=tuple(_groups(books, now)),
        endings={(engine, GATEWAY_HOP, how): count for (engine, how), count in books.endings.items()},
        streams=np.zeros(0, STREAM),
        admission=AdmissionView(
            mode=gate.mode,
            closed=gate.closed,
            decisions=gate.decisions,
            moves={(str(a), str(b), str(c)): count for (a, b, c), count in gate.moves.items()},
            waiting={one.name: one.waiting for one in gate.classes},
            queue_ages={one.name: one.queue_age for one in gate.classes},
            expected_starts={one.name: one.expected_start for one in gate.classes if one.expected_start is not None},
            slots={(engine.name, state): count for engine in gate.engines for state, count in engine.states.items()},
            held_for={engine.name: engine.held_for for engine in gate.engines},
            engines_up={engine.name: engine.up for engine in gate.engines},
        ),
    )


def _engine(
    engine: Engine,
    slots: EngineNow,
    books: Books,
    models: tuple[str, ...],
    waiting: int,
    queue_age: float,
    slack: Mapping[str, float],
) -> EngineView:
    taken = sum(count for state, count in slots.states.items() if state != "free")
    return EngineView(
        name=engine.name,
        url=engine.url,
        models=models,
        state="busy" if taken else "idle",
        evidence="",
        tokens=books.tokens(engine.name),
        running=float(taken),
        waiting=float(waiting),
        slots=float(slots.slots),
        slots_from="settings",
        queue_age=queue_age,
        queue_age_from="sockets",
        slack=slack,
        coverage=None,
        open_streams=slots.states.get(State.STREAMING, 0),
        progress_age=None,
        restarts=0,
        ghost_steps=0.0,
        breach_seconds=0.0,
        skipped={},
    )


def _groups(books: Books, now: float) -> Iterable[StreamGroup]:
    ages: defaultdict[tuple[str, Client], list[float]] = defaultdict(list)
    for entry in books:
        ages[books.engine_of(entry), entry.client_state].append(now - entry.since)
    for (engine, client), of_group in ages.items():
        counts = np.histogram(of_group, bins=_BINS)[0]
        yield StreamGroup(
            engine,
            GATEWAY_HOP,
            client,
            len(of_group),
            tuple(counts.tolist()),
            sum(of_group),
            max(of_group),
        )


def _slack(books: Books, deadlines: Mapping[str, float], now: float) -> Mapping[str, float]:
    """Return what is left, by class, to the worst of those that wait for their first token."""
    slack = dict(deadlines)
    for entry in books:
        if entry.waits and entry.klass in deadlines:
            slack[entry.klass] = min(slack[entry.klass], deadlines[entry.klass] - (now - entry.since))
    return slack
