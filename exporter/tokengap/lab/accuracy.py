"""What a cell of the matrix measured, whether that is good enough, and the page on which it stands. Pure.

``python -m tokengap.lab.accuracy RUN.json...`` prints ``docs/accuracy.md`` from what ``tokengap drill --matrix --json``
printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from rich import box
from rich.table import Table

from tokengap.lab.report import bar
from tokengap.lab.ways import COLUMNS, KINDS, WAYS, Column, Kind

#: With what the exporter runs: as it was started, as a user who may do nothing, or without events of closed sockets.
Mode: TypeAlias = Literal["plain", "unprivileged", "no-events"]
MODES: dict[Mode, str] = {
    "plain": "As it was started",
    "unprivileged": "Without any privilege",
    "no-events": "Without events of closed sockets (`tokengap_accounting_mode` says `beat`)",
}

#: Tokens: a claim of less is none; and of each who left so many may have been on the way to it.
NO_CLAIM, ON_THE_WAY = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class Split:
    """Tokens: generated, received by those who were there, and for nobody."""

    out: float
    useful: float
    orphaned: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One way, one way to leave, one kind of answers: the truth and what the exporter said of it.

    ``by_hop`` is where it saw tokens orphaned. ``seconds`` is for each who left how long it took until its state was
    right, None: it never was. ``wrongly_gone`` is for how long those who were there were called gone or vanished.
    ``late_beats`` is how many beats of the exporter came late meanwhile. ``skipped`` says why it was not run.
    """

    way: str
    column: str
    kind: Kind
    truth: Split | None = None
    measured: Split | None = None
    by_hop: Mapping[str, float] = field(default_factory=dict)
    pending: float = 0.0
    unattributed: float = 0.0
    seconds: tuple[float | None, ...] = ()
    wrongly_gone: float = 0.0
    late_beats: int = 0
    skipped: str = ""
    failed: str = ""

    @property
    def error(self) -> float | None:
        """The larger error of the two parts, as a share of tokens out."""
        if self.truth is None or self.measured is None:
            return None
        useful = abs(self.measured.useful - self.truth.useful)
        orphaned = abs(self.measured.orphaned - self.truth.orphaned)
        return max(useful, orphaned, abs(self.measured.out - self.truth.out)) / max(self.truth.out, 1.0)

    @property
    def slowest(self) -> float | None:
        """Seconds until the last state was right; None when there is none to be right, or one never was."""
        known = [each for each in self.seconds if each is not None]
        return max(known) if known and len(known) == len(self.seconds) else None

    def bar(self) -> float:
        """Return the most that the error may be."""
        return bar(streamed=self.kind != "whole", engine_leaks=WAYS[self.way].engine_leaks)

    def misses(self) -> tuple[str, ...]:
        """Return in words which bars it misses, none when it was not run."""
        if self.failed:
            return (self.failed,)
        if self.truth is None or self.measured is None or self.error is None:
            return ()
        column, way = COLUMNS[self.column], WAYS[self.way]
        said = []
        if self.error > self.bar():
            said.append(f"off by {self.error:.1%}, the bar is {self.bar():.0%}")
        crowd = column.of(self.kind)
        # Who half-closed is there; where the proxy takes it for leaving and ends the stream, some are on the way too.
        cut_off = column.leaving == "half-close" and self.truth.out < crowd.users * crowd.tokens
        all_stayed = column.leaving not in ("fin", "rst", "vanish") and not cut_off
        claim = NO_CLAIM if all_stayed else ON_THE_WAY * len(crowd.leaves)
        if self.truth.orphaned < NO_CLAIM and self.measured.orphaned >= claim:
            said.append(f"{self.measured.orphaned:.1f} tokens called orphaned, and none were")
        if self.wrongly_gone:
            said.append(f"clients who were there called gone for {self.wrongly_gone:.1f} s")
        right = {way.leaks_at(column.leaving)}
        if self.kind == "whole":  # what it had cost until its client left is lost at the hop that let go of it
            right.add(way.places[0])
        elsewhere = sum(n for hop, n in self.by_hop.items() if hop not in right)
        if elsewhere > max(self.bar() * self.truth.out, len(self.seconds)):
            said.append(f"{elsewhere:.0f} orphaned tokens named at another hop than {way.leaks_at(column.leaving)}")
        if column.within is not None and self.seconds:
            if None in self.seconds:
                said.append(f"{self.seconds.count(None)} of {len(self.seconds)} client states never right")
            elif self.slowest is not None and self.slowest > column.within:
                said.append(f"client state right after {self.slowest:.1f} s, the bar is {column.within:g} s")
        return tuple(said)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the matrix. ``user`` is as whom the exporter ran, ``load`` the machine's load before and after."""

    mode: Mode
    user: str
    date: str
    kernel: str
    cores: int
    load: tuple[float, float]
    programs: Mapping[str, str]
    cells: tuple[Cell, ...]

    @property
    def passed(self) -> bool:
        """Whether no cell that was run misses a bar."""
        return not any(cell.misses() for cell in self.cells)

    def tables(self) -> list[Table]:
        """Return a table for a terminal for each kind of answers."""
        tables = []
        for kind in KINDS:
            cells = {(cell.way, cell.column): cell for cell in self.cells if cell.kind == kind}
            if not cells:
                continue
            columns = [column for column in COLUMNS.values() if any(name == column.name for _, name in cells)]
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_KINDS[kind], title_justify="left")
            table.add_column("")
            for column in columns:
                table.add_column(column.title, justify="right")
            for way in dict.fromkeys(name for name, _ in cells):
                shown = [cells.get((way, column.name)) for column in columns]
                table.add_row(WAYS[way].title, *("" if cell is None else _short(cell) for cell in shown))
            tables.append(table)
        return tables


_KINDS: dict[Kind, str] = {"streamed": "Answers as a stream", "whole": "Answers that come whole"}


def _short(cell: Cell) -> str:
    """Return a cell in a few characters: the error, the seconds, and a mark when it misses a bar."""
    if cell.error is None:
        return "failed (!)" if cell.failed else "not run"
    parts = [f"{cell.error:.2%}"]
    if cell.seconds and COLUMNS[cell.column].within is not None:
        parts.append("never" if cell.slowest is None else f"{cell.slowest:.1f} s")
    return " ".join(parts) + (" (!)" if cell.misses() else "")


_WAITS = (
    "A client that has closed its side and waits, in the proxy's queue or for an answer that comes whole, looks like "
    "one that has left until the first bytes of its answer: nothing is sent that a client who left would refuse. Its "
    "tokens are pending meanwhile, not orphaned"
)
_UNPAIRED = (
    "This proxy asks the engine up to 0.4 s after its client asked, and sends the answer on with other bytes. What "
    "these are worth is not known in the exporter's first seconds: clients of one burst are taken for each other then"
)
_LATE = (
    "The kernel shows it nearly two seconds after the last acknowledgement, and the next beat reads it: with a beat of "
    "1 s that is 3 s at the latest, and then the page is made"
)
_RESET = (
    "HAProxy holds small pieces back for up to 0.2 s and ends its side with a reset, at which the kernel forgets what "
    "was not acknowledged"
)

_ORDER = (
    "What HAProxy's queue held goes on when a slot is free, and nothing but the order tells whose it is until the "
    "answer comes, at once: one of the three leavers was taken for one who stayed, and 100 tokens hang on each"
)

UNEXPLAINED = "Not explained yet"

#: Why a cell misses its bar, found in recordings of its beats (tests/recorded/matrix): by way, column and kind, the
#: first that fits; "*" is any.
REASONS: dict[tuple[str, str, str], str] = {
    ("direct-engine-leaks", "vanish", "whole"): UNEXPLAINED,
    ("*", "vanish", "*"): _LATE,
    ("litellm", "*", "*"): _UNPAIRED,
    ("litellm-leaking", "*", "*"): _UNPAIRED,
    ("*", "half-close", "*"): _WAITS,
    ("haproxy", "*", "streamed"): _RESET,
    ("haproxy-maxconn", "*", "streamed"): _RESET,
    ("haproxy-maxconn", "queued", "whole"): _ORDER,
}

#: Why whole modes do.
MODE_REASONS: dict[Mode, str] = {
    "no-events": "What a socket carried between the last beat and its end is not told: where a proxy goes on for a "
    "client that left, half of a beat is taken to have reached it"
}


def reason(cell: Cell, mode: Mode = "plain") -> str:
    """Return why a cell misses its bar, as far as that is known."""
    if mode in MODE_REASONS:
        return MODE_REASONS[mode]
    for (way, column, kind), why in REASONS.items():
        if (way in ("*", cell.way)) and (column in ("*", cell.column)) and (kind in ("*", cell.kind)):
            return why
    return UNEXPLAINED


def page(runs: Sequence[Run]) -> str:
    """Return ``docs/accuracy.md``."""
    lines = [_HEAD]
    for run in runs:
        lines += [f"## {MODES[run.mode]}", "", _circumstances(run), ""]
        lines += _kind_tables(run)
        lines += _misses(run)
    return "\n".join(lines).rstrip() + "\n"


def _circumstances(run: Run) -> str:
    versions = [f"{name.partition('-')[0]} {version}" for name, version in sorted(run.programs.items())]
    programs = ", ".join(versions)
    late = sum(cell.late_beats for cell in run.cells)
    load = f"load {run.load[0]:.1f} before and {run.load[1]:.1f} after, {late} late {'beat' if late == 1 else 'beats'}"
    machine = f"kernel {run.kernel}, {run.cores} cores ({load})"
    return f"Run on {run.date}, {machine}; the exporter ran as {run.user}. {programs}."


def _kind_tables(run: Run) -> list[str]:
    lines: list[str] = []
    for kind in KINDS:
        cells = {(cell.way, cell.column): cell for cell in run.cells if cell.kind == kind}
        if not cells:
            continue
        columns = [column for column in COLUMNS.values() if any(name == column.name for _, name in cells)]
        lines += [f"### {_KINDS[kind]}", ""]
        lines += _summary(cells, columns)
        lines += ["", "<details><summary>The numbers</summary>", "", *_numbers(cells.values()), "", "</details>", ""]
    return lines


def _summary(cells: Mapping[tuple[str, str], Cell], columns: Sequence[Column]) -> list[str]:
    lines = [_row(["", *(column.title for column in columns)]), _row(["---"] + ["---:"] * len(columns))]
    for way in WAYS.values():
        if any(name == way.name for name, _ in cells):
            shown = [cells.get((way.name, column.name)) for column in columns]
            lines.append(_row([way.title, *("" if cell is None else _linked(cell) for cell in shown)]))
    return lines


def _linked(cell: Cell) -> str:
    text = _short(cell)
    return f"**{text}**" if cell.misses() else text


def _numbers(cells: Iterable[Cell]) -> list[str]:
    lines = [
        _row(["", "", "out", "useful", "measured", "orphaned", "measured", "pending", "unattributed", "state right"]),
        _row(["---"] * 2 + ["---:"] * 8),
    ]
    for cell in cells:
        row = [WAYS[cell.way].title, COLUMNS[cell.column].title]
        if cell.truth is None or cell.measured is None:
            row += [cell.failed or cell.skipped] + [""] * 7
        else:
            truth, seen = cell.truth, cell.measured
            row += [f"{truth.out:,.0f}", f"{truth.useful:,.0f}", f"{seen.useful:,.1f}", f"{truth.orphaned:,.0f}"]
            row += [f"{seen.orphaned:,.1f}", f"{cell.pending:,.1f}", f"{cell.unattributed:,.1f}"]
            shown = ("never" if each is None else f"{each:.1f}" for each in cell.seconds)
            row.append(", ".join(shown) + " s" if cell.seconds else "")
        lines.append(_row(row))
    return lines


def _misses(run: Run) -> list[str]:
    missing = [cell for cell in run.cells if cell.misses()]
    if not missing:
        return ["Every cell that was run meets its bars.", ""]
    lines = ["Cells that miss a bar, and why:", ""]
    for why in dict.fromkeys(reason(cell, run.mode) for cell in missing):
        lines.append(f"- {why}.")
        lines += [f"  - {_said(cell)}" for cell in missing if reason(cell, run.mode) == why]
    return [*lines, ""]


def _said(cell: Cell) -> str:
    which = f"{WAYS[cell.way].title}; {COLUMNS[cell.column].title}; {_KINDS[cell.kind].lower()}"
    late = f" ({cell.late_beats} late beats)" if cell.late_beats else ""
    return f"{which}: {'; '.join(cell.misses())}{late}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


_HEAD = """\
# Accuracy

What the exporter says, beside what happened: real proxies in front of the stand-in engine, and real users over real
sockets, who leave in every way there is. The truth is known from both ends: what each user received until it left, and
what the engine generated for whom. `make accuracy` measures this page again (an hour, as root); `tokengap drill
--matrix` prints it, `--rows` and `--columns` choose cells of it, and `--json` gives the numbers.

A cell shows by how much the split of tokens into useful and orphaned is off, the worse of the two, as a share of all
tokens out; and, where users leave, after how many seconds `/api/streams` had every leaver's state right, the slowest of
them. Cells in bold with (!) miss a bar, and why stands below the tables. Eight users ask in each cell, three of them
leave; a beat is 1 s.

| | bar |
| --- | --- |
| tokens, answers as a stream | off by 1 % of tokens out at most; 3 % where the engine itself goes on |
| tokens, answers that come whole | off by 5 % at most |
| nobody left, half-closed and was served on, or only stalled | no token is called orphaned, and no client gone |
| state after FIN or RST | right within 2 beats |
| state after vanishing | right within 3 s of the first bytes sent to it |
| state of a stalled reader | right within 5 s |

"Vanished" is a user whose packets are dropped on arrival in a network namespace: nobody is told. A stalled reader reads
nothing for 8 s and then the rest: it is alive, and all it gets in the end is useful. Where nothing leaks, what is
orphaned are the few tokens that were on the way, or in the proxy, when the user left.
"""


def main() -> None:
    """Print the page of the runs in these files."""
    runs = [msgspec.json.decode(Path(name).read_bytes(), type=Run) for name in sys.argv[1:]]
    sys.stdout.write(page(merged(runs)))


def merged(runs: Sequence[Run]) -> list[Run]:
    """Put runs of one mode together, in the order of the modes; of a cell the last counts."""
    merged = []
    for mode in MODES:
        same = [run for run in runs if run.mode == mode]
        if same:
            cells = {(cell.way, cell.column, cell.kind): cell for run in same for cell in run.cells}
            programs = {name: version for run in same for name, version in run.programs.items()}
            order = sorted(cells.values(), key=_place)
            loads = [run.load for run in same]
            load = (min(before for before, _ in loads), max(after for _, after in loads))
            merged.append(replace(same[-1], load=load, programs=programs, cells=tuple(order)))
    return merged


def _place(cell: Cell) -> tuple[int, int, int]:
    return list(WAYS).index(cell.way), list(COLUMNS).index(cell.column), KINDS.index(cell.kind)


if __name__ == "__main__":
    main()
