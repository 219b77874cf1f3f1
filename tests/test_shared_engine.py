"""Several exporters in front of one engine, as they run: the rules count every token once, and by its fate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import netns
from deployed import prometheus_config
from monitoring import aimed, prometheus
from netns import Host, Space
from test_containers import ENGINE, EVERYWHERE, a_gateway, an_engine, inside, visit
from test_end_to_end import serve_part
from tokengap.bundle.render.file import as_yaml
from tokengap.bundle.render.rules import recordings
from tokengap.bundle.site import Site
from tokengap.lab.parts import LOOPBACK, Part, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture
def host() -> Iterator[Host]:
    with netns.host() as made:
        yield made


def an_exporter(port: int, *arguments: str) -> Part:
    """An exporter that can be scraped from another network namespace."""
    part = serve_part(port, *arguments)
    command = [word.replace(f"{LOOPBACK}:{port}", f"{EVERYWHERE}:{port}") for word in part.command]
    return Part(part.name, tuple(command), part.ports)


@pytest.mark.parametrize("beside_the_engine", [False, True], ids=["proxies-only", "and-at-the-engine"])
async def test_two_leaking_gateways_in_front_of_one_engine(beside_the_engine: bool, host: Host, tmp_path: Path):
    """Each gateway on a host of its own, with an exporter beside it that sees no more than that host's sockets. A third
    exporter, on the engine's host, takes the gateways for clients who got everything; it changes nothing."""
    edges = (host.space(), host.space())
    engine = f"worker=http://{host.address}:{ENGINE}"
    places: list[tuple[Space | None, str]] = [(edge, edge.address) for edge in edges]
    if beside_the_engine:
        places.append((None, host.address))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(inside(None, an_engine(), host.address, tmp_path))
        targets = []
        for space, address in places:
            port = free_port()
            hops = ("--hop", f"edge=:{a_gateway(engine).ports[0]}") if space else ()
            if space:
                gateway = a_gateway(f"http://{host.address}:{ENGINE}")
                await stack.enter_async_context(inside(space, gateway, address, tmp_path))
            part = an_exporter(port, "--engine", engine, *hops)
            await stack.enter_async_context(inside(space, part, address, tmp_path))
            targets.append(f"{address}:{port}")
        rules = tmp_path / "recording.yml"
        rules.write_text(as_yaml(recordings(Site())).replace("interval: 30s", "interval: 1s"))
        config = aimed(prometheus_config(), targets, [rules], scrape=1)
        asked = await stack.enter_async_context(prometheus(config, tmp_path))

        async def comes(query: str, value: float, give_or_take: float = 0.0) -> None:
            near = pytest.approx(value, abs=give_or_take)
            await asked.until(query, lambda rows: [each for _, each in rows] == [near], 60)

        await comes("count(tokengap_tokens_out_total)", len(targets))
        # What a byte is worth is learned while the engine works for nobody else; before that a part is a guess.
        alone = [await visit(1, 0, edge.address, max_tokens=400) for edge in edges]
        together = await asyncio.gather(
            visit(6, 3, edges[0].address, max_tokens=400, leave_at=1.0),
            visit(4, 1, edges[1].address, max_tokens=400, leave_at=1.0),
        )
        out = 12 * 400
        useful = sum(outcome.tokens for outcomes in (*alone, *together) for outcome in outcomes)
        await comes("sum(tokengap_tokens_out_total)", len(targets) * out)
        await comes("sum(tokengap_tokens_pending)", 0)
        claims = "(sum(tokengap_tokens_useful_total) + sum(tokengap_tokens_orphaned_total))"
        assert await asked.values(f"{claims} / {out}") == {(): pytest.approx(1 + beside_the_engine, abs=0.05)}
        for level in ("engine", "cluster"):
            for what, share in (("useful", useful / out), ("orphaned", 1 - useful / out), ("unattributed", 0)):
                await comes(f"{level}:tokengap_tokens_{what}:rate5m / {level}:tokengap_tokens_out:rate5m", share, 0.05)
        await comes("cluster:tokengap_coverage:ratio", 1)
