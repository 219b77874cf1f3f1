"""What a hop makes of the bytes that it passes on, as it is learned while they flow."""

from __future__ import annotations

import numpy as np
import pytest

from tokengap.join.client import CONNECTED, GONE
from tokengap.join.delivery import To, learn_ratio
from tokengap.join.segments import SEGMENT
from tokengap.join.sockets import TRACK, Tracked, nobody
from tokengap.readings import SOCKET

AT = 100.0


def learned(*streams, before=(8192.0, 8192.0)):
    """The bytes passed on for each that came, after a beat of streams: what came, what was passed on, what its client
    has acknowledged of that, and what else is so of it."""
    seg = np.zeros(len(streams), dtype=SEGMENT)
    rows = np.zeros(len(streams), dtype=SOCKET)
    written, acked, received = (np.zeros(len(streams) + 1, dtype=np.int64) for _ in range(3))
    client = np.full(len(streams), CONNECTED, dtype=np.int8)
    seg["answered"], seg["ended"] = AT - 5, np.nan
    for i, (came, passed_on, got, more) in enumerate(streams):
        seg["arrived"][i], written[i], acked[i] = came, passed_on, got
        seg["down"][i] = rows["cookie"][i] = i + 1
        rows["wqueue"][i] = passed_on - got
        client[i] = more.get("client", CONNECTED)
        received[i] = more.get("asks", 0)
        seg["answered"][i], seg["ended"][i] = more.get("answered", AT - 5), more.get("ended", np.nan)
    n = len(streams)
    nothing = np.zeros(n + 1, dtype=np.int64)
    table, flags = np.concatenate([rows, nobody()]), np.zeros(n + 1, dtype=bool)
    now = Tracked(table, np.zeros(n + 1, dtype=TRACK), ~flags, flags, nothing, acked, written, received)
    to = To(seg, np.zeros(n, dtype=np.int32), np.arange(n, dtype=np.intp), client, np.zeros(n, dtype=bool))
    after = learn_ratio(np.array([before, before]), seg, to, now, AT)
    assert after[1].tolist() == list(before)  # of this hop only
    return pytest.approx(after[0, 0] / after[0, 1]), after[0, 1] - before[1]


def test_what_waits_in_a_corked_socket_was_passed_on():
    """HAProxy corks up to ten tokens; so a client of its has never acknowledged all."""
    assert learned((24_640, 24_640, 22_000, {})) == (1.0, 24_640)


def test_a_proxy_that_makes_more_of_it_is_believed_where_all_that_moves_flows():
    """LiteLLM writes each token anew."""
    assert learned(*[(20_000, 40_000, 40_000, {})] * 4) == (168_192 / 88_192, 80_000)


@pytest.mark.parametrize("more", [{"asks": 300}, {"ended": AT}, {"answered": AT}, {"client": GONE}])
def test_a_wrong_pair_teaches_nothing_where_another_stream_may_have_its_bytes(more):
    """One that got a poll's answer, while its stream's were another's: that one asks anew, has ended, has just begun,
    or its client left."""
    wrong, other = (24_644, 275, 275, {}), (300, 24_644, 24_644, more)
    assert learned(wrong, other) == (1.0, 0)


def test_two_that_are_exchanged_teach_what_they_do_together():
    """Where both flow, the sum is right."""
    assert learned((24_644, 300, 300, {}), (300, 24_644, 24_644, {})) == (1.0, 24_944)
