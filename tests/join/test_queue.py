"""The queue's age, against a queue whose truth is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokengap.join.queue import (
    MAX_STEPS,
    Curve,
    breach,
    head_age,
    head_age_from_waits,
    observe,
    queue_age,
    slack,
)

BEAT = 1.0


@dataclass
class FifoEngine:
    """An engine with ``slots`` slots, a first-in-first-out queue, and its truth: when each request arrived."""

    slots: int
    waiting: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)  # by the order in which they were started
    finished: int = 0

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))

    def arrive(self, at: float) -> None:
        self.waiting.append(at)
        self.fill()

    def finish(self, which: int = 0) -> None:
        if self.running:
            self.running.pop(which % len(self.running))
            self.finished += 1
            self.fill()

    def preempt(self) -> None:
        """Take the last that was started back to the front of the queue; its slot is short of memory, not free."""
        if len(self.running) > 1:
            self.waiting.insert(0, self.running.pop())

    def leave(self, queue: list[float], which: int) -> None:
        if queue:
            queue.pop(which % len(queue))
            self.fill()

    def head_age(self, at: float) -> float:
        return at - self.waiting[0] if self.waiting else 0.0

    def read(self, curve: Curve, at: float) -> Curve:
        return observe(curve, at, self.finished, len(self.running), len(self.waiting))


#: What happens within one beat: events in order, each with its instant as a share of the beat.
def beats(*kinds: str, most: int = 6) -> st.SearchStrategy[list[list[tuple[float, str, int]]]]:
    event = st.tuples(st.floats(0.01, 1.0), st.sampled_from(kinds), st.integers(0, 50))
    return st.lists(st.lists(event, max_size=most).map(sorted), min_size=1, max_size=30)


def happen(engine: FifoEngine, kind: str, at: float, which: int) -> None:
    if kind == "arrive":
        engine.arrive(at)
    elif kind == "finish":
        engine.finish()
    elif kind == "finish any":
        engine.finish(which)
    elif kind == "preempt":
        engine.preempt()
    elif kind == "queued one leaves":
        engine.leave(engine.waiting, which)
    elif kind == "head leaves":
        engine.leave(engine.waiting, 0)
    elif kind == "running one leaves":
        engine.leave(engine.running, which)


SLOTS = st.integers(1, 4)


class TestCurveOfAFifoQueue:
    @given(SLOTS, beats("arrive", "arrive", "finish any"))
    def test_is_right_within_half_a_beat(self, slots, story):
        """Nobody aborts: the head's age is off by half a beat at most, at every read, whatever order they finish in."""
        engine, curve = FifoEngine(slots), Curve()
        curve = engine.read(curve, 0.0)
        for n, events in enumerate(story):
            for share, kind, which in events:
                happen(engine, kind, (n + share) * BEAT, which)
            now = (n + 1) * BEAT
            curve = engine.read(curve, now)
            assert head_age(curve, now) == pytest.approx(engine.head_age(now), abs=BEAT / 2 + 1e-9)

    @given(SLOTS, beats("arrive", "arrive", "finish"), st.lists(st.floats(0.2, 9.0), min_size=30, max_size=30))
    def test_is_right_within_half_the_gap_in_which_the_head_came(self, slots, story, gaps):
        """Reads come when they come: the error stays within half of the longest gap between two of them."""
        engine, curve, now = FifoEngine(slots), Curve(), 0.0
        curve = engine.read(curve, now)
        for events, gap in zip(story, gaps, strict=False):
            for share, kind, which in events:
                happen(engine, kind, now + share * gap, which)
            now += gap
            curve = engine.read(curve, now)
            assert head_age(curve, now) == pytest.approx(engine.head_age(now), abs=max(gaps) / 2 + 1e-9)

    @given(SLOTS, beats("arrive", "arrive", "finish", "preempt"))
    def test_takes_preempted_requests_for_the_head_again(self, slots, story):
        """A preempted request is the head with the arrival it had: right within half a beat."""
        engine, curve = FifoEngine(slots), Curve()
        curve = engine.read(curve, 0.0)
        for n, events in enumerate(story):
            for share, kind, which in events:
                happen(engine, kind, (n + share) * BEAT, which)
            now = (n + 1) * BEAT
            curve = engine.read(curve, now)
            assert head_age(curve, now) == pytest.approx(engine.head_age(now), abs=BEAT / 2 + 1e-9)

    def test_at_the_edges_of_rest_and_of_the_age_cut(self):
        """0 exactly while nobody waits; a head that waits for 6 s crosses 6 s within half a beat of it."""
        engine, curve = FifoEngine(slots=1), Curve()
        for second in range(3):
            curve = engine.read(curve, float(second))
            assert head_age(curve, second + 0.9) == 0.0
        engine.arrive(2.5)
        engine.arrive(2.5)
        curve = engine.read(curve, 3.0)
        assert head_age(curve, 8.4) < 6.0 < head_age(curve, 8.6)
        engine.finish()
        curve = engine.read(curve, 9.0)
        assert head_age(curve, 9.0) == 0.0

    def test_a_burst_ages_together(self):
        """Twenty users at once on one slot: each head has the age of the burst."""
        engine, curve = FifoEngine(slots=1), Curve()
        curve = engine.read(curve, 0.0)
        for _ in range(20):
            engine.arrive(0.7)
        for second in range(1, 20):
            curve = engine.read(curve, float(second))
            assert head_age(curve, second) == pytest.approx(second - 0.7, abs=0.5)
            engine.finish()

    def test_long_queues_are_kept_in_bounded_memory(self):
        """An hour of arrivals behind a stuck head stays within MAX_STEPS, and each head within 1 % of its age."""
        engine, curve = FifoEngine(slots=1), Curve()
        curve = engine.read(curve, 0.0)
        for second in range(3600):
            engine.arrive(second + 0.5)
            curve = engine.read(curve, second + 1.0)
        assert len(curve.steps) <= MAX_STEPS
        for second in range(3600, 3600 + 900):
            for _ in range(4):
                engine.finish()
            curve = engine.read(curve, second + 1.0)
            truth = engine.head_age(second + 1.0)
            assert head_age(curve, second + 1.0) == pytest.approx(truth, rel=0.01, abs=0.5)


def ages_after_a_crowd(slots, crowd, story):
    """Yield the curve's age of the head and the true one after each beat of a story that a crowd has come before."""
    engine, curve = FifoEngine(slots), Curve()
    curve = engine.read(curve, 0.0)
    for i in range(crowd):
        engine.arrive(i * 0.3)
        curve = engine.read(curve, (i + 1) * 0.3)
    start = crowd * 0.3
    for n, events in enumerate(story):
        for share, kind, which in events:
            happen(engine, kind, start + n + share, which)
        now = start + n + 1
        curve = engine.read(curve, now)
        yield head_age(curve, now), engine.head_age(now)


class TestCurveWithDepartures:
    @given(SLOTS, beats("arrive", "arrive", "finish", "queued one leaves", "running one leaves"))
    def test_is_bounded(self, slots, story):
        """Whoever leaves: never negative, never unknown, never older than the time since the queue was seen empty, and
        0 when it is."""
        engine, curve, empty_at = FifoEngine(slots), Curve(), 0.0
        curve = engine.read(curve, 0.0)
        for n, events in enumerate(story):
            for share, kind, which in events:
                happen(engine, kind, (n + share) * BEAT, which)
            now = (n + 1) * BEAT
            curve = engine.read(curve, now)
            age = head_age(curve, now)
            assert age is not None
            if engine.waiting:
                assert 0 <= age <= now - empty_at
            else:
                assert age == 0
                empty_at = now

    @given(SLOTS, st.integers(1, 40), beats("finish", "head leaves", "running one leaves"))
    def test_is_right_where_the_impatient_or_the_running_leave(self, slots, crowd, story):
        """A crowd came at once and nobody after it: aborted heads, and running ones whose slot the head takes, cost no
        accuracy."""
        for age, truth in ages_after_a_crowd(slots, crowd, story):
            assert age == pytest.approx(truth, abs=0.15 + 1e-9)

    @given(SLOTS, st.integers(1, 40), beats("finish", "queued one leaves", "running one leaves"))
    def test_errs_to_the_young_side_where_any_queued_one_leaves(self, slots, crowd, story):
        """Which of the queued left cannot be known; the age is then too low, never too high."""
        for age, truth in ages_after_a_crowd(slots, crowd, story):
            assert 0 <= age <= truth + 0.15 + 1e-9

    def test_an_abort_of_a_running_request_moves_the_head_on(self):
        """One slot, its client leaves, the head takes it: the next in the queue is the head."""
        engine, curve = FifoEngine(slots=1), Curve()
        curve = engine.read(curve, 0.0)
        for second in range(3):
            engine.arrive(second + 0.5)
            curve = engine.read(curve, second + 1.0)
        assert head_age(curve, 3.0) == 1.5
        engine.leave(engine.running, 0)
        curve = engine.read(curve, 4.0)
        assert head_age(curve, 4.0) == 1.5

    @given(SLOTS, beats("arrive", "arrive", "finish"), st.lists(st.booleans(), min_size=30, max_size=30))
    def test_a_finish_counted_late_is_bounded_and_forgotten(self, slots, story, lags):
        """`finished` may lag a read behind `running`: never negative, nor older than the time since the queue was
        empty, and right once it was."""
        engine, curve, empty_at, reported = FifoEngine(slots), Curve(), 0.0, 0
        curve = engine.read(curve, 0.0)
        for n, (events, late) in enumerate(zip(story, lags, strict=False)):
            before = engine.finished
            for share, kind, which in events:
                happen(engine, kind, (n + share) * BEAT, which)
            now = (n + 1) * BEAT
            reported = max(reported, before if late else engine.finished)
            curve = observe(curve, now, reported, len(engine.running), len(engine.waiting))
            if engine.waiting:
                assert 0 <= head_age(curve, now) <= now - empty_at
            else:
                assert head_age(curve, now) == 0
                empty_at = now


class TestCurveThatBeginsAnew:
    def test_nothing_is_known_before_the_first_page(self):
        """No page: unknown, not 0."""
        assert head_age(Curve(), 5.0) is None

    def test_a_head_that_was_there_before_us_has_no_known_age(self):
        """A queue of two at the first read: unknown until both have gone, right for the third."""
        curve = observe(Curve(), 100.0, 50, 1, 2)
        curve = observe(curve, 101.0, 50, 1, 3)
        assert head_age(curve, 101.0) is None
        curve = observe(curve, 102.0, 51, 1, 2)
        assert head_age(curve, 102.0) is None
        curve = observe(curve, 103.0, 52, 1, 1)
        assert head_age(curve, 103.0) == 103.0 - 100.5

    @pytest.mark.parametrize("waited_before", [0, 3])
    def test_a_restart_compares_nothing_across(self, waited_before):
        """Counters fell: who waits now came since the last page if nobody waited then, else nobody knows when."""
        curve = observe(Curve(), 10.0, 500, 4, waited_before)
        curve = observe(curve, 40.0, 0, 4, 2)
        assert head_age(curve, 40.0) == (15.0 if waited_before == 0 else None)
        curve = observe(curve, 41.0, 2, 4, 0)
        assert head_age(curve, 41.0) == 0.0
        curve = observe(curve, 42.0, 2, 4, 1)
        assert head_age(curve, 42.0) == 0.5

    def test_pages_without_finished_requests_tell_only_of_a_queue_that_was_empty(self):
        """V0 and Rust show `request_success` from the first finish on: before that, only a new queue's age is known."""
        curve = observe(Curve(), 0.0, None, 0, 0)
        assert head_age(curve, 0.0) == 0.0
        curve = observe(curve, 1.0, None, 4, 3)
        assert head_age(curve, 1.0) == 0.5
        curve = observe(curve, 2.0, None, 4, 3)
        assert head_age(curve, 2.0) is None

    def test_a_page_that_lacks_it_once_is_passed_over(self):
        """A cut line costs one read, not the curve."""
        curve = observe(observe(Curve(), 0.0, 5, 1, 0), 1.0, 5, 1, 1)
        assert observe(curve, 2.0, None, 1, 1) == curve
        assert head_age(observe(curve, 3.0, 5, 1, 2), 3.0) == 2.5

    def test_a_page_read_twice_changes_nothing(self):
        """The same instant, or an older one, is no news."""
        curve = observe(Curve(), 1.0, 5, 1, 0)
        assert observe(curve, 1.0, 9, 1, 4) == curve
        assert observe(curve, 0.5, 9, 1, 4) == curve

    @given(
        st.lists(
            st.tuples(
                st.floats(0, 100), st.none() | st.integers(0, 99), st.integers(0, 9), st.integers(0, 9), st.floats(0, 9)
            )
        )
    )
    def test_any_sequence_of_pages_gives_an_age_or_none(self, pages):
        """Whatever the pages say, in whatever order: an age >= 0 or None, and what waits is accounted for."""
        curve = Curve()
        for at, finished, running, waiting, later in pages:
            curve = observe(curve, at, finished, running, waiting)
            age = head_age(curve, curve.at + later)
            assert age is None or age >= 0
            assert sum(step.count for step in curve.steps) - curve.started == curve.waiting
            assert len(curve.steps) <= MAX_STEPS


class TestHeadAgeFromWaits:
    @given(st.lists(st.floats(0, 1000), max_size=30), st.integers(0, 30))
    def test_is_the_oldest_of_the_youngest(self, waits, waiting):
        """The `waiting` youngest are queued, and the oldest of them is the head; None where fewer are seen."""
        expected = 0.0 if waiting == 0 else sorted(waits)[waiting - 1] if len(waits) >= waiting else None
        assert head_age_from_waits(np.array(waits), waiting) == expected

    def test_those_in_prefill_do_not_count(self):
        """Three without a first byte, two of them queued: the oldest is in prefill."""
        assert head_age_from_waits(np.array([9.0, 4.0, 6.5]), 2) == 6.5

    def test_unknown_ages_are_not_seen(self):
        """A stream whose request instant is unknown covers nothing."""
        assert head_age_from_waits(np.array([1.0, math.nan]), 2) is None
        assert head_age_from_waits(np.array([1.0, math.nan]), 1) == 1.0


class TestQueueAge:
    curve = observe(observe(Curve(), 0.0, 0, 1, 0), 1.0, 0, 1, 2)

    def test_sockets_win_where_they_cover_the_queue(self):
        """Two wait, two are seen: the sockets' age, not the curve's."""
        assert queue_age(self.curve, 1.0, 2, np.array([0.9, 0.2])) == (0.9, "sockets")

    @pytest.mark.parametrize("waits", [None, np.array([]), np.array([0.9])])
    def test_the_curve_serves_where_they_do_not(self, waits):
        """Sockets not read, or fewer streams than wait: the curve's age."""
        assert queue_age(self.curve, 1.0, 2, waits) == (0.5, "curve")

    def test_at_rest_it_is_zero(self):
        """Nobody waits: 0, known."""
        assert queue_age(self.curve, 1.0, 0, np.array([])) == (0.0, "sockets")
        assert queue_age(self.curve, 1.0, 0, None) == (0.0, "curve")

    def test_missing_is_not_zero(self):
        """No page: unknown, whatever the sockets show. Nor does a curve that never saw the head arrive know its age."""
        assert queue_age(self.curve, 1.0, None, np.array([3.0])) == (None, None)
        assert queue_age(observe(Curve(), 0.0, 0, 1, 2), 5.0, 2, None) == (None, None)


class TestSlack:
    @given(st.floats(0, 100), st.floats(0, 100))
    def test_is_what_is_left_of_the_deadline(self, deadline, wait):
        """Deadline minus wait, negative once missed; the whole deadline when nobody waits."""
        assert slack(deadline, wait) == deadline - wait
        assert slack(deadline, None) == deadline


class TestBreach:
    @pytest.mark.parametrize(
        ("age", "left", "grows"),
        [
            (6.1, 1.9, True),
            (6.0, 1.9, False),
            (6.1, 2.0, False),
            (0.0, 8.0, False),
            (None, 1.0, False),
            (7.0, None, False),
        ],
    )
    def test_needs_both_sides(self, age, left, grows):
        """Both past their edge, and both known, or the seconds stand still."""
        assert breach(3.0, 1.0, age, left, age_cut=6.0, reserve=2.0) == (4.0 if grows else 3.0)

    @given(st.floats(0, 1e9), st.floats(-10, 1e3), st.none() | st.floats(-10, 50), st.none() | st.floats(-50, 50))
    @example(0.0, -1.0, 7.0, 1.0)
    def test_never_falls(self, seconds, dt, age, left):
        """A counter, even where a clock went back."""
        assert breach(seconds, dt, age, left, age_cut=6.0, reserve=2.0) >= seconds
