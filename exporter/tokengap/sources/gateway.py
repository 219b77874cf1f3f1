"""What a ``tokengap admit`` tells about itself, at ``/api/admission``: its own counts, which are exact."""

from __future__ import annotations

import aiohttp
import msgspec

from tokengap.errors import SourceUnusable
from tokengap.readings import GatewayPage
from tokengap.sources.page import MetricsPage
from tokengap.view import AGE_BOUNDS, CLIENTS

#: Where it is told, below the address of a gateway.
PATH = "/api/admission"

_page = msgspec.json.Decoder(GatewayPage)


def parse_admission(body: bytes) -> GatewayPage:
    """Read it. Raises SourceUnusable."""
    try:
        page = _page.decode(body)
    except ValueError as wrong:  # msgspec's errors are ValueErrors
        raise SourceUnusable(f"this is not what `tokengap admit` tells: {wrong}") from None
    if any(len(one.ages) != len(AGE_BOUNDS) + 1 or one.client not in CLIENTS for one in page.streams):
        raise SourceUnusable("this is not what `tokengap admit` of this version tells: other ages, or other clients")
    return page


class GatewaySource:
    """The gateway at a URL. ``deadline`` (seconds) is for the whole read."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, deadline: float, max_bytes: int = 2**20) -> None:
        self._page = MetricsPage(url.removesuffix("/metrics") + PATH, session, max_bytes=max_bytes)
        self._deadline = deadline

    async def read(self) -> GatewayPage:
        """Ask. Raises a SourceError."""
        return parse_admission((await self._page.fetch(self._deadline)).body)
