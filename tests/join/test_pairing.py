"""Pairing by instants and by flow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.join.pairing import AT_ONCE, Amounts, Requests, _exchanged, by_volume, in_order, pair


def requests(asked, answered=None, open_=None, size=None, got=None, heard=None, asks=True):
    asked = np.array(asked, dtype=float)
    answered = np.zeros(len(asked), dtype=bool) if answered is None else np.array(answered, dtype=bool)
    inode = np.arange(len(asked), dtype=np.uint64)
    size = np.full(len(asked), 500) if size is None else np.array(size)
    open_ = np.ones(len(asked), dtype=bool) if open_ is None else np.array(open_, dtype=bool)
    got = np.zeros(len(asked)) if got is None else np.array(got, dtype=float)
    heard = np.full(len(asked), np.nan) if heard is None else np.array(heard, dtype=float)
    return Requests(asked, inode, size, answered, open_, got, heard, np.full(len(asked), asks))


def pairs(up, down, *, up_answered=None, down_answered=None, never=None, held=None, tolerance=0.05):
    held = [False] * len(down) if held is None else held
    found = pair(requests(up, up_answered, never), requests(down, down_answered, held), tolerance=tolerance)
    return sorted(found)


def test_the_instants_recorded_through_nginx_pair_one_to_one():
    """Ages 756/756, 556/556, 480/480, 436/436, 412/412, 300/300 ms pair each with its own, in any order."""
    ages = np.array([756, 556, 480, 436, 412, 300]) / 1e3
    shuffled = ages[[3, 0, 5, 1, 4, 2]]
    found = pairs(-ages, -shuffled, tolerance=0.01)
    assert [(-ages[i], -shuffled[j]) for i, j in found] == [(-a, -a) for a in ages]


def test_of_one_burst_the_answered_belong_together():
    """Three requests of one instant, two answered: the client that is being answered gets an answered stream."""
    found = pairs([5.0, 5.0, 5.0], [5.0, 5.0], up_answered=[False, True, True], down_answered=[True, False])
    assert found in ([(0, 1), (1, 0)], [(0, 1), (2, 0)])


def test_a_request_outside_the_tolerance_has_no_client():
    """60 ms apart is another request when 50 ms is the tolerance."""
    assert pairs([10.0], [10.06]) == []
    assert pairs([10.0], [10.04]) == [(0, 0)]


def test_a_client_does_not_ask_after_its_proxy():
    """Requests 48 ms apart: each goes to the client that had asked just before it, and none to the next one, which is
    as near. Where no other will do, as for a request that comes in pieces, a client may seem to ask later."""
    downs = [n * 0.048 for n in range(6)]
    ups = [down + 0.004 for down in downs]
    assert pairs(ups[1:], downs[1:]) == [(n, n) for n in range(5)]
    assert pairs([10.0], [10.04]) == [(0, 0)]


def test_a_slow_proxy_asks_late_and_its_answers_find_their_clients_while_they_flow():
    """LiteLLM passes eight simultaneous requests on 50 to 350 ms later: in the order in which they came, and none
    before its client had asked."""
    downs, ups = [0.0, 0.05, 0.1, 0.15], [0.3, 0.45, 0.5]
    flowing = {"up_answered": [True] * 3, "down_answered": [True] * 4}
    assert pairs(ups, downs, held=[True] * 4, **flowing) == [(0, 0), (1, 1), (2, 2)]
    assert pairs([0.3], [0.9], held=[True], up_answered=[True], down_answered=[True]) == []
    assert pairs([0.3], [0.0], never=[False], held=[True], up_answered=[True], down_answered=[True]) == []


def test_as_many_long_answers_on_both_sides_are_each_others():
    """LiteLLM when it has just started: nothing else is known yet, and its bytes are other ones. One more on one side,
    or one that is far longer, and none of them is given away."""
    downs, ups = [1.1, 1.15, 1.2, 1.25], [1.56, 1.57, 1.58, 1.59]
    got_up, got_down = [8557, 8563, 8570, 8069], [3012, 3014, 3025]

    def found(n, last=3011):
        up = requests(ups, [True] * 4, [False] * 4, [2265] * 4, got_up)
        down = requests(downs[:n], [True] * n, [False] * n, [1905] * n, [*got_down[:3], last][:n])
        return sorted(pair(up, down, tolerance=0.05))

    assert found(4) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert found(3) == found(4, last=40_000) == []


def test_what_a_proxy_queued_goes_out_first_in_first_out():
    """Requests that HAProxy passes on late (maxconn) belong to the clients that have been held longest."""
    assert pairs([20.0, 21.0], [15.0, 16.0, 17.0], held=[True, True, True]) == [(0, 0), (1, 1)]


def test_of_what_a_proxy_queued_equal_bytes_tell_whose_it_is():
    """HAProxy took one that had waited 3.8 s and then the next; the first has 2,395 bytes and so has its client, the
    second a header. First in, first out alone would give the second the first one's, where the first may be a poll."""
    up = requests([23.84, 23.94], [True, False], [False, True], got=[2395, 168])
    down = requests([20.1, 20.14], [False, False], [True, True], got=[2395, 168])
    assert sorted(pair(up, down, tolerance=0.05)) == [(0, 0), (1, 1)]


def test_a_held_client_is_not_given_to_a_stream_that_had_one():
    """A stream whose client left is an orphan, not the next client's."""
    assert pairs([20.0], [15.0], never=[False], held=[True]) == []


def test_a_client_that_asked_later_cannot_be_the_client_of_an_earlier_request():
    """First in, first out never runs backwards in time."""
    assert pairs([20.0], [25.0], held=[True]) == []


@given(
    st.lists(st.floats(0, 10), max_size=12),
    st.lists(st.floats(0, 10), max_size=12),
)
def test_pairs_are_one_to_one_within_tolerance_and_as_many_as_possible(up, down):
    """Nobody is paired twice, every pair is within the tolerance, and no further pair could have been made by giving
    everyone their nearest free partner."""
    found = pairs(up, down)
    assert len({i for i, _ in found}) == len(found) == len({j for _, j in found})
    assert all(abs(up[i] - down[j]) <= 0.05 + 1e-9 for i, j in found)
    free_up = [u for i, u in enumerate(up) if i not in {i for i, _ in found}]
    free_down = [d for j, d in enumerate(down) if j not in {j for _, j in found}]
    assert not any(abs(u - d) < 0.05 - 1e-9 for u in free_up for d in free_down)


def test_a_burst_through_a_proxy_that_adds_to_what_it_sends_is_paired_in_its_order():
    """Six through LiteLLM (recorded): questions differ by what it adds, answers by what it makes of them, by chance so
    that those of neighbours are alike; then one request and one client were left, which cannot be each other's."""
    up = [15.022, 15.042, 15.102, 15.146, 15.198, 15.25]
    down = [15.034, 15.086, 15.234, 14.99, 15.134, 15.186]
    up_got = [22611, 22107, 20638, 19402, 18170, 16931]
    down_got = [20553.6, 19074.0, 15336.7, 21064.1, 17832.1, 16573.4]
    heard = [15.966] * 6
    found = pair(
        requests(up, [True] * 6, [False] * 6, [2265] * 6, up_got, heard),
        requests(down, [True] * 6, [False] * 6, [1905] * 6, down_got, [15.958] * 6),
        tolerance=0.062,
        blur=0.012,
    )
    assert sorted(found) == [(0, 3), (1, 0), (2, 1), (3, 4), (4, 5), (5, 2)]


def test_a_burst_that_a_slow_proxy_sends_on_late_is_paired_although_answers_are_alike_by_chance():
    """Eight through LiteLLM in its first seconds (recorded): seven had found one that is as long, and the last request
    was sent before the last client had asked."""
    up = [1.333, 1.333, 1.333, 1.341, 1.341, 1.361, 1.445, 1.473]
    down = [1.101, 1.453, 1.305, 1.205, 1.353, 1.153, 1.253, 1.405]
    up_got = [14229, 14479, 14238, 14230, 14230, 13738, 11768, 11023]
    down_got = [10905, 8402, 10906, 10912, 10524, 11101, 10906, 8984]
    found = pair(
        requests(up, [True] * 8, [False] * 8, [2265] * 8, up_got, [1.957] * 8),
        requests(down, [True] * 8, [False] * 8, [1907] * 8, down_got, [1.953] * 8),
        tolerance=0.061,
        blur=0.011,
    )
    assert len(found) == len({i for i, _ in found}) == len({j for _, j in found}) == 8
    assert all(up[i] - 0.5 <= down[j] <= up[i] + 0.061 for i, j in found)


INSTANTS = st.lists(st.integers(0, 300).map(lambda ms: ms / 1000), max_size=14)


@given(INSTANTS, INSTANTS, st.data())
def test_exchanges_leave_as_few_as_can_be(up, down, data):
    """Whatever pairs there are already: in the end there are as many as the instants allow, one to one."""
    best = in_order(np.array(up), np.array(down), 0.05, AT_ONCE)
    near = [(i, j) for i, u in enumerate(up) for j, d in enumerate(down) if d <= u + AT_ONCE and d >= u - 0.05]
    already: list[tuple[int, int]] = []
    for i, j in data.draw(st.permutations(near)) if near else []:
        if all(i != a and j != b for a, b in already):
            already.append((i, j))
    some = already[: data.draw(st.integers(0, len(already)))]
    found = _exchanged(requests(up), requests(down), some, [], 0.05, 0.0)
    assert set(found) <= set(near)
    assert len(found) == len({i for i, _ in found}) == len({j for _, j in found}) == len(best)
    assert {i for i, _ in some} <= {i for i, _ in found}


def amounts(whole, asked, lately=None):
    whole = np.array(whole, dtype=float)
    return Amounts(whole, whole if lately is None else np.array(lately, dtype=float), np.array(asked, dtype=float))


def volumes(up, down, **how):
    return sorted(by_volume(up, down, tolerance=0.1, **how))


def test_partners_of_one_burst_find_each_other_by_volume():
    """The client that got 42,800 bytes belongs to the stream that brought 42,819, not to the one with 5,900."""
    up, down = amounts([5900, 42819], [5.0, 5.0]), amounts([42800, 5882], [5.0, 5.01])
    assert volumes(up, down) == [(0, 1), (1, 0)]


def test_volumes_that_differ_by_more_than_framing_are_no_match():
    """4 KB and 8 KB are not the same answer; 40,000 and 41,000 may be."""
    assert volumes(amounts([8000], [5.0]), amounts([4000], [5.0])) == []
    assert volumes(amounts([41000], [5.0]), amounts([40000], [5.0])) == [(0, 0)]


def test_requests_of_different_bursts_are_not_matched_by_volume():
    """A client and a stream whose requests lie a second apart were never confused."""
    assert volumes(amounts([4000], [5.0]), amounts([4000], [6.0])) == []


def test_of_answers_as_long_as_each_other_what_moved_lately_decides():
    """Two streams brought 63,550 bytes by now, one of them all in this beat, as the client got them."""
    up = amounts([63550, 63546], [5.0, 5.0], lately=[21000, 63359])
    assert volumes(up, amounts([63727], [5.0], lately=[63559])) == [(1, 0)]


def test_a_client_that_left_midway_belongs_to_a_stream_that_brought_at_least_as_much():
    """6,866 bytes of an answer of 63,560: possible only when the client may have got the beginning alone."""
    up, down = amounts([63560, 900], [5.0, 5.0]), amounts([6866], [5.0])
    assert volumes(up, down) == []
    assert volumes(up, down, partly=True) == [(0, 0)]


@pytest.mark.parametrize(
    ("heard", "got", "asked", "found"),
    [
        (1.30, 168, 1.00, [(0, 0)]),  # its header, passed on at once
        (1.60, 168, 1.00, [(0, 0)]),  # or by a slow proxy
        (1.70, 168, 1.00, []),  # what came so much later is another answer's
        (1.20, 168, 1.00, []),  # and so is what came before
        (1.30, 900, 1.00, []),  # or is longer
        (1.30, 168, 1.32, []),  # or was asked for later
    ],
)
def test_a_header_tells_whose_a_late_request_is(heard, got, asked, found):
    """Asked for 0.28 s after its client had asked: by the instant at which the header came, and its length."""
    up = requests([1.28], got=[187], heard=[1.30])
    down = requests([asked], [True], [False], got=[got], heard=[heard], asks=False)
    assert pair(up, down, tolerance=0.05) == found
