"""What was read from the GPUs in one cycle of their reader. Data only, and light: the reader process imports this and
no more of tokengap, and sends it as JSON, one snapshot a line.

A field that the device, the driver or a permission does not give is None, and ``Gpu.unsupported`` says why; it is never
0, never NaN and no error of the device. One that was given before and is missing from one cycle is None, and not in
``Gpu.unsupported``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

#: Why there are GPUs in a snapshot, or none. ``absent`` kinds are normal on a host without GPUs; see :data:`ABSENT`.
GpuReason: TypeAlias = Literal[
    "ok",
    "starting",  # the reader has not answered yet
    "library_not_found",  # no libnvidia-ml.so.1: no driver here, or not mounted into this container
    "driver_not_loaded",
    "version_mismatch",  # the driver was upgraded and not reloaded
    "no_permission",
    "no_gpus",  # the library answers and counts none: a broken mount, not an idle GPU
    "wrong_binding",  # another package took the place of nvidia-ml-py
    "hung",  # no line within the deadline
    "crashed",  # the reader process died
    "failed",  # any other error; ``detail`` says which
]
GPU_REASONS: tuple[GpuReason, ...] = (
    "ok",
    "starting",
    "library_not_found",
    "driver_not_loaded",
    "version_mismatch",
    "no_permission",
    "no_gpus",
    "wrong_binding",
    "hung",
    "crashed",
    "failed",
)

#: Reasons that say: no GPU is expected here. Nothing is wrong.
ABSENT: frozenset[GpuReason] = frozenset({"starting", "library_not_found", "driver_not_loaded"})

#: Throttle reasons that are faults. Idle clocks and the software power cap are not.
ThrottleReason: TypeAlias = Literal["hw_slowdown", "hw_thermal", "sw_thermal", "power_brake"]
THROTTLE_REASONS: tuple[ThrottleReason, ...] = ("hw_slowdown", "hw_thermal", "sw_thermal", "power_brake")

#: What the driver wants done with a GPU (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION), in the order of its numbers.
RECOVERY_ACTIONS: tuple[str, ...] = ("none", "reset", "reboot", "drain_p2p", "drain_and_reset", "reset_imex")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU. ``pid`` is as the driver gives it: of the host, or of our PID namespace.

    ``memory`` is bytes, None where the driver does not tell.
    """

    pid: int
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of one (then ``parent`` is the UUID of the whole).

    ``at``: when energy and power were read, monotonic seconds of this host. ``up`` is False for a GPU that is lost,
    with ``reason`` in one word (``lost``, ``unknown``, ``reset_required``...); its ``uuid`` is then the last known one,
    empty if it never was known. ``utilization`` is 0 to 1; ``power`` is watts and ``energy`` joules since the driver
    was loaded, both of the ``scope`` (``module``: CPU included, on Grace). ``sm_clock`` is hertz. ``throttled`` is
    seconds since the driver was loaded, by fault, where the driver counts them; ``throttling`` is which faults slow it
    now. ``ecc_uncorrectable`` counts since the driver was loaded. ``processes`` is None where the list is not told,
    which is no sign of an idle GPU. ``unified_memory``: it has no memory of its own.
    """

    uuid: str
    index: int
    at: float
    up: bool = True
    reason: str = ""
    parent: str = ""
    name: str = ""
    pci: str = ""
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    energy: float | None = None
    scope: Literal["gpu", "module"] = "gpu"
    temperature: float | None = None
    sm_clock: float | None = None
    throttled: Mapping[ThrottleReason, float] = field(default_factory=dict)
    throttling: tuple[ThrottleReason, ...] | None = None
    ecc_uncorrectable: int | None = None
    remap_failure: bool | None = None
    remap_pending: bool | None = None
    recovery_action: str | None = None
    pcie_replays: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig: bool | None = None
    unified_memory: bool = False
    unsupported: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Xid:
    """One report of an error by the driver. One incident makes many: see :mod:`tokengap.join.gpus`.

    ``at`` is monotonic seconds. ``uuid`` is empty where only the PCI address is known, ``pid`` None where the report
    names no process.
    """

    at: float
    code: int
    uuid: str = ""
    pci: str = ""
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """All GPUs of this host, or why there are none.

    ``sequence`` grows by one with each cycle of one reader: a snapshot with the same number (and ``at``) is the same
    cycle, seen again. ``at`` is when the cycle ended. ``xids`` are the reports since the cycle before. ``readers`` is
    how many reader processes exist: 1, or 2 while a hung one was given up. ``warnings`` are sentences for the log.
    """

    reason: GpuReason
    detail: str = ""
    way: Literal["nvml", "dcgm"] = "nvml"
    at: float = 0.0
    sequence: int = 0
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    xids: tuple[Xid, ...] = ()
    readers: int = 1
    warnings: tuple[str, ...] = ()
