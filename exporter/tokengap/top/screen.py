"""What ``tokengap top`` shows, as lines of a screen of a given size. Pure: no clock, no terminal.

What comes from outside (names, evidence, errors) reaches a line only through :func:`clean`: a terminal obeys control
characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Generic, TypeVar

from rich.text import Text

from tokengap.view import CLIENTS, Client, EngineView
from tokengap.web.api import StreamRow
from tokengap.web.history import Rates
from tokengap.web.now import BAD_STATES, ORPHANS, HopNow, Now, Wanted

T = TypeVar("T")

NOT_KNOWN: Final = "?"
_BAD, _WARN, _QUIET, _HEAD = "bold red", "yellow", "bright_black", "bold"

#: Filters by name, as the key ``f`` goes through them.
FILTERS: Final[Mapping[str, frozenset[Client]]] = {
    "all": frozenset(CLIENTS),
    "orphans": frozenset(ORPHANS),
    **{client: frozenset((client,)) for client in CLIENTS},
}

#: Orders by the key that chooses them.
ORDER_KEYS: Final = {"c": "cost", "a": "age", "s": "slack", "t": "tokens", "l": "client"}


def clean(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def count(value: float | None) -> str:
    """Write a number of things."""
    return NOT_KNOWN if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """Write a part of a whole."""
    return NOT_KNOWN if value is None else f"{value:.0%}"


def seconds(value: float | None) -> str:
    """Write a time; minutes and hours where seconds would be many."""
    if value is None:
        return NOT_KNOWN
    if abs(value) < 120:
        return f"{value:.1f}s"
    return f"{value / 60:.0f}m" if abs(value) < 7200 else f"{value / 3600:.1f}h"


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table. Where the width does not suffice, those of the highest ``rank`` are left out first.

    ``least``: the last column of a table may be cut, down to so many letters.
    """

    title: str
    cell: Callable[[T], str]
    rank: int
    number: bool = True
    least: int | None = None


def table(
    columns: Sequence[Column[T]], rows: Sequence[T], width: int, style: Callable[[T], str] = lambda _: ""
) -> Iterator[Text]:
    """Yield the lines of a table, its head first: as many columns as fit."""
    written = [(column, [clean(column.cell(row)) for row in rows]) for column in columns]
    sized = [(column, max(map(len, (column.title, *cells))), cells) for column, cells in written]
    while len(sized) > 1 and sum(min(wide, column.least or wide) + 2 for column, wide, _ in sized) - 2 > width:
        sized.remove(max(sized, key=lambda one: one[0].rank))
    yield Text(_line((column, wide, column.title) for column, wide, _ in sized), _HEAD)
    for number, row in enumerate(rows):
        yield Text(_line((column, wide, cells[number]) for column, wide, cells in sized), style(row))


def _line(cells: Iterable[tuple[Column[T], int, str]]) -> str:
    return "  ".join(text.rjust(wide) if column.number else text.ljust(wide) for column, wide, text in cells).rstrip()


def _slack(row: StreamRow) -> str:
    if row.deadline_slack_seconds is None:
        return "answering" if row.first_byte else "-"
    return seconds(row.deadline_slack_seconds)


STREAMS: Final[Sequence[Column[StreamRow]]] = (
    Column("CLIENT", lambda row: row.client, 0, number=False),
    Column("AGE", lambda row: seconds(row.age_seconds), 1),
    Column("LEAKS AT", lambda row: row.leaks_at or "-", 3, number=False),
    Column("ENTERED AT", lambda row: row.hop, 5, number=False),
    Column("ENGINE", lambda row: row.engine or NOT_KNOWN, 6, number=False),
    Column("TOKENS", lambda row: count(row.tokens), 7),
    Column("USEFUL", lambda row: count(row.useful), 8),
    Column("NOBODY'S", lambda row: count(row.orphaned), 2),
    Column("SLACK", _slack, 4),
    Column("FROM", lambda row: row.client_address or NOT_KNOWN, 9, number=False),
)


def _lost(engine: EngineView) -> str:
    lost = sum(engine.tokens.orphaned.values())
    return f"{lost:,.0f} ({lost / engine.tokens.out:.0%})" if engine.tokens.out else "0"


ENGINES: Final[Sequence[Column[EngineView]]] = (
    Column("ENGINE", lambda engine: engine.name, 0, number=False),
    Column("STATE", lambda engine: engine.state, 1, number=False),
    Column("RUNNING", lambda engine: count(engine.running), 6),
    Column("WAITING", lambda engine: count(engine.waiting), 7),
    Column("SLOTS", lambda engine: share(engine.utilization), 8),
    Column("QUEUE AGE", lambda engine: seconds(engine.queue_age), 2),
    Column("SLACK", lambda engine: seconds(min(engine.slack.values(), default=None)), 3),
    Column("TOKENS", lambda engine: count(engine.tokens.out), 9),
    Column("USEFUL", lambda engine: count(engine.tokens.useful), 10),
    Column("NOBODY'S", _lost, 4),
    Column("EVIDENCE", lambda engine: engine.evidence, 5, number=False, least=24),
)


@dataclass(slots=True)
class Shown:
    """What is on the screen: the newest there was to show, what the user chose, and why there is nothing newer."""

    name: str
    want: Wanted
    now: Now | None = None
    complaint: str = ""
    paused: bool = False
    keys: bool = False

    def take(self, now: Now) -> None:
        """Show this from now on."""
        self.now, self.complaint = now, ""


def frame(shown: Shown, width: int, height: int | None = None) -> list[Text]:
    """Return the lines of a screen, no more than ``height``; None: as many as there are."""
    lines = list(_head(shown, width, height))
    if shown.now is not None:
        lines += _engines(shown.now, width, height)
        lines += [Text(""), _counted(shown)]
        lines += table(STREAMS, shown.now.streams.rows, width, _stream_style)
    if height is not None:
        lines = lines[: height - shown.keys]
        lines += [Text("")] * (height - shown.keys - len(lines))
    if shown.keys:
        lines.append(_keys(shown))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(shown: Shown, width: int, height: int | None) -> Iterator[Text]:
    now = shown.now
    if now is None:
        yield Text(f"tokengap: waiting for {shown.name}", _HEAD)
    else:
        at = datetime.fromtimestamp(now.wall, UTC).strftime("%H:%M:%S UTC")
        yield Text(f"tokengap {clean(now.version)}  {clean(shown.name)}  {at}  beat {now.beats:,}", _HEAD)
    if shown.complaint:
        of = "" if now is None else "; what is shown is the last it said"
        yield Text(f"▲ {clean(shown.complaint)}{of}", _BAD)
    if now is None:
        return
    if shown.paused:
        yield Text("paused: p goes on", _WARN)
    troubles = now.troubles if height is None else now.troubles[: max(height // 4, 1)]
    for trouble in troubles:
        yield Text(f"▲ {clean(trouble.says)}  {trouble.runbook}", _BAD)
    if now.troubles_in_all > len(troubles):
        yield Text(f"▲ and {now.troubles_in_all - len(troubles)} more", _BAD)
    if now.accounting == "none":
        yield Text("▲ No sockets can be read: whether a hop leaks is not known.", _BAD)
    yield _way(now)
    yield _rates(now.rates, width)
    yield Text("")


def _way(now: Now) -> Text:
    """Return the way of a request, the hops that leak marked."""
    *hops, engine = now.hops
    way = Text(f"clients: {_people(now.streams.clients)}")
    for hop in hops:
        way.append(" → ").append(f"{clean(hop.name)}{_leak(hop)}", _BAD if hop.leaks else "")
    number = sum(now.engine_states.values())
    engines = clean(now.engines[0].name) if number == 1 else f"{number} engines"
    return way.append(" → ").append(f"{engines}{_leak(engine)}", _BAD if engine.leaks else "")


def _leak(hop: HopNow) -> str:
    if not hop.leaks:
        return ""
    held = f"{hop.leaking:,} held, " if hop.leaking else ""
    return f" ▲ leaks: {held}{hop.orphaned:,.0f} tokens"


def _people(clients: Mapping[Client, int]) -> str:
    return ", ".join(f"{number:,} {client}" for client, number in clients.items() if number) or "none"


def _rates(rates: Rates | None, width: int) -> Text:
    if rates is None:
        return Text("tokens a second: not known yet", _QUIET)
    lost = rates.orphaned / rates.generated if rates.generated else 0.0
    line = Text(f"tokens a second: {rates.generated:,.0f} generated, {rates.useful:,.0f} useful, ")
    line.append(f"{rates.orphaned:,.0f} for nobody ({share(lost)})", _BAD if rates.orphaned >= 1 else "")
    line.append(f", {rates.pending:,.0f} pending")
    room = min(width - len(line) - 2, 40)
    if room >= 10 and rates.generated > 0:
        useful, known = (round(room * part / rates.generated) for part in (rates.useful, rates.useful + rates.orphaned))
        bar = (("█" * useful, "blue"), ("▒" * (known - useful), "red"), ("░" * (room - known), _QUIET))
        line.append("  ").append_tokens(bar)
    return line


def _engines(now: Now, width: int, height: int | None) -> Iterator[Text]:
    """Yield the engines, those that need to be looked at first, and no more than a third of the screen."""
    engines = now.engines if height is None else now.engines[: max(height // 3, 3)]
    more = sum(now.engine_states.values()) - len(engines)
    limit = now.limits.age_cut

    def style(engine: EngineView) -> str:
        if engine.state in BAD_STATES:
            return _BAD
        return _WARN if engine.state == "restarted" or (engine.queue_age or 0.0) > limit else ""

    yield from table(ENGINES, engines, width, style)
    if more:
        yield Text(f"and {more} more engines", _QUIET)


def _counted(shown: Shown) -> Text:
    assert shown.now is not None
    streams = shown.now.streams
    chosen = next((name for name, clients in FILTERS.items() if clients == shown.want.clients), "chosen")
    number = f"{streams.matching:,}"
    if len(streams.rows) < streams.matching:
        number = f"the first {len(streams.rows):,} of {number}"
    return Text(f"streams: {number}; order: {shown.want.sort}; clients: {chosen}", _QUIET)


def _stream_style(row: StreamRow) -> str:
    if row.client in ORPHANS:
        return _BAD
    late = row.deadline_slack_seconds is not None and row.deadline_slack_seconds < 0
    return _WARN if row.client == "stalled" or late else ""


def _keys(shown: Shown) -> Text:
    orders = " ".join(f"{key} {order}" for key, order in ORDER_KEYS.items())
    return Text(f"q quit  p {'go on' if shown.paused else 'pause'}  f clients  order: {orders}", _QUIET)
