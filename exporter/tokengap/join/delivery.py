"""How far each client is behind: what arrived for it and is not acknowledged, in upstream bytes.

Headers differ by an unknown constant, and a proxy that re-frames chunks sends other numbers of bytes than it received.
What its bytes are worth is learned per hop while they flow (``ratio``: bytes acknowledged by clients, bytes received).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import CONNECTED, GONE, VANISHED
from tokengap.join.segments import HELD_BACK, LAST_BYTES, Segments, body
from tokengap.join.sockets import Tracked

#: The share of received bytes by which a client may seem to fall behind without being behind.
REFRAMING = 0.03

#: Bytes that a hop is taken to have passed on as they came before any were seen.
UNTOLD_BYTES = 8192.0

#: The share by which amounts of a beat may differ from what is known of a hop, and tell more of it.
AGREES = 0.3

#: Seconds within which a proxy closes a connection that was reset, once its stream is over.
TOLD_WITHIN = 3.0


@dataclass(frozen=True, slots=True)
class To:
    """Who each answer is for: the segment at its outer end, the hop there (its index, last the engine), the row of that
    client's socket and its state. ``direct``: the engine's own socket, where both sides are the same bytes."""

    top: Segments
    hop: NDArray[np.int32]
    down: NDArray[np.intp]
    client: NDArray[np.int8]
    direct: NDArray[np.bool_]

    @property
    def listens(self) -> NDArray[np.bool_]:
        """Whether it is there."""
        return np.asarray((self.client >= 0) & (self.client < VANISHED), dtype=np.bool_)


def deliver(
    seg: Segments,
    first: NDArray[np.intp],
    client: NDArray[np.int8],
    now: Tracked,
    ratio: NDArray[np.float64],
    at: float,
    *,
    events: bool,
) -> tuple[Segments, To]:
    """Measure how far each client is behind. ``first`` and ``client``: the segment at the outer end of each, and the
    state of the client there. ``events``: the ends of sockets are told."""
    top = seg[first]
    hop = np.where(top["hop"] >= 0, top["hop"], len(ratio) - 1).astype(np.int32)
    to = To(top, hop, now.find(top["down"]), client, seg["carrier"] == seg["down"])
    down, seen, new = to.down, top["down"] > 0, np.isnan(seg["lag"])
    worth = ratio[hop, 1] / ratio[hop, 0]

    seg["lag"] = _lag(seg, to, now, worth)
    lost_sight = seen & (down < 0) & (top["gone"] == at)
    if not events:
        # Nothing tells what it had got at its end: all, where its stream is over; else half of what came meanwhile.
        most = np.where(np.isnan(seg["ended"]), seg["arrived"] / 2, np.inf)
        got = np.where(lost_sight, np.clip(seg["lag"] - seg["level"], 0.0, most), 0.0)
        for column in ("owed", "lag"):
            seg[column] -= got
    # While the client is there the smallest lag is taken for "all delivered", and may drift a little.
    drift = np.where(to.direct, 0.0, REFRAMING * now.d_acked[down] * worth)
    level = np.where(to.listens, np.minimum(seg["lag"], seg["level"] + drift), seg["level"])
    seg["level"] = np.where(new, 0.0, level)
    everything = body(seg)
    # A dump is not atomic: at first a client may seem to have more than came. Who closed with as much as all of its
    # answer lacks nothing, whatever was measured since then.
    rest = seg["supply"] - top["acked"] * worth
    whole = (client == GONE) & ~to.direct & ~top["shared"] & (np.abs(rest) <= LAST_BYTES)
    lacks = seg["lag"] - seg["level"]
    lacks = np.where(whole, np.minimum(lacks, rest), lacks)
    seg["behind"] = np.where(seen, np.clip(lacks, 0, everything), everything)

    fin = (down >= 0) & ~now.ended[down] & (client == GONE)
    seg["may_read"] = fin & (np.isnan(seg["answered"]) | (seg["answered"] == at)) & ~to.direct
    # A connection that was reset is in no table, and its end is told when the proxy closes it (nginx that ignores who
    # leaves: with the answer's end). Only then is it known what was acknowledged before.
    seg["untold"] = np.where(lost_sight & events, seg["behind"], np.where(down < 0, seg["untold"], 0.0))

    # What has ended is settled when all was acknowledged, or its client is gone; until then the kernel still delivers.
    undelivered = to.listens & ~now.ended[down] & (now.rows["wqueue"][down] > 0) & (seg["behind"] > 0)
    to_be_told = (seg["untold"] > 0) & (at - top["gone"] <= TOLD_WITHIN)
    seg["draining"] = ~np.isnan(seg["ended"]) & (undelivered | to_be_told) & (seg["engine"] >= 0)
    # The hops in between are done with it and close their sockets: from now on its client is who the outermost one has.
    for column in ("down", "hop", "client", "acked"):
        seg[column] = np.where(seg["draining"], top[column], seg[column])
    return seg, to


def _lag(seg: Segments, to: To, now: Tracked, worth: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each client lacks, NaN where none was ever seen; note from where that is measured.

    From totals since it was paired, for what its bytes are worth is learned only as they flow. At first it lacks what
    its socket holds; one that is found late all that it did not acknowledge, where that is more than a proxy holds back
    from everybody. When another socket turns out to be the outermost one, it goes on from the beat before.
    """
    acked, new = to.top["acked"], np.isnan(seg["lag"])
    holds = np.maximum(now.rows["wqueue"][to.down], 0) * worth
    late = (seg["supply"] - acked * worth > HELD_BACK) & ~to.direct & ~to.top["shared"]
    paired, other = new & (to.top["down"] > 0), ~new & (seg["measured"] != to.top["down"])
    for column, at_first, since in (
        ("measured", to.top["down"], to.top["down"]),
        ("from_up", np.where(late, 0, seg["supply"]), seg["supply"] - seg["arrived"]),
        ("from_down", np.where(late, 0, acked), acked - now.d_acked[to.down]),
        ("owed", np.where(late, 0, holds), seg["lag"]),
    ):
        seg[column] = np.where(paired, at_first, np.where(other, since, seg[column]))
    lacks = seg["supply"] - seg["from_up"] - (acked - seg["from_down"]) * worth + seg["owed"]
    return np.where(new & ~paired, np.nan, lacks)


def learn_ratio(ratio: NDArray[np.float64], seg: Segments, to: To, now: Tracked, at: float) -> NDArray[Any]:
    """Take in what flowed in this beat, through each hop: what came, and what was passed on, be it acknowledged or not.

    Pairs of one burst may still be confused: believe a pair that agrees with what is known, and all pairs of a hop
    where everything that moved did so for all of the beat and nobody left, for then confusion does not change the sums.
    """
    down, hop = to.down, to.hop
    came, passed_on = seg["arrived"], now.d_written[down]
    moved = ((came > 0) | (passed_on > 0)) & ~to.direct & (to.top["down"] > 0)
    flows = moved & (to.client == CONNECTED) & ~to.top["shared"] & (came > 0) & (passed_on > 0)
    flows &= (seg["answered"] < at) & np.isnan(seg["ended"]) & (now.d_received[down] == 0)
    expected = came * ratio[hop, 0] / ratio[hop, 1]
    agrees = np.abs(passed_on - expected) <= AGREES * expected
    calm = ~np.isin(hop, np.unique(hop[moved & ~flows]))
    flows &= agrees | calm
    ratio = ratio.copy()
    np.add.at(ratio, (hop[flows], 0), passed_on[flows])
    np.add.at(ratio, (hop[flows], 1), came[flows])
    return ratio
