"""Queries of dashboards: over what the reader chose, with Grafana's own ranges, and right for several exporters.

Two exporters in front of one engine both read its page, so what the page says is asked for with ``max``; what each one
sees of its own hop's streams adds up, and is asked for with ``sum``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokengap.bundle.boards.board import Word
from tokengap.bundle.promql import Match, by
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Query, legend
from tokengap.series.declare import Series
from tokengap.series.engines import COVERAGE, ENGINE_STATE
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT, TOKENS_USEFUL

#: What tells engines apart. The same name at two exporters is the same engine.
ENGINE: Final = ("cluster", "engine")
HOP: Final = ("cluster", "hop")
GPU: Final = ("cluster", "uuid")

#: One exporter.
EXPORTER: Final = ("job", "instance")

#: The verdicts as numbers, by gravity: 0 is none of the states, which is not known.
VERDICTS: Final = (
    Word(0, "not known", "text"),
    Word(1, "idle", "blue"),
    Word(2, "busy", "green"),
    Word(3, "sleeping", "purple"),
    Word(4, "restarted", "yellow"),
    Word(5, "blind", "orange"),
    Word(6, "stuck", "red"),
    Word(7, "dead", "dark-red"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """Queries about one site, as its dashboards see it: limited to what their reader chose."""

    site: Site

    @property
    def seen(self) -> Site:
        """The site with what the reader chose in every query."""
        return self.site.on_dashboards()

    def select(self, series: Series | str, part: str = "", /, **labels: str | Match) -> str:
        """Return the vector of a series, or of its part ``_bucket``, for one."""
        return self.seen.select(series, part, **labels)

    def rate(self, series: Series | str, **labels: str | Match) -> str:
        """Return how fast a counter grows, per second, at each point of a graph."""
        return f"rate({self.select(series, **labels)}[$__rate_interval])"

    def grown(self, series: Series, **labels: str | Match) -> str:
        """Return by how much a counter grew between two points of a graph."""
        return f"increase({self.select(series, **labels)}[$__rate_interval])"

    def in_all(self, series: Series, **labels: str | Match) -> str:
        """Return by how much a counter grew in all the time that the reader looks at."""
        return f"increase({self.select(series, **labels)}[$__range])"

    def once(self, expression: str, *labels: str) -> str:
        """Return the value by these labels, which all exporters that read the same page have the same."""
        return by("max", self.site.per(*labels), expression)

    def least(self, expression: str, *labels: str) -> str:
        """Return the worst by these labels, where little is bad."""
        return by("min", self.site.per(*labels), expression)

    def delivered(self) -> str:
        """Return the tokens a second that a live client acknowledged, by engine.

        An exporter on the engine's own host takes the proxy for a client that took everything. So what was orphaned at
        a proxy comes off, and useful is at most the rest, as in the recording rules.
        """
        out = total(self.once(self.rate(TOKENS_OUT), *ENGINE, "model"), *self.site.per(*ENGINE))
        useful, orphaned = (
            total(self.rate(series), *self.site.per(*ENGINE)) for series in (TOKENS_USEFUL, TOKENS_ORPHANED)
        )
        rest = f"clamp_min({out} - {orphaned}, 0)"
        return f"{useful} <= {rest} or {rest}"

    def verdict(self) -> str:
        """Return the verdict as a number of :data:`VERDICTS`, by engine; where exporters disagree, the gravest."""
        states = (f"{self.select(ENGINE_STATE, state=word.text)} * {word.value}" for word in VERDICTS if word.value)
        return self.once(" or ".join(states), *ENGINE)

    def coverage(self) -> str:
        """Return the coverage by all exporters together: each sees the streams of its own hops only."""
        return f"clamp_max({total(self.select(COVERAGE), *self.site.per(*ENGINE))}, 1)"


def total(expression: str, *labels: str) -> str:
    """Return the sum, by these labels: what exporters see of different streams."""
    return by("sum", labels, expression) if labels else f"sum({expression})"


def share(part: str, whole: str) -> str:
    """Return a part of a whole, and nothing where there is no whole."""
    return f"{part} / ({whole} > 0)"


def lines(expression: str, *labels: str) -> tuple[Query, ...]:
    """Return one query whose lines are named by these labels."""
    return (Query(expression, " ".join(map(legend, labels))),)


def named(expression: str, name: str, label: str = "engine") -> Query:
    """Return a query whose lines are a name with a label behind it, for graphs that show several things."""
    return Query(expression, f"{name} {legend(label)}")
