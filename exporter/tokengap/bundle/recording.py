"""Rules that add up over many exporters in front of the same engines.

Two proxies in front of one engine are watched by two exporters, and each of them reads that engine's page. So what an
*engine* says (tokens out, running, waiting) is the same at every exporter and taken once, by ``max``; what *sockets*
say (tokens useful and orphaned, streams) is another part at each and summed. What one exporter calls unattributed is
as a rule what the other sees: for a fleet it is what is left of tokens out.

It rests on one name for one engine: exporters that call it differently (``127.0.0.1:8000``, each on its host) speak of
different engines, so name engines (``--engine NAME=URL``). Two exporters on one host see the same sockets: run one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tokengap.bundle.promql import by, duration, on, other_than, rate
from tokengap.bundle.site import Site
from tokengap.series.engines import ENGINE_INFO, ENGINE_OPEN, ENGINE_RUNNING, ENGINE_WAITING
from tokengap.series.queue import DEADLINE_SLACK, QUEUE_AGE
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT, TOKENS_USEFUL

#: The seconds over which rates are taken, unless scrapes are too rare for it.
WINDOW: Final = 300.0

#: How often these are recorded, in seconds, unless scrapes are rarer: for looking back, not for paging.
EVERY: Final = 30.0

#: The label of a place where Prometheus or the site puts one on everything; where not, there is one place.
_PLACE: Final = "cluster"

#: What is added up over engines, and what is the worst of them.
_ADDED: Final = ("tokens_out", "tokens_useful", "tokens_orphaned", "tokens_unattributed")
_COUNTED: Final = ("streams_open", "requests_in_flight")


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule. Its name is ``level:metric:operations``."""

    name: str
    expr: str


def records(site: Site) -> Iterator[Record]:
    """Yield the recording rules, each after those that it uses."""
    yield from _engines(site)
    yield from _above(site, "model", site.per(_PLACE, "model"))
    yield from _above(site, "cluster", site.per(_PLACE))


def _engines(site: Site) -> Iterator[Record]:
    """Yield those of each engine, from what each exporter says of it."""
    per, per_exporter = site.per(_PLACE, "engine"), site.per("job", "instance", _PLACE, "engine")
    window = max(WINDOW, site.lookback)
    out, useful, orphaned, unattributed = (_name(site, "engine", metric) for metric in _ADDED)
    yield Record(out, by("max", per, by("sum", per_exporter, rate(site.select(TOKENS_OUT), window))))
    yield Record(useful, by("sum", per, rate(site.select(TOKENS_USEFUL), window)))
    yield Record(orphaned, by("sum", per, rate(site.select(TOKENS_ORPHANED), window)))
    # Exporters are scraped at different moments, so for a moment the parts may be more than the whole.
    yield Record(unattributed, f"clamp_min({out} - {on(per)} {useful} - {on(per)} {orphaned}, 0)")
    in_flight = f"{site.select(ENGINE_RUNNING)} + {site.select(ENGINE_WAITING)}"
    yield Record(_name(site, "engine", "streams_open"), by("sum", per, site.select(ENGINE_OPEN)))
    yield Record(_name(site, "engine", "requests_in_flight"), by("max", per, in_flight))
    yield _coverage(site, "engine", per)
    yield Record(_name(site, "engine", "queue_age_seconds"), by("max", per, site.select(QUEUE_AGE)))
    yield Record(
        _name(site, "engine", "deadline_slack_seconds"), by("min", (*per, "class"), site.select(DEADLINE_SLACK))
    )


def _above(site: Site, level: str, per: tuple[str, ...]) -> Iterator[Record]:
    """Yield those of a level above the engines, from those of the engines."""

    def of_engines(metric: str) -> str:
        record = _name(site, "engine", metric)
        return _with_model(site, record) if level == "model" else record

    for metric in (*_ADDED, *_COUNTED):
        yield Record(_name(site, level, metric), by("sum", per, of_engines(metric)))
    yield _coverage(site, level, per)
    yield Record(_name(site, level, "queue_age_seconds"), by("max", per, of_engines("queue_age_seconds")))
    slack = by("min", (*per, "class"), of_engines("deadline_slack_seconds"))
    yield Record(_name(site, level, "deadline_slack_seconds"), slack)


def _with_model(site: Site, record: str) -> str:
    """Return an engine's record with the label ``model``; one of them, should two exporters know different ones."""
    engine = site.per(_PLACE, "engine")
    models = by("max", (*engine, "model"), site.select(ENGINE_INFO, model=other_than("")))
    return f"{record} * {on(engine)} group_left (model) topk by ({', '.join(engine)}) (1, {models})"


def _coverage(site: Site, level: str, per: tuple[str, ...]) -> Record:
    """Return the share of the requests in flight that sockets show: never more than 1, and 1 where there are none."""
    streams, requests = (_name(site, level, metric) for metric in _COUNTED)
    share = f"clamp_max({streams} / {on(per)} ({requests} > 0), 1)"
    return Record(_name(site, level, "coverage"), f"{share} or {on(per)} {requests} * 0 + 1")


def _name(site: Site, level: str, metric: str) -> str:
    if metric in _ADDED:
        operation = f"rate{duration(max(WINDOW, site.lookback))}"
    else:
        operation = {"queue_age_seconds": "max", "deadline_slack_seconds": "min", "coverage": "ratio"}.get(
            metric, "sum"
        )
    return f"{level}:tokengap_{metric}:{operation}"
