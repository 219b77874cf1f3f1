"""The report as one HTML page with its plots, which needs nothing else: no script, no other file."""

from __future__ import annotations

import math

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from tokengap import __version__
from tokengap.chaos import plots
from tokengap.chaos.bench import OTHER, TARGET
from tokengap.chaos.report import Report, mark, shown


def html(report: Report) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("tokengap.chaos"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"mark": mark, "shown": shown}
    engines = (TARGET, OTHER)
    drawn: dict[str, object] = {"plots": (), "bands": (), "timescale": None, "fault": (0.0, 0.0)}
    if (run := report.evidence) is not None:
        zero = report.timeline.began
        seconds = run.looks[-1].at - zero
        limits = {check.name: check.limit for check in report.checks}
        drawn = {
            "plots": [(plot, plots.scale(plot, seconds)) for plot in plots.plots(run, zero, limits)],
            "bands": plots.bands(run, zero),
            "timescale": plots.Scale(seconds, 1.0),
            "fault": (run.fault.start - zero, run.fault.end - zero),
        }
    return environment.get_template("report.html.j2").render(
        report=report,
        version=__version__,
        engines=engines,
        loop_index=engines.index,
        infinity=math.inf,
        width=plots.WIDTH,
        height=plots.HEIGHT,
        left=plots.LEFT,
        right=plots.RIGHT,
        top=plots.TOP,
        bottom=plots.BOTTOM,
        **drawn,
    )
