"""Streams in flight, by hop and by the state of their client, and how streams ended.

Every engine is crossed with every hop and every client state, and reads 0 where there are no streams: the number of
series depends on what is configured and never on how much traffic there is.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokengap.series.declare import Distribution, Sample, Series
from tokengap.view import AGE_BOUNDS, CLIENTS, ENDINGS, StreamGroup, View


def _paths(view: View, seen: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Yield (engine, hop) for all that are configured, then what was seen beside them.

    Streams of no known engine (queued inside a proxy) are seen with an empty engine.
    """
    configured = [(engine.name, hop) for engine in view.engines for hop in view.hop_names]
    return dict.fromkeys((*configured, *seen))


def _groups(view: View) -> Iterable[StreamGroup]:
    """Yield one group per path and client state, empty ones included; nothing while no sockets can be read."""
    if view.accounting == "none":
        return
    found = {(group.engine, group.hop, group.client): group for group in view.groups}
    none = (0,) * (len(AGE_BOUNDS) + 1)
    for engine, hop in _paths(view, ((group.engine, group.hop) for group in view.groups)):
        for client in CLIENTS:
            yield found.get((engine, hop, client)) or StreamGroup(engine, hop, client, 0, none, 0.0, 0.0)


def _connected_ratio(view: View) -> Iterable[Sample]:
    streams: dict[tuple[str, str], int] = {}
    connected: dict[tuple[str, str], int] = {}
    for group in _groups(view):
        path = (group.engine, group.hop)
        streams[path] = streams.get(path, 0) + group.count
        connected[path] = connected.get(path, 0) + group.count * (group.client in ("connected", "stalled"))
    for path, count in streams.items():
        yield Sample(path, connected[path] / count if count else 1.0)


def _ended(view: View) -> Iterable[Sample]:
    for engine, hop in _paths(view, ((engine, hop) for engine, hop, _ in view.endings)):
        for how in ENDINGS:
            yield Sample((engine, hop, how), view.endings.get((engine, hop, how), 0))


STREAMS = Series(
    name="tokengap_streams",
    kind="gauge",
    help="Streams in flight at a hop towards an engine, by the state of their client: connected, stalled (alive but "
    "not reading), vanished (half-open), gone. The last two are orphans.",
    labels=("engine", "hop", "client"),
    read=lambda view: (Sample((g.engine, g.hop, g.client), g.count) for g in _groups(view)),
)

CLIENT_CONNECTED = Series(
    name="tokengap_client_connected_ratio",
    kind="gauge",
    help="Share of the streams in flight at a hop whose client is still there (connected or stalled), 0 to 1; 1 when "
    "no stream is in flight. Exactly 0 or 1 per stream on /api/streams.",
    labels=("engine", "hop"),
    read=_connected_ratio,
)

STREAM_AGE = Series(
    name="tokengap_stream_age_seconds",
    kind="gaugehistogram",
    help="Ages of the streams in flight, since their request: a distribution now, not since start: never rate(). "
    "Use histogram_quantile() on the buckets as they are.",
    labels=("engine", "hop", "client"),
    read=lambda view: (
        Sample((g.engine, g.hop, g.client), Distribution(AGE_BOUNDS, g.ages, g.age_sum)) for g in _groups(view)
    ),
)

STREAM_AGE_MAX = Series(
    name="tokengap_stream_age_max_seconds",
    kind="gauge",
    help="Age of the oldest stream in flight, in seconds since its request; 0 when there is none. An old stream whose "
    "client is gone or vanished is the leak.",
    labels=("engine", "hop", "client"),
    read=lambda view: (Sample((g.engine, g.hop, g.client), g.age_max) for g in _groups(view)),
)

STREAMS_ENDED = Series(
    name="tokengap_streams_ended_total",
    kind="counter",
    help="Streams that ended since this exporter started, by how: completed, cancelled (the client left and the engine "
    "was told), orphaned (the engine ran on without a client), failed.",
    labels=("engine", "hop", "how"),
    read=_ended,
)

STREAMS_IN_FLIGHT = (STREAMS, CLIENT_CONNECTED, STREAM_AGE, STREAM_AGE_MAX, STREAMS_ENDED)
