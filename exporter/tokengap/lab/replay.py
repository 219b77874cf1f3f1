"""A stand-in that answers as a recorded server did: ``python -m tokengap.lab.replay SCRIPT --port 8100``.

What really happened to an engine cannot be simulated, only recorded: which counters stood still in a prefill of 36,000
tokens, what the page showed while the core was dead. A script says what the server does from which second on:

    0    page  busy-0.prom        answer GET /metrics with this page, and hold on to completions without a token
    3.1  refuse                   nobody listens, and every connection is reset: the process has ended
    60   status 503               the page fails
    70   hang                     connections are accepted and nothing is answered until the next line
    90   page  fresh.prom

``/health``, ``/v1/models`` and ``/version`` answer 200 whenever the page is answered at all, as vLLM's do while its
core hangs. Every request is remembered, so that a test can tell what was asked of the server and what was not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import click
from aiohttp import web

from tokengap.errors import SetupError
from tokengap.lab.answers import MODEL
from tokengap.lab.parts import LOOPBACK, free_port

Kind: TypeAlias = Literal["page", "status", "hang", "refuse"]


@dataclass(frozen=True, slots=True)
class Phase:
    """What the server does from ``at`` on (seconds after the start), until the next phase or for ever.

    ``body`` is the page; ``status`` the answer to ``GET /metrics`` where it is no page.
    """

    at: float
    kind: Kind
    body: bytes = b""
    status: int = 200


def page(at: float, body: bytes) -> Phase:
    """Answer with this page."""
    return Phase(at, "page", body)


def status(at: float, code: int) -> Phase:
    """Fail to make the page."""
    return Phase(at, "status", status=code)


def hang(at: float) -> Phase:
    """Accept, and answer nothing until the next phase."""
    return Phase(at, "hang")


def refuse(at: float) -> Phase:
    """Be gone: reset what is open, accept nothing."""
    return Phase(at, "refuse")


def read_script(text: str, directory: Path) -> tuple[Phase, ...]:
    """Read a script; pages are files relative to ``directory``. Raises ValueError naming the line."""
    phases: list[Phase] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            match words:
                case [at, "page", name]:
                    phases.append(page(float(at), (directory / name).read_bytes()))
                case [at, "status", code]:
                    phases.append(status(float(at), int(code)))
                case [at, "hang"]:
                    phases.append(hang(float(at)))
                case [at, "refuse"]:
                    phases.append(refuse(float(at)))
                case _:
                    raise ValueError("expected SECONDS and one of: page FILE, status CODE, hang, refuse")
        except (OSError, ValueError) as wrong:
            raise ValueError(f"line {number}: {wrong}") from None
        if len(phases) > 1 and phases[-1].at < phases[-2].at:
            raise ValueError(f"line {number}: its second is before that of the line above it")
    if not phases:
        raise ValueError("the script has no line")
    return tuple(phases)


class Replay:
    """One server that lives through phases. ``asked`` are its requests so far: method and path, in order.

    It takes a step when told to (:meth:`show`), or all of them on the clock (:meth:`play`). Used as an async context it
    listens from the beginning, unless its first phase refuses, and leaves nothing behind.
    """

    def __init__(self, phases: Sequence[Phase], *, port: int = 0, host: str = LOOPBACK) -> None:
        self.phases = tuple(phases)
        self.port = port or free_port()
        self.asked: list[tuple[str, str]] = []
        self._host = host
        self._server = web.Server(self._answer, access_log=None, handler_cancellation=True)
        self._listener: asyncio.Server | None = None
        self._phase = self.phases[0]
        self._next = asyncio.Event()

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{self._host}:{self.port}"

    @property
    def phase(self) -> Phase:
        """What it does now."""
        return self._phase

    def count(self, method: str, prefix: str = "/") -> int:
        """Return how many requests of a method came in to paths that begin so."""
        return sum(asked == method and path.startswith(prefix) for asked, path in self.asked)

    async def __aenter__(self) -> Replay:
        """Begin the first phase."""
        await self.show(self.phases[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        """End as a process does that was killed."""
        await self._go()

    async def show(self, phase: Phase) -> None:
        """Go over to a phase now, whatever its time. What hung is answered as the new phase answers."""
        self._phase = phase
        released, self._next = self._next, asyncio.Event()
        if phase.kind == "refuse":
            await self._go()
        elif self._listener is None:
            loop = asyncio.get_running_loop()
            try:
                self._listener = await loop.create_server(self._server, self._host, self.port, reuse_address=True)
            except OSError as error:
                raise SetupError(f"the replay cannot listen on {self._host}:{self.port}: {error.strerror}") from error
        released.set()

    async def play(self, faster: float = 1.0) -> None:
        """Go through all phases at their times, ``faster`` times as fast; the last one stays."""
        began = time.monotonic()
        for phase in self.phases:
            await asyncio.sleep(max(0.0, began + phase.at / faster - time.monotonic()))
            await self.show(phase)

    async def _go(self) -> None:
        if self._listener is not None:
            self._listener.close()
            for connection in self._server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await self._server.shutdown(0)
            self._listener = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        while self._phase.kind == "hang":
            await self._next.wait()
        if request.path.endswith("/metrics"):  # that of trtllm-serve is at /prometheus/metrics
            if self._phase.kind == "page":
                return web.Response(body=self._phase.body, headers={"Content-Type": "text/plain; version=0.0.4"})
            return web.Response(status=self._phase.status)
        if request.method == "POST":
            return await self._hold(request)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        return web.Response(status=200 if request.path in ("/health", "/version") else 404)

    async def _hold(self, request: web.BaseRequest) -> web.StreamResponse:
        """Take a completion as vLLM does, header first, and send no token: for as long as this process lives."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response


@contextlib.asynccontextmanager
async def replaying(phases: Iterable[Phase], *, faster: float = 1.0) -> AsyncIterator[Replay]:
    """Play phases on the clock while the block lasts, from its beginning on."""
    async with Replay(tuple(phases)) as replay:
        playing = asyncio.create_task(replay.play(faster))
        try:
            yield replay
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


@click.command()
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--port", type=int, required=True)
@click.option("--host", default=LOOPBACK, show_default=True)
@click.option("--faster", default=1.0, show_default=True, help="How many times as fast as the script says.")
def main(script: Path, port: int, host: str, faster: float) -> None:
    """Serve what a SCRIPT says, at its times."""
    try:
        phases = read_script(script.read_text(), script.parent)
    except ValueError as wrong:
        raise click.UsageError(f"{script}: {wrong}") from wrong

    async def run() -> None:
        async with Replay(phases, port=port, host=host) as replay:
            await replay.play(faster)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
