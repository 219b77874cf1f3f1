"""Put together: gate, engines, clients and pages make a gateway. Used by ``tokengap admit``."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec
from aiohttp import web

from tokengap.admit import control
from tokengap.admit.admission import Admission
from tokengap.admit.books import Books
from tokengap.admit.classes import Classes, Sign
from tokengap.admit.client import Clients, ClientServer
from tokengap.admit.control import SIGHUP, Switch, usual_path
from tokengap.admit.gate import EngineSlots, Gate, Policy, Rule
from tokengap.admit.metrics import EVERY, SERIES, page_of, view_of
from tokengap.admit.proxy import Exchange, House
from tokengap.admit.upstream import Upstreams, open_session
from tokengap.config import Settings, topology
from tokengap.errors import SettingsError, SetupError, SourceError, SourceUnusable
from tokengap.series.render import render
from tokengap.sources.engine import EngineSource, resolve
from tokengap.sources.gateway import PATH as ADMISSION_PATH
from tokengap.topology import BATCH, INTERACTIVE, Endpoint, Engine
from tokengap.view import AdmitMode
from tokengap.web.routes import scrape
from tokengap.web.server import parse_listen
from tokengap.web.serving import Serving

log = logging.getLogger(__name__)

#: Seconds that an idle connection is kept, and that a request's header may take. Longer than edge proxies keep theirs
#: (nginx: 60), so that none of their requests meets a connection that is being closed.
KEEP_ALIVE = 75.0

#: Seconds in which the rest of a body is read that is refused, so that its client sees the answer.
LINGER_FOR_BODY = 2.0

#: Seconds in which clients are told that they are given up.
LAST_WORDS = 1.0

#: Seconds for one read of an engine's page.
PAGE_WITHIN = 2.0

#: The settings that SIGHUP changes.
RELOADED = ("admit_mode", "age_cut", "deadline", "classes")

#: Connections that may wait to be accepted.
BACKLOG = 4096

#: The share of a class's deadline that is its cut, where only the deadline is set: 6 of 8 seconds.
CUT_SHARE = 0.75


class Gateway:
    """The gateway, listening at ``port``. ``switch`` is how its mode is set while it runs."""

    def __init__(self, settings: Settings, house: House, engines: tuple[Engine, ...]) -> None:
        self.port = 0
        self.admission = house.admission
        self.switch = Switch(house.admission.gate.mode, house.admission.set_mode)
        self._settings = settings
        self._house = house
        self._engines = engines
        self._serving = Serving(series=SERIES)
        self._beats = 0
        self._started = time.time()
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}
        self._pages: dict[str, Callable[[web.BaseRequest], Awaitable[web.Response]]] = {
            "/metrics": self._metrics,
            ADMISSION_PATH: self._admission,
            "/-/healthy": self._healthy,
            "/-/ready": self._ready,
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        path = request.rel_url.raw_path
        if path.startswith("/v1/"):
            exchange = Exchange(self._house, request)
            self._tasks[exchange] = request.task
            try:
                return await exchange.run()
            finally:
                del self._tasks[exchange]
        page = self._pages.get(path)
        if page is None:
            return web.Response(status=404, text=f"there is /v1/... here, and {', '.join(self._pages)}\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        return await page(request)

    def request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        """Make aiohttp's request, with our limit of its body."""
        loop, most = asyncio.get_running_loop(), self._settings.admit_max_body
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

    def publish(self) -> None:
        """Publish what is known now.

        In the loop and not in a thread: a thread that renders would take the interpreter's lock at each write of a
        stream and keep it for 5 ms (sys.getswitchinterval), 200 times in a burst, where the page takes 5 ms once.
        """
        now = time.monotonic()
        self._house.clients.look(now)
        self._beats += 1
        gate = self.admission.gate.view(now)
        models = self.admission.models
        rules = _rules(self._settings)
        deadlines = {klass: rule.deadline for klass, rule in rules.items() if rule.deadline is not None}
        view = view_of(
            gate, self._house.books, self._engines, models, deadlines, now=now, wall=time.time(), beats=self._beats
        )
        self._serving.publish(view, render(view, self._serving.also, SERIES))

    def reload(self, settings: Settings) -> None:
        """Take over what may be changed while it runs: the mode, cuts and deadlines. The rest takes a restart."""
        taken = {key: getattr(settings, key) for key in RELOADED}
        if msgspec.structs.replace(self._settings, **taken) != settings:
            log.warning("SIGHUP: some of what has changed takes a restart", extra={"changed": ", ".join(RELOADED)})
        self._settings = settings = msgspec.structs.replace(self._settings, **taken)
        self.admission.set_rules(_rules(settings))
        mode: AdmitMode = str(settings.admit_mode)  # type: ignore[assignment]  # one of them, says its kind
        if mode != self.switch.standing.mode:
            self.switch.to(mode, SIGHUP, "the settings were read again")
        else:
            log.info("SIGHUP: the settings were read again", extra={"mode": mode})

    async def stop(self) -> None:
        """Admit nobody, let streams come to their end, and end what is left at the limit."""
        self.admission.close()
        limit = float(self._settings.admit_stop_within)
        log.info("stopping", extra={"streams": len(self._tasks), "within": limit})
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=limit)
        for exchange in list(self._tasks):
            exchange.give_up()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=LAST_WORDS)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        """Answer a scrape. The page is made when somebody asks for it, for all who ask within a second."""
        view = self._serving.view
        if view is None or time.monotonic() - view.at >= EVERY:
            self.publish()
        return await scrape(self._serving, request)

    async def _admission(self, _: web.BaseRequest) -> web.Response:
        """Tell an exporter all counts, as they are now."""
        now = time.monotonic()
        self._house.clients.look(now)
        page = page_of(self.admission.gate.view(now), self._house.books, self._started, now)
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def _healthy(self, _: web.BaseRequest) -> web.Response:
        """Answer that this process serves. Says nothing of engines: theirs must not get the gateway restarted."""
        return web.Response(text="healthy\n")

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        """Answer whether it makes sense to send requests here."""
        gate = self.admission.gate.view(time.monotonic())
        if gate.closed:
            return web.Response(status=503, text="shutting down\n")
        if not any(engine.up for engine in gate.engines):
            return web.Response(status=503, text="no engine takes connections\n")
        return web.Response(text="ready\n")


@asynccontextmanager
async def gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """Run a gateway while the block lasts. SettingsError where an engine or its slots are missing, SetupError when the
    address is taken."""
    watched = await topology(settings, resolve)
    if not watched.engines:
        raise SettingsError("no engine to send requests to: name one, such as --engine http://127.0.0.1:8000")
    for engine in watched.engines:
        if engine.slots is None:
            raise SettingsError(
                f"how many streams {engine.name} runs at once is not known: name its max_num_seqs, such as --slots 64"
            )
    async with AsyncExitStack() as stack:
        page_session = await stack.enter_async_context(aiohttp.ClientSession())
        session = await stack.enter_async_context(open_session(float(settings.admit_silence)))
        pages = {engine.name: EngineSource(engine, page_session, deadline=PAGE_WITHIN) for engine in watched.engines}
        slots = [
            EngineSlots(name, int(engine.slots or 0), await _has_page(page))
            for (name, page), engine in zip(pages.items(), watched.engines, strict=True)
        ]
        rules = _rules(settings)
        clients = Clients()
        stack.callback(clients.close)
        house = House(
            upstreams=Upstreams(watched.engines, session),
            admission=Admission(Gate(_policy(settings, rules), slots), pages),
            clients=clients,
            classes=Classes(rules, (Sign(*sign.parts) for sign in settings.admit_signs)),  # type: ignore[arg-type]
            books=Books(watched.engines[0].name if len(watched.engines) == 1 else ""),
        )
        built = Gateway(settings, house, watched.engines)
        for work in (clients.watch, house.admission.read_pages):
            await stack.enter_async_context(_going_on(work()))
        built.port = await stack.enter_async_context(_listening(built, settings.admit_listen))
        path = Path(settings.admit_control or usual_path(built.port))
        await stack.enter_async_context(control.listening(path, built.switch))
        yield built
        await built.stop()


async def _has_page(page: EngineSource) -> bool:
    """Tell whether an engine shows its requests. One that is not up yet is taken to."""
    try:
        await page.read()
    except SourceUnusable as error:
        log.warning(
            "no page of this engine: its slots are free when connections to it are closed",
            extra={"engine": page.engine.name, "why": str(error)},
        )
        return False
    except SourceError:
        return True
    return True


@asynccontextmanager
async def _listening(built: Gateway, listen: str) -> AsyncIterator[int]:
    """Listen while the block lasts; gives the port."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = ClientServer(
        built.answer,
        request_factory=built.request,
        access_log=None,
        keepalive_timeout=KEEP_ALIVE,
        lingering_time=LINGER_FOR_BODY,
        auto_decompress=False,
    )
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    host, port = parse_listen(listen)
    try:
        await _start(runner, host, port)
        port = runner.addresses[0][1]
        log.info("admitting", extra={"address": str(Endpoint(host, port))})
        yield port
    finally:
        await runner.cleanup()


async def _start(runner: web.ServerRunner, host: str | None, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except OSError as error:
        raise SetupError(f"cannot listen on {Endpoint(host, port)}: {error.strerror or error}") from error


def _policy(settings: Settings, rules: Mapping[str, Rule]) -> Policy:
    return Policy(
        mode=str(settings.admit_mode),  # type: ignore[arg-type]  # one of them, says its kind
        rules=rules,
        balance=str(settings.admit_balance),  # type: ignore[arg-type]  # the same
        queue_limit=int(settings.admit_queue_limit),
        drain_limit=float(settings.admit_drain_limit),
        when_held=str(settings.admit_when_held),  # type: ignore[arg-type]  # the same
        retry_after_max=float(settings.admit_retry_after_max),
    )


def _rules(settings: Settings) -> dict[str, Rule]:
    """Return the cut and the deadline of each class. Batch is never cut, whatever its deadline."""
    rules = {INTERACTIVE: Rule(float(settings.age_cut), float(settings.deadline)), BATCH: Rule()}
    for name, deadline in settings.classes.items():
        if deadline is None:
            rules[name] = Rule()
        elif name == BATCH:
            rules[name] = Rule(None, float(deadline))
        else:
            rules[name] = Rule(CUT_SHARE * deadline, float(deadline))
    return rules


@asynccontextmanager
async def _going_on(work: Coroutine[Any, Any, NoReturn]) -> AsyncIterator[None]:
    """Do what is done for ever while the block lasts. When it ends by itself, this process does: it is a bug."""
    task = asyncio.create_task(work)
    task.add_done_callback(_end_with)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _end_with(task: asyncio.Task[NoReturn]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("what should go on for ever has stopped: a bug", exc_info=error)
        raise SystemExit(1)


async def serve(settings: Settings, until: asyncio.Event, hangup: asyncio.Event, again: Callable[[], Settings]) -> None:
    """Serve until the event is set. At each ``hangup`` (SIGHUP), ``again`` reads the settings."""
    async with gateway(settings) as built, _going_on(_reload(built, hangup, again)):
        await until.wait()
    log.info("stopped")


async def _reload(built: Gateway, hangup: asyncio.Event, again: Callable[[], Settings]) -> NoReturn:
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            built.reload(again())
        except SettingsError as wrong:
            log.error("SIGHUP: nothing has changed, the settings are wrong", extra={"why": str(wrong)})
