"""``tokengap doctor cancel``: does what stands in front of an engine cancel a stream whose client left?

One stream is sent, its client leaves, and the engine's own page is watched. Nothing else can tell: a proxy's log says
what the proxy noticed, not what the engine was told. Where this says that the engine is told at once, a gateway like
``tokengap admit`` adds no cancel.

It makes the engine generate, so an engine that has work is left alone unless that is asked for: it would take a slot,
and its page could not tell our request from those of others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import aiohttp

from tokengap.doctor import PATIENCE, Finding
from tokengap.errors import SettingsError, SetupError, SourceError
from tokengap.readings import EnginePage
from tokengap.series.engines import public_url
from tokengap.sources.engine import EngineSource, resolve
from tokengap.topology import Engine

#: When to leave. ``early``: before the first token, in the prompt or in a queue; some proxies notice only later.
Leave: TypeAlias = Literal["streaming", "early"]

#: Seconds between two reads of the page.
EVERY: Final = 0.2
#: Events after which a client in the middle of an answer leaves.
EVENTS: Final = 3
#: Seconds until the engine has to have told of the request, or begun to answer it.
BEGINS_WITHIN: Final = 30.0
#: A cancel later than this is no answer to the client's leaving, but to something else: the next byte, a timeout.
AT_ONCE: Final = 2.0
#: Seconds in which an engine that shows a request does nothing: it has none, its page is stale (vLLM issue 22545).
STILL: Final = 3.0

#: What makes for a long answer.
PROMPT: Final = "Count from 1 to 5000, one number on each line, and say nothing else."


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done. ``within``: how long the engine is watched, in seconds."""

    url: str
    engine: str
    leave: Leave = "streaming"
    stream: bool = True
    max_tokens: int = 2000
    within: float = 30.0
    force: bool = False
    model: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen.

    ``dropped_after``: seconds from leaving until the engine had it no more; None: it had it still after ``watched``.
    ``finished``: it came to its end, so nobody cancelled it. ``tokens``: generated since the client left, None where
    the page does not tell. ``others``: requests the engine had besides.
    """

    leave: Leave
    dropped_after: float | None
    finished: bool
    tokens: float | None
    watched: float
    others: int = 0


async def examine(plan: Plan) -> Finding:
    """Do it, and say what it means. SetupError where it cannot be done, SettingsError for wrong addresses."""
    try:
        engine = Engine("engine", plan.engine, await resolve(plan.engine))
    except ValueError as wrong:
        raise SettingsError(f"--engine {plan.engine}: {wrong}") from wrong
    except SourceError as unknown:
        raise SetupError(f"--engine {public_url(plan.engine)}: {unknown}") from unknown
    async with aiohttp.ClientSession() as session:
        source = EngineSource(engine, session, deadline=PATIENCE)
        before = await _page(source)
        _check_at_rest(before, plan)
        plan = replace(plan, model=plan.model or next(iter(before.models), ""))
        if not plan.model:
            raise SetupError("the engine's page names no model: name it with --model")
        async with _stream(session, plan) as stream:
            if plan.leave == "streaming" and plan.stream:
                await stream.begins()
            await _shown(source, before, stream)
        return about(await _watch(source, before, await _page(source), plan), plan)


def about(trial: Trial, plan: Plan) -> Finding:
    """Say what a trial means."""
    subject = f"cancel through {public_url(plan.url)}"
    cost = "" if trial.tokens is None else f", {trial.tokens:,.0f} tokens after its client left"
    besides = f" (with {trial.others} other requests in the engine, so this is a guess)" if trial.others else ""
    tie = "what is in front has to end its request when its client leaves: docs/rollback.md has the settings, proxy by "
    tie += "proxy; or put `tokengap admit` in front of the engine"
    if trial.dropped_after is None:
        return Finding(
            subject, "attention", f"the engine still runs it {trial.watched:.0f} s later{cost}{besides}", tie
        )
    if trial.finished:
        return Finding(subject, "attention", f"nobody cancelled it: it ran to its end{cost}{besides}", tie)
    found = f"the engine dropped it {trial.dropped_after:.1f} s later{cost}{besides}"
    if trial.dropped_after > AT_ONCE:
        late = "it was noticed late, at the next byte or by a timeout; "
        return Finding(subject, "attention", found, late + tie)
    if trial.others:
        return Finding(subject, "note", found, "ask again when the engine is at rest")
    early = "" if trial.leave == "early" else "; ask --early too: some notice nothing before the first token"
    return Finding(subject, "ok", found, f"`tokengap admit` would add no cancel here{early}")


# --- done -----------------------------------------------------------------------------------------------------------


class _Stream:
    """Our request, while its client is there."""

    def __init__(self, response: asyncio.Task[aiohttp.ClientResponse]) -> None:
        self._response = response

    async def begins(self) -> None:
        """Wait for some events of its answer."""
        try:
            async with asyncio.timeout(BEGINS_WITHIN):
                response = await self._response
                _check(response.status, await response.content.read(2000) if response.status != 200 else b"")
                for _ in range(EVENTS):
                    if not await response.content.readuntil(b"\n\n"):
                        raise SetupError("the answer ended before its client could leave: ask for more --max-tokens")
        except TimeoutError:
            raise SetupError(f"no token within {BEGINS_WITHIN:.0f} s: try --early") from None
        except aiohttp.ClientError as error:
            raise SetupError(f"the request failed: {error or type(error).__name__}") from error

    async def check(self) -> None:
        """Raise SetupError where it is over already."""
        if not self._response.done():
            return
        if error := self._response.exception():
            raise SetupError(f"the request failed: {error or type(error).__name__}")
        response = self._response.result()
        _check(response.status, await response.content.read(2000) if response.status != 200 else b"")


def _check(status: int, said: bytes) -> None:
    if status != 200:
        raise SetupError(f"the request was answered HTTP {status}: {' '.join(said.decode(errors='replace').split())}")


@asynccontextmanager
async def _stream(session: aiohttp.ClientSession, plan: Plan) -> AsyncIterator[_Stream]:
    """Send the request. At the end of the block its client leaves: its connection is closed."""
    body: dict[str, Any] = {"model": plan.model, "max_tokens": plan.max_tokens, "stream": plan.stream}
    body["messages"] = [{"role": "user", "content": PROMPT}]
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    url = f"{plan.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    forever = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE)
    sent = asyncio.create_task(session.post(url, json=body, headers=headers, timeout=forever).__aenter__())
    try:
        yield _Stream(sent)
    finally:
        sent.cancel()
        (response,) = await asyncio.gather(sent, return_exceptions=True)
        if isinstance(response, aiohttp.ClientResponse):
            response.close()


def _check_at_rest(before: EnginePage, plan: Plan) -> None:
    if before.running is None:
        raise SetupError("the engine's page does not tell how many requests it runs")
    if before.requests and not plan.force:
        raise SetupError(
            f"the engine has {before.requests:.0f} requests: its page could not tell ours from theirs, and ours would "
            "take a slot of theirs; --force does it all the same"
        )


async def _shown(source: EngineSource, before: EnginePage, stream: _Stream) -> None:
    """Wait until the engine's page has our request."""
    until = time.monotonic() + BEGINS_WITHIN
    while (await _page(source)).requests <= before.requests:
        await stream.check()
        if time.monotonic() > until:
            raise SetupError("the engine's page never showed the request: is it the engine behind --url?")
        await asyncio.sleep(EVERY)


async def _watch(source: EngineSource, before: EnginePage, left: EnginePage, plan: Plan) -> Trial:
    """Read the page until the engine has our request no more."""
    began = moved_at = time.monotonic()
    page, dropped_after = left, None
    while dropped_after is None and time.monotonic() < began + plan.within:
        last, page = page, await _page(source)
        now = time.monotonic()
        if page.done != last.done:
            moved_at = now
        if page.requests <= before.requests:
            dropped_after = now - began
        elif page.live and now - moved_at >= STILL:
            dropped_after = moved_at - began
        else:
            await asyncio.sleep(EVERY)
    return Trial(
        leave=plan.leave,
        dropped_after=dropped_after,
        finished=dropped_after is not None and (page.finished or 0.0) > (before.finished or 0.0),
        tokens=None if page.generation_tokens is None else page.generation_tokens - (left.generation_tokens or 0.0),
        watched=plan.within,
        others=int(before.requests),
    )


async def _page(source: EngineSource) -> EnginePage:
    try:
        return await source.read()
    except SourceError as error:
        raise SetupError(f"{public_url(source.engine.url)}: {error}") from error
