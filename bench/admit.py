"""What the gateway adds to a stream, beside nginx (``proxy_buffering off``) and beside no proxy at all.

One stand-in engine, one process of clients, real sockets. ``--streams`` streams of ``--rate`` tokens a second run
through each of the three in turn, ``--rounds`` times. Clients note when each event arrives, keep every byte, and
afterwards write the whole answer anew from what its first event says: its checksum has to be that of what was received,
so that no byte is lost, added or in another place.

``ratio_p99_to_nginx`` is the 99th percentile of the time between two tokens, to that through nginx in the same round;
``ratio_p99_to_direct`` to that without a proxy. Of the rounds' ratios the one in the middle counts: a second of other
work on the machine is a whole round's percentile. ``pooled_ratio_p99_to_nginx`` is that of all rounds together.
``ratio_throughput_to_nginx`` is tokens a second to those through nginx.
The engine gives all its streams their tokens in one step, so that a proxy gets them in bursts of ``--streams``: the
worst case, and the same for all three.

Then: the load at which that percentile is twice what it is at the lowest (``p99_doubles_at``, streams; ``null`` where
it was not reached), memory of the gateway per stream that is open, and its processor time per refusal.

    python bench/admit.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from tokengap.lab.answers import MODEL, TOKENS, Answer, Ask
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import LOOPBACK, Part, RunningPart, free_ports, running
from tokengap.lab.proxies import PROXIES, Wiring

PROMPT = "hi"
FIRST = re.compile(
    rb'data: {"id":"chatcmpl-([0-9a-f]+)".*?"created":(\d+).*?\n\ndata: .*?"delta":{"content":"(.*?)"}', re.DOTALL
)


class Client(asyncio.Protocol):
    """One stream over a connection of its own: when its events came, and all its bytes."""

    def __init__(self, tokens: int) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": tokens}
        data = msgspec.json.encode(body)
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        self._pieces: list[bytes] = []
        self.at: list[float] = []
        self.events: list[int] = []
        loop = asyncio.get_running_loop()
        self.first, self.second, self.done = (loop.create_future() for _ in range(3))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the time and the number of events."""
        self.at.append(time.perf_counter())
        self.events.append(data.count(b'data: {"'))
        self._pieces.append(data)
        for reached, count in ((self.first, 1), (self.second, 2)):
            if not reached.done() and sum(self.events) >= count:
                reached.set_result(None)
        if data.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, whole or not."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the answer was cut off"))

    def delays(self) -> list[float]:
        """Return the times between tokens; those that came together are 0 apart."""
        delays: list[float] = []
        last = None
        for at, events in zip(self.at, self.events, strict=True):
            if not events:
                continue
            if last is not None:
                delays += [at - last, *[0.0] * (events - 1)]
            last = at
        return delays

    def body(self) -> bytes:
        """Return the body, its chunks put together."""
        _, _, rest = b"".join(self._pieces).partition(b"\r\n\r\n")
        body = bytearray()
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not (length := int(size, 16)):
                return bytes(body)
            body += rest[:length]
            rest = rest[length + 2 :]


def expected(body: bytes, tokens: int) -> bytes:
    """Return the whole answer as the engine must have written it, by what its first events say."""
    match = FIRST.match(body)
    if match is None:
        raise AssertionError(f"not the beginning of an answer: {body[:200]!r}")
    ask = Ask(messages=[], stream=True)
    start = TOKENS.index(match[3].decode()) - 1
    answer = Answer(ask=ask, chat=True, id=match[1].decode(), model=MODEL, created=int(match[2]), prompt=1, start=start)
    events = [answer.token(number, "length" if number == tokens else None) for number in range(1, tokens + 1)]
    return b"".join([answer.opening(), *events, answer.closing(tokens)])


@dataclass(slots=True)
class Measured:
    """What was measured through one target, over all rounds."""

    delays: list[np.ndarray] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    wrong: int = 0

    def percentile(self, q: float) -> float:
        """Return a percentile of the time between tokens, in milliseconds."""
        return float(np.percentile(np.concatenate(self.delays), q)) * 1e3

    def p99_to(self, other: Measured) -> float:
        """Return the 99th percentile to that of another, round by round, and of these the one in the middle."""
        rounds = zip(self.delays, other.delays, strict=True)
        return statistics.median(float(np.percentile(mine, 99) / np.percentile(theirs, 99)) for mine, theirs in rounds)


async def measure(port: int, streams: int, tokens: int, into: Measured) -> None:
    """Run so many streams at once, and take in what came."""
    loop = asyncio.get_running_loop()
    clients = [Client(tokens) for _ in range(streams)]
    begun = time.perf_counter()
    for client in clients:
        await loop.create_connection(lambda client=client: client, LOOPBACK, port)
    await asyncio.gather(*(client.done for client in clients))
    into.seconds += time.perf_counter() - begun
    into.tokens += streams * tokens
    into.delays.append(np.array([delay for client in clients for delay in client.delays()]))
    for client in clients:
        client.transport.close()
        body = client.body()
        into.wrong += hashlib.sha256(body).digest() != hashlib.sha256(expected(body, tokens)).digest()


def gateway_part(port: int, engine: int, slots: int, *more: str) -> Part:
    """Return the gateway as users run it."""
    options = ["--engine", f"http://{LOOPBACK}:{engine}", "--slots", str(slots), "--admit-listen", f"{LOOPBACK}:{port}"]
    return Part("admit", (sys.executable, "-m", "tokengap", "admit", *options, "--log-level", "warn", *more), (port,))


@dataclass(frozen=True, slots=True)
class Bench:
    """The running parts: ports by name of what stands between, and the gateway's process."""

    ports: dict[str, int]
    gateway: psutil.Process


@asynccontextmanager
async def bench(directory: Path, streams: int, rate: float) -> AsyncIterator[Bench]:
    """Run engine, nginx and gateway."""
    engine, nginx, admit = free_ports(3)
    async with AsyncExitStack() as stack:

        async def run(part: Part) -> RunningPart:
            return await stack.enter_async_context(running(part, directory))

        await run(engine_part(engine, Knobs(max_num_seqs=streams, rate=rate)))
        await run(PROXIES["nginx"].part(Wiring(nginx, engine, False, directory)))
        gateway = await run(gateway_part(admit, engine, streams))
        yield Bench({"direct": engine, "nginx": nginx, "admit": admit}, psutil.Process(gateway.pid))


async def side_by_side(directory: Path, streams: int, rate: float, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure the three in turn."""
    async with bench(directory, streams, rate) as parts:
        measured = {name: Measured() for name in parts.ports}
        for port in parts.ports.values():
            await measure(port, streams, 10, Measured())  # once, to warm up
        used = dict.fromkeys(parts.ports, 0.0)
        for number in range(rounds):
            order = list(parts.ports.items())
            for name, port in order[number % 3 :] + order[: number % 3]:
                before = sum(parts.gateway.cpu_times()[:2])
                await measure(port, streams, tokens, measured[name])
                used[name] += sum(parts.gateway.cpu_times()[:2]) - before
                say(f"{streams} streams, {name}: p99 {measured[name].percentile(99):.1f} ms")
    admit, nginx, direct = (measured[name] for name in ("admit", "nginx", "direct"))
    return {
        "ratio_p99_to_nginx": round(admit.p99_to(nginx), 3),
        "ratio_p99_to_direct": round(admit.p99_to(direct), 3),
        "pooled_ratio_p99_to_nginx": round(admit.percentile(99) / nginx.percentile(99), 3),
        "ratio_throughput_to_nginx": round((admit.tokens / admit.seconds) / (nginx.tokens / nginx.seconds), 3),
        "ratio_throughput_to_direct": round((admit.tokens / admit.seconds) / (direct.tokens / direct.seconds), 3),
        **{f"p{q}_ms_{name}": round(of.percentile(q), 2) for name, of in measured.items() for q in (50, 99)},
        "tokens_per_second": {name: round(of.tokens / of.seconds) for name, of in measured.items()},
        "answers_with_wrong_bytes": {name: of.wrong for name, of in measured.items()},
        "cpu_us_per_token": round(used["admit"] / admit.tokens * 1e6, 1),
    }


async def doubling(directory: Path, loads: Sequence[int], rate: float, tokens: int) -> dict[str, Any]:
    """Find the load at which the percentile through each has doubled."""
    p99: dict[str, dict[int, float]] = {"direct": {}, "nginx": {}, "admit": {}}
    async with bench(directory, max(loads), rate) as parts:
        for streams in loads:
            for name, port in parts.ports.items():
                into = Measured()
                await measure(port, streams, tokens, into)
                p99[name][streams] = round(into.percentile(99), 2)
                say(f"{streams} streams, {name}: p99 {p99[name][streams]:.1f} ms")
    return {
        "p99_ms_by_streams": p99,
        "p99_doubles_at": {
            name: next((streams for streams, ms in of.items() if ms > 2 * of[loads[0]]), None)
            for name, of in p99.items()
        },
    }


async def memory(directory: Path, streams: int) -> dict[str, Any]:
    """Open so many slow streams at once, and see what the gateway has taken for them."""
    async with bench(directory, streams, 0.5) as parts:
        await measure(parts.ports["admit"], 20, 2, Measured())  # once, to warm up
        before = parts.gateway.memory_info().rss
        loop = asyncio.get_running_loop()
        clients = [Client(50) for _ in range(streams)]
        for client in clients:
            await loop.create_connection(lambda client=client: client, LOOPBACK, parts.ports["admit"])
        await asyncio.gather(*(client.second for client in clients))
        grown = parts.gateway.memory_info().rss - before
        for client in clients:
            client.transport.close()
        await asyncio.gather(*(client.done for client in clients), return_exceptions=True)
    return {"memory_per_stream_bytes": round(grown / streams), "streams_of_memory": streams}


async def refusals(directory: Path, count: int) -> dict[str, Any]:
    """Ask again and again where the only slot is taken, over one kept connection, and see what a refusal takes."""
    engine, port = free_ports(2)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(engine_part(engine, Knobs(max_num_seqs=1, rate=1.0)), directory))
        part = gateway_part(port, engine, 1, "--admit-mode", "busy")
        gateway = psutil.Process((await stack.enter_async_context(running(part, directory))).pid)
        loop = asyncio.get_running_loop()
        _, holder = await loop.create_connection(lambda: Client(5000), LOOPBACK, port)
        await holder.first
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        stack.callback(writer.close)
        for number in range(count + 100):
            if number == 100:  # the first ones warm up
                before = sum(gateway.cpu_times()[:2])
            writer.write(holder._request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 "), head
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
        used = sum(gateway.cpu_times()[:2]) - before
        holder.transport.close()
        await asyncio.gather(holder.done, return_exceptions=True)
    return {"cpu_ms_per_refusal": round(used / count * 1e3, 3)}


def say(line: str) -> None:
    """Show how far it is."""
    print(line, file=sys.stderr, flush=True)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        result = {"streams": arguments.streams, "rate": arguments.rate}
        result |= await side_by_side(directory, arguments.streams, arguments.rate, arguments.tokens, arguments.rounds)
        result |= await refusals(directory, 2000)
        result |= await memory(directory, 1000)
        return result | await doubling(directory, arguments.loads, arguments.rate, 60)


def main() -> None:
    """Parse the command line and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=int, nargs="+", default=[50, 200, 400, 800, 1200])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value}")
    print("bar: ratio_p99_to_nginx at most 1.5, no answer with wrong bytes, cpu_ms_per_refusal under 1")


if __name__ == "__main__":
    main()
