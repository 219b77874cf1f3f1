"""The listening server around the application: where it listens, and that it can be stopped."""

from __future__ import annotations

from ipaddress import ip_address

from aiohttp import web

from tokengap.errors import SettingsError, SetupError
from tokengap.topology import Endpoint

#: Seconds an idle connection is kept. Longer than the usual scrape intervals, so that a scraper need not connect anew.
KEEP_ALIVE = 150.0

#: Seconds that requests in progress get when the server stops.
STOP_DEADLINE = 2.0


def parse_listen(text: str) -> tuple[str | None, int]:
    """Return (host, port) of ``:10788``, ``127.0.0.1:10788``, ``[::1]:10788`` or ``localhost:10788``.

    Host None means every address of this host. Raises SettingsError for anything else.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if colon and port.isascii() and port.isdigit() and int(port) <= 65535 and (bracketed or ":" not in host):
        return (host.strip("[]") or None), int(port)
    raise SettingsError(f"listen: {text!r} is no address to listen on; expected [HOST]:PORT, such as :10788")


class Server:
    """An application that listens. ``start`` and ``stop`` are each called once."""

    def __init__(self, app: web.Application):
        # aiohttp's own limits hold for each request: 8 KiB for the request line and for each header field, 128 fields.
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEP_ALIVE, shutdown_timeout=STOP_DEADLINE)

    async def start(self, host: str | None, port: int) -> None:
        """Listen on ``host`` (None: every address) and ``port`` (0: one that is free). Raises SetupError."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise SetupError(f"cannot listen on {Endpoint(host or None, port)}: {error.strerror or error}") from error

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._runner.addresses[0][1]
        return port

    @property
    def url(self) -> str:
        """Where a person on this host finds it."""
        host: str = self._runner.addresses[0][0]
        return f"http://{Endpoint('localhost' if ip_address(host).is_unspecified else host, self.port)}"

    async def stop(self) -> None:
        """Stop listening, let requests in progress end, close all connections."""
        await self._runner.cleanup()
