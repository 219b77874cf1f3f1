"""What stands before every route: passwords, rates, headers, connections, and what errors tell."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import bcrypt
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from series.example import rich_view
from tokengap.config.values import Count
from tokengap.config.web import RateSettings, Spacing
from tokengap.series.render import render
from tokengap.web import guard as guards
from tokengap.web import server as servers
from tokengap.web.access import Access, read_access
from tokengap.web.guard import EACH, Bucket, Buckets, Busy, Guard, Passwords
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving
from web.certificates import certificates

__all__ = ["certificates"]

#: The cheapest hash that there is.
HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4))

EVERY_ANSWER = (
    *("Content-Security-Policy", "X-Content-Type-Options", "X-Frame-Options", "Referrer-Policy"),
    *("Cross-Origin-Opener-Policy", "Cross-Origin-Resource-Policy"),
)


def basic(user: str, password: str) -> str:
    """The header of a user with a password."""
    return aiohttp.encode_basic_auth(user, password)


@asynccontextmanager
async def served(access: Access | None = None, app: web.Application | None = None) -> AsyncIterator[Server]:
    """A server with a view to show, or another application, behind a guard."""
    serving = Serving(also=())
    view = rich_view()
    serving.publish(view, render(view))
    server = Server(app or make_app(serving), Guard(access))
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop()


async def said(server: Server, request: bytes, host: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body with which bytes from an address are answered; the answer has to end the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=(host, 0))
    writer.write(request)
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    first, *fields = head.decode().split("\r\n")
    return int(first.split()[1]), dict(field.split(": ", 1) for field in fields), body


def get(path: str, *fields: str) -> bytes:
    """A request after which the connection ends."""
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: x", "Connection: close", *fields, "", "")).encode()


# --- passwords ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (basic("alice", "secret"), 200),
        (basic("alice", "Secret"), 401),
        (basic("alice", ""), 401),
        (basic("bob", "secret"), 401),
        (basic("", "secret"), 401),
        ("", 401),
        ("Basic", 401),
        ("Basic !!!", 401),
        ("Basic YWxpY2U=", 401),
        ("Basic /////w==", 401),
        ("Bearer secret", 401),
        (basic("alice", "secret\0"), 401),
        (basic("alice", "x" * 5000), 401),
    ],
)
async def test_who_may_ask(authorization: str, status: int):
    """Only a user with the right password; whatever else stands in the header is none."""
    async with served(Access(users={"alice": HASH})) as server:
        for path in ("/metrics", "/", "/api/streams", "/runbooks/", "/static/page.css"):
            code, headers, body = await said(server, get(path, f"Authorization: {authorization}"))
            assert code == status, path
            if status == 401:
                assert headers["WWW-Authenticate"].startswith("Basic ")
                assert body == b"a user and a password are needed\n"


async def test_what_is_not_there_needs_a_password_too():
    """Without one nobody learns which paths there are."""
    async with served(Access(users={"alice": HASH})) as server:
        assert (await said(server, get("/nothing")))[0] == 401
        assert (await said(server, get("/static/nothing")))[0] == 401


async def test_probes_have_no_password():
    """Health and readiness answer everybody: a kubelet cannot log in."""
    async with served(Access(users={"alice": HASH}, rate=RateSettings(Spacing(3600), Count(1)))) as server:
        for _ in range(3):
            for path in ("/-/healthy", "/-/ready"):
                assert (await said(server, get(path)))[0] == 200


async def test_a_long_password_is_taken_as_htpasswd_does():
    """bcrypt looks at 72 bytes; what stands after them makes no difference, and no error."""
    hashed = bcrypt.hashpw(b"x" * 72, bcrypt.gensalt(4))
    passwords = Passwords({"alice": hashed})
    assert await passwords.right(basic("alice", "x" * 80))
    assert not await passwords.right(basic("alice", "x" * 71))


async def test_the_right_password_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    """A scraper costs one hash; a wrong password costs one each time, and so does a user that there is not."""
    hashed: list[bytes] = []
    really = bcrypt.checkpw

    def check(password: bytes, against: bytes) -> bool:
        hashed.append(password)
        return really(password, against)

    monkeypatch.setattr(guards.bcrypt, "checkpw", check)
    passwords = Passwords({"alice": HASH})
    for _ in range(3):
        assert await passwords.right(basic("alice", "secret"))
    assert hashed == [b"secret"]
    for user in ("alice", "bob", "bob"):
        assert not await passwords.right(basic(user, "wrong"))
    assert hashed == [b"secret", b"wrong", b"wrong", b"wrong"]
    assert not await passwords.right(basic("bob", "secret"))  # the decoy's password opens nothing
    assert not await passwords.right(basic("bob", "secret"))


async def test_what_is_remembered_is_bounded_and_no_password(monkeypatch: pytest.MonkeyPatch):
    """However many right passwords there are (bcrypt looks at 72 bytes), few are kept, none of them in clear."""
    monkeypatch.setattr(guards, "MOST_REMEMBERED", 3)
    passwords = Passwords({"alice": bcrypt.hashpw(b"x" * 72, bcrypt.gensalt(4))})
    for more in range(5):
        assert await passwords.right(basic("alice", "x" * (72 + more)))
    assert len(passwords._remembered) == 3
    assert not any(b"xx" in kept for kept in passwords._remembered)


async def test_hashing_delays_nobody(monkeypatch: pytest.MonkeyPatch):
    """While passwords are hashed, one after the other, who is known is answered at once; too many at a time are 503."""
    let_go, at_once, most = threading.Event(), 0, 0

    def check(password: bytes, _: bytes) -> bool:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        assert password == b"secret" or let_go.wait(20)
        at_once -= 1
        return password == b"secret"

    monkeypatch.setattr(guards.bcrypt, "checkpw", check)
    passwords = Passwords({"alice": HASH})
    assert await passwords.right(basic("alice", "secret"))
    guessing = [asyncio.create_task(passwords.right(basic("alice", f"{n}"))) for n in range(guards.MOST_WAITING)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(5):
            assert await passwords.right(basic("alice", "secret"))
        with pytest.raises(Busy):
            await passwords.right(basic("alice", "one more"))
    finally:
        let_go.set()
    assert await asyncio.gather(*guessing) == [False] * guards.MOST_WAITING
    assert most == 1
    assert not await passwords.right(basic("alice", "one more"))


# --- rates ----------------------------------------------------------------------------------------------------------


async def test_too_often():
    """Who asks more often than is allowed is told to come back, before any password is looked at."""
    async with served(Access(users={"alice": HASH}, rate=RateSettings(Spacing(3600), Count(2)))) as server:
        answers = [await said(server, get("/metrics")) for _ in range(3)]
        assert [status for status, _, _ in answers] == [401, 401, 429]
        assert answers[-1][1]["Retry-After"] == "1"


async def test_too_often_where_no_file_says_how_often(monkeypatch: pytest.MonkeyPatch):
    """Each client has a bucket of its own, and what lies ready for scrapers and probes takes nothing from it: nobody
    keeps a scraper out, not even from its own address. Where the file says so, nothing is limited."""
    monkeypatch.setattr(guards, "EACH", RateSettings(Spacing(3600), Count(2)))

    async def statuses(server: Server, path: str, host: str = "127.0.0.1") -> list[int]:
        return [(await said(server, get(path), host))[0] for _ in range(3)]

    async with served() as server:
        assert await statuses(server, "/api/now") == [200, 200, 429]
        assert await statuses(server, "/metrics?name[]=tokengap_streams") == [429] * 3
        for path in ("/metrics", "/-/ready"):
            assert await statuses(server, path) == [200] * 3
        assert await statuses(server, "/api/now", "127.0.0.2") == [200, 200, 429]
    async with served(Access(rate=RateSettings(Spacing(0)))) as server:
        assert await statuses(server, "/api/now") == [200] * 3


def test_by_default_there_is_room_for_people():
    """Thirty tabs of the live page behind one address ask as often as they like, from the moment they are opened."""
    buckets, asked = Buckets(EACH), 0
    for second in range(60):
        for tab in range(30):
            requests = 12 if second == 0 else 2
            asked += requests
            assert all(buckets.take("10.0.0.1", 1000.0 + second + tab / 30) for _ in range(requests))
    assert asked > 30 * 60 * 2


def test_clients_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """Those that asked last; who asks all the time is among them, and gets no fresh bucket by it."""
    monkeypatch.setattr(guards, "MOST_CLIENTS", 3)
    buckets = Buckets(RateSettings(Spacing(3600), Count(6)))
    for number in range(6):
        assert buckets.take("busy", 1.0)
        assert buckets.take(f"10.0.0.{number}", 1.0)
    assert len(buckets._buckets) == 3
    assert not buckets.take("busy", 1.0)


def test_a_bucket_fills_with_time():
    """As many as burst at once, and one more each interval, never more than burst."""
    bucket = Bucket(RateSettings(Spacing(0.5), Count(2)))
    assert [bucket.take(100.0) for _ in range(3)] == [True, True, False]
    assert not bucket.take(100.49)
    assert bucket.take(100.51)
    assert not bucket.take(100.52)
    assert [bucket.take(200.0) for _ in range(3)] == [True, True, False]


@given(st.integers(1, 20), st.floats(0.01, 10), st.lists(st.floats(0, 5), max_size=60))
def test_a_bucket_is_never_overdrawn(burst: int, interval: float, pauses: list[float]):
    """In any time, at most burst and as many as intervals have passed in it."""
    bucket, now, taken = Bucket(RateSettings(Spacing(interval), Count(burst))), 1000.0, []
    for pause in pauses:
        now += pause
        if bucket.take(now):
            taken.append(now)
    for number, began in enumerate(taken):
        for later, ended in enumerate(taken[number:], start=1):
            assert later <= burst + (ended - began) / interval + 1e-6


# --- headers, errors, logs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/metrics"), 200),
        (get("/"), 200),
        (get("/-/healthy"), 200),
        (get("/runbooks"), 308),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (get("/nothing"), 404),
        (get("/api/now?sort=<script>"), 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA B: x\r\n\r\n", 400),
        (get("/", "X-Huge: " + "a" * 9000), 400),
        (get("/", *(f"X-{n}: a" for n in range(200))), 400),
        (get("/" + "a" * 9000), 400),
    ],
)
async def test_every_answer_has_the_headers(request_: bytes, status: int):
    """Answers, refusals and what was no request at all: the same headers, no version, nothing of what was sent."""
    async with served() as server:
        code, headers, body = await said(server, request_)
    assert code == status
    assert set(EVERY_ANSWER) <= set(headers)
    assert headers["Server"] == "tokengap"
    assert b"aaaa" not in body
    assert b"<script>" not in body


async def test_the_file_sets_headers():
    """A header of the file takes the place of ours, and an empty one takes ours away."""
    mine = {"X-Frame-Options": "sameorigin", "Content-Security-Policy": "", "Strict-Transport-Security": "max-age=1"}
    async with served(Access(headers=mine)) as server:
        for request in (get("/"), get("/nothing"), b"no request\r\n\r\n"):
            _, headers, _ = await said(server, request)
            assert headers["X-Frame-Options"] == "sameorigin"
            assert headers["Strict-Transport-Security"] == "max-age=1"
            assert "Content-Security-Policy" not in headers
            assert headers["X-Content-Type-Options"] == "nosniff"


async def test_a_failure_of_ours_tells_the_client_nothing(caplog: pytest.LogCaptureFixture):
    """A bug is one line for the client and a traceback for the log, though asyncio debugs; who asked is in neither."""

    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("secret of the house")

    app = web.Application()
    app.router.add_get("/", broken)
    asyncio.get_running_loop().set_debug(True)
    async with served(app=app) as server:
        for accept in ("text/html", "text/plain"):
            code, headers, body = await said(server, get("/?key=hunter2", f"Accept: {accept}"))
            assert (code, body) == (500, b"internal server error\n")
            assert "Content-Security-Policy" in headers
    (record, _) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert record.exc_info is not None
    assert "127.0.0.1" not in caplog.text
    assert "hunter2" not in caplog.text


async def test_nothing_of_who_asks_is_logged(caplog: pytest.LogCaptureFixture):
    """Not even at debug level: no address, no header, no query, whatever was sent."""
    caplog.set_level(logging.DEBUG)
    async with served(Access(users={"alice": HASH})) as server:
        secret = basic("alice", "hunter2")
        for request in (get("/?key=hunter2", f"Authorization: {secret}"), b"hunter2 is no request\r\n\r\n"):
            await said(server, request)
    assert not [word for word in ("hunter2", secret.split()[1], "alice") if word in caplog.text]
    assert not [record for record in caplog.records if record.name.startswith(("tokengap", "aiohttp"))]


@pytest.mark.parametrize("target", ["*", "//", "http:///x", "http://[::1/x", "?", "#"])
async def test_no_target_keeps_a_connection(target: str, caplog: pytest.LogCaptureFixture):
    """What is no target is answered or not, but the connection ends, and nothing is logged."""
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(get(target))
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert not answer or answer.split()[1] in (b"400", b"404", b"200")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- connections ----------------------------------------------------------------------------------------------------


async def test_one_more_connection_takes_the_place_of_the_oldest_idle_one(monkeypatch: pytest.MonkeyPatch):
    """Whoever opens connections and asks nothing keeps nobody out, and one whose answer is being made stays."""
    monkeypatch.setattr(servers, "MOST_CONNECTIONS", 4)
    let_go, asked = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        asked.set()
        await let_go.wait()
        return web.Response(text="slow\n")

    async def quick(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/slow", slow)
    app.router.add_get("/", quick)
    async with served(app=app) as server, asyncio.timeout(20):
        answer = asyncio.create_task(said(server, get("/slow")))
        await asked.wait()
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for _ in range(3):
            assert (await said(server, get("/")))[0] == 200
        assert await idle[0][0].read() == b""
        let_go.set()
        assert (await answer)[2] == b"slow\n"
        for _, writer in idle:
            writer.close()


async def test_no_place_is_left(monkeypatch: pytest.MonkeyPatch):
    """Where all connections are being answered, one more is ended; the server goes on when they are done."""
    monkeypatch.setattr(servers, "MOST_CONNECTIONS", 1)
    let_go, asked = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        asked.set()
        await let_go.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/", slow)
    async with served(app=app) as server, asyncio.timeout(20):
        answer = asyncio.create_task(said(server, get("/")))
        await asked.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        let_go.set()
        assert (await answer)[0] == 200
        assert (await said(server, get("/")))[0] == 200


async def test_a_header_that_never_ends(monkeypatch: pytest.MonkeyPatch):
    """Who sends a header byte by byte is cut off, however busily."""
    monkeypatch.setattr(servers, "KEEP_ALIVE", 0.3)
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                while not reader.at_eof():
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(0.05)
        writer.close()


async def test_an_endless_body_is_not_read(monkeypatch: pytest.MonkeyPatch):
    """Who posts without end is refused, and cut off a moment later."""
    monkeypatch.setattr(servers, "LINGER", 0.1)
    async with served() as server:

        def post() -> bytes:
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as rude:
                rude.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n")
                answer = rude.recv(65536)
                with suppress(ConnectionError):
                    while rude.send(b"x" * 65536):  # TimeoutError: it is neither read nor cut off
                        pass
                return answer

        assert (await asyncio.to_thread(post)).startswith(b"HTTP/1.1 405")


# --- handshakes -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def encrypted(certificates: Path) -> AsyncIterator[tuple[Server, ssl.SSLContext]]:
    """A server with TLS, and what trusts it."""
    file = certificates / "handshakes.yml"
    file.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}")
    tls = read_access(file).tls
    server = Server(make_app(Serving(also=())))
    await server.start("127.0.0.1", 0, tls)
    try:
        yield server, ssl.create_default_context(cafile=certificates / "ca.crt")
    finally:
        await server.stop()


async def healthy(server: Server, trust: ssl.SSLContext) -> bool:
    """Whether it answers somebody who can shake hands."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trust)
    writer.write(get("/-/healthy"))
    answer = await reader.read()
    writer.close()
    return answer.endswith(b"healthy\n")


async def test_handshakes_that_nobody_finishes(certificates: Path, monkeypatch: pytest.MonkeyPatch):
    """They are counted: one more takes the place of the oldest, and who can shake hands is answered all the while. What
    is no handshake is over at once, and stopping waits for none."""
    monkeypatch.setattr(servers, "MOST_HANDSHAKES", 4)
    async with encrypted(certificates) as (server, trust), asyncio.timeout(20):
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(10)]
        for reader, _ in silent[:6]:
            assert await reader.read() == b""
        assert await healthy(server, trust)
        assert len(server._handshakes) <= 4
        silent[-1][1].write(b"GET / HTTP/1.1\r\n\r\n")
        await silent[-1][0].read()
        assert await healthy(server, trust)
    for _, writer in silent:
        writer.close()


async def test_a_handshake_has_its_time(certificates: Path, monkeypatch: pytest.MonkeyPatch):
    """Who does not finish it is cut off."""
    monkeypatch.setattr(servers, "HANDSHAKE_DEADLINE", 0.2)
    async with encrypted(certificates) as (server, _), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x16\x03\x01")
        assert await reader.read() == b""
        writer.close()
        await asyncio.gather(*server._handshakes)
        assert not server._handshakes
