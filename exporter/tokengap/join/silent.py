"""Requests at work that show no byte: whose are their tokens?

The answer of a request that is not streamed comes at once, at its end, and a request without a socket never shows one.
The engine runs them in the order in which they came, so the oldest run and the youngest wait; but requests of one burst
may have reached it in another order than their sockets tell. So:

* Those that may or may not run share the slots left for them, each in part. What they are given so is in *doubt*.
* When one of them ends, the engine counts its tokens, and gives away how many they were. What it had been given too
  much goes to those it may have been mistaken for, and what it lacks comes from them.
* Tokens in doubt of a client that left are pending, not orphaned, until nobody who is still there may own them.
  With a queue and bursts that is until those who asked at the same instant have their answers, seconds mostly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokengap.join.client import VANISHED
from tokengap.join.segments import HEADER_MOST, Owned, Segments, body, in_flight
from tokengap.readings import EnginePage

#: Requests sent within so many seconds of each other may reach the engine in another order.
BURST = 0.25

#: A streamed token takes more than so many bytes (an SSE event of vLLM about 200), one in a whole answer about five.
STREAMED_BYTES = 32

#: A token in a whole answer takes at most so many bytes, on the mean.
WHOLE_BYTES = 8

#: The share of answers at once from which on a running stream without a byte may be one of them.
FEW_UNSTREAMED = 0.05

#: Beats for which requests that the engine finished wait for the streams that ended.
PATIENCE = 3

#: Doubts kept at most; of more, the oldest are taken for what they seem.
MOST_DOUBTS = 20_000


@dataclass(frozen=True, slots=True)
class Left:
    """A request whose socket closed before its end: the hop it had entered at, when it was asked for and when left,
    whether its answer had begun, and how many tokens were settled by then."""

    id: int
    hop: int
    asked: float
    since: float
    answered: bool
    settled: float = 0.0


@dataclass(frozen=True, slots=True)
class Doubt:
    """Tokens that seem to be those of a request that has no socket any more: ``lost`` while it had one, at ``hop``
    (-1: the engine), and ``ran_on`` since, at the engine."""

    id: int
    asked: float
    hop: int
    lost: float = 0.0
    ran_on: float = 0.0

    @property
    def tokens(self) -> float:
        """All of them."""
        return self.lost + self.ran_on

    def of(self, tokens: float) -> Doubt:
        """Return the same with so many tokens; what changes is what came last."""
        lost = min(self.lost, tokens)
        return replace(self, lost=lost, ran_on=tokens - lost)


@dataclass(frozen=True, slots=True)
class Told:
    """What the engine says of finished requests: its counters of them and of their tokens when last read, and those
    since then that no stream accounted for, for ``waited`` beats."""

    finished: float
    finished_tokens: float
    requests: float = 0.0
    tokens: float = 0.0
    waited: int = 0


@dataclass(frozen=True, slots=True)
class Silent:
    """Sequences at work without bytes, each with the probability that it runs.

    ``rows`` are streams (rows of the engine's segments), ``parts`` what each makes of a beat's tokens, if it runs: the
    part of it for which it was there, times the probability that its answer is one that is not streamed, and that
    it is not in prefill. ``limbo`` are requests that we saw lose their socket before their answer began.
    ``streaming`` counts those whose answer had begun, which run for certain, and ``unseen`` those that never had a
    socket here.
    """

    rows: NDArray[np.intp]
    weights: NDArray[np.float64]
    parts: NDArray[np.float64]
    limbo: tuple[Left, ...]
    limbo_weights: NDArray[np.float64]
    streaming: float
    unseen: float

    @property
    def leaked(self) -> float:
        """How many of the requests that lost their socket are expected to run."""
        return float(self.limbo_weights.sum()) + self.streaming

    @property
    def count(self) -> float:
        """How many of all are expected to make tokens."""
        return float((self.weights * self.parts).sum()) + self.leaked + self.unseen


def sequences(
    streams: Owned,
    page: EnginePage,
    before: Sequence[Left],
    now: Sequence[Left],
    *,
    share: float,
    mostly_at_once: bool,
    unseen: float,
    beat: float,
    cut: NDArray[np.bool_],
) -> Silent:
    """Find the sequences that run without bytes: of those that wait for a first byte all but the ``waiting`` youngest.

    ``before`` and ``now``: the requests in limbo a beat ago and still. What ended in between has run for a part of this
    beat, of ``beat`` seconds. ``cut``: the streams that ended in it, of which nothing told what they brought before.
    """
    seg = streams.segments
    flying = in_flight(seg)
    # Those that ended in this beat are among them: they ran for a part of it.
    mute = np.flatnonzero(np.isnan(seg["answered"]) & ~seg["trial"])
    flows = flying & (seg["fresh"] > 0)
    if mostly_at_once:  # then what brought its first bytes has brought all, and does not run any more
        flows &= seg["arrived"] < seg["supply"]
    flowing = int(flows.sum())
    limbo = {left.id: left for left in (*before, *now)}
    over = len(limbo) - len(now) + int((~flying[mute]).sum())
    quiet = tuple(left for left in limbo.values() if not left.answered)
    streaming = len(limbo) - len(quiet)
    room = int(page.running or 0) - flowing - streaming + over
    if share < FEW_UNSTREAMED:  # then a stream that runs shows it, and the tokens are those of the others
        mute = mute[flying[mute]]
        runs = max(min(len(mute) - int(page.waiting or 0), room), 0)
        weights, parts = _probabilities(seg["asked"][mute], runs), np.full(len(mute), share)
        return Silent(*_with(cut, mute, weights, parts), quiet, np.ones(len(quiet)), streaming, unseen)
    asked = np.concatenate([seg["asked"][mute], [left.asked for left in quiet]])
    weights = _probabilities(asked, max(min(len(asked) - int(page.waiting or 0), room), 0))
    parts = _parts(seg[mute], beat)
    was_there = dict(zip(seg["id"][mute[~flying[mute]]].tolist(), parts[~flying[mute]].tolist(), strict=True))
    since = np.array([1 - was_there.get(left.id, 0.0) for left in quiet])
    n = len(mute)
    return Silent(*_with(cut, mute, weights[:n], share * parts), quiet, weights[n:] * since, streaming, unseen)


def _with(
    cut: NDArray[np.bool_], rows: NDArray[np.intp], weights: NDArray[np.float64], parts: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64]]:
    """Add what ran for certain, for half of the beat on the mean."""
    more = np.setdiff1d(np.flatnonzero(cut), rows)
    ones = np.ones(len(more))
    return np.concatenate([rows, more]), np.concatenate([weights, ones]), np.concatenate([parts, ones / 2])


def _parts(seg: Segments, beat: float) -> NDArray[np.float64]:
    """Return for which part of the beat each request was there: one whose client left it, and the engine let go of, for
    the time until then, where that was in this beat."""
    missed = seg["ended"] - seg["left"]  # NaN where one of them is not known, or is not
    return np.where((missed >= 0) & (missed <= beat), 1 - missed / beat, 1.0)


def _probabilities(asked: NDArray[np.float64], runs: int) -> NDArray[np.float64]:
    """Return for each request the probability that it is among the ``runs`` first."""
    if runs >= len(asked):
        return np.ones(len(asked))
    if runs == 0:
        return np.zeros(len(asked))
    last = np.partition(asked, runs - 1)[runs - 1]
    certain = asked < last - BURST
    maybe = ~certain & (asked <= last + BURST)
    return np.where(certain, 1.0, np.where(maybe, (runs - certain.sum()) / maybe.sum(), 0.0))


def at_once(seg: Segments, tokens: float | None, beat: float) -> NDArray[np.bool_]:
    """Mark the answers that came at once, and not as a stream.

    A streamed one that fits into a beat has the bytes of one: compared with the mean length of answers, ``tokens``
    where it is known, and closely where its client left, for then it may be the beginning of one.
    """
    came = ~np.isnan(seg["answered"]) & (seg["grew"] - seg["answered"] < 0.5 * beat)
    if tokens:
        left = WHOLE_BYTES * tokens + HEADER_MOST
        came &= body(seg) < np.where(seg["client"] >= VANISHED, left, STREAMED_BYTES * tokens)
    return np.asarray(came, dtype=np.bool_)


def mean_tokens(page: EnginePage | None) -> float | None:
    """Return the mean length of all answers that the engine finished, None where its page does not tell."""
    if page is None or not page.finished or not page.finished_tokens:
        return None
    return page.finished_tokens / page.finished


def listen(told: Told | None, page: EnginePage) -> Told | None:
    """Take the engine's counters of finished requests in. None: the page does not show them."""
    if page.finished is None or page.finished_tokens is None:
        return None
    finished, tokens = page.finished, page.finished_tokens
    if told is None or finished < told.finished or tokens < told.finished_tokens:
        return Told(finished, tokens)
    requests, open_tokens, waited = told.requests, told.tokens, told.waited + 1
    if waited > PATIENCE:  # they were requests of others
        requests, open_tokens = 0.0, 0.0
    more = finished - told.finished
    return Told(
        finished,
        tokens,
        requests + more,
        open_tokens + tokens - told.finished_tokens,
        0 if more or not requests else waited,
    )


def resolve(
    told: Told,
    streams: Owned,
    doubts: Sequence[Doubt],
    ran_out: Sequence[Left],
    page: EnginePage,
    beat: float,
    pool: float,
) -> tuple[Told, Owned, tuple[Doubt, ...], float]:
    """Give those that ended the tokens that the engine counted for them, and the difference to those it may be of.

    ``ran_out``: requests in limbo that the engine finished. ``pool``: tokens that are nobody's yet; returns also what
    they are now.
    """
    seg = streams.segments.copy()
    over = ~np.isnan(seg["ended"]) & ~seg["trial"] & ~np.isnan(seg["answered"]) & ~seg["told"]
    whole = over & at_once(seg, told.tokens / told.requests if told.requests else mean_tokens(page), beat)
    streamed = over & ~whole
    seg["told"] |= over
    requests = told.requests - float(streamed.sum())
    tokens = told.tokens - float(seg["tokens"][streamed].sum())
    begun = sum(left.answered for left in ran_out)
    if requests > 0 and begun:
        tokens -= tokens / requests * min(begun, requests)
        requests -= begun
    quiet = [left for left in ran_out if not left.answered]
    mine = float(whole.sum()) + len(quiet)
    if not mine or requests < mine or tokens <= 0:
        left_over = max(requests - mine, 0.0)
        keep = tokens * left_over / requests if requests > 0 else 0.0
        told = replace(told, requests=left_over, tokens=max(keep, 0.0))
        return told, replace(streams, segments=seg), tuple(doubts), pool

    budget = tokens * mine / requests
    told = replace(told, requests=requests - mine, tokens=tokens - budget)
    by_id = {doubt.id: doubt for doubt in doubts}
    known = [by_id.pop(left.id, Doubt(left.id, left.asked, -1)) for left in quiet]
    others = list(by_id.values())
    size = np.maximum(body(seg)[whole], 1)
    settled = np.concatenate([seg["useful"][whole] + seg["orphaned"][whole], np.zeros(len(known))])
    ran_on = [max(budget / mine - left.settled, 0.0) for left in quiet]
    right = np.concatenate([budget * len(size) / mine * size / max(size.sum(), 1), ran_on])
    right = np.maximum(right, settled)
    had = float(seg["tokens"][whole].sum()) + sum(doubt.tokens for doubt in known)
    instants = np.concatenate([seg["asked"][whole], [doubt.asked for doubt in known]])
    unplaced = min(max(float(right.sum()) - had, 0.0), pool)
    had, pool = had + unplaced, pool - unplaced
    lacking = float(right.sum()) - had
    seg, others, moved = _exchange(seg, others, lacking, instants)
    if moved < lacking and right.sum() > settled.sum():  # nobody has so many: they came before we looked
        right = settled + (right - settled) * (had + moved - settled.sum()) / (right.sum() - settled.sum())
    seg["tokens"][whole] = right[: len(size)]
    known = [doubt.of(float(n)) for doubt, n in zip(known, right[len(size) :], strict=True)]
    return told, replace(streams, segments=seg), (*others, *known), pool + max(moved - lacking, 0.0)


def _exchange(
    seg: Segments, doubts: list[Doubt], lacking: float, instants: NDArray[np.float64]
) -> tuple[Segments, list[Doubt], float]:
    """Take what is lacking from others, or give them what is too much (below 0).

    From those first who asked at these ``instants`` or so, then from any. Returns how much was taken, which is less
    than lacking where nobody has more, and where nobody can be given anything.
    """
    rows = np.flatnonzero(np.isnan(seg["answered"]) & ~seg["trial"])
    unsettled = (seg["tokens"] - seg["useful"] - seg["orphaned"])[rows]
    held = np.concatenate([unsettled, [doubt.tokens for doubt in doubts]])
    asked = np.concatenate([seg["asked"][rows], [doubt.asked for doubt in doubts]])
    ran = np.concatenate([(seg["hushed"][rows] > 0) | (unsettled > 0), np.ones(len(doubts), dtype=bool)])
    change = np.zeros(len(held))
    for among in (_near(asked, instants), np.ones(len(held), dtype=bool)):
        open_ = lacking + change.sum()
        if lacking > 0:
            can = np.where(among, np.maximum(held + change, 0.0), 0.0)
            change -= can * min(open_ / can.sum(), 1.0) if can.sum() > 0 else 0.0
        else:
            to = np.where(among & ran, held + 1, 0.0)
            change -= to * open_ / to.sum() if to.sum() > 0 else 0.0
    seg["tokens"][rows] += change[: len(rows)]
    after = [doubt.of(doubt.tokens + n) for doubt, n in zip(doubts, change[len(rows) :], strict=True)]
    return seg, after, -float(change.sum())


def in_doubt(streams: Owned, share: float) -> NDArray[np.bool_]:
    """Mark the streams whose client left and whose tokens may be somebody's who is still there.

    ``share``: that of answers at once; where there are none, whoever runs shows it.
    """
    seg = streams.segments
    if share < FEW_UNSTREAMED:
        return np.zeros(len(seg), dtype=bool)
    left = (streams.client >= VANISHED) & (seg["hushed"] > 0) & ~seg["told"]
    mute = np.isnan(seg["answered"])
    came = in_flight(seg) & (seg["grew"] == seg["answered"])  # at once, and its socket's end is yet to show
    return np.asarray(left & (came | (mute & _near(seg["asked"], _candidates(streams)))), dtype=np.bool_)


def release(doubts: Iterable[Doubt], streams: Owned, share: float) -> tuple[tuple[Doubt, ...], tuple[Doubt, ...]]:
    """Return the doubts that remain, and those that do not: nobody is left who may own their tokens."""
    if share < FEW_UNSTREAMED:
        return (), tuple(doubts)
    doubts = sorted(doubts, key=lambda doubt: doubt.asked)
    near = _near(np.array([doubt.asked for doubt in doubts]), _candidates(streams))
    near[:-MOST_DOUBTS] = False
    kept = tuple(doubt for doubt, stays in zip(doubts, near, strict=True) if stays)
    return kept, tuple(doubt for doubt, stays in zip(doubts, near, strict=True) if not stays)


def _candidates(streams: Owned) -> NDArray[np.float64]:
    """Return when those asked who are there and wait for an answer."""
    seg = streams.segments
    waits = in_flight(seg) & np.isnan(seg["answered"]) & (streams.client < VANISHED)
    return np.asarray(seg["asked"][waits], dtype=np.float64)


def _near(asked: NDArray[np.float64], instants: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which requests may be mistaken for one that was sent at one of the instants."""
    if not len(instants):
        return np.zeros(len(asked), dtype=bool)
    instants = np.sort(instants)
    after = np.searchsorted(instants, asked)
    nearest = np.minimum(
        np.abs(asked - instants[np.clip(after - 1, 0, None)]),
        np.abs(asked - instants[np.clip(after, None, len(instants) - 1)]),
    )
    return np.asarray(nearest <= BURST, dtype=np.bool_)
