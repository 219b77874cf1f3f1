"""Rules that add up over many exporters in front of the same engines.

An engine is told apart by its cluster and its name: exporters that call it the same are taken to watch the same. What
each of them says of an engine that they share:

===========================  ========================================  ==============================================
series                       it is about                               over all exporters
===========================  ========================================  ==============================================
tokens out, in flight        the engine, whoever asks                  the most that one of them says
tokens useful, orphaned,     the streams that this exporter sees       the sum, less what is in it twice
streams open
tokens unattributed          what it does not see, and another may     what is left of tokens out
queue age, deadline slack    the engine, as far as it sees it          the worst
===========================  ========================================  ==============================================

A sum has twice what two exporters see. That is usual: one beside a proxy sees its clients, and one on the engine's own
host, where the GPUs are read, sees the proxy as a client that takes everything. A token has one fate, so from a sum
comes off what exceeds the whole:

* Orphaned at a hop stands: only one exporter reads the sockets of a hop.
* Orphaned by the engine itself is at most what no exporter alone saw delivered.
* Useful is at most what was not orphaned: what a proxy took for a client that had left was not delivered.

So two exporters that read the same sockets are not told apart from two that share an engine: run one a host. And name
engines alike: ``127.0.0.1:8000`` is another engine on each host (``deploy/prometheus.yml`` has a rule for that).
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
from tokengap.topology import ENGINE_HOP

#: The seconds over which rates are taken, unless scrapes are too rare for it.
WINDOW: Final = 300.0

#: How often these are recorded, in seconds, unless scrapes are rarer: for looking back, not for paging.
EVERY: Final = 30.0

#: The label of a place where Prometheus or the site puts one on everything; where not, there is one place.
PLACE: Final = "cluster"

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
    yield from _above(site, "model", site.per(PLACE, "model"))
    yield from _above(site, "cluster", site.per(PLACE))


def _engines(site: Site) -> Iterator[Record]:
    """Yield those of each engine, from what each exporter says of it."""
    per, per_exporter = site.per(PLACE, "engine"), site.per("job", "instance", PLACE, "engine")
    window = max(WINDOW, site.lookback)
    out, useful, orphaned, unattributed = (name(site, "engine", metric) for metric in _ADDED)
    yield Record(out, by("max", per, by("sum", per_exporter, rate(site.select(TOKENS_OUT), window))))
    at_hops = name(site, "engine_hop", "tokens_orphaned")
    yield Record(at_hops, _orphaned_at_hops(site, out, window))
    yield Record(orphaned, by("sum", per, at_hops))
    claimed = by("sum", per, rate(site.select(TOKENS_USEFUL), window))
    yield Record(useful, _at_most(claimed, f"{out} - {on(per)} {orphaned}"))
    # Exporters are scraped at different moments, so for a moment the parts may be more than the whole.
    yield Record(unattributed, f"clamp_min({out} - {on(per)} {useful} - {on(per)} {orphaned}, 0)")
    streams, requests = (name(site, "engine", metric) for metric in _COUNTED)
    yield Record(requests, by("max", per, f"{site.select(ENGINE_RUNNING)} + {site.select(ENGINE_WAITING)}"))
    yield Record(streams, _at_most(by("sum", per, site.select(ENGINE_OPEN)), requests))
    yield _coverage(site, "engine", per)
    yield Record(name(site, "engine", "queue_age_seconds"), by("max", per, site.select(QUEUE_AGE)))
    yield Record(
        name(site, "engine", "deadline_slack_seconds"), by("min", (*per, "class"), site.select(DEADLINE_SLACK))
    )


def _orphaned_at_hops(site: Site, out: str, window: float) -> str:
    """Return the tokens orphaned by hop, the engine itself being the last."""
    per = site.per(PLACE, "engine")
    by_engine = by("sum", per, rate(site.select(TOKENS_ORPHANED, hop=ENGINE_HOP), window))
    delivered = by(
        "max", per, by("sum", site.per("job", "instance", PLACE, "engine"), rate(site.select(TOKENS_USEFUL), window))
    )
    bounded = _at_most(by_engine, f"{out} - {on(per)} {delivered}")
    everywhere = by("sum", (*per, "hop"), rate(site.select(TOKENS_ORPHANED), window))
    # The second gives what the first does not have: the other hops.
    return f'label_replace({bounded}, "hop", "{ENGINE_HOP}", "", "")\nor\n{everywhere}'


def _at_most(part: str, bound: str) -> str:
    """Return a part of something of each engine, less what it exceeds a bound by; never below 0."""
    return f"clamp_min({part} - clamp_min({part} - ({bound}), 0), 0)"


def _above(site: Site, level: str, per: tuple[str, ...]) -> Iterator[Record]:
    """Yield those of a level above the engines, from those of the engines."""

    def of_engines(metric: str) -> str:
        record = name(site, "engine", metric)
        return _with_model(site, record) if level == "model" else record

    for metric in (*_ADDED, *_COUNTED):
        yield Record(name(site, level, metric), by("sum", per, of_engines(metric)))
    yield _coverage(site, level, per)
    yield Record(name(site, level, "queue_age_seconds"), by("max", per, of_engines("queue_age_seconds")))
    slack = by("min", (*per, "class"), of_engines("deadline_slack_seconds"))
    yield Record(name(site, level, "deadline_slack_seconds"), slack)


def _with_model(site: Site, record: str) -> str:
    """Return an engine's record with the label ``model``; one of them, should two exporters know different ones."""
    engine = site.per(PLACE, "engine")
    models = by("max", (*engine, "model"), site.select(ENGINE_INFO, model=other_than("")))
    return f"{record} * {on(engine)} group_left (model) topk by ({', '.join(engine)}) (1, {models})"


def _coverage(site: Site, level: str, per: tuple[str, ...]) -> Record:
    """Return the share of the requests in flight that sockets show: never more than 1, and 1 where there are none."""
    streams, requests = (name(site, level, metric) for metric in _COUNTED)
    share = f"clamp_max({streams} / {on(per)} ({requests} > 0), 1)"
    return Record(name(site, level, "coverage"), f"{share} or {on(per)} {requests} * 0 + 1")


def name(site: Site, level: str, metric: str) -> str:
    """Return the name of what is recorded at a level, such as `engine`, about one of the series above."""
    if metric in _ADDED:
        operation = f"rate{duration(max(WINDOW, site.lookback))}"
    else:
        operation = {"queue_age_seconds": "max", "deadline_slack_seconds": "min", "coverage": "ratio"}.get(
            metric, "sum"
        )
    return f"{level}:tokengap_{metric}:{operation}"
