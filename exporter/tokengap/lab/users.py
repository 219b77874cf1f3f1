"""The lab's users: each asks one thing over a socket of its own, reads the answer, or leaves in a way of its own.

A user knows exactly what it received, which is half of the truth that the drill compares with (the engine's half is
:mod:`tokengap.lab.truth`). Sockets are used directly, because how one is closed is the point: before a user leaves, it
reads what its kernel has acknowledged already, so tokens received are tokens acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokengap.lab.answers import MODEL
from tokengap.lab.parts import LOOPBACK

Leaving = Literal["fin", "rst", "half-close", "vanish", "stall"]
End = Literal["completed", "left", "failed"]

#: Four bytes, which the stand-in engine counts as one token.
_FOUR_BYTES = "tok "


@dataclass(frozen=True, slots=True)
class User:
    """What one user is going to do.

    ``leave_at`` is seconds after its request was sent; None stays to the end. ``leaving`` says how: ``fin`` closes,
    ``rst`` resets, and ``vanish`` is cut off from the network, so that nobody is told. Two are clients like any other:
    ``half-close`` ends only its own side and reads on, and ``stall`` reads nothing for ``stalls`` seconds, with a small
    receive buffer, and then the rest.
    ``exact`` asks for vLLM's ``continuous_usage_stats``: on a real engine several tokens can share an event.
    """

    id: str
    prompt_tokens: int = 400
    max_tokens: int = 256
    stream: bool = True
    leave_at: float | None = None
    leaving: Leaving = "fin"
    stalls: float = 0.0
    chat: bool = True
    model: str = MODEL
    exact: bool = False

    def request(self, host: str) -> bytes:
        """Return its HTTP/1.1 request."""
        prompt = _FOUR_BYTES * self.prompt_tokens
        said = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body: dict[str, Any] = {"model": self.model, "user": self.id, "max_tokens": self.max_tokens, **said}
        if self.stream:
            body["stream"] = True
            if self.exact:
                body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        data = msgspec.json.encode(body)
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {self.id}\r\nAccept: */*\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one user: the truth about what it received. Times are ``time.monotonic()``.

    ``tokens`` are those it received while it was there. An answer that was not streamed counts when it is complete.
    ``detail`` says why it failed. ``port`` was its own, and ``left`` is when it did what ``leaving`` says; None: it did
    not come to that.
    """

    user: User
    how: End
    tokens: int
    sent: float
    first_token: float | None
    ended: float
    status: int | None = None
    detail: str = ""
    port: int = 0
    left: float | None = None

    @property
    def refused(self) -> bool:
        """Whether it was told to come again later."""
        return self.status == 429


class AnswerReader:
    """Reads an HTTP/1.1 answer from its bytes, however they are cut, and counts its tokens. No I/O.

    Bodies may be chunked, of a given length, or end with the connection: proxies answer in all three ways. ``error`` is
    why the answer is none, empty while it may become one. ``truncated``: it ended as HTTP says that answers end, and
    without the end of a stream, so that a client takes it for whole. ``ids`` are those that its events bear, of which
    an answer has one, ``finish_reason`` is why its generation ended, and ``said_error`` whether one was an error.
    """

    def __init__(self, *, streamed: bool) -> None:
        self.status: int | None = None
        self.tokens = 0
        self.complete = False
        self.error = ""
        self.truncated = False
        self.ids: set[str] = set()
        self.finish_reason: str | None = None
        self.said_error = False
        self._streamed = streamed
        self._raw = bytearray()  # not yet understood as HTTP
        self._body = bytearray()  # not yet understood as an answer
        self._until_end = False  # the body ends with the connection
        self._said_done = False
        self._http = self._read_http()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._raw += data
        self._run()

    def end(self) -> None:
        """The connection ended, which completes only a body that ends with it."""
        if self._until_end:
            self._finish()
        elif not self.complete:
            self._fail("the connection ended before the answer")

    def _run(self) -> None:
        try:
            next(self._http, None)
            if self._streamed and self.status == 200:
                self._read_events()
        except ValueError as wrong:  # msgspec's errors are ValueErrors
            self._fail(f"unreadable answer: {wrong}")

    def _fail(self, why: str) -> None:
        self.error = self.error or why

    def _read_http(self) -> Iterator[None]:
        """Understand the answer as HTTP. A generator, so that it can stop wherever bytes are missing."""
        status = 100
        while status < 200:  # 100 Continue and its like announce an answer
            head = yield from self._line(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            status = int(first.partition(" ")[2][:3])
        self.status = status
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((yield from self._line(b"\r\n")).split(b";")[0], 16):
                yield from self._piece(size)
                yield from self._line(b"\r\n")
            yield from self._line(b"\r\n")
        elif "content-length" in headers:
            yield from self._piece(int(headers["content-length"]))
        else:
            self._until_end = True
            while True:
                self._body += self._raw
                self._raw.clear()
                yield
        self._finish()

    def _line(self, end: bytes) -> Generator[None, None, bytes]:
        while (at := self._raw.find(end)) < 0:
            yield
        line = bytes(self._raw[:at])
        del self._raw[: at + len(end)]
        return line

    def _piece(self, size: int) -> Iterator[None]:
        while size:
            piece = self._raw[:size]
            if not piece:
                yield
            self._body += piece
            del self._raw[: len(piece)]
            size -= len(piece)

    def _read_events(self) -> None:
        *events, rest = bytes(self._body).split(b"\n\n")
        self._body = bytearray(rest)
        for event in events:
            kind, _, data = event.partition(b":")
            if kind != b"data":
                continue  # a comment keeps the connection alive and says nothing
            if data.strip() == b"[DONE]":
                self._said_done = True
                continue
            heard = msgspec.json.decode(data, type=_Event)
            if heard.id:
                self.ids.add(heard.id)
            for choice in heard.choices:
                self.finish_reason = choice.finish_reason or self.finish_reason
            if heard.error is not None:
                self.said_error = True
                self._fail(f"the engine answered: {heard.error.message}")
            if heard.usage is not None:
                self.tokens = max(self.tokens, heard.usage.completion_tokens)
            elif any(choice.text or choice.delta.content for choice in heard.choices):
                self.tokens += 1

    def _finish(self) -> None:
        if self.status != 200:
            return self._fail(f"HTTP {self.status}: {bytes(self._body[:200]).decode(errors='replace')}")
        if self._streamed:
            self._read_events()
            self.truncated = not (self._said_done or self.error)
            if self.truncated:
                return self._fail("the stream ended before [DONE]")
        else:
            usage = msgspec.json.decode(self._body, type=_Event).usage
            self.tokens = usage.completion_tokens if usage is not None else 0
        self.complete = not self.error  # which may stand inside a stream that then ends as any other
        return None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


#: The receive buffer of a user who is to stall, bytes: it is full, and the window shut, after a few tokens.
_SMALL_BUFFER = 4096


class Visit:
    """One user at one address, while it is there: ``tokens`` and ``first_token`` can be watched from outside.

    ``arrivals`` are the instants at which its tokens came, and ``answer`` is what it has read.
    ``cut`` cuts a port off from the network, for one who vanishes.
    """

    def __init__(
        self, user: User, port: int, host: str = LOOPBACK, cut: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        self.user = user
        self.own_port = 0
        self.left: float | None = None
        self._cut = cut
        self.sent: float | None = None
        self.first_token: float | None = None
        self.outcome: Outcome | None = None
        self.arrivals: list[float] = []
        self.answer = AnswerReader(streamed=user.stream)
        self._address = (host, port)

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        return self.answer.tokens

    async def run(self) -> Outcome:
        """Do what the user is going to do, and return what became of it. Nothing raises but being cancelled."""
        how: End = "failed"
        with socket.socket() as sock:
            sock.setblocking(False)
            try:
                how = await self._visit(sock)
            except OSError as error:
                self.answer.error = self.answer.error or (os.strerror(error.errno) if error.errno else str(error))
        ended = time.monotonic()
        self.outcome = Outcome(
            user=self.user,
            how=how,
            tokens=self.tokens,
            sent=ended if self.sent is None else self.sent,
            first_token=self.first_token,
            ended=ended,
            status=self.answer.status,
            detail=self.answer.error if how == "failed" else "",
            port=self.own_port,
            left=self.left,
        )
        return self.outcome

    async def _visit(self, sock: socket.socket) -> End:
        loop = asyncio.get_running_loop()
        if self.user.leaving == "stall":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        await loop.sock_connect(sock, self._address)
        self.own_port = sock.getsockname()[1]
        await loop.sock_sendall(sock, self.user.request(self._address[0]))
        self.sent = time.monotonic()
        try:
            leave_at = None if self.user.leave_at is None else self.sent + self.user.leave_at
            async with asyncio.timeout_at(leave_at) as stay:  # the loop's clock is time.monotonic()
                return await self._read(sock)
        except TimeoutError:
            if not stay.expired():
                raise  # the kernel gave up on the connection (ETIMEDOUT)
        self.left = time.monotonic()
        match self.user.leaving:
            case "half-close":
                sock.shutdown(socket.SHUT_WR)
                return await self._read(sock)
            case "stall":
                await asyncio.sleep(self.user.stalls)
                return await self._read(sock)
            case "vanish":
                assert self._cut is not None, "a user who vanishes needs a network that cuts it off"
                await self._cut(self.own_port)
                self.left = time.monotonic()
        self._read_acknowledged(sock)
        if self.user.leaving in ("rst", "vanish"):  # the reset of one who vanished goes nowhere
            # Linger on, for 0 s: close() resets, tcp(7), socket(7).
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "completed" if self.answer.complete else "left"

    async def _read(self, sock: socket.socket) -> End:
        """Read to the end. Cancelled, it has taken in all that it has read: ``loop.sock_recv`` would lose the last."""
        while True:
            self._read_acknowledged(sock)
            if self.answer.complete or self.answer.error:
                return "completed" if self.answer.complete else "failed"
            await _readable(sock)

    def _read_acknowledged(self, sock: socket.socket) -> None:
        """Read what has arrived: the kernel has acknowledged it, and with it unread close() would reset (RFC 2525)."""
        while not (self.answer.complete or self.answer.error):
            try:
                self._take(sock.recv(65_536))
            except BlockingIOError:
                return

    def _take(self, data: bytes) -> None:
        if data:
            self.answer.feed(data)
        else:
            self.answer.end()
        if new := self.answer.tokens - len(self.arrivals):
            now = time.monotonic()
            self.arrivals += [now] * new
            if self.first_token is None:
                self.first_token = now


async def _readable(sock: socket.socket) -> None:
    """Wait until a socket has something to read."""
    loop = asyncio.get_running_loop()
    there: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not there.done():
            there.set_result(None)

    loop.add_reader(sock, tell)
    try:
        await there
    finally:
        loop.remove_reader(sock)


def crowd(count: int, leavers: int, **plan: Any) -> list[User]:
    """Return the users of a drill, who come all at once: ``count``, of whom ``leavers`` leave at ``leave_at``.

    Leavers are spread evenly over the crowd, so that in a queue some leave while they wait and some while they are
    served. ``plan`` is what they have in common (fields of :class:`User`).
    """
    leave_at = plan.pop("leave_at", 1.5)
    return [
        User(
            id=f"user-{number:02d}",
            leave_at=leave_at if (number + 1) * leavers // count > number * leavers // count else None,
            **plan,
        )
        for number in range(count)
    ]


def passers_by(
    seed: int, *, every: float, leaving_ratio: float = 0.4, stays: float = 4.0
) -> Iterator[tuple[float, User]]:
    """Yield the endless users of a demo: how long after the one before, seconds, and who.

    They come at random, one in ``every`` seconds on average, with prompts and answers of all sizes; of those who leave,
    each stays up to ``stays`` seconds and leaves in one of two ways. The same seed yields the same users.
    """
    chance = random.Random(seed)  # noqa: S311 - a demo's traffic, nothing secret
    for number in itertools.count():
        leaves = chance.random() < leaving_ratio
        yield (
            chance.expovariate(1 / every),
            User(
                id=f"passer-by-{number}",
                prompt_tokens=chance.choice((50, 100, 400, 1500)),
                max_tokens=chance.randint(40, 300),
                stream=chance.random() < 0.9,
                leave_at=chance.uniform(0.2, stays) if leaves else None,
                leaving=chance.choice(("fin", "rst")),
            ),
        )
