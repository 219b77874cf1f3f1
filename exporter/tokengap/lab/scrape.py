"""What an exporter says, read from its ``/metrics`` as any scraper reads it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Never, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tokengap.errors import SetupError
from tokengap.series import engines, itself, queue, streams, tokens
from tokengap.series.declare import Series

T = TypeVar("T")

#: Seconds within which an exporter answers a scrape, or does not.
DEADLINE = 5.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """The page of one beat, as far as it is compared with the truth. None: not on the page, so not known.

    ``beat_at`` is the instant of the beat on this host's monotonic clock. Totals are summed over engines, and of gauges
    the worst counts: the oldest stream, the lowest share of clients at a hop, the longest queue, the least slack.
    ``requests``: running and waiting, as the engine says.
    ``orphans`` are the streams in flight whose client is gone or vanished, at the hop that has most of them.
    """

    beats: int
    late_beats: int
    beat_at: float
    tokens_out: float | None
    tokens_useful: float | None
    tokens_pending: float | None
    tokens_unattributed: float | None
    tokens_orphaned: Mapping[str, float]
    streams_ended: Mapping[str, int]
    orphans: int
    requests: float | None
    stream_age: float | None
    client_connected: float | None
    slot_utilization: float | None
    queue_age: float | None
    deadline_slack: float | None

    @property
    def gap(self) -> float | None:
        """Tokens out that are neither useful, nor pending, nor unattributed."""
        explained = (self.tokens_useful, self.tokens_pending, self.tokens_unattributed)
        if self.tokens_out is None or None in explained:
            return None
        return self.tokens_out - sum(part for part in explained if part is not None)


class Page:
    """A page, taken apart: the samples of each series."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def values(self, series: Series) -> list[float]:
        """Return the values of all samples of a series."""
        return [value for _, value in self._samples.get(series.name, ())]

    def total(self, series: Series) -> float | None:
        """Return the sum of a series, None when it is not on the page."""
        found = self.values(series)
        return sum(found) if found else None

    def by(self, series: Series, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a series by the values of these labels."""
        sums: dict[tuple[str, ...], float] = {}
        for has, value in self._samples.get(series.name, ()):
            key = tuple(has[label] for label in labels)
            sums[key] = sums.get(key, 0.0) + value
        return sums


def read_page(text: str, wall_ahead: float) -> Scrape:
    """Read a page. ``wall_ahead`` is Unix time minus monotonic time. ValueError when it is no exporter's of ours."""
    page = Page(text)
    values, total, by = page.values, page.total, page.by
    beats, beat_wall = total(itself.BEATS), total(itself.LAST_BEAT)
    if beats is None or beat_wall is None:
        raise ValueError(f"there is no {itself.BEATS} on the page")
    orphans: dict[str, float] = {}
    for (hop, client), count in by(streams.STREAMS, "hop", "client").items():
        orphans[hop] = orphans.get(hop, 0.0) + count * (client in ("gone", "vanished"))
    in_engine = (total(engines.ENGINE_RUNNING), total(engines.ENGINE_WAITING))
    return Scrape(
        beats=int(beats),
        late_beats=int(total(itself.BEATS_LATE) or 0),
        beat_at=beat_wall - wall_ahead,
        tokens_out=total(tokens.TOKENS_OUT),
        tokens_useful=total(tokens.TOKENS_USEFUL),
        tokens_pending=total(tokens.TOKENS_PENDING),
        tokens_unattributed=total(tokens.TOKENS_UNATTRIBUTED),
        tokens_orphaned={hop: value for (hop,), value in by(tokens.TOKENS_ORPHANED, "hop").items()},
        streams_ended={how: int(count) for (how,), count in by(streams.STREAMS_ENDED, "how").items()},
        orphans=int(max(orphans.values(), default=0)),
        requests=None if None in in_engine else sum(part for part in in_engine if part is not None),
        stream_age=max(values(streams.STREAM_AGE_MAX), default=None),
        client_connected=min(values(streams.CLIENT_CONNECTED), default=None),
        slot_utilization=max(values(queue.SLOT_UTILIZATION), default=None),
        queue_age=max(values(queue.QUEUE_AGE), default=None),
        deadline_slack=min(values(queue.DEADLINE_SLACK), default=None),
    )


class Exporter:
    """The scraper of one exporter."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session
        self._deadline = aiohttp.ClientTimeout(total=DEADLINE)

    async def scrape(self) -> Scrape:
        """Read the page. Raises SetupError when there is none: what is to be compared with the truth has failed."""
        return await self.read(lambda text: read_page(text, time.time() - time.monotonic()))

    async def read(self, reads: Callable[[str], T]) -> T:
        """Get the page and return what ``reads`` makes of it. Raises SetupError."""
        try:
            async with self._session.get(f"{self.url}/metrics", timeout=self._deadline) as answer:
                answer.raise_for_status()
                return reads(await answer.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise SetupError(f"{self.url}/metrics cannot be read: {error or type(error).__name__}") from error

    async def scrape_for_ever(self, every: float, take: Callable[[Scrape], None]) -> Never:
        """Hand a scrape to ``take`` at once and then every so many seconds, counted from now and not from the last."""
        due = time.monotonic()
        while True:
            take(await self.scrape())
            due += every
            await asyncio.sleep(due - time.monotonic())

    async def ready(self, within: float = 20.0) -> None:
        """Wait for its first beat. SetupError when it does not come."""
        deadline = time.monotonic() + within
        while True:
            try:
                async with self._session.get(f"{self.url}/-/ready", timeout=self._deadline) as answer:
                    if answer.status == 200:
                        return
                    said = await answer.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                said = str(error)
            if time.monotonic() > deadline:
                raise SetupError(f"{self.url} is not ready after {within:g} s: {said.strip()}")
            await asyncio.sleep(0.1)

    async def beats(self, count: int, within: float = 30.0) -> Scrape:
        """Wait until it has beaten ``count`` times more, and return what it says then."""
        deadline = time.monotonic() + within
        first = scrape = await self.scrape()
        while scrape.beats < first.beats + count:
            if time.monotonic() > deadline:
                raise SetupError(f"{self.url} has stopped beating: {scrape.beats - first.beats} beats in {within:g} s")
            await asyncio.sleep(0.1)
            scrape = await self.scrape()
        return scrape
