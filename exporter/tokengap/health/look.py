"""One engine, looked at a few times and put to the judge; one proxy, asked for its models.

An engine is asked for its page and nothing else. The reads, and what each is for:

=========================  ====================================================================================
read                       for
=========================  ====================================================================================
three glances, 0.2 s       an engine that works has moved by then, and one at rest is at rest; several backends
apart                      that take turns behind one address show twice
four more glances          a new set of counters: a restart does not go back to the old ones, a balancer does
one window later           work in flight and nothing moved; no page came; or a completion may be sent to an
                           engine at rest
another window later       still nothing moved: two windows make an engine stuck
=========================  ====================================================================================

Each on a connection of its own. What the pages mean is decided in :mod:`tokengap.join.verdict` and nowhere else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import aiohttp

from tokengap.beat import Asker
from tokengap.errors import SourceError, SourceRefused
from tokengap.health.access import Access, Answer, request
from tokengap.health.others import Connections, Others
from tokengap.join.verdict import WINDOWS, Judgement, VerdictState, judge
from tokengap.readings import EnginePage
from tokengap.sources.engine import EngineSource, metrics_url, resolve
from tokengap.topology import Engine, Limits
from tokengap.view import EngineState

#: Reads at once, to begin with and where counters began anew; seconds between them (a twentieth of a short window).
GLANCES: Final = 3
MORE_GLANCES: Final = 4
GLANCE: Final = 0.2
#: Seconds of one read from which on a server is too slow to be asked again at once.
SLOW: Final = 1.0

#: What is said of a proxy that answers; the other words are those of engines.
Verdict: TypeAlias = EngineState | Literal["answers"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to look. All times in seconds.

    ``timeout`` is for one read. ``prefill_budget``: how long what runs may show nothing, since it may be a prompt in
    the making; None: two windows, and the judge's own budget for an engine that has never made a token.
    ``ask_within``: an engine at rest is sent a completion that has so long to be answered; None: it is not.
    """

    window: float = 10.0
    timeout: float = 5.0
    prefill_budget: float | None = None
    ask_within: float | None = None

    @property
    def limits(self) -> Limits:
        """The judge's limits."""
        limits = Limits(window=self.window)
        return limits if self.prefill_budget is None else replace(limits, prefill_budget=self.prefill_budget)

    @property
    def windows(self) -> int:
        """How many windows to look for, at most."""
        return max(WINDOWS, math.ceil((self.prefill_budget or 0.0) / self.window))

    @property
    def longest(self) -> float:
        """Seconds that a look can take at most, without a completion."""
        quick = (GLANCES + MORE_GLANCES) * (SLOW + self.glance)
        return quick + (self.windows + 3) * self.timeout + self.windows * self.window

    @property
    def glance(self) -> float:
        """Seconds between two glances."""
        return min(GLANCE, self.window / 20)


class Look:
    """One engine and what the judge remembers of it. ``tell`` gets a sentence whenever a read has to be waited for."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        plan: Plan,
        connections: Connections,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.plan, self.session, self._connections, self._tell = plan, session, connections, tell
        self.api = metrics_url(url).removesuffix("/metrics")
        self.reads = 0
        self.page: EnginePage | None = None  # of the newest read; None: it brought none
        self.others: Others | None = None
        self.moved = False
        self.restarts = 0
        self._working: Judgement | None = None  # the newest that saw the engine at work
        self._url = url
        self._source = EngineSource(Engine("engine", url, ()), session, deadline=plan.timeout, longest=plan.timeout)
        self._asker: Asker[EnginePage] = Asker("engine")
        self._state = VerdictState(prefilling=plan.prefill_budget is not None)
        self._port: int | None = None
        self._served_here: bool | None = None
        self._nobody = False  # at some read since the last progress nobody was connected
        self._read_at = self._took = 0.0
        self._refusals = 0

    async def decide(self) -> Judgement:
        """Read until the verdict is clear, two windows at most (or the prefill budget)."""
        await self._find()
        judgement = await self._glances(GLANCES)
        for windows in range(self.plan.windows + 1):
            if judgement.restarts > self.restarts:
                self.restarts = judgement.restarts
                judgement = await self._glances(MORE_GLANCES)
            if self._clear(judgement, windows) or windows == self.plan.windows:
                break
            self._tell(f"{judgement.state}, {judgement.evidence}: looking again in {self.plan.window:g} s")
            await self.wait(self.plan.window)
            judgement = await self.read()
        if judgement.state == "busy" and not judgement.moved and self._working is not None:
            return self._working  # a glance ago: what moved says more than that nothing did since
        return judgement

    async def read(self, *, streams: int | None = None, limits: Limits | None = None) -> Judgement:
        """Read the page and judge. ``streams``: requests of our own that are open, where there are any."""
        if streams is None and self._port is not None:
            self.others = await self._connections.to(self._port)
        # The source keeps the deadline; the second more is for what would be a fault of it.
        reading = await self._asker.ask(self._source.read, self.plan.timeout + 1.0)
        self.reads += 1
        self.page, self._read_at, self._took = reading.value, reading.at, reading.took
        self._refusals = self._refusals + 1 if reading.refused else 0
        self._state, judgement = judge(
            self._state,
            at=time.monotonic(),
            reading=reading,
            open_streams=streams if streams is not None else await self._none_open(),
            open_flowing=False,
            limits=limits or self.plan.limits,
        )
        if judgement.moved:
            self.moved = True
            self._working = judgement if judgement.state == "busy" else None
        self._nobody &= not judgement.moved
        return judgement

    async def wait(self, seconds: float) -> None:
        """Wait until so long after the newest read came."""
        await asyncio.sleep(self.due_in(seconds))

    def due_in(self, seconds: float) -> float:
        """Return the time until so long after the newest read came."""
        return max(0.0, self._read_at + seconds - time.monotonic())

    async def _find(self) -> None:
        """Note the engine's port where it is on this host."""
        try:
            async with asyncio.timeout(self.plan.timeout):
                endpoints = await resolve(self._url)
        except (SourceError, TimeoutError):
            return  # the read will say it
        self._port = next((endpoint.port for endpoint in endpoints if endpoint.address is None), None)

    async def _glances(self, count: int) -> Judgement:
        for glance in range(count):
            if glance:
                await self.wait(self.plan.glance)
            judgement = await self.read()
            if self._took > SLOW:
                break
        return judgement

    async def _none_open(self) -> int | None:
        """Return 0 where nobody waits for what the page shows in flight, None where somebody does or may.

        A connection may be at rest, a scraper's. So one moment without any is enough, as long as nothing has moved
        since: whoever came after it is not among what the page shows.
        """
        if self._port is None or self.others is None or self.page is None or not self.page.requests:
            return None
        if not self.others.connections and not self._nobody:
            if self._served_here is None:
                self._served_here = await self._connections.complete(self._port)
            self._nobody = self._served_here
        return 0 if self._nobody else None

    def _clear(self, judgement: Judgement, windows: int) -> bool:
        """Tell whether reading on would add nothing that matters, ``windows`` after the glances."""
        match judgement.state:
            case "busy":
                return self.moved
            case "idle":
                return windows > 0 or self.plan.ask_within is None
            case "dead":
                return windows > 0 or self._refusals >= GLANCES
            case "blind":
                return windows > 0 or self.page is not None
            case _:
                return True


async def models(session: aiohttp.ClientSession, api: str, within: float) -> tuple[str, ...]:
    """Return the names that ``/v1/models`` lists. Raises SourceError when it does not."""
    answer = await request(session, "GET", f"{api}/v1/models", within=within)
    if answer.status != 200:
        raise SourceError(f"/v1/models: {http(answer)}")
    try:
        return tuple(str(model["id"]) for model in answer.json()["data"])
    except (ValueError, KeyError, TypeError):
        raise SourceError("/v1/models: the answer is no list of models") from None


def http(answer: Answer) -> str:
    """Say what an answer was: ``HTTP 404, The model `m` does not exist.``"""
    return f"HTTP {answer.status}" + (f", {answer.said}" if answer.said else "")


async def look_at_proxy(url: str, access: Access, plan: Plan) -> tuple[Verdict, str]:
    """Return whether a proxy passes on the list of models, and what that rests on; a refused connection twice."""
    api = metrics_url(url).removesuffix("/metrics")
    async with access.session(url) as session:
        for last in (False, True):
            try:
                names = await models(session, api, plan.timeout)
            except SourceError as error:
                if isinstance(error, SourceRefused) and not last:
                    await asyncio.sleep(plan.glance)
                    continue
                return "dead" if isinstance(error, SourceRefused) else "blind", str(error)
            return "answers", f"/v1/models lists {', '.join(names) or 'no model'}"
    raise AssertionError("the second try returns")
