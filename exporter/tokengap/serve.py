"""Put together: sources, beat, join and web make an exporter. Used by ``tokengap serve`` and ``tokengap top``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

import tokengap.join
from tokengap.beat import Beat, GpuSource, Sources, deadline
from tokengap.bundle.site import Site, is_address
from tokengap.config import Settings, topology
from tokengap.errors import SettingsError
from tokengap.series.engines import public_url
from tokengap.sources.dcgm import DcgmPage
from tokengap.sources.engine import EngineSource, resolve
from tokengap.sources.gateway import GatewaySource
from tokengap.sources.gpu import NvmlReader
from tokengap.sources.processes import Discovery, Processes, discover
from tokengap.sources.proxies import proxy_source
from tokengap.sources.sockets import Sockets
from tokengap.topology import Topology
from tokengap.view import View
from tokengap.web.access import Access, followed, read_access
from tokengap.web.guard import Guard
from tokengap.web.routes import make_app
from tokengap.web.server import Server, parse_listen
from tokengap.web.serving import Serving

log = logging.getLogger(__name__)

#: Seconds between two readings of the GPUs at the shortest: their driver's own values are not newer.
GPU_INTERVAL = 1.0


async def look(settings: Settings) -> tuple[Topology, Discovery | None]:
    """Return what the settings tell to watch, and with ``auto`` also what was found on this host."""
    if not settings.auto:
        return await topology(settings, resolve), None
    found = await asyncio.to_thread(discover)
    return await topology(settings, resolve, found.engines, found.hops), found


async def find(settings: Settings) -> tuple[Topology, Discovery | None]:
    """As :func:`look`. SettingsError when there is no engine, the one thing an exporter cannot do without."""
    watched, found = await look(settings)
    if not watched.engines:
        raise SettingsError(
            "no engine to watch: name one, such as --engine http://127.0.0.1:8000"
            + ("; --auto found no vLLM server on this host" if settings.auto else ", or let --auto look for it")
        )
    return watched, found


@asynccontextmanager
async def exporter(settings: Settings, watched: Topology) -> AsyncIterator[tuple[Server, Serving]]:
    """Run an exporter while the block lasts. SettingsError: its web configuration; SetupError: the address is taken."""
    serving = Serving(telemetry_path=settings.telemetry_path, show_addresses=settings.show_addresses, watched=watched)
    access = Access() if settings.web_config_file is None else read_access(Path(settings.web_config_file))
    server = Server(make_app(serving), Guard(access, settings.telemetry_path))
    await server.start(*parse_listen(settings.listen), access.tls)
    serving.site = site(settings, watched, server.url)
    try:
        async with followed(access, server.take), beating(settings, watched, serving.render_and_publish):
            yield server, serving
    finally:
        await server.stop()


@asynccontextmanager
async def beating(
    settings: Settings, watched: Topology, publish: Callable[[View], Awaitable[None]]
) -> AsyncIterator[None]:
    """Read, join and publish, beat after beat, while the block lasts."""
    netns = tuple(map(str, settings.netns))
    sockets = Sockets(events=settings.events, netns=netns)
    try:
        async with AsyncExitStack() as stack:
            # No limit: a hundred engines that hang must not keep the hundred and first from being read.
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            within = deadline(settings.interval)
            gpu = await stack.enter_async_context(gpus(settings, session, within))
            sources = Sources(
                sockets=sockets,
                engines={engine.name: EngineSource(engine, session, deadline=within) for engine in watched.engines},
                processes=Processes(netns=netns),
                proxies={one.hop: proxy_source(one, session, deadline=within) for one in watched.interfaces},
                gpu=gpu,
                gateway=GatewaySource(watched.gateway.url, session, deadline=within) if watched.gateway else None,
            )
            beat = asyncio.create_task(Beat(watched, sources, tokengap.join, publish).run(), name="beat")
            beat.add_done_callback(_end_with)
            log.info("sockets are read", extra={"way": sockets.describe()})
            if limits := sockets.limits():
                log.warning(limits)
            try:
                yield
            finally:
                beat.cancel()
                await asyncio.gather(beat, return_exceptions=True)
    finally:
        sockets.close()


def site(settings: Settings, watched: Topology, url: str) -> Site:
    """Return what runbooks say of this exporter, which answers at ``url``."""
    engine = public_url(watched.engines[0].url)
    return Site(
        deadline=settings.deadline,
        age_cut=settings.age_cut,
        window=settings.window,
        beat=settings.interval,
        exporter=url,
        engine=engine if is_address(engine) else Site().engine,
    )


@asynccontextmanager
async def gpus(settings: Settings, session: aiohttp.ClientSession, within: float) -> AsyncIterator[GpuSource | None]:
    """Give what GPUs are read from while the block lasts, None where they are not to be. ``within``: seconds a page may
    take."""
    if settings.dcgm is not None:
        yield DcgmPage(settings.dcgm, session, deadline=within)
    elif settings.gpu:
        async with NvmlReader(interval=max(settings.interval, GPU_INTERVAL)) as reader:
            yield reader
    else:
        yield None


def _end_with(beat: asyncio.Task[None]) -> None:
    """Say it when the beat ends by itself: from then on the page would stand still."""
    if not beat.cancelled() and (error := beat.exception()) is not None:
        log.critical("the beat has stopped: a bug", exc_info=error)
        raise SystemExit(1)


async def serve(settings: Settings, until: asyncio.Event) -> None:
    """Serve until the event is set, and say what is watched, one line each."""
    watched, found = await find(settings)
    for sentence in found.sentences if found is not None else ():
        log.info(sentence)
    for engine in watched.engines:
        log.info("engine", extra={"engine": engine.name, "url": engine.url})
        if not engine.endpoints:
            unseen = "the engine's name does not resolve: until a restart finds that it does, its sockets are not seen"
            log.warning(unseen, extra={"engine": engine.name})
    for hop in watched.hops:
        listen = ",".join(map(str, hop.listen))
        log.info("hop", extra={"hop": hop.name, "listen": listen, "to": ",".join(hop.to)})
    for one in watched.interfaces:
        log.info("proxy", extra={"hop": one.hop, "program": one.program, "address": public_url(one.address)})
    if watched.gateway is not None:
        address = public_url(watched.gateway.url)
        log.info("gateway", extra={"hop": watched.gateway.hop, "address": address})
    async with exporter(settings, watched) as (server, _):
        log.info("serving", extra={"address": server.url + settings.telemetry_path})
        await until.wait()
    log.info("stopped")
