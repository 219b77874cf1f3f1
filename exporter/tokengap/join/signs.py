"""What sockets give away about those who use them: HTTP/2, a load balancer in front, answers from nowhere.

A client on HTTP/1 asks, and is silent until it has its answer. A client on HTTP/2 sends small frames in between (window
updates, pings), and asks several times at once over one connection. Something that keeps its connections asks again on
many of them, from one address.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokengap.join.segments import HEADER_MOST, UNSEEN, Segments
from tokengap.join.sockets import Sides, Tracked
from tokengap.readings import ESTABLISHED

#: No HTTP/1 request is smaller, and a frame that is not a request is: 9 to 17 bytes, two of them in TLS about 48.
LEAST_REQUEST = 64

#: From so many client sockets on that are asked on again and again, from so few addresses, it is no crowd of users.
RELAY_SOCKETS, RELAY_ADDRESSES = 4, 2

_Cookies = NDArray[np.uint64]


def _none() -> _Cookies:
    return np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Talk:
    """Client-facing sockets, by cookie, by how their clients talk.

    ``frames``: several requests at once, or small pieces in the middle of an answer: HTTP/2. ``murmurs``: the newest
    piece was too small to be a request, and is none that waits. ``kept``: a request came after an answer.
    """

    frames: _Cookies = field(default_factory=_none)
    murmurs: _Cookies = field(default_factory=_none)
    kept: _Cookies = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Signs:
    """Hops, by index, that show a sign in this beat.

    ``multiplexed``: clients on HTTP/2 are connected. ``unfed``: clients get answers, or wait for them, and no socket
    leads on to where those come from. ``relayed``: clients come from one or two addresses and keep their connections.
    ``without_sockets``: neither a client nor a request to an engine.
    """

    multiplexed: frozenset[int] = frozenset()
    unfed: frozenset[int] = frozenset()
    relayed: frozenset[int] = frozenset()
    without_sockets: frozenset[int] = frozenset()


def listen(before: Talk, now: Tracked, side: Sides, seg: Segments) -> Talk:
    """Take in how clients talked since the beat before."""
    cookies = now.rows["cookie"]
    live = (side.down >= 0) & ~now.ended & (now.rows["state"] == ESTABLISHED)  # who closes says a last word in TLS
    had_answer = now.known & (now.track["written"] - now.d_written > 0)
    small = live & had_answer & (now.d_received > 1) & (now.d_received < LEAST_REQUEST)
    large = live & had_answer & (now.d_received >= LEAST_REQUEST)
    answering = np.isnan(seg["ended"]) & ~np.isnan(seg["answered"])
    amid = small & now.among(seg["down"][answering])
    here = cookies[live]
    frames = np.intersect1d(np.concatenate([before.frames, cookies[amid], seg["down"][seg["shared"]]]), here)
    murmurs = np.setdiff1d(np.intersect1d(before.murmurs, here), cookies[large])
    kept = np.setdiff1d(np.intersect1d(np.concatenate([before.kept, cookies[large]]), here), frames)
    return Talk(frames, np.union1d(murmurs, cookies[small]), kept)


def note_leavers(seg: Segments, now: Tracked, side: Sides, before: float, *, events: bool, first: bool) -> None:
    """Mark the streams that began since ``before``, the beat before, if a client of their hop may have asked and gone
    meanwhile; its end may be told a beat after the stream is seen. One that is not marked has a client that is there,
    if need be on a socket that it shares."""
    new = (seg["born"] >= before) & (seg["carrier"] != seg["down"])
    if not new.any():
        return
    brief = (side.down >= 0) & now.ended & ~now.among(seg["down"]) & (now.d_received > 1)
    brief &= now.track["written"] - now.track["begun"] <= HEADER_MOST
    hops = [UNSEEN, *side.down[brief]] if brief.any() else []
    seg["maybe_left"] |= new & (first or not events or np.isin(seg["hop"], hops))


def signs(talk: Talk, now: Tracked, side: Sides, seg: Segments, held: NDArray[np.int32], hops: int) -> Signs:
    """Read the signs of this beat. ``held``: the hops of requests that wait inside them. ``hops``: their number."""
    rows, cookies = now.rows, now.rows["cookie"]
    facing = (side.down >= 0) & ~now.ended
    multiplexed = np.unique(side.down[facing & np.isin(cookies, talk.frames)])

    served = np.isin(cookies, seg["down"])
    fed = facing & now.known & ~served & (now.d_written > HEADER_MOST)
    upstream = frozenset(seg["hop"][seg["carrier"] != seg["down"]].tolist())
    unfed = set(side.down[fed].tolist()) | (set(held.tolist()) - upstream)

    relayed = set()
    kept = facing & np.isin(cookies, talk.kept)
    for hop in np.unique(side.down[kept]):
        of_hop = facing & (side.down == hop)
        again = kept & of_hop
        if again.sum() >= max(RELAY_SOCKETS, of_hop.sum() / 2):
            addresses = np.unique(np.column_stack([rows["dst_hi"][of_hop], rows["dst_lo"][of_hop]]), axis=0)
            if len(addresses) <= RELAY_ADDRESSES:
                relayed.add(int(hop))
    in_use = upstream.union(side.down[facing].tolist())
    return Signs(frozenset(multiplexed.tolist()), frozenset(unfed), frozenset(relayed), frozenset(range(hops)) - in_use)
