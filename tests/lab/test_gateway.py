"""The naive gateway: what it forwards, and whether it leaks, against the engine's truth."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from lab.serving import at_rest, engine, gateway
from tokengap.lab.parts import LOOPBACK, free_port
from tokengap.lab.users import User, Visit, crowd


@pytest.mark.parametrize("pool", [False, True], ids=["one connection each", "pool"])
async def test_everything_comes_through(pool):
    """Streams, whole answers, errors and lists of models are what the engine sent."""
    async with engine(rate=500) as port, gateway(port, leak=True, pool=pool) as edge:
        users = [User(f"u{number}", max_tokens=30, stream=number % 2 == 0) for number in range(6)]
        outcomes = await asyncio.gather(*(Visit(user, edge).run() for user in users))
        assert [(outcome.how, outcome.tokens) for outcome in outcomes] == [("completed", 30)] * 6
        async with aiohttp.ClientSession(f"http://{LOOPBACK}:{edge}") as session:
            async with session.get("/v1/models") as answer:
                assert (await answer.json())["data"][0]["id"] == "tokengap-lab"
            async with session.post("/v1/completions", data=b"{}") as answer:
                assert answer.status == 400


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("leaving", ["fin", "rst"])
@pytest.mark.parametrize("late_headers", [False, True], ids=["header first", "header late"])
async def test_a_leaking_gateway_reads_every_answer_to_its_end(stream, leaving, late_headers):
    """Leavers in the queue, in prefill and in decode cost their whole answer, and the engine saw nobody leave."""
    async with engine(max_num_seqs=2, rate=400, late_headers=late_headers) as port, gateway(port, leak=True) as edge:
        users = crowd(8, 5, max_tokens=100, leave_at=0.15, leaving=leaving, stream=stream)
        outcomes = await asyncio.gather(*(Visit(user, edge).run() for user in users))
        truth = await at_rest(port)
    assert sum(outcome.how == "left" for outcome in outcomes) == 5
    assert sum(outcome.how == "completed" for outcome in outcomes) == 3
    assert truth.generated == 800
    assert all((request.state, request.written) == ("finished", 100) for request in truth.requests.values())


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("late_headers", [False, True], ids=["header first", "header late"])
async def test_a_gateway_that_does_not_leak_lets_go_at_once(stream, late_headers):
    """The engine aborts within a fraction of a second of the client's leaving, in whatever phase."""
    async with engine(max_num_seqs=2, rate=400, late_headers=late_headers) as port, gateway(port, leak=False) as edge:
        users = crowd(8, 5, max_tokens=100, leave_at=0.15, stream=stream)
        outcomes = await asyncio.gather(*(Visit(user, edge).run() for user in users))
        truth = await at_rest(port)
    for outcome in outcomes:
        request = truth.requests[outcome.user.id]
        if outcome.how == "left":
            assert request.state == "aborted"
            assert request.ended == pytest.approx(outcome.ended, abs=0.25)
        else:
            assert outcome.tokens == request.generated == 100


async def test_an_engine_that_breaks_off_is_passed_on():
    """A client sees a stream without its end, not one that looks complete."""
    token = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(token), token))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(break_off, LOOPBACK, 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with gateway(port, leak=True) as edge:
            outcome = await Visit(User("u"), edge).run()
    assert (outcome.how, outcome.tokens) == ("failed", 1)


async def test_no_engine_is_a_bad_gateway():
    """502, with the reason."""
    async with gateway(free_port(), leak=True) as edge:
        outcome = await Visit(User("u"), edge).run()
    assert (outcome.how, outcome.status) == ("failed", 502)
