"""A watch that lacks something a person on call would miss cannot be made."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from bundle.sites import DEFAULT, OTHER
from tokengap.bundle.watch import IncompleteWatch, Look, Panel, Runbook, Threshold, Watch, longer_than, shorter_than
from tokengap.bundle.watches import watches

WATCH = watches(DEFAULT)[0]


@pytest.mark.parametrize("section", [part.name for part in fields(Runbook)])
def test_a_runbook_has_every_section(section: str):
    """None may be empty."""
    empty = () if isinstance(getattr(WATCH.runbook, section), tuple) else "  "
    with pytest.raises(IncompleteWatch, match=f"^runbook: {section} is empty"):
        replace(WATCH.runbook, **{section: empty})


def test_a_row_of_a_runbook_is_whole():
    """What to look at, and with which query."""
    with pytest.raises(IncompleteWatch, match=r"^runbook: right_now: query is empty"):
        replace(WATCH.runbook, right_now=(Look("the age of the queue", ""),))
    with pytest.raises(IncompleteWatch, match=r"^runbook: do_not has an empty line"):
        replace(WATCH.runbook, do_not=("Do not panic.", ""))


@pytest.mark.parametrize("part", ["title", "description", "unit", "no_value", "queries"])
def test_a_panel_is_whole(part: str):
    """Unit, description and what stands there when nothing does."""
    with pytest.raises(IncompleteWatch, match=f"^panel .*: {part} is empty"):
        replace(WATCH.panel, **{part: () if part == "queries" else ""})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "QueueOld"}, "is no name of an alert"),
        ({"name": "tokengap_queue"}, "is no name of an alert"),
        ({"name": "Tokengap" + "Queue" * 9}, "is no name of an alert"),
        ({"severity": "page"}, "severity is page; expected one of critical, warning, info"),
        ({"summary": "requests are late"}, "summary is not a sentence"),
        ({"summary": "Requests are late"}, "summary is not a sentence"),
        ({"summary": "{{ $labels.engine }} is late."}, "summary is not a sentence"),
        ({"hold": -1}, "hold and keep are seconds, 0 or more"),
        ({"description": ""}, "description is empty"),
        ({"expr": ""}, "expr is empty"),
        ({"labels": ()}, "labels is empty"),
        ({"expr": "tokengap_queue_age_seconds > 7"}, "the panel's threshold > 6 is not in the rule"),
    ],
)
def test_a_watch_is_whole(change: dict, problem: str):
    """The message names the watch and what is wrong with it."""
    with pytest.raises(IncompleteWatch, match=f": {problem}"):
        replace(WATCH, **change)


def test_the_longest_name_is_a_name():
    """50 characters; 51 are refused by tools of operators."""
    assert replace(WATCH, name="TokengapQ" + "u" * 41)
    with pytest.raises(IncompleteWatch):
        replace(WATCH, name="TokengapQ" + "u" * 42)


def test_a_threshold_is_written_once():
    """For the rule, and for people."""
    assert (str(longer_than(6)), longer_than(90).said) == ("> 6", "1m30s")
    assert (str(shorter_than(0.1 + 0.2)), shorter_than(2).said) == ("< 0.3", "2s")
    assert str(Threshold(">", 1e6, "a million")) == "> 1000000"


def _names(all_of_them: tuple[Watch, ...]) -> list[str]:
    return [watch.name for watch in all_of_them]


def test_the_watches_of_every_site_are_the_same():
    """By name, severity and panel; each name and each panel once."""
    assert _names(watches(DEFAULT)) == _names(watches(OTHER))
    assert len({*_names(watches(DEFAULT))}) == len(watches(DEFAULT))
    panels: dict[tuple[str, int], Panel] = {(w.panel.board, w.panel.number): w.panel for w in watches(DEFAULT)}
    assert {panel.title for panel in panels.values()} == {watch.panel.title for watch in watches(DEFAULT)}


def test_a_panel_has_the_same_number_at_every_site():
    """A link of one site's alert finds the panel on another's dashboard."""
    numbers = [watch.panel.number for watch in watches(DEFAULT)]
    assert numbers == [watch.panel.number for watch in watches(OTHER)]
