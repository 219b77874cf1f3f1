"""Looking at engines inside a test, with windows short enough for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lab.serving import engine, until
from tokengap.health.access import Access
from tokengap.health.command import Finding, look_at_all
from tokengap.health.look import Plan
from tokengap.lab.parts import LOOPBACK
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit

#: A window short enough for a test and longer than any hiccup of an engine that makes 50 tokens a second.
WINDOW = 0.5


def at(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"


async def look(*ports: int, proxies: Sequence[int] = (), show=lambda _: None, tell=lambda _: None, **plan):
    """Look at engines on loopback and return the finding, or several."""
    plan = Plan(**{"window": WINDOW} | plan)
    findings = await look_at_all([at(p) for p in ports], [at(p) for p in proxies], Access(), plan, show, tell)
    return findings[0] if len(findings) == 1 else findings


def judged(finding: Finding) -> tuple[str, int]:
    """Return the verdict and its exit code."""
    return finding.verdict, finding.exit_code


@asynccontextmanager
async def working(users: int, *, port: int | None = None, **knobs) -> AsyncIterator[int]:
    """Serve an engine with so many requests in flight: those that have a slot decode, for longer than a test lasts."""
    if port is None:
        async with engine(**knobs) as port, working(users, port=port, **knobs) as serving:
            yield serving
        return
    tasks = [asyncio.create_task(Visit(User(f"u{n}", max_tokens=100_000), port).run()) for n in range(users)]
    slots = knobs.get("max_num_seqs", 4)

    async def all_in() -> bool:
        truth = await EngineControl(port).truth()
        decoding = [request for request in truth.requests.values() if request.generated]
        return (len(decoding), truth.now.waiting) == (min(users, slots), max(users - slots, 0))

    try:
        await until(all_in, within=20)
        yield port
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def in_prefill(port: int) -> AsyncIterator[None]:
    """Have an engine run one request that has no token yet."""
    task = asyncio.create_task(Visit(User("u", prompt_tokens=20_000, max_tokens=5), port).run())

    async def running_one() -> bool:
        return (await EngineControl(port).truth()).now.running == 1

    try:
        await until(running_one)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def requests_at(port: int) -> int:
    """Count the requests that an engine has ever got."""
    return len((await EngineControl(port).truth()).requests)
