"""What must hold between settings that are each right by themselves."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from tokengap.config.file import KeyPath
from tokengap.config.settings import HopSettings, Settings
from tokengap.topology import BATCH, ENGINE_HOP, INTERACTIVE, Endpoint

#: Below this, in seconds, beats would spend the host rather than watch it.
LEAST_INTERVAL: Final = 0.05


def broken(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Yield each rule that does not hold: the key path of the value, and what is wrong with it and expected."""
    if settings.interval < LEAST_INTERVAL:
        yield ("interval",), f"is {settings.interval}; expected {LEAST_INTERVAL}s or more"
    if settings.age_cut >= settings.deadline:
        yield ("age_cut",), f"is {settings.age_cut}; expected less than the deadline, {settings.deadline}"
    if INTERACTIVE in settings.classes:
        yield (
            ("classes", INTERACTIVE),
            f"names {INTERACTIVE}; expected another class, this one has the setting deadline",
        )
    if settings.dcgm is not None and not settings.gpu:
        yield ("dcgm",), "names where to read GPUs, while gpu says not to; expected only one of the two"
    yield from _gpus(settings)
    yield from _names(settings)
    yield from _classes(settings)
    yield from _listeners(settings)
    if not settings.auto:  # otherwise a hop may forward to what is yet to be found
        yield from interfaces(settings, [hop.name for hop in settings.hops])
        yield from targets(settings.hops, [one.name for _, _, one in _engines_and_hops(settings)])


def _names(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    seen: set[str] = set()
    for key, index, one in _engines_and_hops(settings):
        if key == "hops" and one.name == ENGINE_HOP:
            yield (key, index, "name"), f"is {one.name}, which stands for the engines themselves; expected another name"
        if one.name in seen:
            yield (key, index, "name"), f"is {one.name} as that of another engine or hop; expected names that differ"
        seen.add(one.name)


def _gpus(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """A GPU may serve several engines, so only one that stands twice at the same engine is a mistake."""
    for index, engine in enumerate(settings.engines):
        for at, uuid in enumerate(engine.gpus):
            if uuid in engine.gpus[:at]:
                yield ("engines", index, "gpus"), f"names {uuid} twice; expected each GPU once"


def _classes(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    known = (INTERACTIVE, *settings.classes)
    for index, sign in enumerate(settings.admit_signs):
        if sign.parts[0] not in (*known, BATCH):
            yield ("admit_signs", index), f"is of {sign.parts[0]}; expected one of {', '.join((*known, BATCH))}"
    for key, index, one in _engines_and_hops(settings):
        if one.klass is not None and one.klass not in known:
            yield (key, index, "class"), f"is {one.klass}; expected one of {', '.join(known)}, or one more in classes"


def _engines_and_hops(settings: Settings) -> Iterator[tuple[str, int, Any]]:
    for index, engine in enumerate(settings.engines):
        yield "engines", index, engine
    for index, hop in enumerate(settings.hops):
        yield "hops", index, hop


def _listeners(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    seen: list[tuple[str, Endpoint]] = []
    for index, hop in enumerate(settings.hops):
        mine = [(hop.name, address.endpoint) for address in hop.listen]
        for _, endpoint in mine:
            for other, theirs in seen:
                if same_listener(endpoint, theirs):
                    yield (
                        ("hops", index, "listen"),
                        f"has {endpoint} for {hop.name}, where {other} listens; expected addresses that differ",
                    )
        seen += mine


def same_listener(one: Endpoint, other: Endpoint) -> bool:
    """Tell whether two addresses of this host could be of one listening socket."""
    return one.port == other.port and (one.address == other.address or None in (one.address, other.address))


def interfaces(settings: Settings, hops: Sequence[str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with the interfaces of proxies, ``hops`` being the names of all hops."""
    seen: set[str] = set()
    for key in ("haproxy_socket", "envoy_admin", "nginx_status"):
        for index, one in enumerate(getattr(settings, key)):
            hop = one.hop or (hops[0] if len(hops) == 1 else "")
            if not hops:
                yield (key, index), "is of a proxy, and no hop is watched; expected one, such as --hop edge=:8080"
            elif not hop:
                yield (
                    (key, index),
                    f"does not say of which hop it is; expected one of {', '.join(hops)}, and = before it",
                )
            elif hop not in hops:
                expected = difflib.get_close_matches(hop, hops, n=1) or hops
                yield (key, index), f"is of {hop}; expected {' or '.join(expected)}"
            elif hop in seen:
                yield (key, index), f"is of {hop} as another interface is; expected one for each hop"
            seen.add(hop)


def targets(hops: Sequence[HopSettings], known: Sequence[str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with where hops forward to, ``known`` being the names of all engines and hops."""
    for index, hop in enumerate(hops):
        others = [name for name in known if name != hop.name]
        for name in hop.to:
            if name not in others:
                expected = difflib.get_close_matches(name, others, n=1) or others
                yield ("hops", index, "to"), f"is {name} for {hop.name}; expected {' or '.join(expected)}"
    try:
        TopologicalSorter({hop.name: hop.to for hop in hops}).prepare()
    except CycleError as error:
        ring = " -> ".join(reversed(error.args[1]))
        yield ("hops",), f"form a ring, {ring}; expected ways that end at an engine"
