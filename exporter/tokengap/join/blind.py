"""What cannot be seen of each hop, and why: told by its sockets, by its processes and by the proxy itself.

==================  ==================================================  ===============================================
blind spot          what tells of it                                    what it means
==================  ==================================================  ===============================================
``http2_clients``   several requests on one client socket; small        the kernel cannot tell their streams apart: a
                    frames amid an answer; the proxy's own count        stream that is reset simply ends
``http3_clients``   the proxy's own count; else a UDP socket of the     no TCP socket at all: their requests have no
                    hop's processes on a port it listens on             client here, and none of them is an orphan
``unix_upstream``   clients get answers or wait, nothing leads on by    the hop's requests are not followed; the
                    TCP, and its processes are connected to some path   engine's tokens for them are unattributed
``load_balancer``   many kept connections from one or two addresses,    who left there stays here until the one in
                    and the hop before is not watched                   front lets go: numbers are as seen at this hop
==================  ==================================================  ===============================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokengap.join.signs import Signs
from tokengap.readings import ProxySnapshot, Readings, UnseenSockets
from tokengap.topology import Hop
from tokengap.view import BLIND_SPOTS, BlindSpot, BlindSpotView

#: Seconds for which a sign counts after it was seen last: clients come and go, what they are changes rarely.
SIGN_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What is known of one hop in this beat. ``signs`` is None where sockets could not be read."""

    hop: Hop
    index: int
    signs: Signs | None
    told: ProxySnapshot
    unseen: UnseenSockets
    inner: bool

    def shows(self, which: str) -> bool | None:
        """Whether its sockets show a sign, None where they could not be read."""
        return None if self.signs is None else self.index in getattr(self.signs, which)


def _http2(e: _Evidence) -> tuple[bool | None, str]:
    if e.told.multiplexes:
        n, streams = e.told.h2_connections, e.told.h2_streams
        if n is None:
            return True, f"{e.told.program} has {e.told.streams} requests at work for {e.told.connections} connections"
        return True, f"{e.told.program} has {_many(n, 'connection')} of HTTP/2 with {_many(streams or 0, 'stream')}"
    if e.shows("multiplexed"):
        return True, "several requests came over one connection at once, or frames amid an answer"
    return (e.shows("multiplexed") if e.told.multiplexes is None else False), ""


def _http3(e: _Evidence) -> tuple[bool | None, str]:
    if e.told.h3_connections is not None:
        return e.told.h3_connections > 0, f"{e.told.program} has {_many(e.told.h3_connections, 'connection')} of HTTP/3"
    if e.unseen.quic is None:
        return None, ""
    ports = ", ".join(f":{port}" for port in e.unseen.quic)
    return bool(ports), f"its processes listen on UDP {ports}, as for HTTP/3"


def _unix(e: _Evidence) -> tuple[bool | None, str]:
    unfed = e.shows("unfed")
    if not unfed or e.unseen.unix is None:
        return (None if unfed is None or unfed else False), ""
    return bool(e.unseen.unix), f"no TCP connection leads on, and it is connected to {', '.join(e.unseen.unix[:3])}"


def _load_balancer(e: _Evidence) -> tuple[bool | None, str]:
    if e.inner:
        return False, ""
    return e.shows("relayed"), "its clients come from one or two addresses, and keep their connections across requests"


_TELLS = {
    "http2_clients": _http2,
    "http3_clients": _http3,
    "unix_upstream": _unix,
    "load_balancer": _load_balancer,
}


@dataclass(frozen=True, slots=True)
class Sign:
    """When a blind spot was last seen, and what was said of it."""

    at: float
    why: str


def blinded(readings: Readings) -> frozenset[int]:
    """Return the hops, by index, that have clients now whom no socket tells apart, by what is known besides sockets."""
    hops = readings.topology.hops
    found = (
        i for i, hop in enumerate(hops) if _told(readings, hop).multiplexes or _http3(_beside(readings, i, hop))[0]
    )
    return frozenset(found)


def observe(
    before: Mapping[tuple[str, str], Sign], readings: Readings, signs: Signs | None
) -> tuple[Mapping[tuple[str, str], Sign], tuple[BlindSpotView, ...]]:
    """Take this beat's signs in. Returns what is remembered, and each hop's blind spots."""
    remembered = {key: sign for key, sign in before.items() if readings.at - sign.at <= SIGN_SECONDS}
    views = []
    for index, hop in enumerate(readings.topology.hops):
        evidence = _beside(readings, index, hop, signs)
        for kind in BLIND_SPOTS:
            blind, why = _TELLS[kind](evidence)
            if blind:
                remembered[hop.name, kind] = Sign(readings.at, why)
            views.append(_view(hop.name, kind, blind, remembered.get((hop.name, kind))))
    return remembered, tuple(views)


def _view(hop: str, kind: BlindSpot, blind: bool | None, sign: Sign | None) -> BlindSpotView:
    return BlindSpotView(hop, kind, blind, "") if sign is None else BlindSpotView(hop, kind, True, sign.why)


def _beside(readings: Readings, index: int, hop: Hop, signs: Signs | None = None) -> _Evidence:
    table = readings.processes.value
    unseen = table.unseen.get(hop.name, UnseenSockets()) if table is not None else UnseenSockets()
    inner = any(hop.name in other.to for other in readings.topology.hops)
    return _Evidence(hop, index, signs, _told(readings, hop), unseen, inner)


def _told(readings: Readings, hop: Hop) -> ProxySnapshot:
    reading = readings.proxies.get(hop.name)
    return (reading.value if reading is not None else None) or ProxySnapshot("")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
