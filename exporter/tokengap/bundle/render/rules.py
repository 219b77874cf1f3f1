"""Alerts and recording rules as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tokengap.bundle import recording
from tokengap.bundle.promql import duration
from tokengap.bundle.render.dashboards import watch_url
from tokengap.bundle.render.file import File, as_yaml
from tokengap.bundle.site import Site, repository_url
from tokengap.bundle.watch import Watch
from tokengap.bundle.watches import SUBJECTS, budgets


def runbook_url(site: Site, watch: Watch) -> str:
    """Return where the runbook of a watch can be read when its alert fires."""
    return repository_url(watch.name) if watch.outlives_exporter else site.runbook_url(watch.name)


def alert(site: Site, watch: Watch) -> dict[str, Any]:
    """Return the alerting rule of a watch."""
    times = {"for": watch.hold, "keep_firing_for": watch.keep}
    return {
        "alert": watch.name,
        "expr": watch.expr,
        **{key: duration(seconds) for key, seconds in times.items() if seconds},
        "labels": {"severity": watch.severity},
        "annotations": {
            "summary": watch.summary,
            "description": watch.description,
            "runbook_url": runbook_url(site, watch),
            "dashboard_url": watch_url(site, watch),
        },
    }


def alerts(site: Site) -> dict[str, Any]:
    """Return the groups of alerting rules. They are evaluated as often as is scraped: the usual minute is too late."""
    interval = duration(site.scrape)
    return {
        "groups": [
            {"name": f"tokengap-{subject}", "interval": interval, "rules": [alert(site, make(site)) for make in makes]}
            for subject, makes in SUBJECTS.items()
        ]
    }


def recordings(site: Site) -> dict[str, Any]:
    """Return the groups of recording rules. Those of budgets read days at a time: once a minute is often enough."""
    fleet = _recorded("fleet", recording.records(site), max(recording.EVERY, site.scrape))
    return {"groups": [fleet, _recorded("shares", budgets.records(site), max(budgets.EVERY, site.scrape))]}


def _recorded(name: str, records: Iterable[recording.Record], interval: float) -> dict[str, Any]:
    rules = [{"record": record.name, "expr": record.expr} for record in records]
    return {"name": f"tokengap-{name}", "interval": duration(interval), "rules": rules}


def files(site: Site) -> Iterator[File]:
    """Yield the files of rules."""
    yield File("alerts/alerts.yml", as_yaml(alerts(site)))
    yield File("alerts/recording.yml", as_yaml(recordings(site)))
