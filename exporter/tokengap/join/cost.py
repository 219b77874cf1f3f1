"""What an engine's GPUs cost, and the part of it that orphans take. ``docs/cost.md`` has the formulas with an example.

Continuous batching gives each running sequence the same part of every step, so of an engine's time and energy orphans
take ``share = O / max(R, O, 1)``: O orphans that run, R sequences that run. The shares of all streams add up to the
whole. It is an allocation and not a saving: with one sequence of ten less, a step takes nearly as long. What would
surely be saved is ``sole``: intervals in which nothing but orphans ran.

GPU-seconds are those of the wall, whatever the utilization; energy comes as differences between two readings, which are
longer than a beat where a dcgm-exporter is read, so it is dealt out by what the beats between them saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tokengap.join.gpus import Used
from tokengap.view import Cost, EngineState, GpusView, GpuView, Joules, OrphanJoules, Unaccounted

#: A beat that lasted longer than so many intervals is not accounted: what ran in it was seen at its ends only.
LONGEST_BEAT = 3

#: A GPU works from this utilization up.
WORKS_FROM = 0.5

#: Verdicts that say: no tokens come of what the GPU does.
_WITHOUT_TOKENS: frozenset[EngineState] = frozenset({"idle", "stuck"})


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine ran when a beat ended, and generated during it.

    ``running``: sequences, the most that its gauge or its sockets show. ``orphans``: those of them that run for nobody.
    """

    running: float
    orphans: float
    tokens: float
    state: EngineState

    @property
    def share(self) -> float:
        """The orphans' part of all that ran, 0 to 1."""
        return self.orphans / max(self.running, self.orphans, 1.0)

    @property
    def only_orphans(self) -> bool:
        """Nothing ran but orphans."""
        return self.orphans >= self.running > 0


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a GPU within one open interval that were an engine's, its orphans', and its orphans' alone."""

    held: float = 0.0
    orphaned: float = 0.0
    sole: float = 0.0


@dataclass(frozen=True, slots=True)
class Open:
    """The time since a GPU's energy was last read: all of it, and what was whose."""

    seconds: float = 0.0
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CostState:
    """What is remembered: the account of each engine that ever had a GPU, and the open interval of each GPU."""

    accounts: Mapping[str, Cost] = field(default_factory=dict)
    open: Mapping[str, Open] = field(default_factory=dict)


def account(
    state: CostState,
    gpus: GpusView | None,
    used: Iterable[Used],
    loads: Mapping[str, Load | None],
    *,
    dt: float,
    interval: float,
) -> CostState:
    """Bring the accounts up to date with one beat of ``dt`` seconds. A load is None where it could not be read."""
    if gpus is None:
        return state
    accounts = dict(state.accounts)
    open_ = dict(state.open)
    late = dt > LONGEST_BEAT * interval
    for gpu in gpus.gpus:
        since = open_.get(gpu.row.uuid, Open())
        parts = dict(since.parts)
        for engine, weight in _weights(gpu, loads).items():
            seconds = weight * dt
            load = loads.get(engine)
            of = accounts.get(engine, Cost())
            why = _unaccounted(gpu, load, late=late)
            if why is not None or load is None:
                lost = {**of.unaccounted, why or "engine": of.unaccounted.get(why or "engine", 0.0) + seconds}
                accounts[engine] = replace(of, unaccounted=lost)
                continue
            orphaned = seconds * load.share
            accounts[engine] = replace(
                of,
                gpu_seconds=(of.gpu_seconds or 0.0) + seconds,
                orphan_gpu_seconds=(of.orphan_gpu_seconds or 0.0) + orphaned,
            )
            part = parts.get(engine, Part())
            sole = orphaned if load.only_orphans else 0.0
            parts[engine] = Part(part.held + seconds, part.orphaned + orphaned, part.sole + sole)
        open_[gpu.row.uuid] = Open(since.seconds + dt, parts)
    for use in used:
        for engine, part in open_[use.uuid].parts.items() if use.uuid in open_ else ():
            accounts[engine] = _with_energy(accounts[engine], use, part, open_[use.uuid].seconds)
        open_[use.uuid] = Open()
    for engine in loads:
        mine = [gpu for gpu in gpus.gpus if engine in gpu.engines]
        if mine or engine in accounts:
            of = accounts.get(engine, Cost())
            works = not late and any(_works(gpu) and _for_nothing(gpu.engines, loads) for gpu in mine)
            accounts[engine] = replace(
                of,
                gpus_up=sum(gpu.up is True for gpu in mine),
                gpus_lost=sum(gpu.up is False for gpu in mine),
                busy_without_tokens=of.busy_without_tokens + (dt if works else 0.0),
            )
    return CostState(accounts, {uuid: open_[uuid] for uuid in open_ if any(g.row.uuid == uuid for g in gpus.gpus)})


def _weights(gpu: GpuView, loads: Mapping[str, Load | None]) -> dict[str, float]:
    """Divide a GPU among its engines: by the tokens they generated in this beat, evenly where none did."""
    tokens = {engine: load.tokens if (load := loads.get(engine)) is not None else 0.0 for engine in gpu.engines}
    total = sum(tokens.values())
    return {engine: n / total if total > 0 else 1 / len(tokens) for engine, n in tokens.items()}


def _unaccounted(gpu: GpuView, load: Load | None, *, late: bool) -> Unaccounted | None:
    """Say why a beat of a GPU cannot be accounted to its engine. None: it can."""
    if gpu.row.parent:
        return "mig"
    if gpu.up is not True:
        return "gpu"
    if load is None:
        return "engine"
    return "late" if late else None


def _with_energy(of: Cost, use: Used, part: Part, seconds: float) -> Cost:
    """Deal out what a GPU used in an interval of which ``part`` was this engine's."""
    if seconds <= 0:
        return of
    joules: dict[Joules, float] = dict(of.joules)
    orphans: dict[OrphanJoules, float] = dict(of.orphan_joules)
    if use.joules is not None:
        joules["full"] = joules.get("full", 0.0) + use.joules * part.held / seconds
        orphans["full"] = orphans.get("full", 0.0) + use.joules * part.orphaned / seconds
        orphans["sole"] = orphans.get("sole", 0.0) + use.joules * part.sole / seconds
    if use.active is not None:
        joules["active"] = joules.get("active", 0.0) + use.active * part.held / seconds
        orphans["active"] = orphans.get("active", 0.0) + use.active * part.orphaned / seconds
    return replace(of, joules=joules, orphan_joules=orphans)


def _for_nothing(engines: Iterable[str], loads: Mapping[str, Load | None]) -> bool:
    """Tell whether no token comes of what a GPU of these engines does. One that cannot be read may make some."""
    of = [loads.get(engine) for engine in engines]
    return all(load is not None and load.state in _WITHOUT_TOKENS and not load.tokens for load in of)


def _works(gpu: GpuView) -> bool:
    """Tell whether a GPU computes."""
    return bool(gpu.up) and not gpu.latched and (gpu.row.utilization or 0.0) >= WORKS_FROM
