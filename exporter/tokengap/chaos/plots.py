"""The plots of a report, as places on a plane: what a template needs to draw them as SVG. Pure.

All share one axis of time, seconds since the run began, so that what is above each other happened together.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokengap.chaos.bench import OTHER, TARGET
from tokengap.chaos.evidence import Evidence, percentile
from tokengap.chaos.looks import EngineLook

#: The plane, in units of SVG: margins left of it and below it are for the axes.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 170, 64, 12, 8, 22

#: One point of a curve: seconds, and a value. None: nothing is known there, and the curve is interrupted.
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through its points, or dots. ``look`` is its class in the style sheet. Dots at infinity are crosses at the
    upper edge."""

    name: str
    look: str
    points: Points
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot. ``limit`` is a line across it, None: there is none."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """What an engine was said to be, from ``start`` to ``end``."""

    engine: str
    state: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Places of seconds up to ``seconds`` and of values up to ``most``."""

    seconds: float
    most: float

    def x(self, at: float) -> float:
        """Return where an instant is."""
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(max(at / self.seconds, 0.0), 1.0), 1)

    def y(self, value: float) -> float:
        """Return where a value is; what is larger than all is at the upper edge."""
        share = 1.0 if math.isinf(value) else min(value / self.most, 1.0)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)

    @property
    def values(self) -> list[float]:
        """The values at which the axis has a mark."""
        step = round_up(self.most / 4)
        return [step * number for number in range(int(self.most / step) + 1)]

    @property
    def instants(self) -> list[float]:
        """The seconds at which it has one."""
        step = max(1.0, round_up(self.seconds / 12))
        return [step * number for number in range(int(self.seconds / step) + 1)]

    def path(self, points: Points) -> str:
        """Return a line through points as the data of an SVG path."""
        words, down = [], False
        for at, value in points:
            if value is None or not math.isfinite(value):
                down = False
                continue
            words.append(f"{'L' if down else 'M'}{self.x(at)} {self.y(value)}")
            down = True
        return " ".join(words)


def scale(plot: Plot, seconds: float) -> Scale:
    """Return the scale in which all of a plot can be seen."""
    values = [value for curve in plot.curves for _, value in curve.points if value is not None and math.isfinite(value)]
    most = max([*values, plot.limit or 0.0, 1e-9])
    return Scale(seconds, most * 1.1)


def round_up(value: float) -> float:
    """Return the next larger of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * 0.999)


def plots(run: Evidence, zero: float, limits: Mapping[str, float | None]) -> tuple[Plot, ...]:
    """Return the plots of a run that began at ``zero``. ``limits`` are those of its validations, by name."""
    seconds = math.ceil(run.looks[-1].at - zero)
    arrivals = [arrival - zero for attempt in run.attempts for arrival in attempt.arrivals]
    useful = [(look.at - zero, look.useful) for look in run.looks]
    return (
        Plot(
            "Tokens a second",
            "",
            (
                Curve("received by clients", "clients", _rate(arrivals, seconds)),
                Curve("useful, says tokengap", "tokengap", list(_growth(useful))),
            ),
        ),
        Plot(
            "First token, by when it was asked for",
            "s",
            (Curve("one request (a cross: never answered)", "clients", list(_first_tokens(run, zero)), dots=True),),
            limits.get("first-token-p99"),
        ),
        Plot(
            "Time between two tokens, P99 of each second",
            "s",
            (Curve("all streams", "clients", list(_gaps(run, zero, seconds))),),
            limits.get("inter-token-p99"),
        ),
        Plot(
            "Sequences in the engines, says tokengap",
            "",
            tuple(
                Curve(name, f"replica-{name}", [(look.at - zero, _held(look.engines[name])) for look in run.looks])
                for name in (TARGET, OTHER)
            ),
        ),
    )


def bands(run: Evidence, zero: float) -> list[Band]:
    """Return what tokengap said of each engine, and for how long."""
    found = []
    for name in (TARGET, OTHER):
        said = [(look.at - zero, look.engines[name].state) for look in run.looks]
        changes = [said[0], *(now for before, now in itertools.pairwise(said) if before[1] != now[1])]
        ends = [at for at, _ in changes[1:]] + [said[-1][0]]
        found += [Band(name, state, at, end) for (at, state), end in zip(changes, ends, strict=True)]
    return found


def _rate(instants: Iterable[float], seconds: int) -> Points:
    count = [0] * (seconds + 1)
    for at in instants:
        if 0 <= at <= seconds:
            count[int(at)] += 1
    return [(second + 0.5, float(number)) for second, number in enumerate(count[:-1])]


def _growth(totals: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float | None]]:
    for (early, before), (late, after) in itertools.pairwise(totals):
        if late > early:
            yield (early + late) / 2, (after - before) / (late - early)


def _first_tokens(run: Evidence, zero: float) -> Iterator[tuple[float, float]]:
    for ask in run.asks:
        came = ask.first_token if ask.answered else None
        yield ask.asked - zero, math.inf if came is None else came - ask.asked


def _gaps(run: Evidence, zero: float, seconds: int) -> Iterator[tuple[float, float | None]]:
    by_second = defaultdict(list)
    for ended, length in run.gaps():
        by_second[int(ended - zero)].append(length)
    for second in range(seconds):
        yield second + 0.5, percentile(by_second[second], 0.99) if by_second[second] else None


def _held(engine: EngineLook) -> float | None:
    return None if engine.running is None or engine.waiting is None else engine.running + engine.waiting
