"""What a watch is: when it fires, where it is seen and what to do then, in one value that cannot be incomplete."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from tokengap.bundle import promql

#: ``critical`` rings a pager, ``warning`` makes a ticket, ``info`` is only shown.
Severity: TypeAlias = Literal["critical", "warning", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)

#: The dashboards, by the words in their addresses.
Board: TypeAlias = Literal["money", "oncall", "engine", "gpu", "exporter"]

#: How a panel draws, by Grafana's names.
Drawing: TypeAlias = Literal["timeseries", "stat", "state-timeline", "bargauge", "table"]

_NAME: Final = re.compile(r"Tokengap([A-Z][a-z0-9]+)+")
_LONGEST_NAME: Final = 50  # of characters; what tools of operators refuse


class IncompleteWatch(ValueError):
    """A watch lacks something that a person on call would miss. The message names it."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Where bad begins. Written once: it is part of the rule, the line in the panel and the number in the runbook.

    ``str()`` is the comparison in PromQL; ``said`` is the number as people write it.
    """

    comparison: Literal[">", "<", "=="]
    value: float
    said: str

    def __str__(self) -> str:
        return f"{self.comparison} {self.value:.12g}"


def longer_than(seconds: float) -> Threshold:
    """Return the threshold of a time that must not be exceeded."""
    return Threshold(">", seconds, promql.said(seconds))


def shorter_than(seconds: float) -> Threshold:
    """Return the threshold of a time that must be left."""
    return Threshold("<", seconds, promql.said(seconds))


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel. ``legend`` is the name of each of its lines, as ``{{engine}}``."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Where a watch is seen. ``unit`` is Grafana's; ``no_value`` is shown where there is nothing, and says why."""

    board: Board
    title: str
    description: str
    unit: str
    no_value: str
    queries: tuple[Query, ...]
    thresholds: tuple[Threshold, ...] = ()
    drawing: Drawing = "timeseries"
    least: float | None = 0.0

    def __post_init__(self) -> None:
        _complete(self, f"panel {self.title!r}", optional=("thresholds", "least"))

    @property
    def number(self) -> int:
        """Its id on the dashboard. Of the title alone, so that a link stays right when other panels come and go."""
        return zlib.crc32(self.title.encode()) % 1_000_000 + 1


@dataclass(frozen=True, slots=True)
class Look:
    """A number to look at first."""

    what: str
    query: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the decisions: what is seen, what it is, what to do about it."""

    see: str
    means: str
    do: str


@dataclass(frozen=True, slots=True)
class Step:
    """A command that can be pasted, what it is for, and an example of what it prints.

    ``code``: the code with which it exits in the state that the runbook is about.
    """

    why: str
    command: str
    prints: str
    code: int = 0


@dataclass(frozen=True, slots=True)
class Measure:
    """Something to do about it, and how to see that it helped."""

    do: str
    check: str


@dataclass(frozen=True, slots=True)
class Runbook:
    """What to do, on one screen. ``first`` is what can be done within a minute; mitigations are ordered by how easily
    they are undone."""

    first: str
    right_now: tuple[Look, ...]
    meaning: str
    impact: str
    decide: tuple[Choice, ...]
    diagnosis: tuple[Step, ...]
    mitigation: tuple[Measure, ...]
    do_not: tuple[str, ...]
    rollback: str
    false_alarm: str
    limits: str

    def __post_init__(self) -> None:
        _complete(self, "runbook")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One alert with its panel and its runbook.

    ``expr`` fires when it has been true for ``hold`` seconds, and goes on for ``keep`` seconds after (a scrape that
    fails is no recovery). ``labels`` are those that the alert carries besides the site's. ``summary`` is one sentence
    without variables; ``description`` may name ``{{ $labels.engine }}``. ``outlives_exporter``: its runbook is read
    while the exporter does not answer, so the link leads elsewhere. ``rehearsal``: what to add to ``tokengap chaos
    run`` to make it fire on a bench; what rings a pager has one. Raises IncompleteWatch.
    """

    name: str
    severity: Severity
    expr: str
    hold: float
    keep: float = 0.0
    labels: tuple[str, ...]
    summary: str
    description: str
    panel: Panel
    runbook: Runbook
    outlives_exporter: bool = False
    rehearsal: str = ""

    def __post_init__(self) -> None:
        _complete(self, self.name or "a watch", optional=("hold", "keep", "outlives_exporter", "rehearsal"))
        for problem in self._problems():
            raise IncompleteWatch(f"{self.name}: {problem}")

    def _problems(self) -> Iterator[str]:
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            yield f"is no name of an alert; expected TokengapWords of {_LONGEST_NAME} characters at most"
        if self.severity not in SEVERITIES:
            yield f"severity is {self.severity}; expected one of {', '.join(SEVERITIES)}"
        if self.severity == "critical" and not self.rehearsal:
            yield "rings a pager, and nothing rehearses it"
        if self.hold < 0 or self.keep < 0:
            yield "hold and keep are seconds, 0 or more"
        if not self.summary[0].isupper() or not self.summary.endswith(".") or "{{" in self.summary:
            yield "summary is not a sentence without variables: capital, full stop"
        for threshold in self.panel.thresholds:
            if str(threshold) not in self.expr:
                yield f"the panel's threshold {threshold} is not in the rule"


def label(name: str) -> str:
    """Return the place of an alert's label in its description."""
    return f"{{{{ $labels.{name} }}}}"


def legend(name: str) -> str:
    """Return the place of a series' label in the legend of a panel."""
    return f"{{{{{name}}}}}"


def _complete(described: Any, where: str, optional: tuple[str, ...] = ()) -> None:
    """Raise IncompleteWatch for the first part of a description, or of its parts, that is empty."""
    for part in fields(described):
        value = getattr(described, part.name)
        if part.name in optional:
            continue
        if value in ("", ()) or (isinstance(value, str) and not value.strip()):
            raise IncompleteWatch(f"{where}: {part.name} is empty")
        for item in value if isinstance(value, tuple) else ():
            if not item:
                raise IncompleteWatch(f"{where}: {part.name} has an empty line")
            if is_dataclass(item):
                _complete(item, f"{where}: {part.name}", optional=("code",))
