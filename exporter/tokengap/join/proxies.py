"""What proxies tell about themselves, as totals that never fall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokengap.readings import ProxySnapshot, Readings
from tokengap.view import ProxyView


@dataclass(frozen=True, slots=True)
class Total:
    """A counter of a proxy: what it said last, and how much it grew since it was first read."""

    last: int | None = None
    grown: float | None = None

    def plus(self, now: int | None, *, restarted: bool) -> Total:
        """Take a new value in. After a restart, or a fall, the value is the new base: what was lost nobody knows."""
        if now is None:
            return self
        same = self.last is not None and now >= self.last and not restarted
        return Total(now, (self.grown or 0.0) + (now - (self.last or 0) if same else 0))


@dataclass(frozen=True, slots=True)
class ProxyMemory:
    """What is remembered of one proxy between beats."""

    program: str = ""
    uptime: float | None = None
    client_aborts: Total = field(default_factory=Total)
    resets: Total = field(default_factory=Total)


def observe(memories: Mapping[str, ProxyMemory], readings: Readings) -> Mapping[str, ProxyMemory]:
    """Take in what was read in this beat."""
    new = dict(memories)
    for hop, reading in readings.proxies.items():
        if (told := reading.value) is not None:
            new[hop] = _remember(memories.get(hop, ProxyMemory()), told)
    return new


def _remember(memory: ProxyMemory, told: ProxySnapshot) -> ProxyMemory:
    restarted = memory.uptime is not None and told.uptime is not None and told.uptime < memory.uptime
    return ProxyMemory(
        told.program,
        told.uptime,
        memory.client_aborts.plus(told.client_aborts, restarted=restarted),
        memory.resets.plus(told.resets, restarted=restarted),
    )


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
