"""What proxies tell about themselves, as totals that never fall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokengap.readings import ProxySnapshot, Readings
from tokengap.view import ProxyView

#: Seconds that an uptime, in whole ones, and the instant at which it was told may be apart.
COARSE = 2.0


@dataclass(frozen=True, slots=True)
class Total:
    """A counter of a proxy: what it said last, and how much it grew since it was first read."""

    last: int | None = None
    grown: float | None = None

    def plus(self, now: int | None, *, restarted: bool) -> Total:
        """Take a new value in. After a restart it counted all of it since. A fall without one (``clear counters``, a
        listener that was taken away) makes the value the new base: what was lost nobody knows."""
        if now is None:
            return self
        base = 0 if restarted else self.last
        return Total(now, (self.grown or 0.0) + (now - base if base is not None and now >= base else 0))


@dataclass(frozen=True, slots=True)
class ProxyMemory:
    """What is remembered of one proxy between beats. ``at``: when it was read (monotonic seconds)."""

    program: str = ""
    at: float = 0.0
    uptime: float | None = None
    client_aborts: Total = field(default_factory=Total)
    resets: Total = field(default_factory=Total)


def observe(memories: Mapping[str, ProxyMemory], readings: Readings) -> Mapping[str, ProxyMemory]:
    """Take in what was read in this beat."""
    new = dict(memories)
    for hop, reading in readings.proxies.items():
        if (told := reading.value) is not None:
            new[hop] = _remember(memories.get(hop, ProxyMemory()), told, reading.at)
    return new


def _remember(memory: ProxyMemory, told: ProxySnapshot, at: float) -> ProxyMemory:
    restarted = _restarted(memory, told, at)
    return ProxyMemory(
        told.program,
        at,
        told.uptime,
        memory.client_aborts.plus(told.client_aborts, restarted=restarted),
        memory.resets.plus(told.resets, restarted=restarted),
    )


def _restarted(memory: ProxyMemory, told: ProxySnapshot, at: float) -> bool:
    """Whether the proxy was started since it was read before: it is younger than that, and than it would be by now, or
    has counted less.

    A clock that is set back makes HAProxy younger too, which counts by the wall; only not so young."""
    if memory.uptime is None or told.uptime is None:
        return False
    since = at - memory.at
    younger = told.uptime <= memory.uptime + since - COARSE
    counted = ((memory.client_aborts.last, told.client_aborts), (memory.resets.last, told.resets))
    fell = any(last is not None and now is not None and now < last for last, now in counted)
    return told.uptime <= since and (younger or fell)


def views(
    memories: Mapping[str, ProxyMemory], readings: Readings, without_sockets: frozenset[str]
) -> tuple[ProxyView, ...]:
    """Return what is known of each proxy. ``without_sockets``: hops with neither a client nor a request upstream, for
    longer than a beat. Totals stay while the proxy cannot be read; what is only true now does not."""
    found = []
    for hop, memory in memories.items():
        reading = readings.proxies.get(hop)
        told = reading.value if reading is not None else None
        told = told or ProxySnapshot(memory.program)
        found.append(
            ProxyView(
                hop=hop,
                program=memory.program,
                streams=told.streams,
                queued=told.queued,
                oldest_queued=told.oldest_queued,
                client_aborts=memory.client_aborts.grown,
                resets=memory.resets.grown,
                h2_connections=told.h2_connections,
                h2_streams=told.h2_streams,
                stale=bool(told.streams) and hop in without_sockets and not told.h3_connections,
            )
        )
    return tuple(found)
