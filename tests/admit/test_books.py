"""Whose tokens were whose: the ledger of one answer, and the sums of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tokengap.admit.books import Books
from tokengap.admit.delivery import Delivery


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 300)), max_size=30), st.integers(0, 10_000))
def test_a_token_is_useful_when_its_last_byte_was_acknowledged(writes, acknowledged):
    """Neither before, nor because others were."""
    delivery, tokens, position, useful = Delivery(), 0, 0, 0
    for more, size in writes:
        tokens, position = tokens + more, position + size
        delivery.wrote(tokens, position)
        useful = tokens if position <= acknowledged else useful
    delivery.acknowledged(acknowledged)
    assert (delivery.out, delivery.useful) == (tokens, useful)


@dataclass(eq=False)
class Entry:
    engine: str = "e"
    klass: str = "interactive"
    since: float = 0.0
    waits: bool = False
    client_state: str = "connected"
    delivery: Delivery = field(default_factory=Delivery)


def test_what_is_out_is_useful_orphaned_or_pending():
    """Pending while it may still be acknowledged; orphaned once nobody will."""
    books, stays, leaves = Books(), Entry(), Entry()
    for entry in (stays, leaves):
        books.begin(entry)
        entry.delivery.wrote(3, 30)
        entry.delivery.wrote(5, 50)
        entry.delivery.acknowledged(30)
    tokens = books.tokens("e")
    assert (tokens.out, tokens.useful, tokens.orphaned, tokens.pending) == (10, 6, {"admit": 0}, 4)
    books.end(leaves, "cancelled")
    books.settle(leaves)
    books.settle(leaves)  # a second time changes nothing
    tokens = books.tokens("e")
    assert (tokens.out, tokens.useful, tokens.orphaned, tokens.pending) == (10, 6, {"admit": 2}, 2)
    stays.delivery.acknowledged(50)
    tokens = books.tokens("e")
    assert (tokens.useful, tokens.pending) == (8, 0)
    assert (len(books), dict(books.endings)) == (1, {("e", "cancelled"): 1})


def test_who_never_came_to_an_engine_is_in_no_sum():
    """A refused request has no engine to be counted for."""
    books, refused = Books(), Entry(engine="")
    books.begin(refused)
    books.end(refused, "failed")
    books.settle(refused)
    assert not books.endings


def test_who_leaves_the_queue_is_cancelled():
    """At the only engine that it could have gone to, and where there are several at none."""
    for only in ("e", ""):
        books, left = Books(only), Entry(engine="")
        books.begin(left)
        books.end(left, "cancelled")
        assert dict(books.endings) == {(only, "cancelled"): 1}
