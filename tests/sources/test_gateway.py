"""A gateway as a source: what a real one tells, and what is no gateway."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from admit.gateways import admitting, chat, session, settled
from lab.serving import engine, until
from tokengap.config import load, topology
from tokengap.errors import SourceRefused, SourceUnusable
from tokengap.lab.parts import LOOPBACK, free_port
from tokengap.lab.users import User, Visit
from tokengap.readings import GatewayPage, GatewayStreams
from tokengap.sources.gateway import GatewaySource, parse_admission
from tokengap.topology import Endpoint, Gateway


async def test_what_a_gateway_tells():
    """The counts of its own page, by engine and by class."""
    async with engine(rate=500) as port, admitting(port, slots=2) as gateway, session(gateway) as asking:
        async with asking.post("/v1/chat/completions", json=chat()) as answer:
            await answer.read()
        page = await settled(gateway)
        source = GatewaySource(f"http://{LOOPBACK}:{gateway.port}/metrics", asking, deadline=5.0)
        told = await source.read()
    assert page["tokengap_tokens_useful_total{e0}"] == 20
    mine = told.engines["e0"]
    assert (mine.out, mine.useful, mine.orphaned, mine.pending) == (20, 20, 0, 0)
    assert (mine.ended["completed"], mine.slots["free"], mine.zombies, mine.up) == (1, 2, 0, True)
    assert told.classes["interactive"].decisions["admitted"] == 1
    assert ("queued", "admit", "streaming", 1) in told.moves
    assert (told.mode, told.closed, told.streams) == ("age", False, ())


async def test_streams_that_run_and_that_wait():
    """With their ages, by the state of their client; where there is one engine, who waits waits for that."""
    async with engine(rate=50) as port, admitting(port, slots=1) as gateway, session(gateway) as asking:
        users = [asyncio.create_task(Visit(User(f"u{n}", max_tokens=500), gateway.port).run()) for n in range(3)]
        source = GatewaySource(f"http://{LOOPBACK}:{gateway.port}", asking, deadline=5.0)

        async def all_there() -> bool:
            return sum(one.count for one in (await source.read()).streams) == 3

        await until(all_there)
        await asyncio.sleep(0.6)
        (streams,) = (await source.read()).streams
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    assert (streams.engine, streams.client, streams.count) == ("e0", "connected", 3)
    assert streams.ages[:2] == (0, 3)
    assert 0.5 < streams.age_max < 1.0
    assert 3 * 0.5 < streams.age_sum < 3.0


async def test_nobody_there():
    """Is told from one that answers nonsense."""
    async with aiohttp.ClientSession() as asking:
        with pytest.raises(SourceRefused):
            await GatewaySource(f"http://{LOOPBACK}:{free_port()}", asking, deadline=5.0).read()


@pytest.mark.parametrize("body", [b"", b"{}", b"<html>", b'{"started": "now"}', b"[1]"])
def test_what_is_no_gateway(body):
    """One line that says what is wrong."""
    with pytest.raises(SourceUnusable, match=r"^this is not what `tokengap admit` tells: .+") as caught:
        parse_admission(body)
    assert "\n" not in str(caught.value)


def test_another_version():
    """Ages in other bins cannot be added up with ours."""
    page = GatewayPage(1.0, "age", False, {}, {}, streams=(GatewayStreams("e", "connected", 1, (1,), 1.0, 1.0),))
    with pytest.raises(SourceUnusable, match="of this version"):
        parse_admission(msgspec.json.encode(page))


@pytest.mark.parametrize(
    ("hops", "hop", "before"),
    [
        (("edge=:8080", "gate=:8090"), "gate", ("edge",)),
        (("cdn=:80", "edge=:8080", "gate=:8090"), "gate", ("cdn", "edge")),
        ((), "admit", ()),
        (("edge=:8080",), "admit", ()),
    ],
)
def test_which_hop_it_is(hops, hop, before):
    """The one that listens at its port; what forwards to that stands before it."""

    async def resolve(url: str) -> tuple[Endpoint, ...]:
        return (Endpoint("127.0.0.1", 8100),)

    flags = {"engines": ("http://127.0.0.1:8100",), "hops": hops, "admit": "http://127.0.0.1:8090"}
    watched = asyncio.run(topology(load(None, {}, flags), resolve))
    assert watched.gateway == Gateway("http://127.0.0.1:8090", hop)
    assert watched.before_gateway == before
