"""Sockets over time: which side of which hop each one is, and what moved since the beat before.

The kernel gives totals and ages; here they become growth and instants. One row of :data:`TRACK` per socket, sorted by
cookie, is all that is kept between beats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokengap.readings import (
    CLOSE_WAIT,
    ESTABLISHED,
    SOCKET,
    UNKNOWN,
    V4_MAPPED,
    Namespace,
    SocketTable,
    as_ipv6,
)
from tokengap.topology import Endpoint, Topology

_LOOPBACK_V4 = np.uint64(V4_MAPPED | 0x7F000000)
_LOOPBACK_V6 = np.uint64(1)
#: Milliseconds by which two ages of one socket may seem to differ: ticks of the kernel, rounded.
TICKS = 8

_MIX = np.uint64(0x9E3779B97F4A7C15)

#: What is remembered of a socket. ``asked`` is the instant of the newest request on it: of the last data sent towards
#: the engine, or received from the client. ``moved`` / ``grew``: when bytes_acked / bytes_received last grew. The
#: counters are those of the beat before; ``begun`` is what had been written when the newest request came, and
#: ``question`` the bytes of that request, 0 where its beginning was not seen; ``piece``: it is not answered, more of it
#: may come. All instants are monotonic seconds.
TRACK = np.dtype(
    [
        ("cookie", "u8"),
        ("sent", "i8"),
        ("acked", "i8"),
        ("written", "i8"),
        ("begun", "i8"),
        ("received", "i8"),
        ("question", "i8"),
        ("piece", "?"),
        ("moved", "f8"),
        ("grew", "f8"),
        ("asked", "f8"),
    ]
)


def locate(cookies: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return for each wanted cookie its row in the sorted ``cookies``, or -1."""
    if not len(cookies):
        return np.full(len(wanted), -1, dtype=np.intp)
    rows = np.searchsorted(cookies, wanted)
    rows[rows == len(cookies)] = 0
    return np.where(cookies[rows] == wanted, rows, -1)


def locate_among(keys: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return for each wanted key its place in ``keys``, which are in no order, or -1."""
    order = np.argsort(keys)
    found = locate(keys[order], wanted)
    return np.where(found >= 0, order[found], -1) if len(keys) else found


@dataclass(frozen=True, slots=True)
class Tracked:
    """The sockets of this beat, sorted by cookie, with what changed. Rows of all columns correspond.

    ``known``: seen in the beat before. ``ended``: destroyed since then; the row holds its final counters, its ages are
    those of its last moment and say nothing about now. ``d_*``: growth since the beat before; for a socket that is new
    since then, since its birth; on the very first beat zero, since nobody saw what came before.
    """

    rows: SocketTable
    track: NDArray[np.void]
    known: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    d_sent: NDArray[np.int64]
    d_acked: NDArray[np.int64]
    d_written: NDArray[np.int64]
    d_received: NDArray[np.int64]

    def find(self, cookies: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the row of each cookie, or -1."""
        return locate(self.rows["cookie"], cookies)

    def among(self, cookies: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Mark the rows whose cookie is one of these."""
        return np.asarray(locate(np.unique(cookies), self.rows["cookie"]) >= 0, dtype=np.bool_)


def nobody() -> SocketTable:
    """Return one row that stands for "no such socket": its cookie sorts last, so that index -1, what a search answers
    when it finds nothing, reads harmless zeros instead of somebody else's row."""
    row = np.zeros(1, dtype=SOCKET)
    row["cookie"] = np.iinfo(np.uint64).max
    return row


def follow(
    before: NDArray[np.void] | None,
    rows: SocketTable,
    ended: NDArray[np.bool_],
    from_client: NDArray[np.bool_],
    at: float,
) -> Tracked:
    """Set this beat's sockets against those of the beat before.

    ``rows`` is sorted by cookie and ends with :func:`nobody`; ``ended`` and ``from_client`` (the socket faces a client)
    are aligned with it. ``before`` is None on the first beat.
    """

    track = np.zeros(len(rows), dtype=TRACK)
    track["cookie"] = rows["cookie"]
    track["sent"] = rows["bytes_sent"]
    track["acked"] = rows["bytes_acked"]
    told = rows["bytes_acked"] != UNKNOWN
    written = rows["bytes_acked"] + rows["wqueue"]
    fin = (rows["state"] != ESTABLISHED) & (rows["state"] != CLOSE_WAIT) & (written == rows["bytes_sent"] + 1)
    track["written"] = np.where(told, written - fin, UNKNOWN)  # our FIN takes a place among the bytes, and is none
    track["received"] = np.where(rows["bytes_received"] != UNKNOWN, rows["bytes_received"] - rows["rqueue"], UNKNOWN)

    old = np.full(len(rows), -1, dtype=np.intp) if before is None else locate(before["cookie"], rows["cookie"])
    known = old >= 0
    past = np.zeros(len(rows), dtype=TRACK)
    if before is not None:
        past[known] = before[old[known]]
    else:
        past = track.copy()  # the first beat: what came before it is not ours to count
        past["begun"] = track["written"]

    def growth(column: str) -> NDArray[np.int64]:
        told = (track[column] != UNKNOWN) & (past[column] != UNKNOWN)
        return np.where(told, np.maximum(track[column] - past[column], 0), 0)

    d_sent, d_acked, d_written, d_received = (growth(column) for column in ("sent", "acked", "written", "received"))
    d_question, d_answer = np.where(from_client, d_received, d_sent), np.where(from_client, d_written, d_received)
    # A request that comes in pieces grows until its answer does.
    goes_on = past["piece"] | ~known
    track["question"] = np.where(d_question > 1, np.where(goes_on, past["question"], 0) + d_question, past["question"])
    track["piece"] = np.where(d_question > 1, d_answer == 0, goes_on & (d_answer == 0))

    asks_anew = known & (d_received > 1)  # 1: the peer's FIN
    track["begun"] = np.where(asks_anew, past["written"], np.where(known | (before is None), past["begun"], 0))
    before_it = asks_anew & ~ended & (rows["last_data_sent"] > rows["last_data_recv"] + TICKS) & (rows["wqueue"] == 0)
    track["begun"] = np.where(before_it, track["written"], track["begun"])

    # Instants. A destroyed socket's ages count from its end, which we did not see: keep what was known.
    live = ~ended
    ages = np.where(from_client, rows["last_data_recv"], rows["last_data_sent"])
    track["asked"] = np.where(live & (ages >= 0), at - ages / 1e3, np.where(known, past["asked"], at))
    ack_age = np.where(live & (rows["last_ack_recv"] >= 0), rows["last_ack_recv"] / 1e3, 0.0)
    track["moved"] = np.where((d_acked > 0) | ~known, at - ack_age, past["moved"])
    track["moved"][~told] = np.nan
    data_age = np.where(live & (rows["last_data_recv"] >= 0), rows["last_data_recv"] / 1e3, 0.0)
    track["grew"] = np.where((d_received > 0) | ~known, at - data_age, past["grew"])
    return Tracked(rows, track, known, ended, d_sent, d_acked, d_written, d_received)


def remember(before: NDArray[np.void] | None, now: Tracked, needed: NDArray[np.uint64]) -> NDArray[np.void]:
    """Return what the next beat needs of the sockets: those of this one, and of ``before`` the ``needed`` that are in
    no table any more and were not said to have ended. A proxy may hold a reset connection for long, and the counters at
    its end go on from here."""
    track = now.track[~now.ended]
    if before is None:
        return track
    lost = np.unique(needed[(needed > 0) & (now.find(needed) < 0)])
    rows = locate(before["cookie"], lost)
    kept = before[rows[rows >= 0]]
    return np.sort(np.concatenate([track, kept]), order="cookie") if len(kept) else track


@dataclass(frozen=True, slots=True)
class Sides:
    """For each row of a socket table, which side of what it is; -1 for none. Indices into the topology's tuples.

    ``down``: the hop whose client this socket faces. ``engine_side``: the engine that accepted it. ``to_engine`` and
    ``to_hop``: what its remote end is.
    """

    down: NDArray[np.int32]
    engine_side: NDArray[np.int32]
    to_engine: NDArray[np.int32]
    to_hop: NDArray[np.int32]


def sides(table: SocketTable, topology: Topology, namespaces: Sequence[Namespace] = ()) -> Sides:
    """Tell which side of which hop or engine each socket is, by its two addresses.

    With several network namespaces "this host" is all of them, and an engine at an address of one of them is that
    namespace's loopback too. Where two claims meet, the one that names an address wins.
    """
    named = {name for hop in topology.hops for name in hop.to}
    here = np.sort(_mix(*_columns(address for one in namespaces for address in one.addresses)))

    def match(endpoints: list[tuple[int, Endpoint]], end: str, *, of_engine: bool = False) -> NDArray[np.int32]:
        found = np.full(len(table), -1, dtype=np.int32)
        for index, endpoint in sorted(endpoints, key=lambda one: one[1].address is not None):
            found[_at(table, endpoint, end, here)] = index
            if of_engine and namespaces:
                found[_inside(table, endpoint, end, namespaces)] = index
        return found

    hops = [(i, e) for i, hop in enumerate(topology.hops) for e in hop.listen]
    engines = [(i, e) for i, engine in enumerate(topology.engines) for e in engine.endpoints]
    next_hops = [(i, e) for i, hop in enumerate(topology.hops) if hop.name in named for e in hop.listen]
    return Sides(
        match(hops, "src"),
        match(engines, "src", of_engine=True),
        match(engines, "dst", of_engine=True),
        match(next_hops, "dst"),
    )


def _at(table: SocketTable, endpoint: Endpoint, end: str, here: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mark the sockets whose local (``src``) or remote (``dst``) end is the endpoint; ``here`` as of :func:`_mix`."""
    mask = table["sport" if end == "src" else "dport"] == endpoint.port
    if endpoint.address is not None and endpoint.address not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        hi, lo = halves(endpoint.address)
        mask = mask & (table[f"{end}_hi"] == hi) & (table[f"{end}_lo"] == lo)
    elif end == "dst":
        # "This host": a loopback address, the very address that we call from, or one of a watched namespace.
        ours = on_this_host(table, end)
        if len(here):
            ours |= locate(here, _mix(table["dst_hi"], table["dst_lo"])) >= 0
        mask = mask & ours
    return np.asarray(mask, dtype=np.bool_)


def _inside(
    table: SocketTable, endpoint: Endpoint, end: str, namespaces: Sequence[Namespace]
) -> NDArray[np.bool_] | slice:
    """Mark the sockets whose end is the endpoint by the loopback of a namespace that has the endpoint's address."""
    if endpoint.address is None:
        return slice(0)
    at = [one.number for one in namespaces if as_ipv6(endpoint.address) in one.addresses]
    mask = table["sport" if end == "src" else "dport"] == endpoint.port
    return np.asarray(mask & np.isin(table["netns"], at) & _loopback(table, end), dtype=np.bool_)


def on_this_host(table: SocketTable, end: str) -> NDArray[np.bool_]:
    """Mark the sockets of which one end, as the addresses tell, is on this host whatever its addresses are."""
    return _loopback(table, end) | _to_itself(table)


def _loopback(table: SocketTable, end: str) -> NDArray[np.bool_]:
    """Mark the sockets of which one end is a loopback address."""
    hi, lo = table[f"{end}_hi"], table[f"{end}_lo"]
    v4 = (lo & np.uint64(0xFFFFFFFF_FF000000)) == _LOOPBACK_V4
    return np.asarray((hi == 0) & (v4 | (lo == _LOOPBACK_V6)), dtype=np.bool_)


def _to_itself(table: SocketTable) -> NDArray[np.bool_]:
    """Mark the sockets whose two addresses are one."""
    return np.asarray((table["dst_hi"] == table["src_hi"]) & (table["dst_lo"] == table["src_lo"]), dtype=np.bool_)


def _columns(addresses: Iterable[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return IPv6 addresses as their two halves, a column each."""
    halved = [(number >> 64, number & 0xFFFFFFFF_FFFFFFFF) for number in addresses]
    table = np.array(halved, dtype=np.uint64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _mix(hi: NDArray[np.uint64], lo: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one number for each address. Two of one host's few addresses are as good as never equal."""
    with np.errstate(over="ignore"):
        return np.asarray((hi * _MIX) ^ lo, dtype=np.uint64)


def halves(address: str) -> tuple[np.uint64, np.uint64]:
    """Return an IP literal as the two halves of an IPv6 address, IPv4 mapped."""
    number = as_ipv6(address)
    return np.uint64(number >> 64), np.uint64(number & 0xFFFFFFFF_FFFFFFFF)


def ages(table: SocketTable, towards_us: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the milliseconds since the newest byte of a question and of an answer on each socket.

    ``towards_us``: questions come in on it, as on an engine's own; they go out on the others.
    """
    received, sent = table["last_data_recv"], table["last_data_sent"]
    return np.where(towards_us, received, sent), np.where(towards_us, sent, received)


def connection_keys(table: SocketTable, *, reverse: bool = False) -> NDArray[np.uint64]:
    """Return a number for each socket's connection; ``reverse`` gives the number its other end has.

    A 64-bit mix of the four-tuple: with 100,000 sockets the chance of two being equal is about 3e-10. A connection that
    loops back has both ends in one network namespace, and an equal one may exist in each: there its number counts too.
    """
    near = ("src_hi", "src_lo", "sport")
    far = ("dst_hi", "dst_lo", "dport")
    key = np.zeros(len(table), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in (*far, *near) if reverse else (*near, *far):
            key = (key ^ table[column].astype(np.uint64)) * _MIX
            key ^= key >> np.uint64(29)
        if table["netns"].any():
            loops = _loopback(table, "src") | _loopback(table, "dst") | _to_itself(table)
            key ^= np.where(loops, table["netns"], 0).astype(np.uint64) * _MIX
    return key


def caller_keys(table: SocketTable, end: str, called: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return a number for who called which engine: the calling end (``src`` or ``dst`` of the row) and the engine.

    Where the address that was called is translated on the way (a service, a published port) this is what both ends of
    a connection still agree on.
    """
    key = called.astype(np.uint64)
    with np.errstate(over="ignore"):
        for column in (f"{end}_hi", f"{end}_lo", "sport" if end == "src" else "dport"):
            key = (key ^ table[column].astype(np.uint64)) * _MIX
            key ^= key >> np.uint64(29)
    return key
