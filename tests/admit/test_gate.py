"""Who is admitted and when: the cases by hand. ``test_gate_orders.py`` plays whatever order of events there may be."""

from itertools import pairwise

import pytest

from tokengap.admit.gate import (
    BATCH,
    INTERACTIVE,
    Cancel,
    CloseUpstream,
    EngineSlots,
    Gate,
    Moved,
    Policy,
    Refuse,
    Rule,
    Start,
)
from tokengap.admit.states import Event, State
from tokengap.readings import EnginePage

TWO = 2.0


def gate(slots=1, engines=1, *, has_page=False, **policy):
    return Gate(Policy(**policy), [EngineSlots(f"e{i}", slots, has_page) for i in range(engines)])


def only(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def one(kind, effects):
    (effect,) = only(kind, effects)
    return effect


def measured(seconds=TWO, times=10, **more):
    """A gate whose only slot was held for so long each time, and the time it has got to."""
    known, now = gate(**more), 0.0
    for _ in range(times):
        stream, effects = known.arrive(now, "interactive")
        assert only(Start, effects)
        now += seconds
        known.happened(stream, Event.FINISHED, now)
    return known, now


# --- mode age ---------------------------------------------------------------------------------------------------------


def test_a_free_slot_admits_at_once():
    """Nothing else is asked of the first."""
    stream, effects = gate().arrive(0.0, "interactive")
    assert one(Start, effects) == Start(stream, "e0", 0.0)


def test_who_would_start_before_the_cut_waits_and_who_would_not_is_refused():
    """Slots held 2 s, the cut at 6 s: the stream in the slot, those that start at 2, 4 and 6 s, and nobody else."""
    known, now = measured()
    answers = [known.arrive(now, "interactive")[1] for _ in range(10)]
    assert [bool(only(Start, effects)) for effects in answers] == [True] + [False] * 9
    refused = [effect for effects in answers for effect in only(Refuse, effects)]
    assert [effect.status for effect in refused] == [429] * len(refused)
    assert {effect.decision for effect in refused} == {"rejected_age"}
    assert len(refused) in (6, 7), "the third in the queue starts at the very cut, give or take a step of the forecast"


def test_retry_after_tells_when_a_slot_will_be_free_for_each():
    """The first refused comes back when the queue is through; those refused after it come after it."""
    known, now = measured()
    answers = [known.arrive(now, "interactive")[1] for _ in range(10)]
    told = [effect.retry_after for effects in answers for effect in only(Refuse, effects)]
    assert told[0] in (6, 7, 8, 9)
    assert all(later - before in (1, 2, 3) for before, later in pairwise(told)), told


def test_the_queue_is_first_in_first_out():
    """As slots become free, they start in the order in which they came."""
    known, now = measured()
    running, _ = known.arrive(now, "interactive")
    waiting = [known.arrive(now, "interactive")[0] for _ in range(2)]
    started = []
    for _ in waiting:
        now += TWO
        running = one(Start, known.happened(running, Event.FINISHED, now)).stream
        started.append(running)
    assert started == waiting


def test_with_nothing_measured_nobody_is_refused_on_a_guess_and_at_the_cut_they_are():
    """The estimate is not known: who waits is refused when it is 6 s old, no sooner and no later."""
    known = gate()
    known.arrive(0.0, "interactive")
    stream, effects = known.arrive(1.0, "interactive")
    assert effects == []
    assert known.wake_at() == 7.0
    assert known.tick(6.999) == []
    refusal = one(Refuse, known.tick(7.0))
    assert (refusal.stream, refusal.decision) == (stream, "rejected_age")


def test_who_waits_in_vain_is_told_before_the_cut():
    """Once it is measured how long streams take, who would start past the deadline is refused, the last first."""
    known = gate()
    running, _ = known.arrive(0.0, "interactive")
    waiting = [known.arrive(0.0, "interactive")[0] for _ in range(10)]
    effects = known.happened(running, Event.FINISHED, TWO)
    assert one(Start, effects).stream == waiting[0]
    refused = [effect.stream for effect in only(Refuse, effects)]
    assert refused == list(reversed(waiting[-len(refused) :]))
    # At 2 s the rest starts at 4, 6 and 8 s: the fourth of them would start past the deadline of 8 s.
    assert len(waiting) - 1 - len(refused) in (2, 3)


def test_who_leaves_the_queue_costs_nobody_anything():
    """It gets no slot, no cancel, and the next moves up."""
    known, now = measured()
    running, _ = known.arrive(now, "interactive")
    first, second = (known.arrive(now, "interactive")[0] for _ in range(2))
    assert one(Moved, known.happened(first, Event.CLIENT_LEFT, now)).after is State.DROPPED
    assert one(Start, known.happened(running, Event.FINISHED, now + TWO)).stream == second


def test_batch_is_never_cut_at_six_seconds():
    """It has no cut of its own, waits for a minute, and starts."""
    known, now = measured()
    running, _ = known.arrive(now, "interactive")
    stream, _ = known.arrive(now, "batch")
    assert known.tick(now + 60) == []
    assert one(Start, known.happened(running, Event.FINISHED, now + 61)).stream == stream


def test_batch_with_a_deadline_is_held_to_its_own():
    """Cut at 30 s: refused then, not at 6 s."""
    known = gate(rules={"interactive": INTERACTIVE, "batch": Rule(cut=30.0, deadline=40.0)})
    known.arrive(0.0, "batch")
    stream, _ = known.arrive(0.0, "batch")
    assert known.tick(29.9) == []
    assert one(Refuse, known.tick(30.0)).stream == stream


def test_interactive_goes_before_batch():
    """Who must start earliest goes first, whoever came first."""
    known, now = measured()
    running, _ = known.arrive(now, "interactive")
    known.arrive(now, "batch")
    urgent, _ = known.arrive(now + 1, "interactive")
    assert one(Start, known.happened(running, Event.FINISHED, now + 2)).stream == urgent


def test_an_urgent_batch_goes_before_interactive():
    """A class is no rank: a batch request that must start within a second goes before one that has five."""
    known = gate(rules={"interactive": INTERACTIVE, "batch": Rule(cut=10.0, deadline=12.0)})
    running, _ = known.arrive(0.0, "interactive")
    batch, _ = known.arrive(0.0, "batch")
    known.arrive(8.0, "interactive")
    assert one(Start, known.happened(running, Event.FINISHED, 9.0)).stream == batch


def test_the_queue_has_a_limit():
    """Without a cut nothing else would bound it."""
    known = gate(queue_limit=2)
    known.arrive(0.0, "batch")
    answers = [known.arrive(0.0, "batch")[1] for _ in range(3)]
    assert [len(only(Refuse, effects)) for effects in answers] == [0, 0, 1]
    assert one(Refuse, answers[-1]).decision == "rejected_busy"


# --- mode busy, and between the two -----------------------------------------------------------------------------------


def test_busy_refuses_whoever_finds_no_slot():
    """The rollback state: no queue."""
    known = gate(mode="busy")
    known.arrive(0.0, "interactive")
    refusal = one(Refuse, known.arrive(0.0, "interactive")[1])
    assert (refusal.decision, refusal.status) == ("rejected_busy", 429)


def test_switching_drops_nobody():
    """Who streams, streams on; who waits, waits on; who comes is refused."""
    known, now = measured()
    running, _ = known.arrive(now, "interactive")
    waiting, _ = known.arrive(now, "interactive")
    assert known.set_mode("busy", now) == []
    assert one(Refuse, known.arrive(now, "interactive")[1]).decision == "rejected_busy"
    assert one(Start, known.happened(running, Event.FINISHED, now + TWO)).stream == waiting
    assert known.set_mode("age", now + TWO) == []
    assert known.arrive(now + TWO, "interactive")[1] == []


def test_cuts_are_set_while_streams_wait():
    """A cut that is shortened is for those who wait already, too."""
    known = gate()
    known.arrive(0.0, "interactive")
    known.arrive(0.0, "interactive")
    assert known.tick(3.0) == []
    assert one(Refuse, known.set_rules({"interactive": Rule(2.0, 4.0)}, 3.0)).decision == "rejected_age"


def test_a_closed_gate_serves_who_is_in():
    """SIGTERM: 503 for whoever comes, and the others as before."""
    known, now = measured()
    running, _ = known.arrive(now, "interactive")
    waiting, _ = known.arrive(now, "interactive")
    assert known.close(now) == []
    refusal = one(Refuse, known.arrive(now, "interactive")[1])
    assert (refusal.decision, refusal.status) == ("rejected_closed", 503)
    assert one(Start, known.happened(running, Event.FINISHED, now + TWO)).stream == waiting


# --- several engines --------------------------------------------------------------------------------------------------


def test_least_in_flight_fills_engines_evenly():
    """In proportion to their slots."""
    known = Gate(Policy(), [EngineSlots("small", 2, False), EngineSlots("large", 4, False)])
    chosen = [one(Start, known.arrive(0.0, "interactive")[1]).engine for _ in range(6)]
    assert chosen.count("small") == 2
    assert chosen[:3].count("large") == 2


def test_round_robin_takes_turns_and_passes_over_who_is_full():
    """One after the other, as long as there is a slot."""
    known = Gate(Policy(balance="robin"), [EngineSlots("a", 1, False), EngineSlots("b", 3, False)])
    assert [one(Start, known.arrive(0.0, "interactive")[1]).engine for _ in range(4)] == ["a", "b", "b", "b"]


def test_an_engine_that_is_down_gets_nobody():
    """And with none up, whoever comes is told so."""
    known = gate(engines=2)
    known.engine_is("e0", False, 0.0)
    assert one(Start, known.arrive(0.0, "interactive")[1]).engine == "e1"
    known.engine_is("e1", False, 0.0)
    assert one(Refuse, known.arrive(0.0, "interactive")[1]).decision == "rejected_closed"
    known.engine_is("e0", True, 1.0)
    assert one(Start, known.arrive(1.0, "interactive")[1]).engine == "e0"


# --- the cut ----------------------------------------------------------------------------------------------------------


def cut(known, now=0.0, key=None):
    """A stream whose client left, up to where its connection to the engine is closed."""
    stream, effects = known.arrive(now, "interactive", key=key)
    assert only(Start, effects)
    known.answered(stream, now)
    assert one(Cancel, known.happened(stream, Event.CLIENT_LEFT, now + 1.0)).stream == stream
    assert not known.counts_useful(stream)
    assert one(CloseUpstream, known.happened(stream, Event.CANCEL_SENT, now + 1.0)).stream == stream
    return stream


def test_the_next_is_admitted_only_when_the_engine_shows_that_the_slot_is_free():
    """Not when the client left, not when the cancel was sent, not when the connection closed."""
    known = gate(has_page=True)
    stream = cut(known)
    waiting, effects = known.arrive(1.0, "interactive")
    assert effects == []
    assert only(Start, known.happened(stream, Event.UPSTREAM_CLOSED, 1.0)) == []
    assert known.engines_to_read() == ["e0"]
    assert known.read("e0", EnginePage(running=1.0, steps=5.0), 1.1, 1.2) == [], "it still runs"
    assert known.read("e0", EnginePage(running=0.0, steps=6.0), 0.9, 1.3) == [], "asked for before it was closed"
    assert one(Start, known.read("e0", EnginePage(running=0.0, steps=6.0), 1.4, 1.5)).stream == waiting
    assert known.engines_to_read() == []


def test_an_engine_without_a_page_is_believed_when_its_connection_is_closed():
    """There is nothing else to go by."""
    known = gate(has_page=False)
    stream = cut(known)
    waiting, _ = known.arrive(1.0, "interactive")
    assert one(Start, known.happened(stream, Event.UPSTREAM_CLOSED, 1.1)).stream == waiting


def test_others_in_the_slots_do_not_pass_for_the_one_that_left():
    """Two slots, one stream with a client, one that left: the page has to show one request, not none."""
    known = gate(slots=2, has_page=True)
    alive, _ = known.arrive(0.0, "interactive")
    known.answered(alive, 0.1)
    stream = cut(known, 0.2)
    known.happened(stream, Event.UPSTREAM_CLOSED, 1.2)
    waiting, _ = known.arrive(1.2, "interactive")
    assert known.read("e0", EnginePage(running=2.0, steps=1.0), 1.3, 1.4) == []
    assert one(Start, known.read("e0", EnginePage(running=1.0, steps=2.0), 1.5, 1.6)).stream == waiting


def test_traffic_from_elsewhere_does_not_hold_slots():
    """An engine that always has three requests more than ours is drained when it has three."""
    known = gate(has_page=True)
    for i in range(5):
        known.read("e0", EnginePage(running=3.0, steps=float(i)), i - 6.0, i - 5.9)
    stream = cut(known)
    known.happened(stream, Event.UPSTREAM_CLOSED, 1.0)
    assert known.read("e0", EnginePage(running=4.0, steps=9.0), 1.1, 1.2) == []
    assert one(Moved, known.read("e0", EnginePage(running=3.0, steps=10.0), 1.3, 1.4)).after is State.RELEASED


@pytest.mark.parametrize(("came", "ended"), [(-0.1, 2.0), (-5.0, 0.1)], ids=["just came", "just ended"])
def test_streams_that_come_and_go_around_a_page_do_not_pass_for_traffic_from_elsewhere(came, ended):
    """Else the next slot that leaks would look drained."""
    known = gate(has_page=True)
    for asked_at in (10.0, 20.0, 30.0, 40.0, 50.0, 60.0):
        stream, _ = known.arrive(asked_at + came, "interactive")
        for at, tell in sorted({ended: "end", 0.2: "read"}.items()):
            if tell == "end":
                known.happened(stream, Event.FINISHED, asked_at + at)
            else:
                known.read("e0", EnginePage(running=1.0, steps=asked_at), asked_at, asked_at + at)
    stream = cut(known, 100.0)
    known.happened(stream, Event.UPSTREAM_CLOSED, 101.0)
    assert known.read("e0", EnginePage(running=1.0, steps=9.0), 101.1, 101.2) == []


def test_stale_gauges_do_not_hold_a_slot_for_ever():
    """A page that shows a request and no work for three seconds, with nobody of ours there, shows one that is gone."""
    known = gate(has_page=True)
    stream = cut(known)
    known.happened(stream, Event.UPSTREAM_CLOSED, 1.0)
    stale = EnginePage(running=1.0, generation_tokens=7.0)
    assert known.read("e0", stale, 1.0, 1.1) == []
    assert known.read("e0", stale, 3.9, 4.0) == []
    assert one(Moved, known.read("e0", stale, 4.1, 4.2)).after is State.RELEASED


def test_an_engine_that_ignores_the_cancel_keeps_its_slot_and_it_shows():
    """Held after the limit; nobody is admitted to it until the engine is done with what it works on."""
    known = gate(has_page=True, drain_limit=10.0)
    stream = cut(known)
    known.happened(stream, Event.UPSTREAM_CLOSED, 1.0)
    assert known.wake_at() == 11.0
    assert one(Moved, known.tick(11.0)).after is State.HELD
    engine = known.view(13.0).engines[0]
    assert (engine.states["held"], engine.states["free"], engine.held_for) == (1, 0, 12.0)
    assert known.read("e0", EnginePage(running=1.0, generation_tokens=90.0), 12.0, 12.1) == []
    assert only(Start, known.arrive(12.2, "interactive")[1]) == []
    assert one(Start, known.read("e0", EnginePage(running=0.0, generation_tokens=91.0), 12.3, 12.4))


def test_a_held_slot_is_given_away_where_that_is_chosen():
    """when_held = admit: the next one starts at the limit, and what is held still shows."""
    known = gate(has_page=True, drain_limit=10.0, when_held="admit", rules={"interactive": BATCH})
    stream = cut(known)
    known.happened(stream, Event.UPSTREAM_CLOSED, 1.0)
    waiting, _ = known.arrive(2.0, "interactive")
    assert one(Start, known.tick(11.0)).stream == waiting
    assert known.view(11.0).engines[0].states["held"] == 1


def test_a_cancel_that_hangs_is_not_waited_for():
    """At the limit the connection is closed without it."""
    known = gate(has_page=True, drain_limit=10.0)
    stream, _ = known.arrive(0.0, "interactive")
    known.happened(stream, Event.CLIENT_LEFT, 1.0)
    assert one(CloseUpstream, known.tick(11.0)).stream == stream
    assert known.happened(stream, Event.CANCEL_SENT, 12.0) == []
    assert known.happened(stream, Event.UPSTREAM_CLOSED, 12.0) == []
    assert one(Moved, known.read("e0", EnginePage(steps=1.0), 12.1, 12.2)).after is State.RELEASED


def test_an_engine_that_died_holds_nothing():
    """It refuses connections: what it ran is gone."""
    known = gate(has_page=True)
    stream = cut(known)
    known.happened(stream, Event.UPSTREAM_CLOSED, 1.0)
    assert one(Moved, known.engine_is("e0", False, 1.1)).after is State.RELEASED


@pytest.mark.parametrize("balance", ["least", "robin"])
def test_an_engine_that_failed_is_the_last_choice(balance):
    """For ten seconds, although it is the emptiest; where no other has a free slot it gets the next all the same."""
    known = gate(slots=2, engines=2, balance=balance)
    known.engine_failed("e0", 1.0)
    starts = [one(Start, known.arrive(now, "interactive")[1]) for now in (1.0, 10.9, 10.9)]
    assert [start.engine for start in starts] == ["e1", "e1", "e0"]
    for start in starts:
        known.happened(start.stream, Event.FINISHED, 10.95)
    assert one(Start, known.arrive(11.0, "interactive")[1]).engine == ("e0" if balance == "least" else "e1")
    assert one(Start, known.arrive(11.0, "interactive")[1]).engine == ("e1" if balance == "least" else "e0")


# --- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_a_retry_is_refused_while_what_it_left_behind_holds_a_slot(slots):
    """Even where another slot is free; another client's request is not a retry."""
    known = gate(slots=slots, has_page=True)
    stream = cut(known, key="a")
    known.happened(stream, Event.UPSTREAM_CLOSED, 1.0)
    refusal = one(Refuse, known.arrive(1.5, "interactive", key="a")[1])
    assert (refusal.decision, refusal.status, refusal.retry_after) == ("rejected_retry", 429, 1)
    assert not only(Refuse, known.arrive(1.5, "interactive", key="b")[1])
    known.read("e0", EnginePage(steps=1.0), 1.6, 1.7)
    assert not only(Refuse, known.arrive(1.8, "interactive", key="a")[1])


@pytest.mark.parametrize("how", [(Event.GAVE_UP, Event.CANCEL_SENT, Event.UPSTREAM_CLOSED), (Event.UPSTREAM_CLOSED,)])
def test_who_was_failed_by_an_engine_may_ask_again(how):
    """At once: it has not left, and what it wanted holds a slot of an engine that broke off or said nothing."""
    known = gate(engines=2, has_page=True)
    stream, _ = known.arrive(0.0, "interactive", key="a")
    for event in how:
        known.happened(stream, event, 1.0)
    assert one(Start, known.arrive(1.5, "interactive", key="a")[1]).engine == "e1"


def test_the_same_request_twice_is_no_retry():
    """While the first has its client, the second is a second."""
    known = gate(slots=2)
    known.arrive(0.0, "interactive", key="a")
    assert only(Start, known.arrive(0.0, "interactive", key="a")[1])


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_view_tells_ages_counts_and_moves():
    """All of what /metrics shows."""
    known, now = measured(has_page=False)
    known.arrive(now, "interactive")
    known.arrive(now, "interactive")
    view = known.view(now + 1.5)
    interactive = view.classes[0]
    assert (interactive.name, interactive.waiting, interactive.queue_age) == ("interactive", 1, 1.5)
    assert interactive.expected_start == pytest.approx(0.5 + TWO, abs=0.3)
    assert view.decisions == {("interactive", "admitted"): 11}
    assert view.moves[State.STREAMING, Event.FINISHED, State.RELEASED] == 10
    assert view.engines[0].states == {
        "free": 0,
        "streaming": 1,
        **dict.fromkeys(("cancelling", "closing", "draining", "held"), 0),
    }
