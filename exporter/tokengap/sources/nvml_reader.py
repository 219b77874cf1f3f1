"""The reader of NVIDIA GPUs: a process of its own, and the only place that loads NVIDIA's library.

A call into that library can hang for ever, out of reach of any timeout of its process (open-gpu-kernel-modules 1333,
gpud 117), and can crash the process when a GPU is lost (nvitop 139). So the exporter starts this program and reads one
:class:`~tokengap.gpu_readings.GpuSnapshot` a line from it, as JSON; :mod:`tokengap.sources.gpu` is that other end.

It ends when its standard input closes (whoever started it is gone), when its output breaks, on SIGTERM, and by itself
after a line that says why there are no GPUs: a driver that comes later is found by a new process, which loads the new
library. Each GPU is read in a thread of its own, one after another, those that were slow last: a GPU that does not
answer is down, the others go on. When none answers, no line is written, and the other end's deadline speaks.

    python -m tokengap.sources.nvml_reader [--interval 1] [--patience 1.5] [--kmsg /dev/kmsg]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import queue
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NoReturn, TypeVar

import msgspec

from tokengap.gpu_readings import (
    RECOVERY_ACTIONS,
    Gpu,
    GpuProcess,
    GpuReason,
    GpuSnapshot,
    ThrottleReason,
    Xid,
)

T = TypeVar("T")

# nvmlReturn_t of nvml.h, by the word for it
CODES: Final[Mapping[int, str]] = {
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "lost",
    16: "reset_required",
    18: "version_mismatch",
    19: "in_use",
    21: "no_data",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    999: "unknown",
}

#: Never asked again of this GPU: to ask on can fill the kernel's log (nvidia_gpu_exporter 384).
PERMANENT: Final = frozenset(
    {"not_supported", "no_permission", "function_not_found", "deprecated", "argument_version_mismatch"}
)
#: The GPU is gone, whatever else is asked of it.
GONE: Final = frozenset({"lost", "reset_required", "gpu_not_found"})
#: The driver is gone, or another one: only a new process helps.
OVER: Final[Mapping[str, GpuReason]] = {
    "uninitialized": "failed",
    "driver_not_loaded": "driver_not_loaded",
    "version_mismatch": "version_mismatch",
    "library_not_found": "library_not_found",
}
#: What initialising may answer besides.
REFUSED: Final[Mapping[str, GpuReason]] = {**OVER, "no_permission": "no_permission"}
HINTS: Final[Mapping[str, str]] = {
    "version_mismatch": "the driver was upgraded and not reloaded: reboot, or unload and load its modules",
    "unknown": "in a container this means that it lost its devices, as after systemctl daemon-reload: start a new one",
    "no_permission": "this user may not open /dev/nvidiactl",
}

# Bits of nvmlDeviceGetCurrentClocksEventReasons that are faults; idle (1) and the software power cap (4) are not.
THROTTLING_BITS: Final[Mapping[int, ThrottleReason]] = {
    0x08: "hw_slowdown",
    0x40: "hw_thermal",
    0x20: "sw_thermal",
    0x80: "power_brake",
}

# Fields of nvmlDeviceGetFieldValues (NVML_FI_DEV_...), each with its scope
AVERAGE_POWER, INSTANT_POWER, MODULE_POWER = (185, 0), (186, 0), (185, 1)
RECOVERY_ACTION = (230, 0)
THROTTLED_FIELDS: Final[Mapping[tuple[int, int], ThrottleReason]] = {
    (269, 0): "sw_thermal",  # CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, nanoseconds
    (270, 0): "hw_thermal",
    (271, 0): "power_brake",
}
# The member of nvmlValue_t by nvmlValueType_t
VALUES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

VOLATILE_ECC, UNCORRECTED = 0, 1
SM_CLOCK = 1
GPU_SENSOR = 0
XID_EVENTS = 0x8

#: As large as a pid can be on Linux (PID_MAX_LIMIT of a 64-bit kernel).
HIGHEST_PID = 1 << 22

#: GPUs that share the host's memory. What some firmware gives as theirs is the host's (nvtop 449).
UNIFIED_NAMES = ("GB10", "(nvgpu)", "Thor")
#: Where "yes, 0" is what a driver says that does not know (nv-monitor 17).
IGNORANT_NAMES = ("(nvgpu)",)

#: Seconds between attempts to get a lost GPU back: of the first, and at most.
REINIT = (1.0, 60.0)
#: Milliseconds of one wait for an event.
EVENT_WAIT = 500
#: Seconds in which a cycle that is under way may end, when this process has to.
LAST_WORDS = 0.5

#: nvmlProcessInfo_v2_t and _v3_t of every driver. The binding 12.535.77 has five fields and reads nonsense.
PROCESS_BYTES = 24


class Refused(Exception):
    """A call was answered with an error; ``word`` says which. Carries no text of the library: asking for one is a call."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


class GpuGone(Refused):
    """The GPU that was asked is lost."""


class Over(Refused):
    """There is no driver to ask any more."""


class Nvml:
    """Calls by the name of the binding's function, errors as :class:`Refused`.

    The binding is a module that others provide as well; a function that it, or the library, lacks is one more refusal.
    """

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._errors = (binding.NVMLError, getattr(binding, "NVMLLibraryMismatchError", binding.NVMLError))

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call; raises Refused, GpuGone or Over."""
        function = getattr(self._binding, name, None)
        if function is None:
            raise Refused("function_not_found")
        try:
            return function(*arguments)
        except self._errors as error:
            # A mismatch of library and binding is an error without a code.
            raise refusal(getattr(error, "value", 13)) from None
        except UnicodeDecodeError:
            raise Refused("not_text") from None

    def fields(self, device: Any, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float | Refused]:
        """Ask for field values, many in one call; each has its own answer."""
        asked = list(wanted)
        answers: dict[tuple[int, int], float | Refused] = {}
        for key, value in zip(asked, self("nvmlDeviceGetFieldValues", device, asked), strict=True):
            if value.nvmlReturn:
                answers[key] = refusal(value.nvmlReturn)
            elif value.valueType < len(VALUES):
                answers[key] = float(getattr(value.value, VALUES[value.valueType]))
            else:
                answers[key] = Refused("not_a_number")
        return answers

    @property
    def reads_processes(self) -> bool:
        """Whether the binding's struct is the driver's, so that a second process is read right."""
        struct = getattr(self._binding, "c_nvmlProcessInfo_t", None)
        return struct is None or ctypes.sizeof(struct) == PROCESS_BYTES


def refusal(code: int) -> Refused:
    """Return the error for a code of the library."""
    word = CODES.get(code, f"error_{code}")
    return (GpuGone if word in GONE else Over if word in OVER else Refused)(word)


def key_of(handle: Any) -> int:
    """Return what tells one of the library's handles from another."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


@dataclass
class Device:
    """A GPU or MIG instance that answers to a handle, and what it refused so far, by field."""

    handle: Any
    index: int
    uuid: str
    name: str = ""
    pci: str = ""
    parent: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    shares_memory: bool = False

    def unsure(self, names: tuple[str, ...]) -> bool:
        """Tell whether it is one of a kind."""
        return any(name in self.name for name in names)


#: One way of reading a field: what the library answered, as values of Gpu.
Way = Callable[[Nvml, Device], Mapping[str, Any]]


def _utilization(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    percent = nvml("nvmlDeviceGetUtilizationRates", device.handle).gpu
    return {"utilization": bounded(percent, 0, 100) / 100}


def _memory(version: int | None) -> Way:
    """Version 2 tells what the driver keeps apart from what is used; version 1 adds them up (nvml-wrapper 57)."""

    def read(nvml: Nvml, device: Device) -> Mapping[str, Any]:
        if device.unsure(UNIFIED_NAMES):
            raise Refused("not_supported")
        memory = nvml("nvmlDeviceGetMemoryInfo", device.handle, *([version] if version else []))
        total = bounded(memory.total, 1, 1 << 50)
        return {"memory_used": bounded(memory.used, 0, total), "memory_total": total}

    return read


def _energy(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"energy": nvml("nvmlDeviceGetTotalEnergyConsumption", device.handle) / 1e3}


def _temperature_v(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"temperature": float(bounded(nvml("nvmlDeviceGetTemperatureV", device.handle, GPU_SENSOR), -60, 200))}


def _temperature(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"temperature": float(bounded(nvml("nvmlDeviceGetTemperature", device.handle, GPU_SENSOR), 0, 200))}


def _sm_clock(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"sm_clock": bounded(nvml("nvmlDeviceGetClockInfo", device.handle, SM_CLOCK), 0, 10_000) * 1e6}


def _throttling(call: str) -> Way:
    def read(nvml: Nvml, device: Device) -> Mapping[str, Any]:
        bits = nvml(call, device.handle)
        return {"throttling": tuple(reason for bit, reason in THROTTLING_BITS.items() if bits & bit)}

    return read


def _ecc(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"ecc_uncorrectable": nvml("nvmlDeviceGetTotalEccErrors", device.handle, UNCORRECTED, VOLATILE_ECC)}


def _rows(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    _, _, pending, failure = nvml("nvmlDeviceGetRemappedRows", device.handle)
    return {"remap_pending": bool(pending), "remap_failure": bool(failure)}


def _replays(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"pcie_replays": nvml("nvmlDeviceGetPcieReplayCounter", device.handle)}


def _mig(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"mig": nvml("nvmlDeviceGetMigMode", device.handle)[0] == 1}


def _power_usage(nvml: Nvml, device: Device) -> Mapping[str, Any]:
    return {"power": nvml("nvmlDeviceGetPowerUsage", device.handle) / 1e3}


def _power_field(key: tuple[int, int]) -> Way:
    def read(nvml: Nvml, device: Device) -> Mapping[str, Any]:
        milliwatts = nvml.fields(device.handle, [key])[key]
        if isinstance(milliwatts, Refused):
            raise milliwatts
        return {"power": milliwatts / 1e3, "scope": "module" if key == MODULE_POWER else "gpu"}

    return read


def _processes(version: str) -> Way:
    """Ask by the version's own name: without one, the binding raises an error that is none of the library's."""

    def read(nvml: Nvml, device: Device) -> Mapping[str, Any]:
        return {"processes": nvml(f"nvmlDeviceGetComputeRunningProcesses_{version}", device.handle)}

    return read


#: Each field with its ways, the best first. A way that is refused for good is left for the next, once.
#:
#: Power: the average over a second, where the driver tells which one it gives, because it is asked once a second; of
#: Grace, some drivers know only the whole module. Energy comes next to it, so that one instant is true for both.
FIELDS: Final[Mapping[str, tuple[Way, ...]]] = {
    "power": (_power_field(AVERAGE_POWER), _power_usage, _power_field(INSTANT_POWER), _power_field(MODULE_POWER)),
    "energy": (_energy,),
    "utilization": (_utilization,),
    "memory": (_memory(0x0200_0028), _memory(None)),
    "temperature": (_temperature_v, _temperature),
    "sm_clock": (_sm_clock,),
    "throttling": (
        _throttling("nvmlDeviceGetCurrentClocksEventReasons"),
        _throttling("nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
    "ecc_uncorrectable": (_ecc,),
    "remapped_rows": (_rows,),
    "pcie_replays": (_replays,),
    "mig": (_mig,),
    "processes": (_processes("v3"), _processes("v2")),
}
#: What a MIG instance has of its own.
INSTANCE_FIELDS: Final = ("memory", "processes")
#: Lists beside that of computing processes; each may be missing.
OTHER_LISTS: Final = ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")
#: Values that, when all of them are 0, are no values where a driver is ignorant.
LIVE: Final = ("utilization", "memory_used", "power", "energy", "temperature", "sm_clock")


def bounded(value: int, low: int, high: int) -> int:
    """Return a value that can be; raises Refused for one that cannot (nvtop 110: SUCCESS with garbage)."""
    if not low <= value <= high:
        raise Refused("implausible")
    return value


class DeviceReader:
    """Reads one GPU and its MIG instances; what was refused for good is not asked again."""

    def __init__(self, nvml: Nvml, device: Device, warn: Callable[[str], None]) -> None:
        self.device = device
        self._nvml, self._warn = nvml, warn
        self._instances: dict[str, Device] = {}
        self._gone = ""

    def read(self) -> list[Gpu]:
        """Return a row for the GPU, and one for each instance. Raises Over. What is lost once is not asked again."""
        if self._gone:
            return [self.down(self._gone)]
        try:
            gpu, values = self._read_one(self.device, tuple(FIELDS))
            rows = [gpu]
            if values.get("mig"):
                rows += self._read_instances()
        except GpuGone as gone:
            self._gone = gone.word
            return [self.down(gone.word)]
        return rows

    def down(self, reason: str) -> Gpu:
        """Return the row of this GPU when it does not answer."""
        return lost_row(self.device, reason)

    def _read_one(self, device: Device, fields: tuple[str, ...]) -> tuple[Gpu, dict[str, Any]]:
        values: dict[str, Any] = {}
        misses: dict[str, str] = {}
        at = time.monotonic()
        for name in fields:
            values |= self._ask(device, name, misses)
            if name == "energy":
                at = time.monotonic()
        if not device.parent:
            values |= self._field_values(device, misses)
        values["processes"] = self._checked(device, values.get("processes"), misses)
        self._distrust(device, values, misses)
        if "memory_total" not in values and any(p.memory for p in values["processes"] or ()):
            device.shares_memory = not device.parent
        known = any(value is not None for value in values.values())
        if not known and "unknown" in misses.values():
            raise GpuGone("unknown")
        gpu = Gpu(
            uuid=device.uuid,
            index=device.index,
            at=at,
            parent=device.parent,
            name=device.name,
            pci=device.pci,
            unified_memory=device.shares_memory or device.unsure(UNIFIED_NAMES),
            unsupported=device.refused | misses,
            **values,
        )
        if "energy" in device.refused and "power" in values:
            self._warn(f"GPU {device.index} ({device.name}) has no energy counter: its joules can come from power only")
        return gpu, values

    def _ask(self, device: Device, name: str, misses: dict[str, str]) -> Mapping[str, Any]:
        """Read one field by the first way that serves; note why it could not be read."""
        if name in device.refused:
            return {}
        ways = FIELDS[name]
        word = ""
        for number in range(device.chosen.get(name, 0), len(ways)):
            try:
                values = ways[number](self._nvml, device)
            except (GpuGone, Over):
                raise
            except Refused as error:
                if error.word not in PERMANENT:
                    misses[name] = error.word
                    return {}
                # Of two ways that are refused, "may not" says more than "is not there".
                word = word if word == "no_permission" else error.word
                device.chosen[name] = number + 1
            else:
                device.chosen[name] = number
                return values
        device.refused[name] = word
        return {}

    def _field_values(self, device: Device, misses: dict[str, str]) -> dict[str, Any]:
        """Read what only the batched call tells."""
        names = {key: f"throttled.{reason}" for key, reason in THROTTLED_FIELDS.items()}
        names[RECOVERY_ACTION] = "recovery_action"
        wanted = [key for key, name in names.items() if name not in device.refused]
        if not wanted:
            return {}
        try:
            answers = self._nvml.fields(device.handle, wanted)
        except (GpuGone, Over):
            raise
        except Refused as error:
            answers = dict.fromkeys(wanted, error)
        throttled: dict[ThrottleReason, float] = {}
        values: dict[str, Any] = {"throttled": throttled}
        for key, answer in answers.items():
            if isinstance(answer, GpuGone | Over):
                raise answer
            if isinstance(answer, Refused):
                (device.refused if answer.word in PERMANENT else misses)[names[key]] = answer.word
            elif key == RECOVERY_ACTION:
                known = 0 <= answer < len(RECOVERY_ACTIONS)
                values["recovery_action"] = RECOVERY_ACTIONS[int(answer)] if known else f"action_{answer:.0f}"
            else:
                throttled[THROTTLED_FIELDS[key]] = answer / 1e9
        return {key: value for key, value in values.items() if value or key != "throttled"}

    def _checked(
        self, device: Device, computing: list[Any] | None, misses: dict[str, str]
    ) -> tuple[GpuProcess, ...] | None:
        """Return the processes, without those that cannot be; None when the list of computing ones is not told."""
        if computing is None:
            return None
        rows = computing
        if not self._nvml.reads_processes and len(rows) > 1:
            self._warn(
                "the binding nvidia-ml-py reads processes wrongly (as version 12.535.77 does): only the first of each "
                "GPU is shown; install nvidia-ml-py 12.560 or newer"
            )
            rows = rows[:1]
        rows = rows + [row for name in OTHER_LISTS for row in self._other_list(device, name)]
        found: dict[int, int | None] = {}
        for row in rows:
            if not 0 < row.pid <= HIGHEST_PID:
                self._warn(f"GPU {device.index} ({device.name}) names a process that cannot be, {row.pid}; left out")
                continue
            # 0 is what containers and WDDM say who do not know (HAMi-core 112).
            memory = row.usedGpuMemory or None
            if memory is not None and memory > 1 << 50:
                memory = None
            found[row.pid] = max(memory or 0, found.get(row.pid) or 0) or None
        return tuple(GpuProcess(pid, memory) for pid, memory in found.items())

    def _other_list(self, device: Device, name: str) -> list[Any]:
        if name in device.chosen:
            return []
        try:
            return list(self._nvml(name, device.handle))
        except (GpuGone, Over):
            raise
        except Refused as error:
            if error.word in PERMANENT:
                device.chosen[name] = 0
            return []

    @staticmethod
    def _distrust(device: Device, values: dict[str, Any], misses: dict[str, str]) -> None:
        """Take away what an ignorant driver gives: zeros, and all of it when nothing in it is alive."""
        if not device.unsure(IGNORANT_NAMES):
            return
        alive = any(values.get(name) for name in LIVE)
        for name, value in list(values.items()):
            dead = value is not None and not value and not isinstance(value, bool)
            if dead and not (alive and name in ("utilization", "memory_used")):
                values.pop(name)
                misses[name] = "implausible"
        if not alive:
            for name in ("remap_pending", "remap_failure", "mig", "recovery_action"):
                if values.pop(name, None) is not None:
                    misses[name] = "implausible"

    def _read_instances(self) -> Iterable[Gpu]:
        """Read the MIG instances as they are now: one that was destroyed leaves an invalid handle behind."""
        parent = self.device
        try:
            count = self._nvml("nvmlDeviceGetMaxMigDeviceCount", parent.handle)
        except (GpuGone, Over):
            raise
        except Refused:
            return
        present: dict[str, Device] = {}
        for number in range(count):
            try:
                handle = self._nvml("nvmlDeviceGetMigDeviceHandleByIndex", parent.handle, number)
                uuid = self._nvml("nvmlDeviceGetUUID", handle)
            except (GpuGone, Over):
                raise
            except Refused:
                continue
            device = self._instances.get(uuid)
            if device is None or key_of(device.handle) != key_of(handle):
                device = Device(handle, parent.index, uuid, self._name_of(handle), parent.pci, parent.uuid)
            present[uuid] = device
        self._instances = present
        for device in present.values():
            yield self._read_one(device, INSTANCE_FIELDS)[0]

    def _name_of(self, handle: Any) -> str:
        try:
            return str(self._nvml("nvmlDeviceGetName", handle))
        except (GpuGone, Over):
            raise
        except Refused:
            return self.device.name


def lost_row(device: Device, reason: str) -> Gpu:
    """Return the row of a GPU that is not there: what is known of it, and no value."""
    return Gpu(
        uuid=device.uuid,
        index=device.index,
        at=time.monotonic(),
        up=False,
        reason=reason,
        name=device.name,
        pci=device.pci,
    )


class Worker(Generic[T]):
    """A thread that does one thing when asked; one that does not come back can be left."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answer: T | BaseException
        self._leave = False
        self.busy = False
        #: Seconds that the last answer took.
        self.took = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, patience: float) -> T | None:
        """Return the answer, None when it does not come in time; then the next call waits for the same one."""
        if not self.busy:
            self.busy = True
            self._answered.clear()
            self._asked.set()
        elif not self._answered.is_set():
            patience = 0.0  # it had its time
        if not self._answered.wait(patience):
            return None
        self.busy = False
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def leave(self) -> None:
        """End the thread, as soon as it is back."""
        self._leave = True
        self._asked.set()

    def _run(self) -> None:
        while self._asked.wait() and not self._leave:
            self._asked.clear()
            began = time.monotonic()
            try:
                self._answer = self._work()
            except BaseException as error:  # noqa: BLE001 - it is raised where the answer is awaited
                self._answer = error
            self.took = time.monotonic() - began
            self._answered.set()


# ---------------------------------------------------------------------------------------------------------------------
# Errors that the driver reports
# ---------------------------------------------------------------------------------------------------------------------

_XID_LINE = re.compile(rb"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]+)\): (?P<code>\d+)(?:, *pid=(?P<pid>\d+))?")
_PCI = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.\d)?")


def pci_address(text: str) -> str:
    """Return a PCI address as Linux writes it, ``0000:3b:00.0``, of NVML's ``00000000:3B:00.0`` or the log's."""
    match = _PCI.fullmatch(text.strip().lower())
    if match is None:
        return text.strip().lower()
    domain, bus, device = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def parse_xid(line: bytes, at: float) -> Xid | None:
    """Read one line of the kernel's log: ``NVRM: Xid (PCI:0000:3b:00): 45, pid=1496200, name=...``.

    None for any other line. A pid of ``'<unknown>'`` is none.
    """
    match = _XID_LINE.search(line)
    if match is None:
        return None
    pid = int(match["pid"]) if match["pid"] else 0
    code = int(match["code"][:9])
    return Xid(at, code, pci=pci_address(match["pci"].decode()), pid=pid if 0 < pid <= HIGHEST_PID else None)


def follow_kernel_log(path: str, report: Callable[[Xid], None], stop: threading.Event) -> None:
    """Report each error that the kernel's log tells from now on, until ``stop``. A log that may not be read is silence.

    The event interface misses some (DCGM 235), and the log is often closed to us; both serve.
    """
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        pass  # a pipe has no end to go to
    rest = b""
    while not stop.is_set():
        select.select([log], [], [], 1.0)
        try:
            piece = os.read(log, 8192)
        except BlockingIOError:
            continue
        except BrokenPipeError:  # what we did not read in time was overwritten: go on behind it
            continue
        except OSError:
            return
        if not piece:  # a file's end, or a pipe that nobody writes to
            stop.wait(0.2)
            continue
        *lines, rest = (rest + piece).split(b"\n")
        rest = rest[-8192:]
        for line in lines:
            if (xid := parse_xid(line, time.monotonic())) is not None:
                report(xid)


class Events:
    """Waits for the errors of some GPUs in a thread of its own."""

    def __init__(self, nvml: Nvml, devices: Iterable[Device], report: Callable[[Xid], None]) -> None:
        self._nvml, self._report = nvml, report
        self._devices = {key_of(device.handle): device for device in devices}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Stop waiting; False when the library does not let go."""
        self._stop.set()
        self._thread.join(4 * EVENT_WAIT / 1e3)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            events = self._nvml("nvmlEventSetCreate")
        except Refused:
            return
        if any([self._registers(device, events) for device in self._devices.values()]):
            while not self._stop.is_set():
                self._wait(events)
        try:
            self._nvml("nvmlEventSetFree", events)
        except Refused:
            return

    def _registers(self, device: Device, events: Any) -> bool:
        try:
            self._nvml("nvmlDeviceRegisterEvents", device.handle, XID_EVENTS, events)
        except Refused:
            return False
        return True

    def _wait(self, events: Any) -> None:
        try:
            event = self._nvml("nvmlEventSetWait_v2", events, EVENT_WAIT)
        except Refused as error:
            if error.word != "timeout":  # as when a GPU was lost: it would be answered so at once, again and again
                self._stop.wait(1.0)
            return
        if event.eventType == XID_EVENTS:
            device = self._devices.get(key_of(event.device))
            known = (device.uuid, device.pci) if device else ("", "")
            self._report(Xid(time.monotonic(), int(event.eventData), *known))


# ---------------------------------------------------------------------------------------------------------------------
# The process
# ---------------------------------------------------------------------------------------------------------------------


class Absent(Exception):
    """There are no GPUs to read; the reason, and a sentence."""

    def __init__(self, reason: GpuReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: GpuReason = reason
        self.detail = detail


def load_binding() -> Nvml:
    """Load the binding. Raises Absent where it is missing, or where another package stands in its place."""
    try:
        import pynvml
    except ImportError as error:
        raise Absent("wrong_binding", f"the package nvidia-ml-py cannot be loaded: {error}") from None
    if hasattr(pynvml, "nvmlInitWithFlags") and hasattr(pynvml, "NVMLError"):
        return Nvml(pynvml)
    from importlib import metadata  # late: it is slow to load, and needed here only

    culprits = []
    for package in ("pynvml", "nvidia-ml-py3"):
        try:
            culprits.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    raise Absent(
        "wrong_binding",
        f"the module pynvml at {pynvml.__file__} is not that of nvidia-ml-py but of "
        f"{' or '.join(culprits) or 'another package'}: pip uninstall pynvml nvidia-ml-py3, then pip install "
        "--force-reinstall nvidia-ml-py",
    )


class Reader:
    """The GPUs of this host, read once a cycle."""

    def __init__(self, nvml: Nvml, patience: float) -> None:
        self._nvml, self._patience = nvml, patience
        self._sequence = 0
        self._xids: queue.SimpleQueue[Xid] = queue.SimpleQueue()
        self._warned: set[str] = set()
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._workers: list[tuple[DeviceReader, Worker[list[Gpu]]]] = []
        self._down: list[Gpu] = []
        #: All GPUs that were ever seen, by index and identity: what is lost keeps its name.
        self._seen: dict[tuple[int, str], Device] = {}
        self._events: Events | None = None
        self._again_at, self._again_after = 0.0, REINIT[0]
        self._driver = ""

    def report(self, xid: Xid) -> None:
        """Take in an error that the driver reported."""
        self._xids.put(xid)

    def open(self) -> None:
        """Find the GPUs. Raises Absent."""
        try:
            self._nvml("nvmlInitWithFlags", 0)
        except Refused as error:
            raise absent(error.word, "initialising") from None
        try:
            self._driver = str(self._nvml("nvmlSystemGetDriverVersion"))
        except Refused:
            self._driver = ""
        try:
            count = self._nvml("nvmlDeviceGetCount")
        except Refused as error:
            raise absent(error.word, "counting GPUs") from None
        if count == 0 and not self._seen:
            raise Absent("no_gpus", "NVML answers and counts no GPU: is a device missing in this container?")
        devices = [device for index in range(count) if (device := self._find(index)) is not None]
        self._workers = [(one := DeviceReader(self._nvml, d, self._warn), Worker(one.read)) for d in devices]
        self._events = Events(self._nvml, devices, self.report)
        here = {device.uuid for device in devices} | {row.uuid for row in self._down}
        self._down += [lost_row(d, "lost") for d in self._seen.values() if d.uuid and d.uuid not in here]

    def close(self) -> bool:
        """Let go of all GPUs; False when the library does not come back."""
        if any(worker.busy for _, worker in self._workers) or (self._events and not self._events.close()):
            return False
        for _, worker in self._workers:
            worker.leave()
        self._workers, self._down, self._events = [], [], None
        with contextlib.suppress(Refused):  # there was nothing to let go of
            self._nvml("nvmlShutdown")
        return True

    def cycle(self) -> GpuSnapshot | None:
        """Read every GPU; None when none of them answers in time. Raises Absent."""
        if self._again_at and time.monotonic() >= self._again_at:
            self._again_at = 0.0
            if self.close():
                self.open()
        rows = list(self._down)
        answered = not self._workers
        for reader, worker in sorted(self._workers, key=lambda pair: (pair[1].busy, pair[1].took > self._patience / 2)):
            try:
                answer = worker.ask(self._patience)
            except Over as error:
                raise absent(error.word, "reading a GPU") from None
            answered = answered or answer is not None
            rows += [reader.down("hung")] if answer is None else answer
        if not answered:
            return None
        self._try_again(rows)
        self._sequence += 1
        rows.sort(key=lambda gpu: (gpu.index, gpu.parent != "", gpu.uuid))
        return GpuSnapshot(
            "ok",
            at=time.monotonic(),
            sequence=self._sequence,
            driver=self._driver,
            gpus=tuple(rows),
            xids=tuple(self._named(xid) for xid in drain(self._xids)),
            warnings=tuple(drain(self._warnings)),
        )

    def absent(self, why: Absent) -> GpuSnapshot:
        """Return the line that says why there are no GPUs."""
        return GpuSnapshot(
            why.reason,
            why.detail,
            at=time.monotonic(),
            sequence=self._sequence + 1,
            driver=self._driver,
            xids=tuple(drain(self._xids)),
            warnings=tuple(drain(self._warnings)),
        )

    def _find(self, index: int) -> Device | None:
        """Return the GPU at an index; a row of those that are down when it does not answer."""
        try:
            # By index: by UUID, one lost GPU makes the others unreachable (nvml.h).
            handle = self._nvml("nvmlDeviceGetHandleByIndex", index)
            device = Device(handle, index, str(self._nvml("nvmlDeviceGetUUID", handle)))
        except Over as error:
            raise absent(error.word, "opening a GPU") from None
        except Refused as error:
            before = [device for (at, _), device in self._seen.items() if at == index]
            self._down.append(lost_row(before[-1] if before else Device(None, index, ""), error.word))
            return None
        try:
            device.name = str(self._nvml("nvmlDeviceGetName", handle))
            device.pci = pci_address(self._nvml("nvmlDeviceGetPciInfo", handle).busId)
        except Refused:
            pass  # it has a UUID, which is what matters
        self._seen.pop((index, device.uuid), None)  # the newest of an index comes last
        self._seen[index, device.uuid] = device
        return device

    def _try_again(self, rows: list[Gpu]) -> None:
        """Plan a fresh start while a GPU is down: at once, then ever more rarely. Most need a reboot."""
        if all(gpu.up or gpu.reason == "hung" for gpu in rows):
            self._again_after = REINIT[0]
        elif not self._again_at:
            self._again_at = time.monotonic() + self._again_after
            self._again_after = min(2 * self._again_after, REINIT[1])

    def _named(self, xid: Xid) -> Xid:
        """Complete a report of the log, which knows a PCI address only."""
        if xid.uuid:
            return xid
        uuid = next((device.uuid for device in self._seen.values() if device.pci and device.pci == xid.pci), "")
        return Xid(xid.at, xid.code, uuid, xid.pci, xid.pid)

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warnings.put(sentence)


def absent(word: str, doing: str) -> Absent:
    """Return why there are no GPUs, after an error of the whole library."""
    hint = f": {HINTS[word]}" if word in HINTS else ""
    return Absent(REFUSED.get(word, "failed"), f"NVML, {doing}: {word}{hint}")


def drain(waiting: queue.SimpleQueue[T]) -> list[T]:
    """Take everything out."""
    return [waiting.get() for _ in range(waiting.qsize())]


def write(snapshot: GpuSnapshot) -> None:
    """Send one line; ends the process when nobody takes it."""
    line = memoryview(msgspec.json.encode(snapshot) + b"\n")
    try:
        while line:
            line = line[os.write(1, line) :]
    except OSError:
        leave()


def leave() -> NoReturn:
    """End at once: threads that hang in the library would keep an orderly end waiting."""
    os._exit(0)


def watch(stop: threading.Event, ended: threading.Event) -> None:
    """End the process when standard input closes or SIGTERM comes, also while every other thread hangs in a call.

    Python runs a signal's handler between two steps of the main thread, which may never come; the byte that the signal
    writes into a pipe is seen here at once.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the exporter, which then tells us
    signal.set_wakeup_fd(send)

    def wait() -> None:
        readable: list[int] = []
        while receive not in readable:
            readable = select.select([0, receive], [], [])[0]
            if 0 in readable and not os.read(0, 4096):
                break
        stop.set()
        ended.wait(LAST_WORDS + EVENT_WAIT / 1e3)
        leave()

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Write a line a cycle until told to end, or until there is nothing to read."""
    parser = argparse.ArgumentParser(prog="python -m tokengap.sources.nvml_reader", description=__doc__.splitlines()[0])
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one cycle to the next")
    parser.add_argument("--patience", type=float, default=1.5, help="seconds that one GPU may take")
    parser.add_argument("--kmsg", default="/dev/kmsg", help="the kernel's log, empty for none")
    options = parser.parse_args()
    faulthandler.enable()  # a crash names the call in which it happened
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may crash once a minute for days
    stop, ended = threading.Event(), threading.Event()
    watch(stop, ended)
    try:
        nvml = load_binding()
    except Absent as why:
        write(GpuSnapshot(why.reason, why.detail, at=time.monotonic(), sequence=1))
        leave()
    reader = Reader(nvml, options.patience)
    if options.kmsg:
        threading.Thread(target=follow_kernel_log, args=(options.kmsg, reader.report, stop), daemon=True).start()
    try:
        reader.open()
        due = time.monotonic()
        while not stop.is_set():
            if (snapshot := reader.cycle()) is not None:
                write(snapshot)
            due = max(due + options.interval, time.monotonic())
            stop.wait(due - time.monotonic())
    except Absent as why:
        write(reader.absent(why))
    reader.close()
    ended.set()
    leave()


if __name__ == "__main__":
    sys.exit(main())
