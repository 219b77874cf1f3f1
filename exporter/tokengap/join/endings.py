"""How streams end, and which requests an engine runs on although their socket is gone.

The kernel shows that a stream ended, not how. Two things settle it: whether the client was still there, and how many
requests the engine says it finished (it counts those that ran to their end, and never those that were aborted).

====================================  =========================  ================================================
the client, when the stream ended     the engine                 counted as
====================================  =========================  ================================================
there                                 answered                   completed
there                                 died, or never answered    failed
left, served to the end               finished one               completed: it had everything and closed
left before                           finished one               orphaned: it ran to its end for nobody
left, and its connection stays        any                        the same: the answer was read to its end
left                                  finished none              cancelled, once the engine has dropped it
left                                  still runs it              in limbo: the engine's own leak
in limbo                              finished one               orphaned, at the hop "engine"
====================================  =========================  ================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import VANISHED
from tokengap.join.segments import HEADER_USUAL, Owned, all_but_the_last, in_flight, passed_by
from tokengap.join.silent import Left
from tokengap.readings import EnginePage
from tokengap.view import Ending


@dataclass(frozen=True, slots=True)
class Fates:
    """What is remembered of one engine between beats.

    ``limbo``: the requests whose socket closed before their end and which may still run, oldest first.
    ``excess``: how many more requests than streams the engine had in the beat before; ``usual``: how many more it had
    while nothing was in limbo (traffic that this exporter cannot see). ``finished``: the engine's own count when last
    read; ``lately``: what it finished in that beat; ``spare``: what no stream has accounted for, of two beats (the end
    of a socket may show one later). ``count``: endings since start by hop index.
    """

    limbo: tuple[Left, ...] = ()
    excess: float = 0.0
    usual: float = 0.0
    finished: float | None = None
    lately: int = 0
    spare: int = 0
    count: Mapping[tuple[int, Ending], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Excess:
    """Requests an engine has without a stream: ``leaked`` lost their socket as we looked, ``unseen`` never had one.

    ``now``: all of them in this beat, also those that may be a matter of a moment.
    """

    leaked: float = 0.0
    unseen: float = 0.0
    now: float = 0.0


def excess(fates: Fates, page: EnginePage, streams: Owned, at: float) -> tuple[Fates, Excess]:
    """Compare what the engine has with the streams in flight towards it.

    What may have leaked is limited by the requests that we saw lose their socket before their end. Of the rest, only
    what lasts two beats counts: the page is read after the sockets and may know of a request that they do not.
    """
    if page.running is None and page.waiting is None:
        return fates, Excess()
    seg = streams.segments
    open_streams = int(in_flight(seg).sum())
    just_left = int(((seg["ended"] == at) & ~seg["trial"] & (streams.client >= VANISHED)).sum())
    now = max(page.requests - open_streams, 0.0)
    lasting = min(now, fates.excess)
    usual = min(fates.usual, lasting) if fates.limbo or just_left else lasting
    leaked = min(now - usual, float(len(fates.limbo) + just_left))
    return replace(fates, excess=now, usual=usual), Excess(leaked, max(lasting - leaked, 0.0), now)


def end(
    fates: Fates,
    streams: Owned,
    page: EnginePage | None,
    leaked: float,
    *,
    died: bool,
    at: float,
    beat: float,
    last: int,
    at_once: bool,
    events: bool,
) -> tuple[Fates, NDArray[np.bool_], tuple[Left, ...]]:
    """Count this beat's endings.

    Returns also which of the ``streams`` the engine ran to their end with the client there to the last byte: what they
    are owed was delivered, whatever the closing sockets seemed to say. And which of those without a socket it ran out.

    ``died``: the engine refuses connections, or has restarted. ``last``: index of the hop "engine". ``at_once``: some
    of its answers are not streamed.
    """
    seg = streams.segments
    over = (seg["ended"] == at) & ~seg["trial"]
    newly_finished = finished(fates, page)
    spare = fates.spare + newly_finished
    tally = dict(fates.count)

    def add(hop: int, how: Ending, n: int = 1) -> None:
        if n:
            tally[hop, how] = tally.get((hop, how), 0) + n

    there = over & (streams.client >= 0) & (streams.client < VANISHED)
    unseen = over & (streams.client < 0)
    left_before = over & (streams.client >= VANISHED) & (seg["gone"] < at)
    left_now = over & (streams.client >= VANISHED) & ~left_before
    answered = ~np.isnan(seg["answered"])
    # A brief answer that came at once is no longer than some headers.
    small = over & ~answered & (seg["supply"] > HEADER_USUAL) & (seg["acked"] >= seg["supply"]) & np.array(at_once)
    answered |= small
    whole = there & answered & ~np.array(died)
    # Over HTTP/2 a client that stays may have left one of its streams: then the engine finished fewer than ended.
    unfinished = max(int(whole.sum()) - spare, 0) if page is not None and page.finished is not None else 0
    reset = np.flatnonzero(whole & seg["shared"])[:unfinished]
    whole[reset] = False
    for i in reset:
        add(int(streams.entered[i]), "cancelled")
    # A little that came at once, on a connection that stays or stayed a while: a poll, or a refusal. The model has not
    # worked for it.
    came = (seg["supply"] > 0) | passed_by(seg)
    brief = there & ~answered & (np.isnan(seg["missed"]) | (came & (seg["asked"] < at - beat))) & ~np.array(died)
    for i in np.setdiff1d(np.flatnonzero(there & ~brief), reset):
        add(int(streams.entered[i]), "completed" if whole[i] else "failed")
    spare -= int(whole.sum())
    # Where another request followed on its socket, how much of the bytes were its own is not known, but it was whole.
    got_all = all_but_the_last(seg) | small | (left_now & seg["reused"] & (seg["acked"] > 0))

    # A connection that is kept after the client left, or used again, has brought its answer to the end.
    sure = answered & np.isnan(seg["missed"])
    if not events:  # nothing tells what two sockets carried that went together: where the engine finished as many, all
        together = left_now & ~answered & (seg["missed"] == at)
        answered |= together
        got_all |= together

    limbo = list(fates.limbo)
    order = np.argsort(seg["gone"], kind="stable")
    for i in [i for i in order if left_before[i]] + [i for i in order if left_now[i]]:
        entered = int(streams.entered[i])
        if answered[i] and (spare > 0 or sure[i]):
            spare -= 1
            whole[i] = got_all[i]
            add(*((entered, "completed") if whole[i] else (int(streams.leaks_at[i]), "orphaned")))
        else:
            limbo.append(Left(int(seg["id"][i]), entered, float(seg["asked"][i]), at, bool(answered[i])))
    spare -= int(unseen.sum())

    # In limbo: of those that the engine has no more, it finished the oldest, as it runs them; the youngest of the rest
    # are the likeliest to be there still. One that left just now without an answer is finished only by an engine that
    # is known to run on, and to give answers at once.
    ran_out: tuple[Left, ...] = ()
    if page is None:
        kept = [left for left in limbo if at - left.since < 3 * beat]
    else:
        room = round(leaked)
        silently = at_once and (room > 0 or bool(fates.limbo))
        may = sorted((left for left in limbo if left.since < at or silently), key=lambda left: left.asked)
        ran_out = tuple(may[: max(min(spare, len(limbo) - room), 0)])
        rest = [left for left in limbo if left not in ran_out]
        kept = rest[max(len(rest) - room, 0) :]
    add(last, "orphaned", len(ran_out))
    for left in limbo:
        if left not in ran_out and left not in kept:
            add(left.hop, "cancelled")
    spare -= len(ran_out)
    finished_now = page.finished if page is not None and page.finished is not None else fates.finished
    spare = max(min(spare, newly_finished + fates.lately), 0)
    fates = replace(fates, limbo=tuple(kept), finished=finished_now, lately=newly_finished, spare=spare, count=tally)
    return fates, whole, ran_out


def settled(fates: Fates, streams: Owned, at: float) -> Fates:
    """Note with the requests that lost their socket in this beat what was settled of them."""
    if not fates.limbo:
        return fates
    seg = streams.segments[streams.segments["ended"] == at]
    tokens = dict(zip(seg["id"].tolist(), (seg["useful"] + seg["orphaned"]).tolist(), strict=True))
    limbo = (replace(left, settled=tokens.get(left.id, 0.0)) if left.since == at else left for left in fates.limbo)
    return replace(fates, limbo=tuple(limbo))


def finished(fates: Fates, page: EnginePage | None) -> int:
    """Return how many requests the engine finished since its page was read last, 0 where that is not known."""
    if page is None or page.finished is None or fates.finished is None:
        return 0
    return int(max(page.finished - fates.finished, 0))
