"""What orphans cost in GPU-seconds, joules and money, and the whole of which it is the part. See ``docs/cost.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from tokengap.series.declare import Sample, Series, per_engine
from tokengap.view import Cost, View

By = TypeVar("By", bound=str)

_ALLOCATION = "An allocation by running sequences, not a saving."


def _costs(view: View) -> Iterable[tuple[str, Cost]]:
    return ((engine.name, engine.cost) for engine in view.engines if engine.cost is not None)


def _of_engine(value: Callable[[Cost], float | None]) -> Callable[[View], Iterable[Sample]]:
    """Return a ``read`` for the series with the one label ``engine``."""
    return per_engine(lambda engine: None if engine.cost is None else value(engine.cost))


def _by(values: Callable[[Cost], Mapping[By, float]]) -> Callable[[View], Iterable[Sample]]:
    """Return a ``read`` for a series with the label ``engine`` and one for what the values are by."""
    return lambda view: (Sample((engine, by), n) for engine, cost in _costs(view) for by, n in values(cost).items())


def _money(view: View) -> Iterable[Sample]:
    if view.price is not None:
        for engine, cost in _costs(view):
            if cost.orphan_gpu_seconds is not None:
                yield Sample((engine, view.price.currency), cost.orphan_gpu_seconds * view.price.per_hour / 3600)


ORPHAN_GPU_SECONDS = Series(
    name="tokengap_orphan_gpu_seconds_total",
    kind="counter",
    help="GPU-seconds taken by orphans: of each beat the orphans' part of the running sequences, times the engine's "
    f"GPUs. {_ALLOCATION}",
    labels=("engine",),
    read=_of_engine(lambda cost: cost.orphan_gpu_seconds),
)

ORPHAN_ENERGY = Series(
    name="tokengap_orphan_energy_joules_total",
    kind="counter",
    help="Energy taken by orphans. Basis full: their part of all that was drawn; active: of what exceeds idle power; "
    f"sole: all that was drawn while nothing but orphans ran, which would be saved. {_ALLOCATION}",
    labels=("engine", "basis"),
    read=_by(lambda cost: cost.orphan_joules),
)

ORPHAN_COST = Series(
    name="tokengap_orphan_cost_total",
    kind="counter",
    help="Price of the GPU-seconds taken by orphans. The price of a GPU-hour includes power: do not add a tariff times "
    f"joules. {_ALLOCATION}",
    labels=("engine", "currency"),
    read=_money,
)

GPU_HOUR_PRICE = Series(
    name="tokengap_gpu_hour_price",
    kind="gauge",
    help="Configured price of one GPU for one hour, power included.",
    labels=("currency",),
    read=lambda view: () if view.price is None else (Sample((view.price.currency,), view.price.per_hour),),
)

ENGINE_GPU_SECONDS = Series(
    name="tokengap_engine_gpu_seconds_total",
    kind="counter",
    help="GPU-seconds of the engine, idle or not: the whole of which orphans took a part.",
    labels=("engine",),
    read=_of_engine(lambda cost: cost.gpu_seconds),
)

ENGINE_ENERGY = Series(
    name="tokengap_engine_energy_joules_total",
    kind="counter",
    help="Energy that the engine's GPUs drew, all of it (full) and above idle power (active): the whole of which "
    "orphans took a part.",
    labels=("engine", "basis"),
    read=_by(lambda cost: cost.joules),
)

UNACCOUNTED = Series(
    name="tokengap_engine_gpu_unaccounted_seconds_total",
    kind="counter",
    help="GPU-seconds that are in no other total, because the GPU could not be read or is lost (gpu), the engine's "
    "page or its sockets could not be read (engine), the beat lasted too long (late), or it is a MIG instance "
    "(mig), whose part of a GPU's price and energy nobody can tell.",
    labels=("engine", "reason"),
    read=_by(lambda cost: cost.unaccounted),
)

ENGINE_GPUS = Series(
    name="tokengap_engine_gpus",
    kind="gauge",
    help="GPUs of the engine, by state: up, lost. A lost one while the engine still answers makes its next step fail "
    "or hang. Absent where it is not known on which GPUs the engine computes.",
    labels=("engine", "state"),
    read=_by(lambda cost: {"up": cost.gpus_up, "lost": cost.gpus_lost}),
)

BUSY_WITHOUT_TOKENS = Series(
    name="tokengap_gpu_busy_without_tokens_seconds_total",
    kind="counter",
    help="Seconds in which a GPU of the engine worked (utilization of half or more, not latched) while the engine, and "
    "any other that shares the GPU, was idle or stuck and generated no token.",
    labels=("engine",),
    read=_of_engine(lambda cost: cost.busy_without_tokens),
)

COST = (
    ORPHAN_GPU_SECONDS,
    ORPHAN_ENERGY,
    ORPHAN_COST,
    GPU_HOUR_PRICE,
    ENGINE_GPU_SECONDS,
    ENGINE_ENERGY,
    UNACCOUNTED,
    ENGINE_GPUS,
    BUSY_WITHOUT_TOKENS,
)
