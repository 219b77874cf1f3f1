"""A site's numbers and addresses, and the pieces of PromQL that are made from them."""

from __future__ import annotations

from dataclasses import fields, replace

import promql_parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.sites import DEFAULT, OTHER
from tokengap.bundle.promql import any_of, duration, is_matchers, labels_of, other_than, said
from tokengap.bundle.site import FLAGS, Site, repository_url
from tokengap.config import Settings
from tokengap.errors import SettingsError
from tokengap.series.queue import QUEUE_AGE
from tokengap.series.streams import STREAM_AGE, STREAMS


def test_the_defaults_are_the_exporters():
    """Rules that are rendered without options fit an exporter that runs without any."""
    settings = Settings()
    assert (DEFAULT.deadline, DEFAULT.age_cut) == (settings.deadline, settings.age_cut)
    assert (DEFAULT.window, DEFAULT.beat) == (settings.window, settings.interval)
    assert f"http://127.0.0.1{settings.listen}" == DEFAULT.exporter


def test_the_other_site_differs_in_everything():
    """So that whatever is written down rather than taken from the site is found out."""
    assert [part.name for part in fields(Site) if getattr(DEFAULT, part.name) == getattr(OTHER, part.name)] == []
    assert [part.name for part in fields(Site)] == list(FLAGS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"age_cut": 8}, "--age-cut is 8s; expected less than the deadline, 8s"),
        ({"deadline": 0.0}, "--deadline is 0; expected more than 0"),
        ({"scrape": -1}, "--scrape is -1; expected more than 0"),
        ({"orphan_budget": 0.0}, "--orphan-budget is 0%; expected more than 0% and at most 5%"),
        ({"deadline_budget": 0.051}, "--deadline-budget is 5.1%; expected more than 0% and at most 5%"),
        ({"selector": "cluster=a"}, "--selector 'cluster=a'; expected matchers of labels, such as cluster=\"a\","),
        ({"selector": 'cluster="a",'}, "--selector 'cluster=\"a\",'; expected matchers"),
        ({"selector": '{cluster="a"}'}, "--selector '{cluster=\"a\"}'; expected matchers"),
        ({"selector": 'cluster="`a`"'}, "--selector 'cluster=\"`a`\"'; expected matchers"),
        ({"selector": 'cluster=~"a("'}, "--selector 'cluster=~\"a(\"'; expected matchers"),
        ({"job": "my job"}, "--job 'my job'; expected the name of Prometheus' scrape job, such as tokengap"),
        ({"owner": "a | b"}, "--owner 'a | b'; expected whom to call"),
        ({"namespace": "Monitoring"}, "--namespace 'Monitoring'; expected the name of a Kubernetes namespace"),
        ({"runbooks": "runbooks/"}, "--runbook-base 'runbooks/'; expected an address such as https://host/path"),
        ({"dashboards": "https://h/a b"}, "--dashboard-base 'https://h/a b'; expected an address"),
        ({"engine": "http://h:1; rm -rf /"}, "--engine-url 'http://h:1; rm -rf /'; expected an address"),
        ({"exporter": "ftp://h"}, "--exporter-url 'ftp://h'; expected an address"),
        ({"runbooks": "https://h/{name}"}, "--runbook-base 'https://h/{name}'; expected an address"),
    ],
)
def test_what_cannot_be(wrong: dict, message: str):
    """One line that names the flag, what was given and what is expected."""
    with pytest.raises(SettingsError) as caught:
        Site(**wrong)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (5, "5s"),
        (0.5, "500ms"),
        (60, "1m"),
        (90, "1m30s"),
        (3600, "1h"),
        (86400 * 3, "3d"),
        (1.25, "1s250ms"),
        (0, "0s"),
    ],
)
def test_a_duration(seconds: float, written: str):
    """As Prometheus reads it."""
    assert duration(seconds) == written


def test_a_duration_as_people_say_it():
    """The same, but for parts of a second."""
    assert (said(90), said(22.5), said(0.5)) == ("1m30s", "22.5s", "0.5s")


@given(st.integers(1, 10**9))
def test_a_duration_is_read_back(milliseconds: int):
    """By Prometheus' grammar, to the millisecond."""
    assert promql_parser.parse_duration(duration(milliseconds / 1000)).total_seconds() == pytest.approx(
        milliseconds / 1000
    )


MATCHER = st.builds(
    '{}{}"{}"'.format,
    st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
    st.sampled_from(["=", "!=", "=~", "!~"]),
    st.from_regex(r"[a-z0-9.+ ,-]{1,10}", fullmatch=True),
)


@given(st.lists(MATCHER, min_size=1, max_size=4).map(",".join))
def test_what_is_taken_for_matchers_prometheus_takes_too(text: str):
    """And the labels read off them are those that Prometheus reads."""
    if is_matchers(text):
        parsed = promql_parser.parse(f"x{{{text}}}").matchers.matchers
        assert labels_of(text) == tuple(dict.fromkeys(matcher.name for matcher in parsed))


@given(st.text(alphabet='ab="~!,{}\\ \n', max_size=12))
def test_what_prometheus_refuses_is_refused(text: str):
    """Whatever it is made of."""
    if is_matchers(text):
        promql_parser.parse(f"x{{{text}}}")


def test_a_vector():
    """The site's matchers first, then those of the query."""
    assert DEFAULT.select(QUEUE_AGE) == "tokengap_queue_age_seconds"
    assert OTHER.select(QUEUE_AGE, engine="w") == 'tokengap_queue_age_seconds{cluster="a",engine="w"}'
    assert DEFAULT.select(STREAMS, client=any_of("gone", "vanished")) == 'tokengap_streams{client=~"gone|vanished"}'
    assert DEFAULT.select(STREAMS, hop=other_than("")) == 'tokengap_streams{hop!=""}'
    assert DEFAULT.select(STREAM_AGE, "_bucket") == "tokengap_stream_age_seconds_bucket"


def test_what_is_aggregated_by():
    """A selector that matches several clusters keeps them apart."""
    assert DEFAULT.per("job", "engine") == ("job", "engine")
    assert Site(selector='cluster=~".+",region!="x"').per("job", "engine") == ("job", "engine", "cluster", "region")
    assert OTHER.on_dashboards().per("job", "engine") == ("job", "engine", "cluster", "instance")


def test_on_dashboards():
    """What the reader chose, besides what the site is limited to."""
    assert DEFAULT.on_dashboards().selector == 'cluster=~"$cluster",job=~"$job",instance=~"$instance"'
    assert OTHER.on_dashboards().selector == 'cluster="a",cluster=~"$cluster",job=~"$job",instance=~"$instance"'


def test_the_address_of_a_runbook():
    """The alert's name goes where the site says, or behind."""
    assert DEFAULT.runbook_url("TokengapDown") == repository_url("TokengapDown")
    assert OTHER.runbook_url("TokengapDown") == "https://runbooks.example/TokengapDown"
    assert replace(DEFAULT, runbooks="http://h:1/r/").runbook_url("A") == "http://h:1/r/A.md"


def test_the_options_are_those_that_make_the_site():
    """None for the defaults, and for any other site words that a shell takes apart rightly."""
    assert DEFAULT.options == ""
    assert Site(deadline=30, age_cut=25, selector='cluster="a"').options == (
        "--deadline 30s --age-cut 25s --selector 'cluster=\"a\"'"
    )
    assert "--label release=prometheus" in OTHER.options
    assert "--scrape 15s" in OTHER.options
