"""What `tokengap doctor` says of the gateway, and of whether free slots may be given away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from series.example import rich_view
from tokengap.doctor import about_capacity, about_gateway
from tokengap.errors import SourceRefused
from tokengap.readings import GatewayEngine, GatewayPage
from tokengap.topology import Engine, Gateway, Topology

WATCHED = Topology(
    engines=(Engine("worker", "http://w:8100", ()), Engine("spare", "http://s:8100", ())),
    gateway=Gateway("http://me:secret@g:8090", "admit"),
)


def told(mode="age", *engines: str, held=0) -> GatewayPage:
    """A gateway with these engines."""
    slots = {"free": 1, "held": held}
    known = {name: GatewayEngine(0, 0, 0, {}, slots, 0.0, True) for name in engines or ("worker",)}
    return GatewayPage(1.0, mode, False, known, {})


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (told(), "ok", "it admits by age"),
        (told("busy"), "note", "rolled back"),
        (told("age", "worker", held=2), "attention", "2 slots are held against their cancel"),
        (told("age", "other"), "attention", "it has no engine named worker, spare, but other"),
        (SourceRefused("connection refused"), "attention", "connection refused"),
    ],
)
def test_the_gateway(answer, level, words):
    """Whether it tells of the engines that are watched, how it decides, and whether cancels work."""
    (finding,) = about_gateway(WATCHED, answer)
    assert finding.level == level
    assert words in finding.found
    assert "secret" not in finding.subject


def test_no_gateway_is_no_finding():
    """Most have none."""
    assert not list(about_gateway(replace(WATCHED, gateway=None), None))


@pytest.mark.parametrize(
    ("unsafe", "level", "words"),
    [
        ({}, "note", "does not show in a few seconds"),
        ({"slack_short": False}, "note", "does not show in a few seconds"),
        ({"no_cancel": True}, "note", "clients left and their streams ran on"),
        ({"no_cancel": True, "not_tied": False, "slack_short": True}, "note", "ran on; less is left of the deadline"),
        ({"no_cancel": True, "not_tied": True, "slack_short": True}, "attention", "tokens are generated for nobody"),
        ({"no_cancel": False, "not_tied": False, "slack_short": False}, "ok", "clients who leave free their slots"),
    ],
)
def test_free_capacity(unsafe, level, words):
    """All three conditions need attention, some are worth knowing, and what did not show is not called safe."""
    view = rich_view()
    view = replace(view, engines=(replace(view.engines[0], unsafe=unsafe),))
    (finding,) = about_capacity(view)
    assert finding.level == level
    assert words in finding.found


def test_nothing_to_see():
    """Without hops nothing was looked at."""
    assert not list(about_capacity(None))
