"""What proxies tell about themselves, where their own interfaces are named, and what cannot be seen of each hop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokengap.series.declare import Sample, Series
from tokengap.view import ProxyView, View


def _per_hop(value: Callable[[ProxyView], float | None]) -> Callable[[View], Iterable[Sample]]:
    def read(view: View) -> Iterable[Sample]:
        for proxy in view.proxies:
            known = value(proxy)
            if known is not None:
                yield Sample((proxy.hop,), known)

    return read


PROXY_STREAMS = Series(
    name="tokengap_proxy_streams",
    kind="gauge",
    help="Requests in flight by the proxy's own count, those it queues and each stream of HTTP/2 included. Of the "
    "whole proxy; above tokengap_streams where the kernel cannot tell streams apart.",
    labels=("hop",),
    read=_per_hop(lambda proxy: proxy.streams),
)

PROXY_QUEUED = Series(
    name="tokengap_proxy_queued_streams",
    kind="gauge",
    help="Requests that wait inside the proxy for a server, by its own count: HAProxy's queues, Envoy's pending "
    "requests. The engine does not know of them.",
    labels=("hop",),
    read=_per_hop(lambda proxy: proxy.queued),
)

PROXY_QUEUE_AGE = Series(
    name="tokengap_proxy_queue_age_seconds",
    kind="gauge",
    help="Age of the oldest request that waits inside the proxy, in whole seconds; 0 when none waits, missing where it "
    "is not told (HAProxy tells it at level operator).",
    labels=("hop",),
    read=_per_hop(lambda proxy: proxy.oldest_queued),
)

PROXY_CLIENT_ABORTS = Series(
    name="tokengap_proxy_client_aborts_total",
    kind="counter",
    help="Requests whose client left before the end, as the proxy noticed it, since it was first read by this "
    "exporter. A client that vanished is noticed about 15 minutes late.",
    labels=("hop",),
    read=_per_hop(lambda proxy: proxy.client_aborts),
)

PROXY_RESETS = Series(
    name="tokengap_proxy_http2_resets_total",
    kind="counter",
    help="Resets of HTTP/2 streams by clients whose connection went on, as the proxy counts them (a client may reset "
    "one again for data that was under way), since it was first read by this exporter. No socket shows them.",
    labels=("hop",),
    read=_per_hop(lambda proxy: proxy.resets),
)

PROXY_HTTP2_CONNECTIONS = Series(
    name="tokengap_proxy_http2_connections",
    kind="gauge",
    help="Open connections of clients on HTTP/2, by the proxy's own count.",
    labels=("hop",),
    read=_per_hop(lambda proxy: proxy.h2_connections),
)

PROXY_HTTP2_STREAMS = Series(
    name="tokengap_proxy_http2_streams",
    kind="gauge",
    help="Streams in flight over connections of clients on HTTP/2, by the proxy's own count.",
    labels=("hop",),
    read=_per_hop(lambda proxy: proxy.h2_streams),
)

BLIND_SPOT = Series(
    name="tokengap_blind_spot",
    kind="gauge",
    help="1 where something of a hop cannot be seen, 0 where not, missing where that is not known: http2_clients "
    "(requests share a connection), http3_clients (UDP), unix_upstream (no TCP towards the engine), "
    "load_balancer (clients come through something that keeps its connections).",
    labels=("hop", "kind"),
    read=lambda view: (
        Sample((spot.hop, spot.kind), float(spot.blind)) for spot in view.blind_spots if spot.blind is not None
    ),
)

PROXIES = (
    PROXY_STREAMS,
    PROXY_QUEUED,
    PROXY_QUEUE_AGE,
    PROXY_CLIENT_ABORTS,
    PROXY_RESETS,
    PROXY_HTTP2_CONNECTIONS,
    PROXY_HTTP2_STREAMS,
    BLIND_SPOT,
)
