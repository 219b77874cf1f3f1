"""What the stand-in engine knows about itself, and how to ask it and to turn its knobs while it runs.

The engine answers with these values as JSON under ``/lab/``; the drill reads them back into the same values. Times are
``time.monotonic()``, which on Linux (CLOCK_MONOTONIC) is one clock for all processes of a host.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tokengap.lab.batching import Knobs, State


class Sample(NamedTuple):
    """The engine at one instant, for truth over time.

    ``head_age`` is how long the head of the queue has waited, ``first_token_wait`` the longest wait among all that have
    no token yet, requests of clients that left included while the engine holds them; both 0 when nobody waits.
    """

    at: float
    running: int
    waiting: int
    head_age: float
    first_token_wait: float


@dataclass(frozen=True, slots=True)
class RequestTruth:
    """One request. ``written``: tokens handed to its client's socket. ``queue_wait``: until it started, left, or now.

    ``abandoned`` is True when its client left and the engine went on.
    """

    id: str
    state: State
    prompt_tokens: int
    max_tokens: int | None
    generated: int
    written: int
    abandoned: bool
    queue_wait: float
    arrived: float
    started: float | None
    first_token: float | None
    ended: float | None


@dataclass(frozen=True, slots=True)
class Truth:
    """The engine at the instant of ``now``.

    ``generated`` counts all tokens since start. ``requests`` are by the id that the user gave (the body's ``user``,
    else ``X-Request-Id``), the newest thousands of them; a second request with the same id (a proxy that retries)
    appears as ``id#2``. ``history`` has a sample each 0.1 s.
    """

    now: Sample
    frozen: bool
    knobs: Knobs
    generated: int
    requests: dict[str, RequestTruth]
    history: list[Sample]


def changed(knobs: Knobs, changes: dict[str, Any]) -> Knobs:
    """Return ``knobs`` with ``changes``; ValueError names a key or value that does not fit."""
    now = asdict(knobs)
    for key in changes:
        if key not in now:
            raise ValueError(f"{key}: no such knob; there are {', '.join(now)}")
    return msgspec.convert(now | changes, Knobs)


class EngineControl:
    """The ``/lab/`` side of one engine."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._url = f"http://{host}:{port}"

    async def truth(self, since: float = 0.0) -> Truth:
        """Return what the engine knows, with the history after ``since``."""
        url = f"{self._url}/lab/truth?since={since!r}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=Truth)

    async def freeze(self) -> None:
        """Stop stepping. The page and /health still answer, with values that stand still."""
        await self._post("freeze")

    async def thaw(self) -> None:
        """Step on."""
        await self._post("thaw")

    async def sleep(self, level: int = 1) -> None:
        """Put it to sleep, as an operator of vLLM does."""
        await self._post(f"sleep?level={level}", below="")

    async def wake_up(self) -> None:
        """Wake it."""
        await self._post("wake_up", below="")

    async def turn(self, **changes: Any) -> None:
        """Change knobs: names and types as in :class:`~tokengap.lab.batching.Knobs`."""
        await self._post("knobs", changes)

    async def crash(self) -> None:
        """End the engine's process without a word to anyone."""
        try:
            await self._post("crash")
        except aiohttp.ClientConnectionError:
            return  # the only answer that a crash gives
        raise AssertionError("the engine outlived its crash")

    async def _post(self, what: str, body: dict[str, Any] | None = None, *, below: str = "lab/") -> None:
        url = f"{self._url}/{below}{what}"
        async with aiohttp.ClientSession() as session, session.post(url, json=body or {}) as answer:
            if answer.status == 400:
                raise ValueError(await answer.text())
            answer.raise_for_status()
