"""Which GPU computes for which engine, what it used since it was last read, and what of its telemetry not to believe.

==================================================  ==================================================================
what is seen                                        what is said
==================================================  ==================================================================
settings name the GPU at an engine                  it is that engine's
a process of an engine holds memory on it           it is that engine's; of several engines, shared by them
the list of processes is empty or not told          nobody knows whose it is: from inside a container the host's
                                                    processes are not seen, so an empty list is no idle GPU
it is lost, or nothing can be read                  whose it was last
energy is counted                                   the difference; where the counter fell (driver reloaded), nothing
energy is not supported, power is                   power over time, while it is read often enough
utilization 100 %, no process, no memory, idle      latched: a GPU whose work was killed can show this for days
power                                               (lium-io 1140); it does no work
several XID reports, same GPU, code and process,    one incident: a channel each is reported (gpud 117)
few seconds apart
==================================================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tokengap.gpu_readings import Gpu, GpuSnapshot, Xid
from tokengap.readings import Readings
from tokengap.topology import Topology
from tokengap.view import EnergySource, GpusView, GpuView, JoinedBy, XidView

#: Reports of one error that follow each other within so many seconds are one incident.
INCIDENT_SECONDS = 5.0

#: Seconds for which a dcgm-exporter may show the same values: it collects every 30 by default, and idle GPUs draw power
#: too. Older ones hide that it hangs.
STALE_SECONDS = 150.0

#: Beats without a reading of power after which what was drawn meanwhile is not guessed.
MOST_UNREAD_BEATS = 3

#: At most this share of its memory is in use by a GPU without a process.
EMPTY_MEMORY = 0.02

#: Utilization is latched from here up, on an empty GPU, with power at most this many times that of idleness.
LATCHED_FROM, LATCHED_POWER = 0.99, 1.25


@dataclass(frozen=True, slots=True)
class Used:
    """What a GPU used between two readings of it. ``joules``, and those above idle power, None: not known."""

    uuid: str
    joules: float | None
    active: float | None


@dataclass(frozen=True, slots=True)
class Incident:
    """An XID of one GPU: how often it happened, and the newest report of it (monotonic, Unix time, process)."""

    count: int
    at: float
    wall: float
    pid: int | None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What is remembered of one GPU.

    ``row``: the newest in which it was up. ``energy``: joules, the driver's counter or our own sum, as ``source`` says.
    ``read``: the reading at which the open interval begins, the newest whose energy (or power) was told.
    """

    row: Gpu
    engines: tuple[str, ...] = ()
    by: JoinedBy | None = None
    idle_power: float | None = None
    energy: float | None = None
    source: EnergySource | None = None
    read: Gpu | None = None
    resets: int = 0
    incidents: Mapping[int, Incident] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuState:
    """What is remembered of this host's GPUs, by UUID. ``wall`` is when they were last read, Unix time."""

    known: Mapping[str, GpuMemory] = field(default_factory=dict)
    driver: str = ""
    wall: float | None = None


def observe(state: GpuState, readings: Readings) -> tuple[GpuState, GpusView | None, tuple[Used, ...]]:
    """Take one beat's reading in. Returns what is known now, and what was used since the last readings."""
    if readings.gpu is None:
        return state, None, ()
    snapshot = readings.gpu.value or GpuSnapshot("failed", readings.gpu.error or "")
    if snapshot.reason == "ok" and (age := readings.at - snapshot.at) > STALE_SECONDS:
        snapshot = replace(snapshot, reason="hung", detail=f"the same values for {age:.0f} s", gpus=())
    known = dict(state.known)
    if snapshot.reason != "ok":
        nothing = tuple(_view(memory, None) for memory in known.values())
        return state, _gpus_view(snapshot, state, nothing), ()

    table = readings.processes.value
    families = table.families if table is not None else {}
    views: list[GpuView] = []
    used: list[Used] = []
    for row in _identified(snapshot.gpus, known):
        before = known.get(row.uuid)
        memory = before or GpuMemory(row)
        if row.up:
            memory = _joined(replace(memory, row=row), row, readings.topology, families)
            memory, since = _read(memory, row, readings.topology)
            used += since
        known[row.uuid] = memory
        views.append(_view(memory, row, _others(row, families)))
    seen = {view.row.uuid for view in views}
    for uuid in known.keys() - seen:
        if known[uuid].row.parent:  # a MIG instance that was destroyed
            del known[uuid]
        else:
            views.append(_view(known[uuid], replace(_identity(known[uuid].row), up=False, reason="missing")))
    known = _with_incidents(known, snapshot.xids, readings)
    views = [replace(view, xids=_xids(known[view.row.uuid])) for view in views]
    wall = readings.wall - max(readings.at - snapshot.at, 0.0)
    state = GpuState(known, snapshot.driver or state.driver, wall)
    return state, _gpus_view(snapshot, state, views), tuple(used)


def _gpus_view(snapshot: GpuSnapshot, state: GpuState, views: Iterable[GpuView]) -> GpusView:
    return GpusView(
        reason=snapshot.reason,
        detail=snapshot.detail,
        way=snapshot.way,
        driver=state.driver,
        readers=snapshot.readers,
        read_at=state.wall,
        gpus=tuple(sorted(views, key=lambda view: (view.row.index, view.row.parent != "", view.row.uuid))),
    )


def _identified(rows: Iterable[Gpu], known: Mapping[str, GpuMemory]) -> Iterator[Gpu]:
    """Give each row the UUID it is known by. One that was lost before a new reader saw it is known by its index."""
    for row in rows:
        if row.uuid:
            yield row
        else:
            at_index = (uuid for uuid, memory in known.items() if memory.row.index == row.index and not row.parent)
            yield replace(row, uuid=next(at_index, f"index-{row.index}"))


def _identity(row: Gpu) -> Gpu:
    """Return a row with what does not change, and no value."""
    return Gpu(row.uuid, row.index, row.at, parent=row.parent, name=row.name, pci=row.pci)


def _view(memory: GpuMemory, row: Gpu | None, others: int | None = None) -> GpuView:
    """Return what is known of a GPU; ``row`` is None where nothing could be read."""
    up = None if row is None else row.up
    if row is None or not row.up:
        reason = "" if row is None else row.reason
        row = replace(_identity(memory.row), up=False, reason=reason)
    return GpuView(
        row=row,
        up=up,
        engines=memory.engines,
        joined_by=memory.by,
        other_processes=others,
        idle_power=memory.idle_power if up else None,
        latched=_latched(memory, row) if up else None,
        energy=memory.energy if up else None,
        energy_source=memory.source,
        energy_resets=memory.resets,
        xids=_xids(memory),
    )


def _joined(memory: GpuMemory, row: Gpu, topology: Topology, families: Mapping[str, frozenset[int]]) -> GpuMemory:
    """Find the engines of a GPU. A list of processes that is not told this once changes nothing."""
    if row.processes is None and memory.by == "processes":
        return memory
    engines, by = engines_of(row, topology, families)
    return replace(memory, engines=engines, by=by)


def engines_of(
    row: Gpu, topology: Topology, families: Mapping[str, frozenset[int]]
) -> tuple[tuple[str, ...], JoinedBy | None]:
    """Return the engines that settings name a GPU for, and, of the others, those whose processes it shows; and how it
    is known. Of a GPU in MIG mode only its instances are an engine's.
    """
    configured = [engine.name for engine in topology.engines if row.uuid in engine.gpus]
    pids = {process.pid for process in row.processes or ()}
    seen = [
        engine.name
        for engine in topology.engines
        if not engine.gpus and not row.mig and pids & families.get(engine.name, frozenset())
    ]
    return (*configured, *seen), "settings" if configured else "processes" if seen else None


def _others(row: Gpu, families: Mapping[str, frozenset[int]]) -> int | None:
    """Count the processes on a GPU that are no watched engine's."""
    if row.processes is None:
        return None
    ours = frozenset().union(*families.values())
    return sum(process.pid not in ours for process in row.processes)


def _read(memory: GpuMemory, row: Gpu, topology: Topology) -> tuple[GpuMemory, list[Used]]:
    """Take a reading of energy and power in. Yields what was used where it closes an interval."""
    memory = replace(memory, idle_power=_idle_power(memory, row, topology))
    counted = row.energy is not None
    if not counted and ("energy" not in row.unsupported or row.power is None):
        return memory, []  # not told this time
    source: EnergySource = "counter" if counted else "power_integral"
    last = memory.read if memory.source == source else None
    if last is None:
        return replace(memory, read=row, source=source, energy=row.energy if counted else 0.0), []
    seconds = row.at - last.at
    if seconds <= 0:  # the same reading again
        return memory, []
    joules: float | None
    if row.energy is not None and last.energy is not None:
        fell = row.energy < last.energy
        joules = None if fell else row.energy - last.energy
        memory = replace(memory, read=row, energy=row.energy, resets=memory.resets + fell)
    else:
        often = seconds <= MOST_UNREAD_BEATS * topology.interval
        joules = (last.power + row.power) / 2 * seconds if often and last.power is not None and row.power else None
        memory = replace(memory, read=row, energy=(memory.energy or 0.0) + (joules or 0.0))
    idle = memory.idle_power
    active = None if joules is None or idle is None else max(joules - idle * seconds, 0.0)
    return memory, [Used(row.uuid, joules, active)]


def _idle_power(memory: GpuMemory, row: Gpu, topology: Topology) -> float | None:
    """Return what the GPU draws for doing nothing: as configured, or the least that it was seen to draw at rest.

    The least of all readings would not do: of an exporter that is started while an H200 works, that is 588 W of 591.
    """
    if topology.price.idle_power is not None:
        return topology.price.idle_power
    if row.power is None or not (row.utilization == 0 or _empty(row)):
        return memory.idle_power
    return row.power if memory.idle_power is None else min(memory.idle_power, row.power)


def _empty(row: Gpu) -> bool | None:
    """Tell whether nothing is on the GPU: no process, no memory in use. None: that cannot be known."""
    if row.processes:
        return False
    if row.processes is None or row.memory_used is None or not row.memory_total:
        return None
    return row.memory_used <= EMPTY_MEMORY * row.memory_total


def _latched(memory: GpuMemory, row: Gpu) -> bool | None:
    """Tell whether a utilization of 100 % is no work. None: that cannot be known."""
    if row.utilization is None:
        return None
    if row.utilization < LATCHED_FROM or row.processes:
        return False
    empty = _empty(row)
    if empty is None or row.power is None or memory.idle_power is None:
        return None
    return empty and row.power <= LATCHED_POWER * memory.idle_power


def _with_incidents(known: dict[str, GpuMemory], reports: Iterable[Xid], readings: Readings) -> dict[str, GpuMemory]:
    """Count XID reports as incidents. A report of a GPU that is not known is of no series."""
    by_pci = {_pci(memory.row.pci): uuid for uuid, memory in known.items() if memory.row.pci and not memory.row.parent}
    for report in sorted(reports, key=lambda report: report.at):
        uuid = report.uuid or by_pci.get(_pci(report.pci), "")
        memory = known.get(uuid)
        if memory is None:
            continue
        last = memory.incidents.get(report.code)
        same = (
            last is not None
            and report.at - last.at <= INCIDENT_SECONDS
            and (report.pid == last.pid or None in (report.pid, last.pid))
        )
        wall = readings.wall - (readings.at - report.at)
        count = (last.count if last is not None else 0) + (not same)
        pid = report.pid if report.pid is not None or last is None or not same else last.pid
        incident = Incident(count, report.at, wall, pid)
        known[uuid] = replace(memory, incidents={**memory.incidents, report.code: incident})
    return known


def _pci(address: str) -> str:
    """Return a PCI address in one form: Linux prints 4 digits of the domain, NVML 8, and XIDs no function."""
    domain, colon, rest = address.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest.partition('.')[0]}"


def _xids(memory: GpuMemory) -> dict[int, XidView]:
    return {code: XidView(incident.count, incident.wall) for code, incident in sorted(memory.incidents.items())}
