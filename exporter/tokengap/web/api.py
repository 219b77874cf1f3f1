"""The JSON under ``/api/``: streams one by one, engines, GPUs, sources. What has no place in labels stands here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import IPv6Address
from typing import Any

import msgspec
import numpy as np

from tokengap.series.engines import public_url
from tokengap.topology import Endpoint
from tokengap.view import CLIENTS, View

_CONNECTED = (CLIENTS.index("connected"), CLIENTS.index("stalled"))


class StreamRow(msgspec.Struct, frozen=True):
    """One stream in flight. ``None``: not known, or (``leaks_at``) nowhere, or (slack) no longer waiting.

    ``blind_spots`` are those of the hop at which it entered: what this row rests on may be less than it seems.
    """

    id: int
    engine: str | None
    hop: str
    client: str
    client_connected: int
    leaks_at: str | None
    age_seconds: float
    first_byte: bool
    tokens: float
    useful: float
    orphaned: float
    deadline_slack_seconds: float | None
    client_address: str | None
    blind_spots: tuple[str, ...]


def stream_rows(view: View, *, show_addresses: bool) -> list[StreamRow]:
    """Return a row per stream of the view. Clients' addresses are masked unless ``show_addresses``."""
    engines = [engine.name for engine in view.engines]
    blind = {hop: tuple(s.kind for s in view.blind_spots if s.hop == hop and s.blind) for hop in view.hop_names}
    return [
        StreamRow(
            id=stream,
            engine=engines[engine] if engine >= 0 else None,
            hop=view.hop_names[hop],
            client=CLIENTS[client],
            client_connected=int(client in _CONNECTED),
            leaks_at=view.hop_names[leaks_at] if leaks_at >= 0 else None,
            age_seconds=round(age, 3),
            first_byte=first_byte,
            tokens=round(tokens, 2),
            useful=round(useful, 2),
            orphaned=round(orphaned, 2),
            deadline_slack_seconds=None if math.isnan(slack) else round(slack, 3),
            client_address=_address(src_hi, src_lo, port) if show_addresses else _masked(src_hi, src_lo),
            blind_spots=blind[view.hop_names[hop]],
        )
        # tolist() turns the columns into Python numbers at once, 10 times faster than field by field.
        for (
            stream,
            engine,
            hop,
            client,
            leaks_at,
            age,
            first_byte,
            tokens,
            useful,
            orphaned,
            slack,
            src_hi,
            src_lo,
            port,
        ) in view.streams.tolist()
    ]


def engines_json(view: View, limit: int, offset: int) -> bytes:
    """Return ``/api/engines``, as many behind an offset: each engine's view, its evidence and what is derived from it
    included."""
    rows: list[dict[str, Any]] = [
        msgspec.to_builtins(replace(engine, url=public_url(engine.url)), enc_hook=plain)
        | {"utilization": engine.utilization}
        for engine in view.engines[offset : offset + limit]
    ]
    return msgspec.json.encode(rows)


def hops_json(view: View) -> bytes:
    """Return ``/api/hops``: of each hop what its proxy tells about itself, None where it is not asked or does not tell,
    and its blind spots, each with whether it is one (None: not known) and why."""
    proxies = {proxy.hop: msgspec.to_builtins(proxy) for proxy in view.proxies}
    rows = [
        {
            "hop": hop,
            "proxy": proxies.get(hop),
            "blind_spots": {
                spot.kind: {"blind": spot.blind, "why": spot.why} for spot in view.blind_spots if spot.hop == hop
            },
        }
        for hop in view.hop_names[:-1]
    ]
    return msgspec.json.encode(rows)


def gpus_json(view: View) -> bytes:
    """Return ``/api/gpus``: why there are GPUs or none, and each GPU with all that is known of it, its processes
    included."""
    return msgspec.json.encode(msgspec.to_builtins(view.gpus, enc_hook=plain, str_keys=True))


def sources_json(view: View) -> bytes:
    """Return ``/api/sources``: each source, up or not and why."""
    return msgspec.json.encode(view.sources, enc_hook=plain)


def plain(value: object) -> object:
    """Return what msgspec does not encode by itself as what it does: any mapping, a number of numpy."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a view")


def _address(high: int, low: int, port: int) -> str | None:
    """Return ``203.0.113.7:51234`` or ``[2001:db8::7]:51234``; None when the address is not known (all zero)."""
    if not high and not low:
        return None
    address = IPv6Address(high << 64 | low)
    return str(Endpoint(str(address.ipv4_mapped or address), port))


def _masked(high: int, low: int) -> str | None:
    """Return the network a client is in: ``203.0.113.x:*`` or ``[2001:db8:1::x]:*``, the last 80 bits hidden."""
    if not high and not low:
        return None
    mapped = IPv6Address(high << 64 | low).ipv4_mapped
    if mapped is not None:
        return str(mapped).rpartition(".")[0] + ".x:*"
    return f"[{IPv6Address(high >> 16 << 80)}x]:*"
