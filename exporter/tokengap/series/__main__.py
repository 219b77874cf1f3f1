"""``python -m tokengap.series``: write ``docs/series.md`` from the catalogue, or ``--check`` that it is up to date."""

from __future__ import annotations

import sys

import click

from tokengap.series import SERIES
from tokengap.series.declare import Series
from tokengap.view import AGE_BOUNDS

CURE = "run `python -m tokengap.series` and commit"


def catalogue() -> str:
    """Return the Markdown page of all series."""
    bounds = ", ".join(f"{bound:g}" for bound in AGE_BOUNDS)
    rows = "\n".join(_row(series) for series in SERIES)
    return f"""<!-- Rendered from tokengap.series.SERIES by `python -m tokengap.series`. Do not edit. -->

# Series

Everything `/metrics` says, in the order of the page. The process itself adds `process_*` (memory, CPU, files).

Labels are few and bounded, and name what is configured: no stream, no client address. Streams one by one are on
`/api/streams`. A value that is not known in a beat is missing; only a 0 means none. Counters count from the start of
the exporter and never fall, also when an engine restarts.

| name | kind | labels | meaning |
| --- | --- | --- | --- |
{rows}

A `gaugehistogram` is a distribution of what is there now. In OpenMetrics it has that type; in the text format 0.0.4,
which lacks the type, it is written as a `histogram` with gauges `_gcount` and `_gsum`. In both its buckets are the same
series. Bounds of the ages, in seconds: {bounds}.
"""


def _row(series: Series) -> str:
    labels = ", ".join(f"`{label}`" for label in series.labels)
    return f"| `{series.name}` | {series.kind} | {labels} | {series.help} |"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the file differs.")
@click.argument("path", default="docs/series.md")
def main(path: str, check: bool) -> None:
    """Write the catalogue of series to PATH."""
    if not check:
        with click.open_file(path, "w", encoding="utf-8") as file:
            file.write(catalogue())
        return
    with click.open_file(path, encoding="utf-8") as file:
        if file.read() != catalogue():
            sys.exit(f"{path} is not what SERIES says: {CURE}")


if __name__ == "__main__":
    main()
