"""Every rule and every query of a panel or runbook passes our lint, and the lint finds what it is for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bundle.linting import Known, known_names, labels, parsed, query_problems, watch_problems
from bundle.sites import DEFAULT, SITES
from tokengap.bundle.recording import records
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Query, Watch
from tokengap.bundle.watches import SUBJECTS, watches

MAKES = [make for makes in SUBJECTS.values() for make in makes]

STUCK = next(watch for watch in watches(DEFAULT) if watch.name == "TokengapEngineStuck")


@pytest.mark.parametrize("site", SITES, ids=["default", "other"])
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_a_watch_is_clean(make, site: Site):
    """For the defaults, for a site with other numbers and a selector, and as the dashboards show it."""
    assert watch_problems(make(site), site) == []
    seen = site.on_dashboards()
    for query in make(seen).panel.queries:
        assert list(query_problems(query.expr, seen)) == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("tokengap_queue_age_second", "tokengap_queue_age_second is no name of ours"),
        ("tokengap_queue_age_seconds +", "cannot be parsed: "),
        ("tokengap_queue_age_seconds{hop='edge'}", "tokengap_queue_age_seconds has no label hop"),
        ("tokengap_engine_state{state='stucked'}", "tokengap_engine_state has no state stucked"),
        ("tokengap_engine_state{state=~'stuck|bussy'}", "tokengap_engine_state has no state stuck|bussy"),
        ("rate(tokengap_tokens_out_total[15s])", "tokengap_tokens_out_total[0:00:15] holds fewer than four scrapes"),
        ("rate(tokengap_queue_age_seconds[5m])", "rate() of tokengap_queue_age_seconds, which is no counter"),
        ("rate(tokengap_stream_age_seconds_bucket[5m])", "rate() of tokengap_stream_age_seconds_bucket, which is no"),
        ("tokengap_tokens_out_total > 5", "tokengap_tokens_out_total is a counter: its value alone says nothing"),
        (
            "tokengap_queue_age_seconds and tokengap_deadline_slack_seconds",
            "and between ['engine', 'instance', 'job'] and ['class', 'engine', 'instance', 'job'] never matches",
        ),
        (
            "tokengap_queue_age_seconds and on (hop) tokengap_deadline_slack_seconds",
            "and on ['hop'], which one side does not have",
        ),
        (
            "tokengap_queue_age_seconds / on (engine) tokengap_deadline_slack_seconds",
            "/ on ['engine'] meets several lines, which differ by ['instance', 'job']",
        ),
        ("tokengap_streams / on (engine) group_left () tokengap_slots", "/ on ['engine'] meets several lines"),
    ],
)
def test_a_wrong_query_is_found(query: str, problem: str):
    """With the first problem as the message."""
    assert next(query_problems(query, DEFAULT), "nothing").startswith(problem)


@pytest.mark.parametrize(
    "query",
    [
        "rate(tokengap_tokens_out_total[20s]) > 5",
        "sum by (engine) (tokengap_streams{client=~'gone|vanished'}) > 1",
        "max by (job) (tokengap_queue_age_seconds) and on (job) min by (job) (tokengap_deadline_slack_seconds)",
        "histogram_quantile(0.9, sum by (le) (tokengap_stream_age_seconds_bucket))",
        "sum by (engine) (tokengap_streams) / on (engine) group_left () max by (engine) (tokengap_slots)",
        "time() - tokengap_last_beat_timestamp_seconds",
        "rate(tokengap_tokens_out_total[$__rate_interval])",
    ],
)
def test_a_right_query_is_not(query: str):
    """Four scrapes, several words, labels that agree."""
    assert list(query_problems(query, DEFAULT)) == []


@pytest.mark.parametrize("site", SITES, ids=["default", "other"])
def test_the_recording_rules_are_clean(site: Site):
    """Each rests on series, and on records above it."""
    names = dict(known_names())
    for record in records(site):
        assert list(query_problems(record.expr, site, names)) == []
        carried = labels(parsed(record.expr), names)
        assert re.fullmatch(r"(engine|engine_hop|model|cluster):\w+:(sum|max|min|ratio|rate\d+m)", record.name)
        assert record.name not in names
        names[record.name] = Known(carried, counter=False, scraped=False)


def test_a_query_that_forgets_the_site_is_found():
    """Each of its vectors has to have the selector, not only the first."""
    query = 'tokengap_queue_age_seconds{cluster="a"} - tokengap_queue_age_seconds'
    assert list(query_problems(query, Site(selector='cluster="a"'))) == [
        "tokengap_queue_age_seconds is not limited to the site's cluster"
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"expr": 'max by (job, instance, engine) (tokengap_engine_state{state="stuck"})'},
            "the rule has no comparison",
        ),
        ({"expr": f"{STUCK.expr} or {STUCK.panel.queries[0].expr}"}, "the rule has no comparison"),
        ({"expr": f"{STUCK.expr} or absent(up)", "hold": 0}, "absent() without a hold fires"),
        (
            {"expr": "max by (engine) (tokengap_engine_state) == 1"},
            "the rule's alerts carry ['engine'], not ['engine', ",
        ),
        ({"description": "{{ $labels.enigne }} is stuck."}, "the description names enigne, which the alert does not"),
    ],
)
def test_a_wrong_rule_is_found(change: dict, problem: str):
    """promtool accepts each of these."""
    found = watch_problems(_changed(STUCK, **change), DEFAULT)
    assert [one for one in found if one.startswith(problem)], found


def test_a_legend_that_names_nothing_is_found():
    """Grafana would show an empty name."""
    panel = replace(STUCK.panel, queries=(Query("max(tokengap_queue_age_seconds)", "{{engine}}"),))
    assert watch_problems(replace(STUCK, panel=panel), DEFAULT) == ["the legend names engine, which no line has"]


def _changed(watch: Watch, **change) -> Watch:
    return replace(watch, panel=replace(watch.panel, thresholds=()), **change)
