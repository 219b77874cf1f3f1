"""The dashboards as files, without Grafana: what it would read of them, and what its linter would say."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bundle.grafana import complaints
from bundle.linter import RULES, lint, panels, selectors, targets
from bundle.panels import ALL, Span, in_place
from bundle.sites import DEFAULT, OTHER, SITES
from tokengap.bundle.boards import boards
from tokengap.bundle.boards.asking import VERDICTS
from tokengap.bundle.boards.board import COLUMNS, Board, MisplacedPanel, Note, Row, Tile, number
from tokengap.bundle.promql import UP
from tokengap.bundle.render.dashboards import dashboard, panel_url, uid
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Panel, Query
from tokengap.bundle.watches import watches
from tokengap.series import SERIES
from tokengap.series.queue import QUEUE_AGE
from tokengap.view import ENGINE_STATES

#: Names that are not the exporter's own: Prometheus' of alerts and scrapes, and those of every process.
FOREIGN = {
    *(UP, "ALERTS", "scrape_duration_seconds"),
    *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"),
}

#: What of the linter is not followed, by rule and panel, and why: an alert has the labels that its rule left it, and
#: absent() leaves neither job nor instance; and what an alert looks at is shown over the window of its rule, or the
#: line of its threshold would not be where it fires.
EXCEPTIONS = {
    "target-job-rule": {"Firing"},
    "target-instance-rule": {"Firing"},
    "target-rate-interval-rule": {watch.panel.title for watch in watches(DEFAULT)},
}

Json = dict[str, Any]


def rendered(site: Site) -> dict[str, Json]:
    return {board.name: json.loads(json.dumps(dashboard(site, board))) for board in boards(site)}


each_board = pytest.mark.parametrize("board", boards(DEFAULT), ids=lambda board: board.name)
each_site = pytest.mark.parametrize("site", SITES, ids=["default", "other"])


@each_site
@each_board
def test_grafana_reads_what_is_written(site: Site, board: Board):
    """Its own models know every key of it, those of each kind of panel too, and every value is of its type."""
    assert complaints(rendered(site)[board.name]) == []


@each_site
@each_board
def test_the_linter_has_nothing_to_say(site: Site, board: Board):
    """But for the exceptions that have a reason."""
    said = lint(rendered(site)[board.name])
    assert [each for each in said if not _is_excepted(each)] == []


def _is_excepted(said: str) -> bool:
    rule, _, what = said.partition(": ")
    return any(what.startswith(repr(title)) for title in EXCEPTIONS.get(rule, ()))


def test_all_seventeen_rules_are_there():
    """By the names that the original gives them."""
    assert len(RULES) == 17


def graph(json: Json) -> Json:
    return next(panel for panel in panels(json) if panel["type"] == "timeseries")


def variable(json: Json, name: str) -> Json:
    return next(each for each in json["templating"]["list"] if each["name"] == name)


def asks(expression: str) -> Callable[[Json], None]:
    return lambda json: graph(json)["targets"][0].update(expr=expression)


_CHOSEN = 'job=~"$job",instance=~"$instance"'

#: For each rule something that it has to find.
WRONG: dict[str, Callable[[Json], None]] = {
    "template-datasource-rule": lambda json: variable(json, "datasource").update(name="DS_PROMETHEUS"),
    "template-job-rule": lambda json: variable(json, "job").update(allValue=".*"),
    "template-instance-rule": lambda json: variable(json, "instance").update(multi=False),
    "template-label-promql-rule": lambda json: variable(json, "job").update(definition="label_values(x{, job)"),
    "template-on-time-change-reload-rule": lambda json: variable(json, "job").update(refresh=1),
    "panel-datasource-rule": lambda json: graph(json).update(datasource={"type": "prometheus", "uid": "abc"}),
    "panel-title-description-rule": lambda json: graph(json).update(description=""),
    "panel-units-rule": lambda json: graph(json)["fieldConfig"]["defaults"].update(unit="tokens"),
    "panel-no-targets-rule": lambda json: graph(json).update(targets=[]),
    "target-logql-rule": lambda json: graph(json)["targets"][0].update(datasource={"type": "loki"}),
    "target-logql-auto-rule": lambda json: graph(json)["targets"][0].update(datasource={"type": "loki"}),
    "target-promql-rule": asks("sum("),
    "target-rate-interval-rule": asks(f"rate(x_total{{{_CHOSEN}}}[5m])"),
    "target-job-rule": asks('x{instance=~"$instance"}'),
    "target-instance-rule": asks('x{job=~"$job",instance="$instance"}'),
    "target-counter-agg-rule": asks(f"sum(x_total{{{_CHOSEN}}})"),
    "uneditable-dashboard-rule": lambda json: json.update(editable=True),
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_finds_what_it_is_about(name: str):
    """A dashboard that is right but for one thing."""
    json = copy.deepcopy(rendered(DEFAULT)["money"])
    WRONG[name](json)
    assert name in {said.partition(":")[0] for said in lint(json)}


@pytest.mark.parametrize(
    "break_it",
    [
        lambda json: json.update(titlle="x"),
        lambda json: json.update(refresh=10),
        lambda json: graph(json)["options"]["legend"].update(showLegends=True),
        lambda json: graph(json)["options"]["tooltip"].update(mode="many"),
        lambda json: graph(json)["fieldConfig"]["defaults"]["custom"].update(lineWidth="1"),
        lambda json: graph(json)["targets"][0].update(expression="up"),
        lambda json: json["links"][0].update(targetBlank="yes"),
        lambda json: json["templating"]["list"][1].update(refresh="always"),
    ],
)
def test_the_models_find_what_grafana_does_not_know(break_it: Callable[[Json], None]):
    """A key that is misspelt, on any level, and a value of another type."""
    json = copy.deepcopy(rendered(DEFAULT)["money"])
    break_it(json)
    assert len(complaints(json)) == 1


@each_board
def test_every_panel_says_what_it_is_and_what_its_absence_means(board: Board):
    """A description of more than a few words, and words of its own where there is no value."""
    for panel in panels(rendered(DEFAULT)[board.name]):
        assert len(panel["description"].split()) >= 5, panel["title"]
        if panel["type"] != "text":
            assert len(panel["fieldConfig"]["defaults"]["noValue"].split()) >= 2, panel["title"]


@each_board
def test_every_name_is_known(board: Board):
    """Of the catalogue, or of the short list of others."""
    known = FOREIGN | {str(series) for series in SERIES}
    parts = ("bucket", "gcount", "gsum")
    known |= {f"{series}_{part}" for series in SERIES if series.kind == "gaugehistogram" for part in parts}
    for target in targets(rendered(DEFAULT)[board.name]):
        assert {selector.name for selector in selectors(target.tree)} <= known, target


@each_board
def test_numbers_are_computed_and_unique(board: Board):
    """From the titles, so that a link outlives whatever else changes on the dashboard."""
    json = rendered(DEFAULT)[board.name]
    numbers = [panel["id"] for panel in json["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert json["uid"] == uid(board.name) == f"tokengap-{board.name}"
    assert {panel["id"] for panel in panels(json)} == {number(tile.panel.title) for tile in board.tiles()}


def test_a_number_stays():
    """What people have bookmarked: if this fails, links break."""
    assert number("Queue age now") == 563493
    assert uid("oncall") == "tokengap-oncall"


@each_board
def test_nothing_lies_upon_another(board: Board):
    """And nothing hangs over the grid."""
    taken: set[tuple[int, int]] = set()
    for _, place in board.laid_out():
        cells = {(place.x + x, place.y + y) for x in range(place.width) for y in range(place.height)}
        assert not cells & taken
        assert place.x + place.width <= COLUMNS
        taken |= cells


@each_site
def test_every_alert_is_seen_where_its_link_leads(site: Site):
    """The panel is there, under its number, with a link to the runbook of each alert that it shows."""
    there = rendered(site)
    for watch in watches(site):
        json = there[watch.panel.board]
        (panel,) = (each for each in panels(json) if each["id"] == watch.panel.number)
        assert f"/d/{json['uid']}?viewPanel={panel['id']}" in panel_url(site, watch.panel, {})
        assert site.runbook_url(watch.name) in [link["url"] for link in panel["links"]]


def steps(json: Json, title: str) -> list[tuple[float | None, str]]:
    (panel,) = (each for each in panels(json) if each["title"] == title)
    return [(step["value"], step["color"]) for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]


def test_thresholds_are_the_sites():
    """Those of the alerts: green below the age cut, red beyond; red below the reserve, green above."""
    here, there = rendered(DEFAULT)["oncall"], rendered(OTHER)["oncall"]
    assert steps(here, "Queue age now") == [(None, "green"), (6, "red")]
    assert steps(there, "Queue age now") == [(None, "green"), (25, "red")]
    assert steps(here, "Deadline slack now") == [(None, "red"), (2, "green")]
    assert steps(there, "Deadline slack now") == [(None, "red"), (5, "green")]


def test_the_matrix_has_the_sites_numbers():
    """And leads to the page with the reasons."""
    (text,) = (panel["options"]["content"] for panel in panels(rendered(OTHER)["oncall"]) if panel["type"] == "text")
    assert "queue age over 25s" in text
    assert "slack under 5s" in text
    assert "https://runbooks.example/decision-matrix" in text


def test_the_sites_selector_is_in_every_query():
    """But for those of alerts, which have the labels that their rules left them."""
    for board in rendered(OTHER).values():
        for target in targets(board):
            for selector in selectors(target.tree):
                matchers = {(matcher.name, matcher.value) for matcher in selector.matchers.matchers}
                assert ("cluster", "a") in matchers or selector.name == "ALERTS", target


def test_verdicts_are_all_there():
    """Each state of an engine has a number, and 0 is none of them."""
    assert {word.text for word in VERDICTS if word.value} == set(ENGINE_STATES)
    assert [word.value for word in VERDICTS] == list(range(len(VERDICTS)))


def panel(board: str = "oncall", title: str = "Queue age") -> Panel:
    return Panel(board, title, "How long it has waited.", "s", "not known", (Query(str(QUEUE_AGE), "age"),))


@pytest.mark.parametrize(
    ("tiles", "says"),
    [
        ((Tile(panel()), Tile(panel())), "there twice"),
        ((Tile(panel()), Tile(Note("Queue age", "Words about it.", "text"))), "there twice"),
        ((Tile(panel(board="gpu")),), "says that it is on gpu"),
    ],
)
def test_what_is_misplaced_is_refused(tiles: tuple[Tile, ...], says: str):
    """When the dashboard is made, with the panel's name."""
    with pytest.raises(MisplacedPanel, match=f"'Queue age'.*{says}|{says}"):
        Board("oncall", "title", "description", (Row("row", tiles),))


#: What three exporters of one engine say after each minute. Two see a part of the traffic that passes its
#: proxy; the engine's own page says the same to all. The third is on the engine's own host, and sees proxies take all.
FLEET = """
tokengap_tokens_out_total{job="t",instance="a",engine="e",model="m"} 0+6000x10
tokengap_tokens_out_total{job="t",instance="b",engine="e",model="m"} 0+6000x10
tokengap_tokens_useful_total{job="t",instance="a",engine="e"} 0+3000x10
tokengap_tokens_useful_total{job="t",instance="b",engine="e"} 0+1800x10
tokengap_tokens_orphaned_total{job="t",instance="a",engine="e",hop="edge"} 0+0x10
tokengap_tokens_orphaned_total{job="t",instance="b",engine="e",hop="edge"} 0+1200x10
tokengap_tokens_out_total{job="t",instance="c",engine="e",model="m"} 0+6000x10
tokengap_tokens_useful_total{job="t",instance="c",engine="e"} 0+6000x10
tokengap_tokens_orphaned_total{job="t",instance="c",engine="e",hop="edge"} 0+0x10
tokengap_engine_requests_running{job="t",instance="a",engine="e"} 8+0x10
tokengap_engine_requests_running{job="t",instance="b",engine="e"} 8+0x10
tokengap_coverage_ratio{job="t",instance="a",engine="e"} 0.5+0x10
tokengap_coverage_ratio{job="t",instance="b",engine="e"} 0.5+0x10
tokengap_engine_state{job="t",instance="a",engine="e",state="busy"} 1+0x10
tokengap_engine_state{job="t",instance="a",engine="e",state="blind"} 0+0x10
tokengap_engine_state{job="t",instance="b",engine="e",state="busy"} 0+0x10
tokengap_engine_state{job="t",instance="b",engine="e",state="blind"} 1+0x10
tokengap_deadline_slack_seconds{job="t",instance="a",engine="e",class="interactive"} 8+0x10
tokengap_deadline_slack_seconds{job="t",instance="b",engine="e",class="interactive"} 1+0x10
"""

#: By panel, what each of its queries shows of that.
SHOWN = {
    ("money", "Share of tokens for nobody"): [{"{}": 0.2}],
    ("money", "Tokens for nobody, by hop"): [{'{hop="edge"}': 20}],
    ("money", "What became of the tokens"): [{"{}": 80}, {"{}": 20}, {"{}": 0}],
    ("engine", "Running and waiting"): [{'{engine="e"}': 8}, {}],
    ("engine", "Coverage by all exporters"): [{'{engine="e"}': 1}],
    ("oncall", "Verdict now"): [{'{engine="e"}': 5}],
    ("oncall", "Deadline slack now"): [{'{engine="e", class="interactive"}': 1}],
}


@pytest.mark.e2e
def test_an_engine_that_several_exporters_watch_is_counted_once(tmp_path: Path):
    """What its page says is the same from both, what each sees of its own streams adds up, and of what they disagree
    about the worst is shown."""
    series = [line.split(" ", 1) for line in FLEET.strip().splitlines()]
    tests = {
        "rule_files": [],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series],
                "promql_expr_test": list(_expected()),
            }
        ],
    }
    path = tmp_path / "fleet.yml"
    path.write_text(yaml.safe_dump(tests))
    ran = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _expected() -> Iterator[Json]:
    there = {(board.name, panel.title): panel for board in boards(DEFAULT) for panel in board.panels()}
    values = {**Span(0, 600, 60, 60).variables, **ALL}
    for place, answers in SHOWN.items():
        for query, answer in zip(there[place].queries, answers, strict=True):
            samples = [{"labels": labels, "value": value} for labels, value in answer.items()]
            yield {"expr": in_place(query.expr, values), "eval_time": "10m", "exp_samples": samples}
