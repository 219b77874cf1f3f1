"""What the last minutes tell: who leaks of late, and of each token when it was generated and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from series.example import rich_view
from tokengap.view import Tokens
from tokengap.web.history import KEPT, SMOOTH, STRETCH, STRETCHES, Curves, History, Rates, Trend

PARTS = ("useful", "orphaned", "pending", "unattributed")


def remembered(ledgers: Sequence[Tokens], beat: float = 1.0) -> History:
    """A history of beats of so many seconds, with this ledger after each."""
    history = History()
    for number, tokens in enumerate(ledgers):
        engine = replace(rich_view().engines[0], tokens=tokens)
        history.add(replace(rich_view(), engines=(engine,), beats=number, at=100.0 + beat * number))
    return history


def losing(beats: int, lost: Callable[[int], float]) -> History:
    """A history of so many beats of 100 tokens, of which the edge has lost so many after each."""
    return remembered([Tokens(100.0 * beat, 100.0 * beat - lost(beat), {"edge": lost(beat)}) for beat in range(beats)])


def test_what_lasts():
    """A hop that loses tokens stretch after stretch has lost that share; a burst, or too short a look, says nothing."""
    enough = STRETCH * STRETCHES + 1
    assert History().trend() == Trend()
    assert losing(enough - 1, lambda beat: 10.0 * beat).trend().lost == {}
    assert losing(enough, lambda beat: 10.0 * beat).trend().lost == {"edge": 0.1}
    assert losing(enough, lambda beat: 5000.0 if beat == enough - 5 else 0.0).trend().lost["edge"] <= 0.0
    late = losing(enough, lambda beat: 0.0 if beat < STRETCH else 10.0 * (beat - STRETCH))
    assert late.trend().lost == {"edge": 0.0}


def test_rates():
    """Over five seconds, or what there is of them; none from one beat. The oldest points are forgotten."""
    assert losing(1, lambda _: 0.0).trend().rates is None
    assert losing(2, lambda beat: 40.0 * beat).trend().rates == Rates(100.0, 60.0, 40.0, 0.0, 0.0)
    steps = [Tokens(100.0 * min(beat, 18), 60.0 * min(beat, 18), {"edge": 40.0 * min(beat, 18)}) for beat in range(20)]
    assert remembered(steps).trend().rates == Rates(80.0, 48.0, 32.0, 0.0, 0.0)
    curves = losing(KEPT + 5, lambda beat: 10.0 * beat).curves()
    assert (len(curves.at), curves.at[-1]) == (KEPT - 1, 100.0 + KEPT + 4)
    assert set(curves.generated) == {100.0}


def test_a_token_is_where_it_was_generated():
    """An answer that is delivered at its end was useful all the while, and pending until it was."""
    waiting = [Tokens(100.0 * beat, 0.0, {}, pending=100.0 * beat) for beat in range(11)]
    before = remembered(waiting).curves()
    assert set(before.pending) == {100.0}
    assert set(before.useful) == {0.0}
    after = remembered([*waiting, Tokens(1000.0, 700.0, {"edge": 200.0}, unattributed=100.0)]).curves()
    assert set(after.generated[:10]) == {100.0}
    assert [set(getattr(after, part)[:10]) for part in PARTS] == [{70.0}, {20.0}, {0.0}, {10.0}]


@st.composite
def books(draw: st.DrawFn) -> list[Tokens]:
    """A ledger as beats keep it: tokens are generated, and some of what is pending is booked."""
    ledgers = [Tokens()]
    amounts = st.floats(0, 500)
    for _ in range(draw(st.integers(1, 30))):
        old = ledgers[-1]
        made = draw(amounts)
        pending = old.pending + made
        kept, useful, lost = (draw(st.floats(0, 1)) for _ in range(3))
        booked = pending * (1 - kept)
        ledgers.append(
            Tokens(
                out=old.out + made,
                useful=old.useful + booked * useful,
                orphaned={"edge": old.orphaned.get("edge", 0.0) + booked * (1 - useful) * lost},
                pending=pending - booked,
                unattributed=old.unattributed + booked * (1 - useful) * (1 - lost),
            )
        )
    return ledgers


@given(books(), st.sampled_from((0.2, 1.0, 10.0)))
def test_the_parts_are_the_whole(ledgers: list[Tokens], beat: float):
    """At every moment, whatever was booked when: no part is negative or more than what was generated."""
    curves = remembered(ledgers, beat).curves()
    for generated, *parts in zip(curves.generated, *(getattr(curves, part) for part in PARTS), strict=True):
        assert min(parts) >= 0
        assert max(parts) <= generated + 0.01
        assert sum(parts) == pytest.approx(generated, abs=0.05)


@given(books())
def test_nothing_is_left_out(ledgers: list[Tokens]):
    """Where beats are as long as what is smoothed over, all of a curve is all that was booked."""
    curves, last = remembered(ledgers, SMOOTH).curves(), ledgers[-1]
    everything = {"useful": last.useful, "orphaned": sum(last.orphaned.values()), "pending": last.pending}
    for part, tokens in everything.items():
        assert sum(getattr(curves, part)) * SMOOTH == pytest.approx(tokens, abs=0.05 * len(ledgers) + 1e-3)


def test_json():
    """As columns, small enough to be asked for each beat."""
    history = losing(KEPT, lambda beat: 10.0 * beat)
    assert msgspec.json.decode(history.json(), type=Curves) == history.curves()
    assert len(history.json()) < 20_000
