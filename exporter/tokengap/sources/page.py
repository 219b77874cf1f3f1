"""The request for a page of metrics, for every source that is one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from tokengap.errors import SourceError, SourceRefused, SourceTimeout, SourceUnusable

_NOBODY = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})


@dataclass(frozen=True, slots=True)
class Answer:
    """A page, and the headers it came with."""

    body: bytes
    headers: Mapping[str, str]


class MetricsPage:
    """A page of metrics in the Prometheus text format, at one address.

    ``max_bytes`` is for the page after decompression. The session is the caller's; with aiohttp 3.14 it decompresses
    piecewise, so a compressed page that grows without end stops at the limit as well. Requests that overlap wait for
    each other, each within its own deadline.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, max_bytes: int) -> None:
        self._url = url
        self._session = session
        self._max_bytes = max_bytes
        self._one_at_a_time = asyncio.Lock()

    async def fetch(self, deadline: float) -> Answer:
        """Return the page, the whole of it within ``deadline`` seconds. Raises a SourceError."""
        try:
            async with asyncio.timeout(deadline), self._one_at_a_time:
                return await self._get()
        except TimeoutError:
            raise SourceTimeout(f"no page within {deadline:g} s") from None
        except aiohttp.ClientConnectorDNSError as error:
            raise SourceError(f"{error.host} does not resolve") from None
        except aiohttp.ClientConnectorError as error:
            if _refused(error.os_error):
                raise SourceRefused("connection refused") from None
            raise SourceError(f"cannot connect: {error.os_error}") from None
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: a redirect to no address
            raise SourceUnusable(f"the answer is broken: {_one_line(error)}") from None

    async def _get(self) -> Answer:
        # Plain text, or a page in OpenMetrics may show `vllm_` for `vllm:` and cost more to make.
        headers = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "gzip"}
        async with self._session.get(self._url, headers=headers) as response:
            if response.status != 200:
                raise SourceUnusable(f"HTTP {response.status}")
            page = bytearray()
            async for piece in response.content.iter_any():
                page += piece
                if len(page) > self._max_bytes:
                    response.close()
                    raise SourceUnusable(f"the page is larger than {self._max_bytes} bytes")
            return Answer(bytes(page), response.headers)


def _refused(error: OSError) -> bool:
    """Tell whether nobody listens. One host with several addresses may fail with several errors and no errno."""
    return error.errno in _NOBODY or (error.errno is None and f"[Errno {errno.ECONNREFUSED}]" in str(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
