"""Users: what they count, and how they leave."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.serving import at_rest, engine, until
from tokengap.lab.parts import LOOPBACK
from tokengap.lab.users import AnswerReader, User, Visit, crowd, passers_by


def token(text: str = "x", **more) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}], **more}).encode() + b"\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


OK = b"HTTP/1.1 200 OK\r\n"
STREAM = [token(""), token(), token(), b": keep-alive\n\n", token(), b"data: [DONE]\n\n"]
STREAMED = b"".join(STREAM)
ANSWERS = {
    "chunked": OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*STREAM),
    "length": OK + b"Content-Length: %d\r\n\r\n" % len(STREAMED) + STREAMED,
    "until the end": OK + b"Connection: close\r\n\r\n" + STREAMED,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(*STREAM),
    "one chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(STREAMED),
}


def fed(data: bytes, cuts: list[int], *, streamed: bool = True) -> AnswerReader:
    """Feed an answer, cut at these places, and then its end."""
    reader = AnswerReader(streamed=streamed)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        reader.feed(data[start:end])
    reader.end()
    return reader


@given(shape=st.sampled_from(sorted(ANSWERS)), cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_an_answer_counts_the_same_however_it_is_cut(shape, cuts):
    """Three tokens: an empty role, a comment and [DONE] are none. All three ways to end a body are understood."""
    reader = fed(ANSWERS[shape], cuts)
    assert (reader.status, reader.tokens, reader.complete, reader.error) == (200, 3, True, "")


def finished(reason: str, id: str = "cmpl-1") -> bytes:  # noqa: A002 - the API's own word
    choice = {"delta": {"content": "x"}, "finish_reason": reason}
    return b"data: " + json.dumps({"id": id, "choices": [choice]}).encode() + b"\n\n"


ERROR = b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\n'
DONE = b"data: [DONE]\n\n"


@given(cuts=st.lists(st.integers(0, 10_000), max_size=30))
@pytest.mark.parametrize(
    ("events", "complete", "truncated", "said_error", "ids", "reason"),
    [
        ((token(id="cmpl-1"), finished("length"), DONE), True, False, False, {"cmpl-1"}, "length"),
        ((token(id="cmpl-1"), ERROR, DONE), False, False, True, {"cmpl-1"}, None),
        ((token(id="cmpl-1"),), False, True, False, {"cmpl-1"}, None),
        ((token(id="cmpl-1"), token(id="cmpl-2"), DONE), True, False, False, {"cmpl-1", "cmpl-2"}, None),
    ],
    ids=["whole", "an error inside", "truncated", "two answers in one"],
)
def test_how_a_stream_ended_is_told_however_it_is_cut(
    events: tuple[bytes, ...], complete: bool, truncated: bool, said_error: bool, ids: set[str], reason: str, cuts
):
    """An error that is followed by [DONE] completes nothing; an end without either is the one that nobody notices."""
    reader = fed(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*events), cuts)
    assert (reader.complete, reader.truncated, reader.said_error) == (complete, truncated, said_error)
    assert (reader.ids, reader.finish_reason) == (ids, reason)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ended before"),
        (OK + b"Content-Length: 9\r\n\r\nshort", "ended before"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(token())[:-5], "ended before"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(token()), "DONE"),
        (b"HTTP/1.1 503 Slow Down\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (OK + b"\r\n" + b'data: {"error": {"message": "core died"}}\n\ndata: [DONE]\n\n', "core died"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", "unreadable"),
        (OK + b"\r\ndata: {nonsense\n\n", "unreadable"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "unreadable"),
    ],
)
def test_what_is_no_answer_says_why(data, why):
    """Broken off, refused, failed in band, or not HTTP at all."""
    reader = fed(data, [])
    assert why in reader.error


def test_an_engine_that_counts_for_itself_is_believed():
    """With continuous usage an event may hold several tokens."""
    events = [token("a b c", usage={"completion_tokens": 3}), token("d", usage={"completion_tokens": 4})]
    assert fed(OK + b"\r\n" + b"".join(events) + b"data: [DONE]\n\n", []).tokens == 4


def test_an_answer_that_is_not_streamed_counts_when_it_is_whole():
    """Half of it is nothing."""
    body = json.dumps({"choices": [], "usage": {"completion_tokens": 12}}).encode()
    whole = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert fed(whole, [30], streamed=False).tokens == 12
    assert fed(whole[:-1], [30], streamed=False).tokens == 0


async def test_without_leavers_users_and_engine_agree():
    """Every token that was generated was received, in each of the ways to ask."""
    async with engine(max_num_seqs=3, rate=400) as port:
        ways = itertools.product((True, False), (True, False), (True, False))
        users = [
            User(f"u{number}", prompt_tokens=50, max_tokens=20 + number, stream=stream, chat=chat, exact=exact)
            for number, (stream, chat, exact) in enumerate(ways)
        ]
        outcomes = await asyncio.gather(*(Visit(user, port).run() for user in users))
        truth = await at_rest(port)
    assert [outcome.how for outcome in outcomes] == ["completed"] * len(users)
    for outcome in outcomes:
        request = truth.requests[outcome.user.id]
        assert outcome.tokens == outcome.user.max_tokens == request.generated == request.written
        assert request.prompt_tokens == pytest.approx(50, abs=1)
        assert outcome.first_token is not None
        assert outcome.sent < request.first_token < outcome.first_token <= outcome.ended
    assert sum(outcome.tokens for outcome in outcomes) == truth.generated


async def leave_from_a_raw_server(user: User) -> tuple[str, bool]:
    """Let a user leave from a server that streams; return how the server saw it end, and when it was told the rest."""
    seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while not reader.at_eof() and b"max_tokens" not in await reader.read(65_536):
            pass
        writer.write(
            OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(t), t) for t in STREAM[:3])
        )
        try:
            data = await reader.read()
            seen.set_result(f"fin{data.decode()}")
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM[5]), STREAM[5]))
        except ConnectionResetError:
            seen.set_result("rst")
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    async with server:
        outcome = await Visit(user, server.sockets[0].getsockname()[1]).run()
        return await asyncio.wait_for(seen, 5), outcome


@pytest.mark.parametrize(
    ("leaving", "seen", "how"),
    [("fin", "fin", "left"), ("rst", "rst", "left"), ("half-close", "fin", "completed")],
)
async def test_users_leave_as_planned(leaving, seen, how):
    """A close is a FIN, a reset is an RST, and a half-close is a FIN of one who still reads to the end."""
    saw, outcome = await leave_from_a_raw_server(User("u", prompt_tokens=4, leave_at=0.1, leaving=leaving))
    assert saw == seen
    assert (outcome.how, outcome.tokens) == (how, 2)
    assert outcome.ended - outcome.sent == pytest.approx(0.1, abs=0.09)


async def test_one_who_stalls_gets_all_of_it_in_the_end():
    """It reads nothing for a while, and loses nothing by it; when it began to is told."""
    async with engine(rate=400) as port:
        user = User("u", prompt_tokens=4, max_tokens=300, leave_at=0.2, leaving="stall", stalls=0.6)
        outcome = await Visit(user, port).run()
        truth = await at_rest(port)
    assert (outcome.how, outcome.tokens) == ("completed", 300)
    assert outcome.left - outcome.sent == pytest.approx(0.2, abs=0.09)
    assert outcome.ended >= outcome.left + 0.6
    assert truth.requests["u"].written == 300


async def test_one_who_vanishes_counts_what_came_before_it_was_cut_off():
    """And it closes without a FIN. Its port is the one that was cut."""
    cut = []

    async def cut_off(port: int) -> None:
        cut.append(port)

    async with engine(rate=100) as port:
        visit = Visit(User("u", max_tokens=300, leave_at=0.3, leaving="vanish"), port, cut=cut_off)
        outcome = await visit.run()
    assert (outcome.how, cut) == ("left", [outcome.port])
    assert 0 < outcome.tokens < 300


async def test_a_user_whom_nobody_serves_fails():
    """With the reason, and without an exception."""
    server = await asyncio.start_server(lambda *_: None, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    outcome = await Visit(User("u"), port).run()
    assert outcome.how == "failed"
    assert "refused" in outcome.detail.lower()


async def test_a_user_can_be_watched():
    """A drill shows progress: tokens grow while the user is still there."""
    async with engine(rate=100) as port:
        visit = Visit(User("u", max_tokens=500), port)
        task = asyncio.create_task(visit.run())

        async def some() -> bool:
            return visit.tokens >= 5

        await until(some)
        assert visit.outcome is None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@given(count=st.integers(1, 60), share=st.floats(0, 1))
def test_a_crowd_has_as_many_leavers_as_asked(count, share):
    """And all ids are different."""
    leavers = round(count * share)
    users = crowd(count, leavers, max_tokens=9, leave_at=2.0)
    assert sum(user.leave_at == 2.0 for user in users) == leavers
    assert len({user.id for user in users}) == count
    assert {user.max_tokens for user in users} == {9}


def test_passers_by_are_the_same_for_the_same_seed():
    """And some leave, and some do not."""
    first, again = ([*itertools.islice(passers_by(7, every=0.5), 200)] for _ in range(2))
    assert first == again != [*itertools.islice(passers_by(8, every=0.5), 200)]
    assert 50 < sum(user.leave_at is not None for _, user in first) < 120
    assert 0.4 < sum(gap for gap, _ in first) / 200 < 0.6
