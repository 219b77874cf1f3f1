"""The gateway over real sockets: what passes it, what it counts, and that a client's leaving ends its generation."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import msgspec
import pytest
from aiohttp import web

from admit.gateways import admitting, chat, post, published, raw, session, settled
from lab.serving import at_rest, engine, served, until
from tokengap.lab.parts import LOOPBACK, free_port
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit, crowd

BOTH = {"include_usage": True, "continuous_usage_stats": True}


async def body_of(asking: aiohttp.ClientSession, path: str, body: dict) -> bytes:
    """Return an answer's bytes, without the second at which it was made."""
    async with asking.post(path, json=body) as answer:
        assert answer.status == 200
        return re.sub(rb'"created":\d+', b'"created":0', await answer.read())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, BOTH], ids=["nothing", "total", "running"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_gets_the_bytes_it_would_have_got(path, options, stream):
    """Through the gateway as without it, whatever usage it asks for."""
    body = chat(stream=stream, prompt="hi") | ({"stream_options": options} if options and stream else {})
    async with engine(rate=500) as alone, engine(rate=500) as behind, admitting(behind) as gateway:
        async with aiohttp.ClientSession(f"http://{LOOPBACK}:{alone}") as direct, session(gateway) as through:
            assert await body_of(through, path, body) == await body_of(direct, path, body)
        page = await published(gateway)
    assert page["tokengap_tokens_out_total{e0,tokengap-lab}"] in (0, 20)
    assert page["tokengap_tokens_useful_total{e0}"] == 20


async def test_everything_comes_through():
    """Streams, whole answers, errors, embeddings and lists of models; connections are used again."""
    async with engine(rate=500) as port, admitting(port) as gateway, session(gateway) as asking:
        users = [User(f"u{number}", max_tokens=30, stream=number % 2 == 0) for number in range(6)]
        outcomes = await asyncio.gather(*(Visit(user, gateway.port).run() for user in users))
        assert [(outcome.how, outcome.tokens) for outcome in outcomes] == [("completed", 30)] * 6
        async with asking.get("/v1/models?x=%2Fa") as answer:
            assert (await answer.json())["data"][0]["id"] == "tokengap-lab"
        async with asking.post("/v1/completions", data=b"{}") as answer:
            assert answer.status == 400
            assert "prompt" in (await answer.json())["error"]["message"]
        async with asking.post("/v1/embeddings", json={"input": "x"}) as answer:
            assert (await answer.json())["object"] == "list"
        async with asking.head("/v1/models") as answer:
            assert answer.status in (200, 405)
        async with asking.get("/v1/none") as answer:
            assert answer.status == 404
        async with asking.get("/other") as answer:
            assert answer.status == 404


async def test_curl_as_the_article_prints_it():
    """POST /v1/stream without a body, cut after a moment: the slot is free again."""
    async with engine(max_num_seqs=1) as port, admitting(port, slots=1) as gateway:
        async with raw(gateway.port, post("/v1/stream")) as client:
            assert b"data: {" in await client.reader.readuntil(b"\n\n")
        truth = await at_rest(port)
    assert truth.generated < 50


async def test_headers():
    """A request's id is kept or made; hop-by-hop headers stay on their hop; keys pass."""
    seen: list[web.Request] = []

    async def show(request: web.Request) -> web.Response:
        seen.append(request)
        headers = {"Connection": "X-Hop", "X-Hop": "1", "Keep-Alive": "timeout=5", "Set-Cookie": "a=1"}
        return web.Response(headers=headers, text="x")

    app = web.Application()
    app.router.add_get("/v1/models", show)
    async with served(app) as port, admitting(port) as gateway, session(gateway) as asking:
        sent = {"X-Request-Id": "mine", "Authorization": "Bearer key", "Connection": "X-Mine", "X-Mine": "1"}
        async with asking.get("/v1/models", headers=sent) as answer:
            assert answer.headers["X-Request-Id"] == "mine"
            assert "X-Hop" not in answer.headers
            assert answer.headers["Set-Cookie"] == "a=1"
        async with asking.get("/v1/models") as answer:
            assert len(answer.headers["X-Request-Id"]) == 32
    first, second = seen
    assert first.headers["Authorization"] == "Bearer key"
    assert first.headers["X-Request-Id"] == "mine"
    assert first.headers["X-Forwarded-For"] == LOOPBACK
    assert first.headers["Host"] == f"{LOOPBACK}:{port}"
    assert "X-Mine" not in first.headers
    assert first.transport is second.transport or first.transport is None  # the connection was used again


async def test_no_key_is_logged(caplog: pytest.LogCaptureFixture):
    """Not in a header, not in an address, at no level."""
    caplog.set_level("DEBUG")
    async with (
        engine(rate=500) as port,
        admitting(port) as gateway,
        session(gateway) as asking,
        asking.post(
            "/v1/chat/completions?api_key=sk-secret-1", json=chat(), headers={"Authorization": "Bearer sk-secret-2"}
        ) as answer,
    ):
        await answer.read()
    assert "request" in [record.getMessage() for record in caplog.records]
    assert "sk-secret" not in "".join(str(vars(record)) for record in caplog.records)


# --- its client's life ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("leaving", ["fin", "rst"])
@pytest.mark.parametrize("late_headers", [False, True], ids=["header first", "header late"])
@pytest.mark.parametrize("slots", [2, 64], ids=["waits at the gate", "waits in the engine"])
async def test_who_leaves_is_let_go_of_at_once(stream, leaving, late_headers, slots):
    """In the queue, in prefill and in decode: the engine aborts within a fraction of a second, and no one else does."""
    serving = engine(max_num_seqs=2, rate=400, late_headers=late_headers)
    async with serving as port, admitting(port, slots=slots) as gateway:
        users = crowd(8, 5, max_tokens=100, leave_at=0.15, leaving=leaving, stream=stream)
        outcomes = await asyncio.gather(*(Visit(user, gateway.port).run() for user in users))
        truth = await at_rest(port)
        page = await published(gateway)
    for outcome in outcomes:
        request = truth.requests.get(outcome.user.id)
        if outcome.how == "left":
            assert request is None or (request.state, request.abandoned) == ("aborted", False)
            assert request is None or request.ended == pytest.approx(outcome.ended, abs=0.25)
        else:
            assert request is not None
            assert outcome.tokens == request.generated == 100
    assert page["tokengap_streams_ended_total{e0,admit,completed}"] == 3
    assert page["tokengap_streams{connected,e0,admit}"] == 0


@pytest.mark.parametrize("at", ["in the queue", "in decode"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_who_half_closes_is_there(at, stream):
    """It ended only its own side and reads on: it gets everything, wherever its request was at that moment."""
    async with engine(max_num_seqs=1, rate=200) as port, admitting(port) as gateway:
        first = asyncio.create_task(Visit(User("first", max_tokens=60), gateway.port).run())
        await asyncio.sleep(0.05 if at == "in the queue" else 0.35)
        user = User("u", max_tokens=40, stream=stream, leave_at=0.1, leaving="half-close")
        outcome = await Visit(user, gateway.port).run()
        await first
    assert (outcome.how, outcome.tokens) == ("completed", 40)


async def test_a_half_closed_client_that_closes_is_gone():
    """Asked once and alive, then closed: it is asked again, while nothing else is sent to it."""
    serving = engine(max_num_seqs=1, rate=1)
    async with serving as port, admitting(port) as gateway, raw(gateway.port, post("/v1/stream")) as other:
        await other.reader.readuntil(b"\n\n")
        async with raw(gateway.port, post("/v1/chat/completions", chat())) as client:
            await client.reader.readuntil(b"\r\n\r\n")
            client.writer.write_eof()
            assert await client.reader.readexactly(1) == b"0"  # asked
            assert await waits(port, 1)
        await until(lambda: waits(port, 0), within=5.0)


async def test_a_half_closed_client_that_is_there_is_asked_ever_less_often():
    """Every question is part of the size of the next chunk, and it reads what it would have read."""
    asked = post("/v1/chat/completions", chat(max_tokens=2), "Connection: close")
    async with engine(rate=0.4) as port, admitting(port) as gateway, raw(gateway.port, asked) as client:
        await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write_eof()
        said = await client.said(within=20.0)
    first, second, last, nothing = said.split(b"\r\n")[::2]
    assert (int(last, 16), nothing) == (0, b"")
    assert len(first) + len(second) + len(last) - len(b"1f71f70") in (2, 3)  # at once, after 1 s, after 2 more


async def waits(port: int, count: int) -> bool:
    return (await EngineControl(port).truth()).now.waiting == count


async def test_a_client_of_http_1_0_that_ends_its_side_is_gone():
    """It cannot be asked, and every proxy takes it so."""
    async with engine(max_num_seqs=1, late_headers=True) as port, admitting(port) as gateway:
        async with raw(gateway.port, post("/v1/chat/completions", chat(max_tokens=5000), version="1.0")) as client:
            client.writer.write_eof()
            assert await client.said() == b""
        assert (await at_rest(port)).generated < 100


async def test_a_client_of_http_1_0_gets_everything():
    """Its answer ends with the connection, after the last byte was acknowledged and counted."""
    async with engine(rate=500) as port, admitting(port) as gateway:
        async with raw(gateway.port, post("/v1/chat/completions", chat(), version="1.0")) as client:
            said = await client.said()
        page = await settled(gateway)
    assert said.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in said
    assert page["tokengap_tokens_useful_total{e0}"] == 20


async def test_a_client_that_waits_to_be_told_sends_its_body():
    """``Expect: 100-continue`` is answered here."""
    async with engine(rate=500) as port, admitting(port) as gateway:
        request = post("/v1/chat/completions", chat(), "Expect: 100-continue", "Connection: close")
        head, _, body = request.partition(b"\r\n\r\n")
        async with raw(gateway.port, head + b"\r\n\r\n") as client:
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(body)
            assert (await client.said()).startswith(b"HTTP/1.1 200 OK")


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("leaving", ["fin", "rst"])
async def test_counts_are_exact(leaving):
    """Out is what the engine wrote, useful what users read before they left; the rest is orphaned, nothing pending."""
    async with engine(rate=200) as port, admitting(port) as gateway:
        users = crowd(12, 6, max_tokens=80, leave_at=0.2, leaving=leaving)
        outcomes = await asyncio.gather(*(Visit(user, gateway.port).run() for user in users))
        truth = await at_rest(port)
        page = await settled(gateway)
    useful = sum(outcome.tokens for outcome in outcomes)
    out = page["tokengap_tokens_out_total{e0,tokengap-lab}"]
    assert page["tokengap_tokens_useful_total{e0}"] == useful
    assert useful <= out <= truth.generated <= useful + 6 * 2  # what was on its way when they left
    assert page["tokengap_tokens_orphaned_total{e0,admit}"] == out - useful
    assert page["tokengap_tokens_pending{e0}"] == 0


async def test_on_a_connection_that_is_used_again_counts_go_on():
    """Each answer has its own ledger, whatever was sent before on the same socket."""
    async with engine(rate=500) as port, admitting(port) as gateway, session(gateway) as asking:
        for number in range(1, 4):
            async with asking.post("/v1/chat/completions", json=chat()) as answer:
                await answer.read()
            assert (await settled(gateway))["tokengap_tokens_useful_total{e0}"] == 20 * number


@pytest.mark.parametrize("knows", ["total", "nothing"])
async def test_an_engine_that_does_not_tell_is_asked_for_less(knows):
    """It refuses what it does not know, once, and then events are counted."""
    bodies: list[dict] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        bodies.append(body)
        options = body.get("stream_options") or {}
        if "continuous_usage_stats" in options or (options and knows == "nothing"):
            return web.json_response({"error": {"message": "stream_options: extra fields"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(3):
            await response.write(b'data: {"choices":[{"delta":{"content":"ab"}}]}\n\n')
        if options:
            await response.write(b'data: {"choices":[],"usage":{"completion_tokens":6}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with served(app) as port, admitting(port) as gateway, session(gateway) as asking:
        for _ in range(2):
            async with asking.post("/v1/chat/completions", json=chat()) as got:
                assert (await got.read()).count(b"data: ") == 4
        page = await settled(gateway)
    assert len(bodies) == {"total": 2 + 1, "nothing": 3 + 1}[knows]
    assert page["tokengap_tokens_useful_total{e0}"] == {"total": 12, "nothing": 6}[knows]


async def test_a_refusal_of_something_else_is_passed_on_once():
    """The engine is not asked again for what it would refuse again."""
    asked = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"error": {"message": "no such model"}}, status=400)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with served(app) as port, admitting(port) as gateway, session(gateway) as asking:
        got = await asking.post("/v1/chat/completions", json=chat())
        assert (got.status, (await got.json())["error"]["message"]) == (400, "no such model")
    assert asked == 1


# --- several engines --------------------------------------------------------------------------------------------------


async def test_streams_go_to_the_engine_with_the_fewest():
    """Two engines share a crowd evenly."""
    async with engine(rate=200) as one, engine(rate=200) as other, admitting(one, other) as gateway:
        users = [User(f"u{number}", max_tokens=60) for number in range(8)]
        await asyncio.gather(*(Visit(user, gateway.port).run() for user in users))
        counts = [len((await at_rest(port)).requests) for port in (one, other)]
    assert counts == [4, 4]


async def test_an_engine_that_is_not_there_is_passed_over():
    """Whoever was to go to it goes to the other; with none there the answer is 503, and readiness is off."""
    gone = free_port()
    async with engine(rate=500) as port, admitting(gone, port) as gateway, session(gateway) as asking:
        for _ in range(3):
            async with asking.post("/v1/chat/completions", json=chat()) as answer:
                assert answer.status == 200
                await answer.read()
            async with asking.get("/v1/models") as answer:
                assert answer.status == 200
    async with admitting(gone) as gateway, session(gateway) as asking:
        async with asking.post("/v1/chat/completions", json=chat()) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
        async with asking.get("/v1/models") as answer:
            assert answer.status == 502
        async with asking.get("/-/ready") as answer:
            assert answer.status == 503
        async with asking.get("/-/healthy") as answer:
            assert answer.status == 200
