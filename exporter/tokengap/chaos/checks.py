"""What a system has to stand: each validation is a number, its limit and a sentence. Pure.

A validation that has too little to go by fails: the percentile of nothing is no good news.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tokengap.chaos.bench import OTHER, TARGET
from tokengap.chaos.evidence import Evidence, Span, percentile
from tokengap.chaos.looks import Look

#: What the exporter may say of a replica that nobody broke.
WELL = frozenset({"busy", "idle"})

#: Seconds after a fault in which clients' further attempts count, and within which a queue is to be back.
AFTERMATH = 120.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The thresholds. ``p99_ratio``: times the baseline. ``samples``: fewer are a failure. ``tokens``: share by which
    the exporter's useful tokens may differ from those that clients received. ``read_timeout`` is the gateway's, and
    ``margin`` what may come on top of it, for who measures and a busy host; both in seconds, as is ``queue_within``.
    ``attempts``: over unique requests. ``cold_start``: seconds, None: it is only shown."""

    p99_ratio: float = 2.0
    samples: int = 20
    tokens: float = 0.01
    read_timeout: float = 5.0
    margin: float = 1.5
    attempts: float = 1.5
    queue_within: float = AFTERMATH
    cold_start: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the exporter is to say of the replica that was broken: one of ``expected`` within so many seconds, nothing
    of ``never``. Empty: anything will do."""

    expected: frozenset[str] = frozenset()
    within: float = math.inf
    never: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Check:
    """One validation. ``judged``: whether it decides, or is only shown. ``value`` and ``limit`` are in ``unit``."""

    name: str
    passed: bool
    said: str
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    judged: bool = True

    @property
    def failed(self) -> bool:
        """Whether it decides against the run."""
        return self.judged and not self.passed


def checks(run: Evidence, limits: Limits, verdict: Verdict, shown: frozenset[str] = frozenset()) -> list[Check]:
    """Return all validations of a run, of which those named ``shown`` do not decide."""
    every = (
        _p99("first-token", run.usual_first_tokens, run.first_tokens, limits),
        _p99("inter-token", run.inter_token_latencies(run.baseline), run.inter_token_latencies(run.fault), limits),
        _ends(run),
        _in_flight(run),
        _twice(run),
        _useful(run, limits),
        _accounts(run),
        _told(run, limits),
        _next(run, limits),
        _attempts(run, limits),
        _queue(run, limits),
        _slots(run),
        _let_go(run, limits),
        *_again(run, limits),
        *_verdicts(run, verdict),
    )
    return [replace(check, judged=check.judged and check.name not in shown) for check in every]


def _p99(what: str, before: Sequence[float], during: Sequence[float], limits: Limits) -> Check:
    name, least = f"{what}-p99", min(len(before), len(during))
    if least < limits.samples:
        said = f"{len(before)} samples in the baseline, {len(during)} in the fault; it takes {limits.samples} in each"
        return Check(name, False, said, None, None, "s")
    usual, value = percentile(before, 0.99), percentile(during, 0.99)
    limit = limits.p99_ratio * usual
    lost = sum(map(math.isinf, during))
    never = f", {lost} of them never" if lost else ""
    said = f"{_seconds(value)} ({len(during)} samples{never}) after {_seconds(usual)} in the baseline"
    return Check(name, value <= limit, said, value, limit, "s")


def _ends(run: Evidence) -> Check:
    """Every stream ended whole, or with an error that its client could recognise."""
    ends = Counter(attempt.end for attempt in run.attempts)
    short = sum(
        attempt.end == "completed" and attempt.tokens < ask.max_tokens for ask in run.asks for attempt in ask.attempts
    )
    said = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    lacking = f"; {short} completed with fewer tokens than asked for" if short else ""
    return Check("clean-ends", not (ends["truncated"] or short), said + lacking, ends["truncated"] + short, 0)


def _in_flight(run: Evidence) -> Check:
    """Whoever was being answered when it broke was answered in the end, or left as they wanted."""
    asks = run.in_flight
    again = sum(len(ask.attempts) > 1 for ask in asks)
    lost = sum(not ask.answered for ask in asks)
    said = f"{len(asks)} were being answered when it broke: {again} had to ask again, {lost} were not answered at all"
    return Check("in-flight", bool(asks) and not lost, said, lost, 0)


def _twice(run: Evidence) -> Check:
    """No answer was begun again inside itself, as by a gateway that repeats what its client has had a part of."""
    twice = sum(attempt.answers > 1 or attempt.tokens > ask.max_tokens for ask in run.asks for attempt in ask.attempts)
    return Check("no-duplicates", not twice, f"{twice} answers hold the beginning of another one", twice, 0)


def _useful(run: Evidence, limits: Limits) -> Check:
    received = sum(attempt.tokens for attempt in run.attempts)
    useful = run.looks[-1].useful
    off = abs(useful - received) / received if received else math.nan
    said = f"clients received {received:,} tokens, tokengap counts {useful:,.1f} as useful: off by {off:.2%}"
    return Check("tokens-agree", off <= limits.tokens, said, off, limits.tokens, "share")


def _accounts(run: Evidence) -> Check:
    """What the engines generated stands on one account, and on no other, across the failure too."""
    worst = max((abs(look.unexplained) for look in run.looks), default=math.nan)
    fell = sum(
        late.out < early.out or late.useful < early.useful
        for early, late in zip(run.looks, run.looks[1:], strict=False)
    )
    last = run.looks[-1]
    said = (
        f"out {last.out:,.1f} = useful {last.useful:,.1f} + orphaned {last.orphaned:,.1f} + pending {last.pending:,.1f}"
        f" + unattributed {last.unattributed:,.1f}, off by {worst:.2f} at most; totals fell {fell} times"
    )
    return Check("accounts-balance", worst <= 0.5 and not fell, said, round(worst, 3), 0.5)


def _told(run: Evidence, limits: Limits) -> Check:
    silences = run.silences(Span(run.fault.start, run.recovery.end))
    limit = limits.read_timeout + limits.margin
    worst = max(silences, default=0.0)
    said = f"{len(silences)} requests failed; the longest silence before a client was told was {_seconds(worst)}"
    return Check("fail-fast", worst <= limit, said, worst, limit, "s")


def _next(run: Evidence, limits: Limits) -> Check:
    """Whoever asked first after the fault had a token within the read timeout and what it usually takes."""
    first = min((ask for ask in run.asks if ask.asked in run.fault), key=lambda ask: ask.asked, default=None)
    usual = percentile(run.usual_first_tokens, 0.99)
    limit = limits.read_timeout + limits.margin + usual
    if first is None:
        return Check("next-request", False, "nobody asked anything while it was broken", None, limit, "s")
    came = first.first_token
    value = math.inf if came is None else came - first.asked
    said = f"the first to ask after the fault had a token after {_seconds(value)}, in {len(first.attempts)} attempts"
    return Check("next-request", value <= limit, said, value, limit, "s")


def _attempts(run: Evidence, limits: Limits) -> Check:
    span = Span(run.fault.start, min(run.fault.end + AFTERMATH, run.recovery.end))
    value = run.amplification(span)
    said = f"{value:.2f} attempts for each request, in the {span.end - span.start:.0f} s since it broke"
    return Check("retry-storm", value <= limits.attempts, said, value, limits.attempts)


def _queue(run: Evidence, limits: Limits) -> Check:
    usual = max((_waiting(look) for look in run.looks if look.at in run.baseline), default=0.0)
    after = [look for look in run.looks if look.at >= run.fault.end]
    long = [look.at for look in after if _waiting(look) > usual]
    value = long[-1] - run.fault.end if long else 0.0
    back = bool(after) and _waiting(after[-1]) <= usual
    said = f"{usual:g} waited at most in the baseline; it was so again {_seconds(value)} after the end of the fault"
    if not back:
        said = f"{usual:g} waited at most in the baseline, and it was not so again"
    return Check("queue-back", back and value <= limits.queue_within, said, value, limits.queue_within, "s")


def _waiting(look: Look) -> float:
    return sum(engine.waiting or 0.0 for engine in look.engines.values())


def _slots(run: Evidence) -> Check:
    """At the end nobody asks any more, and no slot is held, as the replicas say themselves and as the exporter says."""
    held = sum(run.at_rest.values())
    seen = sum(engine.running or 0.0 for engine in run.looks[-1].engines.values())
    streams = sum(run.looks[-1].clients.values())
    said = f"at rest {held} sequences are in the engines; tokengap says {seen:g} run, and {streams:g} streams are open"
    return Check("slots-released", not (held or seen or streams), said, held, 0)


def _let_go(run: Evidence, limits: Limits) -> Check:
    """Who had gone was let go within the read timeout, so that no slot was held for nobody meanwhile."""
    limit = limits.read_timeout + limits.margin
    value, most = run.held_for_nobody, max((look.for_nobody for look in run.looks), default=0.0)
    said = f"streams of clients who had gone were held for {_seconds(value)} at a stretch, {most:g} of them at once"
    return Check("orphans-let-go", value <= limit, said, value, limit, "s")


def _again(run: Evidence, limits: Limits) -> Iterator[Check]:
    if run.first_token_again is not None:
        value = run.first_token_again - run.fault.start
        said = f"replica {TARGET} gave a token again {_seconds(value)} after it was broken"
        limit = limits.cold_start
        yield Check("cold-start", limit is None or value <= limit, said, value, limit, "s", judged=limit is not None)


def _verdicts(run: Evidence, verdict: Verdict) -> Iterator[Check]:
    said = run.states(TARGET, Span(run.fault.start, run.recovery.end))
    story = ", ".join(f"{state} {at - run.fault.start:+.1f} s" for at, state in said)
    bad = [state for _, state in said if state in verdict.never]
    seconds = next((at - run.fault.start for at, state in said if state in verdict.expected), math.inf)
    right = not bad and (not verdict.expected or seconds <= verdict.within)
    if verdict.expected or verdict.never:
        value, limit = (seconds, verdict.within) if verdict.expected else (None, None)
        wanted = " or ".join(sorted(verdict.expected)) or f"never {', '.join(sorted(verdict.never))}"
        yield Check("verdict", right, f"of {TARGET}: {story}; expected: {wanted}", value, limit, "s")
    others = {state for _, state in run.states(OTHER, Span(run.baseline.start, run.recovery.end))}
    yield Check("other-replica", others <= WELL, f"of {OTHER} it said: {', '.join(sorted(others))}")


def _seconds(value: float) -> str:
    return "for ever" if math.isinf(value) else f"{value:.3g} s"
