"""The life of a stream at the gate: the table, and what it keeps to in every order of events."""

import os
from itertools import permutations, product
from pathlib import Path

import pytest

from tokengap.admit.states import CONNECTED, ENDS, HOLDS_SLOT, MOVES, Action, Event, State, move, table

#: What can happen to a stream that was started, by whomever it is said.
LATER = tuple(event for event in Event if event not in (Event.ADMIT, Event.REFUSE))
LEAVES = (Event.CLIENT_LEFT, Event.GAVE_UP)


def play(events):
    """Return the states and the actions, from streaming on, with an entry for each event."""
    state, states, actions = State.STREAMING, [], []
    for event in events:
        leads = move(state, event)
        state = leads.to
        states.append(state)
        actions.append(leads.action)
    return states, actions


def test_the_order_of_a_cut():
    """Cancel, then close, drained by the engine's own word, and only then is the slot free."""
    events = (Event.CLIENT_LEFT, Event.CANCEL_SENT, Event.UPSTREAM_CLOSED, Event.DRAINED)
    states, actions = play(events)
    assert states == [State.CANCELLING, State.CLOSING, State.DRAINING, State.RELEASED]
    assert actions == [Action.SEND_CANCEL, Action.CLOSE_UPSTREAM, None, None]
    assert [state in HOLDS_SLOT for state in states] == [True, True, True, False]
    assert [state in CONNECTED for state in states] == [False, False, False, False]


def test_every_order_of_events_keeps_the_rules():
    """Whatever comes when: no slot is free before the engine is done, and nobody is connected again."""
    for events in permutations(LATER):
        keeps_the_rules(events)


def keeps_the_rules(events):
    states, actions = play(events)
    for i, state in enumerate(states):
        so_far = events[: i + 1]
        if any(event in LEAVES for event in so_far):
            assert state not in CONNECTED, "a client that left is connected"
        if state is State.RELEASED:
            closed = so_far.index(Event.UPSTREAM_CLOSED) if Event.UPSTREAM_CLOSED in so_far else len(events)
            given_up = Event.DRAIN_LATE in so_far
            drained = Event.DRAINED in so_far and (so_far.index(Event.DRAINED) > closed or given_up)
            assert Event.FINISHED in so_far or drained, "the slot is free, and the engine did not say that it is"
        if i and states[i - 1] in ENDS:
            assert state is states[i - 1], "something came after the end"
            assert actions[i] is None
    done = [action for action in actions if action]
    assert done in ([], [Action.SEND_CANCEL], [Action.SEND_CANCEL, Action.CLOSE_UPSTREAM])


def test_a_stream_in_the_queue_never_holds_a_slot_by_what_its_client_does():
    """Only being admitted takes a slot."""
    for event in set(Event) - {Event.ADMIT}:
        assert move(State.QUEUED, event).to not in HOLDS_SLOT


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_pair_has_an_answer(state, event):
    """What has no row stays, and asks for nothing; an end has no rows."""
    leads = move(state, event)
    if (state, event) not in MOVES:
        assert (leads.to, leads.action) == (state, None)
    else:
        assert state not in ENDS
        assert leads.to is not state


def test_from_every_state_there_is_a_way_out():
    """No state is a trap: from each that is no end an end is reached."""
    reached = set(ENDS)
    while more := {before for (before, _), leads in MOVES.items() if leads.to in reached} - reached:
        reached |= more
    assert reached == set(State)


def test_golden_table_stands_in_the_docs():
    """As :func:`table` draws it; `make accept` writes it there."""
    page = Path(__file__).parent.parent.parent / "docs" / "admit.md"
    text, drawn = page.read_text(), "\n".join(table())
    begin, end = "<!-- drawn from exporter/tokengap/admit/states.py by `make accept` -->\n", "\n<!-- the end of it -->"
    before, _, rest = text.partition(begin)
    if os.environ.get("TOKENGAP_ACCEPT"):
        page.write_text(f"{before}{begin}{drawn}{end}{rest.partition(end.strip())[2]}")
        return
    assert rest.partition(end)[0] == drawn
