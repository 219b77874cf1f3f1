"""The rules under a real promtool: one file by hand for each alert in ``tests/rules``, on both sides of every edge.

promtool lets much pass: an alert that a test does not name may fire unseen, and a misspelt name is silent for ever. So
each file is completed here: at every time for which something is expected, every other alert is expected to be silent.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bundle.sites import DEFAULT, OTHER, SITES
from tokengap.bundle.recording import records
from tokengap.bundle.render import rules
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches

pytestmark = pytest.mark.e2e

RULES = Path(__file__).parent.parent / "rules"
FILES = sorted(RULES.glob("*.yml"))
RECORDING = sorted((RULES / "recording").glob("*.yml"))
OTHER_SITE = sorted((RULES / "other-site").glob("*.yml"))
LONG = sorted((RULES / "long").glob("*.yml"))
NAMES = [watch.name for watch in watches(DEFAULT)]

#: With the numbers of the defaults, in one cluster of several.
IN_CLUSTER = Site(selector='cluster="a"')

Tests = dict[str, Any]


def promtool(*arguments: object) -> tuple[int, str]:
    """Run it; return its code and what it said."""
    assert shutil.which("promtool"), "promtool is not installed: apt-get install prometheus"
    ran = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def by_hand(file: Path) -> Tests:
    """Read a file. Values have to be quoted: `0x60` is sixty zeros to promtool, and 96 to other readers of YAML."""
    tests = yaml.safe_load(file.read_text())
    for test in tests["tests"]:
        for series in test["input_series"]:
            assert isinstance(series["values"], str), f"{file}: quote the values of {series['series']}"
    return tests


@cache
def rule_files(site: Site) -> Mapping[str, str]:
    """Return the files of rules of a site."""
    return {Path(file.path).name: file.text for file in rules.files(site)}


def run(tests: Mapping[str, Tests], site: Site, directory: Path, besides: frozenset[str] = frozenset()) -> None:
    """Run tests over the rules of a site, with every alert that they do not name silent, those ``besides`` apart."""
    for name, text in rule_files(site).items():
        (directory / name).write_text(text)
    files = [directory / f"{name}.test.json" for name in tests]
    for file, test in zip(files, tests.values(), strict=True):
        file.write_text(json.dumps(_completed(test, [*rule_files(site)], besides)))  # which is YAML too, and faster
    code, said = promtool("test", "rules", *files)
    assert code == 0, said


def _completed(tests: Tests, rule_files: list[str], besides: frozenset[str]) -> Tests:
    completed = copy.deepcopy(tests) | {"rule_files": rule_files}
    for test in completed["tests"]:
        expected = test.setdefault("alert_rule_test", [])
        expected += list(_the_rest(expected, besides))
    return completed


def _the_rest(expected: list[dict[str, Any]], besides: frozenset[str]) -> Iterator[dict[str, Any]]:
    for time in {one["eval_time"] for one in expected}:
        named = {one["alertname"] for one in expected if one["eval_time"] == time} | besides
        for name in NAMES:
            if name not in named:
                yield {"eval_time": time, "alertname": name, "exp_alerts": []}


def test_every_alert_has_a_file_and_every_file_an_alert():
    """And a file is about the alert whose name it has; a misspelt name would be silent for ever."""
    assert [file.stem for file in FILES] == sorted(NAMES)
    for file in (*FILES, *OTHER_SITE, *LONG):
        named = {one["alertname"] for test in by_hand(file)["tests"] for one in test["alert_rule_test"]}
        assert file.stem in named
        assert named <= set(NAMES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_alert(file: Path, tmp_path: Path):
    """Silent while all is well and just before its time, firing with these labels and annotations, then silent."""
    run({file.stem: by_hand(file)}, DEFAULT, tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_alert_is_tried_on_both_sides(file: Path):
    """Its file expects silence, then silence not more than a scrape or two before it fires, then the alert."""
    tests = by_hand(file)
    for test in tests["tests"]:
        for one in test["alert_rule_test"]:
            for alert in one["exp_alerts"]:
                assert alert["exp_annotations"].keys() == {"summary", "description", "runbook_url", "dashboard_url"}
    waits = [wait for test in tests["tests"] for wait in _waits(test["alert_rule_test"], file.stem)]
    assert waits, "it never fires"
    step = max(60, _seconds(tests["evaluation_interval"]))
    assert min(waits) <= step, f"it is silent {min(waits)} s before it fires, which is too long before to show its time"


def _waits(expected: list[dict[str, Any]], name: str) -> Iterator[float]:
    """Yield the seconds between each last time at which an alert is silent and the next, at which it fires."""
    mine = sorted((_seconds(one["eval_time"]), bool(one["exp_alerts"])) for one in expected if one["alertname"] == name)
    for (before, was), (then, fires) in itertools.pairwise(mine):
        if fires and not was:
            yield then - before


def _seconds(text: str) -> float:
    parts = re.findall(r"(\d+)([dhms])", str(text))
    return sum(int(count) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[unit] for count, unit in parts)


@pytest.mark.long
@pytest.mark.parametrize("file", LONG, ids=lambda file: file.stem)
def test_an_alert_that_looks_back_for_days(file: Path, tmp_path: Path):
    """What takes days until it fires, besides what is tried above."""
    run({file.stem: by_hand(file)}, DEFAULT, tmp_path)


@pytest.mark.long
def test_the_alerts_of_a_site_with_a_selector(tmp_path: Path):
    """They fire for what the selector selects, and say so."""
    run({file.stem: _in_cluster(by_hand(file), "a") for file in FILES}, IN_CLUSTER, tmp_path)


@pytest.mark.long
def test_the_alerts_of_a_site_with_a_selector_elsewhere(tmp_path: Path):
    """They are silent for all that is not selected. absent() rightly is not: nothing of this site is there."""
    besides = frozenset(watch.name for watch in watches(DEFAULT) if "absent(" in watch.expr)
    run({file.stem: _silent(by_hand(file), besides) for file in FILES}, IN_CLUSTER, tmp_path, besides)


def _in_cluster(tests: Tests, cluster: str) -> Tests:
    for test in tests["tests"]:
        for series in test["input_series"]:
            series["series"] = series["series"].replace("{", f'{{cluster="{cluster}",', 1)
        for one in test["alert_rule_test"]:
            one["exp_alerts"] = [
                alert | {"exp_labels": alert["exp_labels"] | {"cluster": cluster}} for alert in one["exp_alerts"]
            ]
    return tests


def _silent(tests: Tests, besides: frozenset[str]) -> Tests:
    for test in tests["tests"]:
        test["alert_rule_test"] = [
            one | {"exp_alerts": []} for one in test["alert_rule_test"] if one["alertname"] not in besides
        ]
    return tests


@pytest.mark.parametrize("file", OTHER_SITE, ids=lambda file: file.stem)
def test_an_alert_of_a_site_with_other_numbers(file: Path, tmp_path: Path):
    """By hand again, with those numbers."""
    run({file.stem: by_hand(file)}, OTHER, tmp_path)


def test_every_alert_that_depends_on_the_sites_limits_is_tried_with_others():
    """Deadline, age cut, windows and budgets are in its rule: it has a file in ``tests/rules/other-site``."""
    numbers = ("deadline", "age_cut", "window", "beat", "orphan_budget", "deadline_budget")
    limits = replace(DEFAULT, **{name: getattr(OTHER, name) for name in numbers})
    depend = [
        usual.name
        for usual, other in zip(watches(DEFAULT), watches(limits), strict=True)
        if (usual.expr, usual.hold) != (other.expr, other.hold)
    ]
    assert sorted(depend) == [file.stem for file in OTHER_SITE]


@pytest.mark.parametrize("file", RECORDING, ids=lambda file: file.stem)
def test_recording_rules(file: Path, tmp_path: Path):
    """Many exporters in front of the same engines, added up by hand."""
    run({file.stem: by_hand(file)}, DEFAULT, tmp_path)


def test_every_record_is_tried():
    """By name, in a test by hand."""
    text = "".join(file.read_text() for file in RECORDING)
    assert [record.name for record in records(DEFAULT) if record.name not in text] == []


@pytest.mark.parametrize("site", SITES, ids=["default", "other"])
def test_promtool_accepts_the_rules(site: Site, tmp_path: Path):
    """The oldest promtool that is in use, with every lint it has."""
    for file in rules.files(site):
        path = tmp_path / Path(file.path).name
        path.write_text(file.text)
        code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", path)
        assert code == 0, said
