"""A drill on a system that is there already: where users go, and what its engine's own page tells of the truth."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from tokengap.errors import SettingsError, SetupError, SourceError
from tokengap.lab.report import Fields, truth_of_page
from tokengap.lab.scrape import Scrape
from tokengap.lab.users import Outcome
from tokengap.readings import EnginePage
from tokengap.sources.engine import EngineSource, resolve
from tokengap.topology import Engine

#: Seconds for one read of the engine's page.
PAGE_DEADLINE = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """A system to drill. ``address`` and ``port`` are called by users, ``hops`` is what the exporter is told."""

    address: str
    port: int
    engine_url: str
    hops: dict[str, str]


async def read_target(target: str, engine: str) -> Target:
    """Read the two URLs. Raises SettingsError when one is none, and SetupError for a target on another host.

    The exporter reads the sockets of this host, so a drill can only be judged where the proxy runs.
    """
    parts = urlsplit(target)
    if parts.scheme != "http" or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise SettingsError(f"--target: {target!r}; expected http://HOST:PORT, a drill speaks plain HTTP to /v1")
    try:
        entry, serving = await resolve(target), await resolve(engine)
    except ValueError as wrong:
        raise SettingsError(f"--target {target} --engine {engine}: {wrong}") from wrong
    except SourceError as unknown:
        raise SetupError(str(unknown)) from unknown
    if any(endpoint.address is not None for endpoint in entry):
        raise SetupError(
            f"{parts.hostname} is another host: run the drill where the proxy runs, whose sockets it reads"
        )
    port = entry[0].port
    own = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, family=socket.AF_INET)
    hops = {} if set(entry) <= set(serving) else {"edge": f":{port}"}
    return Target(str(own[0][4][0]), port, engine, hops)


class PageWitness:
    """A real engine, of which only its page is known. To be made while it is at rest."""

    def __init__(self, engine_url: str, session: aiohttp.ClientSession) -> None:
        engine = Engine("drilled", engine_url, ())
        self._source = EngineSource(engine, session, deadline=PAGE_DEADLINE)
        self._before = 0.0
        self.model = ""

    async def begin(self) -> None:
        """Note what the page says before the drill. SetupError when it has work: a drill needs it for itself."""
        page = await self._page()
        if page.generation_tokens is None or not page.models:
            raise SetupError(f"{self._source.engine.url} shows no tokens or no model of vLLM")
        if page.requests:
            raise SetupError(f"{self._source.engine.url} has {page.requests:g} requests: a drill needs it for itself")
        self._before, self.model = page.generation_tokens, page.models[0]

    async def at_rest(self) -> bool:
        """Tell whether its page says that nothing runs and nothing waits."""
        return not (await self._page()).requests

    async def truth(self, outcomes: Sequence[Outcome], _: Sequence[Scrape]) -> Fields:
        """Return the token counts, and the deadline as users saw it."""
        page = await self._page()
        return truth_of_page(outcomes, (page.generation_tokens or 0.0) - self._before)

    async def _page(self) -> EnginePage:
        try:
            return await self._source.read()
        except SourceError as error:
            raise SetupError(f"{self._source.engine.url}: {error}") from error
