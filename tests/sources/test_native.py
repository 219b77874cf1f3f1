"""What proxies tell about themselves: recorded answers of the real programs, broken ones, and sources that fail."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from lab.native import answers, runtime_socket
from lab.serving import served
from tokengap.errors import SourceError, SourceRefused, SourceTimeout, SourceUnusable
from tokengap.lab.parts import LOOPBACK, free_port
from tokengap.readings import ProxySnapshot
from tokengap.sources.envoy import EnvoySource, parse_stats, stats_url
from tokengap.sources.haproxy import (
    HaproxySource,
    Session,
    parse_age,
    parse_info,
    parse_show_sess,
    parse_show_stat,
    snapshot,
)
from tokengap.sources.nginx import NginxSource, parse_stub_status

RECORDED = Path(__file__).parents[1] / "recorded"
HAPROXY, ENVOY, NGINX = RECORDED / "haproxy-2.6", RECORDED / "envoy-1.40", RECORDED / "nginx-1.22"

STAT = (HAPROXY / "stat-h2.csv").read_text()
INFO = (HAPROXY / "info.txt").read_text()
SESSIONS = (HAPROXY / "sess-h2.txt").read_text()
STATUS = (NGINX / "status-h1.txt").read_text()


# --- recorded -------------------------------------------------------------------------------------------------------

#: What was going on, by the name of the recording: connections, streams, queued, aborts, resets, and of HTTP/2
#: connections and streams.
HAPROXY_TRUTH = {
    "h1": (3, 3, 0, 0, 0, 0, 0),
    "h2": (4, 6, 2, 0, 0, 1, 3),
    "h2-reset": (4, 5, 1, 1, 1, 1, 2),
    "h2-left": (2, 2, 0, 4, 1, 0, 0),
    "after": (0, 0, 0, 6, 1, 0, 0),
}


@pytest.mark.parametrize("name", HAPROXY_TRUTH)
def test_haproxy_counts_what_there_was(name: str):
    """Three clients on HTTP/1 and one on HTTP/2 with three streams, of which it queues two."""
    told = snapshot(parse_info(INFO), parse_show_stat((HAPROXY / f"stat-{name}.csv").read_text()), None)
    counted = (told.connections, told.streams, told.queued, told.client_aborts, told.resets)
    assert (*counted, told.h2_connections, told.h2_streams) == HAPROXY_TRUTH[name]
    assert told.uptime == 2.0
    assert told.oldest_queued == (None if told.queued else 0.0)


def test_haproxy_tells_each_stream():
    """With its client, its own address towards the server, its age, and whether it waits; itself is left out."""
    sessions = parse_show_sess(SESSIONS)
    assert [session.queued for session in sessions] == [False, False, False, False, True, True]
    assert [bool(session.upstream) for session in sessions] == [True, True, True, True, False, False]
    assert sessions[0] == Session("127.0.0.1:53092", "edge", "127.0.0.1:49958", 2.0, False)
    by_client = [session.source for session in sessions]
    assert sorted(map(by_client.count, set(by_client))) == [1, 1, 1, 3]
    assert snapshot({}, parse_show_stat(STAT), sessions).oldest_queued == 1.0


def test_sessions_of_a_newer_haproxy_are_read():
    """From 3.x on other fields stand around those that are used (two streams, written after its sources)."""
    text = (
        "0x7f1: [29/Nov/2026:14:24:54.104908] id=13 proto=tcpv6 source=[2001:db8::7]:50308\n"
        "  flags=0x84a, conn_retries=0, conn_exp=<NEVER> conn_et=0x000 srv_conn=0x55, pend_pos=(nil) waiting=0 "
        "p_stc=4 p_req=5 p_res=6 p_con=7\n"
        "  frontend=f1 (id=2 mode=http), listener=? (id=1) addr=[2001:db8::1]:443\n"
        "  backend=b1 (id=3 mode=http) addr=127.0.0.1:57060\n"
        "  server=s1 (id=1) addr=127.0.0.1:18100\n"
        "  task=0x7f2 (state=0x00 nice=0 calls=3 rate=0 exp=49s tid=1(1/1) age=1h2m)\n"
        "0x7f3: [29/Nov/2026:14:24:54.104908] id=14 proto=tcpv4 source=127.0.0.1:1\n"
        "  flags=0x808, srv_conn=(nil), pend_pos=0x7f634c05ab50 waiting=0\n"
        "  frontend=f1 (id=2 mode=http), listener=? (id=1) addr=127.0.0.1:443\n"
        "  task=0x7f4 (state=0x00 nice=0 calls=3 rate=0 exp=? tid=1(1/1) age=5s)\n"
    )
    assert parse_show_sess(text) == [
        Session("[2001:db8::7]:50308", "f1", "127.0.0.1:57060", 3720.0, False),
        Session("127.0.0.1:1", "f1", "", 5.0, True),
    ]


ENVOY_TRUTH = {
    "idle": (0, 0, 0, 0, 0, 0, 0),
    "h1": (3, 3, 0, 0, 0, 0, 0),
    "h2": (4, 6, 0, 0, 0, 1, 3),
    "h2-reset": (4, 5, 0, 1, 1, 1, 2),
    "after": (0, 0, 0, 6, 1, 0, 0),
}


@pytest.mark.parametrize("name", ENVOY_TRUTH)
def test_envoy_counts_what_there_was(name: str):
    """The same clients; what it tells of its admin interface is left out, and no HTTP/2 yet is none."""
    told = parse_stats((ENVOY / f"stats-{name}.txt").read_text())
    counted = (told.connections, told.streams, told.queued, told.client_aborts, told.resets)
    assert (*counted, told.h2_connections, told.h2_streams) == ENVOY_TRUTH[name]
    assert (told.h3_connections, told.uptime, told.oldest_queued) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "connections", "streams", "multiplexes"),
    [("idle", 0, 0, False), ("h1", 3, 3, False), ("h2", 1, 3, True), ("h2-reset", 1, 2, True), ("after", 0, 0, False)],
)
def test_nginx_counts_what_there_was(name: str, connections: int, streams: int, multiplexes: bool):
    """The question for the page is taken off; more requests than connections can only be HTTP/2."""
    told = parse_stub_status((NGINX / f"status-{name}.txt").read_text())
    assert told == ProxySnapshot("nginx", connections=connections, streams=streams)
    assert told.multiplexes is multiplexes


# --- whatever comes -------------------------------------------------------------------------------------------------

BROKEN = st.one_of(
    st.text(),
    st.sampled_from([STAT, INFO, SESSIONS, STATUS]).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text)), st.text(max_size=5)).map(
            lambda cut: text[: cut[0]] + cut[2] + text[cut[1] :]
        )
    ),
)


@given(BROKEN)
def test_no_answer_breaks_a_parser(text: str):
    """A snapshot whose numbers are at least 0, or a SourceUnusable of one line."""
    for parse in (
        lambda text: snapshot(parse_info(text), parse_show_stat(text), None),
        lambda text: snapshot({}, [], parse_show_sess(text)),
        parse_stats,
        parse_stub_status,
    ):
        try:
            told = parse(text)
        except SourceUnusable as error:
            said = str(error)
        else:
            said = ""
            assert all(value is None or value >= 0 for value in astuple(told)[1:])
        assert len(said.splitlines()) <= 1


@given(st.lists(st.tuples(st.sampled_from(["FRONTEND", "BACKEND", "srv1"]), st.integers(0, 2**40)), max_size=20))
def test_rows_of_haproxy_add_up(rows: list[tuple[str, int]]):
    """Streams are the sum over backends, connections over frontends, the queue over backends and servers; a server's
    part of a backend is not counted twice."""
    header = "# pxname,svname,qcur,scur,cli_abrt,"
    lines = [f"p{n},{kind},{'' if kind == 'FRONTEND' else value},{value},," for n, (kind, value) in enumerate(rows)]
    told = snapshot({}, parse_show_stat("\n".join([header, *lines, ""])), None)

    def total(*kinds: str) -> int | None:
        values = [value for kind, value in rows if kind in kinds]
        return sum(values) if values else None

    assert told.streams == total("BACKEND")
    assert told.connections == total("FRONTEND")
    assert told.queued == total("BACKEND", "srv1")
    assert (told.client_aborts, told.h2_streams) == (None, None)


@given(st.dictionaries(st.text(string.ascii_lowercase + "._-:", min_size=1), st.integers(0, 2**60), max_size=8))
def test_lines_of_envoy_add_up(prefixes: dict[str, int]):
    """Over all listeners but the admin interface, whatever their stat_prefix is."""
    lines = [f"http.{prefix}.downstream_rq_active: {value}" for prefix, value in prefixes.items()]
    lines += [
        "http.admin.downstream_rq_active: 7",
        "server.uptime: 5",
        "http.x.downstream_rq_time: P0(nan,0) P25(nan,0)",
    ]
    told = parse_stats("\n".join(lines))
    mine = [value for prefix, value in prefixes.items() if prefix != "admin" and not prefix.startswith("admin.")]
    assert told.streams == (sum(mine) if mine else None)


@given(*[st.integers(0, 59)] * 2, st.integers(1, 23), st.integers(1, 400))
def test_ages_of_haproxy(seconds: int, minutes: int, hours: int, days: int):
    """The two largest units, as it writes them."""
    assert parse_age(f"{days}d{hours}h") == days * 86400 + hours * 3600
    assert parse_age(f"{hours}h{minutes}m") == hours * 3600 + minutes * 60
    assert parse_age(f"{minutes}m{seconds}s") == minutes * 60 + seconds


@pytest.mark.parametrize("text", ["", "?", "<NEVER>", "5", "s", "5s5d", "-5s"])
def test_what_is_no_age(text: str):
    """Is None, not 0."""
    assert parse_age(text) is None


# --- the sources ----------------------------------------------------------------------------------------------------


async def test_haproxy_is_asked(tmp_path: Path):
    """Its statistics every time; each stream only while something waits, and not again at once."""
    path = tmp_path / "haproxy.sock"
    async with runtime_socket(path, answers()) as asked:
        source = HaproxySource(str(path), deadline=5.0)
        told = await source.read()
        assert (told.streams, told.queued, told.oldest_queued) == (6, 2, 1.0)
        assert await source.read() == told
        assert asked.count("show stat") == 2
    path.unlink()
    idle = (HAPROXY / "stat-after.csv").read_bytes()
    async with runtime_socket(path, answers(stat=idle)) as asked:
        assert (await HaproxySource(str(path), deadline=5.0).read()).oldest_queued == 0.0
        assert asked == ["show info", "show stat"]


async def test_a_level_below_operator_tells_the_counts(tmp_path: Path):
    """And no age of what waits."""
    path = tmp_path / "haproxy.sock"
    async with runtime_socket(path, answers(sessions=b"Permission denied\n\n")):
        told = await HaproxySource(str(path), deadline=5.0).read()
    assert (told.queued, told.oldest_queued) == (2, None)


async def test_haproxy_that_cannot_be_asked(tmp_path: Path):
    """Each way has its error and a reason of one line."""
    with pytest.raises(SourceRefused, match="No such file or directory"):
        await HaproxySource(str(tmp_path / "none.sock"), deadline=5.0).read()
    with pytest.raises(SourceRefused, match="connection refused"):
        await HaproxySource(f"{LOOPBACK}:{free_port()}", deadline=5.0).read()

    async def hangs(_: str) -> bytes:
        await asyncio.sleep(60)
        return b""

    async def floods(_: str) -> bytes:
        return b"x: y\n" * 50_000

    async def denies(_: str) -> bytes:
        return b"Permission denied\n"

    for name, answer, error, words in (
        ("hangs", hangs, SourceTimeout, "no answer within 0.2 s"),
        ("floods", floods, SourceUnusable, "larger than 100000 bytes"),
        ("denies", denies, SourceUnusable, "no answer to `show stat`: Permission denied"),
    ):
        async with runtime_socket(tmp_path / name, answer):
            with pytest.raises(error, match=words):
                await HaproxySource(str(tmp_path / name), deadline=0.2, max_bytes=100_000).read()


@asynccontextmanager
async def page(path: str, text: str, asked: list[str]) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query_string)
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get(path, answer)
    async with served(app) as port, aiohttp.ClientSession() as session:
        yield f"http://{LOOPBACK}:{port}", session


async def test_envoy_and_nginx_are_asked():
    """Envoy for the lines that are needed and no more; nginx for its page."""
    asked: list[str] = []
    async with page("/stats", (ENVOY / "stats-h2.txt").read_text(), asked) as (url, session):
        told = await EnvoySource(url, session, deadline=5.0).read()
        assert told.h2_streams == 3
        assert "/stats?filter=%5E%28http" in stats_url(url)
        assert asked[0].startswith("filter=")
        with pytest.raises(SourceUnusable, match="HTTP 404"):
            await NginxSource(f"{url}/status", session, deadline=5.0).read()
    async with page("/status", STATUS, asked) as (url, session):
        assert (await NginxSource(f"{url}/status", session, deadline=5.0).read()).streams == 3
    async with page("/stats", "<html>", asked) as (url, session):
        with pytest.raises(SourceUnusable, match="no line of Envoy's statistics"):
            await EnvoySource(url, session, deadline=5.0).read()
        with pytest.raises(SourceUnusable, match="not that of stub_status"):
            await NginxSource(f"{url}/stats", session, deadline=5.0).read()


async def test_a_proxy_that_is_down():
    """Is refused, as an engine is."""
    url = f"http://{LOOPBACK}:{free_port()}"
    async with aiohttp.ClientSession() as session:
        for source in (EnvoySource(url, session, deadline=5.0), NginxSource(url, session, deadline=5.0)):
            with pytest.raises(SourceError, match="connection refused"):
                await source.read()
