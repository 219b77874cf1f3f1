"""Truth and what the exporter said, side by side, under the names of the source article.

The truth has two halves that know nothing of the exporter: what each user received, and what the engine generated for
whom. Pure: outcomes and scrapes in, tables and JSON out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table

from tokengap.lab.scrape import Scrape
from tokengap.lab.stage import Plan
from tokengap.lab.truth import RequestTruth, Truth
from tokengap.lab.users import Outcome
from tokengap.topology import INTERACTIVE, Limits
from tokengap.view import ENDINGS, Ending

Unit: TypeAlias = Literal["", "s", "share"]

#: The most by which the measured gap may be off, as a share of tokens out. An engine that itself goes on generates
#: without a socket, which has to be told from the rest. Answers that are not streamed show no bytes until they are
#: whole, so their tokens are attributed by time.
STREAMED_BAR, ENGINE_LEAKS_BAR, WHOLE_BAR = 0.01, 0.03, 0.05


def bar(*, streamed: bool, engine_leaks: bool = False) -> float:
    """Return the bar for answers that are streamed or whole, from an engine that stops or goes on."""
    if not streamed:
        return WHOLE_BAR
    return ENGINE_LEAKS_BAR if engine_leaks else STREAMED_BAR


#: The deadline for a first token, seconds: what an exporter takes that is not told another one.
DEADLINE = Limits().deadlines[INTERACTIVE]

#: For how many seconds after the last user left ``client_connected`` is taken.
AFTERMATH = 3.0


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of the source article, of the truth or as measured. None: not known.

    Counts are at the end. ``gap``: tokens out that reached nobody. ``cancelled_orphan``: streams whose client left and
    whose engine was told. Of what comes and goes it is the worst: the oldest stream, the share of clients that were
    there after the leavers had left, the highest use of slots, the longest wait at the head of the queue, the least
    that was left of a deadline (negative: missed by so much).
    """

    tokens_out_total: float | None = None
    tokens_useful_total: float | None = None
    gap: float | None = None
    cancelled_orphan: int | None = None
    stream_age_seconds: float | None = None
    client_connected: float | None = None
    slot_utilization: float | None = None
    queue_age_seconds: float | None = None
    deadline_slack_seconds: float | None = None
    tokens_pending: float | None = None
    tokens_unattributed_total: float | None = None
    tokens_orphaned_total: Mapping[str, float] = field(default_factory=dict)  # by hop
    streams_ended_total: Mapping[str, int] = field(default_factory=dict)  # by how

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain values, to a thousandth."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class Stay:
    """One user's request: ``left`` is when the user was gone, ``held`` until when a hop held on to its stream."""

    sent: float
    left: float
    held: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a drill. ``scraped`` is what a scraper with a longer interval saw, in ``scrapes`` scrapes, and
    ``users`` counts what became of them.
    """

    truth: Fields
    measured: Fields
    bar: float
    scraped: Fields | None = None
    scrape_every: float = 15.0
    scrapes: int = 0
    users: Mapping[str, int] = field(default_factory=dict)

    @property
    def error_ratio(self) -> float | None:
        """By how much the measured gap is off, as a share of the tokens that really came out."""
        if self.truth.gap is None or self.measured.gap is None or not self.truth.tokens_out_total:
            return None
        return abs(self.measured.gap - self.truth.gap) / self.truth.tokens_out_total

    @property
    def passed(self) -> bool:
        """Whether the gap is known and within the bar."""
        return self.error_ratio is not None and self.error_ratio <= self.bar

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "truth": self.truth.as_json(),
            "measured": self.measured.as_json(),
            "error_ratio": self.error_ratio and round(self.error_ratio, 6),
            "passed": self.passed,
            "users": dict(self.users),
        }

    def table(self) -> Table:
        """Return the fields as a table: the truth, what was measured, and what the slower scraper saw."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        columns = {"truth": self.truth, "measured": self.measured}
        if self.scraped is not None:
            columns[f"scraped every {self.scrape_every:g} s"] = self.scraped
        for title in columns:
            table.add_column(title, justify="right")
        for name, remark, unit in _ROWS:
            label = f"{name} ({remark})" if remark else name
            table.add_row(label, *(_shown(getattr(side, name), unit) for side in columns.values()))
        table.add_section()
        for name, label in (("tokens_orphaned_total", "hop"), ("streams_ended_total", "how")):
            sides = [getattr(side, name) for side in columns.values()]
            for key in dict.fromkeys(key for side in sides for key in side):
                table.add_row(f'{name}{{{label}="{key}"}}', *(_shown(side.get(key)) for side in sides))
        return table

    def print(self) -> None:
        """Print table and sentences."""
        console = _console()
        console.print(self.table())
        for sentence in self.sentences():
            console.print(sentence, highlight=False, soft_wrap=True)

    def sentences(self) -> list[str]:
        """Return in words whether it passed, and how to read the column of the slower scraper."""
        said = ["The gap is not known, so this has failed."]
        if self.error_ratio is not None:
            within = "within" if self.passed else "NOT within"
            gaps = f"The gap is {_shown(self.truth.gap)} tokens and was measured as {_shown(self.measured.gap)}"
            said = [f"{gaps}: off by {self.error_ratio:.2%} of the tokens out, {within} {self.bar:.0%}."]
        if self.users:
            said.append(f"Of the users {', '.join(f'{count} {what}' for what, count in self.users.items())}.")
        if self.scraped is not None:
            came = f"A scraper that comes every {self.scrape_every:g} s came {self.scrapes} times"
            said.append(
                f"{came}: it missed what came and went in between, and its totals are those of its last scrape."
            )
        return said


#: Name, in which way it is one number, and its unit; counters are without a unit.
_ROWS: tuple[tuple[str, str, Unit], ...] = (
    ("tokens_out_total", "", ""),
    ("tokens_useful_total", "", ""),
    ("gap", "", ""),
    ("cancelled_orphan", "", ""),
    ("stream_age_seconds", "oldest", "s"),
    ("client_connected", "lowest share", "share"),
    ("slot_utilization", "highest", "share"),
    ("queue_age_seconds", "longest", "s"),
    ("deadline_slack_seconds", "least", "s"),
    ("tokens_pending", "", ""),
    ("tokens_unattributed_total", "", ""),
)


#: The first rows are those of the source article.
_OF_THE_ARTICLE = 9


def measured(scrapes: Sequence[Scrape], after: float | None = None) -> Fields:
    """Return what these scrapes say: totals from the last, and the worst of each gauge.

    ``after`` is when the last user left: ``client_connected`` is then the lowest share in the moments that follow, else
    the lowest of all. Its truth is taken at the same instants (:func:`moments`).
    """
    if not scrapes:
        return Fields()
    last = scrapes[-1]
    shares = [scrape.client_connected for scrape in moments(scrapes, after)]
    return Fields(
        tokens_out_total=last.tokens_out,
        tokens_useful_total=last.tokens_useful,
        gap=last.gap,
        cancelled_orphan=last.streams_ended.get("cancelled"),
        stream_age_seconds=_worst(max, (scrape.stream_age for scrape in scrapes)),
        client_connected=_worst(min, shares),
        slot_utilization=_worst(max, (scrape.slot_utilization for scrape in scrapes)),
        queue_age_seconds=_worst(max, (scrape.queue_age for scrape in scrapes)),
        deadline_slack_seconds=_worst(min, (scrape.deadline_slack for scrape in scrapes)),
        tokens_pending=last.tokens_pending,
        tokens_unattributed_total=last.tokens_unattributed,
        tokens_orphaned_total=last.tokens_orphaned,
        streams_ended_total=last.streams_ended,
    )


def moments(scrapes: Sequence[Scrape], after: float | None) -> list[Scrape]:
    """Return the scrapes of the beats in the aftermath of ``after``, all when it is None."""
    if after is None:
        return list(scrapes)
    return [scrape for scrape in scrapes if after <= scrape.beat_at <= after + AFTERMATH]


def last_leave(outcomes: Iterable[Outcome]) -> float | None:
    """Return when the last of those who left was gone, None when nobody left."""
    return max((outcome.ended for outcome in outcomes if outcome.how == "left"), default=None)


def became_of(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Count users by what became of them: served, left, refused (429) or failed."""
    became = dict.fromkeys(("served", "left", "refused", "failed"), 0)
    for outcome in outcomes:
        became["served" if outcome.how == "completed" else "refused" if outcome.refused else outcome.how] += 1
    return {what: count for what, count in became.items() if count or what != "failed"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same drill, played several ways, by what was played."""

    reports: Mapping[str, Report]

    @property
    def passed(self) -> bool:
        """Whether each was measured within its bar."""
        return all(report.passed for report in self.reports.values())

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {way: report.as_json() for way, report in self.reports.items()}

    def table(self) -> Table:
        """Return what happened, a column each: the article's fields, and what became of the users."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for way in self.reports:
            table.add_column(way, justify="right")
        for name, remark, unit in _ROWS[:_OF_THE_ARTICLE]:
            label = f"{name} ({remark})" if remark else name
            table.add_row(label, *(_shown(getattr(report.truth, name), unit) for report in self.reports.values()))
        table.add_section()
        for what in ("served", "left", "refused"):
            table.add_row(f"users {what}", *(str(report.users.get(what, 0)) for report in self.reports.values()))
        return table

    def print(self) -> None:
        """Print the table, and of each whether it was measured right."""
        console = _console()
        console.print(self.table())
        for way, report in self.reports.items():
            console.print(f"{way}: {report.sentences()[0]}", highlight=False, soft_wrap=True)


def _console() -> Console:
    """Return standard output, plain where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = 120  # of a pipe nothing is known, and a table must not be folded
    return console


def truth_of_lab(outcomes: Sequence[Outcome], engine: Truth, plan: Plan, instants: Iterable[float]) -> Fields:
    """Return what happened, from the users and the stand-in engine, both at rest again.

    ``client_connected`` is the lowest share at the ``instants``.
    """
    ended: dict[str, int] = dict.fromkeys(ENDINGS, 0)
    stays, waits = [], [0.0]
    for outcome in outcomes:
        request = engine.requests.get(outcome.user.id)
        held = first_token = outcome.ended
        if request is not None and request.ended is not None:
            if outcome.how == "left" and plan.leak in plan.hops:
                held = max(held, request.ended)
            first_token = min(request.first_token or first_token, first_token)
        stays.append(Stay(outcome.sent, outcome.ended, held))
        ended[_ending(outcome, request)] += 1
        waits.append(first_token - outcome.sent)
    gap = engine.generated - _received(outcomes)
    return Fields(
        tokens_out_total=engine.generated,
        tokens_useful_total=_received(outcomes),
        gap=gap,
        cancelled_orphan=ended["cancelled"],
        stream_age_seconds=max((stay.held - stay.sent for stay in stays), default=0.0),
        client_connected=min((_share_connected(stays, at) for at in instants), default=None),
        slot_utilization=max((s.running for s in engine.history), default=0) / engine.knobs.max_num_seqs,
        queue_age_seconds=max((s.head_age for s in engine.history), default=0.0),
        deadline_slack_seconds=DEADLINE - max(waits),
        tokens_pending=0,
        tokens_unattributed_total=0,
        tokens_orphaned_total=dict.fromkeys(plan.places, 0) | {plan.leaks_at: gap},
        streams_ended_total=ended,
    )


def truth_of_page(outcomes: Sequence[Outcome], generated: float) -> Fields:
    """Return what is known where the engine is a real one: by how much its own count grew, and what users received."""
    received = _received(outcomes)
    first = [(o.first_token or o.ended) - o.sent for o in outcomes if o.user.stream]
    return Fields(
        tokens_out_total=generated,
        tokens_useful_total=received,
        gap=generated - received,
        deadline_slack_seconds=DEADLINE - max(first) if first else None,
    )


def _received(outcomes: Iterable[Outcome]) -> int:
    return sum(outcome.tokens for outcome in outcomes)


def _ending(outcome: Outcome, request: RequestTruth | None) -> Ending:
    if outcome.how != "left":
        return outcome.how
    if request is None or request.ended is None or request.state != "finished":
        return "cancelled"
    return "orphaned" if request.ended > outcome.ended else "completed"


def _share_connected(stays: Iterable[Stay], at: float) -> float:
    held = [stay for stay in stays if stay.sent <= at < stay.held]
    return sum(at < stay.left for stay in held) / len(held) if held else 1.0


def _worst(choose: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _shown(value: float | None, unit: Unit = "") -> str:
    if value is None:
        return "not known"
    match unit:
        case "s":
            return f"{value:.1f} s"
        case "share":
            return f"{value:.2f}"
    return f"{round(value):,}"


def _plain(value: Any) -> Any:
    """Return a number, or numbers by name, to a thousandth; whole numbers whole."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value
