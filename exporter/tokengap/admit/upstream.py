"""The engines' side: connections that are kept, and what each engine was found to take.

A request goes to an engine once. It is sent again only where the engine cannot have begun with it: nobody took the
connection, or it refused to tell its usage (:mod:`tokengap.admit.usage`), which it does before it generates.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import ClientResponse, ClientTimeout
from yarl import URL

from tokengap.admit.usage import ASKS, Asked, asking, refuses_to_tell
from tokengap.sources.engine import metrics_url
from tokengap.topology import Engine

#: Seconds to connect to an engine.
CONNECT_WITHIN = 5.0

#: Seconds that an unused connection to an engine is kept. uvicorn, in front of vLLM, closes them after 5: a request
#: that meets this is lost, and may not be sent again.
KEEP_FOR = 3.0

#: Bytes of a refusal that are read to see what is refused.
_REFUSAL = 64 * 1024

#: What a client does not send is not added to its request.
_NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@dataclass(slots=True, eq=False)
class Upstream:
    """One engine. ``base`` is the address below which ``/v1`` is. ``asks`` is the usage that it is asked for."""

    engine: Engine
    base: str
    asks: Asked = ASKS[0]
    in_flight: int = 0

    @property
    def name(self) -> str:
        """Its name, the value of the label ``engine``."""
        return self.engine.name


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it goes to an engine. ``asks``: usage may be asked for besides, the answer is a stream of events."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    asks: bool = False


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An answer, of which the header and the bytes ``begun`` were read."""

    response: ClientResponse
    begun: bytes = b""

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        if self.begun:
            yield self.begun
        async for piece in self.response.content.iter_any():
            yield piece


class Upstreams:
    """All engines, and the connections to them."""

    def __init__(self, engines: Sequence[Engine], session: aiohttp.ClientSession) -> None:
        self._session = session
        self._all = {
            engine.name: Upstream(engine, metrics_url(engine.url).removesuffix("/metrics")) for engine in engines
        }

    def __getitem__(self, name: str) -> Upstream:
        return self._all[name]

    def by_load(self) -> list[Upstream]:
        """Return all engines, those with the fewest requests first."""
        return sorted(self._all.values(), key=lambda upstream: upstream.in_flight)

    @asynccontextmanager
    async def send(self, upstream: Upstream, request: Request) -> AsyncIterator[EngineAnswer]:
        """Send a request and give its answer, its header read. Where that is not read to its end it is cut off.

        Raises what aiohttp raises.
        """
        upstream.in_flight += 1
        answer = None
        try:
            answer = await self._asked(upstream, request)
            yield answer
        finally:
            upstream.in_flight -= 1
            if answer is not None:
                answer.response.close()  # of an answer read to its end the connection was given back already

    async def _asked(self, upstream: Upstream, request: Request) -> EngineAnswer:
        """Send it with all the usage asked for that this engine tells."""
        if not request.asks:
            return EngineAnswer(await self._sent(upstream, request, request.body))
        for asked in ASKS[ASKS.index(upstream.asks) : -1]:
            response = await self._sent(upstream, request, asking(request.body, asked))
            if response.status < 400:
                upstream.asks = asked
                return EngineAnswer(response)
            refused = await response.content.read(_REFUSAL)
            if not refuses_to_tell(response.status, refused):
                return EngineAnswer(response, refused)
            response.close()
        response = await self._sent(upstream, request, request.body)
        if response.status < 400:
            upstream.asks = "nothing"
        return EngineAnswer(response)

    async def _sent(self, upstream: Upstream, request: Request, body: bytes) -> ClientResponse:
        return await self._session.request(
            request.method,
            URL(upstream.base + request.path, encoded=True),
            headers=request.headers,
            data=body or None,
            allow_redirects=False,
            skip_auto_headers=_NOT_ADDED,
        )


@asynccontextmanager
async def open_session(silence: float) -> AsyncIterator[aiohttp.ClientSession]:
    """Give the session for all engines. ``silence``: seconds that an engine may say nothing while it has a request."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_FOR, ttl_dns_cache=10)
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_WITHIN, sock_read=silence)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    ) as session:
        yield session
