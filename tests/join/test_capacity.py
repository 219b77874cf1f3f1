"""May a free slot be given away? Each condition on both sides of its edge, and not known while nothing happens."""

from __future__ import annotations

import pytest

from tokengap.join.capacity import EVERY, WINDOW, Counts, Lately, observe

START = Counts(0.0, left=100, ran_on=50, out=1e6, orphaned=1e5)


def after(left=0, ran_on=0, out=0, orphaned=0, *, held=(False,), slack=None, mean_age=None):
    """The conditions after so much happened since the start."""
    lately, conditions = observe(Lately(), START, held=False, slack=None, mean_age=None)
    assert conditions == {}, "what happened before is not known"
    for beat, one in enumerate(held, start=1):
        now = Counts(float(beat), 100 + left, 50 + ran_on, 1e6 + out, 1e5 + orphaned)
        lately, conditions = observe(lately, now, held=one, slack=slack, mean_age=mean_age)
    return conditions


@pytest.mark.parametrize(
    ("happened", "known"),
    [
        ({}, {}),
        ({"left": 10, "ran_on": 1}, {"no_cancel": False}),
        ({"left": 10, "ran_on": 2}, {"no_cancel": True}),
        ({"held": (True,)}, {}),
        ({"held": (True, True)}, {"no_cancel": True}),
        ({"held": (True, False), "left": 1}, {"no_cancel": False}),
        ({"out": 1000, "orphaned": 10}, {"not_tied": False}),
        ({"out": 1000, "orphaned": 11}, {"not_tied": True}),
        ({"slack": 3.0, "mean_age": 3.0}, {"slack_short": False}),
        ({"slack": 3.0, "mean_age": 3.1}, {"slack_short": True}),
        ({"slack": 3.0}, {}),
        ({"mean_age": 3.0}, {}),
    ],
)
def test_a_condition(happened, known):
    """Ten in a hundred who ran on are none too many, nor is one token in a hundred; what did not happen is missing."""
    assert after(**happened) == known


def test_what_was_long_ago_does_not_count():
    """A leak that was mended is forgotten after the window."""
    lately, at = Lately(), 0.0
    while at <= 2 * WINDOW:
        leaks = at < 60
        ran_on = min(at, 60.0)
        counts = Counts(at, left=at, ran_on=ran_on, out=10 * at, orphaned=5 * ran_on)
        lately, conditions = observe(lately, counts, held=False, slack=None, mean_age=None)
        if at > 0 and (leaks or at > 60 + WINDOW):
            assert conditions == {"no_cancel": leaks, "not_tied": leaks}, at
        at += 1.0
    assert len(lately.counts) <= WINDOW / EVERY + 1
