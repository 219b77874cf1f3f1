"""Engines as they may be: behind TLS and a key, one that ignores its cancels, and one that nobody reaches."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest

from admit.gateways import admitting, chat, published, session
from lab.guarded import Certificate, guarded
from lab.serving import engine, until
from tokengap.admit import service, upstream
from tokengap.admit.gate import STILL_AFTER
from tokengap.lab.parts import LOOPBACK, Part, free_port, running
from tokengap.lab.users import User, Visit


@pytest.mark.e2e
@pytest.mark.parametrize("trusted", [True, False])
async def test_over_tls_with_the_clients_key(trusted, certificate: Certificate, tmp_path: Path):
    """The key passes to an engine whose certificate is trusted; to another one nothing is sent. No key is logged."""
    port, key = free_port(), "sk-4711-secret"
    async with guarded(certificate, key) as url:
        command = (
            *(() if not trusted else ("env", f"SSL_CERT_FILE={certificate.file}")),
            *(sys.executable, "-m", "tokengap", "admit", "--engine", f"worker={url}", "--slots", "2"),
            *("--admit-listen", f"{LOOPBACK}:{port}", "--admit-control", str(tmp_path / "admit.sock")),
            *("--log-level", "debug"),
        )
        asking = aiohttp.ClientSession(f"http://{LOOPBACK}:{port}", headers={"Authorization": f"Bearer {key}"})
        async with running(Part("admit", command, (port,)), tmp_path) as admit, asking:
            async with asking.post("/v1/chat/completions", json=chat(max_tokens=5)) as answer:
                body = await answer.read()
            assert (answer.status == 200) == trusted
            assert body.endswith(b"data: [DONE]\n\n") == trusted
            assert key not in admit.log.read_text()


@pytest.mark.parametrize("when_held", ["hold", "admit"])
async def test_an_engine_that_ignores_its_cancel(when_held):
    """Its slot is held after the limit, and shown; it is given to the next only where that is chosen, else not before
    the engine is done with it."""
    options = {"slots": 1, "admit_drain_limit": "300ms", "admit_when_held": when_held}
    async with engine(max_num_seqs=1, rate=100, ignore_disconnects=True) as port, admitting(port, **options) as gateway:
        left = await Visit(User("left", max_tokens=250, leave_at=0.2), gateway.port).run()
        assert left.how == "left"
        began = time.monotonic()

        async def held() -> bool:
            return (await published(gateway))["tokengap_admit_slots{e0,held}"] == 1

        await until(held)
        page = await published(gateway)
        assert page["tokengap_admit_slot_held_seconds{e0}"] >= 0.3
        assert page["tokengap_admit_moves_total{held,draining,drain_late}"] == 1
        assert page["tokengap_slot_utilization_ratio{e0}"] == 1.0
        async with session(gateway) as asking:
            answer = await asyncio.wait_for(asking.post("/v1/chat/completions", json=chat()), 10.0)
            waited = time.monotonic() - began
            assert (answer.status, (await answer.read())[-14:]) == (200, b"data: [DONE]\n\n")
        page = await published(gateway)
        moved = "tokengap_admit_moves_total{released,held,drained}"
        if when_held == "hold":
            assert page[moved] == 1
            assert waited >= 1.5, "it was admitted before the engine was done"
        assert waited < 2.5 + STILL_AFTER
        assert page["tokengap_admissions_total{interactive,admitted}"] == 2


async def test_an_engine_that_nobody_reaches(monkeypatch: pytest.MonkeyPatch):
    """Its connections are taken by nobody, as across a network that is cut: another engine answers."""
    monkeypatch.setattr(upstream, "CONNECT_WITHIN", 0.2)
    monkeypatch.setattr(service, "PAGE_WITHIN", 0.2)
    with unreachable() as gone:
        async with engine(rate=1000.0) as port, admitting(gone, port) as gateway:
            async with session(gateway) as asking:
                for _ in range(2):
                    async with asking.post("/v1/chat/completions", json=chat(max_tokens=5)) as answer:
                        assert answer.status == 200
                        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
                async with asking.get("/v1/models") as answer:
                    assert answer.status == 200
            page = await published(gateway)
    assert page["tokengap_streams_ended_total{e1,admit,completed}"] == 3


@contextmanager
def unreachable() -> Iterator[int]:
    """Yield a port at which connections are neither taken nor refused: its queue is full, so the kernel drops more."""
    with socket.create_server((LOOPBACK, 0), backlog=0) as server, ExitStack() as waiting:
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]
