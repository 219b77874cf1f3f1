"""The interface of a proxy's own, whichever of the known ones it is: one row a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp

from tokengap.readings import ProxySnapshot
from tokengap.sources.envoy import EnvoySource
from tokengap.sources.haproxy import HaproxySource
from tokengap.sources.nginx import NginxSource
from tokengap.topology import ProxyInterface


class ProxySource(Protocol):
    """What all of them have."""

    async def read(self) -> ProxySnapshot:
        """Ask. Raises a SourceError."""


_SOURCES: Mapping[str, Callable[[str, aiohttp.ClientSession, float], ProxySource]] = {
    "haproxy": lambda address, _, deadline: HaproxySource(address, deadline=deadline),
    "envoy": lambda address, session, deadline: EnvoySource(address, session, deadline=deadline),
    "nginx": lambda address, session, deadline: NginxSource(address, session, deadline=deadline),
}


def proxy_source(interface: ProxyInterface, session: aiohttp.ClientSession, *, deadline: float) -> ProxySource:
    """Return the source for an interface. ``deadline`` (seconds) is for each read."""
    return _SOURCES[interface.program](interface.address, session, deadline)
