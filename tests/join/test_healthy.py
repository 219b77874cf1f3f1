"""Healthy traffic, recorded: three proxies with pooled connections, polls, queues, answers in one piece. Nobody left.

What a soak (``tokengap.lab.soak``) once took for orphans: brief clients on connections that are kept, a client that
asks two things in one beat, an answer to somebody who had closed before it was asked for, a poll whose answer is as
long as a header, the second answer of a connection that closed, what HAProxy corks.
"""

from __future__ import annotations

import pytest

import replay
from tokengap.join import start, step

HEALTHY = replay.BEATS.parent / "healthy"
NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in HEALTHY.glob("*.jsonl.gz"))


@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_an_orphan(name):
    """In no beat is a stream shown whose client has left, no token is orphaned, and none is lost."""
    truth, beats = replay.load(str(HEALTHY / name))
    state = None
    for readings in beats:
        state, view = step(start(readings.topology) if state is None else state, readings)
        assert {group.client for group in view.groups} <= {"connected", "stalled"}
        assert sum(view.engines[0].tokens.orphaned.values()) == pytest.approx(0, abs=1e-6)
    assert "orphaned" not in {how for (_, _, how), n in view.endings.items() if n}
    assert view.engines[0].tokens.out == truth["out"]


def test_there_are_recordings():
    """Of which the test above is about."""
    assert len(NAMES) >= 5
