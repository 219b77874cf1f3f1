"""What the exporter says of a run, again and again: one :class:`Look` is one scrape of its page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tokengap.lab.scrape import Page
from tokengap.series.engines import ENGINE_RESTARTS, ENGINE_RUNNING, ENGINE_STATE, ENGINE_WAITING
from tokengap.series.gpus import GPU_UP, THROTTLED
from tokengap.series.itself import BEATS, LAST_BEAT
from tokengap.series.queue import QUEUE_AGE, SLOT_UTILIZATION
from tokengap.series.streams import STREAMS
from tokengap.series.tokens import (
    TOKENS_ORPHANED,
    TOKENS_OUT,
    TOKENS_PENDING,
    TOKENS_UNATTRIBUTED,
    TOKENS_USEFUL,
)


@dataclass(frozen=True, slots=True)
class EngineLook:
    """One engine as the exporter sees it. None: not on the page, so not known."""

    state: str
    running: float | None
    waiting: float | None
    queue_age: float | None
    utilization: float | None
    restarts: float


@dataclass(frozen=True, slots=True)
class Look:
    """One scrape. ``at`` is when its beat was, ``time.monotonic()``. Tokens are totals of all engines since the start.

    ``clients``: streams at the gateway by the state of their client. ``gpus_up``: 1 or 0 by GPU; ``throttled``: seconds
    by GPU, for reasons of heat and power.
    """

    at: float
    beats: int
    engines: Mapping[str, EngineLook]
    out: float
    useful: float
    orphaned: float
    pending: float
    unattributed: float
    clients: Mapping[str, float]
    gpus_up: Mapping[str, float]
    throttled: Mapping[str, float]

    @property
    def for_nobody(self) -> float:
        """Streams at the gateway whose clients are not there any more."""
        return self.clients.get("gone", 0.0) + self.clients.get("vanished", 0.0)

    @property
    def unexplained(self) -> float:
        """Tokens out that are on no account; 0 or the exporter is wrong."""
        return self.out - self.useful - self.orphaned - self.pending - self.unattributed


def read_look(text: str) -> Look:
    """Read a page. ValueError when it is no exporter's of ours."""
    page = Page(text)
    beats, beat_wall = page.total(BEATS), page.total(LAST_BEAT)
    if beats is None or beat_wall is None:
        raise ValueError(f"there is no {BEATS} on the page")
    running, waiting = page.by(ENGINE_RUNNING, "engine"), page.by(ENGINE_WAITING, "engine")
    ages, utilization = page.by(QUEUE_AGE, "engine"), page.by(SLOT_UTILIZATION, "engine")
    restarts = page.by(ENGINE_RESTARTS, "engine")
    engines = {
        name: EngineLook(
            state=state,
            running=running.get((name,)),
            waiting=waiting.get((name,)),
            queue_age=ages.get((name,)),
            utilization=utilization.get((name,)),
            restarts=restarts.get((name,), 0.0),
        )
        for (name, state), on in page.by(ENGINE_STATE, "engine", "state").items()
        if on
    }
    return Look(
        at=beat_wall - (time.time() - time.monotonic()),
        beats=int(beats),
        engines=engines,
        out=page.total(TOKENS_OUT) or 0.0,
        useful=page.total(TOKENS_USEFUL) or 0.0,
        orphaned=page.total(TOKENS_ORPHANED) or 0.0,
        pending=page.total(TOKENS_PENDING) or 0.0,
        unattributed=page.total(TOKENS_UNATTRIBUTED) or 0.0,
        clients={client: count for (client,), count in page.by(STREAMS, "client").items()},
        gpus_up={uuid: up for (uuid,), up in page.by(GPU_UP, "uuid").items()},
        throttled={uuid: seconds for (uuid,), seconds in page.by(THROTTLED, "uuid").items()},
    )
