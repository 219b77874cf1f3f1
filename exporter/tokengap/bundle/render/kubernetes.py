"""The same as Kubernetes objects: rules and scrapes for Prometheus' operator, dashboards for Grafana's sidecar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from tokengap.bundle.promql import duration
from tokengap.bundle.render import rules
from tokengap.bundle.render.file import File, as_yaml
from tokengap.bundle.site import Site

#: The name of everything, and the label by which the monitors find the exporter.
_NAME: Final = "tokengap"
_OPERATOR: Final = "monitoring.coreos.com/v1"

#: The label by which Grafana's sidecar finds dashboards.
_DASHBOARD: Final = {"grafana_dashboard": "1"}


def files(site: Site, boards: Iterable[File]) -> Iterator[File]:
    """Yield the file of each kind of object. ``boards`` are the files of the dashboards."""
    groups = [*rules.alerts(site)["groups"], *rules.recordings(site)["groups"]]
    yield _file("prometheusrule", _object(site, _OPERATOR, "PrometheusRule", {"spec": {"groups": groups}}))
    yield _file("servicemonitor", _object(site, _OPERATOR, "ServiceMonitor", {"spec": _scrape(site, "endpoints")}))
    yield _file("podmonitor", _object(site, _OPERATOR, "PodMonitor", {"spec": _scrape(site, "podMetricsEndpoints")}))
    maps = [_config_map(site, board) for board in boards]
    if maps:
        yield _file("dashboards", *maps)


def _file(kind: str, *objects: dict[str, Any]) -> File:
    return File(f"deploy/kubernetes/{kind}.yaml", as_yaml(*objects))


def _object(
    site: Site, version: str, kind: str, body: dict[str, Any], name: str = _NAME, **labels: str
) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": site.namespace,
        "labels": {"app.kubernetes.io/name": _NAME, **labels, **site.labels},
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _scrape(site: Site, endpoints: str) -> dict[str, Any]:
    """Return how the operator scrapes the exporter: under the job's name that the rules select, wherever it runs."""
    return {
        "namespaceSelector": {"any": True},
        "selector": {"matchLabels": {"app.kubernetes.io/name": _NAME}},
        endpoints: [
            {
                "port": "metrics",
                "interval": duration(site.scrape),
                "relabelings": [{"targetLabel": "job", "replacement": site.job}],
            }
        ],
    }


def _config_map(site: Site, board: File) -> dict[str, Any]:
    file = PurePosixPath(board.path)
    body = {"data": {file.name: board.text}}
    return _object(site, "v1", "ConfigMap", body, f"{_NAME}-dashboard-{file.stem}", **_DASHBOARD)
