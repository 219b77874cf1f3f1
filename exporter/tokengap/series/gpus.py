"""The GPUs: what their driver tells, which engine computes on which, and what of it is not to be believed.

A field that a device or its driver does not give has no sample. Values are by ``uuid``; what does not change stands on
``tokengap_gpu_info``. Processes are counted, their pids are on ``/api/gpus``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokengap.gpu_readings import GPU_REASONS, RECOVERY_ACTIONS, THROTTLE_REASONS, Gpu
from tokengap.series.declare import Sample, Series, one_of
from tokengap.view import GpuView, View


def _per_gpu(value: Callable[[GpuView], float | None]) -> Callable[[View], Iterable[Sample]]:
    """Return a ``read`` for the series with the one label ``uuid``: a sample for each GPU whose value is known."""

    def read(view: View) -> Iterable[Sample]:
        for gpu in _gpus(view):
            known = value(gpu)
            if known is not None:
                yield Sample((gpu.row.uuid,), float(known))

    return read


def _told(field: Callable[[Gpu], float | None]) -> Callable[[View], Iterable[Sample]]:
    """Return a ``read`` for a field as the driver tells it."""
    return _per_gpu(lambda gpu: field(gpu.row))


def _gpus(view: View) -> tuple[GpuView, ...]:
    return view.gpus.gpus if view.gpus is not None else ()


def _reader(view: View) -> Iterable[Sample]:
    if view.gpus is not None:
        yield Sample((view.gpus.way, view.gpus.driver, view.gpus.reason), 1.0)


def _info(view: View) -> Iterable[Sample]:
    for gpu in _gpus(view):
        row = gpu.row
        driver = view.gpus.driver if view.gpus is not None else ""
        yield Sample((row.uuid, str(row.index), row.name, row.pci, driver, row.parent), 1.0)


def _engines(view: View) -> Iterable[Sample]:
    for gpu in _gpus(view):
        for engine in gpu.engines or ("",):
            yield Sample((gpu.row.uuid, engine, gpu.joined_by or "unknown"), 1.0)


def _process_memory(gpu: Gpu) -> float | None:
    if gpu.processes is None or any(process.memory is None for process in gpu.processes):
        return None
    return float(sum(process.memory or 0 for process in gpu.processes))


def _energy(view: View) -> Iterable[Sample]:
    for gpu in _gpus(view):
        if gpu.energy is not None and gpu.energy_source is not None:
            yield Sample((gpu.row.uuid, gpu.row.scope, gpu.energy_source), gpu.energy)


def _throttled(view: View) -> Iterable[Sample]:
    for gpu in _gpus(view):
        for reason, seconds in gpu.row.throttled.items():
            yield Sample((gpu.row.uuid, reason), seconds)


def _throttling(view: View) -> Iterable[Sample]:
    for gpu in _gpus(view):
        for reason in THROTTLE_REASONS if gpu.row.throttling is not None else ():
            yield Sample((gpu.row.uuid, reason), float(reason in (gpu.row.throttling or ())))


def _recovery(view: View) -> Iterable[Sample]:
    for gpu in _gpus(view):
        if gpu.row.recovery_action is not None:
            yield from one_of(RECOVERY_ACTIONS, gpu.row.recovery_action, gpu.row.uuid)


def _xids(value: Callable[[int, float], float]) -> Callable[[View], Iterable[Sample]]:
    def read(view: View) -> Iterable[Sample]:
        for gpu in _gpus(view):
            for code, xid in gpu.xids.items():
                yield Sample((gpu.row.uuid, str(code)), value(xid.incidents, xid.last))

    return read


READER_INFO = Series(
    name="tokengap_gpu_reader_info",
    kind="gauge",
    help="Always 1: how GPUs are read (nvml or dcgm), the driver's version, and why there are none: "
    f"{', '.join(GPU_REASONS)}. No driver on a host without GPUs is a normal state.",
    labels=("way", "driver", "reason"),
    read=_reader,
)

READERS = Series(
    name="tokengap_gpu_reader_processes",
    kind="gauge",
    help="Processes that read GPUs: 1, and 2 while one hangs in the driver and was given up, which no more than one "
    "may.",
    labels=(),
    read=lambda view: () if view.gpus is None else (Sample((), view.gpus.readers),),
)

LAST_READ = Series(
    name="tokengap_gpu_last_read_timestamp_seconds",
    kind="gauge",
    help="Unix time at which the GPUs were last read. What is older than a few beats is not on this page.",
    labels=(),
    read=lambda v: () if v.gpus is None or v.gpus.read_at is None else (Sample((), v.gpus.read_at),),
)

GPU_INFO = Series(
    name="tokengap_gpu_info",
    kind="gauge",
    help="Always 1: a GPU this exporter has seen, or a MIG instance, whose parent is the UUID of the whole. Join on "
    "uuid to put these labels on other series.",
    labels=("uuid", "index", "name", "pci", "driver", "parent"),
    read=_info,
)

GPU_UP = Series(
    name="tokengap_gpu_up",
    kind="gauge",
    help="1 while the GPU answers its driver, 0 when it is lost or missing. Absent while nothing can be read at all: "
    "see tokengap_gpu_reader_info.",
    labels=("uuid",),
    read=_per_gpu(lambda gpu: gpu.up),
)

GPU_ENGINE = Series(
    name="tokengap_gpu_engine_info",
    kind="gauge",
    help="Always 1: which engine computes on the GPU, and how that is known (settings, processes). An empty engine, "
    "unknown: nobody can tell. Several engines share the GPU.",
    labels=("uuid", "engine", "by"),
    read=_engines,
)

UTILIZATION = Series(
    name="tokengap_gpu_utilization_ratio",
    kind="gauge",
    help="Share of the driver's last sampling period in which a kernel ran, 0 to 1. It says nothing of how much of the "
    "GPU worked, and can be latched.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.utilization),
)

LATCHED = Series(
    name="tokengap_gpu_utilization_latched",
    kind="gauge",
    help="1 when a utilization of 100 % is no work: no process, no memory in use, idle power. Seen for days after a "
    "process was killed in the middle of a kernel.",
    labels=("uuid",),
    read=_per_gpu(lambda gpu: gpu.latched),
)

MEMORY_USED = Series(
    name="tokengap_gpu_memory_used_bytes",
    kind="gauge",
    help="Memory of the device in use, without what the driver reserves. Absent on devices that share the host's.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.memory_used),
)

MEMORY_TOTAL = Series(
    name="tokengap_gpu_memory_total_bytes",
    kind="gauge",
    help="Memory of the device: used, free and reserved by the driver.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.memory_total),
)

UNIFIED_MEMORY = Series(
    name="tokengap_gpu_unified_memory",
    kind="gauge",
    help="1 for a device without memory of its own (GB10): what its processes hold is the host's.",
    labels=("uuid",),
    read=_per_gpu(lambda gpu: gpu.row.unified_memory if gpu.up else None),
)

PROCESSES = Series(
    name="tokengap_gpu_processes",
    kind="gauge",
    help="Processes on the GPU that the driver shows. 0 is no proof of an idle one: from inside a container those of "
    "the host are not shown.",
    labels=("uuid",),
    read=_told(lambda gpu: None if gpu.processes is None else len(gpu.processes)),
)

PROCESS_MEMORY = Series(
    name="tokengap_gpu_processes_memory_bytes",
    kind="gauge",
    help="Memory that the processes on the GPU hold, where the driver tells it of each.",
    labels=("uuid",),
    read=_told(_process_memory),
)

POWER = Series(
    name="tokengap_gpu_power_watts",
    kind="gauge",
    help="Power drawn, as the driver averages it. Scope module includes the CPU beside the GPU: do not add it to the "
    "host's.",
    labels=("uuid", "scope"),
    read=lambda view: (Sample((g.row.uuid, g.row.scope), g.row.power) for g in _gpus(view) if g.row.power is not None),
)

IDLE_POWER = Series(
    name="tokengap_gpu_idle_power_watts",
    kind="gauge",
    help="Power taken for doing nothing: gpu_idle_power, or the least that this GPU was seen to draw at rest. Absent "
    "as long as it was not seen to rest. Basis active counts from here up.",
    labels=("uuid",),
    read=_per_gpu(lambda gpu: gpu.idle_power),
)

ENERGY = Series(
    name="tokengap_gpu_energy_joules_total",
    kind="counter",
    help="Energy drawn: the driver's counter since it was loaded, or, on devices without one, power over time since "
    "this exporter started (source power_integral). Compare trends: the sensors of some models see a quarter of the "
    "time.",
    labels=("uuid", "scope", "source"),
    read=_energy,
)

ENERGY_RESETS = Series(
    name="tokengap_gpu_energy_resets_total",
    kind="counter",
    help="Times the driver's energy counter fell: the driver was loaded anew. What was used in between is in no total.",
    labels=("uuid",),
    read=_per_gpu(lambda gpu: gpu.energy_resets),
)

TEMPERATURE = Series(
    name="tokengap_gpu_temperature_celsius",
    kind="gauge",
    help="Temperature of the GPU in degrees Celsius.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.temperature),
)

SM_CLOCK = Series(
    name="tokengap_gpu_sm_clock_hertz",
    kind="gauge",
    help="Clock of the streaming multiprocessors now, in hertz.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.sm_clock),
)

THROTTLED = Series(
    name="tokengap_gpu_throttled_seconds_total",
    kind="counter",
    help="Seconds since the driver was loaded in which a fault held the clocks down, by fault, where the driver counts "
    "them. Idle clocks and the software power cap are no faults.",
    labels=("uuid", "reason"),
    read=_throttled,
)

THROTTLING = Series(
    name="tokengap_gpu_throttling",
    kind="gauge",
    help="1 while the fault holds the clocks down, by fault. Short ones fall between two reads: prefer "
    "tokengap_gpu_throttled_seconds_total.",
    labels=("uuid", "reason"),
    read=_throttling,
)

ECC = Series(
    name="tokengap_gpu_ecc_uncorrectable_total",
    kind="counter",
    help="Memory errors that could not be corrected since the driver was loaded.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.ecc_uncorrectable),
)

REMAP_FAILURE = Series(
    name="tokengap_gpu_remap_failure",
    kind="gauge",
    help="1 when a row of memory could not be replaced: the GPU must be replaced.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.remap_failure),
)

REMAP_PENDING = Series(
    name="tokengap_gpu_remap_pending",
    kind="gauge",
    help="1 when a row of memory will be replaced at the next reset of the GPU.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.remap_pending),
)

RECOVERY_ACTION = Series(
    name="tokengap_gpu_recovery_action",
    kind="gauge",
    help=f"What the driver wants done, 1 for the action: {', '.join(RECOVERY_ACTIONS)}. The best sign that a GPU is "
    "sick.",
    labels=("uuid", "action"),
    read=_recovery,
)

PCIE_REPLAYS = Series(
    name="tokengap_gpu_pcie_replays_total",
    kind="counter",
    help="Packets that had to be sent again over PCIe.",
    labels=("uuid",),
    read=_told(lambda gpu: gpu.pcie_replays),
)

XID_ERRORS = Series(
    name="tokengap_gpu_xid_errors_total",
    kind="counter",
    help="Errors that the driver reported since this exporter started, by XID. Reports of one burst count once. The "
    "first one makes the series: alert on tokengap_gpu_xid_last_timestamp_seconds.",
    labels=("uuid", "xid"),
    read=_xids(lambda incidents, _: incidents),
)

XID_LAST = Series(
    name="tokengap_gpu_xid_last_timestamp_seconds",
    kind="gauge",
    help="Unix time of the newest report of this XID.",
    labels=("uuid", "xid"),
    read=_xids(lambda _, last: last),
)

GPUS = (
    READER_INFO,
    READERS,
    LAST_READ,
    GPU_INFO,
    GPU_UP,
    GPU_ENGINE,
    UTILIZATION,
    LATCHED,
    MEMORY_USED,
    MEMORY_TOTAL,
    UNIFIED_MEMORY,
    PROCESSES,
    PROCESS_MEMORY,
    POWER,
    IDLE_POWER,
    ENERGY,
    ENERGY_RESETS,
    TEMPERATURE,
    SM_CLOCK,
    THROTTLED,
    THROTTLING,
    ECC,
    REMAP_FAILURE,
    REMAP_PENDING,
    RECOVERY_ACTION,
    PCIE_REPLAYS,
    XID_ERRORS,
    XID_LAST,
)
