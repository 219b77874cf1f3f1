"""What a run saw, and the numbers in it. Pure: clients' attempts and the exporter's looks in, numbers out.

A request that failed counts as one that took for ever: left out, the worst would make a percentile better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokengap.chaos.clients import Ask, Attempt
from tokengap.chaos.looks import Look


@dataclass(frozen=True, slots=True)
class Span:
    """From ``start`` up to ``end``, ``time.monotonic()``."""

    start: float
    end: float

    def __contains__(self, at: float) -> bool:
        return self.start <= at < self.end


@dataclass(frozen=True, slots=True)
class Evidence:
    """A run that is over. ``fault`` is from the instant at which it was applied until it was healed.

    ``at_rest`` is what ran and waited in each replica at the end, by its own account.
    ``first_token_again``: when the replica that was broken gave its first token again; None: never, or it never
    stopped.
    """

    asks: Sequence[Ask]
    looks: Sequence[Look]
    baseline: Span
    fault: Span
    recovery: Span
    at_rest: Mapping[str, int]
    first_token_again: float | None = None

    @property
    def attempts(self) -> Iterator[Attempt]:
        """All requests that were made."""
        return (attempt for ask in self.asks for attempt in ask.attempts)

    @property
    def usual_first_tokens(self) -> list[float]:
        """How long each waited for a first token who asked in the baseline and had one before it was over."""
        asked = [ask for ask in self.asks if ask.asked in self.baseline]
        firsts = [(ask.asked, ask.first_token) for ask in asked]
        return [first - at for at, first in firsts if first is not None and first < self.fault.start]

    @property
    def first_tokens(self) -> list[float]:
        """How long each waited for a first token who asked while it was broken, attempts that failed included; infinity
        where none came, or where nobody was answered in the end."""
        return [
            ask.first_token - ask.asked if ask.first_token is not None and ask.answered else math.inf
            for ask in self.asks
            if ask.asked in self.fault
        ]

    @property
    def in_flight(self) -> list[Ask]:
        """Those who had asked and were not answered yet when it broke."""
        return [ask for ask in self.asks if ask.asked < self.fault.start < ask.attempts[-1].ended]

    def inter_token_latencies(self, span: Span) -> list[float]:
        """Return the gaps between two tokens as their clients saw them, by the span in which they ended.

        A stream that broke and was asked for again has a gap from its last token to the next that came; one that was
        not has an endless one, in the span in which it broke.
        """
        return [length for ended, length in self.gaps() if ended in span]

    def gaps(self) -> Iterator[tuple[float, float]]:
        """Yield each gap: when it ended, and its length."""
        for ask in self.asks:
            last: float | None = None
            for attempt in ask.attempts:
                for arrival in attempt.arrivals:
                    if last is not None:
                        yield arrival, arrival - last
                    last = arrival
            if not ask.answered:
                yield ask.attempts[-1].ended, math.inf

    def silences(self, span: Span) -> list[float]:
        """Return for how long each request that failed in the span had heard nothing when its client was told."""
        return [
            attempt.ended - max(attempt.sent, span.start, *attempt.arrivals[-1:])
            for attempt in self.attempts
            if attempt.end not in ("completed", "left") and attempt.ended in span
        ]

    def amplification(self, span: Span) -> float:
        """Return attempts over unique requests of those who asked in the span, or were still asking when it began."""
        tried = [
            len(ask.attempts) for ask in self.asks if ask.asked < span.end and ask.attempts[-1].ended >= span.start
        ]
        return sum(tried) / len(tried) if tried else math.nan

    @property
    def held_for_nobody(self) -> float:
        """For how long at a stretch, in seconds, the exporter saw streams whose clients had gone or vanished."""
        stretches = itertools.groupby(self.looks, key=lambda look: look.for_nobody > 0)
        looks = [list(group) for held, group in stretches if held]
        return max((group[-1].at - group[0].at for group in looks), default=0.0)

    def states(self, engine: str, span: Span) -> list[tuple[float, str]]:
        """Return what the exporter said of an engine in the span, each time it said something else, and when."""
        said = [(look.at, look.engines[engine].state) for look in self.looks if look.at in span]
        return [next(group) for _, group in itertools.groupby(said, key=lambda at_state: at_state[1])]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values do not exceed (nearest rank). NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
