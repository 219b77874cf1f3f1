"""When a slot will be free: laid beside queues that are played out."""

import numpy as np
import pytest

from tokengap.admit.forecast import WINDOW, Durations, Occupied, forecast

#: Distributions of durations, seconds. The mean of each is near 2.
DRAWS = {
    "fixed": lambda _, n: np.full(n, 2.0),
    "exponential": lambda rng, n: rng.exponential(2.0, n),
    "heavy": lambda rng, n: rng.lognormal(0.2, 1.0, n),
    "two kinds": lambda rng, n: np.where(rng.random(n) < 0.8, 0.5, 8.0),
}


def played_out(draw, rng, ages, ahead, times=400):
    """Return when the request with ``ahead`` before it starts, in so many queues that begin with these ages."""
    pool = draw(rng, 20_000)
    starts = []
    for _ in range(times):
        free_at = np.array([rng.choice(pool[pool > age]) - age for age in ages])
        for duration in rng.choice(pool, ahead):
            free_at[free_at.argmin()] += duration
        starts.append(free_at.min())
    return starts


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (1, 4), (8, 12), (32, 64)])
def test_the_expected_start_is_in_the_middle_of_what_happens(name, slots, ahead):
    """It lies between the quartiles of what happens, give or take a fifth of the mean duration."""
    rng = np.random.default_rng(5)
    draw = DRAWS[name]
    known = draw(rng, WINDOW)
    ages = [float(rng.random() * duration) * 0.99 for duration in rng.choice(known, slots)]
    expected = forecast([Occupied(known.tolist(), ages)], 0, known.tolist(), horizon=12).start(ahead)
    low, high = np.quantile(played_out(draw, rng, ages, ahead), [0.25, 0.75])
    assert low - 0.4 <= expected <= high + 0.4


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1, 5, 40])
def test_fixed_durations_are_told_to_the_step(slots, ahead):
    """Two seconds each, all begun now: position is all there is. Past the horizon too."""
    expected = forecast([Occupied([2.0] * 9, [0.0] * slots)], 0, [2.0] * 9, horizon=12).start(ahead)
    assert expected == pytest.approx(2.0 * (1 + ahead // slots), abs=0.15 if ahead < 6 else 1.1)


def test_a_free_slot_is_free_now():
    """Nobody is waited for."""
    assert forecast([Occupied([2.0], [0.0])], 1, [2.0], horizon=12).start(0) == 0.0


def test_the_age_counts():
    """Of two queues with one stream each, the one whose stream is older is sooner done."""
    young, old = (forecast([Occupied([4.0] * 5, [age])], 0, [4.0], 12).start(0) for age in (0.5, 3.5))
    assert young == pytest.approx(3.5, abs=0.2)
    assert old == pytest.approx(0.5, abs=0.2)


def test_a_stream_older_than_all_that_were_measured_is_half_way():
    """It pushes the expected start out as it ages, and is not due any moment."""
    starts = [forecast([Occupied([2.0] * 5, [age])], 0, [2.0], 60).start(0) for age in (5.0, 10.0, 20.0)]
    assert starts == pytest.approx([5.0, 10.0, 20.0], rel=0.1)


def test_nothing_measured_is_no_forecast():
    """Nobody is refused on a guess."""
    assert forecast([Occupied([], [1.0])], 0, [], 12) is None


def test_no_slot_at_all_is_never():
    """Every engine is down: infinite, not zero."""
    assert forecast([], 0, [2.0], 12).start(0) == float("inf")


def test_the_nth_start_is_never_before_the_one_before():
    """Who stands behind does not start sooner."""
    rng = np.random.default_rng(3)
    known = rng.exponential(2, 50).tolist()
    told = forecast([Occupied(known, rng.exponential(2, 4).tolist())], 0, known, 12)
    starts = [told.start(ahead) for ahead in range(100)]
    assert starts == sorted(starts)


def test_durations_of_zero_are_borne():
    """An engine that answers at once: every start is now, and nothing divides by zero."""
    assert forecast([Occupied([0.0], [0.0])], 0, [0.0], 12).start(5) < 0.5


def test_the_window_moves():
    """Only recent durations count."""
    durations = Durations()
    for _ in range(WINDOW):
        durations.add(9.0)
    for _ in range(WINDOW):
        durations.add(1.0)
    assert durations.mean == 1.0
