"""The one completion that may be asked for: one token, of an engine at rest, with a deadline.

A page at rest says nothing about whether the engine would work. Where that is to be known (``--ask``), and only where
nothing runs, waits or is owed, one completion of one token is sent. While its answer is awaited the page is read on and
judged by the exporter's rule, for which our request is an open stream to the engine, and its deadline the time that a
prompt may take: so an engine that shows no progress of any kind is stuck after the deadline (and two windows), and one
that does is busy, whoever it works for.

=========================  ======================================================================================
the completion             the verdict
=========================  ======================================================================================
is answered                idle; also by a 4xx: the engine lives, and what it said is shown
gets a 5xx, or breaks off  what the page says when read again; where it still says idle, blind: something is wrong,
                           and nothing is proven
is not answered in time    what the judge says of the pages read meanwhile: stuck, busy, dead, restarted ...
=========================  ======================================================================================
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any, Final

from tokengap.errors import SourceError
from tokengap.health.access import Answer, request
from tokengap.health.look import Look, http, models
from tokengap.join.verdict import WINDOWS, Judgement

#: Where to ask, and with what besides the model and ``max_tokens``. The second serves models that only chat.
WAYS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
)
#: What a server answers that does not complete this way, as vLLM and others do. Nothing has been generated then.
_NOT_THIS_WAY: Final = frozenset({400, 404, 405, 501})


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of it. ``sent`` is the path that was asked, empty where nothing was sent; ``said`` says it in words."""

    sent: str = ""
    model: str = ""
    status: int | None = None
    seconds: float | None = None
    said: str = ""


def why_not(look: Look) -> str:
    """Say why the engine may not be asked; empty: it may."""
    page = look.page
    if page is None or page.running is None or page.waiting is None:
        return "the page does not say that it is at rest"
    if page.requests:
        return "it has work"
    if look.moved or look.restarts:
        return "it worked a moment ago" if look.moved else "it has just started"
    if look.others is not None and look.others.owed:
        return f"{look.others.owed} of its open connections wait for an answer"
    return ""


async def ask(look: Look, judgement: Judgement, within: float) -> tuple[Judgement, Asked]:
    """Ask an engine that was judged idle, if it may be asked, and return the verdict after that."""
    refusal = why_not(look)
    if refusal:
        return judgement, Asked(said=f"not asked: {refusal}")
    try:
        names = await models(look.session, look.api, look.plan.timeout)
    except SourceError as error:
        return judgement, Asked(said=f"not asked: {error}")
    if not names:
        return judgement, Asked(said="not asked: /v1/models lists no model")
    await asyncio.sleep(look.plan.glance)  # until our own connection is off the books
    judgement = await look.read()
    refusal = why_not(look) if judgement.state == "idle" else f"it is {judgement.state}"
    if refusal:
        return judgement, Asked(said=f"not asked: {refusal}")

    began = time.monotonic()
    for path, prompt in WAYS:
        judgement, asked, answer = await _ask_this_way(look, path, prompt | {"model": names[0]}, within, began)
        if answer is None or answer.status not in _NOT_THIS_WAY:
            break
    return judgement, replace(asked, model=names[0], seconds=time.monotonic() - began)


async def _ask_this_way(
    look: Look, path: str, body: dict[str, Any], within: float, began: float
) -> tuple[Judgement, Asked, Answer | None]:
    # No deadline here: the judge gets to see the request open until the verdict is clear.
    sent = asyncio.create_task(
        request(look.session, "POST", f"{look.api}{path}", within=None, body=body | {"max_tokens": 1})
    )
    try:
        judgement = await _watch(look, sent, within, began)
        if not sent.done():
            return judgement, Asked(path, said=f"no answer to a completion in {time.monotonic() - began:.0f} s"), None
        try:
            answer = sent.result()
        except SourceError as error:
            return await _after(look, str(error)), Asked(path, said=f"a completion failed: {error}"), None
    finally:
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
    asked = Asked(path, status=answer.status, said=_in_words(answer, time.monotonic() - began))
    if answer.status >= 500 and answer.status not in _NOT_THIS_WAY:
        return await _after(look, http(answer)), asked, answer
    return await look.read(), asked, answer


def _in_words(answer: Answer, seconds: float) -> str:
    if answer.status == 200:
        return f"answered a completion in {seconds:.1f} s"
    return f"a completion got {http(answer)}"


async def _watch(look: Look, sent: asyncio.Task[Answer], within: float, began: float) -> Judgement:
    """Read and judge the page until the answer is there, the verdict is stuck, or it is late and something moves."""
    never_worked = not (look.page and look.page.generation_tokens)
    limits = look.plan.limits
    # The prompt is one word. Only an engine that never made a token may take its time: it may compile kernels.
    limits = replace(limits, prefill_budget=max(within, limits.prefill_budget) if never_worked else within)
    while True:
        judgement = await look.read(streams=1, limits=limits)
        late = time.monotonic() - began > within
        if sent.done() or judgement.state == "stuck":
            return judgement
        if late and (judgement.moved or time.monotonic() - began > within + WINDOWS * look.plan.window):
            return judgement
        await asyncio.wait({sent}, timeout=look.due_in(look.plan.window))


async def _after(look: Look, what: str) -> Judgement:
    """Return what the page says after a completion failed: of an engine that seems at rest nothing is known then."""
    await look.wait(look.plan.glance)
    judgement = await look.read()
    if judgement.state != "idle":
        return judgement
    return replace(judgement, state="blind", evidence=f"at rest by its page, but a completion failed: {what}")
