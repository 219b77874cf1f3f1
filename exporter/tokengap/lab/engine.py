"""A stand-in for vLLM, run as its own process: ``python -m tokengap.lab.engine --port 8100``.

It speaks vLLM's API and shows vLLM's page over real sockets, and has what a real one lacks: knobs, and the truth about
every request (:mod:`tokengap.lab.truth`). Scheduling is :mod:`tokengap.lab.batching`, bytes are
:mod:`tokengap.lab.answers`; here are the sockets.

All tokens that are due are written in one pass over the batch, straight to the transports: a task per token would cost
ten times as much, and nothing may wait for a slow reader. A real vLLM does not wait either: outputs pile up in its API
server.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any, Never

import click
import msgspec
from aiohttp import HttpVersion11, web

from tokengap.lab.answers import END, MODEL, Answer, Ask, prompt_tokens, read_ask
from tokengap.lab.batching import Batch, Knobs, Sequence
from tokengap.lab.parts import LOOPBACK, Part, serve_app
from tokengap.lab.truth import RequestTruth, Sample, Truth, changed
from tokengap.lab.vllm_page import CONTENT_TYPE, VllmPage

VERSION = "0.33.0"

#: Prompt tokens of a request to ``/v1/stream``, which says nothing about it.
PLAIN_PROMPT = 400

#: Requests and samples that the truth keeps. Samples come each tenth of a second: an hour of them.
KEEP_REQUESTS, KEEP_SAMPLES, SAMPLE_EVERY = 20_000, 36_000, 0.1


@dataclass(slots=True, eq=False)
class _Client:
    """The waiting side of one sequence. ``stream`` is where its tokens go, None until the header has gone there."""

    answer: Answer
    streams: bool
    first: asyncio.Future[None]
    done: asyncio.Future[None]
    stream: asyncio.WriteTransport | None = None
    chunked: bool = True


class EngineServer:
    """One engine: its batch, its page, its clients and its routes."""

    def __init__(self, knobs: Knobs, model: str = MODEL, seed: int = 0) -> None:
        self._model = model
        self._page = VllmPage(model)
        self._batch = Batch(knobs, self._page)
        self._random = random.Random(seed)  # noqa: S311 - ids and texts, nothing secret
        self._clients: dict[Sequence, _Client] = {}
        self._known: dict[str, Sequence] = {}
        self._history: deque[Sample] = deque(maxlen=KEEP_SAMPLES)
        self._timer: asyncio.TimerHandle | None = None
        self._death: str | None = None

    def app(self) -> web.Application:
        """Return the routes of vLLM, and ``/lab/``."""
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.post("/v1/completions", self._completion),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/stream", self._plain_stream),
                web.post("/v1/embeddings", self._embeddings),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.get("/lab/truth", self._truth),
                web.post("/lab/freeze", self._freeze),
                web.post("/lab/thaw", self._thaw),
                web.post("/lab/knobs", self._turn),
                web.post("/lab/crash", self._crash),
            ]
        )
        app.cleanup_ctx.append(self._sampling)
        return app

    def freeze(self) -> None:
        """Stop stepping. Everything is answered on, with values that stand still."""
        self._pump()
        self._batch.freeze(time.monotonic())
        self._arm()

    def thaw(self) -> None:
        """Step on."""
        self._batch.thaw(time.monotonic())
        self._arm()

    def die(self, why: str) -> None:
        """Be without a core from now on, as vLLM is when its core ended: /health says 503, whoever waits is told in its
        stream, whoever comes is refused, and the page stands still."""
        self.freeze()
        self._death = why
        for client in list(self._clients.values()):
            if client.stream is not None and not client.stream.is_closing():
                event = b"data: %b\n\n%b" % (msgspec.json.encode(_error(why, 500)), END)
                client.stream.write(b"%x\r\n%b\r\n" % (len(event), event) if client.chunked else event)
            for waited in (client.first, client.done):
                if not waited.done():
                    waited.set_result(None)

    # What vLLM serves

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._asked(request, chat=True)

    async def _plain_stream(self, request: web.Request) -> web.StreamResponse:
        """Stream to whoever posts anything or nothing: what a loop of curl in a shell asks."""
        await request.read()
        ask = Ask(prompt=[0] * PLAIN_PROMPT, stream=True)
        return await self._answer(request, ask, chat=False)

    async def _asked(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            ask = read_ask(await request.read(), chat=chat)
        except ValueError as wrong:  # msgspec's errors are ValueErrors
            return _bad_request(str(wrong))
        return await self._answer(request, ask, chat=chat)

    async def _answer(self, request: web.Request, ask: Ask, *, chat: bool) -> web.StreamResponse:
        if (dead := self._dead()) is not None:
            return dead
        answer_id = f"{self._random.getrandbits(128):032x}"
        sequence = Sequence(
            # The body first: Envoy replaces X-Request-Id unless told not to.
            id=self._name(ask.user or request.headers.get("X-Request-Id") or answer_id),
            prompt_tokens=prompt_tokens(ask),
            limit=ask.limit or self._batch.knobs.answer_tokens,
            max_tokens=ask.limit,
            arrived=time.monotonic(),
        )
        answer = Answer(
            ask=ask,
            chat=chat,
            id=answer_id,
            model=self._model,
            created=int(time.time()),
            prompt=sequence.prompt_tokens,
            start=self._random.randrange(1000),
        )
        loop = asyncio.get_running_loop()
        client = _Client(answer, ask.stream, loop.create_future(), loop.create_future())
        self._submit(sequence, client)
        try:
            if ask.stream:
                return await self._stream(request, sequence, client)
            await client.done
            if (dead := self._dead()) is not None:
                return dead
            sequence.written = sequence.generated
            body = answer.whole(sequence.generated, sequence.reason)
            return web.Response(body=body, content_type="application/json")
        except (asyncio.CancelledError, ConnectionResetError):
            self._leave(sequence)
            raise
        finally:
            self._clients.pop(sequence, None)

    async def _stream(self, request: web.Request, sequence: Sequence, client: _Client) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        client.chunked = request.version >= HttpVersion11
        if client.chunked:
            response.enable_chunked_encoding()
        if self._batch.knobs.late_headers:
            await client.first
            if (dead := self._dead()) is not None:
                return dead
        await response.prepare(request)
        if request.transport is None:
            raise ConnectionResetError  # it left before its header was written
        client.stream = request.transport
        self._write(sequence)
        await client.done
        await response.write_eof()
        return response

    async def _embeddings(self, request: web.Request) -> web.Response:
        """Answer at once, with a vector that means nothing: no slot is taken and no token generated."""
        try:
            asked = msgspec.json.decode(await request.read(), type=EmbeddingAsk)
        except ValueError as wrong:
            return _bad_request(str(wrong))
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        data = [{"object": "embedding", "index": at, "embedding": [0.0] * 8} for at in range(len(texts))]
        tokens = sum(len(text) for text in texts) // 4
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"object": "list", "data": data, "model": self._model, "usage": usage})

    def _dead(self) -> web.Response | None:
        """Return what a request is told by an engine that has no core any more, None while it has one."""
        return None if self._death is None else web.json_response(_error(self._death, 500), status=500)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "owned_by": "vllm", "root": self._model}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._death is None else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = self._page.text(without_engine=self._batch.knobs.disable_log_stats)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _sleep(self, request: web.Request) -> web.Response:
        """Give the memory back, as vLLM's development mode does: nothing is scheduled until ``/wake_up``."""
        level = request.query.get("level", "1")
        self.freeze()
        for state, on in (("awake", False), ("weights_offloaded", level == "1"), ("discard_all", level == "2")):
            self._page.put("engine_sleep_state", on, state)
        return web.Response()

    async def _wake_up(self, _: web.Request) -> web.Response:
        for state in ("awake", "weights_offloaded", "discard_all"):
            self._page.put("engine_sleep_state", state == "awake", state)
        self.thaw()
        return web.Response()

    # What only the lab serves

    async def _truth(self, request: web.Request) -> web.Response:
        now = self._sample()
        since = float(request.query.get("since", "0"))
        truth = Truth(
            now=now,
            frozen=self._batch.frozen,
            knobs=self._batch.knobs,
            generated=self._batch.generated,
            requests={name: _request_truth(sequence, now.at) for name, sequence in self._known.items()},
            history=[sample for sample in self._history if sample.at > since],
        )
        return web.Response(body=msgspec.json.encode(truth), content_type="application/json")

    async def _freeze(self, _: web.Request) -> web.Response:
        self.freeze()
        return web.Response()

    async def _thaw(self, _: web.Request) -> web.Response:
        self.thaw()
        return web.Response()

    async def _turn(self, request: web.Request) -> web.Response:
        try:
            knobs = changed(self._batch.knobs, msgspec.json.decode(await request.read(), type=dict))
        except ValueError as wrong:
            return web.Response(status=400, text=str(wrong))
        self._pump()
        self._batch.turn(knobs, time.monotonic())
        self._arm()
        return web.Response()

    async def _crash(self, _: web.Request) -> Never:
        os._exit(1)

    # The batch and its clock

    def _name(self, wanted: str) -> str:
        """Return the name under which the truth keeps a request, and forget the oldest that have ended."""
        while len(self._known) >= KEEP_REQUESTS:
            oldest = next(iter(self._known))
            if self._known[oldest].ended is None:
                break
            del self._known[oldest]
        name, again = wanted, 1
        while name in self._known:
            again += 1
            name = f"{wanted}#{again}"
        return name

    def _submit(self, sequence: Sequence, client: _Client) -> None:
        self._pump()
        self._known[sequence.id] = sequence
        self._clients[sequence] = client
        self._batch.submit(sequence, time.monotonic())
        self._arm()

    def _leave(self, sequence: Sequence) -> None:
        """The client is gone: free its slot, or go on without it when this engine ignores disconnects."""
        self._clients.pop(sequence, None)
        if self._batch.knobs.ignore_disconnects:
            sequence.abandoned = sequence.ended is None
            return
        self._batch.abort(sequence, time.monotonic())
        self._arm()

    def _pump(self) -> None:
        """Take the steps that are due and write what they gave."""
        for sequence in self._batch.advance(time.monotonic()):
            self._write(sequence)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._batch.due()
        # A loop's own clock is time.monotonic() (asyncio.BaseEventLoop.time).
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._pump)

    def _write(self, sequence: Sequence) -> None:
        """Hand a client the tokens that it has not got yet."""
        client = self._clients.get(sequence)
        if client is None or client.done.done():
            return
        if sequence.generated and not client.first.done():
            client.first.set_result(None)
        if client.streams:
            if client.stream is None:
                return
            self._stream_tokens(sequence, client, client.stream)
        if sequence.ended is not None:
            client.done.set_result(None)

    @staticmethod
    def _stream_tokens(sequence: Sequence, client: _Client, stream: asyncio.WriteTransport) -> None:
        if stream.is_closing():
            return
        events = [client.answer.opening()] if sequence.written == 0 < sequence.generated else []
        events += [
            client.answer.token(number, sequence.reason if number == sequence.limit else None)
            for number in range(sequence.written + 1, sequence.generated + 1)
        ]
        if sequence.ended is not None:
            events.append(client.answer.closing(sequence.generated))
        if data := b"".join(events):
            stream.write(b"%x\r\n%b\r\n" % (len(data), data) if client.chunked else data)
        sequence.written = sequence.generated

    def _sample(self) -> Sample:
        now, batch = time.monotonic(), self._batch
        return Sample(now, batch.running, batch.waiting, batch.head_age(now), batch.first_token_wait(now))

    async def _sample_for_ever(self) -> None:
        while True:
            self._history.append(self._sample())
            self._batch.show(time.monotonic())  # the KV cache fills during a prefill, in which no step has output
            await asyncio.sleep(SAMPLE_EVERY)

    async def _sampling(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._sample_for_ever())
        yield
        task.cancel()
        if self._timer is not None:
            self._timer.cancel()


class EmbeddingAsk(msgspec.Struct, frozen=True):
    """The body of a request for embeddings."""

    input: str | list[str]


def _bad_request(why: str) -> web.Response:
    return web.json_response(_error(why, 400), status=400)


def _error(message: str, code: int) -> dict[str, Any]:
    """Return an error as vLLM words it, in a response of its own or as an event of a stream."""
    kind = "BadRequestError" if code == 400 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _request_truth(sequence: Sequence, now: float) -> RequestTruth:
    until = next(at for at in (sequence.started, sequence.ended, now) if at is not None)
    return RequestTruth(
        id=sequence.id,
        state=sequence.state,
        prompt_tokens=sequence.prompt_tokens,
        max_tokens=sequence.max_tokens,
        generated=sequence.generated,
        written=sequence.written,
        abandoned=sequence.abandoned,
        queue_wait=until - sequence.arrived,
        arrived=sequence.arrived,
        started=sequence.started,
        first_token=sequence.first_token,
        ended=sequence.ended,
    )


def engine_part(port: int, knobs: Knobs | None = None, *, name: str = "engine", seed: int = 0) -> Part:
    """Return the part that serves a stand-in engine on loopback at ``port``."""
    knobs = knobs or Knobs()
    command = [sys.executable, "-m", "tokengap.lab.engine", "--port", str(port), "--seed", str(seed)]
    for key, value in asdict(knobs).items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif value is not False:
            command += [flag, str(value)]
    return Part(name, tuple(command), (port,))


_DEFAULT = Knobs()


@click.command()
@click.option("--host", default=LOOPBACK, show_default=True)
@click.option("--port", type=int, required=True)
@click.option("--model", default=MODEL, show_default=True, help="The served model's name.")
@click.option("--seed", default=0, show_default=True, help="Of ids and texts.")
@click.option("--max-num-seqs", default=_DEFAULT.max_num_seqs, show_default=True, help="Slots.")
@click.option("--rate", default=_DEFAULT.rate, show_default=True, help="Tokens a second of each running sequence.")
@click.option("--prefill-rate", default=_DEFAULT.prefill_rate, show_default=True, help="Prompt tokens a second.")
@click.option(
    "--answer-tokens", default=_DEFAULT.answer_tokens, show_default=True, help="Where no max_tokens is asked."
)
@click.option("--ignore-disconnects", is_flag=True, help="Go on with requests whose client left.")
@click.option("--late-headers", is_flag=True, help="Send a stream's header with its first token.")
@click.option("--disable-log-stats", is_flag=True, help="Show no family of vLLM on the page.")
def main(host: str, port: int, model: str, seed: int, **knobs: Any) -> None:
    """Serve a stand-in vLLM engine."""
    try:
        server = EngineServer(Knobs(**knobs), model, seed)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    # A client that leaves cancels its handler, in whatever phase.
    serve_app(server.app(), host, port, handler_cancellation=True)


if __name__ == "__main__":
    main()
