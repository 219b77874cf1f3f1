"""Losses are known: whatever is missed, the ledger is an identity, no total falls, and the beats are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from join.test_fold import crowd
from join.world import World
from tokengap.join import start, step
from tokengap.join.ledger import totals
from tokengap.readings import Reading, Readings, SocketTable
from tokengap.view import View


def play(world: World, loses: Callable[[int, Readings], Readings]) -> list[View]:
    """Join a history of which ``loses`` takes something away, beat by beat; every beat has to balance."""
    state, views = start(world.topology), []
    before = (0.0, 0.0, 0.0)
    for number, readings in enumerate(world.beats(400)):
        state, view = step(state, loses(number, readings))
        tokens = view.engines[0].tokens
        assert totals(tokens)["sum"] == pytest.approx(tokens.out, abs=1e-6)
        now = (tokens.useful, sum(tokens.orphaned.values()), tokens.unattributed)
        assert all(new >= old - 1e-9 for new, old in zip(now, before, strict=True))
        assert tokens.pending >= 0
        before = now
        views.append(view)
    return views


class Overrun:
    """Every other beat in which two or more sockets closed, the kernel dropped the news of half of them."""

    def __init__(self) -> None:
        self.lost = 0

    def __call__(self, number: int, readings: Readings) -> Readings:
        snapshot = readings.sockets.value
        assert snapshot is not None
        closed = snapshot.closed
        if number % 2 == 0 and len(closed) > 1:
            self.lost += 1
            closed = closed[: len(closed) // 2]
        return replace(
            readings, sockets=replace(readings.sockets, value=replace(snapshot, closed=closed, lost=self.lost))
        )


@pytest.mark.parametrize("leaks", [None, "edge"])
def test_events_that_were_dropped_are_counted_and_the_rest_is_right(leaks: str | None) -> None:
    """Each overrun is one degraded beat; useful and orphaned are off by no more than a beat of each socket missed."""
    world, overrun = World(crowd(spacing=0.3, tokens=200), slots=20, leaks=leaks), Overrun()
    view = play(world, overrun)[-1]
    tokens, truth = view.engines[0].tokens, world.truth
    assert overrun.lost > 0
    assert (view.events_lost, view.degraded_beats) == (overrun.lost, overrun.lost)
    assert tokens.out == truth["out"]
    assert tokens.useful == pytest.approx(truth["useful"], abs=20 * world.rate)
    assert view.accounting == "exact"


class Outage:
    """The sockets cannot be read for ten beats. What ended meanwhile waits in the kernel and is told afterwards."""

    def __init__(self) -> None:
        self.waiting: list[SocketTable] = []

    def __call__(self, number: int, readings: Readings) -> Readings:
        snapshot = readings.sockets.value
        assert snapshot is not None
        self.waiting.append(snapshot.closed)
        if 5 <= number < 15:
            return replace(readings, sockets=Reading(readings.at, error="no answer"))
        value = replace(snapshot, closed=np.concatenate(self.waiting))
        self.waiting = []
        return replace(readings, sockets=replace(readings.sockets, value=value))


@pytest.mark.parametrize("leaks", [None, "edge"])
def test_a_source_that_fails_for_ten_beats(leaks: str | None) -> None:
    """Ten degraded beats; what nobody saw is no orphan of a hop that does not leak, and afterwards all is counted."""
    world = World(crowd(spacing=1.2, tokens=200), slots=20, leaks=leaks)
    views = play(world, Outage())
    assert len(views) > 20  # it went on after the outage
    tokens, truth = views[-1].engines[0].tokens, world.truth
    assert views[-1].degraded_beats == 10
    assert {view.accounting for view in views[5:15]} == {"none"}
    assert all(view.namespaces == {} for view in views[5:15])
    assert tokens.out == truth["out"]
    assert tokens.pending == pytest.approx(0, abs=1)
    assert sum(tokens.orphaned.values()) <= truth["gap"] + 0.01 * truth["out"]
    assert tokens.useful <= truth["useful"] + 0.01 * truth["out"]


def test_a_late_beat_is_degraded_and_loses_nothing() -> None:
    """It came late and says so; counters tell what happened in between."""
    world = World(crowd(), slots=20, leaks="edge")
    views = play(world, lambda number, readings: replace(readings, late=number == 3))
    tokens, truth = views[-1].engines[0].tokens, world.truth
    assert (views[-1].late_beats, views[-1].degraded_beats) == (1, 1)
    assert tokens.useful == pytest.approx(truth["useful"], abs=0.01 * truth["out"])


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["all", "no events", "no sockets", "no page", "half"]), min_size=12, max_size=12))
def test_whatever_is_missed_the_ledger_is_an_identity(kinds: list[str]) -> None:
    """In any order; checked in each beat by ``play``."""
    overrun = Overrun()

    def loses(number: int, readings: Readings) -> Readings:
        kind = kinds[number] if number < len(kinds) else "all"
        snapshot = readings.sockets.value
        assert snapshot is not None
        if kind == "no sockets":
            return replace(readings, sockets=Reading(readings.at, error="no answer"))
        if kind == "no events":
            without = replace(snapshot, closed=snapshot.closed[:0], events=False, lost=overrun.lost)
            return replace(readings, sockets=replace(readings.sockets, value=without))
        if kind == "no page":
            readings = replace(readings, engines={"worker": Reading(readings.at, error="no answer")})
        if kind == "half":
            return overrun(0, readings)
        return replace(readings, sockets=replace(readings.sockets, value=replace(snapshot, lost=overrun.lost)))

    world = World(crowd(8, 3, 100, spacing=0.3), slots=4, leaks="edge")
    assert play(world, loses)[-1].engines[0].tokens.out <= world.truth["out"]
