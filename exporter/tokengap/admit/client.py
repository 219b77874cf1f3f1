"""The client's side: its socket, whether it is still there, and how much it took.

A client that leaves is noticed at once, whatever is being done for it:

* **RST** or a failed write: the connection is lost.
* **FIN** says only that it sends no more. A half-closed client (``shutdown(SHUT_WR)``) reads on and is alive, while one
  that closed its socket answers whatever it is sent with RST. So it is *asked*, with bytes that a live client does not
  notice: before the answer's header by an interim response (RFC 9110, 15.2), in a chunked body by a leading zero of the
  size of the next chunk (RFC 9112, 7.1: ``chunk-size = 1*HEXDIG``). In any other body the next bytes ask. HTTP/1.0
  knows neither, so there FIN means gone, as every proxy takes it.
* **Vanished** (half-open): the rules of :mod:`tokengap.join.client`, on the ``tcp_info`` of its socket. While nothing
  is sent only the kernel's keep-alive can tell, which is set to half a minute.

Delivered is what its kernel acknowledged (``tcpi_bytes_acked``).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import socket
import struct
import termios
import time
from collections.abc import Iterator
from typing import Any, Final, Literal, NoReturn, Protocol, TypeAlias

import numpy as np
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from numpy.typing import NDArray

from tokengap.admit.delivery import Delivery
from tokengap.admit.failed import Failed
from tokengap.join.client import VANISHED, Downstream, client_states
from tokengap.readings import CLOSE, ESTABLISHED, SOCKET, TIMER_NONE, TIMER_PROBE, TIMER_RETRANSMIT, SocketTable
from tokengap.sources.sock_diag import TCP_INFO_FIELDS
from tokengap.view import CLIENTS
from tokengap.view import Client as ClientState

log = logging.getLogger(__name__)

#: How a client left.
Left: TypeAlias = Literal["fin", "rst", "vanished", "closed"]

#: Seconds between two looks at all sockets.
LOOK_EVERY: Final = 0.5

#: Unsent bytes that the kernel keeps for a slow reader. Its default is megabytes, which is minutes of tokens.
UNSENT: Final = 64 * 1024

#: Seconds after which a half-closed client is asked again; twice as many each time.
ASK_AFTER: Final = 1.0
#: Leading zeros that the size of a chunk may get.
MOST_ZEROS: Final = 8

#: Seconds that a connection which is to be closed waits for the acknowledgement of its answer.
LINGER: Final = 5.0

#: The kernel asks a silent peer after so many seconds, so often, and so many times.
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

_INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEADING_ZERO: Final = b"0"

#: Bytes of ``struct tcp_info`` that are read. A kernel that knows fewer gives fewer.
_INFO_SIZE: Final = max(at + int(kind[-1]) for _, kind, at in TCP_INFO_FIELDS)
_INFO: Final = np.dtype(
    {
        "names": ["tcp_state", "probes", *(name for name, _, _ in TCP_INFO_FIELDS)],
        "formats": ["u1", "u1", *(kind for _, kind, _ in TCP_INFO_FIELDS)],
        "offsets": [0, 3, *(at for _, _, at in TCP_INFO_FIELDS)],
        "itemsize": _INFO_SIZE,
    }
)
_ACKED: Final = struct.Struct("=Q")
_ACKED_AT: Final = 120


class Connection(web.RequestHandler):
    """A connection of aiohttp's server that survives the end of the client's own side.

    ``clients`` are the requests on it that are at work, and those whose answer is not acknowledged yet.
    ``half_closed``: FIN came.
    """

    __slots__ = ("clients", "half_closed")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clients: list[Client] = []
        self.half_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set what the kernel is to do for this connection."""
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        for option, value in (*_KEEPALIVE, (socket.TCP_NOTSENT_LOWAT, UNSENT)):
            own.setsockopt(socket.IPPROTO_TCP, option, value)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio keeps a connection open for True
        """FIN came. Keep the connection while a request of it is at work."""
        idle = self._waiter is not None and not self._waiter.done()  # aiohttp's own test, see _process_keepalive
        self.half_closed = True
        if not idle:
            for client in list(self.clients):
                client.finished()
        return not idle

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - quotes what was sent, which may be a key
    ) -> web.StreamResponse:
        """Answer what is no request, or what our own mistake left without an answer. Nothing that was sent is shown."""
        if status < 500:
            log.info("no request", extra={"client": request.remote, "why": type(exc).__name__})
            failed = Failed(status, "this is no request", "invalid_request_error")
        else:
            log.error("a bug", exc_info=exc)
            failed = Failed(500, "the gateway has failed", "internal_error")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = web.Response(status=failed.status, body=failed.body, headers=failed.headers)
        response.force_close()
        return response

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the requests, while the socket can still be read."""
        for client in list(self.clients):
            client.lost("closed" if exc is None else "rst")
        super().connection_lost(exc)


class ClientServer(web.Server):
    """aiohttp's server with these connections."""

    def __call__(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self, loop=self._loop, **self._kwargs)


class Owner(Protocol):
    """Who made a :class:`Client`, and wants to know what becomes of it."""

    def client_left(self, how: Left) -> None:
        """It left before its answer had been written. Its ledger is up to date."""

    def client_settled(self) -> None:
        """Its ledger is final: all was acknowledged, or it is gone."""


class Client:
    """The client of one request, until its answer is acknowledged or it is gone.

    ``how`` says how it left, None while it is there. ``delivery`` is the ledger of its answer. ``state`` is as of the
    last look, ``still_since`` (monotonic) when the last byte was acknowledged.
    """

    def __init__(self, request: web.BaseRequest, clients: Clients, owner: Owner) -> None:
        connection = request.protocol
        assert isinstance(connection, Connection)
        if connection.transport is None:
            raise ConnectionResetError  # it left before its request was looked at
        self.how: Left | None = None
        self.half_closed = False
        self.delivery = Delivery()
        self.state: ClientState = "connected"
        self.still_since = time.monotonic()
        self._connection = connection
        self._transport = connection.transport
        self._socket: socket.socket = connection.transport.get_extra_info("socket")
        self._clients = clients
        self._owner = owner
        self._asks = request.version >= HttpVersion11
        self._writer: AbstractStreamWriter | None = None
        self._asked = 0
        self._ask_at, self._ask_after, self._zeros = 0.0, ASK_AFTER, 0
        self._complete = False
        self._acked = self._read_acked()
        self._before = self._acked + self._unacknowledged()
        connection.clients.append(self)
        clients.add(self)

    def attend(self) -> None:
        """Begin to act on what it does. Its FIN may have come with its request."""
        if self._connection.half_closed:
            self.finished()

    # --- the answer -------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the header of its answer was sent."""
        return self._writer is not None

    @property
    def written(self) -> int:
        """Bytes of the answer written so far, header and framing included."""
        return self._asked + (self._writer.output_size if self._writer is not None else 0)

    async def begin(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Send the header of the answer."""
        self._writer = await response.prepare(request)

    async def write(self, data: bytes, tokens: int) -> None:
        """Send a piece of the answer, with which it holds ``tokens`` in all; return when there is room for more."""
        assert self._writer is not None
        try:
            await self._writer.write(data)
        except ConnectionResetError:
            self.leave("rst")  # which cancels whoever writes
            await asyncio.sleep(0)
        self.delivery.wrote(tokens, self.written)
        self._zeros = 0

    async def end(self, response: web.StreamResponse, tokens: int) -> None:
        """End the answer. Where the connection ends with it, wait until all is acknowledged: later is too late."""
        if self.half_closed:
            response.force_close()
        await response.write_eof()
        self.delivery.wrote(tokens, self.written)
        self._complete = True
        if not response.keep_alive:
            self._transport.write_eof()
            await self._acknowledged()
        self.count()

    async def _acknowledged(self) -> None:
        """Wait for the last acknowledgement, in ever longer steps."""
        pause = 0.001
        until = time.monotonic() + LINGER
        while self.how is None and self._unacknowledged() and time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)

    # --- is it there? -----------------------------------------------------------------------------------------------

    def finished(self) -> None:
        """FIN came: it sends no more. Ask whether it reads on."""
        if self.half_closed or self._complete or self.how is not None:
            return
        self.half_closed = True
        if not self._asks:
            self.leave("fin")
            return
        self._clients.await_reset(self, self._socket.fileno())
        self.ask(time.monotonic())

    def ask(self, now: float) -> None:
        """Ask a half-closed client whether it is there, if it is time to: it may close its socket at any later time.

        Ever less often, since a chunk's size may have so many digits: some readers take 16 (Go's net/http).
        """
        if now < self._ask_at or self._complete:
            return
        question = b""
        if self._writer is None:
            question = _INTERIM
        elif getattr(self._writer, "chunked", False) and self._zeros < MOST_ZEROS:
            question = _LEADING_ZERO
            self._zeros += 1
        self._asked += len(question)
        self._transport.write(question)
        self._ask_at = now + self._ask_after
        self._ask_after *= 2

    def leave(self, how: Left) -> None:
        """It has left: count what it took, say so, and drop the connection."""
        self.lost(how)
        self._transport.abort()

    def drop(self) -> None:
        """Drop the connection of one that is there."""
        self.count()
        self._settle()
        self._transport.abort()

    def go_on(self) -> None:
        """It waits to be told to send the body of its request (RFC 9110, 10.1.1)."""
        if self._asks:
            self._asked += len(_INTERIM)
            self._transport.write(_INTERIM)

    def lost(self, how: Left) -> None:
        """The connection is lost. Nothing that is acknowledged later is useful."""
        if self.how is not None:
            return
        self.count()
        if self.how is None and not self._complete:
            self.how = "fin" if self.half_closed and how == "rst" else how
            self._owner.client_left(self.how)
        self._settle()

    def _settle(self) -> None:
        self._clients.discard(self)
        if self in self._connection.clients:
            self._connection.clients.remove(self)
            self._owner.client_settled()

    # --- what it took -----------------------------------------------------------------------------------------------

    def count(self) -> None:
        """Bring the ledger up to date."""
        self.took(self._read_acked())

    def took(self, acked: int) -> None:
        """The kernel says that so many bytes of the connection are acknowledged."""
        if acked != self._acked:
            self._acked, self.still_since = acked, time.monotonic()
        self.delivery.acknowledged(acked - self._before)
        if self._complete and acked - self._before >= self.written:
            self._settle()

    def info(self) -> bytes:
        """Return the ``tcp_info`` of its socket."""
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)

    def _read_acked(self) -> int:
        try:
            return int(_ACKED.unpack_from(self.info().ljust(_INFO_SIZE, b"\0"), _ACKED_AT)[0])
        except OSError:
            return self._acked

    def _unacknowledged(self) -> int:
        """Return the bytes written and not acknowledged: in the transport and in the kernel (SIOCOUTQ, tcp(7))."""
        try:
            waiting = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        except OSError:
            return 0
        return self._transport.get_write_buffer_size() + int(struct.unpack("i", waiting)[0])


class Clients:
    """All clients whose requests are at work."""

    def __init__(self) -> None:
        self._all: dict[Client, None] = {}
        # Registered for nothing, a socket still reports its reset. asyncio itself stops watching at FIN.
        self._resets = select.epoll()
        self._half_closed: dict[int, Client] = {}

    def __iter__(self) -> Iterator[Client]:
        return iter(self._all)

    def add(self, client: Client) -> None:
        """Look at a client from now on."""
        self._all[client] = None

    def discard(self, client: Client) -> None:
        """Look at it no more."""
        self._all.pop(client, None)
        for number in [number for number, one in self._half_closed.items() if one is client]:
            del self._half_closed[number]
            self._resets.unregister(number)

    def await_reset(self, client: Client, number: int) -> None:
        """Tell ``client`` when the socket with this file descriptor is reset."""
        self._half_closed[number] = client
        self._resets.register(number, 0)

    async def watch(self) -> NoReturn:
        """Look at all of them for ever."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._resets.fileno(), self._reset)
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY)
                self.look(time.monotonic())
        finally:
            loop.remove_reader(self._resets.fileno())

    def close(self) -> None:
        """Give the epoll back."""
        self._resets.close()

    def look(self, now: float) -> None:
        """Look at every socket: count what was taken, and find out who is not there."""
        clients = list(self._all)
        if not clients:
            return
        info = np.frombuffer(b"".join(one.info().ljust(_INFO_SIZE, b"\0") for one in clients), dtype=_INFO)
        for client, acked in zip(clients, info["bytes_acked"].tolist(), strict=True):
            client.took(acked)
        still = np.array([now - client.still_since for client in clients])
        states = client_states(Downstream(_as_sockets(info), still, np.zeros(len(clients)), LOOK_EVERY))
        for client, state, tcp in zip(clients, states.tolist(), info["tcp_state"].tolist(), strict=True):
            client.state = CLIENTS[state]
            if tcp == CLOSE:
                client.leave("rst")
            elif state == VANISHED:
                client.leave("vanished")
            elif client.half_closed:
                client.ask(now)

    def _reset(self) -> None:
        for number, _ in self._resets.poll(0):
            client = self._half_closed.get(number)
            if client is not None:
                client.leave("rst")


def _as_sockets(info: NDArray[Any]) -> SocketTable:
    """Return what ``tcp_info`` says as rows of sockets, for the rules that the exporter has about them.

    The timer is not in ``tcp_info``; what it counts is. A FIN is no reason to call a client gone here: it was asked.
    """
    rows = np.zeros(len(info), SOCKET)
    rows["state"] = ESTABLISHED
    for name, _, _ in TCP_INFO_FIELDS:
        rows[name] = info[name]
    rows["timer"] = np.select(
        [info["retransmits"] > 0, info["probes"] > 0], [TIMER_RETRANSMIT, TIMER_PROBE], default=TIMER_NONE
    )
    return rows
