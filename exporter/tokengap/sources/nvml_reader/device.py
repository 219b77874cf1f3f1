"""One GPU and its MIG instances, read field by field; each field has its own errors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tokengap.gpu_readings import RECOVERY_ACTIONS, Gpu, GpuProcess, ThrottleReason
from tokengap.sources.nvml_reader.calls import PERMANENT, GpuGone, Nvml, Over, Refused, key_of

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

_PCI = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.\d)?")

VOLATILE_ECC, UNCORRECTED = 0, 1
SM_CLOCK = 1
GPU_SENSOR = 0

#: As large as a pid can be on Linux (PID_MAX_LIMIT of a 64-bit kernel).
HIGHEST_PID: Final = 1 << 22
#: More bytes than any GPU has.
TOO_MUCH: Final = 1 << 50

#: GPUs that share the host's memory. What some firmware gives as theirs is the host's (nvtop 449).
UNIFIED_NAMES: Final = ("GB10", "(nvgpu)", "Thor")
#: Where "yes, 0" is what a driver says that does not know (nv-monitor 17).
IGNORANT_NAMES: Final = ("(nvgpu)",)


def pci_address(text: str) -> str:
    """Return a PCI address as Linux writes it, ``0000:3b:00.0``, of NVML's ``00000000:3B:00.0`` or the log's."""
    match = _PCI.fullmatch(text.strip().lower())
    if match is None:
        return text.strip().lower()
    domain, bus, device = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


@dataclass
class Device:
    """A GPU or MIG instance that answers to a handle.

    ``refused``: what it refused for good, by field. ``missed``: what it never gave so far, for a reason that may pass.
    ``given``: what it gave at least once. ``chosen``: the way that serves, by field.
    """

    handle: Any
    index: int
    uuid: str
    name: str = ""
    pci: str = ""
    parent: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    chosen: dict[str, int] = field(default_factory=dict)
    shares_memory: bool = False
    #: Something was answered with "unknown error" in this cycle.
    unknown: bool = False

    def miss(self, name: str, word: str) -> None:
        """Note that a field was not given this time. One that was given before is only late."""
        if name not in self.given:
            self.missed[name] = word

    def give(self, name: str) -> None:
        """Note that a field was given."""
        self.given.add(name)
        self.missed.pop(name, None)

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
        total = bounded(memory.total, 1, TOO_MUCH)
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
        device.unknown = False
        at = time.monotonic()
        for name in fields:
            values |= self._ask(device, name)
            if name == "energy":
                at = time.monotonic()
        if not device.parent:
            values |= self._field_values(device)
        values["processes"] = self._checked(device, values.get("processes"))
        self._distrust(device, values)
        if device.refused.get("memory") == "not_supported" and any(p.memory for p in values["processes"] or ()):
            device.shares_memory = not device.parent
        if device.unknown and not any(value is not None for value in values.values()):
            raise GpuGone("unknown")
        gpu = Gpu(
            uuid=device.uuid,
            index=device.index,
            at=at,
            parent=device.parent,
            name=device.name,
            pci=device.pci,
            unified_memory=device.shares_memory or device.unsure(UNIFIED_NAMES),
            unsupported=device.refused | device.missed,
            **values,
        )
        if "energy" in device.refused and "power" in values:
            self._warn(f"GPU {device.index} ({device.name}) has no energy counter: its joules can come from power only")
        return gpu, values

    def _ask(self, device: Device, name: str) -> Mapping[str, Any]:
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
                    device.miss(name, error.word)
                    device.unknown = device.unknown or error.word == "unknown"
                    return {}
                # Of two ways that are refused, "may not" says more than "is not there".
                word = word if word == "no_permission" else error.word
                device.chosen[name] = number + 1
            else:
                device.chosen[name] = number
                device.give(name)
                return values
        device.refused[name] = word
        return {}

    def _field_values(self, device: Device) -> dict[str, Any]:
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
                if answer.word in PERMANENT:
                    device.refused[names[key]] = answer.word
                else:
                    device.miss(names[key], answer.word)
                continue
            device.give(names[key])
            if key == RECOVERY_ACTION:
                known = 0 <= answer < len(RECOVERY_ACTIONS)
                values["recovery_action"] = RECOVERY_ACTIONS[int(answer)] if known else f"action_{answer:.0f}"
            else:
                throttled[THROTTLED_FIELDS[key]] = answer / 1e9
        return {key: value for key, value in values.items() if value or key != "throttled"}

    def _checked(self, device: Device, computing: list[Any] | None) -> tuple[GpuProcess, ...] | None:
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
                self._warn(f"GPU {device.index} ({device.name}) names processes that cannot be; they are left out")
                continue
            # 0 is what containers and WDDM say who do not know (HAMi-core 112).
            memory = row.usedGpuMemory or None
            if memory is not None and memory > TOO_MUCH:
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
    def _distrust(device: Device, values: dict[str, Any]) -> None:
        """Take away what an ignorant driver gives: zeros, and all of it when nothing in it is alive."""
        if not device.unsure(IGNORANT_NAMES):
            return
        alive = any(values.get(name) for name in LIVE)
        for name, value in list(values.items()):
            dead = value is not None and not value and not isinstance(value, bool)
            if dead and not (alive and name in ("utilization", "memory_used")):
                values.pop(name)
                device.missed[name] = "implausible"
        if not alive:
            for name in ("remap_pending", "remap_failure", "mig", "recovery_action"):
                if values.pop(name, None) is not None:
                    device.missed[name] = "implausible"

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
