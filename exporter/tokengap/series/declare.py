"""What a series is: its name, kind, help, labels and the pure function that reads it from a view, in one value.

Nothing here or in the files beside it reads a clock, a file or a socket. What is not known is not yielded: a series
that is missing says "not known", and only a 0 says "none".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from tokengap.view import EngineView, View

Kind: TypeAlias = Literal["counter", "gauge", "gaugehistogram"]


class Distribution(NamedTuple):
    """How values are spread now. ``counts`` has one entry per bound (not cumulated) and one for what lies above."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Sample(NamedTuple):
    """One value. ``labels`` are in the order of :attr:`Series.labels`; a gauge histogram's value is a distribution."""

    labels: tuple[str, ...]
    value: float | Distribution


@dataclass(frozen=True, slots=True)
class Series:
    """One metric family. ``name`` is the name a query uses, a counter's with its ``_total``.

    ``str(series)`` is that name, so that a PromQL expression can be written as an f-string of the values themselves
    and a renamed series cannot leave an expression behind.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[View], Iterable[Sample]]

    def __str__(self) -> str:
        return self.name


def per_engine(value: Callable[[EngineView], float | None]) -> Callable[[View], Iterable[Sample]]:
    """Return a ``read`` for the series with the one label ``engine``: a sample for each engine whose value is known."""

    def read(view: View) -> Iterable[Sample]:
        for engine in view.engines:
            known = value(engine)
            if known is not None:
                yield Sample((engine.name,), known)

    return read


def one_of(states: Iterable[str], current: str | None, *labels: str) -> Iterable[Sample]:
    """Yield a sample per state, 1 for the current one and 0 for the rest, all 0 where the state is not known.

    A gauge by convention. The StateSet of OpenMetrics would force the label to be named like the series.
    """
    for state in states:
        yield Sample((*labels, state), float(state == current))
