"""The rows and columns of the accuracy matrix, as values: ways to an engine, and ways to leave it.

A way is the proxies in front of the stand-in engine, each with what it does to clients that left. A column is what the
users do: how many come, who of them leaves, when and how.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from tokengap.lab.batching import Knobs
from tokengap.lab.gateway import gateway_part
from tokengap.lab.litellm import LEAKING, NEWEST, litellm
from tokengap.lab.proxies import PROXIES, Proxy, Wiring, haproxy_config, nginx_config
from tokengap.lab.users import Leaving, User
from tokengap.topology import ENGINE_HOP


@dataclass(frozen=True, slots=True)
class Way:
    """One row: ``hops`` are proxies, the outermost first, and whether each is made to leak.

    ``main`` rows are also run with less privilege. ``optional`` ones take an installation of their own.
    """

    name: str
    title: str
    hops: tuple[tuple[Proxy, bool], ...] = ()
    main: bool = False
    optional: bool = False
    engine_leaks: bool = False

    @property
    def hop_names(self) -> tuple[str, ...]:
        """The hops by the names that the exporter is told, outermost first."""
        return ("edge", "admit")[: len(self.hops)]

    @property
    def places(self) -> tuple[str, ...]:
        """Where tokens can be lost: the hops, and the engine itself."""
        return (*self.hop_names, ENGINE_HOP)

    def leaks_at(self, leaving: Leaving | None) -> str:
        """Return the hop that holds on to those who left. One who vanished is held by the first: it cannot know."""
        if leaving == "vanish":
            return self.places[0]
        if self.engine_leaks:
            return ENGINE_HOP
        leaking = [name for name, (_, leaks) in zip(self.hop_names, self.hops, strict=True) if leaks]
        return leaking[0] if leaking else self.places[0]


def _pooled(_: Any, wiring: Wiring) -> tuple[str, ...]:
    return gateway_part(wiring.listen, wiring.upstream, leak=wiring.leak, pool=True).command


_NGINX, _HAPROXY, _ENVOY, _NAIVE = (PROXIES[name] for name in ("nginx", "haproxy", "envoy", "naive"))
_BUFFERING = replace(_NGINX, config=partial(nginx_config, buffering=True))
_CACHING = replace(_NGINX, config=partial(nginx_config, cache=True))
_QUEUEING = replace(_HAPROXY, config=partial(haproxy_config, maxconn=4))
_POOLING = replace(_NAIVE, command=_pooled)

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("nginx", "nginx, proxy_buffering off", ((_NGINX, False),), main=True),
        Way("nginx-buffering", "nginx, proxy_buffering on", ((_BUFFERING, False),)),
        Way("nginx-ignore-abort", "nginx, proxy_ignore_client_abort on", ((_NGINX, True),)),
        Way("nginx-cache", "nginx, proxy_cache", ((_CACHING, True),)),
        Way("haproxy", "HAProxy as 2.6 comes", ((_HAPROXY, True),), main=True),
        Way("haproxy-maxconn", "HAProxy, maxconn 4", ((_QUEUEING, True),)),
        Way("envoy", "Envoy", ((_ENVOY, False),), main=True),
        Way("litellm-leaking", f"LiteLLM {LEAKING}", ((litellm(LEAKING), True),), optional=True),
        Way("litellm", "LiteLLM, the newest", ((litellm(NEWEST), True),), optional=True),
        Way("naive", "naive gateway", ((_NAIVE, True),), main=True),
        Way("pool", "naive gateway, pooled upstream", ((_POOLING, True),)),
        Way("chain", "nginx, then the naive gateway", ((_NGINX, False), (_NAIVE, True))),
        Way("direct", "no proxy", main=True),
        Way("direct-engine-leaks", "no proxy, engine leaks", engine_leaks=True),
        Way("nginx-engine-leaks", "nginx, engine leaks", ((_NGINX, False),), engine_leaks=True),
    )
}

#: Whether answers are asked for as a stream.
Kind: TypeAlias = Literal["streamed", "whole"]
KINDS: tuple[Kind, ...] = ("streamed", "whole")

#: Seconds between two users who come.
APART = 0.05


@dataclass(frozen=True, slots=True)
class Crowd:
    """Users, who come one after the other, and the engine they find. ``leaves`` are the numbers of those who leave,
    ``leave_at`` seconds after they asked; ``long_prompts`` of those whose prefill takes two seconds."""

    users: int = 8
    tokens: int = 300
    rate: float = 100.0
    slots: int = 8
    leaves: tuple[int, ...] = (1, 4, 6)
    leave_at: float = 1.2
    long_prompts: tuple[int, ...] = ()
    stalls: float = 0.0


@dataclass(frozen=True, slots=True)
class Column:
    """One column: how users leave, in a crowd that is another one where answers come whole.

    ``states`` are right for one who left; where ``absent``, also that its stream is at an end. ``within`` is the bar
    for it, seconds after the event.
    """

    name: str
    title: str
    leaving: Leaving | None
    states: frozenset[str]
    within: float | None
    crowd: Crowd
    whole: Crowd
    absent: bool = True
    network: bool = False

    def users(self, prefix: str, kind: Kind) -> list[User]:
        """Return the users in the order in which they come."""
        crowd = self.of(kind)
        return [
            User(
                id=f"{prefix}-{number}",
                prompt_tokens=16_000 if number in crowd.long_prompts else 400,
                max_tokens=crowd.tokens,
                stream=kind == "streamed",
                leave_at=crowd.leave_at if self.leaving and number in crowd.leaves else None,
                leaving=self.leaving if self.leaving and number in crowd.leaves else "fin",
                stalls=crowd.stalls,
            )
            for number in range(crowd.users)
        ]

    def of(self, kind: Kind) -> Crowd:
        """Return the crowd of a kind of answers."""
        return self.crowd if kind == "streamed" else self.whole

    def knobs(self, kind: Kind, *, engine_leaks: bool) -> Knobs:
        """Return the engine for it."""
        crowd = self.of(kind)
        return Knobs(max_num_seqs=crowd.slots, rate=crowd.rate, ignore_disconnects=engine_leaks)


_GONE = frozenset({"gone"})
_THERE = frozenset({"connected"})
_SERVED, _QUEUED = Crowd(tokens=400), Crowd(tokens=100, slots=2, leave_at=1.0, long_prompts=(1,))
_BRIEF = Crowd(tokens=250)
_CUT_OFF = Crowd(tokens=600)
#: An answer that comes whole fills a small receive buffer only when it is long.
_STALLED, _STALLED_WHOLE = Crowd(tokens=800, stalls=8.0), Crowd(tokens=3000, rate=1000.0, stalls=8.0)

#: Two beats, and what three retransmissions or two probes of a shut window take.
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("none", "none leave", None, _THERE, None, _BRIEF, _BRIEF),
        Column("half-close", "half-close", "half-close", _THERE, None, _BRIEF, _BRIEF),
        Column("fin", "FIN mid-stream", "fin", _GONE, 2.0, _SERVED, _SERVED),
        Column("rst", "RST mid-stream", "rst", _GONE, 2.0, _SERVED, _SERVED),
        Column("queued", "FIN queued or in prefill", "fin", _GONE, 2.0, _QUEUED, _QUEUED),
        Column("stall", "stalled reader", "stall", frozenset({"stalled"}), 5.0, _STALLED, _STALLED_WHOLE, absent=False),
        Column(
            "vanish",
            "vanished",
            "vanish",
            frozenset({"vanished", "gone"}),
            3.0,
            _CUT_OFF,
            _BRIEF,
            network=True,
        ),
    )
}
