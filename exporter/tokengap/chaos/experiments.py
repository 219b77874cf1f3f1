"""The experiments: each is a fault, for how long, and what the exporter is to say meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokengap.chaos.bench import EXPORTER, GATEWAY
from tokengap.chaos.checks import AFTERMATH, Verdict
from tokengap.chaos.clients import Retries
from tokengap.chaos.faults import (
    ClientsVanish,
    ColdRestart,
    CoreKilled,
    CoreStopped,
    Cut,
    Direction,
    Fault,
    GpuLost,
    GpuThrottled,
    PartKilled,
    Slow,
    Storm,
)
from tokengap.chaos.replica import OUTLIVES

#: Seconds that the exporter may take to say what is so: some beats, on a busy host.
BEATS = 3.0


@dataclass(frozen=True, slots=True)
class Options:
    """How a fault is, where it can be more than one thing. ``load``: seconds for which an engine loads its model;
    ``window``: the exporter's."""

    signal: signal.Signals = signal.SIGBUS
    load: float = 10.0
    direction: Direction = "both"
    after_kb: int | None = None
    slow_factor: float = 0.25
    gpu_hangs: bool = False
    clients: int = 6
    tokens: int = 400
    jitter: bool = False
    window: float = 3.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment. ``rehearses``: the alerts that it makes fire, where it lasts long enough. ``network``: it takes
    one of its own. ``options``: those of :class:`Options` that mean something to it. ``shown``: validations that do
    not decide, because there is nothing left that could stand them. ``duration`` and ``recovery`` are in seconds."""

    name: str
    summary: str
    fault: Callable[[Options], Fault]
    duration: float = 30.0
    recovery: float = 15.0
    network: bool = False
    gpus: bool = False
    options: tuple[str, ...] = ()
    rehearses: tuple[str, ...] = ()
    verdict: Callable[[Options], Verdict] = lambda _: Verdict()
    retries: Callable[[Options], Retries] = lambda _: Retries()
    shown: frozenset[str] = frozenset()


_BROKEN = frozenset({"stuck", "dead", "restarted"})


def _said(*states: str, within: float) -> Callable[[Options], Verdict]:
    return lambda _: Verdict(frozenset(states), within)


def _never(*states: str) -> Callable[[Options], Verdict]:
    return lambda _: Verdict(never=frozenset(states))


def _at_once(options: Options) -> Retries:
    """Return clients who ask again and again, at once unless with jitter."""
    return Retries(most=8, pause=2.0) if options.jitter else Retries(most=500, pause=0.02, growth=1.0, jitter=False)


EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "engine-crash",
            "The core process of one replica is killed (SIGBUS) while it generates.",
            lambda options: CoreKilled(options.signal),
            options=("signal",),
            rehearses=("TokengapEngineDead",),
            verdict=_said("dead", within=OUTLIVES + BEATS),
        ),
        Experiment(
            "cold-restart",
            "One replica is killed and started at once, and loads its model before it answers.",
            lambda options: ColdRestart(options.load),
            duration=5.0,
            options=("load",),
            rehearses=("TokengapEngineDead",),
            verdict=_said("dead", "restarted", within=BEATS),
        ),
        Experiment(
            "engine-freeze",
            "The core process of one replica is stopped (SIGSTOP): its page stands still, its /health says 200.",
            lambda _: CoreStopped(),
            rehearses=("TokengapEngineStuck",),
            verdict=lambda options: Verdict(frozenset({"stuck"}), 2 * options.window + BEATS),
        ),
        Experiment(
            "slow-engine",
            "One replica generates at a quarter of its speed.",
            lambda options: Slow(options.slow_factor),
            options=("slow_factor",),
            verdict=_never(*_BROKEN),
        ),
        Experiment(
            "partition",
            "The network between the gateway and one replica is cut; nobody is told.",
            lambda options: Cut(options.direction, "drop", options.after_kb),
            network=True,
            options=("direction", "after_kb"),
            verdict=_never(*_BROKEN),
        ),
        Experiment(
            "reset",
            "Whatever is sent between the gateway and one replica is answered with a TCP reset.",
            lambda options: Cut(options.direction, "reset", options.after_kb),
            network=True,
            options=("direction", "after_kb"),
            verdict=_never(*_BROKEN),
        ),
        Experiment(
            "partition-client",
            "Some clients are cut off from the network in the middle of their streams; nobody is told.",
            lambda options: ClientsVanish(count=options.clients, tokens=options.tokens),
            network=True,
            options=("clients", "tokens"),
            rehearses=("TokengapOrphanHoldsSlot", "TokengapSlotsPinnedAfterDisconnects"),
            verdict=_never(*_BROKEN),
        ),
        Experiment(
            "disconnect-storm",
            "Again and again 20 clients come at once, and 8 of them leave.",
            lambda _: Storm(),
            rehearses=("TokengapQueueWillMissDeadline",),
            verdict=_never(*_BROKEN),
        ),
        Experiment(
            "retry-storm",
            "The gateway is gone for some seconds, and clients ask again at once.",
            lambda _: PartKilled(GATEWAY),
            duration=3.0,
            recovery=AFTERMATH,
            options=("jitter",),
            verdict=_never(*_BROKEN),
            retries=_at_once,
            shown=frozenset({"first-token-p99", "inter-token-p99", "next-request"}),
        ),
        Experiment(
            "exporter-gone",
            "The exporter is killed. Nobody who asks for tokens may notice.",
            lambda _: PartKilled(EXPORTER),
            rehearses=("TokengapDown",),
            shown=frozenset({"tokens-agree", "accounts-balance"}),
        ),
        Experiment(
            "gpu-lost",
            "The GPU of one replica falls off the bus, or its driver hangs; its engine answers on.",
            lambda options: GpuLost("hangs" if options.gpu_hangs else "lost"),
            gpus=True,
            options=("gpu_hangs",),
            rehearses=("TokengapGpuLost",),
            verdict=_never(*_BROKEN),
        ),
        Experiment(
            "gpu-throttle",
            "The GPU of one replica is too hot, and its clocks are held down.",
            lambda _: GpuThrottled(),
            gpus=True,
            verdict=_never(*_BROKEN),
        ),
    )
}
