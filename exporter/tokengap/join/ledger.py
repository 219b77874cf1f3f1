"""The token ledger of one engine: whose tokens were they, and did anybody get them?

Every token the engine counts is credited to a stream, to the engine's own leak, or to nobody we can see, and moves once
it is delivered or lost. So ``out = useful + orphaned + pending + unattributed`` holds by construction; a property test
holds us to it.

Crediting, per beat (``pool`` is what the counter grew by, and what could not be placed before):

1. Streams that received bytes share the pool in proportion to those bytes: continuous batching streams every token.
2. Sequences that run and show no byte (answers that are not streamed, a prefill) and requests that the engine runs with
   no socket open for them are *silent*. While there are any, the flowing streams get only what their bytes are worth,
   at the bytes per token learned while there were none; the silent ones share the rest. Which of them run, and when the
   shares are corrected: :mod:`~tokengap.join.silent`.
3. Tokens without any stream to give them to wait for :data:`PATIENCE` beats (sockets are read before the pages, so a
   token's bytes may show one beat later), then they are unattributed.

Settling, per stream: what the client acknowledged is useful; what it did not is pending while it is there, and orphaned
once it is not and it is certain that the tokens were its.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tokengap.join.client import GONE, VANISHED
from tokengap.join.segments import LAST_BYTES, Owned, Segments, body, got_more_than_came, in_flight, seems_over
from tokengap.join.silent import (
    STREAMED_BYTES,
    Doubt,
    Left,
    Silent,
    Told,
    at_once,
    in_doubt,
    listen,
    mean_tokens,
    release,
    resolve,
)
from tokengap.readings import EnginePage
from tokengap.view import Tokens

#: Beats for which tokens wait for the bytes they came as.
PATIENCE = 3

#: Differences between counted tokens and the worth of bytes below this are noise, not a silent sequence at work.
NOISE_SHARE, NOISE_TOKENS = 0.10, 2.0

#: The share of the tokens of a beat that may have been counted before their bytes came, while answers go on: the page
#: was read late, or the proxy did not read.
AHEAD_SHARE = 0.75

#: A beat whose tokens differ by more than such a share from what its bytes seem worth counts so much less for what
#: they are worth: either that is wrong, or the proxy did not read for a while.
TELLING_SHARE, ODD_WEIGHT = 0.5, 0.1

#: Tokens from which on their bytes tell something.
LEAST_LEARNED = 8.0

#: By which share of a beat the page may be read earlier or later after the sockets than in the beat before, and the
#: beat still tell what bytes are worth.
EVEN_SHARE = 0.02

#: The share of answers at once from which on first bytes are taken for a whole answer.
MOSTLY_AT_ONCE = 0.5

#: How fast what was learned about bytes per token fades, per beat.
FADE = 0.95


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is remembered of one engine's tokens between beats.

    ``counter`` and ``born`` are the page's token counter and start time when last read; ``pool`` the tokens not yet
    placed, for ``waited`` beats; ``ahead`` of them were counted before their bytes came, for the page was read ``lag``
    seconds after the sockets (0 where no answer went on). ``learned`` holds bytes and tokens seen together while
    nothing was silent, ``answers`` how many streams came at once and how many ended at all. ``unseen``: requests that
    never had a socket here, in the beat before. ``owed`` are streams that ended while the page could not be read.
    ``doubts`` are tokens of requests that have no socket any more, and ``told`` what the engine counted, as in
    :mod:`~tokengap.join.silent`. ``unfinished`` are tokens of requests that never finished, as the engine's own
    counters tell when it is at rest, and ``difference`` what these showed then; None until they did.
    """

    tokens: Tokens = field(default_factory=Tokens)
    counter: float | None = None
    born: float | None = None
    pool: float = 0.0
    waited: int = 0
    ahead: float = 0.0
    lag: float = 0.0
    learned: tuple[float, float] = (0.0, 0.0)
    answers: tuple[float, float] = (0.0, 0.0)
    unseen: float = 0.0
    owed: Owned | None = None
    doubts: tuple[Doubt, ...] = ()
    told: Told | None = None
    unfinished: float | None = None
    difference: float | None = None

    @property
    def bytes_per_token(self) -> float | None:
        """Body bytes of a streamed token on this engine, None until learned."""
        received, tokens = self.learned
        return received / tokens if tokens >= LEAST_LEARNED else None

    @property
    def unstreamed(self) -> float:
        """The share of answers that come at once, 1 while none was seen."""
        at_once, all_ = self.answers
        return at_once / all_ if all_ else 1.0

    @property
    def mostly_at_once(self) -> bool:
        """First bytes are the whole answer, by all that was seen."""
        return self.answers[1] > 0 and self.unstreamed >= MOSTLY_AT_ONCE


def count(ledger: Ledger, page: EnginePage) -> Ledger:
    """Take the page's counter in. A counter that fell, or another start time, is a new beginning: its value is the new
    base and nothing is added, for nobody knows what was lost, or whether it is the same process."""
    counter = page.generation_tokens
    if counter is None:
        return ledger
    born = page.start_time if page.start_time is not None else page.created
    same = ledger.counter is not None and born == ledger.born and counter >= ledger.counter
    grown = counter - ledger.counter if same and ledger.counter is not None else 0.0
    tokens = replace(ledger.tokens, out=ledger.tokens.out + grown, pending=ledger.tokens.pending + grown)
    return replace(ledger, tokens=tokens, counter=counter, born=born, pool=ledger.pool + grown)


def cross_check(ledger: Ledger, page: EnginePage) -> Ledger:
    """Read off the engine's own counters how many tokens it generated for requests that never finished.

    What it generated less what its finished requests had is, while it has none in flight, the tokens of those that were
    aborted (a real vLLM 0.32.0: 16,092 - 16,000 = 92, and the two clients that left had got 56 and 36). No socket is
    needed for it, and it knows no client: a check of the tokens that cancelled streams left behind.
    """
    if page.running is None or page.requests or page.generation_tokens is None or page.finished_tokens is None:
        return ledger
    difference = page.generation_tokens - page.finished_tokens
    before = difference if ledger.difference is None else ledger.difference
    grown = max(difference - before, 0.0)  # it fell: the counters began anew
    return replace(ledger, difference=difference, unfinished=(ledger.unfinished or 0.0) + grown)


def take_back(ledger: Ledger, segments: Segments) -> Ledger:
    """Put the tokens of what turned out to be no stream back into the pool."""
    tokens = segments["tokens"] - segments["useful"] - segments["orphaned"]
    return replace(ledger, pool=ledger.pool + float(tokens.sum()))


def credit(
    ledger: Ledger, streams: Owned, silent: Silent, hops: tuple[str, ...], *, alone: bool, lag: float, beat: float
) -> tuple[Ledger, Owned]:
    """Give the pool to the streams that earned it. Returns the streams with their tokens; bytes are used up.

    ``streams`` are those in flight and those that ended since the beat before; ``hops`` names indices, last "engine".
    ``alone``: the engine has no request but these, so what their bytes are worth can be learned; most from two beats in
    which the page was read as long after the sockets (``lag`` seconds). ``beat`` is the seconds between two beats.
    """
    seg = streams.segments.copy()
    pool = ledger.pool
    earning = np.where(seg["trial"], 0.0, seg["fresh"])
    bytes_ = float(earning.sum())
    worth = bytes_ / ledger.bytes_per_token if ledger.bytes_per_token else None
    flowing = int((earning > 0).sum())
    goes_on = bool((np.isnan(seg["ended"]) & (earning > 0)).any())
    lag = lag if goes_on else 0.0  # when nothing comes any more, nothing is outstanding
    even = abs(lag - ledger.lag) <= EVEN_SHARE * beat
    stranger_free = alone and silent.leaked + silent.unseen == 0 and not ledger.mostly_at_once
    of_this_beat = not (earning > seg["arrived"]).any()  # else what was on trial before is among them

    ahead = 0.0
    if bytes_ <= 0:
        seen = 0.0
    elif silent.count == 0 or (worth is None and stranger_free and bytes_ >= STREAMED_BYTES * pool):
        if worth is not None and stranger_free and goes_on:
            ahead = _ahead(pool, worth, pool - ledger.ahead, even=even, lag_share=max(lag, 0.0) / beat)
        seen = pool - ahead
    elif worth is None:
        seen = pool * flowing / (flowing + silent.count)
    else:
        seen = min(worth, pool)
        if not silent.leaked and pool - seen <= max(NOISE_TOKENS, NOISE_SHARE * pool):
            seen = pool
    if seen > 0:
        seg["tokens"] += seen * earning / bytes_

    rest = pool - seen
    orphaned = dict(ledger.tokens.orphaned)
    unattributed = ledger.tokens.unattributed
    waited = 0
    doubts = ledger.doubts
    if rest > 0 and silent.count > 0:
        each = rest / silent.count
        given = each * silent.weights * silent.parts
        seg["tokens"][silent.rows] += given
        seg["hushed"][silent.rows] += np.where(silent.weights < 1, given, 0.0)
        doubts = _ran_on(doubts, silent, each)
        if silent.streaming:
            orphaned[hops[-1]] = orphaned.get(hops[-1], 0.0) + each * silent.streaming
        unattributed += each * silent.unseen
        rest = 0.0
        ahead = 0.0
    elif rest > 0 and not ahead:
        waited = ledger.waited + 1
        if waited > PATIENCE:
            unattributed += rest
            rest, waited = 0.0, 0

    learned = ledger.learned
    if bytes_ > 0 and pool > 0 and stranger_free and of_this_beat and seen + ahead == pool:
        tokens = pool - ledger.ahead
        if even:
            odd = worth is not None and abs(tokens - worth) > TELLING_SHARE * max(tokens, worth)
            weight = ODD_WEIGHT if odd else 1.0
            learned = (FADE * learned[0] + weight * bytes_, FADE * learned[1] + weight * tokens)
        elif worth is None and tokens >= LEAST_LEARNED:  # better than nothing
            learned = (bytes_ * LEAST_LEARNED / tokens, LEAST_LEARNED)
    # Bytes that met a page are used up, with or without tokens; those on trial wait for the verdict on their stream.
    seg["fresh"] = np.where(seg["trial"], seg["fresh"], 0.0)
    split = replace(ledger.tokens, orphaned=orphaned, unattributed=unattributed)
    ledger = replace(
        ledger, tokens=split, pool=rest, waited=waited, ahead=ahead, lag=lag, learned=learned, doubts=doubts
    )
    return ledger, replace(streams, segments=seg)


def _ahead(pool: float, worth: float, grown: float, *, even: bool, lag_share: float) -> float:
    """Return how many tokens of the ``pool`` were counted before their bytes came, of which ``worth`` did.

    ``grown``: those of this beat. ``even``: the page came as late as in the beat before, ``lag_share`` of a beat. Then
    the pool fits the bytes but for noise; and where those of this beat do, no more is ahead than that lag explains.
    """
    if even and pool - worth <= NOISE_SHARE * pool:
        return 0.0
    agrees = even and grown - worth <= NOISE_SHARE * grown
    return min(max(pool - worth, 0.0), (min(lag_share, AHEAD_SHARE) if agrees else AHEAD_SHARE) * pool)


def _ran_on(doubts: tuple[Doubt, ...], silent: Silent, each: float) -> tuple[Doubt, ...]:
    """Give requests without a socket their tokens."""
    by_id = {doubt.id: doubt for doubt in doubts}
    for left, weight in zip(silent.limbo, silent.limbo_weights, strict=True):
        doubt = by_id.get(left.id, Doubt(left.id, left.asked, -1))
        by_id[left.id] = replace(doubt, ran_on=doubt.ran_on + each * float(weight))
    return tuple(by_id.values())


def correct(
    ledger: Ledger, streams: Owned, page: EnginePage, ran_out: Sequence[Left], beat: float
) -> tuple[Ledger, Owned]:
    """Put right what was given to silent sequences, by what the engine counted for those that have ended.

    ``ran_out``: requests without a socket that the engine finished; ``beat`` is the seconds between two beats.
    """
    told = listen(ledger.told, page)
    if told is None:
        return ledger, streams
    told, streams, doubts, pool = resolve(told, streams, ledger.doubts, ran_out, page, beat, ledger.pool)
    return replace(ledger, told=told, doubts=doubts, pool=pool), streams


def settle(ledger: Ledger, streams: Owned, hops: tuple[str, ...]) -> tuple[Ledger, Owned]:
    """Move each stream's tokens to useful, orphaned or, when it ended unseen, unattributed; the rest is pending.

    Nothing ever moves back: a client that was taken for gone and is not keeps what was lost to it as lost.
    """
    seg = streams.segments.copy()
    answer = body(seg)
    late = np.divide(seg["behind"], answer, out=np.ones(len(seg)), where=answer > 0)
    untold = np.divide(seg["untold"], answer, out=np.zeros(len(seg)), where=answer > 0)
    ended = ~np.isnan(seg["ended"]) & ~seg["draining"]
    left = streams.client >= VANISHED
    listening = (streams.client >= 0) & ~left

    has_all = (streams.client == GONE) & ~np.isnan(seg["answered"])
    has_all &= seg["behind"] <= np.minimum(LAST_BYTES, seg["acked"])
    has_all |= (streams.client == GONE) & got_more_than_came(seg)
    delivered = np.where(ended & (listening | has_all), seg["tokens"], seg["tokens"] * (1 - late))
    delivered = np.where(streams.client >= 0, delivered, 0.0)
    useful = np.maximum(seg["useful"], np.minimum(delivered, seg["tokens"] - seg["orphaned"]))
    doubtful = in_doubt(streams, ledger.unstreamed)
    open_ = in_flight(seg) & (has_all | seems_over(seg) | seg["may_read"])  # if more comes, or it ends, it will show
    hopeless = seg["tokens"] * np.where(ended, 1.0, 1 - untold) - useful
    orphaned = np.maximum(seg["orphaned"], np.where(left & ~doubtful & ~open_, hopeless, 0.0))
    lost = np.where(ended & (streams.client < 0), seg["tokens"] - useful - orphaned, 0.0)

    tokens = ledger.tokens
    by_hop = dict(tokens.orphaned)
    d_orphaned = orphaned - seg["orphaned"]
    for hop in np.unique(streams.leaks_at[d_orphaned > 0]):
        name = hops[hop]
        by_hop[name] = by_hop.get(name, 0.0) + float(d_orphaned[streams.leaks_at == hop].sum())
    d_useful = float((useful - seg["useful"]).sum())
    unsure = np.where(doubtful & ended, seg["tokens"] - useful - orphaned, 0.0)
    by_id = {doubt.id: doubt for doubt in ledger.doubts}
    for i in np.flatnonzero(unsure > 0):
        doubt = by_id.get(int(seg["id"][i]), Doubt(int(seg["id"][i]), float(seg["asked"][i]), -1))
        by_id[doubt.id] = replace(doubt, hop=int(streams.leaks_at[i]), lost=doubt.lost + float(unsure[i]))
    seg["tokens"] -= lost + unsure
    seg["useful"], seg["orphaned"] = useful, orphaned
    doubts, certain = release(by_id.values(), streams, ledger.unstreamed)
    for doubt in certain:
        by_hop[hops[doubt.hop]] = by_hop.get(hops[doubt.hop], 0.0) + doubt.lost
        by_hop[hops[-1]] = by_hop.get(hops[-1], 0.0) + doubt.ran_on
    pending = float((seg["tokens"] - useful - orphaned).sum()) + ledger.pool + sum(doubt.tokens for doubt in doubts)
    tokens = replace(
        tokens,
        useful=tokens.useful + d_useful,
        orphaned=by_hop,
        unattributed=tokens.unattributed + float(lost.sum()),
        pending=max(pending, 0.0),
    )
    return replace(ledger, tokens=tokens, doubts=doubts), replace(streams, segments=seg)


def learn_answers(ledger: Ledger, streams: Owned, page: EnginePage | None, at: float, beat: float) -> Ledger:
    """Note how the answers that ended in this beat had come: streamed, or at once."""
    seg = streams.segments
    over = (seg["ended"] == at) & ~seg["trial"] & ~np.isnan(seg["answered"])
    whole = over & at_once(seg, mean_tokens(page), beat)
    fade = FADE if over.any() else 1.0
    before, all_before = ledger.answers
    return replace(ledger, answers=(fade * before + int(whole.sum()), fade * all_before + int(over.sum())))


def totals(tokens: Tokens) -> Mapping[str, float]:
    """Return both sides of the identity, for tests and the JSON: ``out`` and the ``sum`` of its parts."""
    parts = tokens.useful + sum(tokens.orphaned.values()) + tokens.pending + tokens.unattributed
    return {"out": tokens.out, "sum": parts}
