"""A proxy that takes its time (a busy Python gateway): requests go on later than two instants of one could be apart.

Eight ask at once, the engine has four slots, two of the served leave after a second and the proxy reads on for them.
The four that wait are connected, and who watches the queue has to be told so.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest

from join.world import Person, World
from tokengap.join import start, step
from tokengap.view import CLIENTS, View

#: Seconds that the proxy takes, and when they ask: at which moment of a beat.
SLOW = (0.0, 0.03, 0.06, 0.08, 0.12, 0.35)
PHASES = (0.05, 0.25, 0.45, 0.65, 0.85)

WHEN = pytest.mark.parametrize(("slow", "asks"), list(product(SLOW, PHASES)))


def play(slow: float, asks: float, seconds: float = 12.0) -> list[View]:
    people = [Person(asks, 100_000, leaves=1.0 if n < 2 else None) for n in range(8)]
    world = World(people, slots=4, rate=10.0, leaks="edge", slow=slow)
    state, views = start(world.topology), []
    for readings in world.beats(seconds):
        state, view = step(state, readings)
        views.append(view)
    return views


def shown(view: View) -> dict[tuple[str, bool], int]:
    """Count the streams that are shown, by the client's state and whether its first token has come."""
    rows = view.streams
    clients = [CLIENTS[code] for code in rows["client"]]
    return Counter(zip(clients, rows["first_byte"].tolist(), strict=True))


@WHEN
def test_all_streams_are_shown_and_only_who_left_is_gone(slow, asks):
    """From two beats after they left, in every beat: none is lost, and none that waits is called gone."""
    for view in play(slow, asks)[5:]:
        assert shown(view) == {("connected", True): 2, ("gone", True): 2, ("connected", False): 4}


@WHEN
def test_the_queue_grows_old_and_its_deadline_is_missed(slow, asks):
    """In each beat the age is a second more and the slack a second less; past the age cut the breach is counted."""
    views = play(slow, asks)[2:]
    for before, now in pairwise(views):
        elapsed, one, two = now.at - before.at, before.engines[0], now.engines[0]
        assert two.queue_age - one.queue_age == pytest.approx(elapsed, abs=0.05)
        assert one.slack["interactive"] - two.slack["interactive"] == pytest.approx(elapsed, abs=0.05)
    last = views[-1].engines[0]
    assert last.slack["interactive"] < -2
    assert last.breach_seconds == pytest.approx(last.queue_age - 6.0, abs=1.1)


@pytest.mark.parametrize(("slots", "slow", "asks"), list(product((1, 4), SLOW, PHASES)))
def test_whose_tokens_were_whose_through_a_slow_proxy(slots, slow, asks):
    """Twenty at once, eight of whom leave, the proxy reads on for them: useful and orphaned within 1 %."""
    leaves = [1.5 if n * 8 // 20 != (n + 1) * 8 // 20 else None for n in range(20)]
    world = World([Person(asks, 100, one) for one in leaves], slots=slots, rate=100.0, leaks="edge", slow=slow)
    state = start(world.topology)
    for readings in world.beats(60):
        state, view = step(state, readings)
    tokens, truth = view.engines[0].tokens, world.truth
    assert tokens.useful == pytest.approx(truth["useful"], abs=0.01 * truth["out"])
    assert tokens.orphaned["edge"] == pytest.approx(truth["gap"], abs=0.01 * truth["out"])
