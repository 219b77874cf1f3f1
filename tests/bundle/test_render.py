"""What is rendered: one description, and the site's numbers in all of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bundle.sites import DEFAULT, OTHER, SITES
from tokengap.bundle.command import CURE, compare
from tokengap.bundle.files import FOLDERS
from tokengap.bundle.render import render, rules
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches
from tokengap.series import SERIES

ROOT = Path(__file__).parent.parent.parent


def rendered(site: Site) -> dict[str, str]:
    return dict(render(site))


def test_the_committed_files_are_up_to_date(capsys: pytest.CaptureFixture[str]):
    """The same as `make drift`."""
    assert compare(DEFAULT, ROOT), f"{capsys.readouterr().out}\n{CURE}"


def test_every_file_lies_where_files_are_pruned():
    """Elsewhere it would stay for ever."""
    assert {str(Path(path).parent) for path in rendered(DEFAULT)} <= {*FOLDERS}


def test_numbers_of_a_site_change_together():
    """The rule, the threshold of the panel and the words of the runbook; the numbers of the defaults are nowhere."""
    site = replace(DEFAULT, deadline=47, age_cut=37)
    files, (watch, *_) = rendered(site), watches(site)
    book = files["runbooks/TokengapQueueWillMissDeadline.md"]
    assert "> 37\n" in watch.expr
    assert "< 10\n" in watch.expr
    assert [threshold.value for threshold in watch.panel.thresholds] == [37]
    assert "longer than 37s and less than 10s of the 47s" in book
    assert watch.expr in book
    assert "older than 37s" in files["alerts/alerts.yml"]
    for text in (watch.expr, watch.description, watch.panel.description, book):
        assert not re.search(r"\b(6|8)s\b|> 6\b", text)


def test_addresses_of_a_site_are_everywhere():
    """No link or command leads to another site's."""
    for path, text in rendered(OTHER).items():
        for url in re.findall(r"https?://[^\s)'\"`]+", text):
            allowed = ("runbooks.example", "grafana.example", "10.0.0.", "github.com/tokengap/tokengap/")
            assert any(one in url for one in allowed), f"{path}: {url}"
    down = next(watch for watch in watches(OTHER) if watch.name == "TokengapDown")
    assert rules.runbook_url(OTHER, down) == "https://github.com/tokengap/tokengap/blob/main/runbooks/TokengapDown.md"


def test_every_file_is_yaml_markdown_or_json_of_one_form():
    """Lines end, none with a blank."""
    for path, text in itertools.chain(*(render(site) for site in SITES)):
        assert text.endswith("\n"), path
        assert not text.endswith("\n\n"), path
        assert not [line for line in text.splitlines() if line != line.rstrip()], path


@pytest.mark.parametrize("site", SITES, ids=["default", "other"])
class TestKubernetes:
    def objects(self, site: Site) -> list[dict]:
        texts = [text for path, text in render(site) if path.startswith("deploy/kubernetes/")]
        return [one for text in texts for one in yaml.safe_load_all(text)]

    def test_the_rules_are_the_same(self, site: Site):
        """Group by group what Prometheus itself is given."""
        (rule,) = [one for one in self.objects(site) if one["kind"] == "PrometheusRule"]
        groups = [
            group
            for path, text in render(site)
            if path.startswith("alerts/")
            for group in yaml.safe_load(text)["groups"]
        ]
        assert rule["apiVersion"] == "monitoring.coreos.com/v1"
        assert rule["spec"]["groups"] == groups

    def test_the_monitors_scrape_what_the_rules_select(self, site: Site):
        """Under the job's name, as often as the rules are written for."""
        for kind, key in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
            (monitor,) = [one for one in self.objects(site) if one["kind"] == kind]
            (endpoint,) = monitor["spec"][key]
            assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": site.job}]
            assert endpoint["interval"] == {5.0: "5s", 15: "15s"}[site.scrape]

    def test_names_and_labels(self, site: Site):
        """Each object once, in the namespace, with the labels that the site's operator looks for."""
        objects = self.objects(site)
        assert len({(one["kind"], one["metadata"]["name"]) for one in objects}) == len(objects)
        for one in objects:
            assert one["metadata"]["namespace"] == site.namespace
            assert one["metadata"]["labels"].items() >= site.labels.items()
            assert re.fullmatch(r"[a-z0-9-]{1,63}", one["metadata"]["name"])


#: Series that need neither an alert nor a panel, and why. Whatever is not in here is watched.
UNWATCHED: dict[str, str] = {}


def test_a_series_that_nobody_watches_has_a_reason():
    """Neither alert nor panel: then the reason is above, and no reason stands there for nothing."""
    shown = "".join(text for path, text in render(DEFAULT) if path.startswith(("alerts/", "dashboards/")))
    unwatched = {series.name for series in SERIES if not re.search(rf"\b{series}(_bucket)?\b", shown)}
    assert unwatched == UNWATCHED.keys()
