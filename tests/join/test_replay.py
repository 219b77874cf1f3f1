"""Beats recorded through real proxies, joined again: the same answer each time, and the true one."""

from __future__ import annotations

import pytest

import replay
from tokengap.join import start, step
from tokengap.join.ledger import totals

#: What the recordings need more than the usual 1 % of tokens out, and why.
BARS = {
    "naive-not-streamed": 0.05,  # nothing is delivered before the end: the bar of the design
    "naive-not-streamed-burst": 0.05,  # the same, with all requests within 4 ms, and twice an answer amid a dump
    "haproxy-holds-on": 0.015,  # HAProxy resets its side, and the kernel wipes the counters of a socket that does
}


def last_view(name):
    truth, beats = replay.load(name)
    state, view = None, None
    for readings in beats:
        state = start(readings.topology) if state is None else state
        state, view = step(state, readings)
        tokens = view.engines[0].tokens
        assert totals(tokens)["sum"] == pytest.approx(tokens.out, abs=1e-6)
    return truth, view


@pytest.mark.parametrize("name", replay.names())
def test_the_split_of_tokens_is_the_true_one(name):
    """Tokens orphaned and useful are within 1 % of tokens out of what the users received and the engine generated."""
    truth, view = last_view(name)
    tokens, bar = view.engines[0].tokens, BARS.get(name, 0.01) * truth["out"]
    assert tokens.out == truth["out"]
    assert sum(tokens.orphaned.values()) == pytest.approx(truth["out"] - truth["useful"], abs=bar)
    assert tokens.useful == pytest.approx(truth["useful"], abs=bar)
    assert view.groups == ()


@pytest.mark.parametrize("name", replay.names())
def test_the_leak_is_named_where_it_is(name):
    """Tokens lost by a proxy are at the edge, those lost by the engine at the engine."""
    truth, view = last_view(name)
    by_hop = {hop: n for hop, n in view.engines[0].tokens.orphaned.items() if n > 0.005 * truth["out"]}
    assert set(by_hop) <= {truth["leaks_at"]}


#: By how many streams endings may be mistaken for each other, where by more than one: an answer that came amid a dump
#: shows at its upstream socket and not yet at its client, and nothing else tells the clients of a burst apart.
MISTAKEN = {"naive-not-streamed-burst": 3}


@pytest.mark.parametrize("name", [name for name in replay.names() if "holds-on" not in name])
def test_every_stream_is_counted_once_by_how_it_ended(name):
    """Some users stayed and some left: completed, and cancelled or orphaned, in these numbers. Within one: the last
    bytes of a leaver and the end of another may fall into one beat, and a stream may come and go between two."""
    truth, view = last_view(name)
    stayed = truth["how"].count("completed")
    counts = {}
    for (_, _, how), n in view.endings.items():
        counts[how] = counts.get(how, 0) + n
    assert counts.get("completed", 0) == pytest.approx(stayed, abs=MISTAKEN.get(name, 1))
    assert sum(counts.values()) == pytest.approx(len(truth["how"]), abs=1)


def test_a_replay_gives_the_same_answer_twice():
    """The join is a fold of its readings and of nothing else: no clock, no chance."""
    name = replay.names()[0]
    first, second = last_view(name)[1], last_view(name)[1]
    assert first.engines == second.engines
    assert first.endings == second.endings
