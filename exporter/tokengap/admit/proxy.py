"""One request on its way: from its client through the gate to an engine, and the answer back as it comes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from tokengap.admit.admission import Admission, Seat
from tokengap.admit.books import Books
from tokengap.admit.classes import Classes
from tokengap.admit.client import Client, Clients, Left
from tokengap.admit.delivery import Delivery
from tokengap.admit.failed import Failed
from tokengap.admit.gate import Refuse
from tokengap.admit.headers import FORWARDED_FOR, REQUEST_ID, passed, request_id, to_engine
from tokengap.admit.states import Event
from tokengap.admit.upstream import EngineAnswer, Request, Upstream, Upstreams
from tokengap.admit.usage import Ask, Asked, EventStream, Passing, WholeAnswer, read_ask
from tokengap.view import Client as ClientState
from tokengap.view import Ending

log = logging.getLogger(__name__)

#: What takes a slot of an engine: these go through the gate. ``/v1/stream`` is that of the stand-in engine.
GENERATES: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/stream"})
#: Of these, those that tell usage in the events of a stream where they are asked to.
TELLS_USAGE: Final = frozenset({"/v1/chat/completions", "/v1/completions"})

EVENTS: Final = "text/event-stream"

#: No connection to an engine: it is refused, or nobody answers, as across a network that is cut.
UNREACHED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

#: Seconds that a request's body may take to arrive.
BODY_WITHIN: Final = 60.0

Answer: TypeAlias = web.StreamResponse


@dataclass(frozen=True, slots=True)
class House:
    """What all requests share."""

    upstreams: Upstreams
    admission: Admission
    clients: Clients
    classes: Classes
    books: Books


class Exchange:
    """One request, from its header until its client has the answer or left."""

    def __init__(self, house: House, request: web.BaseRequest) -> None:
        self.id = request_id(request.headers)
        self.since = time.monotonic()
        self.path = _path(request)
        self.klass = house.classes.of(self.path, request.headers)
        self.engine = ""
        self.first_byte_at: float | None = None
        self._house = house
        self._request = request
        self._seat: Seat | None = None
        self._how: Ending | None = None
        self._status = 0
        self._stopped = False
        self._given_up: Failed | None = None
        self._response: Answer | None = None
        self._passing: Passing = WholeAnswer()
        self._task = asyncio.current_task()
        self.client = Client(request, house.clients, self)

    @property
    def waits(self) -> bool:
        """Whether it generates, and its client has had nothing of it yet."""
        return self._seat is not None and self.first_byte_at is None

    @property
    def delivery(self) -> Delivery:
        """The ledger of its answer."""
        return self.client.delivery

    @property
    def client_state(self) -> ClientState:
        """Its client, as of the last look."""
        return self.client.state

    # --- its client -------------------------------------------------------------------------------------------------

    def client_left(self, how: Left) -> None:
        """Its client is gone: stop everything that is done for it, in the order of the gate's table."""
        log.info("client left", extra={"id": self.id, "how": how, "age": round(time.monotonic() - self.since, 3)})
        self._how = "cancelled"
        if self._seat is not None:
            self._seat.happened(Event.CLIENT_LEFT)
        self._stop()

    def client_settled(self) -> None:
        """Its ledger is final."""
        self._house.books.settle(self)

    def give_up(self) -> None:
        """End it although its client is there."""
        self._given_up = Failed(503, "shutting down", "shutting_down", retry_after=1)
        if self._seat is not None:
            self._seat.happened(Event.GAVE_UP)
        self._stop()

    def _stop(self) -> None:
        """Stop the task that reads from the engine, which closes the connection to it."""
        if not self._stopped and self._task is not None:
            self._stopped = True
            self._task.cancel()

    # --- its way ----------------------------------------------------------------------------------------------------

    async def run(self) -> Answer:
        """Do it. Returns the answer, sent. Raises CancelledError when the client left."""
        self._house.books.begin(self)
        self.client.attend()
        try:
            return await self._forward()
        except Failed as failed:
            if self._seat is not None and failed.status in (502, 504):
                self._house.admission.engine_failed(self.engine)
            return await self._fail(failed)
        except asyncio.CancelledError:
            if self._given_up is None or self.client.how is not None or self._task is None:
                raise
            self._task.uncancel()
            return await self._fail(self._given_up)
        finally:
            if self._seat is not None:
                self._seat.happened(Event.UPSTREAM_CLOSED)
                self._house.admission.left(self._seat)
            self._house.books.end(self, self._how or "failed")
            self._log()

    async def _forward(self) -> Answer:
        generates = self._request.method == "POST" and self.path in GENERATES
        body = await self._body()
        going = self._going(body, generates)
        if not generates:
            return await self._to_any(going)
        while True:
            upstream = await self._admitted(self._key(body))
            try:
                return await self._relay(upstream, going, self._sees(body))
            except UNREACHED:
                # Nothing was sent. The gate knows now, and admits to another engine or says that there is none.
                self._leave_engine(upstream)

    def _leave_engine(self, upstream: Upstream) -> None:
        assert self._seat is not None
        self._house.admission.engine_is(upstream.name, up=False)
        self._seat.happened(Event.UPSTREAM_CLOSED)
        self._house.admission.left(self._seat)
        self._seat, self.engine = None, ""

    async def _admitted(self, key: Hashable) -> Upstream:
        """Wait for a slot."""
        self._seat = self._house.admission.arrive(self.klass, key, self._stop)
        verdict = await self._seat.verdict
        if isinstance(verdict, Refuse):
            raise Failed(verdict.status, verdict.why, verdict.decision, verdict.retry_after)
        self.engine = verdict.engine
        return self._house.upstreams[verdict.engine]

    async def _to_any(self, going: Request) -> Answer:
        """Send what takes no slot to the first engine that takes it."""
        for upstream in self._house.upstreams.by_load():
            self.engine = upstream.name
            with suppress(*UNREACHED):
                return await self._relay(upstream, going, "running")
        raise Failed(502, "no engine takes connections")

    # --- the request ------------------------------------------------------------------------------------------------

    async def _body(self) -> bytes:
        if (self._request.content_length or 0) > self._request.client_max_size:
            raise self._too_large()
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            self.client.go_on()
        try:
            async with asyncio.timeout(BODY_WITHIN):
                return await self._request.read()
        except TimeoutError:
            raise Failed(408, f"the body did not arrive within {BODY_WITHIN:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError:
            raise Failed(400, "the body is broken") from None

    def _too_large(self) -> Failed:
        return Failed(413, f"the body is larger than {self._request.client_max_size} bytes")

    def _going(self, body: bytes, generates: bool) -> Request:
        headers = self._request.headers
        peer = str(self._request.remote or "")
        return Request(
            self._request.method,
            self._request.rel_url.raw_path_qs,
            to_engine(headers, self.id, peer, readable=generates),
            body,
            asks=generates and self.path in TELLS_USAGE and bool(self._ask(body).stream),
        )

    def _ask(self, body: bytes) -> Ask:
        try:
            return read_ask(body)
        except ValueError as wrong:  # msgspec's errors are ValueErrors
            raise Failed(400, f"the body is not what it should be: {wrong}", "invalid_request_error") from None

    def _sees(self, body: bytes) -> Asked:
        return self._ask(body).sees if self.path in TELLS_USAGE else "running"

    def _key(self, body: bytes) -> Hashable:
        """Return what tells a retry: the same request of the same client. Its credentials are hashed, not kept."""
        headers = self._request.headers
        who = headers.get("Authorization") or headers.get(FORWARDED_FOR) or self._request.remote
        return hash((who, self.path, body))

    # --- the answer -------------------------------------------------------------------------------------------------

    async def _relay(self, upstream: Upstream, going: Request, sees: Asked) -> Answer:
        """Send the request and pass its answer on as it comes."""
        try:
            async with self._house.upstreams.send(upstream, going) as answer:
                if self._seat is not None:
                    self._seat.answered()
                return await self._pass_on(answer, sees)
        except (*UNREACHED, Failed):
            raise
        except TimeoutError:
            raise Failed(504, f"the engine {upstream.name} said nothing for too long", "upstream_timeout") from None
        except aiohttp.ClientError as error:
            log.warning("engine", extra={"engine": upstream.name, "id": self.id, "error": type(error).__name__})
            raise Failed(502, f"the engine {upstream.name} broke off", "upstream_error") from None

    async def _pass_on(self, engine_answer: EngineAnswer, sees: Asked) -> Answer:
        answer = engine_answer.response
        streamed = answer.content_type == EVENTS
        passing = self._passing = EventStream(sees) if streamed else WholeAnswer()
        headers = passed(answer.headers, but=("content-length",) if streamed else ())
        headers[REQUEST_ID] = self.id
        response = self._response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        self._status = answer.status
        if self._seat is not None and answer.status >= 500:
            self._house.admission.engine_failed(self.engine)
        await self.client.begin(self._request, response)
        try:
            async for data in engine_answer.pieces():
                if going := passing.feed(data):
                    await self._write(going, passing.tokens)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise self._broke_off(error) from error
        if rest := passing.end():
            await self._write(rest, passing.tokens)
        if self._seat is not None:
            self._seat.happened(Event.FINISHED)
        self._how = "completed" if answer.status < 400 else "failed"
        await self.client.end(response, passing.tokens)
        return response

    async def _write(self, data: bytes, tokens: int) -> None:
        if self.first_byte_at is None:
            self.first_byte_at = time.monotonic()
        await self.client.write(data, tokens)

    def _broke_off(self, error: Exception) -> Failed:
        """The engine broke off, or hung, in mid-answer."""
        hung = isinstance(error, TimeoutError)
        log.warning("engine broke off", extra={"engine": self.engine, "id": self.id, "error": type(error).__name__})
        if self._seat is not None:
            self._seat.happened(Event.GAVE_UP if hung else Event.UPSTREAM_CLOSED)
        if hung:
            return Failed(504, f"the engine {self.engine} said nothing for too long", "upstream_timeout")
        return Failed(502, f"the engine {self.engine} broke off", "upstream_error")

    async def _fail(self, failed: Failed) -> Answer:
        """Tell the client: by an answer, within the stream, or by an answer that is visibly incomplete."""
        self._how = "failed"
        if self._response is None:
            return await self._refuse(failed)
        if isinstance(self._passing, WholeAnswer):
            self.client.drop()
            raise ConnectionResetError
        await self.client.write(b"data: " + failed.body + b"\n\ndata: [DONE]\n\n", self._passing.tokens)
        await self.client.end(self._response, self._passing.tokens)
        return self._response

    async def _refuse(self, failed: Failed) -> Answer:
        """Answer with an error."""
        self._status = failed.status
        response = web.StreamResponse(status=failed.status, headers=failed.headers)
        response.headers[REQUEST_ID] = self.id
        response.content_length = len(failed.body)
        if failed.status in (408, 413, 400):
            response.force_close()
        await self.client.begin(self._request, response)
        await self.client.write(failed.body, 0)
        await self.client.end(response, 0)
        return response

    def _log(self) -> None:
        delivery = self.client.delivery
        log.info(
            "request",
            extra={
                "id": self.id,
                "method": self._request.method,
                "path": self.path,
                "class": self.klass,
                "engine": self.engine,
                "status": self._status,
                "how": self._how,
                "tokens": delivery.out,
                "seconds": round(time.monotonic() - self.since, 3),
            },
        )


def _path(request: web.BaseRequest) -> str:
    """Return the path of a request. One that steps up is not passed on: an engine may see another path in it."""
    path = unquote(request.rel_url.raw_path)
    if ".." in path.split("/"):
        raise web.HTTPBadRequest(text="a path may not contain ..\n")
    return path
