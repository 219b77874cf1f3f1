"""The lines of a screen: what they say, that they fit, and that nothing from outside steers a terminal."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from series.example import rich_view, view_with
from tokengap.top.screen import FILTERS, ORDER_KEYS, Shown, clean, frame, seconds
from tokengap.topology import Endpoint, Hop, Topology
from tokengap.view import View
from tokengap.web.history import Rates, Trend
from tokengap.web.now import ORDERS, Wanted, now

WATCHED = Topology(hops=(Hop("edge", (Endpoint(None, 8080),), ("admit",)), Hop("admit", (), ("worker",))))
WANT = Wanted(top=40)


def shown(view: View, want: Wanted = WANT, **more: object) -> Shown:
    """A screen that has taken a view."""
    screen = Shown("http://proxy-3:10788", want, **more)
    screen.take(now(view, WATCHED, Trend(), want, show_addresses=False))
    return screen


def said(screen: Shown, width: int = 200, height: int | None = None) -> str:
    return "\n".join(line.plain for line in frame(screen, width, height))


def test_all_of_it():
    """Verdicts with their evidence, the way with its leak, the streams with what they cost, and what is in trouble."""
    text = said(shown(rich_view()))
    for words in (
        *("edge ▲ leaks: 1 held, 900 tokens → admit → 2 engines", 'spare "b"\\<b> is dead.  TokengapEngineDead'),
        *("clients: 2 connected, 1 stalled, 1 gone", "1 running, 2 waiting; tokens rose by 24 in 1.0 s"),
        *("16,092", "992 (6%)", "6.8s", "1.2s", "100%", "203.0.113.x:*", "answering", "streams: 4; order: cost"),
    ):
        assert words in text, words
    rows = [line.split() for line in text.partition("CLIENT")[2].splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        *(["gone", "61.5s", "edge"], ["stalled", "7.2s", "-"], ["connected", "2.5s", "-"], ["connected", "0.2s", "-"]),
    ]


def test_orphans_stand_out():
    """By colour as well as by word."""
    lines = frame(shown(rich_view()), 200)
    assert [line.style for line in lines if line.plain.startswith("gone")] == ["bold red"]
    assert [line.style for line in lines if line.plain.startswith("connected")] == [""] * 2


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 10), (20, 5), (5, 3), (1, 2)])
@pytest.mark.parametrize("keys", [True, False])
def test_every_line_fits(width: int, height: int, keys: bool):
    """No line is wider than the screen and there are as many as it has; the most telling columns stay."""
    screen = shown(view_with(2000), Wanted(top=height), keys=keys)
    screen.complaint = "no exporter answers"
    lines = frame(screen, width, height)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    if (width, height) == (40, 10):
        screen.now = msgspec.structs.replace(screen.now, troubles=[])
        assert any(line.plain.startswith("ENGINE") for line in frame(screen, width, height))


def test_narrow_and_wide():
    """What is left out first is what can be looked up elsewhere; evidence is cut before it is left out."""
    narrow, middle, wide = (said(shown(rich_view()), width) for width in (60, 80, 200))
    assert "USEFUL" not in narrow
    assert "NOBODY'S" in narrow
    assert "EVIDENCE" not in narrow
    assert "1 running, 2 waiting; " in middle
    assert "rose by 24" not in middle
    assert "rose by 24" in wide


@pytest.mark.parametrize("state", ["dead", "stuck", "blind"])
def test_many_engines(state: str):
    """Those in trouble come first, and engines leave room for streams."""
    fine = rich_view().engines[0]
    engines = tuple(replace(fine, name=f"e{number}") for number in range(90))
    engines += (replace(fine, name="broken", state=state),)
    view = replace(view_with(50), engines=engines)
    text = said(shown(view), 120, 48)
    assert text.partition("ENGINE")[2].splitlines()[1].split()[:2] == ["broken", state]
    assert "and 75 more engines" in text
    assert "▲ and 81 more" in text
    assert "\nvanished" in text


@given(st.text())
def test_nothing_steers_the_terminal(text: str):
    """Names, evidence and errors are shown without what a terminal obeys."""
    engine = replace(rich_view().engines[0], evidence=text, state="stuck", name=text)
    screen = shown(replace(rich_view(), engines=(engine, rich_view().engines[1])))
    screen.complaint = text
    assert all(line.plain.isprintable() for line in frame(screen, 10_000))


def test_a_title_cannot_be_set():
    """The classic: an escape sequence in an error message."""
    assert clean("\x1b]0;owned\x07") == "\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}"


def test_before_and_between():
    """Waiting, then a complaint that leaves what was shown; without sockets nothing is called healthy."""
    screen = Shown("this host", WANT)
    assert said(screen) == "tokengap: waiting for this host"
    screen.complaint = "no exporter answers at x: connection refused"
    assert said(screen).splitlines()[1] == "▲ no exporter answers at x: connection refused"
    screen = shown(replace(rich_view(), accounting="none"))
    assert "whether a hop leaks is not known" in said(screen)
    screen.complaint, screen.paused = "gone", True
    assert "▲ gone; what is shown is the last it said" in said(screen)
    assert "paused" in said(screen)
    assert "203.0.113.x" in said(screen)


def test_rates():
    """Of all engines, as the exporter tells them; not known from one beat. The bar has a part for each of them."""
    screen = shown(rich_view())
    assert "tokens a second: not known yet" in said(screen)
    screen.now = msgspec.structs.replace(screen.now, rates=Rates(100.0, 50.0, 25.0, 20.0, 5.0))
    text = said(screen)
    assert "100 generated, 50 useful, 25 for nobody (25%), 20 pending" in text
    assert f"  {'█' * 20}{'▒' * 10}{'░' * 10}\n" in text
    screen.now = msgspec.structs.replace(screen.now, rates=Rates(0.0, 0.0, 0.0, 0.0, 0.0))
    assert "0 generated, 0 useful, 0 for nobody (0%), 0 pending\n" in said(screen)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (0.0, "0.0s"), (119.9, "119.9s"), (120.0, "2m"), (7200.0, "2.0h"), (-3.2, "-3.2s")],
)
def test_times(value: float | None, text: str):
    """Seconds, then minutes, then hours; not known is no zero."""
    assert seconds(value) == text


def test_keys_and_filters_name_what_there_is():
    """Each order has a key, and each key an order."""
    assert set(ORDER_KEYS.values()) == set(ORDERS)
    assert FILTERS["all"] == Wanted().clients
    assert not {"q", "p", "f"} & set(ORDER_KEYS)
