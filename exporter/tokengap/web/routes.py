"""The routes: what is answered at which path, and to how many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import TypeAlias

from aiohttp import web

from tokengap.series.render import compress, render_named
from tokengap.view import View
from tokengap.web.api import engines_json, gpus_json, hops_json, sources_json
from tokengap.web.files import PATH as STATIC
from tokengap.web.files import page, static
from tokengap.web.negotiation import CONTENT_TYPES, choose_format, wants_gzip
from tokengap.web.now import MOST_ENGINES, matching, now_json, paged, streams_json, wanted, wanted_page
from tokengap.web.serving import Serving

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Seconds a client has to take its answer, if its place is needed. A scrape's own deadline is 10 s by default.
TAKE_DEADLINE = 15.0

#: Where the live page is: whole, and parts of it with more detail.
PAGES = ("/", "/streams", "/engines", "/gpus")

_FRESH = {"Cache-Control": "no-cache"}

#: Headers of a scrape's answer, by format and whether it is gzipped.
_SCRAPE_HEADERS = {
    (wanted, zipped): _FRESH
    | {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    | ({"Content-Encoding": "gzip"} if zipped else {})
    for wanted, content_type in CONTENT_TYPES.items()
    for zipped in (False, True)
}


def make_app(serving: Serving) -> web.Application:
    """Return the web application that shows what is published to ``serving``.

    GET and HEAD are answered, anything else is 405. The health routes are never refused: they must answer also while
    scrapers pile up.
    """
    routes, limited = _Routes(serving), _Limit(serving.limit).limited
    app = web.Application()
    app.router.add_get(serving.telemetry_path, limited(routes.metrics))
    for path in PAGES:
        if path != serving.telemetry_path:
            app.router.add_get(path, limited(routes.page))
    app.router.add_get(STATIC + "{name}", limited(routes.static))
    app.router.add_get("/api/now", limited(routes.now))
    app.router.add_get("/api/history", limited(routes.history))
    app.router.add_get("/api/streams", limited(routes.streams))
    app.router.add_get("/api/engines", limited(routes.engines))
    app.router.add_get("/api/hops", limited(routes.hops))
    app.router.add_get("/api/gpus", limited(routes.gpus))
    app.router.add_get("/api/sources", limited(routes.sources))
    app.router.add_get("/runbooks", limited(routes.to_runbooks))
    app.router.add_get("/runbooks/{name:.*}", limited(routes.runbook))
    app.router.add_get("/-/healthy", routes.healthy)
    app.router.add_get("/-/ready", routes.ready)
    return app


async def scrape(serving: Serving, request: web.BaseRequest) -> web.Response:
    """Answer a scrape with bytes that lie ready; only ``name[]`` is rendered on demand, in a thread."""
    view, page = serving.view, serving.page
    if view is None or page is None:
        return _not_yet()
    wanted = choose_format(request.headers.get("Accept", ""))
    zipped = wants_gzip(request.headers.get("Accept-Encoding", ""))
    names = request.query.getall("name[]", []) if request.query_string else []
    if names:
        as_openmetrics = wanted == "openmetrics"
        render = partial(
            render_named, view, names, as_openmetrics=as_openmetrics, also=serving.also, series=serving.series
        )
        body = await asyncio.to_thread(render)
        body = compress(body) if zipped else body
    elif wanted == "openmetrics":
        body = page.openmetrics_gzip if zipped else page.openmetrics
    else:
        body = page.text_gzip if zipped else page.text
    return web.Response(body=body, headers=_SCRAPE_HEADERS[wanted, zipped])


class _Routes:
    """The handlers, over what is served."""

    def __init__(self, serving: Serving):
        self._serving = serving

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer a scrape."""
        return await scrape(self._serving, request)

    async def page(self, _: web.Request) -> web.Response:
        """Answer with the live page. Its script shows the parts that belong to the path."""
        body = page(self._serving.telemetry_path)
        return web.Response(body=body, headers=_FRESH, content_type="text/html", charset="utf-8")

    async def static(self, request: web.Request) -> web.Response:
        """Answer with a file of the live page."""
        found = static().get(request.match_info["name"])
        if found is None:
            return web.Response(status=404, text="no such file\n")
        body, content_type = found
        return web.Response(body=body, headers=_FRESH, content_type=content_type, charset="utf-8")

    async def now(self, request: web.Request) -> web.Response:
        """Answer with all that is shown of the newest beat, and the streams that are wanted."""
        serving = self._serving
        try:
            want = wanted(request.query)
        except ValueError as error:
            return _refused(error)
        make = partial(
            now_json,
            watched=serving.watched,
            trend=serving.history.trend(),
            want=want,
            show_addresses=serving.show_addresses,
        )
        return await self._json(want, make)

    async def history(self, _: web.Request) -> web.Response:
        """Answer with the last minutes of the ledger."""
        return web.Response(body=self._serving.history.json(), headers=_FRESH, content_type="application/json")

    async def streams(self, request: web.Request) -> web.Response:
        """Answer with a row per stream that is wanted."""
        try:
            want = wanted_page(request.query)
        except ValueError as error:
            return _refused(error)
        view = self._serving.view
        headers = {} if view is None else _rest(request, len(matching(view.streams, want)), want.top, want.offset)
        make = partial(streams_json, want=want, show_addresses=self._serving.show_addresses)
        return await self._json(("streams", want), make, headers)

    async def engines(self, request: web.Request) -> web.Response:
        """Answer with a row per engine."""
        try:
            limit, offset = paged(request.query, MOST_ENGINES)
        except ValueError as error:
            return _refused(error)
        view = self._serving.view
        headers = {} if view is None else _rest(request, len(view.engines), limit, offset)
        return await self._json(("engines", limit, offset), partial(engines_json, limit=limit, offset=offset), headers)

    async def hops(self, _: web.Request) -> web.Response:
        """Answer with what proxies tell and what cannot be seen of each hop."""
        return await self._json("hops", hops_json)

    async def gpus(self, _: web.Request) -> web.Response:
        """Answer with the GPUs, or why there are none; null where they are not asked for."""
        return await self._json("gpus", gpus_json)

    async def sources(self, _: web.Request) -> web.Response:
        """Answer with a row per source."""
        return await self._json("sources", sources_json)

    async def to_runbooks(self, _: web.Request) -> web.Response:
        """Send on to the index of runbooks, where links within it are right; relative, as there may be a prefix."""
        return web.Response(status=HTTPStatus.PERMANENT_REDIRECT, headers={"Location": "runbooks/"})

    async def runbook(self, request: web.Request) -> web.Response:
        """Answer with a runbook, their index, or a page beside them; by its name, or that of its file."""
        pages = await self._serving.runbooks()
        body = pages.get(request.match_info["name"].removesuffix(".md"))
        if body is None:
            return web.Response(status=404, text="no such runbook; their index is at /runbooks/\n")
        return web.Response(body=body, headers=_FRESH, content_type="text/html", charset="utf-8")

    async def healthy(self, _: web.Request) -> web.Response:
        """Answer that this process serves. Says nothing of engines: theirs must not get the exporter restarted."""
        return web.Response(text="healthy\n")

    async def ready(self, _: web.Request) -> web.Response:
        """Answer whether there is something to scrape."""
        return web.Response(text="ready\n") if self._serving.view is not None else _not_yet()

    async def _json(
        self, key: Hashable, make: Callable[[View], bytes], headers: Mapping[str, str] = MappingProxyType({})
    ) -> web.Response:
        if self._serving.view is None:
            return _not_yet()
        body = await self._serving.once_a_view(key, make)
        return web.Response(body=body, headers={**_FRESH, **headers}, content_type="application/json")


class _Limit:
    """At most ``most`` requests being answered at once. One more is refused, not queued: scrapers come again anyway.

    A request counts until its client has taken the answer, so that what slow readers keep in memory is bounded too.
    Those past their deadline are cut off when their places are needed: a timer per scrape would cost more than the
    scrape's own work.
    """

    def __init__(self, most: int):
        self._most = most
        self._since: dict[asyncio.Transport | None, float] = {}

    def limited(self, handler: Handler) -> Handler:
        """Return ``handler`` under the limit."""

        async def answer(request: web.Request) -> web.StreamResponse:
            client = request.transport
            if len(self._since) >= self._most:
                self._cut_off(time.monotonic() - TAKE_DEADLINE)
                return _unavailable(f"{self._most} requests are being answered already, the most at once; try again")
            self._since[client] = time.monotonic()
            try:
                response = await handler(request)
                with suppress(ConnectionError):  # the client hung up or was cut off: aiohttp sees that next, and closes
                    await response.prepare(request)
                    await response.write_eof()
                return response
            finally:
                self._since.pop(client, None)

        return answer

    def _cut_off(self, deadline: float) -> None:
        """Abort the connections whose requests began before ``deadline``; their places are free a moment later."""
        for client, since in self._since.items():
            if client is not None and since < deadline:
                client.abort()


def _rest(request: web.Request, in_all: int, limit: int, offset: int) -> dict[str, str]:
    """Return the headers that tell how much of a list there is in all, and where it goes on."""
    headers = {"X-Total-Count": f"{in_all}"}
    if 0 < limit < in_all - offset:
        following = request.rel_url.update_query(limit=limit, offset=offset + limit)
        headers["Link"] = f'<?{following.raw_query_string}>; rel="next"'
    return headers


def _refused(error: ValueError) -> web.Response:
    """Return what was expected of a request."""
    return web.Response(status=HTTPStatus.BAD_REQUEST, text=f"{error}\n")


def _not_yet() -> web.Response:
    """Return the answer before the first beat.

    Not a page with only the series about this exporter: that scrape would succeed (``up`` is 1) and say nothing of
    what is watched. A failed scrape is what Prometheus calls not knowing, and one interval later it is over.
    """
    return _unavailable("the first beat is not done yet")


def _unavailable(reason: str) -> web.Response:
    return web.Response(status=503, text=reason + "\n", headers={"Retry-After": "1"})
