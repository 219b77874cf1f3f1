"""The client's state, read off its socket: the rule stands once, here, as a table.

Each row of :data:`RULES` is tried in order; the first that holds decides; no rule means ``connected``. The cases behind
the rows (recorded through nginx, HAProxy, Envoy, Caddy and LiteLLM) are named beside them; what looks alike and is
*not* an orphan is why the conditions are as narrow as they are:

* a half-closed client (FIN sent, still reading) is in CLOSE-WAIT too, but its ``bytes_acked`` grows;
* HAProxy corks (MSG_MORE) with the persist timer running, but without back-off;
* nginx with ``proxy_buffering on`` holds up to some 16 KB back from a healthy client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengap.readings import CLOSE_WAIT, TIMER_PROBE, TIMER_RETRANSMIT, SocketTable
from tokengap.view import CLIENTS

CONNECTED, STALLED, VANISHED, GONE = (CLIENTS.index(name) for name in ("connected", "stalled", "vanished", "gone"))

#: A peer that misses three retransmissions in a row over nearly two seconds is not there (nginx, HAProxy, Envoy and
#: Caddy need 15 minutes to say so). Nearly: with a beat of a second it is known within three.
VANISHED_RETRANSMITS, VANISHED_SECONDS = 3, 1.8
#: Two unanswered-by-data window probes: below that it is corking, or a hiccup.
STALLED_PROBES = 2
#: More than any proxy buffers by default for one HTTP/1 response, and quiet for longer than a slow token.
BEHIND_BYTES, BEHIND_SECONDS = 128 * 1024, 5.0


@dataclass(frozen=True, slots=True)
class Downstream:
    """The columns the rules read, one row per client-facing socket.

    ``still``: seconds since ``bytes_acked`` last grew; NaN where the source tells no bytes. ``behind``: bytes received
    from upstream for this client and not yet acknowledged by it. ``beat``: the interval, seconds.
    """

    sockets: SocketTable
    still: NDArray[np.float64]
    behind: NDArray[np.float64]
    beat: float


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: the state it means, when it holds, and the situation it was written for."""

    client: int
    holds: Callable[[Downstream], Any]
    situation: str


def _left(down: Downstream) -> Any:
    flat = ~(down.still < 0.9 * down.beat)  # NaN counts as flat: without bytes, CLOSE-WAIT is all there is to go by
    return (down.sockets["state"] == CLOSE_WAIT) & flat


def _vanished(down: Downstream) -> Any:
    s = down.sockets
    tries = np.maximum(s["retransmits"], s["backoff"])
    # The timeout before it was doubled `backoff` times: on a path of 600 ms three tries take longer than two seconds.
    first_timeout = np.maximum(s["rto_us"], 0) / 1e6 / np.exp2(np.clip(s["backoff"], 0, 30))
    patience = np.maximum(VANISHED_SECONDS, 3 * np.minimum(first_timeout, 10.0))
    silent = (s["last_ack_recv"] < 0) | (s["last_ack_recv"] / 1e3 >= patience)
    flat = ~(down.still < VANISHED_SECONDS)
    return (s["timer"] == TIMER_RETRANSMIT) & (tries >= VANISHED_RETRANSMITS) & silent & flat


def _window_shut(down: Downstream) -> Any:
    s = down.sockets
    return (s["timer"] == TIMER_PROBE) & (s["backoff"] >= STALLED_PROBES) & (s["unacked"] <= 0)


def _falls_behind(down: Downstream) -> Any:
    return (down.behind >= BEHIND_BYTES) & (down.still >= BEHIND_SECONDS)


RULES: tuple[Rule, ...] = (
    Rule(GONE, _left, "FIN came and nothing is acknowledged since: the proxy holds on (kinds A, A2)"),
    Rule(VANISHED, _vanished, "data retransmitted three times, no acknowledgement: half-open (kind D)"),
    Rule(STALLED, _window_shut, "zero window, probes answered: alive and not reading (kind E)"),
    Rule(STALLED, _falls_behind, "a perfect socket to which nothing goes: HTTP/2 stream window full (kind F)"),
)


def client_states(down: Downstream) -> NDArray[np.int8]:
    """Return the code (index into ``CLIENTS``) of each client-facing socket that exists. No socket at all is GONE."""
    return np.select(
        [rule.holds(down) for rule in RULES],
        [np.int8(rule.client) for rule in RULES],
        default=np.int8(CONNECTED),
    ).astype(np.int8)
