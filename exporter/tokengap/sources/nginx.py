"""What nginx tells on a page of ``stub_status``: connections, and requests at work. It counts no client that left."""

from __future__ import annotations

import re

import aiohttp

from tokengap.errors import SourceUnusable
from tokengap.readings import ProxySnapshot
from tokengap.sources.page import MetricsPage

_STATUS = re.compile(
    r"Active connections: (\d{1,18})\s+"
    r"server accepts handled requests(?: request_time)?\s+"  # the last word: Tengine
    r"(\d{1,18}) (\d{1,18}) (\d{1,18})(?: \d+)?\s+"
    r"Reading: (\d{1,18}) Writing: (\d{1,18}) Waiting: (\d{1,18})\s*",
    re.ASCII,
)


def parse_stub_status(text: str) -> ProxySnapshot:
    """Read the page.

    ``Writing`` counts requests from their header to their end, each stream of HTTP/2 on its own; so with HTTP/2 it can
    exceed ``Active``. The question for this page is one of both, and is taken off. Raises SourceUnusable.
    """
    match = _STATUS.fullmatch(text.lstrip())
    if match is None:
        raise SourceUnusable("the page is not that of stub_status")
    active, _, _, _, _, writing, _ = (int(number) for number in match.groups())
    return ProxySnapshot(program="nginx", connections=max(active - 1, 0), streams=max(writing - 1, 0))


class NginxSource:
    """The page at a URL. ``deadline`` (seconds) is for the whole read."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, deadline: float, max_bytes: int = 2**16) -> None:
        self._page = MetricsPage(url, session, max_bytes=max_bytes)
        self._deadline = deadline

    async def read(self) -> ProxySnapshot:
        """Ask. Raises a SourceError."""
        return parse_stub_status((await self._page.fetch(self._deadline)).body.decode(errors="replace"))
