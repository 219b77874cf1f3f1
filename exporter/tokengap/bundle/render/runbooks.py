"""Runbooks as Markdown, one page an alert, and their index."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from tokengap.bundle import promql
from tokengap.bundle.render.dashboards import panel_url
from tokengap.bundle.render.file import File
from tokengap.bundle.site import REPOSITORY, Site
from tokengap.bundle.watches import watches
from tokengap.series.engines import ENGINE_STATE
from tokengap.series.queue import DEADLINE_SLACK, QUEUE_AGE, SLOT_UTILIZATION
from tokengap.series.streams import STREAMS
from tokengap.series.tokens import TOKENS_OUT
from tokengap.topology import INTERACTIVE

#: Where it is explained how alerts are rehearsed.
CHAOS: Final = f"{REPOSITORY}/docs/chaos.md"

#: The pages that are of no alert.
BESIDES: Final = ("decision-matrix", "rollback")


def _cell(text: str) -> str:
    """Return a text that may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _linked(text: str, names: Collection[str], here: str = "") -> str:
    """Return a text in which the names of other alerts are links to their runbooks."""
    return re.sub(
        r"Tokengap\w+", lambda found: _link(found[0]) if found[0] in names and found[0] != here else found[0], text
    )


def _link(name: str) -> str:
    return f"[{name}]({name}.md)"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tokengap.bundle"),
        autoescape=select_autoescape(),  # for HTML; a template of Markdown is left as it is
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _cell, "said": promql.said}
    return environment


def files(site: Site) -> Iterator[File]:
    """Yield the file of each runbook, of the pages beside them, and of the index."""
    environment = _environment()
    runbook = environment.get_template("runbook.md.j2")
    all_of_them = watches(site)
    names = [watch.name for watch in all_of_them]
    for watch in all_of_them:
        seen_at = panel_url(site, watch.panel, {})
        text = runbook.render(watch=watch, site=site, book=watch.runbook, panel_url=seen_at, chaos_url=CHAOS)
        yield File(f"runbooks/{watch.name}.md", _linked(text, names, watch.name))
    for name in BESIDES:
        text = environment.get_template(f"{name}.md.j2").render(site=site, queries=_queries(site))
        yield File(f"runbooks/{name}.md", _linked(text, names))
    yield File("runbooks/README.md", environment.get_template("index.md.j2").render(watches=all_of_them, site=site))


def _queries(site: Site) -> dict[str, str]:
    """Return the queries of the pages that are of no alert."""
    per_engine = site.per("engine")
    left = site.select(STREAMS, client=promql.any_of("vanished", "gone"))
    return {
        "queue_age": promql.by("max", per_engine, site.select(QUEUE_AGE)),
        "utilization": promql.by("max", per_engine, site.select(SLOT_UTILIZATION)),
        "slack": promql.by("min", per_engine, site.select(DEADLINE_SLACK, **{"class": INTERACTIVE})),
        "token_rate": promql.by("max", per_engine, promql.rate(site.select(TOKENS_OUT), site.lookback)),
        "verdict": f"{site.select(ENGINE_STATE)} == 1",
        "orphans": promql.by("sum", site.per("engine", "hop"), left),
    }
