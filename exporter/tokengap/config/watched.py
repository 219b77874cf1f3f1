"""Settings as what is to be watched."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeAlias
from urllib.parse import urlsplit

from tokengap.config import rules
from tokengap.config.settings import EngineSettings, HopSettings, Settings
from tokengap.errors import SettingsError, SourceError
from tokengap.topology import (
    ENGINE_HOP,
    GATEWAY_HOP,
    INTERACTIVE,
    Endpoint,
    Engine,
    Gateway,
    GpuPrice,
    Hop,
    Limits,
    ProxyInterface,
    Topology,
)

#: From an engine's URL to the addresses at which it is reached. Raises SourceError when the name does not resolve.
Resolve: TypeAlias = Callable[[str], Awaitable[tuple[Endpoint, ...]]]


async def topology(
    settings: Settings, resolve: Resolve, engines: Sequence[Engine] = (), hops: Sequence[Hop] = ()
) -> Topology:
    """Return what the settings say to watch, and besides it the ``engines`` and ``hops`` that were found.

    What was found at a configured address is the configured one. An engine whose name does not resolve is there all the
    same, without an endpoint. Raises SettingsError for hops that do not fit.
    """
    configured = await asyncio.gather(*(_engine(engine, settings, resolve) for engine in settings.engines))
    all_engines, called = _with_found_engines(configured, engines, settings)
    names = tuple(engine.name for engine in all_engines)
    for path, problem in rules.targets(settings.hops, (*names, *(hop.name for hop in settings.hops))):
        raise SettingsError(f"{path[0]} {problem}")
    chained = _chained(settings.hops, names)
    for hop in chained:
        _check_apart(hop, all_engines)
    all_hops = _outermost_first(_with_found_hops(chained, hops, names, called))
    return Topology(
        engines=all_engines,
        hops=all_hops,
        interfaces=tuple(_interfaces(settings, [hop.name for hop in all_hops])),
        gateway=None if settings.admit is None else _gateway(settings.admit, all_hops),
        limits=Limits(
            deadlines={INTERACTIVE: float(settings.deadline)}
            | {str(name): float(seconds) for name, seconds in settings.classes.items() if seconds is not None},
            age_cut=float(settings.age_cut),
            window=float(settings.window),
            prefill_budget=float(settings.prefill_budget),
        ),
        interval=float(settings.interval),
        price=GpuPrice(
            per_hour=None if settings.gpu_hour_price is None else float(settings.gpu_hour_price),
            currency=str(settings.currency),
            idle_power=None if settings.gpu_idle_power is None else float(settings.gpu_idle_power),
        ),
    )


def _interfaces(settings: Settings, hops: Sequence[str]) -> Iterator[ProxyInterface]:
    for path, problem in rules.interfaces(settings, hops):
        raise SettingsError(f"{path[0]} {problem}")
    only = hops[0] if hops else ""
    for haproxy in settings.haproxy_socket:
        yield ProxyInterface(str(haproxy.hop or only), "haproxy", str(haproxy.socket))
    for envoy in settings.envoy_admin:
        yield ProxyInterface(str(envoy.hop or only), "envoy", str(envoy.url))
    for nginx in settings.nginx_status:
        yield ProxyInterface(str(nginx.hop or only), "nginx", str(nginx.url))


def _gateway(url: str, hops: Sequence[Hop]) -> Gateway:
    """Return the gateway there. The hop that it is listens at its port; without one it goes by a name of its own."""
    port = urlsplit(url).port
    same = (hop.name for hop in hops if any(endpoint.port == port for endpoint in hop.listen))
    return Gateway(str(url), next(same, GATEWAY_HOP))


async def _engine(engine: EngineSettings, settings: Settings, resolve: Resolve) -> Engine:
    try:
        resolved = await resolve(engine.url)
    except SourceError:
        resolved = ()
    endpoints = dict.fromkeys((*resolved, *(address.endpoint for address in engine.addresses)))
    slots = engine.slots or settings.slots
    return Engine(
        name=str(engine.name),
        url=str(engine.url),
        endpoints=tuple(endpoints),
        slots=None if slots is None else int(slots),
        klass=str(engine.klass),
        gpus=tuple(map(str, engine.gpus)),
    )


def _with_found_engines(
    configured: Sequence[Engine], found: Sequence[Engine], settings: Settings
) -> tuple[tuple[Engine, ...], dict[str, str]]:
    """Return all engines, and what each found one is called here."""
    engines, called = list(configured), {}
    for engine in found:
        known = next((one.name for one in configured if set(one.endpoints) & set(engine.endpoints)), None)
        called[engine.name] = known or _free_name(engine.name, engine.endpoints, [one.name for one in engines])
        if known is None:
            engines.append(replace(engine, name=called[engine.name], slots=settings.slots))
    return tuple(engines), called


def _with_found_hops(
    configured: Sequence[Hop], found: Sequence[Hop], engines: Sequence[str], called: dict[str, str]
) -> list[Hop]:
    taken = [*engines, *(hop.name for hop in configured), ENGINE_HOP]
    new = []
    for hop in found:
        same = (
            one.name
            for one in configured
            if any(rules.same_listener(mine, theirs) for mine in one.listen for theirs in hop.listen)
        )
        known = next(same, None)
        called = called | {hop.name: known or _free_name(hop.name, hop.listen, taken)}
        if known is None:
            new.append(hop)
    return [
        *configured,
        *(replace(hop, name=called[hop.name], to=tuple(called.get(name, name) for name in hop.to)) for hop in new),
    ]


def _free_name(name: str, endpoints: Sequence[Endpoint], taken: Sequence[str]) -> str:
    return name if name not in taken else f"{name}-{endpoints[0].port}"


def _chained(hops: Sequence[HopSettings], engines: tuple[str, ...]) -> list[Hop]:
    """Return hops, those without ``to`` as a chain in their order, the last of which forwards to all engines."""
    after = dict(pairwise(hop.name for hop in hops if not hop.to))
    return [
        Hop(
            name=str(hop.name),
            listen=tuple(address.endpoint for address in hop.listen),
            to=tuple(map(str, hop.to or ([after[hop.name]] if hop.name in after else engines))),
            klass=None if hop.klass is None else str(hop.klass),
        )
        for hop in hops
    ]


def _check_apart(hop: Hop, engines: Sequence[Engine]) -> None:
    """Refuse a hop that listens where an engine is: one of the two addresses must be that of the other."""
    for endpoint in hop.listen:
        own = {endpoint}
        if endpoint.address is not None and ipaddress.ip_address(endpoint.address).is_loopback:
            own.add(Endpoint(None, endpoint.port))
        for engine in engines:
            if own & set(engine.endpoints):
                raise SettingsError(
                    f"hops say that {hop.name} listens on {endpoint}, where engine {engine.name} is; expected the "
                    "proxy's own address, and for the engine the address behind it"
                )


def _outermost_first(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    by_name = {hop.name: hop for hop in hops}
    callers: dict[str, list[str]] = {name: [] for name in by_name}
    for hop in hops:
        for name in hop.to:
            if name in callers:
                callers[name].append(hop.name)
    try:
        return tuple(by_name[name] for name in TopologicalSorter(callers).static_order())
    except CycleError:  # among proxies that were found: they call each other, and none is the outermost
        return tuple(hops)
