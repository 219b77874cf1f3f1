"""The replay server over real sockets: each kind of phase, on its clock and by hand, and its scripts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from lab.serving import until
from tokengap.errors import SetupError
from tokengap.lab.parts import LOOPBACK, Part, free_port, listens, running
from tokengap.lab.replay import Replay, hang, page, read_script, refuse, replaying, status

ONE, TWO = b"vllm:x 1\n", b"vllm:x 2\n"


async def text(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.get(url) as answer:
        return answer.status, await answer.read()


async def test_each_phase_does_what_it_says():
    """A page, a failure, silence that ends with the next phase, nobody there, and the next life on the same port."""
    async with Replay([page(0, ONE)]) as replay, aiohttp.ClientSession() as session:
        metrics = f"{replay.url}/metrics"
        assert await text(session, metrics) == (200, ONE)
        await replay.show(status(1, 503))
        assert await text(session, metrics) == (503, b"")
        await replay.show(hang(2))
        hanging = asyncio.create_task(text(session, metrics))

        async def arrived() -> bool:
            return replay.count("GET") == 3

        await until(arrived)
        assert not hanging.done()
        await replay.show(page(3, TWO))
        assert await asyncio.wait_for(hanging, 5) == (200, TWO)
        await replay.show(refuse(4))
        with pytest.raises(aiohttp.ClientConnectionError):
            await text(session, metrics)
        assert not await listens(replay.port)
        await replay.show(page(5, ONE))
        assert await text(session, metrics) == (200, ONE)


async def test_a_completion_is_held_until_the_process_ends():
    """Its header comes and no token; the socket is open until the phase that refuses, which resets it."""
    async with Replay([page(0, ONE)]) as replay, aiohttp.ClientSession() as session:
        async with session.post(f"{replay.url}/v1/completions", json={}) as answer:
            assert answer.status == 200
            reading = asyncio.create_task(answer.content.readany())
            await replay.show(page(1, TWO))
            assert await text(session, f"{replay.url}/v1/models") != (200, b"")
            assert not reading.done()
            await replay.show(refuse(2))
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(reading, 5)
        assert replay.count("POST", "/v1/") == 1


async def test_it_plays_on_the_clock():
    """Ten seconds of script in a fifth of a second, in order, and the last phase stays."""
    async with replaying([page(0, ONE), hang(5), page(10, TWO)], faster=50) as replay:

        async def over() -> bool:
            return replay.phase.body == TWO

        await until(over)


async def test_a_port_that_is_taken_is_said():
    """One line with the address."""
    async with Replay([page(0, ONE)]) as first:
        with pytest.raises(SetupError, match=f"cannot listen on {LOOPBACK}:{first.port}"):
            async with Replay([page(0, ONE)], port=first.port):
                pass


def test_a_script_is_read(tmp_path: Path):
    """Comments and empty lines are nothing; pages are files beside the script."""
    (tmp_path / "a.prom").write_bytes(ONE)
    script = "# a life\n0 page a.prom\n\n3.5 status 500\n4 hang  # no answer\n9 refuse\n"
    assert read_script(script, tmp_path) == (page(0, ONE), status(3.5, 500), hang(4), refuse(9))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("", "no line"),
        ("0 page missing.prom", r"line 1: .*missing\.prom"),
        ("0 hang\nsoon hang", "line 2: .*soon"),
        ("0 hang\n1 explode", "line 2: expected SECONDS and one of"),
        ("5 hang\n1 refuse", "line 2: its second is before"),
        ("0 status OK", "line 1: .*OK"),
    ],
)
def test_a_bad_script_is_refused_with_its_line(script: str, reason: str, tmp_path: Path):
    """What, where, and what was expected."""
    with pytest.raises(ValueError, match=reason):
        read_script(script, tmp_path)


@pytest.mark.e2e
async def test_the_command_serves_a_script(tmp_path: Path):
    """In a process of its own, as somebody does who tries a health check on a recording."""
    (tmp_path / "a.prom").write_bytes(ONE)
    (tmp_path / "script").write_text("0 page a.prom\n")
    port = free_port()
    command = (sys.executable, "-m", "tokengap.lab.replay", str(tmp_path / "script"), "--port", str(port))
    async with running(Part("replay", command, (port,)), tmp_path), aiohttp.ClientSession() as session:
        assert await text(session, f"http://{LOOPBACK}:{port}/metrics") == (200, ONE)
