"""Running the lab's parts inside a test: over real sockets, on ports of loopback, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tokengap.lab.batching import Knobs
from tokengap.lab.engine import EngineServer
from tokengap.lab.gateway import gateway_app
from tokengap.lab.parts import LOOPBACK, free_port
from tokengap.lab.truth import EngineControl, Truth


@asynccontextmanager
async def served(app: web.Application, *, cancel: bool = True) -> AsyncIterator[int]:
    """Serve an app as the part's own main does, and yield its port."""
    runner = web.AppRunner(app, handler_cancellation=cancel, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, free_port())
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine(**knobs) -> AsyncIterator[int]:
    """Serve a stand-in engine and yield its port."""
    async with served(EngineServer(Knobs(**knobs)).app()) as port:
        yield port


@asynccontextmanager
async def gateway(upstream: int, *, leak: bool, pool: bool = False) -> AsyncIterator[int]:
    """Serve the naive gateway and yield its port."""
    async with served(gateway_app(f"http://{LOOPBACK}:{upstream}", pool=pool), cancel=not leak) as port:
        yield port


async def until(condition: Callable[[], Awaitable[bool]], within: float = 5.0) -> None:
    """Wait until a condition holds; fail when it does not within so many seconds."""
    deadline = time.monotonic() + within
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


async def at_rest(port: int, within: float = 10.0) -> Truth:
    """Wait until an engine has nothing to do, and return its truth."""
    control = EngineControl(port)

    async def idle() -> bool:
        truth = await control.truth()
        return truth.now.running + truth.now.waiting == 0

    await until(idle, within)
    return await control.truth()


async def page(port: int) -> dict[str, float]:
    """Return the samples of an engine's page, summed over labels."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{LOOPBACK}:{port}/metrics") as answer:
        text = await answer.text()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
