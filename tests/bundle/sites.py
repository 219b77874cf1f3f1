"""The sites for which things are tried: the one of the defaults, and one that differs in every number and address."""

from __future__ import annotations

from tokengap.bundle.site import Site

DEFAULT = Site()

OTHER = Site(
    deadline=30,
    age_cut=25,
    window=20,
    orphan_budget=0.02,
    deadline_budget=0.01,
    beat=2,
    scrape=15,
    job="gap",
    selector='cluster="a"',
    runbooks="https://runbooks.example/{alert}",
    dashboards="https://grafana.example",
    exporter="http://10.0.0.1:10788",
    engine="http://10.0.0.2:8000",
    prometheus="http://10.0.0.3:9090",
    owner="the night shift",
    namespace="inference",
    labels={"release": "prometheus"},
)

SITES = (DEFAULT, OTHER)
