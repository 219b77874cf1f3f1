"""What is served: the newest view and its page. The beat publishes here; handlers only look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.registry import Collector

from tokengap.bundle.site import Site
from tokengap.series import SERIES
from tokengap.series.declare import Series
from tokengap.series.render import Page, render
from tokengap.topology import Topology
from tokengap.view import View
from tokengap.web.history import History

#: Answers that are kept for others who ask for the same of a view: a page or two for each of some people who watch.
MOST_MADE: Final = 64


class Serving:
    """The newest view with its page, and the settings of how they are shown.

    ``telemetry_path`` is where the page of series is served. ``show_addresses`` shows clients' addresses in full in
    the JSON and on the live page; by default they are masked. ``also`` are collectors whose families follow ours on the
    page of series; by default what the kernel says of this process (``process_*``). ``series`` are those on that page.
    ``limit`` is how many requests are answered at once. ``site``: the numbers in runbooks. ``watched``: hops, as they
    are drawn, and limits.

    To be used from one event loop. View and page change together, so no request sees halves of two beats.
    """

    def __init__(
        self,
        *,
        telemetry_path: str = "/metrics",
        show_addresses: bool = False,
        limit: int = 40,
        also: Iterable[Collector] | None = None,
        series: Sequence[Series] = SERIES,
        site: Site | None = None,
        watched: Topology | None = None,
    ):
        self.telemetry_path = telemetry_path
        self.show_addresses = show_addresses
        self.limit = limit
        self.series = series
        self.site = site or Site()
        self.watched = watched or Topology()
        self.history = History()
        self.also = (ProcessCollector(registry=None),) if also is None else tuple(also)
        self.view: View | None = None
        self.page: Page | None = None
        self._made: dict[Hashable, asyncio.Task[bytes]] = {}
        self._runbooks: asyncio.Task[Mapping[str, bytes]] | None = None

    def publish(self, view: View, page: Page) -> None:
        """Show this view and its page from now on."""
        self.view, self.page = view, page
        self.history.add(view)
        self._made = {}

    async def render_and_publish(self, view: View) -> None:
        """Render the page of ``view`` in a worker thread, so that scrapes go on meanwhile, then publish both."""
        self.publish(view, await asyncio.to_thread(render, view, self.also, self.series))

    async def once_a_view(self, key: Hashable, make: Callable[[View], bytes]) -> bytes:
        """Return ``make(view)`` for the newest view, made in a worker thread and at most once a view.

        However many ask for the same thing in one beat, it is made once, unless :data:`MOST_MADE` others were asked for
        since. Only after the first :meth:`publish`.
        """
        assert self.view is not None
        task = self._made.get(key)
        if task is None:
            while len(self._made) >= MOST_MADE:  # the oldest; whoever waits for it still gets it
                self._made.pop(next(iter(self._made)))
            task = self._made[key] = asyncio.create_task(asyncio.to_thread(make, self.view))
        return await asyncio.shield(task)  # one client that is cancelled must not take the others' answer with it

    async def runbooks(self) -> Mapping[str, bytes]:
        """Return the pages of runbooks by name. Made once, in a worker thread, when the first is asked for."""
        if self._runbooks is None:
            self._runbooks = asyncio.create_task(asyncio.to_thread(_runbooks, self.site))
        return await asyncio.shield(self._runbooks)


def _runbooks(site: Site) -> Mapping[str, bytes]:
    # Not above: scrapes need neither templates nor Markdown, and many an exporter never loads them.
    from tokengap.web.runbooks import pages

    return pages(site)
