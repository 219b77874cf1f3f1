"""The record of one request at one hop, which the files beside this one fill in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A client we never saw: not known to be there, not known to be gone. Never published as a client state.
UNSEEN = -1

#: vLLM (any Starlette application) sends the header of a streamed answer when the request is accepted, long before the
#: first token: at most so many bytes, within so many seconds. They are no sign of life of the model.
HEADER_MOST, HEADER_SECONDS = 1024, 0.1

#: The size of such a header where none was seen on its own.
HEADER_USUAL = 200

#: Seconds by which two sockets may disagree about the instant of the same request (a few ms through every proxy
#: measured, 4 ms ticks, a busy event loop in between).
SAME_INSTANT = 0.05

#: Bytes that a proxy may hold back from a client that it serves (nginx with proxy_buffering on: two buffers of 8 KB).
HELD_BACK = 16 * 1024

#: What a client may lack that has, or had, its whole answer: the last chunk, and what re-framing makes of the
#: difference.
TAIL_BYTES, TAIL_SHARE = 1024, 0.05

#: Bytes by which the header of an answer differs on both sides of most proxies.
HEADER_SLIP = 32

#: What a client that closed may lack and count as one that has all: its last token, and the small answer to a poll that
#: came after it on the same connection.
LAST_BYTES = 512

UNKNOWN_OWNER, OWNED, FOREIGN = 0, 1, 2

#: One request at one hop. Instants are monotonic seconds, NaN for "not yet".
SEGMENT = np.dtype(
    [
        ("id", "i8"),
        ("hop", "i4"),  # index of the hop; len(hops) for "directly at the engine"; -1 while no partner told
        ("engine", "i4"),  # index of the engine it goes to; -1 when it goes to another hop
        ("to_hop", "i4"),
        ("carrier", "u8"),  # cookie of the socket the answer comes by
        ("netns", "u2"),  # the network namespace it is in: of the hop, as its client-facing sockets are
        ("far_end", "u8"),  # the connection as seen from its other end (connection_keys)
        ("down", "u8"),  # cookie of the client-facing socket; 0 never seen
        ("asked", "f8"),
        ("born", "f8"),  # first seen
        ("answered", "f8"),  # first bytes beyond the header seen: its first token
        ("grew", "f8"),  # newest answer byte seen
        ("missed", "f8"),  # since when its carrier is closing, closed, or in no table
        ("ended", "f8"),
        ("gone", "f8"),  # since when the client is known to be gone or vanished, at this hop
        ("left", "f8"),  # when its client's socket ended, as that tells
        ("flowed_on", "?"),  # its answer went on after that
        ("client", "i1"),  # code of the client facing this hop, or UNSEEN
        ("owner", "i1"),
        ("owner_told", "?"),  # by the process table, not by the pair
        ("no_room", "?"),  # in the beat before, the engine's count left no room for it
        ("trial", "?"),  # may yet turn out to be a poll of some page, not a stream: no tokens are credited
        ("draining", "?"),  # ended, but its client has not acknowledged all yet and is still there
        ("reused", "?"),  # it ended, for its carrier brought another request: its answer was whole
        ("told", "?"),  # the engine's own count of its tokens has been taken in
        ("may_read", "?"),  # its client sent a FIN, and nothing came since that it would have acknowledged or refused
        ("shared", "?"),  # its client multiplexes several requests on one socket (HTTP/2)
        ("maybe_left", "?"),  # its client may have come and left before we looked
        ("base_up", "i8"),  # bytes on the carrier before this request
        ("header", "i8"),  # bytes of the header, 0 while not seen on its own
        ("supply", "i8"),  # answer bytes so far, header included
        ("arrived", "i8"),  # of these, since the beat before
        ("acked", "i8"),  # bytes of this answer acknowledged by the client facing this hop
        ("fresh", "f8"),  # answer bytes, header excluded, not yet credited with tokens
        ("lag", "f8"),  # answer bytes minus what the outermost client acknowledged, in upstream bytes, since paired:
        ("measured", "u8"),  # the client on this socket
        ("from_up", "i8"),  # had, when so many answer bytes had come,
        ("from_down", "i8"),  # acknowledged so many,
        ("owed", "f8"),  # and lacked so many
        ("level", "f8"),  # the lag at which all was delivered
        ("behind", "f8"),  # answer bytes not yet acknowledged by the outermost client
        ("untold", "f8"),  # of these, what that client may have got since it was seen last: its socket's end will tell
        ("tokens", "f8"),
        ("useful", "f8"),
        ("orphaned", "f8"),
        ("hushed", "f8"),  # tokens given to it while it showed no byte and others may have run in its place
    ]
)

Segments = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Owned:
    """Streams of one engine. Columns correspond: the outermost client's state, the hop at which the request entered,
    and the hop that holds on to a client that left, -1 none."""

    segments: Segments
    client: NDArray[np.int8]
    entered: NDArray[np.int32]
    leaks_at: NDArray[np.int32]

    def plus(self, other: Owned) -> Owned:
        """Return these streams and the others."""
        return Owned(
            np.concatenate([self.segments, other.segments]),
            np.concatenate([self.client, other.client]),
            np.concatenate([self.entered, other.entered]),
            np.concatenate([self.leaks_at, other.leaks_at]),
        )

    def only(self, mask: NDArray[Any]) -> Owned:
        """Return the marked streams."""
        return Owned(self.segments[mask], self.client[mask], self.entered[mask], self.leaks_at[mask])


def body(segments: Segments) -> NDArray[np.int64]:
    """Return the answer bytes of each stream that are not its header."""
    header = np.where(segments["header"] > 0, segments["header"], HEADER_USUAL)
    return np.asarray(np.maximum(segments["supply"] - header, 0), dtype=np.int64)


def headers_of(segments: Segments, headers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each stream the size of its engine's header, of ``headers`` by engine; 0 where it is not known."""
    if not len(headers):
        return np.zeros(len(segments), dtype=np.int64)
    return np.where(segments["engine"] >= 0, headers[segments["engine"]], 0)


def passed_by(segments: Segments) -> NDArray[np.bool_]:
    """Mark the streams whose answer was given to the request before them, for it came in one beat with that one's."""
    later = (segments["base_up"] > 0) & (segments["grew"] >= segments["asked"])
    return np.asarray((segments["supply"] == 0) & later, dtype=np.bool_)


def all_but_the_last(segments: Segments) -> NDArray[np.bool_]:
    """Mark the answers of which clients lack no more than the last chunk, and what re-framing makes of the difference;
    of a short one, half."""
    tail = np.minimum(np.maximum(TAIL_BYTES, TAIL_SHARE * segments["supply"]), body(segments) / 2)
    return np.asarray(~np.isnan(segments["answered"]) & (segments["behind"] <= tail), dtype=np.bool_)


def seems_over(segments: Segments) -> NDArray[np.bool_]:
    """Mark the streams whose client closed with all but the last chunk, and nothing came after: most likely they are
    over, and the connection is kept for the next."""
    closed = ~np.isnan(segments["left"]) & ~segments["flowed_on"]
    return np.asarray(closed & (all_but_the_last(segments) | got_more_than_came(segments)), dtype=np.bool_)


def got_more_than_came(segments: Segments) -> NDArray[np.bool_]:
    """Mark the streams of which the client has bytes that were not seen to come yet: a dump is not atomic."""
    more = segments["acked"] > segments["supply"] + HEADER_USUAL
    return np.asarray(more & ~segments["shared"] & (segments["carrier"] != segments["down"]), dtype=np.bool_)


def in_flight(segments: Segments) -> NDArray[np.bool_]:
    """Mark the streams that have not ended and are no mere candidates."""
    return np.asarray(np.isnan(segments["ended"]) & ~segments["trial"], dtype=np.bool_)


def stays(seg: Segments) -> NDArray[np.bool_]:
    """Mark the streams that the next beat needs: in flight, or not wholly delivered."""
    return np.asarray(np.isnan(seg["ended"]) | seg["draining"], dtype=np.bool_)
