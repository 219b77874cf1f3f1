"""What a gateway in front of an engine has to survive, each over real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from admit.gateways import Raw, admitting, chat, post, published, raw, session
from lab.serving import at_rest, engine, until
from tokengap.admit import service
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import LOOPBACK, Part, free_port, free_ports, listens, running
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit

HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def scripted(say) -> AsyncIterator[int]:
    """Serve an engine of which only the bytes matter, and yield its port. It has no page."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await say(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the gateway left
        finally:
            writer.close()

    async with await asyncio.start_server(serve, LOOPBACK, 0) as server:
        yield server.sockets[0].getsockname()[1]


# --- the engine -------------------------------------------------------------------------------------------------------


async def test_an_engine_that_is_killed(tmp_path: Path):
    """Its stream ends with an error that the client can read, and the next request is told that there is no engine."""
    port = free_port()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(engine_part(port, Knobs(rate=100)), tmp_path))
        gateway = await stack.enter_async_context(admitting(port))
        asking = await stack.enter_async_context(session(gateway))
        async with asking.post("/v1/chat/completions", json=chat(max_tokens=5000)) as answer:
            await answer.content.readuntil(b"\n\n")
            await EngineControl(port).crash()
            *_, error, done, _ = (await answer.content.read()).split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
        assert done == b"data: [DONE]"
        async with asking.post("/v1/chat/completions", json=chat()) as answer:
            assert answer.status in (502, 503)  # its end may not be over yet
        page = await published(gateway)
    assert page["tokengap_streams_ended_total{e0,admit,failed}"] in (1, 2)
    assert page["tokengap_admit_slots{e0,free}"] == 64


@pytest.mark.parametrize("at", ["before the header", "in the header", "in an event", "in a whole answer"])
async def test_an_engine_that_breaks_off(at):
    """502, an error event, or an answer that is visibly incomplete: never one that looks complete."""
    sent = {
        "before the header": b"",
        "in the header": HEADER[:20],
        "in an event": HEADER + chunk(TOKEN) + chunk(TOKEN[:9]),
        "in a whole answer": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    }

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent[at])
        await writer.drain()

    async with scripted(say) as port, admitting(port) as gateway, session(gateway) as asking:
        if at == "in a whole answer":
            with pytest.raises(aiohttp.ClientPayloadError):
                await (await asking.post("/v1/chat/completions", json=chat())).read()
        else:
            answer = await asking.post("/v1/chat/completions", json=chat())
            body = await answer.read()
            if at == "in an event":
                assert body.startswith(TOKEN + b'data: {"error":')
                assert body.endswith(b"data: [DONE]\n\n")
            else:
                assert (answer.status, json.loads(body)["error"]["code"]) == (502, 502)
        page = await published(gateway)
    assert page["tokengap_admit_slots{e0,free}"] == 64


@pytest.mark.parametrize("at", ["before the header", "before the first token", "in decode"])
async def test_an_engine_that_hangs(at):
    """After its silence: 504, or an error event; the engine's connection is closed."""
    sent = {"before the header": b"", "before the first token": HEADER, "in decode": HEADER + chunk(TOKEN)}
    closed = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent[at])
        while await reader.read(1000):
            pass
        closed.set()

    async with scripted(say) as port, admitting(port, admit_silence="300ms") as gateway, session(gateway) as asking:
        answer = await asking.post("/v1/chat/completions", json=chat())
        body = await answer.read()
        await asyncio.wait_for(closed.wait(), 5.0)
        page = await published(gateway)
    if at == "before the header":
        assert (answer.status, json.loads(body)["error"]["code"]) == (504, 504)
    else:
        assert b'"code":504' in body
        assert body.endswith(b"data: [DONE]\n\n")
    assert page["tokengap_admit_slots{e0,free}"] == 64


async def test_an_engine_that_refuses_everything_does_not_get_everything():
    """It has the fewest streams all the time; after its first error the other one is asked."""

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with (
        scripted(say) as broken,
        engine(rate=1000.0) as well,
        admitting(broken, well) as gateway,
        session(gateway) as asking,
    ):
        statuses = []
        for _ in range(5):
            async with asking.post("/v1/chat/completions", json=chat(max_tokens=2)) as answer:
                statuses.append(answer.status)
                await answer.read()
    assert statuses == [500, 200, 200, 200, 200]


# --- its clients ------------------------------------------------------------------------------------------------------


async def test_a_slow_reader_holds_back_the_engine():
    """What it does not read piles up nowhere: the engine can write a few megabytes and no more, then all of it."""
    total, wrote = 64 * 2**20, 0
    piece = chunk(TOKEN * 1000)

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal wrote
        writer.transport.set_write_buffer_limits(0)
        writer.write(HEADER)
        while wrote < total:
            writer.write(piece)
            await writer.drain()
            wrote += len(piece)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    asked = post("/v1/chat/completions", chat(), "Connection: close")
    async with scripted(say) as port, admitting(port) as gateway, raw(gateway.port, asked) as client:
        client.reader._transport.pause_reading()
        still = -1
        while still != wrote or not wrote:
            still = wrote
            await asyncio.sleep(0.5)
        assert wrote < 16 * 2**20
        page = await published(gateway)
        assert page["tokengap_streams{stalled,e0,admit}"] + page["tokengap_streams{connected,e0,admit}"] == 1
        client.reader._transport.resume_reading()
        said = await client.said(within=60.0)
    assert said.count(TOKEN.strip()) == total // len(piece) * 1000 + (1000 if total % len(piece) else 0)
    assert said.endswith(b"0\r\n\r\n")


async def test_two_thousand_connections_that_say_nothing(monkeypatch: pytest.MonkeyPatch):
    """Others are served meanwhile, and the silent ones are closed in time."""
    monkeypatch.setattr(service, "KEEP_ALIVE", 3.0)
    async with engine(rate=500) as port, admitting(port) as gateway, session(gateway) as asking:
        silent = [await asyncio.open_connection(LOOPBACK, gateway.port) for _ in range(2000)]
        silent[0][1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")  # nor does it help to begin
        async with asking.post("/v1/chat/completions", json=chat()) as answer:
            assert len((await answer.read()).split(b"\n\n")) == 20 + 3
        async with asyncio.timeout(30):
            assert await asyncio.gather(*(reader.read() for reader, _ in silent)) == [b""] * 2000
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("framing", ["Content-Length: 104857600", "Transfer-Encoding: chunked"])
async def test_a_body_of_100_megabytes(framing):
    """413, and the engine has not heard of it. Told the length, it is refused before it is sent."""
    async with engine() as port, admitting(port) as gateway:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode()
        async with raw(gateway.port, head) as client:
            if "chunked" in framing:
                piece = chunk(b"x" * 2**20)
                for _ in range(34):
                    client.writer.write(piece)
                    await client.writer.drain()
            assert (await client.said()).startswith(b"HTTP/1.1 413 ")
        assert not (await EngineControl(port).truth()).requests


@pytest.mark.parametrize("body", [b"{bad", b"[]", b'{"stream": "yes"}', b"\xff\xfe", b'{"stream_options": 5}'])
async def test_a_body_that_is_no_request(body):
    """400 with the reason, in the words of the API."""
    async with engine() as port, admitting(port) as gateway, session(gateway) as asking:
        answer = await asking.post("/v1/chat/completions", data=body)
        assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")


SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4",
        b"Content-Length: 4\r\nContent-Length: 5",
        b"Content-Length: +4",
        b"Content-Length: -1",
        b"Content-Length: 4, 4",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"X: 1\r\n Transfer-Encoding: chunked",
        b"X: a\nTransfer-Encoding: chunked",
        b"X: a\x00b",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    ],
)
async def test_no_request_is_smuggled(headers, caplog: pytest.LogCaptureFixture):
    """Framing that two readers may read in two ways is refused, and the connection with it. Nothing of it is logged."""
    caplog.set_level("DEBUG")
    async with engine() as port, admitting(port) as gateway:
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n0\r\n\r\n" + SMUGGLED
        async with raw(gateway.port, request) as client:
            said = await client.said()
        assert said.split(b" ")[1] == b"400"
        assert said.count(b"HTTP/1.") == 1
        assert headers.decode().partition("\r\n")[0] not in caplog.text
        assert not (await EngineControl(port).truth()).requests


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/models/..", "/v1/a/%2E./b"])
async def test_no_path_leaves_v1(path):
    """An engine's other pages are not the clients'."""
    asked = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    async with engine() as port, admitting(port) as gateway, raw(gateway.port, asked) as client:
        assert (await client.said()).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))


# --- its own end ------------------------------------------------------------------------------------------------------


def gateway_part(port: int, engine_port: int, *more: str) -> Part:
    """Return the gateway as a process."""
    options = ["--engine", f"http://{LOOPBACK}:{engine_port}", "--slots", "64", "--admit-listen", f"{LOOPBACK}:{port}"]
    return Part("admit", (sys.executable, "-m", "tokengap", "admit", *options, *more), (port,))


async def begun(port: int, **body) -> tuple[Raw, AsyncExitStack]:
    """Begin a stream, and return it when it has begun."""
    stack = AsyncExitStack()
    client = await stack.enter_async_context(raw(port, post("/v1/chat/completions", chat(**body), "Connection: close")))
    await client.reader.readuntil(b"\n\n")
    return client, stack


@pytest.mark.e2e
async def test_sigterm_lets_streams_end(tmp_path: Path):
    """Readiness off first, nobody new is admitted, streams come to their end, exit 0."""
    port = free_port()
    async with engine(rate=50) as engine_port, running(gateway_part(port, engine_port), tmp_path) as admit:
        client, stack = await begun(port, max_tokens=100)
        admit.signal(signal.SIGTERM)

        async def unready() -> bool:
            async with aiohttp.ClientSession() as asking, asking.get(f"http://{LOOPBACK}:{port}/-/ready") as answer:
                return answer.status == 503

        await until(unready)
        async with (
            aiohttp.ClientSession() as asking,
            asking.post(f"http://{LOOPBACK}:{port}/v1/completions", json={"prompt": "x"}) as answer,
        ):
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        said = await client.said(within=20.0)
        await stack.aclose()
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert said.count(b'"content":') >= 98
        assert await asyncio.wait_for(admit.process.wait(), 10.0) == 0
        assert not await listens(port)


@pytest.mark.e2e
async def test_sigterm_ends_streams_at_the_limit(tmp_path: Path):
    """Whoever streams then is told, and the engine is let go of."""
    port = free_port()
    async with engine(rate=50) as engine_port:
        part = gateway_part(port, engine_port, "--admit-stop-within", "300ms")
        async with running(part, tmp_path) as admit:
            client, stack = await begun(port, max_tokens=5000)
            admit.signal(signal.SIGTERM)
            said = await client.said()
            await stack.aclose()
            assert await asyncio.wait_for(admit.process.wait(), 10.0) == 0
        assert b'"type":"shutting_down"' in said
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (await at_rest(engine_port)).generated < 1000


@pytest.mark.e2e
async def test_a_restart_under_load(tmp_path: Path):
    """Streams of the old one end whole, those who come meanwhile are refused at once, and the new one serves."""
    port = free_port()
    outcomes = []

    async def keep_coming(stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            outcomes.append(await Visit(User(f"u{id(stop)}-{number}", max_tokens=20), port).run())
            await asyncio.sleep(0.02)

    async with engine(rate=100) as engine_port, asyncio.TaskGroup() as group:
        stop = asyncio.Event()
        async with running(gateway_part(port, engine_port), tmp_path) as admit:
            for _ in range(5):
                group.create_task(keep_coming(stop))
            await asyncio.sleep(0.5)
            admit.signal(signal.SIGTERM)
            await asyncio.wait_for(admit.process.wait(), 15.0)
        ended = len(outcomes)
        async with running(gateway_part(port, engine_port), tmp_path):
            await until(lambda: _more(outcomes, ended, 10), within=20.0)
            stop.set()
    for outcome in outcomes:
        refused = outcome.status == 503 or outcome.tokens == 0
        assert (outcome.how, outcome.tokens) == ("completed", 20) or refused, outcome


async def _more(outcomes: list, before: int, count: int) -> bool:
    return sum(outcome.how == "completed" for outcome in outcomes[before:]) >= count


@pytest.mark.e2e
async def test_what_cannot_be_served_is_said_in_one_line(tmp_path: Path):
    """No engine, unknown slots, a taken port, a wrong setting: exit 2."""
    first, _ = free_ports(2)
    async with engine() as port:
        for options, expected in (
            (["--admit-listen", f"{LOOPBACK}:{first}"], "no engine"),
            (["--engine", f"http://{LOOPBACK}:{port}", "--admit-listen", f"{LOOPBACK}:{first}"], "max_num_seqs"),
            (
                ["--engine", f"http://{LOOPBACK}:{port}", "--slots", "1", "--admit-listen", f"{LOOPBACK}:{port}"],
                "in use",
            ),
            (["--admit-mode", "fast"], "one of age, busy"),
            (["--admit-sign", "batch=path"], "CLASS=header:NAME:VALUE"),
            (["--admit-sign", "none=path:/v1"], "expected one of interactive, batch"),
            (["--admit-max-body", "many"], "a size such as 32MiB"),
        ):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tokengap", "admit", *options), stderr=asyncio.subprocess.PIPE
            )
            _, err = await asyncio.wait_for(process.communicate(), 30.0)
            assert (process.returncode, err.count(b"\n")) == (2, 1), err
            assert expected in err.decode()
