"""The client's state off one socket row: every kind that was recorded, and what looks like one and is not."""

from __future__ import annotations

import numpy as np
import pytest

from tokengap.join.client import CONNECTED, GONE, RULES, STALLED, VANISHED, Downstream, client_states
from tokengap.readings import CLOSE_WAIT, ESTABLISHED, SOCKET, UNKNOWN
from tokengap.view import CLIENTS


def row(**columns) -> np.ndarray:
    table = np.zeros(1, dtype=SOCKET)
    table["state"], table["rto_us"] = ESTABLISHED, 204_000
    for name, value in columns.items():
        table[name] = value
    return table


def state(still: float, behind: float = 0.0, **columns) -> int:
    down = Downstream(row(**columns), np.array([still]), np.array([behind]), 1.0)
    return int(client_states(down)[0])


ON, PERSIST = 1, 4

KINDS = [
    # what, still, behind, columns, expected
    ("healthy", 0.05, 0, {}, CONNECTED),
    ("A: HAProxy in prefill, FIN unread, 3.0 s ago", 3.0, 0, {"state": CLOSE_WAIT, "rqueue": 1}, GONE),
    ("A2: FIN read and ignored", 3.0, 0, {"state": CLOSE_WAIT}, GONE),
    ("not one: half-closed and reading on", 0.05, 0, {"state": CLOSE_WAIT}, CONNECTED),
    (
        "D: half-open at +8 s through nginx",
        8.1,
        31518,
        {"timer": ON, "backoff": 5, "retransmits": 5, "unacked": 1, "last_ack_recv": 8060, "rto_us": 6_656_000},
        VANISHED,
    ),
    (
        "D: half-open at +2 s, backoff 3",
        2.1,
        500,
        {"timer": ON, "backoff": 3, "retransmits": 3, "unacked": 1, "last_ack_recv": 2050, "rto_us": 1_632_000},
        VANISHED,
    ),
    (
        "not yet: two retransmissions",
        1.2,
        500,
        {"timer": ON, "backoff": 2, "retransmits": 2, "unacked": 1, "last_ack_recv": 1150, "rto_us": 816_000},
        CONNECTED,
    ),
    (
        "not yet: a slow mobile path, first timeout 900 ms",
        2.5,
        500,
        {"timer": ON, "backoff": 3, "retransmits": 3, "unacked": 1, "last_ack_recv": 2500, "rto_us": 7_200_000},
        CONNECTED,
    ),
    (
        "E: zero window at +30 s through nginx",
        30.0,
        120788,
        {"timer": PERSIST, "backoff": 7, "unacked": 0, "last_ack_recv": 2504, "wqueue": 120788},
        STALLED,
    ),
    ("not one: HAProxy corking", 0.2, 0, {"timer": PERSIST, "backoff": 0, "notsent": 824}, CONNECTED),
    ("F: HTTP/2 stream window full", 20.0, 1_800_000, {}, STALLED),
    ("not one: nginx buffers 16 KB for 16.5 s", 16.5, 16_384, {}, CONNECTED),
    ("not one: a slow token", 4.0, 0, {}, CONNECTED),
    (
        "a fallback that tells no bytes: CLOSE-WAIT is all there is",
        float("nan"),
        0,
        {"state": CLOSE_WAIT, "last_ack_recv": UNKNOWN},
        GONE,
    ),
    (
        "a fallback that tells no ages: three retransmissions",
        float("nan"),
        0,
        {"timer": ON, "retransmits": 3, "last_ack_recv": UNKNOWN, "rto_us": UNKNOWN},
        VANISHED,
    ),
]


@pytest.mark.parametrize(("what", "still", "behind", "columns", "expected"), KINDS, ids=[k[0] for k in KINDS])
def test_each_recorded_kind(what, still, behind, columns, expected):
    """Each kind of the table in the design, with the numbers that were recorded, has its state."""
    assert CLIENTS[state(still, behind, **columns)] == CLIENTS[expected]


def test_every_rule_decides_some_case():
    """No rule is dead: each holds for at least one recorded kind and is the first to."""
    deciders = set()
    for _, still, behind, columns, _ in KINDS:
        down = Downstream(row(**columns), np.array([still]), np.array([float(behind)]), 1.0)
        holding = [i for i, rule in enumerate(RULES) if rule.holds(down)[0]]
        deciders |= set(holding[:1])
    assert deciders == set(range(len(RULES)))
