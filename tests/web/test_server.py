"""What is served, over real connections: scrapes, JSON, health, the live page, and those who misbehave."""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from prometheus_client import Metric
from prometheus_client.registry import Collector
from yarl import URL

from series.example import rich_view, view_with
from tokengap.errors import SettingsError, SetupError
from tokengap.series.render import Page, render
from tokengap.web import routes
from tokengap.web.negotiation import CONTENT_TYPES
from tokengap.web.routes import make_app
from tokengap.web.server import Server, parse_listen
from tokengap.web.serving import MOST_MADE, Serving

Serve: TypeAlias = Callable[[Serving], Awaitable[aiohttp.ClientSession]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A function that serves on a free port and returns a client of it, which asks for nothing by itself."""
    async with AsyncExitStack() as stack:

        async def start(serving: Serving) -> aiohttp.ClientSession:
            server = Server(make_app(serving))
            await server.start("127.0.0.1", 0)
            stack.push_async_callback(server.stop)
            return await stack.enter_async_context(
                aiohttp.ClientSession(
                    server.url, auto_decompress=False, skip_auto_headers=["Accept", "Accept-Encoding"]
                )
            )

        yield start


def published(**settings: object) -> Serving:
    """The rich view, published."""
    serving = Serving(also=(), **settings)
    view = rich_view()
    serving.publish(view, render(view))
    return serving


def address(client: aiohttp.ClientSession) -> tuple[str, int]:
    """Where the client's server listens."""
    url = client._base_url
    assert url is not None
    assert url.host is not None
    assert url.port is not None
    return url.host, url.port


@pytest.mark.parametrize("accept", [None, "text/plain;version=0.0.4", "text/html", "garbage", "*/*"])
async def test_text_is_the_default(serve: Serve, accept: str | None) -> None:
    """Without a wish that can be met, the scrape is text 0.0.4, not gzipped."""
    serving = published()
    client = await serve(serving)
    async with client.get("/metrics", headers={"Accept": accept} if accept else {}) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "Content-Encoding" not in answer.headers
        assert await answer.read() == serving.page.text


@pytest.mark.parametrize("version", ["", ";version=1.0.0", ";version=2.0.0;q=0.9,application/openmetrics-text"])
async def test_openmetrics_when_asked(serve: Serve, version: str) -> None:
    """OpenMetrics is answered as 1.0.0, which is what it is, whatever else was asked for beside it."""
    serving = published()
    client = await serve(serving)
    async with client.get("/metrics", headers={"Accept": f"application/openmetrics-text{version}"}) as answer:
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert await answer.read() == serving.page.openmetrics


@pytest.mark.parametrize(("wanted", "content_type"), CONTENT_TYPES.items())
async def test_gzip(serve: Serve, wanted: str, content_type: str) -> None:
    """Both formats come gzipped to who accepts it, and say so."""
    serving = published()
    client = await serve(serving)
    async with client.get("/metrics", headers={"Accept": content_type, "Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"
        assert gzip.decompress(await answer.read()) == getattr(serving.page, wanted)


async def test_gzip_refused(serve: Serve) -> None:
    """`gzip;q=0` means no gzip."""
    client = await serve(published())
    async with client.get("/metrics", headers={"Accept-Encoding": "gzip;q=0"}) as answer:
        assert "Content-Encoding" not in answer.headers


async def test_scrapes_share_the_bytes_of_the_beat() -> None:
    """A scrape hands out the rendered object itself: nothing is rendered or copied for it."""
    serving = published()
    handlers = routes._Routes(serving)
    for headers, expected in (
        ({}, serving.page.text),
        ({"Accept-Encoding": "gzip"}, serving.page.text_gzip),
        ({"Accept": "application/openmetrics-text"}, serving.page.openmetrics),
        ({"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"}, serving.page.openmetrics_gzip),
    ):
        answer = await handlers.metrics(make_mocked_request("GET", "/metrics", headers=headers))
        assert answer.body is expected


async def test_head_has_the_headers_and_no_body(serve: Serve) -> None:
    """HEAD tells the length a GET would have."""
    serving = published()
    client = await serve(serving)
    async with client.head("/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Length"] == str(len(serving.page.text))
        assert await answer.read() == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/metrics", "/", "/api/streams", "/-/healthy"])
async def test_other_methods_are_refused(serve: Serve, method: str, path: str) -> None:
    """Anything but GET and HEAD is 405 and says what is allowed."""
    client = await serve(published())
    async with client.request(method, path) as answer:
        assert answer.status == 405
        assert {"GET", "HEAD"} == {allowed.strip() for allowed in answer.headers["Allow"].split(",")}


async def test_name_filter(serve: Serve) -> None:
    """`name[]` keeps what it names, in either format, gzipped or not; an unknown name leaves an empty page."""
    client = await serve(published())
    query = [("name[]", "tokengap_queue_age_seconds"), ("name[]", "tokengap_beats_total")]
    async with client.get("/metrics", params=query) as answer:
        lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        assert lines == ['tokengap_queue_age_seconds{engine="worker"} 6.75', "tokengap_beats_total 4321.0"]
    wish = {"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"}
    async with client.get("/metrics", params=query[:1], headers=wish) as answer:
        text = gzip.decompress(await answer.read())
        assert text.endswith(b'tokengap_queue_age_seconds{engine="worker"} 6.75\n# EOF\n')
    async with client.get("/metrics", params={"name[]": "nobody"}) as answer:
        assert (answer.status, await answer.read()) == (200, b"")


async def test_two_scrapes_at_once(serve: Serve) -> None:
    """Two scrapers are answered alike, also while a beat publishes."""
    serving = published()
    client = await serve(serving)

    async def scrape() -> bytes:
        async with client.get("/metrics") as answer:
            return await answer.read()

    first = serving.page.text
    answers = await asyncio.gather(scrape(), scrape(), serving.render_and_publish(view_with(50)))
    assert serving.page.text != first
    assert set(answers[:2]) <= {first, serving.page.text}


async def test_before_the_first_beat(serve: Serve) -> None:
    """Nothing is known yet: scrapes and readiness say 503 in one line, health and the live page are there."""
    serving = Serving()
    client = await serve(serving)
    for path in ("/metrics", "/-/ready", "/api/now", "/api/streams", "/api/engines", "/api/sources"):
        async with client.get(path) as answer:
            assert (answer.status, await answer.text()) == (503, "the first beat is not done yet\n")
            assert answer.headers["Retry-After"] == "1"
    for path in ("/-/healthy", "/"):
        async with client.get(path) as answer:
            assert answer.status == 200
    await serving.render_and_publish(rich_view())
    for path in ("/metrics", "/-/ready", "/api/streams"):
        async with client.get(path) as answer:
            assert answer.status == 200


async def test_the_process_is_on_the_page(serve: Serve) -> None:
    """The exporter's own memory and CPU are there without being asked for, and can be asked for by name."""
    serving = Serving()
    client = await serve(serving)
    await serving.render_and_publish(rich_view())
    for params in ({}, {"name[]": "process_resident_memory_bytes"}):
        async with client.get("/metrics", params=params) as answer:
            assert "\nprocess_resident_memory_bytes " in await answer.text()


class _Held(Collector):
    """A collector that waits until it is let go, so that a scrape can be kept in progress."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def describe(self) -> Iterable[Metric]:
        return [Metric("held", "A test's own.", "gauge")]

    def collect(self) -> Iterable[Metric]:
        self.entered.set()
        assert self.let_go.wait(20)
        return []


async def test_too_many_scrapes_are_refused_and_health_is_not(serve: Serve) -> None:
    """At the limit one more request is 503 at once; health answers; when one ends, scrapes are served again."""
    held = _Held()
    serving = published(limit=1)
    serving.also = (held,)
    client = await serve(serving)
    slow = asyncio.create_task(client.get("/metrics", params={"name[]": "held"}))
    try:
        assert await asyncio.to_thread(held.entered.wait, 10)
        async with client.get("/metrics") as answer:
            assert answer.status == 503
            assert "the most at once" in await answer.text()
        async with client.get("/-/healthy") as answer:
            assert answer.status == 200
    finally:
        held.let_go.set()
        (await slow).release()
    async with client.get("/metrics") as answer:
        assert answer.status == 200


async def test_scrapers_that_hang_up(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Fifty scrapers ask and reset the connection; the next one is served, nothing is logged as an error."""
    client = await serve(published(limit=2))
    for _ in range(50):
        with socket.create_connection(address(client)) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        while True:  # those still being answered may hold the limit for an instant
            async with client.get("/metrics") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_reader_that_does_not_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not take a large answer within the deadline is cut off, and no longer counts against the limit."""
    monkeypatch.setattr(routes, "TAKE_DEADLINE", 0.3)
    size = 32 * 1024 * 1024
    serving = published(limit=1)
    serving.publish(rich_view(), Page(b"x" * size, b"", b"", b""))
    client = await serve(serving)
    reader, writer = await asyncio.open_connection(*address(client), limit=1024)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readexactly(15)
    async with client.get("/metrics") as answer:
        assert answer.status == 503  # the slow one counts
    async with asyncio.timeout(10):
        while True:
            async with client.get("/metrics") as answer:
                if answer.status == 200:
                    assert len(await answer.read()) == size
                    break
            await asyncio.sleep(0.05)
        received = 0
        with suppress(ConnectionResetError):  # or an early end, depending on what was still on its way
            while chunk := await reader.read(1 << 20):
                received += len(chunk)
        assert received < size
    writer.close()


async def test_huge_header(serve: Serve) -> None:
    """A header of a megabyte is refused without being kept, and the server goes on."""
    client = await serve(published())
    reader, writer = await asyncio.open_connection(*address(client))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Huge: " + b"a" * 1_000_000 + b"\r\n\r\n")
    async with asyncio.timeout(10):
        status = (await reader.readline()).split()[1]
    writer.close()
    assert status in (b"400", b"431")
    async with client.get("/metrics") as answer:
        assert answer.status == 200


async def test_garbage_instead_of_a_request(serve: Serve) -> None:
    """Bytes that are not HTTP end that connection only."""
    client = await serve(published())
    reader, writer = await asyncio.open_connection(*address(client))
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
    writer.close()
    async with client.get("/-/healthy") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/streams", "/-/healthy", "/nothing"])
async def test_security_headers(serve: Serve, path: str) -> None:
    """Every answer, errors included, forbids sniffing, framing and anything active."""
    client = await serve(published())
    async with client.get(path) as answer:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


async def test_streams(serve: Serve) -> None:
    """One row a stream; 0 or 1 for the client; what is not known is null; addresses are masked."""
    client = await serve(published())
    async with client.get("/api/streams") as answer:
        assert answer.headers["Content-Type"].startswith("application/json")
        rows = await answer.json()
    assert [row["id"] for row in rows] == [13, 12, 11, 14]  # what costs most comes first
    rows.sort(key=lambda row: row["id"])
    assert rows[0] == {
        "id": 11,
        "engine": "worker",
        "hop": "edge",
        "client": "connected",
        "client_connected": 1,
        "leaks_at": None,
        "age_seconds": 2.5,
        "first_byte": False,
        "tokens": 0.0,
        "useful": 0.0,
        "orphaned": 0.0,
        "deadline_slack_seconds": 5.5,
        "client_address": "203.0.113.x:*",
        "blind_spots": ["http2_clients"],
    }
    assert [row["client_connected"] for row in rows] == [1, 1, 0, 1]
    assert [row["leaks_at"] for row in rows] == [None, None, "edge", None]
    assert [row["engine"] for row in rows] == ["worker", "worker", "worker", None]
    assert [row["deadline_slack_seconds"] for row in rows] == [5.5, None, None, 7.75]
    addresses = [row["client_address"] for row in rows]
    assert addresses == ["203.0.113.x:*", "[2001:db8:1::x]:*", "198.51.100.x:*", None]


async def test_addresses_in_full_when_asked_for(serve: Serve) -> None:
    """`show_addresses` shows address and port."""
    client = await serve(published(show_addresses=True))
    async with client.get("/api/streams") as answer:
        addresses = {row["id"]: row["client_address"] for row in await answer.json()}
    assert addresses == {
        11: "203.0.113.7:51000",
        12: "[2001:db8:1:2::7]:51001",
        13: "198.51.100.20:51002",
        14: None,
    }


async def test_the_same_json_is_made_once_a_beat(serve: Serve) -> None:
    """Many who watch cost one rendering a beat, and the next beat is shown."""
    serving = published()
    await serve(serving)
    made = []

    def make(view: object) -> bytes:
        made.append(view)
        return b"made"

    assert await asyncio.gather(*(serving.once_a_view("x", make) for _ in range(10))) == [b"made"] * 10
    assert made == [serving.view]
    serving.publish(view_with(3), serving.page)
    await serving.once_a_view("x", make)
    assert len(made) == 2


async def test_what_is_made_for_one_who_asks_is_kept_for_few(serve: Serve) -> None:
    """However many different things are asked for in one beat, so much stays in memory; each is answered."""
    serving = published()
    await serve(serving)

    def make(view: object, number: int) -> bytes:
        return b"%d" % number

    asked = [serving.once_a_view(number, partial(make, number=number)) for number in range(3 * MOST_MADE)]
    assert await asyncio.gather(*asked) == [b"%d" % number for number in range(3 * MOST_MADE)]
    assert len(serving._made) == MOST_MADE


async def test_engines(serve: Serve) -> None:
    """Each engine with its evidence, without credentials; the view's mappings may be read-only ones."""
    serving = published()
    worker, spare = rich_view().engines
    worker = replace(worker, slack=MappingProxyType(worker.slack))
    serving.publish(replace(rich_view(), engines=(worker, spare)), serving.page)
    client = await serve(serving)
    async with client.get("/api/engines") as answer:
        text = await answer.text()
    first, second = msgspec.json.decode(text)
    assert first["evidence"] == worker.evidence
    assert first["url"] == "http://127.0.0.1:8100/metrics"
    assert first["utilization"] == 1.0
    assert (first["restarts"], first["restarts_last_hour"]) == (1, 1)
    assert first["tokens"]["orphaned"] == {"edge": 900.25, "engine": 92.0}
    assert first["slack"] == {"interactive": 1.25, "batch": 593.25}
    assert second["running"] is None
    assert second["state"] == "dead"
    assert "secret" not in text


async def test_hops(serve: Serve) -> None:
    """What each proxy tells, null where none is asked; whether each blind spot is one, null where that is not known."""
    client = await serve(published())
    async with client.get("/api/hops") as answer:
        edge, admit = await answer.json()
    assert (edge["hop"], edge["proxy"]["streams"], edge["proxy"]["oldest_queued"]) == ("edge", 6, 3.0)
    assert edge["blind_spots"]["http2_clients"] == {
        "blind": True,
        "why": "haproxy has 1 connection of HTTP/2 with 3 streams",
    }
    assert [spot["blind"] for spot in edge["blind_spots"].values()] == [True, None, False, False]
    assert (admit["proxy"]["queued"], admit["proxy"]["stale"], admit["blind_spots"]) == (None, True, {})


async def test_gpus(serve: Serve) -> None:
    """Every GPU with its engine, its processes by pid, and what a device does not support; null with --no-gpu."""
    client = await serve(published())
    async with client.get("/api/gpus") as answer:
        told = await answer.json()
    assert (told["reason"], told["driver"]) == ("ok", "590.48.01")
    healthy, lost, unified = told["gpus"]
    assert healthy["row"]["processes"] == [{"pid": 4242, "memory": 79_000_000_000}]
    assert (healthy["engines"], healthy["joined_by"], healthy["xids"]["79"]["incidents"]) == (
        ["worker"],
        "processes",
        1,
    )
    assert (lost["up"], lost["row"]["reason"], lost["row"]["power"]) == (False, "lost", None)
    assert unified["row"]["unsupported"] == {"memory": "not_supported"}
    serving = Serving()
    serving.publish(replace(rich_view(), gpus=None), render(rich_view()))
    client = await serve(serving)
    async with client.get("/api/gpus") as answer:
        assert await answer.json() is None


async def test_sources(serve: Serve) -> None:
    """Each source, up or down and why."""
    client = await serve(published())
    async with client.get("/api/sources") as answer:
        rows = await answer.json()
    assert [(row["source"], row["up"]) for row in rows] == [
        ("sockets", True),
        ("engine", True),
        ("engine", False),
        ("processes", True),
        ("gpu", True),
    ]
    assert rows[2]["detail"] == "connection refused"


@pytest.mark.parametrize("path", routes.PAGES)
async def test_pages_for_people(serve: Serve, path: str) -> None:
    """Each is the live page, which needs nothing that is not served here, and no script or style within it."""
    client = await serve(published())
    async with client.get(path) as answer:
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        html = await answer.text()
    assert 'href="./metrics"' in html
    assert not re.search(r"<style|<script(?! type=\"module\" src=)| on\w+=| style=|https?:", html)
    files = re.findall(r'(?:src|href)="(static/[^"]*)"', html)
    assert len(files) == 3
    for name in files:
        async with client.get(f"/{name}") as answer:
            assert answer.status == 200, name


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("page.css", "text/css"),
        ("page.js", "text/javascript"),
        ("dom.js", "text/javascript"),
        ("icon.svg", "image/svg+xml"),
    ],
)
async def test_files_of_the_page(serve: Serve, name: str, content_type: str) -> None:
    """Each comes as what it is: with `nosniff` a browser takes it for nothing else."""
    client = await serve(published())
    async with client.get(f"/static/{name}") as answer:
        assert answer.headers["Content-Type"].startswith(content_type)
        assert b"http://" not in (await answer.read()).replace(b"http://www.w3.org/2000/svg", b"")


@pytest.mark.parametrize(
    "name", ["page.html", "..%2fpage.py", "%2e%2e/files.py", "../files.py", "%2fetc%2fpasswd", "", "page.css%00", "a/b"]
)
async def test_no_path_names_a_file(serve: Serve, name: str) -> None:
    """What is not one of the files of the page is not there."""
    client = await serve(published())
    async with client.get(URL(f"{client._base_url}/static/{name}", encoded=True)) as answer:
        assert answer.status == 404
        assert "import" not in await answer.text()


async def test_the_telemetry_path_is_a_setting(serve: Serve) -> None:
    """The series are where they were asked to be, and the live page links there; at / they replace the live page."""
    serving = published(telemetry_path="/prometheus")
    client = await serve(serving)
    async with client.get("/prometheus") as answer:
        assert await answer.read() == serving.page.text
    async with client.get("/metrics") as answer:
        assert answer.status == 404
    async with client.get("/") as answer:
        assert 'href="./prometheus"' in await answer.text()
    client = await serve(published(telemetry_path="/"))
    async with client.get("/") as answer:
        assert await answer.read() == serving.page.text


async def test_a_taken_port_is_named() -> None:
    """A port that is in use is one line that names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            await Server(make_app(Serving())).start("127.0.0.1", port)


async def test_listens_on_every_address() -> None:
    """Host None listens everywhere, and the URL is one that can be opened."""
    server = Server(make_app(published()))
    await server.start(None, 0)
    try:
        assert server.url == f"http://localhost:{server.port}"
    finally:
        await server.stop()


async def test_nothing_listens_after_stop() -> None:
    """After stop the port is free again."""
    server = Server(make_app(published()))
    await server.start("127.0.0.1", 0)
    port = server.port
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":10788", (None, 10788)),
        ("127.0.0.1:10788", ("127.0.0.1", 10788)),
        ("[::1]:10788", ("::1", 10788)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_listen_addresses(text: str, expected: tuple[str | None, int]) -> None:
    """The spellings of Prometheus exporters are understood."""
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "10788", ":", "::1:10788", ":65536", ":http", "host:-1", ":٣", "[::1]"])
def test_wrong_listen_addresses(text: str) -> None:
    """Anything else is refused with what is expected."""
    with pytest.raises(SettingsError, match="expected \\[HOST\\]:PORT"):
        parse_listen(text)
