"""The matrix's judgement: what a cell has to meet, what it says when it does not, and the page it stands on."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tokengap.errors import SettingsError
from tokengap.lab import accuracy
from tokengap.lab.accuracy import Cell, Run, Split, page
from tokengap.lab.matrix import Look, chosen, read_look, right_after, wrongly_gone
from tokengap.lab.truth import RequestTruth
from tokengap.lab.users import Outcome, User
from tokengap.lab.ways import COLUMNS, KINDS, WAYS

CELL = Cell(
    "naive", "fin", "streamed", Split(2400, 1400, 1000), Split(2400, 1401, 999), {"edge": 999}, seconds=(0.5, 1.9)
)


def test_a_cell_within_its_bars_misses_none():
    """1 token of 2,400 off, states right within two beats."""
    assert CELL.misses() == ()
    assert CELL.error == pytest.approx(1 / 2400)
    assert CELL.slowest == 1.9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"measured": Split(2400, 1430, 970)}, "off by 1.2%, the bar is 1%"),
        ({"measured": Split(2300, 1400, 900)}, "off by 4.2%, the bar is 1%"),
        ({"kind": "whole", "measured": Split(2400, 1250, 1150)}, "off by 6.2%, the bar is 5%"),
        ({"way": "direct-engine-leaks", "measured": Split(2400, 1320, 1080)}, "off by 3.3%, the bar is 3%"),
        ({"by_hop": {"edge": 900, "engine": 99}}, "99 orphaned tokens named at another hop than edge"),
        ({"seconds": (0.5, 2.3)}, "client state right after 2.3 s, the bar is 2 s"),
        ({"seconds": (0.5, None)}, "1 of 2 client states never right"),
        ({"wrongly_gone": 0.4}, "clients who were there called gone for 0.4 s"),
        (
            {"column": "none", "seconds": (), "truth": Split(2400, 2400, 0), "measured": Split(2400, 2399, 1)},
            "1.0 tokens called orphaned, and none were",
        ),
        ({"failed": "not at its end after 90 s"}, "not at its end after 90 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_bar_is_named_when_it_is_missed(change, said):
    """With what it is and what was measured; each by itself."""
    changed = replace(CELL, **change)
    if "way" in change:
        changed = replace(changed, by_hop={"engine": 1080})
    assert changed.misses() == (said,)


@pytest.mark.parametrize(
    ("out", "orphaned", "misses"),
    [
        (2400.0, 0.6, ("0.6 tokens called orphaned, and none were",)),  # nobody's stream was ended
        (1595.0, 2.1, ()),  # three were, and a token of each may have been on the way
        (1595.0, 3.0, ("3.0 tokens called orphaned, and none were",)),
    ],
)
def test_who_half_closed_is_there_where_the_proxy_lets_it_be(out, orphaned, misses):
    """A proxy that ends the streams of those who half-closed has cut them off like those who left."""
    truth, measured = Split(out, out, 0.0), Split(out, out - orphaned, orphaned)
    cell = replace(CELL, way="nginx", column="half-close", seconds=(), truth=truth, measured=measured)
    assert replace(cell, by_hop={"edge": orphaned}).misses() == misses


def test_a_cell_that_was_not_run_misses_nothing_and_says_why():
    """It is neither good nor bad, and the page shows why."""
    cell = Cell("litellm", "fin", "streamed", skipped="it is installed and run only with --litellm")
    assert (cell.misses(), cell.error) == ((), None)
    assert "only with --litellm" in page([run(cell)])


def run(*cells: Cell, mode: accuracy.Mode = "plain") -> Run:
    return Run(mode, "root", "2026-11-29", "6.18", 2, (0.1, 0.9), {"nginx": "1.22.1"}, cells)


def test_the_page_shows_each_cell_and_why_it_misses(monkeypatch):
    """Cells that miss a bar are bold and marked, and their reason stands below; runs of one mode are put together."""
    bad = replace(CELL, column="rst", measured=Split(2400, 1300, 1100), late_beats=2)
    monkeypatch.setitem(accuracy.REASONS, ("naive", "rst", "*"), "It is only an example")
    text = page(accuracy.merged([run(bad), run(bad, mode="no-events"), run(CELL)]))
    assert "| naive gateway | 0.04% 1.9 s | **4.17% 1.9 s (!)** |" in text
    assert "  - naive gateway; RST mid-stream; answers as a stream: off by 4.2%, the bar is 1% (2 late beats)\n" in text
    assert "- It is only an example.\n" in text
    assert text.index("As it was started") < text.index("Without events of closed sockets")


def test_a_run_is_read_back_as_it_was():
    """The page is made from what ``--json`` prints."""
    written = run(CELL, Cell("envoy", "none", "whole", skipped="so"))
    assert msgspec.json.decode(msgspec.json.encode(written), type=Run) == written


def test_reasons_are_of_cells_that_there_are():
    """A renamed row or column takes its reasons along."""
    for way, column, kind in accuracy.REASONS:
        assert way in {*WAYS, "*"}
        assert column in {*COLUMNS, "*"}
        assert kind in {*KINDS, "*"}


def outcome(leaving="fin", left=100.0, *, stream=True, how="left") -> Outcome:
    user = User("u", leaving=leaving, leave_at=1.0, stream=stream)
    return Outcome(user, how, 10, 99.0, 99.5, 108.0 if how == "completed" else left, port=7, left=left)


def looks(*states: str | None) -> list[Look]:
    """One look each half second from 99.25 on."""
    return [Look(99.25 + n / 2, {} if state is None else {7: state}) for n, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "seconds"),
    [
        (("connected", "connected", "gone", "gone"), 0.25),
        (("connected", "connected", "connected", "gone", None), 0.75),
        (("connected", "connected", None, None), 0.25),
        (("connected", "gone", "connected", "gone"), 0.75),
        (("connected", "connected", "connected"), None),
    ],
)
def test_a_state_is_right_from_when_on_it_stays_right(states, seconds):
    """Counted from the user's own time of leaving; a stream that is at an end is right too."""
    found = right_after(looks(*states), outcome(), None, COLUMNS["fin"], until=200.0)
    assert found == (0.0 if seconds == 0.25 else seconds)


def test_one_who_stalls_is_to_be_seen_while_it_stalls():
    """And not to be taken for one who has left."""
    stalled = outcome("stall")
    assert (
        right_after(looks("connected", "connected", "connected", "stalled"), stalled, None, COLUMNS["stall"], 101.0)
        == 0.75
    )
    assert right_after(looks("connected", "connected", "gone"), stalled, None, COLUMNS["stall"], 101.0) is None


def test_the_clock_of_one_who_vanishes_starts_when_something_is_sent_to_it():
    """It waited in a proxy's queue: before its first token there was nothing to lose."""
    asked = RequestTruth("u", "finished", 10, 100, 100, 100, False, 0.0, 99.0, 100.5, 100.7, 105.0)
    states = looks("connected", "connected", "connected", "connected", "vanished")
    assert right_after(states, outcome("vanish"), asked, COLUMNS["vanish"], 200.0) == pytest.approx(0.55)
    assert right_after(states, outcome("vanish"), None, COLUMNS["vanish"], 200.0) == pytest.approx(1.25)


def test_who_was_there_and_called_gone_is_counted():
    """Only while it was there."""
    there = [outcome(how="completed")]
    assert wrongly_gone(looks("connected", "gone", "connected", "vanished", None), there) == 1.0
    assert wrongly_gone([Look(107.9, {}), Look(108.1, {7: "gone"})], there) == 0.0


def test_clients_are_told_by_their_ports():
    """Rows of other hops, and clients whose address is not known, are passed over."""
    rows = (
        b'[{"hop":"edge","client":"gone","client_address":"127.0.0.1:4711","age_seconds":1.0},'
        b'{"hop":"admit","client":"connected","client_address":"127.0.0.1:4712"},'
        b'{"hop":"edge","client":"connected","client_address":null}]'
    )
    assert read_look(5.0, rows, "edge") == Look(5.0, {4711: "gone"})


def test_rows_are_chosen_by_name_and_a_wrong_one_is_named():
    """With what there is instead."""
    assert chosen("rows", "naive, nginx", WAYS) == (WAYS["nginx"], WAYS["naive"])
    assert chosen("rows", None, WAYS) == tuple(WAYS.values())
    with pytest.raises(SettingsError, match="--rows: 'apache'; expected some of nginx, "):
        chosen("rows", "nginx,apache", WAYS)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_outermost_hop_holds_the_vanished(way):
    """It is the one whose socket to them lives on."""
    first = (*way.hop_names, "engine")[0]
    assert way.leaks_at("vanish") == first
    assert way.leaks_at("fin") == ("engine" if way.engine_leaks else "admit" if way.name == "chain" else first)


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_of_eight_leave(column, kind):
    """In every column but that in which nobody does, and each has a name of its own."""
    users = column.users("x", kind)
    assert len({user.id for user in users}) == 8
    assert sum(user.leave_at is not None for user in users) == (0 if column.name == "none" else 3)
