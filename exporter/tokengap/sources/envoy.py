"""What Envoy tells on its admin interface: ``/stats``, of which only the few lines needed are asked for.

Counters that look right and do not move when a client leaves: ``cluster.*.upstream_rq_cancelled``,
``upstream_rq_tx_reset`` (both stayed 0 through ten aborts), and ``downstream_cx_destroy_remote_active_rq`` counts an
HTTP/2 connection with many streams once. ``downstream_rq_rx_reset`` counts every stream, over HTTP/1 as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from urllib.parse import urlencode

import aiohttp

from tokengap.errors import SourceUnusable
from tokengap.readings import ProxySnapshot
from tokengap.sources.page import MetricsPage

#: Patterns of names on the page, and the fields of ProxySnapshot that they add up to. The admin interface counts
#: itself as ``http.admin``. ``http2.`` without a prefix is clients', and is there after the first such connection.
_FIELDS = {
    r"http\.(?!admin\.).+\.downstream_cx_active": "connections",
    r"http\.(?!admin\.).+\.downstream_rq_active": "streams",
    r"http\.(?!admin\.).+\.downstream_rq_rx_reset": "client_aborts",
    r"http\.(?!admin\.).+\.downstream_cx_http2_active": "h2_connections",
    r"http\.(?!admin\.).+\.downstream_cx_http3_active": "h3_connections",
    r"http2\.streams_active": "h2_streams",
    r"http2\.rx_reset": "resets",
    r"cluster\..+\.upstream_rq_pending_active": "queued",
    r"server\.uptime": "uptime",
}
_PATTERNS = [(re.compile(pattern), field) for pattern, field in _FIELDS.items()]
#: What is asked for: RE2 knows no look-ahead, so the admin interface's own lines come along.
_FILTER = (
    r"^(http\..+\.downstream_(cx_active|cx_http[23]_active|rq_active|rq_rx_reset)"
    r"|http2\.(streams_active|rx_reset)|cluster\..+\.upstream_rq_pending_active|server\.uptime)$"
)
_LINE = re.compile(r"(\S.*): (\d{1,19})[ \t\r]*", re.ASCII)


def parse_stats(text: str) -> ProxySnapshot:
    """Read ``name: number`` lines. Others (histograms, what is not needed) are left out.

    Raises SourceUnusable when none is of Envoy.
    """
    sums: defaultdict[str, int] = defaultdict(int)
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        for pattern, field in _PATTERNS if match else ():
            if match and pattern.fullmatch(match[1]):
                sums[field] += int(match[2])
                break
    if not sums:
        raise SourceUnusable("no line of Envoy's statistics on the page")
    told = {field: sums.get(field) for field in _FIELDS.values()}
    if told["h2_connections"] is not None:  # before the first one, the others are not there, and it was none
        told["h2_streams"], told["resets"] = told["h2_streams"] or 0, told["resets"] or 0
    uptime = told.pop("uptime")
    return ProxySnapshot(
        program="envoy",
        uptime=None if uptime is None else float(uptime),
        oldest_queued=0.0 if told["queued"] == 0 else None,
        **told,
    )


def stats_url(url: str) -> str:
    """Return where the lines needed are, below the address of an admin interface."""
    return f"{url.rstrip('/')}/stats?{urlencode({'filter': _FILTER})}"


class EnvoySource:
    """The admin interface at a URL. ``deadline`` (seconds) is for the whole read."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, *, deadline: float, max_bytes: int = 8 * 2**20
    ) -> None:
        self._page = MetricsPage(stats_url(url), session, max_bytes=max_bytes)
        self._deadline = deadline

    async def read(self) -> ProxySnapshot:
        """Ask. Raises a SourceError."""
        return parse_stats((await self._page.fetch(self._deadline)).body.decode(errors="replace"))
