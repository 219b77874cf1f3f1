"""The report: for a program, for a person, and as a page that needs nothing else."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.story import IDLE, ask, attempt, look, run, saying
from tokengap.chaos.checks import Limits, Verdict, checks
from tokengap.chaos.evidence import Evidence
from tokengap.chaos.page import html
from tokengap.chaos.plots import Curve, Plot, Scale, bands, round_up, scale
from tokengap.chaos.report import FAILED, PASSED, UNPROVEN, Report
from tokengap.chaos.timeline import Timeline


def report(evidence: Evidence, **more: object) -> Report:
    timeline = Timeline(lambda _: None, began=0.0)
    timeline.note("fault", "a <core> was killed & gone")
    found = tuple(checks(evidence, Limits(), Verdict()))
    return Report("engine-crash", "haproxy", 1, timeline, evidence=evidence, checks=found, **more)


LOST = run(ask(attempt(12.0, tokens=0, end="refused")))


@pytest.mark.parametrize(
    ("made", "code", "verdict"),
    [
        (report(run()), PASSED, "passed: all 14 validations"),
        (report(LOST), FAILED, "FAILED: first-token-p99 of 14 validations"),
        (replace(report(run()), evidence=None, checks=(), unproven="no packet was hit"), UNPROVEN, "no packet was hit"),
    ],
    ids=["passed", "failed", "unproven"],
)
def test_its_code_and_its_verdict_agree(made: Report, code: int, verdict: str):
    """And the same stand in the JSON, which is JSON to everybody: nothing endless is in it."""
    assert made.code == code
    assert verdict in made.verdict
    read = json.loads(made.dumps(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (read["exit"], read["verdict"]) == (code, made.verdict)


def test_the_page_needs_nothing_else():
    """No script and no other file; its plots are well-formed, and what was said is text and no markup."""
    page = html(report(LOST))
    assert not re.search(r"<script|src=|href=|@import|url\(", page)
    assert "a &lt;core&gt; was killed &amp; gone" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) >= 5
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert "never</title>" in page, "who was never answered has a cross"


def test_a_run_that_says_nothing_has_a_page_too():
    """With its story, and no plot."""
    page = html(replace(report(run()), evidence=None, checks=(), unproven="no packet was hit"))
    assert "no packet was hit" in page
    assert "<svg" not in page


def test_bands_are_as_long_as_it_was_said():
    """One for each state, until the next."""
    dead = replace(IDLE, state="dead")
    evidence = saying(run(), *(look(at, a=dead if 12 <= at < 15 else IDLE) for at in range(31)))
    mine = [(band.state, band.start, band.end) for band in bands(evidence, 0.0) if band.engine == "a"]
    assert mine == [("idle", 0, 12), ("dead", 12, 15), ("idle", 15, 30)]


@given(st.floats(1e-6, 1e6))
def test_marks_of_an_axis_are_few_and_round(most: float):
    """At most six, from 0 up, none beyond the axis."""
    marks = Scale(10, most).values
    assert marks[0] == 0
    assert 2 <= len(marks) <= 6
    assert marks[-1] <= most * 1.001


def test_a_curve_is_interrupted_where_nothing_is_known():
    """It is not drawn through the gap."""
    path = Scale(10, 1).path([(0, 0.1), (1, 0.2), (2, None), (3, 0.3), (4, math.inf), (5, 0.5)])
    assert [step[0] for step in path.split() if step[0] in "ML"] == ["M", "L", "M", "M"]


def test_all_of_a_plot_can_be_seen():
    """Its limit too; nobody who waited for ever makes the rest flat."""
    plot = Plot("", "s", (Curve("", "", [(0, 1.0), (1, math.inf)], dots=True),), limit=2.0)
    assert 2.0 < scale(plot, 10).most < 3.0


@pytest.mark.parametrize(("value", "rounded"), [(0.3, 0.5), (1, 1), (1.1, 2), (6, 10), (23, 50)])
def test_steps_are_ones_twos_and_fives(value: float, rounded: float):
    """Of any power of ten."""
    assert round_up(value) == pytest.approx(rounded)
