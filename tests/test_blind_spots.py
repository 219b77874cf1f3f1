"""What cannot be seen, made with real programs: it is said, and nobody is called an orphan for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from lab.serving import engine, gateway
from lab.watch import blind_spots, clients, watching
from test_http2 import orphans, topology
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import EngineServer
from tokengap.lab.parts import LOOPBACK, free_port, running
from tokengap.lab.proxies import PROXIES, Wiring
from tokengap.lab.users import User, Visit

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def visits(port: int, *users: User) -> AsyncIterator[list[asyncio.Task]]:
    """Let users come for the length of the block."""
    tasks = [asyncio.create_task(Visit(user, port).run()) for user in users]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def engine_at_a_path(path: Path) -> AsyncIterator[int]:
    """Serve the stand-in engine at a unix-domain socket, and its page on loopback as well."""
    server = EngineServer(Knobs(max_num_seqs=8, rate=20))
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    try:
        yield next(address[1] for address in runner.addresses if isinstance(address, tuple))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("name", ["haproxy", "nginx", "envoy"])
async def test_an_engine_behind_a_unix_domain_socket(name: str, tmp_path: Path):
    """Users are served and no connection leads on: that is said, and what they got is unattributed, not orphaned."""
    edge, path = free_port(), tmp_path / "vllm.sock"
    upstream = f"{LOOPBACK}:12345"
    instead = {
        "haproxy": (upstream, f"unix@{path}"),
        "nginx": (f"http://{upstream}", f"http://unix:{path}:"),
        "envoy": (f"{{socket_address: {{address: {LOOPBACK}, port_value: 12345}}}}", f"{{pipe: {{path: {path}}}}}"),
    }

    def config(wiring: Wiring) -> str:
        text = PROXIES[name].config(wiring)
        assert text.count(instead[name][0]) == 1
        return text.replace(*instead[name])

    async with engine_at_a_path(path) as worker:
        part = replace(PROXIES[name], config=config).part(Wiring(edge, 12345, False, tmp_path))
        async with running(part, tmp_path), watching(topology(edge, worker)) as watch:
            await watch.once()
            users = [User(f"u{n}", max_tokens=400) for n in range(3)]
            async with visits(edge, *users):
                view = await watch.until(lambda view: blind_spots(view)["unix_upstream"] is True, within=30)
                (spot,) = [spot for spot in view.blind_spots if spot.blind]
                assert str(path) in spot.why
            assert max(map(orphans, watch.views)) == 0
            view = await watch.until(lambda view: view.engines[0].running == 0)
            assert sum(view.engines[0].tokens.orphaned.values()) == 0


async def test_a_load_balancer_in_front_hides_who_left(tmp_path: Path):
    """A gateway that reads on for users who left, with connections that it keeps: at the hop behind it all is well."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=200) as worker:
        part = PROXIES["nginx"].part(Wiring(edge, worker, False, tmp_path))
        async with (
            running(part, tmp_path),
            gateway(edge, leak=True, pool=True) as front,
            watching(topology(edge, worker)) as watch,
        ):
            await watch.once()
            for turn in range(3):
                users = [User(f"u{turn}-{n}", max_tokens=200, leave_at=0.3) for n in range(6)]
                async with visits(front, *users) as tasks:
                    await asyncio.gather(*tasks)
                    await watch.until(lambda view: clients(view) == {} and view.engines[0].running == 0)
            view = watch.views[-1]
            assert blind_spots(view)["load_balancer"] is True
            assert max(map(orphans, watch.views)) == 0
            tokens = view.engines[0].tokens
            assert tokens.out == 3 * 6 * 200
            assert sum(tokens.orphaned.values()) == 0


async def test_users_of_their_own_are_no_load_balancer(tmp_path: Path):
    """One connection a request, as many as there are: nothing is said."""
    edge = free_port()
    async with engine(max_num_seqs=8, rate=100) as worker:
        part = PROXIES["nginx"].part(Wiring(edge, worker, False, tmp_path))
        async with running(part, tmp_path), watching(topology(edge, worker)) as watch:
            await watch.once()
            for turn in range(2):
                async with visits(edge, *[User(f"u{turn}-{n}", max_tokens=80) for n in range(8)]) as tasks:
                    await asyncio.gather(*tasks)
                    await watch.until(lambda view: clients(view) == {})
            await watch.until(lambda view: None not in blind_spots(view).values())
            assert not any(blind_spots(watch.views[-1]).values())
