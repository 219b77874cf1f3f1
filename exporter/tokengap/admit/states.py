"""The life of one stream at the gate, as a table. Pure: no clock, no I/O.

What matters is the order in which a stream whose client left is taken apart, so that nobody is admitted to a slot that
still works for the one before:

1. stop admitting: its slot is taken in every state but the ends (:data:`HOLDS_SLOT`);
2. send the engine its cancel (``cancelling``), *then* close upstream (``closing``);
3. ``client_connected`` is 0 with the first of these moves (:data:`CONNECTED`), so no later token is counted useful;
4. drain the slot until the engine itself shows that the stream is gone (``draining``, and ``held`` past the limit);
5. only then, ``released``, admit the next.

Events come in any order (the engine may finish while the cancel is on its way; a page may be read too early). Every
pair of a state and an event therefore has an answer: a row of :data:`MOVES`, or to stay, which is right for what comes
late or twice. ``docs/admit.md`` shows the table as :func:`table` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where a stream is. The last three are ends."""

    QUEUED = "queued"
    STREAMING = "streaming"
    CANCELLING = "cancelling"
    CLOSING = "closing"
    DRAINING = "draining"
    HELD = "held"
    REFUSED = "refused"
    DROPPED = "dropped"
    RELEASED = "released"


class Event(StrEnum):
    """What happens to a stream.

    The proxy says the five in the middle. ``CLIENT_LEFT``: FIN, RST or vanished. ``GAVE_UP``: the proxy ends a stream
    whose client is there (a deadline, a limit). ``CANCEL_SENT``: the engine took the cancel, refused it, or has none.
    ``UPSTREAM_CLOSED``: the connection to the engine ended before its answer did, whoever closed it. ``FINISHED``: the
    answer came to its end, error answers included.

    The gate itself says the others. ``DRAINED``: the engine shows that it no longer works on it. ``DRAIN_LATE``: it did
    not within the limit.
    """

    ADMIT = "admit"
    REFUSE = "refuse"
    CLIENT_LEFT = "client_left"
    GAVE_UP = "gave_up"
    CANCEL_SENT = "cancel_sent"
    UPSTREAM_CLOSED = "upstream_closed"
    FINISHED = "finished"
    DRAINED = "drained"
    DRAIN_LATE = "drain_late"


class Action(StrEnum):
    """What a move asks the proxy to do."""

    START = "start"
    SEND_CANCEL = "send_cancel"
    CLOSE_UPSTREAM = "close_upstream"


@dataclass(frozen=True, slots=True)
class Move:
    """Where an event leads, and what is to be done there."""

    to: State
    action: Action | None = None


_Q, _S, _C, _L, _D, _H = (
    State.QUEUED,
    State.STREAMING,
    State.CANCELLING,
    State.CLOSING,
    State.DRAINING,
    State.HELD,
)
_CUT: Final = Move(_C, Action.SEND_CANCEL)
_FREE: Final = Move(State.RELEASED)

#: A pair that is not here stays where it is, and nothing is done.
MOVES: Final[Mapping[tuple[State, Event], Move]] = {
    (_Q, Event.ADMIT): Move(_S, Action.START),
    (_Q, Event.REFUSE): Move(State.REFUSED),
    (_Q, Event.CLIENT_LEFT): Move(State.DROPPED),
    (_Q, Event.GAVE_UP): Move(State.DROPPED),
    (_S, Event.FINISHED): _FREE,
    (_S, Event.CLIENT_LEFT): _CUT,
    (_S, Event.GAVE_UP): _CUT,
    # The engine hung up in mid-answer: it may have died, or work on.
    (_S, Event.UPSTREAM_CLOSED): Move(_D),
    (_C, Event.CANCEL_SENT): Move(_L, Action.CLOSE_UPSTREAM),
    (_C, Event.UPSTREAM_CLOSED): Move(_D),
    (_C, Event.FINISHED): _FREE,
    # The cancel hangs: it is not waited for any longer.
    (_C, Event.DRAIN_LATE): Move(_H, Action.CLOSE_UPSTREAM),
    (_L, Event.UPSTREAM_CLOSED): Move(_D),
    (_L, Event.FINISHED): _FREE,
    (_L, Event.DRAIN_LATE): Move(_H),
    (_D, Event.DRAINED): _FREE,
    (_D, Event.DRAIN_LATE): Move(_H),
    (_H, Event.DRAINED): _FREE,
    (_H, Event.FINISHED): _FREE,
}

#: The ends: nothing leads out of them.
ENDS: Final = frozenset({State.REFUSED, State.DROPPED, State.RELEASED})
#: Its slot is taken.
HOLDS_SLOT: Final = frozenset({_S, _C, _L, _D, _H})
#: Its client is taken to be there: what it acknowledges is useful.
CONNECTED: Final = frozenset({_Q, _S})
#: Its client left, or was given up, and its slot is still taken: the zombie.
ZOMBIE: Final = HOLDS_SLOT - CONNECTED
#: The engine's page can tell that it is gone: its connection is closed.
DRAINABLE: Final = frozenset({_D, _H})


def move(state: State, event: Event) -> Move:
    """Return where ``event`` leads from ``state``; to itself where nothing is to be done."""
    return MOVES.get((state, event), Move(state))


def table() -> Iterator[str]:
    """Draw the moves as the rows of a table in Markdown."""
    yield "| state | event | next | to do | slot taken | client_connected |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for (state, event), leads in MOVES.items():
        taken = "yes" if leads.to in HOLDS_SLOT else "no"
        yield f"| {state} | {event} | {leads.to} | {leads.action or '-'} | {taken} | {int(leads.to in CONNECTED)} |"
