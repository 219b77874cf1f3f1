"""The one completion: who is never sent it, and what its answer, or the lack of one, says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web

from health.looking import WINDOW, at, judged, look, requests_at, working
from lab.serving import engine, served
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit
from tokengap.lab.vllm_page import CONTENT_TYPE, VllmPage

DEADLINE = 3 * WINDOW

pytestmark = pytest.mark.usefixtures("unhurried")


class StandIn:
    """An engine of which a test says what its page shows and how it answers. ``asked``: the bodies it got, by path."""

    def __init__(self, answer: Callable[[StandIn, str], web.Response]) -> None:
        self.page, self.asked = VllmPage("m"), []
        self.page.add("generation_tokens", 5)
        self.called, self.released = asyncio.Event(), asyncio.Event()
        self._answer = answer

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/{way:.*}", self._complete),
            ]
        )
        return app

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.page.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}, {"id": "adapter"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append((request.match_info["way"], await request.json()))
        self.called.set()
        answer = self._answer(self, request.match_info["way"])
        if answer is None:
            await self.released.wait()
            return web.Response()
        return answer


def silence(_: StandIn, __: str) -> None:
    """Answer nothing."""


class TestOnlyAnEngineAtRest:
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("users", [1, 6], ids=["running", "queue"])
    async def test_an_engine_with_work_is_never_asked(self, users, frozen):
        """Whatever the verdict, the engine got the requests of its users and no other."""
        async with working(users, max_num_seqs=4) as port:
            if frozen:
                await EngineControl(port).freeze()
            finding = await look(port, ask_within=DEADLINE)
            assert finding.verdict == ("stuck" if frozen else "busy")
            assert finding.asked.said == "not asked: it has work"
            assert (finding.asked.sent, await requests_at(port)) == ("", users)

    async def test_one_that_worked_a_moment_ago(self):
        """At rest now, but it moved while we looked: that it works is known."""
        async with engine(rate=200) as port:
            visit = asyncio.create_task(Visit(User("u", max_tokens=60), port).run())
            finding = await look(port, ask_within=DEADLINE)
            await visit
            assert judged(finding)[1] == 0
            assert finding.asked.sent == ""
            assert await requests_at(port) == 1

    async def test_one_whose_page_knows_nothing_of_an_open_request(self):
        """A question came on a socket and no answer went back: it waits, whatever the gauges say."""
        stand_in = StandIn(silence)
        async with served(stand_in.app()) as port, aiohttp.ClientSession(at(port)) as session:
            user = asyncio.create_task(session.post("/v1/completions", json={"prompt": "of a user"}))
            await stand_in.called.wait()
            finding = await look(port, ask_within=DEADLINE)
            stand_in.released.set()
            await user
        assert judged(finding) == ("idle", 0)
        assert finding.asked.said == "not asked: 1 of its open connections wait for an answer"
        assert [body["prompt"] for _, body in stand_in.asked] == ["of a user"]

    async def test_not_without_being_told_to(self):
        """By default nothing but the page is asked for."""
        async with engine() as port:
            assert (await look(port)).asked is None
            assert await requests_at(port) == 0


class TestAnswers:
    async def test_one_token(self):
        """One request for one token, of the model that the engine lists."""
        async with engine() as port:
            finding = await look(port, ask_within=DEADLINE)
            (request,) = (await EngineControl(port).truth()).requests.values()
        assert judged(finding) == ("idle", 0)
        assert (request.max_tokens, request.generated) == (1, 1)
        asked = finding.asked
        assert (asked.sent, asked.model, asked.status) == ("/v1/completions", "tokengap-lab", 200)
        assert asked.said.startswith("answered a completion in ")

    async def test_chat_where_there_are_no_completions(self):
        """A 404 generates nothing, so the second way is tried."""

        def chats(_: StandIn, way: str) -> web.Response:
            return web.json_response({"choices": []}, status=200 if way == "chat/completions" else 404)

        stand_in = StandIn(chats)
        async with served(stand_in.app()) as port:
            finding = await look(port, ask_within=DEADLINE)
        assert judged(finding) == ("idle", 0)
        assert (finding.asked.sent, finding.asked.status) == ("/v1/chat/completions", 200)
        assert [way for way, _ in stand_in.asked] == ["completions", "chat/completions"]
        assert {body["max_tokens"] for _, body in stand_in.asked} == {1}

    @pytest.mark.parametrize("status", [401, 404, 422, 429])
    async def test_a_4xx_is_an_answer(self, status):
        """The engine lives, and what it said is shown."""

        def refuses(_: StandIn, __: str) -> web.Response:
            return web.json_response({"error": {"message": "not\nfor you"}}, status=status)

        async with served(StandIn(refuses).app()) as port:
            finding = await look(port, ask_within=DEADLINE)
        assert judged(finding) == ("idle", 0)
        assert finding.asked.said == f"a completion got HTTP {status}, not for you"

    async def test_a_5xx_of_an_engine_at_rest(self):
        """Something is wrong and nothing is proven: blind, with what was said."""

        def fails(_: StandIn, __: str) -> web.Response:
            return web.json_response({"message": "EngineDeadError"}, status=500)

        stand_in = StandIn(fails)
        async with served(stand_in.app()) as port:
            finding = await look(port, ask_within=DEADLINE)
        assert judged(finding) == ("blind", 3)
        assert finding.evidence == "at rest by its page, but a completion failed: HTTP 500, EngineDeadError"
        assert len(stand_in.asked) == 1


class TestNoAnswer:
    async def test_of_a_frozen_engine(self):
        """It rested and was frozen, so its page stands still: only the completion shows it. Stuck after the deadline,
        and the engine got one request."""
        async with engine() as port:
            await Visit(User("before", max_tokens=3), port).run()
            await EngineControl(port).freeze()
            finding = await look(port, ask_within=DEADLINE)
            assert judged(finding) == ("stuck", 1)
            assert "1 open socket" in finding.evidence
            assert finding.asked.seconds >= DEADLINE
            assert finding.asked.said.startswith("no answer to a completion in ")
            assert await requests_at(port) == 2

    async def test_a_short_deadline_is_two_windows(self):
        """Nothing is stuck sooner."""
        async with served(StandIn(silence).app()) as port:
            finding = await look(port, ask_within=WINDOW / 10)
        assert judged(finding) == ("stuck", 1)
        assert finding.asked.seconds >= 2 * WINDOW

    async def test_of_an_engine_that_never_made_a_token(self):
        """It may compile kernels for its first one: nothing is claimed after the deadline."""
        async with engine() as port:
            await EngineControl(port).freeze()
            finding = await look(port, ask_within=DEADLINE)
        assert judged(finding) == ("busy", 0)
        assert "a prompt may be in the making (stuck from 120 s)" in finding.evidence

    async def test_of_an_engine_that_works_for_others(self):
        """It moves, so it works, and our completion waits in its queue: busy."""
        stand_in = StandIn(silence)
        real = stand_in.page.text

        def moves(**kwargs: bool) -> bytes:
            if stand_in.asked:
                stand_in.page.put("num_requests_running", 7)
                stand_in.page.add("generation_tokens", 3)
            return real(**kwargs)

        stand_in.page.text = moves
        async with served(stand_in.app()) as port:
            finding = await look(port, ask_within=DEADLINE)
        assert judged(finding) == ("busy", 0)
        assert "generation +3" in finding.evidence
        assert finding.asked.said.startswith("no answer to a completion in ")

    async def test_of_an_engine_that_breaks_off(self):
        """The connection ends without an answer, and the page is as it was: blind."""

        def breaks(stand_in: StandIn, _: str) -> web.Response:
            stand_in.requests[-1].transport.abort()
            return web.Response()

        stand_in = StandIn(breaks)
        stand_in.requests = []

        @web.middleware
        async def keep(request: web.Request, handler) -> web.StreamResponse:
            stand_in.requests.append(request)
            return await handler(request)

        app = stand_in.app()
        app.middlewares.append(keep)
        async with served(app) as port:
            finding = await look(port, ask_within=DEADLINE)
        assert judged(finding) == ("blind", 3)
        assert finding.evidence.startswith("at rest by its page, but a completion failed: the answer is broken: ")
