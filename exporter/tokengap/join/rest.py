"""Which streams have finished although their socket stays, or have ended without our seeing them at all.

In flight or idle? One rule, stated here and applied in :func:`end_finished`. A keep-alive upstream that carried an
answer and is quiet now (no byte for a beat) has either finished or is paused, and the kernel shows both alike:

=====================================  ========================================================================
situation                              decision
=====================================  ========================================================================
request sent, no answer byte yet       in flight (queued or prefill, or an answer that is not streamed)
a header and no more                   as "quiet" below: a small page answered at once looks the same
answer bytes since the beat before     in flight
a new request on the same socket       the old stream has ended, a new one begins
carrier destroyed, or in CLOSE-WAIT    ended
quiet, or its client just closed, and  in flight while the engine has requests to account for, the least silent first;
engine's running + waiting known       else ended
silent, and the engine finished more   ended, the most silent first
than we saw end
quiet, engine's counts not known       in flight for :data:`QUIET_PATIENCE`, then ended
quiet, the client sends a new request  ended
=====================================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import CONNECTED
from tokengap.join.segments import HEADER_SECONDS, SAME_INSTANT, Segments, headers_of, in_flight
from tokengap.join.sockets import Tracked, ages
from tokengap.readings import ESTABLISHED

#: Seconds for which a quiet stream counts as in flight when the engine does not say how many it has.
QUIET_PATIENCE = 30.0

#: Seconds of silence from which on a stream may have finished: longer than between two tokens of a busy engine.
SILENT_SECONDS = 0.1

#: Bytes that an answer of a model has at least, header included.
LEAST_ANSWER = 256


@dataclass(frozen=True, slots=True)
class InEngine:
    """How many requests an engine has, running and waiting, and how many it finished since the beat before. ``lost``:
    how many it may have that lost their socket before; those it finished may be of these."""

    requests: float
    finished: float
    lost: int = 0


def end_finished(
    seg: Segments,
    now: Tracked,
    inner: NDArray[np.intp],
    engines: Mapping[int, InEngine],
    headers: NDArray[np.int64],
    at: float,
    interval: float,
) -> Segments:
    """End the streams that have finished on a socket that stays (the table in this module's docstring)."""
    flying = np.isnan(seg["ended"])
    mute = np.isnan(seg["answered"])
    counted = flying & np.isnan(seg["missed"])  # the others are closing
    carrier = now.rows[now.find(seg["carrier"])]
    question_age, answer_age = ages(carrier, seg["carrier"] == seg["down"])
    # By what may be a header, or all of a small answer, if not more; or by bytes that the request before it was given.
    not_newer = (answer_age >= 0) & (answer_age <= question_age) & (seg["base_up"] > 0) & mute
    answered = counted & ((seg["supply"] > 0) | not_newer)
    silence = np.where(answer_age >= 0, answer_age / 1e3, at - seg["grew"])
    quiet = answered & (silence >= 0.9 * interval) & (seg["grew"] < at)
    at_once = answer_age >= question_age - 1e3 * HEADER_SECONDS

    rows = now.find(seg["down"])
    moved_on = (rows >= 0) & (seg["carrier"] != seg["down"]) & ~seg["shared"]
    moved_on &= now.track["asked"][rows] > seg["grew"]
    carried_on = (inner >= 0) & flying[inner]
    over = quiet & (moved_on | (seg["trial"] & ~mute) | ((seg["to_hop"] >= 0) & ~carried_on))

    # A header of the size that this engine is known to send belongs to a stream that waits; an answer that is as small
    # and is not that is likely a poll.
    known_header = headers_of(seg, headers)
    as_known = mute & (known_header > 0) & (seg["supply"] == known_header)
    just_closed = (seg["down"] > 0) & np.isnan(seg["gone"]) & ((rows < 0) | now.ended[rows])
    cut = just_closed & now.ended[now.find(seg["carrier"])]  # both sides at once: finished, or not
    just_closed &= ~mute | ((known_header > 0) & ~as_known)  # a stream that waits has not finished
    # Nor has one whose answer went on after its client had gone.
    closed_at = now.track["asked"][rows] + now.rows["last_data_recv"][rows] / 1e3
    just_closed &= ~(now.known[rows] & now.ended[rows] & (at - silence > closed_at + SAME_INSTANT))
    rank = np.where(as_known, 0.0, silence + SAME_INSTANT * just_closed)
    rank += np.where(mute & ~as_known & (known_header > 0), 1e6, 0.0) + np.where(mute & (seg["down"] == 0), 1e3, 0.0)

    denied = seg["no_room"].copy()
    seg["no_room"] = False
    undecided = answered & ~over & (seg["engine"] >= 0)
    for engine in np.unique(seg["engine"][undecided]):
        mine = np.flatnonzero(undecided & (seg["engine"] == engine))
        if engine not in engines:
            over[mine] = quiet[mine] & (silence[mine] > QUIET_PATIENCE)
            continue
        here = (seg["engine"] == engine) & ~seg["trial"]
        room = max(int(engines[engine].requests) - int((here & counted & ~answered).sum()), 0)
        by_rank = mine[np.argsort(rank[mine], kind="stable")]
        no_room = by_rank[room:]
        # Twice for those that are merely quiet: the page is read after the sockets, and may know of an end elsewhere.
        over[no_room] = (quiet[no_room] & denied[no_room]) | just_closed[no_room]
        seg["no_room"][no_room] = True
        # There is room for this one, and was in the beat before, or for all: it is what the engine counts. Unless its
        # answer came at once, as that of a poll does: then only more of it will tell.
        fits, poll_like = by_rank[:room], at_once & ~mute
        crowded = bool((~poll_like[no_room]).any())
        seg["trial"][fits] &= ((seg["born"][fits] >= at) & crowded) | poll_like[fits]
        # The engine finished more than we saw end: the longest silent of these, without waiting for another beat.
        unexplained = int(engines[engine].finished) - int((here & (over | (seg["ended"] == at)) & ~cut).sum())
        header_alone = mute[no_room] & (seg["supply"][no_room] < LEAST_ANSWER)
        silent = no_room[(silence[no_room] >= SILENT_SECONDS) & ~over[no_room] & ~header_alone]
        over[silent[::-1][: max(unexplained, 0)]] = True
    seg["ended"] = np.where(over, at, seg["ended"])
    return seg


def await_clients(seg: Segments, now: Tracked, engines: Mapping[int, InEngine], at: float) -> None:
    """Put off the end of streams whose upstream closed while their client is still there, for one beat, unless the
    engine finished as many: the client may be closing at this moment, and then it had left."""
    down = now.find(seg["down"])
    there = (down >= 0) & ~now.ended[down] & (now.rows["state"][down] == ESTABLISHED) & (seg["carrier"] != seg["down"])
    doubtful = (seg["ended"] == at) & (seg["missed"] == at) & there & (seg["engine"] >= 0)
    for engine in np.unique(seg["engine"][doubtful]):
        mine = doubtful & (seg["engine"] == engine)
        if engine in engines and int(mine.sum()) > engines[engine].finished:
            seg["ended"][mine] = np.nan


def believe_brief(
    seg: Segments, engines: Mapping[int, InEngine], edges: frozenset[tuple[int, int, bool]], at: float, *, unseen: bool
) -> None:
    """Take what came and went within one beat for streams, the longest answers first, as far as the engine finished
    more requests than we saw end. The others were polls. ``unseen``: the beat was so long, since sockets could not be
    read, that clients had the time to leave."""
    over = (seg["ended"] == at) & (seg["engine"] >= 0)
    brief = over & seg["trial"] & (seg["born"] == at) & ~np.isnan(seg["answered"])
    for engine in np.unique(seg["engine"][brief]):
        mine = seg["engine"] == engine
        if engine in engines:
            unexplained = int(engines[engine].finished) - int((over & mine & ~seg["trial"]).sum())
            unexplained -= engines[engine].lost
            # It has finished those as well that it has no more, and whose end is yet to show.
            unexplained -= max(int((in_flight(seg) & mine).sum()) - int(engines[engine].requests), 0)
            longest = np.flatnonzero(brief & mine)[np.argsort(-seg["supply"][brief & mine], kind="stable")]
            believed = longest[: max(unexplained, 0)]
            seg["trial"][believed] = False
            # Nobody saw its client. It was answered to the end, so it is taken for one that stayed, if that was soon.
            alone = believed[seg["down"][believed] == 0]
            hops = [hop for hop, target, is_hop in sorted(edges) if target == engine and not is_hop]
            if hops:
                seg["hop"][alone] = hops[0]
                if not unseen:
                    seg["client"][alone] = CONNECTED
