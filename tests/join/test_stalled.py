"""A starved machine, recorded: gateway, engine and exporter stood still now and then, each for up to 0.8 s.

Eight asked at once on four slots through a gateway that leaks, two of the served left. Beats came late, a header came
long after its request, pages missed their beat. Such a machine may be told late who left, and not wrongly for good.
"""

from __future__ import annotations

from collections import Counter

import pytest

import replay
from tokengap.join import start, step
from tokengap.view import CLIENTS

STALLED = replay.BEATS.parent / "stalled"
NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in STALLED.glob("*.jsonl.gz"))


def test_there_are_recordings():
    """Of which the test below is about."""
    assert len(NAMES) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_it_ends_with_the_truth(name):
    """When all run again, six clients are connected and two are gone; and so it stays."""
    truth, beats = replay.load(str(STALLED / name))
    state, seen = None, []
    for readings in beats:
        state, view = step(start(readings.topology) if state is None else state, readings)
        seen.append(Counter(CLIENTS[code] for code in view.streams["client"]))
    assert seen[-4:] == [truth] * 4
