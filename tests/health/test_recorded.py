"""The command on servers that answer as recorded ones did, over real HTTP: one look at each state of a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from lab.commands import Ran, tokengap
from lab.serving import until
from tokengap.lab.replay import Replay, hang, page, refuse, status

pytestmark = pytest.mark.e2e

RECORDED = Path(__file__).parent.parent / "recorded"
PREFILL = [f"vllm-0.32.0/long-prefill-{at:02}s" for at in (1, 5, 10, 15, 20, 25)]


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.prom").read_bytes()


async def look_while(pages: list[bytes]) -> tuple[Ran, Replay]:
    """Look at a server whose page changes from the first read on, every 0.3 s."""
    async with Replay([page(0, pages[0])]) as replay:
        looking = asyncio.create_task(look(replay, window="2s"))

        async def read() -> bool:
            return replay.count("GET", "/metrics") > 0

        await until(read, 20.0)
        replay.phases = tuple(page(n * 0.3, body) for n, body in enumerate(pages))
        await replay.play()
        return await looking, replay


def only_its_page(replay: Replay) -> bool:
    return replay.count("GET", "/metrics") == len(replay.asked)


async def look(replay: Replay, *more: str, window: str = "0.5s") -> Ran:
    return await tokengap("health", replay.url, "--window", window, *more)


async def test_a_long_prefill_of_vllm_0_32_0_is_busy():
    """Every counter stands at 0 and only the KV cache moves: busy, exit 0, and nothing but the page was asked for."""
    ran, replay = await look_while([recorded(name) for name in PREFILL])
    assert ran.code == 0, ran
    assert " busy: running 1, KV usage " in ran.out
    assert only_its_page(replay)


async def test_the_core_of_vllm_0_32_0_is_dead_behind_frozen_values():
    """The frozen page with a client connected is stuck after two windows; without one its gauges are stale, which is no
    reason to restart anything; and where nobody listens any more it is dead."""
    async with Replay([page(0, recorded("vllm-0.32.0/core-killed-3"))]) as replay:
        ran = await look(replay)
        assert (ran.code, " idle: stale gauges" in ran.out) == (0, True), ran
        async with aiohttp.ClientSession() as session, session.post(f"{replay.url}/v1/completions", json={}):
            ran = await look(replay)
            assert (ran.code, " stuck: running " in ran.out) == (1, True), ran
    async with Replay([refuse(0)]) as replay:
        assert (await look(replay)).code == 2


@pytest.mark.parametrize("name", ["vllm-0.32.0/busy", "vllm-0.32.0/multiapi-busy"])
async def test_a_busy_page_of_one_and_of_several_api_servers(name):
    """With a start time on the page and without one: what was generated between two reads is progress."""
    first, second = {"vllm-0.32.0/busy": ("-0", "-1")}.get(name, ("", "2"))
    ran, _ = await look_while([recorded(name + first), recorded(name + second)])
    assert (ran.code, " busy: " in ran.out) == (0, True), ran


async def test_log_stats_are_off_on_a_real_engine():
    """Only Python's own metrics: blind, exit 3, never dead."""
    async with Replay([page(0, recorded("vllm-0.32.0/nostats"))]) as replay:
        ran = await look(replay)
        assert ran.code == 3, ran
        assert " blind: no series of an engine on the page" in ran.out


@pytest.mark.parametrize("phase", [hang(0), status(0, 503)], ids=["hung", "503"])
async def test_a_page_that_does_not_come_is_no_death(phase):
    """Blind: a watchdog must not restart what it cannot see into."""
    async with Replay([phase]) as replay:
        assert (await look(replay, "--timeout", "0.5s")).code == 3


FAMILIES = ("sglang-pages/busy", "llamacpp-pages/busy", "tgi-pages/busy")


@pytest.mark.parametrize("name", FAMILIES)
async def test_engines_of_other_families(name):
    """The same command, the same words; never anything asked but the page (SGLang's /health generates)."""
    ran, replay = await look_while([recorded(f"{name}-0"), recorded(f"{name}-1")])
    assert (ran.code, " busy: " in ran.out) == (0, True), ran
    assert only_its_page(replay)
