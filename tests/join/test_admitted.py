"""Where a gateway counts: its counts are shown, what never came to it has an owner, and no total falls."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tokengap.join import admitted
from tokengap.join.admitted import WINDOW, Counted
from tokengap.readings import EnginePage, GatewayClass, GatewayEngine, GatewayPage, GatewayStreams
from tokengap.view import StreamGroup, Tokens

FREE, BUSY = {"free": 2}, {"free": 1, "streaming": 1}


def told(out=0, useful=0, orphaned=0, *, slots=FREE, started=1.0, **ended) -> GatewayPage:
    """A gateway with one engine."""
    engine = GatewayEngine(out, useful, orphaned, ended, slots, 0.0, True)
    return GatewayPage(started, "age", False, {"worker": engine}, {})


NOTHING = Tokens()


def begun(page: GatewayPage, tokens: Tokens = NOTHING, outer=()) -> Counted:
    return admitted.begin(tokens, dict(outer), {}, page, page.engines["worker"], 0.0)


def after(counted: Counted, page: GatewayPage, out: float, at: float, *, requests=0.0, outer=()) -> Counted:
    """One beat later."""
    counted = admitted.owe(counted, out)
    return admitted.count(counted, page, "worker", EnginePage(running=requests), dict(outer), "admit", at)


def parts(tokens: Tokens) -> float:
    return tokens.useful + sum(tokens.orphaned.values()) + tokens.pending + tokens.unattributed


def test_its_counts_are_shown():
    """Useful and orphaned as it says, the rest pending; how streams ended too."""
    counted = after(begun(told()), told(80, 60, 5, slots=BUSY, completed=1, cancelled=2), 100, 1.0, requests=1)
    assert counted.shown == Tokens(100, 60, {"admit": 5, "engine": 0}, pending=35)
    assert counted.endings("admit") == {
        ("admit", "completed"): 1,
        ("admit", "cancelled"): 2,
        ("admit", "orphaned"): 0,
        ("admit", "failed"): 0,
    }


def test_what_was_before_stays():
    """What was estimated until the first read is kept, and what the gateway counted before is not added to it."""
    before = Tokens(50, 30, {"admit": 10}, pending=4, unattributed=6)
    counted = after(begun(told(500, 500), before), told(520, 510), 70, 1.0, requests=1)
    assert counted.shown == Tokens(70, 40, {"admit": 10, "engine": 0}, pending=14, unattributed=6)


def test_what_a_cancelled_stream_left_behind_is_the_engines():
    """Once the engine is at rest for two beats; until then it may be on its way."""
    counted = after(begun(told()), told(90, 90, cancelled=1), 100, 1.0)
    assert counted.shown.pending == 10
    counted = after(counted, told(90, 90, cancelled=1), 100, 2.0)
    assert counted.shown == Tokens(100, 90, {"admit": 0, "engine": 10})


def test_what_nobody_cancelled_came_another_way():
    """Traffic that does not pass the gateway is nobody's waste."""
    counted = begun(told())
    for beat in (1.0, 2.0):
        counted = after(counted, told(90, 90, completed=1), 100, beat)
    assert counted.shown == Tokens(100, 90, {"admit": 0, "engine": 0}, unattributed=10)


def test_an_engine_that_never_rests():
    """What is missing for a whole window does not come any more; what is on its way now may."""
    counted = begun(told())
    for second in range(1, round(WINDOW) + 1):
        counted = after(counted, told(10 * second, 10 * second, slots=BUSY, cancelled=1), 10 * second + 7, second)
        lost = counted.shown.orphaned["engine"]
        assert (lost, counted.shown.pending) == ((0, 7) if second < WINDOW else (7, 0))


def test_what_is_lost_further_out_is_not_useful():
    """To the gateway the proxy before it is a client like another."""
    counted = after(begun(told(), outer={"edge": 3.0}), told(100, 100), 100, 1.0, outer={"edge": 43.0})
    assert counted.shown == Tokens(100, 60, {"edge": 40, "admit": 0, "engine": 0})


def test_a_gateway_that_started_anew():
    """Counts from nothing: what it counts from then on is added."""
    counted = after(begun(told(100, 100)), told(120, 120, slots=BUSY), 20, 1.0, requests=1)
    counted = after(counted, told(5, 5, slots=BUSY, started=2.0), 30, 2.0, requests=1)
    assert counted.shown == Tokens(30, 25, {"admit": 0, "engine": 0}, pending=5)


@given(
    st.lists(
        st.tuples(
            *(st.integers(0, 9),) * 4,
            st.booleans(),
            st.booleans(),
            st.sampled_from([1.0, 300.0]),
        ),
        max_size=40,
    )
)
def test_the_parts_are_the_whole_and_nothing_falls(beats):
    """In whatever order engine, gateway and sockets tell of the same tokens."""
    counted, at, out, page, edge = begun(told()), 0.0, 0, told(), 0
    for generated, wrote, acknowledged, lost, cancels, rests, seconds in beats:
        at, out, edge = at + seconds, out + generated, edge + (lost if cancels else 0)
        last = page.engines["worker"]
        useful = min(last.useful + acknowledged, last.out + wrote - last.orphaned)
        orphaned = min(last.orphaned + lost, last.out + wrote - useful)
        ended = {"cancelled": last.ended.get("cancelled", 0) + cancels}
        page = told(last.out + wrote, useful, orphaned, slots=FREE if rests else BUSY, **ended)
        before, counted = counted.shown, after(counted, page, out, at, outer={"edge": float(edge)})
        shown = counted.shown
        assert (shown.out, parts(shown)) == (out, out)
        assert min(shown.pending, shown.useful, shown.unattributed, *shown.orphaned.values()) >= 0
        assert shown.useful >= before.useful
        assert shown.unattributed >= before.unattributed
        assert all(shown.orphaned[hop] >= tokens for hop, tokens in before.orphaned.items())


def test_its_admission_is_shown_as_it_is():
    """An expected start that is not known is missing, not 0."""
    page = replace(
        told(slots={"free": 1, "held": 1}),
        mode="busy",
        classes={"interactive": GatewayClass(3, 2.5, None, {"admitted": 4, "rejected_age": 1})},
        streams=(GatewayStreams("worker", "vanished", 2, (2, 0), 0.5, 0.4),),
        moves=(("queued", "admit", "streaming", 4),),
    )
    view = admitted.admission(page)
    assert list(admitted.groups(page, "gate")) == [StreamGroup("worker", "gate", "vanished", 2, (2, 0), 0.5, 0.4)]
    assert (view.mode, view.waiting, view.queue_ages) == ("busy", {"interactive": 3}, {"interactive": 2.5})
    assert view.expected_starts == {}
    assert view.decisions == {("interactive", "admitted"): 4, ("interactive", "rejected_age"): 1}
    assert view.slots == {("worker", "free"): 1, ("worker", "held"): 1}
    assert view.moves == {("queued", "admit", "streaming"): 4}
