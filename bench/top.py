"""What a redraw of ``tokengap top`` takes, with many streams in flight.

A view of ``--streams`` streams is drawn as the command draws it, from the exporter's answer as bytes to the letters for
a terminal: of 200 columns and 60 rows, and of 500 rows, the most that can be asked for. Beside it the same rows as a
table of rich, which lays out each cell by itself; the claim is the median over interleaved rounds.

    python bench/top.py [--streams 2000] [--json]
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Callable

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from scrape import view_of
from tokengap.top.screen import STREAMS, Shown, frame
from tokengap.topology import Topology
from tokengap.web.history import Trend
from tokengap.web.now import MOST, Now, Wanted, now_json

WIDTH, HEIGHT = 200, 60


def terminal(height: int) -> Console:
    """Return a terminal that goes nowhere."""
    return Console(file=io.StringIO(), width=WIDTH, height=height, force_terminal=True, color_system="256")


def took(work: Callable[[], object]) -> float:
    """Return the milliseconds that it takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def as_rich_table(now: Now) -> Table:
    """Return the streams as rich's own table."""
    table = Table(box=None)
    for column in STREAMS:
        table.add_column(column.title, justify="right" if column.number else "left", no_wrap=True)
    for row in now.streams.rows:
        table.add_row(*(column.cell(row) for column in STREAMS))
    return table


def measure(streams: int, rounds: int) -> dict[str, object]:
    """Measure both heights."""
    view, result = view_of(streams), {"streams": streams}
    for name, height in (("", HEIGHT), ("_500_rows", MOST)):
        want = Wanted(top=height)
        body = now_json(view, Topology(), Trend(), want, show_addresses=False)
        shown = Shown("http://127.0.0.1:10788", want, keys=True)
        ours, theirs = terminal(height), terminal(height)
        redraws, tables = [], []
        with Live(console=ours, screen=True, auto_refresh=False) as live:

            def redraw(shown: Shown = shown, body: bytes = body, height: int = height, live: Live = live) -> None:
                shown.take(msgspec.json.decode(body, type=Now))
                live.update(Group(*frame(shown, WIDTH, height)), refresh=True)

            redraw()
            for _ in range(rounds):
                redraws.append(took(redraw))
                tables.append(took(lambda: theirs.print(as_rich_table(shown.now))))  # noqa: B023 - called at once
        ratios = [mine / other for mine, other in zip(redraws, tables, strict=True)]
        result |= {
            f"redraw_ms{name}": round(statistics.median(redraws), 1),
            f"redraw_ms_most{name}": round(max(redraws), 1),
            f"rich_table_ms{name}": round(statistics.median(tables), 1),
            f"ratio_redraw_to_rich_table{name}": round(statistics.median(ratios), 2),
        }
    return result


@click.command()
@click.option("--streams", default=2000, show_default=True, help="Streams in flight.")
@click.option("--rounds", default=50, show_default=True, help="How often it is drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(streams: int, rounds: int, as_json: bool) -> None:
    """Measure a redraw of tokengap top."""
    result = measure(streams, rounds)
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, value in result.items():
        click.echo(f"{name:34} {value}")
    click.echo("bar: redraw_ms under 50")


if __name__ == "__main__":
    main()
