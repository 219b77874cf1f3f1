"""What cannot be seen, made with real programs: it is said, and nobody is called an orphan for it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from lab.native import told
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


def quic_listener(port: int, directory: Path) -> str:
    """A listener for HTTP/3 at a UDP port, before the clusters of the lab's Envoy."""
    openssl = shutil.which("openssl")
    assert openssl, "openssl is not installed: apt-get install openssl"
    request = (openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    names = ("-subj", "/CN=edge", "-addext", "subjectAltName=DNS:edge")  # without the latter Envoy calls nobody
    files = ("-keyout", "key.pem", "-out", "cert.pem")
    subprocess.run((*request, *names, *files), cwd=directory, check=True, capture_output=True)
    tls = f"{{certificate_chain: {{filename: {directory}/cert.pem}}, private_key: {{filename: {directory}/key.pem}}}}"
    return f"""\
  - name: quic
    address: {{socket_address: {{protocol: UDP, address: {LOOPBACK}, port_value: {port}}}}}
    udp_listener_config: {{quic_options: {{}}}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.quic
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.quic.v3.QuicDownstreamTransport
          downstream_tls_context: {{common_tls_context: {{tls_certificates: [{tls}]}}}}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: quic
          codec_type: HTTP3
          stream_idle_timeout: 0s
          http3_protocol_options: {{}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: engine
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                route: {{cluster: engine, timeout: 0s}}
"""


#: What makes the lab's Envoy call what is behind it by HTTP/3: the client of the test.
CALLS_BY_QUIC = """\
    transport_socket:
      name: envoy.transport_sockets.quic
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.quic.v3.QuicUpstreamTransport
        upstream_tls_context: {sni: edge}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http3_protocol_options: {}}
"""


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "sockets-alone"])
async def test_clients_on_http3(asked: bool, tmp_path: Path):
    """Envoy takes them at its UDP port: its requests to the engine have no client here, and none of them is an
    orphan. What they got is unattributed. The client is another Envoy."""
    edge, front = free_port(), free_port()
    async with engine(max_num_seqs=8, rate=20) as worker:
        here, there = tmp_path / "here", tmp_path / "there"
        here.mkdir()
        there.mkdir()
        proxy = told("envoy", Wiring(edge, worker, False, here))
        config = here / "envoy.yaml"
        config.write_text(config.read_text().replace("  clusters:\n", f"{quic_listener(edge, here)}  clusters:\n"))
        client = PROXIES["envoy"].part(Wiring(front, edge, False, there))
        config = there / "envoy.yaml"
        config.write_text(
            config.read_text().replace("    load_assignment:\n", f"{CALLS_BY_QUIC}    load_assignment:\n")
        )
        watched = replace(topology(edge, worker), interfaces=(proxy.interface,) if asked else ())
        async with (
            running(proxy.part, here),
            running(replace(client, name="client"), there),
            watching(watched) as watch,
        ):
            await watch.once()
            async with visits(front, *[User(f"u{n}", max_tokens=2000) for n in range(3)]):
                await watch.until(lambda view: view.engines[0].running == 3)
                view = await watch.until(lambda view: blind_spots(view)["http3_clients"] is True)
                for _ in range(6):
                    view = await watch.once()
                assert max(map(orphans, watch.views)) == 0
                if asked:
                    assert view.proxies[0].streams == 3
            view = await watch.until(lambda view: view.engines[0].running == 0)
            for _ in range(4):
                view = await watch.once()
            tokens = view.engines[0].tokens
            assert (sum(tokens.orphaned.values()), tokens.useful) == (0, 0)
            assert tokens.unattributed + tokens.pending == pytest.approx(tokens.out)
