"""Bytes that nobody expects: whatever is sent, answers are answers, nothing leaks, and the exporter goes on."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import bcrypt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from series.example import rich_view
from tokengap.config.web import RateSettings, Spacing
from tokengap.series.render import render
from tokengap.web.access import Access
from tokengap.web.guard import Guard
from tokengap.web.routes import PAGES, make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

PASSWORD = b"a password nobody may see"

#: What an answer may be. 500 is not: a bug of ours.
STATUSES = frozenset((200, 308, 400, 401, 404, 405, 417, 503))

#: What would be of this host or of our code: a file's text, a traceback, who asked for what with which password.
LEAKS = (b"root:x:", b"Traceback", b'File "', b"site-packages", b"import ", b"aiohttp", PASSWORD, b64encode(PASSWORD))

PATHS = (
    *PAGES,
    *("/metrics", "/static/page.css", "/runbooks/", "/runbooks/TokengapDown", "/-/healthy", "/nothing"),
    *(f"/api/{name}" for name in ("now", "history", "streams", "engines", "hops", "gpus", "sources")),
)

#: Letters that may stand anywhere in a header; others end most requests before anything of ours sees them.
words = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
anything = st.text(max_size=12)


def mostly(usual: st.SearchStrategy[str], rare: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """The one nine times in ten."""
    return st.sampled_from((*[usual] * 9, rare)).flatmap(lambda chosen: chosen)


PIECES = st.sampled_from(
    (
        *("..", "../..", "%2e%2e", "..%2f..%2f", "%252e%252e", "..\\..", "....//", "etc/passwd", "%2fetc%2fpasswd"),
        *("static", "runbooks", "page.html", "README.md", "routes.py", "%00", "%", "%zz", "%ff", ";", "?", "#", "//"),
        *("?name[]=", "?top=-1", "?top=9e9", "?sort=cost", "?client=gone&client=", "?" + "a" * 300, "é"),
        *("?limit=1&offset=", "?offset=9e9"),
    )
)
targets = mostly(
    st.one_of(
        st.sampled_from(PATHS),
        st.builds(lambda path, pieces: path + "/".join(pieces), st.sampled_from(PATHS), st.lists(PIECES, max_size=6)),
        st.builds("http://{}/{}".format, st.sampled_from(("x", "127.0.0.1:1", "[::1]", "")), PIECES),
        words.map("/{}".format),
        st.just("*"),
    ),
    anything,
)
methods = mostly(
    st.sampled_from(("GET", "GET", "GET", "HEAD", "POST", "OPTIONS", "CONNECT", "TRACE", "PRI", "get")), words
)
names = mostly(
    st.sampled_from(
        (
            *("Accept", "Accept-Encoding", "Authorization", "Connection", "Cookie", "Content-Encoding", "Expect"),
            *("Upgrade", "Range", "If-None-Match", "If-Modified-Since", "X-Forwarded-For", "X-HTTP-Method-Override"),
        )
    ),
    # With most values these end a request.
    st.sampled_from(("Content-Length", "Transfer-Encoding", "Host")) | anything,
)
values = mostly(
    st.sampled_from(
        (
            *("gzip", "gzip;q=a", "text/plain;q=0,*/*", "application/openmetrics-text;version=9", "text/html", "-1"),
            *("chunked", "chunked, chunked", "close", "keep-alive", "Upgrade", "websocket", "h2c", "100-continue", "5"),
            *("Basic", "Basic ====", "Basic Og==", "Basic YTpi", "Bearer x", "99999999999999999999", "0", "bytes=0-"),
        )
    )
    | words,
    anything,
)
requests = st.builds(
    lambda method, target, version, fields, body: (
        (
            f"{method} {target} {version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields) + "\r\n"
        ).encode(errors="replace")
        + body
    ),
    methods,
    targets,
    mostly(st.sampled_from(("HTTP/1.1", "HTTP/1.0")), st.sampled_from(("HTTP/2.0", "HTTP/0.9", "http/1.1", ""))),
    st.lists(st.tuples(names, values), max_size=5).map(lambda fields: [("Host", "x"), *fields]),
    st.one_of(st.just(b""), st.binary(max_size=40), st.just(b"5\r\nhello\r\n0\r\n\r\n")),
)
cut = st.builds(lambda request, share: request[: int(len(request) * share)], requests, st.floats(0, 1))
sent = st.one_of(
    requests, requests, requests, st.lists(requests, min_size=2, max_size=4).map(b"".join), cut, st.binary(max_size=200)
)


@dataclass(frozen=True)
class Fuzzed:
    """A server in a thread of its own, and what it logged."""

    port: int
    records: list[logging.LogRecord]

    def answer(self, request: bytes) -> bytes:
        """Send bytes, then a request that ends the connection, and return all that comes back until it is quiet."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=0.15) as client:
            answer = b""
            try:
                client.sendall(request)
                client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                while chunk := client.recv(1 << 16):
                    answer += chunk
            except (TimeoutError, ConnectionError):
                pass  # it waits for the rest, or has heard enough
            return answer

    def healthy(self) -> bool:
        """Whether it answers a plain request."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as client:
            client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return client.recv(1 << 16).startswith(b"HTTP/1.1 200")


class _Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def fuzzed(access: Access) -> Iterator[Fuzzed]:
    """Serve in a thread, so that clients may be plain sockets."""
    loop, kept = asyncio.new_event_loop(), _Kept()
    serving = Serving(also=())
    view = rich_view()

    async def start() -> Server:
        serving.publish(view, render(view))
        server = Server(make_app(serving), Guard(replace(access, rate=RateSettings(interval=Spacing(0)))))
        await server.start("127.0.0.1", 0)
        return server

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    logging.getLogger().addHandler(kept)
    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield Fuzzed(server.port, kept.records)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        logging.getLogger().removeHandler(kept)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.fixture(scope="module")
def open_server() -> Iterator[Fuzzed]:
    """Everybody may ask."""
    with fuzzed(Access()) as server:
        yield server


@pytest.fixture(scope="module")
def closed_server() -> Iterator[Fuzzed]:
    """Nobody has the password."""
    with fuzzed(Access(users={"alice": bcrypt.hashpw(PASSWORD, bcrypt.gensalt(4))})) as server:
        yield server


def check(server: Fuzzed, request: bytes, statuses: frozenset[int]) -> None:
    """Every answer has a status that may be and the headers; nothing leaks; nothing is logged; the server lives."""
    answer = server.answer(request)
    heads = re.findall(rb"(?:^|(?<=\n)|(?<=}))HTTP/\d\.\d (\d{3}) [^\r]*\r\n(.*?)\r\n\r\n", answer, re.DOTALL)
    assert not answer or answer.startswith(b"HTTP/")
    for status, fields in heads:
        if status == b"100":  # of `Expect`: no answer yet
            continue
        assert int(status) in statuses, answer[:300]
        assert b"\r\nX-Content-Type-Options: nosniff" in b"\r\n" + fields
        assert b"Server: tokengap" in fields
    # The runbooks' own text may speak of imports.
    assert not [leak for leak in LEAKS if leak in answer and b"<title>" not in answer], answer[:300]
    noise = [record for record in server.records if record.levelno >= logging.WARNING]
    assert not noise, (noise[0].name, noise[0].getMessage(), noise[0].exc_info)
    assert not [record for record in server.records if record.name.startswith(("tokengap", "aiohttp"))]
    assert server.healthy()


@given(request_=sent)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_sent(open_server: Fuzzed, request_: bytes):
    """A search too short to find much, and long enough to find a blunder."""
    check(open_server, request_, STATUSES)


@given(request_=sent)
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_without_the_password(closed_server: Fuzzed, request_: bytes):
    """Without a password there is nothing but health: 200 only for that."""
    check(closed_server, request_, STATUSES - {308, 404, 405})


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@given(request_=sent)
@settings(max_examples=2000, derandomize=False, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
def test_whatever_is_sent_for_long(open_server: Fuzzed, closed_server: Fuzzed, seed: int, request_: bytes):
    """The same, with new examples each time."""
    check(open_server if seed % 2 else closed_server, request_, STATUSES)
