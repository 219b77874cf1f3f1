"""What a panel of a rendered dashboard shows, asked of a real Prometheus as Grafana asks it. For tests and pictures:
Grafana itself is not to be had everywhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from monitoring import Prometheus
from tokengap.bundle.promql import duration

#: A dashboard, or a part of one, as Grafana reads it.
Json: TypeAlias = Mapping[str, Any]

#: What Grafana puts in place of a variable of which all values are chosen.
ALL: Mapping[str, str] = {"cluster": ".*", "job": ".+", "instance": ".+", "engine": ".+"}


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is looked at: Unix seconds from ``begin`` to ``end``, a point each ``step``. ``scrape``: seconds
    between two scrapes, as the source of data in Grafana is told."""

    begin: float
    end: float
    step: float
    scrape: float

    @property
    def variables(self) -> Mapping[str, str]:
        """Grafana's own variables for it. A rate looks back over four scrapes at least, and leaves no gap."""
        return {
            "__rate_interval": duration(max(self.step + self.scrape, 4 * self.scrape)),
            "__range": duration(self.end - self.begin),
        }


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a graph, or one value: its name, its labels, and points of time and value, none of them NaN."""

    name: str
    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def newest(self) -> float:
        """The last value."""
        return self.points[-1][1]


def panels(dashboard: Json) -> Iterator[Json]:
    """Yield the panels of a dashboard that ask something."""
    yield from (panel for panel in dashboard["panels"] if panel.get("targets"))


async def shown(panel: Json, prometheus: Prometheus, span: Span) -> list[list[Line]]:
    """Return what each query of a panel shows: nothing where the panel would show its words for no value."""
    return await asyncio.gather(*(_answer(target, prometheus, span) for target in panel["targets"]))


def in_place(expression: str, values: Mapping[str, str]) -> str:
    """Return an expression with values in place of ``$name``. KeyError: one that is not known."""
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


async def _answer(target: Json, prometheus: Prometheus, span: Span) -> list[Line]:
    asked = {"query": in_place(target["expr"], {**span.variables, **ALL})}
    if target["instant"]:
        found = await prometheus.ask("query", **asked, time=span.end)
        courses = [(row["metric"], [row["value"]]) for row in found]
    else:
        found = await prometheus.ask("query_range", **asked, start=span.begin, end=span.end, step=span.step)
        courses = [(row["metric"], row["values"]) for row in found]
    lines = []
    for labels, course in courses:
        points = tuple((float(at), float(value)) for at, value in course if value != "NaN")
        if points:
            lines.append(Line(_named(target["legendFormat"], labels), labels, points))
    return lines


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend).strip()
