"""Clients on HTTP/2 through real proxies: many requests over one connection, and never a false orphan."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lab.http2 import http2_client
from lab.native import told
from lab.serving import at_rest, engine
from lab.watch import blind_spots, clients, watching
from tokengap.lab.parts import LOOPBACK, free_port, running
from tokengap.lab.proxies import Wiring
from tokengap.lab.users import User, Visit
from tokengap.topology import Endpoint, Engine, Hop, Topology

pytestmark = pytest.mark.e2e

PROGRAMS = pytest.mark.parametrize("name", ["haproxy", "envoy", "nginx"])
ASKED = pytest.mark.parametrize("asked", [True, False], ids=["asked", "sockets-alone"])


def topology(edge: int, worker: int) -> Topology:
    return Topology(
        engines=(Engine("worker", f"http://{LOOPBACK}:{worker}", (Endpoint(None, worker),)),),
        hops=(Hop("edge", (Endpoint(None, edge),), ("worker",)),),
        interval=0.5,
    )


async def told_by_proxy(watch):
    """The next view in which the proxy answered: on a machine that stalls it may not, and then nothing is told."""
    return await watch.until(lambda view: any(proxy.streams is not None for proxy in view.proxies))


def orphans(view):
    return sum(count for client, count in clients(view).items() if client in ("gone", "vanished"))


@PROGRAMS
@ASKED
async def test_three_streams_over_one_connection_of_which_one_is_reset(name: str, asked: bool, tmp_path: Path):
    """Three streams, then two, each with its client there; no orphan at any time, and no token orphaned."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=20) as worker:
        proxy = told(name, Wiring(edge, worker, False, tmp_path))
        watched = replace(topology(edge, worker), interfaces=(proxy.interface,) if asked else ())
        async with running(proxy.part, tmp_path), watching(watched) as watch, http2_client(edge) as client:
            await watch.once()
            await watch.once()
            answers = [client.ask(max_tokens=2000) for _ in range(3)]
            await client.got(*answers, tokens=3)
            await watch.until(lambda view: clients(view) == {"connected": 3})
            for _ in range(6):  # past the time after which a request without a client is an orphan
                view = await watch.once()
                assert clients(view) == {"connected": 3}
            assert blind_spots(view)["http2_clients"] is True
            client.reset(answers[1])
            await watch.until(lambda view: clients(view) == {"connected": 2})
            for _ in range(3):
                view = await watch.once()
                assert clients(view) == {"connected": 2}
            if asked:
                (proxy_view,) = (await told_by_proxy(watch)).proxies
                assert proxy_view.streams == 2
                if name != "nginx":
                    assert (proxy_view.h2_connections, proxy_view.h2_streams) == (1, 2)
                    assert proxy_view.client_aborts == 1
                    assert proxy_view.resets in (1, 2)  # a client resets again for data that was under way
            assert max(map(orphans, watch.views)) == 0
            client.reset(answers[0])
            client.reset(answers[2])
            await watch.until(lambda view: clients(view) == {})
            await at_rest(worker)
            view = await watch.once()
            tokens = view.engines[0].tokens
            assert sum(tokens.orphaned.values()) == 0
            assert tokens.useful == pytest.approx(tokens.out, abs=0.02 * tokens.out)
            assert dict(view.endings) == {("worker", "edge", "cancelled"): 3}


@PROGRAMS
async def test_streams_that_come_one_after_another(name: str, tmp_path: Path):
    """Each asks while the others are answered, over the same connection; each is seen, and none is an orphan."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=20) as worker:
        proxy = told(name, Wiring(edge, worker, False, tmp_path))
        async with (
            running(proxy.part, tmp_path),
            watching(topology(edge, worker)) as watch,
            http2_client(edge) as client,
        ):
            for count in range(1, 5):
                answer = client.ask(max_tokens=2000)
                await client.got(answer, tokens=2)
                await watch.until(lambda view, count=count: clients(view) == {"connected": count})
            for _ in range(5):
                assert clients(await watch.once()) == {"connected": 4}
            assert max(map(orphans, watch.views)) == 0


@PROGRAMS
@ASKED
async def test_the_exporter_starts_amid_streams_of_one_connection(name: str, asked: bool, tmp_path: Path):
    """Their instants are past. None is called an orphan while its client is connected, and in the end all are seen."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=20) as worker:
        proxy = told(name, Wiring(edge, worker, False, tmp_path))
        async with running(proxy.part, tmp_path), http2_client(edge) as client:
            for _ in range(3):
                await client.got(client.ask(max_tokens=2000), tokens=5)
            interfaces = (proxy.interface,) if asked else ()
            async with watching(replace(topology(edge, worker), interfaces=interfaces)) as watch:
                await watch.until(lambda view: clients(view) == {"connected": 3} and len(watch.views) > 6)
                assert max(map(orphans, watch.views)) == 0
                view = await told_by_proxy(watch) if asked else watch.views[-1]
                assert [proxy.streams for proxy in view.proxies] == ([3] if asked else [])
                assert sum(watch.views[-1].engines[0].tokens.orphaned.values()) == 0


@pytest.mark.parametrize("name", ["haproxy", "envoy"])
async def test_a_connection_that_ends_takes_its_streams_along(name: str, tmp_path: Path):
    """Nothing leaks, and the proxy counts each of them as a client that left."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=20) as worker:
        proxy = told(name, Wiring(edge, worker, False, tmp_path))
        watched = replace(topology(edge, worker), interfaces=(proxy.interface,))
        async with running(proxy.part, tmp_path), watching(watched) as watch:
            await told_by_proxy(watch)
            async with http2_client(edge) as client:
                await client.got(*[client.ask(max_tokens=2000) for _ in range(3)], tokens=3)
                await watch.until(lambda view: clients(view) == {"connected": 3})
            await watch.until(lambda view: clients(view) == {} and view.proxies[0].client_aborts == 3)
            assert (await told_by_proxy(watch)).proxies[0].streams == 0


async def test_what_waits_inside_haproxy_is_told(tmp_path: Path):
    """Six requests over one connection, room for four: two wait inside, and how long, which no socket shows."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=20) as worker:
        proxy = told("haproxy", Wiring(edge, worker, False, tmp_path))
        watched = replace(topology(edge, worker), interfaces=(proxy.interface,))
        async with running(proxy.part, tmp_path), watching(watched) as watch, http2_client(edge) as client:
            await told_by_proxy(watch)
            answers = [client.ask(max_tokens=2000) for _ in range(6)]
            waits = await watch.until(lambda view: (view.proxies[0].oldest_queued or 0) >= 3)
            assert (waits.proxies[0].streams, waits.proxies[0].queued) == (6, 2)
            assert waits.engines[0].slack["interactive"] <= 5.0
            for answer in answers:
                client.reset(answer)
            view = await watch.until(lambda view: view.proxies[0].streams == 0)
            assert (view.proxies[0].queued, view.proxies[0].oldest_queued) == (0, 0.0)
            assert max(map(orphans, watch.views)) == 0


async def test_a_proxy_that_is_restarted_counts_on(tmp_path: Path):
    """Its counters begin anew, ours go on; while it is away nothing is said of now."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=20) as worker:
        proxy = told("haproxy", Wiring(edge, worker, False, tmp_path))
        async with watching(replace(topology(edge, worker), interfaces=(proxy.interface,))) as watch:

            async def leave() -> None:
                async with http2_client(edge) as client:
                    await client.got(client.ask(max_tokens=2000), tokens=2)

            async with running(proxy.part, tmp_path):
                await told_by_proxy(watch)
                for counted in (1, 2):
                    await leave()
                    await watch.until(lambda view, counted=counted: view.proxies[0].client_aborts == counted)
            view = await watch.once()
            assert (view.proxies[0].streams, view.proxies[0].client_aborts) == (None, 2)
            (source,) = [source for source in view.sources if source.source == "proxy"]
            assert (source.up, source.detail) == (False, "connection refused")
            async with running(proxy.part, tmp_path):
                await leave()  # before it is read again
                await watch.until(lambda view: view.proxies[0].client_aborts == 3)


async def test_beside_them_an_orphan_is_one(tmp_path: Path):
    """A user on HTTP/1 waits, leaves, and HAProxy holds on until the engine sends its next bytes: that is seen, with
    clients on HTTP/2 at the same hop."""
    edge = free_port()
    async with engine(max_num_seqs=2, rate=20) as worker:
        proxy = told("haproxy", Wiring(edge, worker, True, tmp_path))
        watched = replace(topology(edge, worker), interfaces=(proxy.interface,))
        async with running(proxy.part, tmp_path), watching(watched) as watch, http2_client(edge) as client:
            await watch.once()
            await client.got(*[client.ask(max_tokens=2000) for _ in range(2)], tokens=3)
            await watch.until(lambda view: clients(view) == {"connected": 2})
            waits = asyncio.create_task(Visit(User("h1", max_tokens=100, leave_at=2.5), edge).run())
            await watch.until(lambda view: clients(view) == {"connected": 3})
            assert (await waits).how == "left"
            view = await watch.until(lambda view: clients(view) == {"connected": 2, "gone": 1})
            assert view.streams["leaks_at"].tolist().count(0) == 1
            assert view.proxies[0].streams == 3
