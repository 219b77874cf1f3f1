"""The listening server around the application: where it listens, to how many, and that it can be stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

from aiohttp import web

from tokengap.errors import SettingsError, SetupError
from tokengap.topology import Endpoint
from tokengap.web.access import Access, Tls
from tokengap.web.guard import Guard

log = logging.getLogger(__name__)

#: Seconds an idle connection is kept. Longer than the usual scrape intervals, so that a scraper need not connect anew.
KEEP_ALIVE: Final = 150.0

#: Seconds that requests in progress get when the server stops.
STOP_DEADLINE: Final = 2.0

#: Connections at once. One more takes the place of the one that has done nothing for longest.
MOST_CONNECTIONS: Final = 256

#: Handshakes of TLS at once, beside the connections: one more takes the place of the oldest. Seconds for one.
MOST_HANDSHAKES: Final = 64
HANDSHAKE_DEADLINE: Final = 10.0

#: Seconds for the rest of a request whose answer has been sent.
LINGER: Final = 1.0

#: Bytes of the request line and of one header field, and how many fields there may be: 256 KiB for a whole header.
MOST_BYTES: Final = 8190
MOST_FIELDS: Final = 32


def parse_listen(text: str) -> tuple[str | None, int]:
    """Return (host, port) of ``:10788``, ``127.0.0.1:10788``, ``[::1]:10788`` or ``localhost:10788``.

    Host None means every address of this host. Raises SettingsError for anything else.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if colon and port.isascii() and port.isdigit() and int(port) <= 65535 and (bracketed or ":" not in host):
        return (host.strip("[]") or None), int(port)
    raise SettingsError(f"listen: {text!r} is no address to listen on; expected [HOST]:PORT, such as :10788")


class Connection(web.RequestHandler):
    """A connection whose errors tell the client nothing, and the log nothing about the client."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard, *arguments: Any, **limits: Any) -> None:
        super().__init__(*arguments, **limits)
        self._guard = guard

    async def start(self) -> None:
        """Answer what comes, until the connection ends."""
        try:
            await super().start()
        except Exception:  # aiohttp's own, over what is no target, such as `GET *`: nothing would close the connection
            log.debug("a request could not be read")
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's signature; it quotes what was sent
    ) -> web.StreamResponse:
        """Return one line and close. A failure of ours is logged with where it happened, and without who asked."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("an answer failed: a bug", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent already")
        answer = web.Response(status=status, text=HTTPStatus(status).phrase.lower() + "\n")
        self._guard.secure(answer.headers)
        answer.force_close()
        return answer


class _Refused(asyncio.Protocol):
    """A connection for which there is no place."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """End it."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class _Accepted(asyncio.Protocol):
    """A connection that is to be encrypted first. Hands over its socket; nothing has been read from it yet."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Leave the connection to others, and this transport without one."""
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._take(transport.get_extra_info("socket").dup())
        transport.abort()


class Server:
    """An application that listens, behind a guard. ``start`` and ``stop`` are each called once.

    ``tls`` is what new connections are encrypted with, None: with nothing.
    """

    def __init__(self, app: web.Application, guard: Guard | None = None):
        self._guard = guard or Guard()
        app.middlewares.append(self._guard.admit)
        app.on_response_prepare.append(self._guard.prepare)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_DEADLINE)
        self._bound: asyncio.Server | None = None
        self._listening: list[asyncio.Server] = []
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}  # the oldest first
        self.tls: Tls | None = None

    async def start(self, host: str | None, port: int, tls: Tls | None = None) -> None:
        """Listen on ``host`` (None: every address) and ``port`` (0: one that is free). Raises SetupError."""
        await self._runner.setup()
        try:
            loop = asyncio.get_running_loop()
            self._bound = await loop.create_server(_Refused, host, port, start_serving=False)
            await self._listen(tls)
        except OSError as error:
            await self.stop()
            raise SetupError(f"cannot listen on {Endpoint(host or None, port)}: {error.strerror or error}") from error

    async def take(self, access: Access) -> None:
        """Go by this from now on. With other TLS all connect anew, none is refused meanwhile. OSError: not taken."""
        if access.tls != self.tls:
            await self._listen(access.tls)
            for connection in self._connections:
                self._close(connection)
        self._guard.take(access)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._address[1]

    @property
    def url(self) -> str:
        """Where a person on this host finds it."""
        host, port = self._address
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{Endpoint('localhost' if ip_address(host).is_unspecified else host, port)}"

    async def stop(self) -> None:
        """Stop listening, let requests in progress end, close all connections."""
        for server in (*self._listening, *([self._bound] if self._bound else [])):
            server.close()
        for accepted in self._handshakes.values():
            _hang_up(accepted)
        await asyncio.gather(*self._handshakes)
        await self._runner.cleanup()

    @property
    def _address(self) -> tuple[str, int]:
        assert self._bound is not None
        host, port, *_ = self._bound.sockets[0].getsockname()
        return host, port

    @property
    def _connections(self) -> list[web.RequestHandler]:
        """All connections, the oldest first."""
        return self._runner.server.connections if self._runner.server is not None else []

    async def _listen(self, tls: Tls | None) -> None:
        """Accept connections with this TLS in place of the one before.

        The sockets that are bound stay as they are, and each time copies of them are listened to: who connects between
        two of them waits in the kernel.
        """
        assert self._bound is not None
        loop = asyncio.get_running_loop()
        make = self._connection if tls is None else partial(_Accepted, partial(self._secure, tls))
        listening = [await loop.create_server(make, sock=bound.dup(), backlog=128) for bound in self._bound.sockets]
        for server in self._listening:
            server.close()
        self._listening, self.tls = listening, tls

    def _secure(self, tls: Tls, accepted: socket.socket) -> None:
        """Begin a handshake. A server of asyncio's own would not count those that clients leave unfinished."""
        if len(self._handshakes) >= MOST_HANDSHAKES:
            _hang_up(self._handshakes.pop(next(iter(self._handshakes))))
        task = asyncio.create_task(self._shake_hands(tls, accepted))
        self._handshakes[task] = accepted
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _shake_hands(self, tls: Tls, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # what the client did wrong, or did not do in time; the connection is closed
            await loop.connect_accepted_socket(
                self._connection, accepted, ssl=tls.context, ssl_handshake_timeout=HANDSHAKE_DEADLINE
            )

    def _connection(self) -> asyncio.Protocol:
        """Return what speaks with a new connection."""
        if len(self._connections) >= MOST_CONNECTIONS:
            idle = next((one for one in self._connections if one not in self._guard.busy), None)
            if idle is None:
                return _Refused()
            self._close(idle)
        return Connection(
            self._guard,
            self._runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=KEEP_ALIVE,
            lingering_time=LINGER,
            max_line_size=MOST_BYTES,
            max_field_size=MOST_BYTES,
            max_headers=MOST_FIELDS,
        )

    def _close(self, connection: web.RequestHandler) -> None:
        """Close a connection, after the answer that it waits for."""
        if connection in self._guard.busy:
            connection.close()
        else:
            connection.force_close()


def _hang_up(connected: socket.socket) -> None:
    """End a connection that others still hold: they see its end, and close it."""
    with suppress(OSError):  # the client was quicker
        connected.shutdown(socket.SHUT_RDWR)
