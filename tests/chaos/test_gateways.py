"""The gateways' configurations: the real programs take them, and they say what was asked for."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from lab.serving import engine
from tokengap.chaos.gateways import GATEWAYS, Upstream, gateway_part
from tokengap.config.values import Seconds
from tokengap.lab.parts import LOOPBACK, free_port, running
from tokengap.lab.users import User, Visit


@pytest.mark.e2e
@pytest.mark.parametrize("through", GATEWAYS)
async def test_it_goes_to_the_other_replica_where_one_is_not_there(through: str, tmp_path: Path):
    """At once, without its client hearing of it. A time is given as the command line reads it, and a path as it is."""
    directory = tmp_path / "with a space"
    directory.mkdir()
    async with engine(rate=200.0) as port:
        gone = Upstream("a", "127.0.1.1", free_port())
        here = Upstream("b", LOOPBACK, port)
        part = gateway_part(
            "gateway",
            through,
            free_port(),
            (gone, here),
            read_timeout=Seconds.read("5s"),
            slots=4,
            directory=directory,
        )
        async with running(part, directory), aiohttp.ClientSession() as session:
            url = f"http://{LOOPBACK}:{part.ports[0]}/v1/models"
            async with session.get(url, headers={"Connection": "close"}) as answer:
                assert answer.status == 200
            for number in range(6):
                visit = Visit(User(f"user-{number}", max_tokens=5), part.ports[0])
                outcome = await visit.run()
                assert (outcome.how, outcome.tokens) == ("completed", 5), outcome.detail
                assert outcome.ended - outcome.sent < 5


@pytest.mark.parametrize("through", GATEWAYS)
def test_the_read_timeout_is_the_one_asked_for(through: str, tmp_path: Path):
    """In whatever unit the gateway wants it, and nowhere more than once."""
    upstreams = (Upstream("a", "127.0.1.1", 1), Upstream("b", "127.0.1.2", 2))
    gateway_part("gateway", through, 3, upstreams, read_timeout=7.25, slots=4, directory=tmp_path)
    (config,) = [path for path in (tmp_path / "gateway").iterdir() if path.suffix in (".cfg", ".conf", ".yaml")]
    assert any(text in config.read_text() for text in ("timeout server 7250ms", "proxy_read_timeout 7250ms", " 7.25s"))
