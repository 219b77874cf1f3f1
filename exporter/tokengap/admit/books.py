"""What became of every request: streams in flight, how they ended, and whose tokens were whose. Pure: no I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tokengap.admit.delivery import Delivery
from tokengap.topology import GATEWAY_HOP
from tokengap.view import Client, Ending, Tokens


class Entry(Protocol):
    """One request, as far as the books are concerned."""

    @property
    def engine(self) -> str:
        """The engine that it was sent to, empty while it waits."""

    @property
    def klass(self) -> str:
        """Its class."""

    @property
    def since(self) -> float:
        """When it came, monotonic."""

    @property
    def waits(self) -> bool:
        """Whether it generates and has had nothing yet."""

    @property
    def delivery(self) -> Delivery:
        """The ledger of its answer."""

    @property
    def client_state(self) -> Client:
        """Its client, as of the last look."""


@dataclass(slots=True)
class _Sum:
    out: int = 0
    useful: int = 0
    orphaned: int = 0


class Books:
    """The sums since start, and what is not final yet.

    ``only`` is the engine where there is one: then a stream that waits, and goes to no engine yet, is one of its own.
    """

    def __init__(self, only: str = "") -> None:
        self._only = only
        self.endings: Counter[tuple[str, Ending]] = Counter()
        self._sums: defaultdict[str, _Sum] = defaultdict(_Sum)
        self._in_flight: dict[Entry, None] = {}
        self._unsettled: dict[Entry, None] = {}

    def __len__(self) -> int:
        """Return how many requests are in flight."""
        return len(self._in_flight)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the requests in flight, the oldest first."""
        return iter(self._in_flight)

    def engine_of(self, entry: Entry) -> str:
        """Return the engine that an entry goes to, or will: empty while it waits and there are several."""
        return entry.engine or self._only

    def begin(self, entry: Entry) -> None:
        """A request came."""
        self._in_flight[entry] = self._unsettled[entry] = None

    def end(self, entry: Entry, how: Ending) -> None:
        """It is over."""
        del self._in_flight[entry]
        if entry.engine or how == "cancelled":  # a refused one is no stream; one that left the queue was
            self.endings[self.engine_of(entry), how] += 1

    def settle(self, entry: Entry) -> None:
        """Its ledger is final: what its client has not got now, nobody gets."""
        if self._unsettled.pop(entry, entry) is None:
            delivery, sums = entry.delivery, self._sums[entry.engine]
            sums.out += delivery.out
            sums.useful += delivery.useful
            sums.orphaned += delivery.out - delivery.useful

    def tokens(self, engine: str) -> Tokens:
        """Return the ledger of an engine: ``out = useful + orphaned + pending``."""
        sums = self._sums[engine]
        live = [entry.delivery for entry in self._unsettled if entry.engine == engine]
        out = sums.out + sum(one.out for one in live)
        useful = sums.useful + sum(one.useful for one in live)
        return Tokens(out, useful, {GATEWAY_HOP: sums.orphaned}, out - useful - sums.orphaned)
