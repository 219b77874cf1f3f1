"""GPUs as they answer: the values and the refusals of some platforms.

H100 figures are those of a captured card (nvidia_gpu_exporter, testdata, driver 590.48.01); the rest follow public
reports, named beside each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MIB = 1 << 20

# nvmlReturn_t
NO_PERMISSION, NOT_SUPPORTED, NOT_FOUND, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND = 4, 3, 6, 9, 13
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, UNKNOWN = 15, 16, 18, 999

MEMORY = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
ECC = ("nvmlDeviceGetTotalEccErrors",)
ROWS = ("nvmlDeviceGetRemappedRows",)
MIG = ("nvmlDeviceGetMigMode",)
ENERGY = ("nvmlDeviceGetTotalEnergyConsumption",)
UTILIZATION = ("nvmlDeviceGetUtilizationRates",)
POWER = ("nvmlDeviceGetPowerUsage", "field:185", "field:186")
TEMPERATURE = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
CLOCK = ("nvmlDeviceGetClockInfo",)
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
SLOWDOWN_TIMES = ("field:269", "field:270", "field:271")
RECOVERY = ("field:230",)
REPLAYS = ("nvmlDeviceGetPcieReplayCounter",)
PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


def refused(*calls: tuple[str, ...], code: int = NOT_SUPPORTED) -> dict[str, int]:
    """Return what a GPU answers to some calls."""
    return {call: code for names in calls for call in names}


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance: memory in bytes, and the processes in it with theirs."""

    uuid: str
    memory_total: int
    memory_used: int = 0
    processes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """One GPU: memory in bytes, power in watts, energy in joules, times in seconds. ``refuse`` is error codes by C
    function, or by ``field:NUMBER``. ``processes`` is bytes by pid.

    ``energy`` is what the counter stands at when the GPU is first described; it grows with ``power`` from then on.
    """

    uuid: str
    name: str
    pci: str = "00000000:1B:00.0"
    memory_total: int = 0
    memory_used: int = 0
    memory_reserved: int = 0
    power: float = 0.0
    energy: float = 0.0
    utilization: int = 0
    temperature: int = 0
    sm_mhz: int = 0
    reasons: int = 0
    sw_thermal: float = 0.0
    hw_thermal: float = 0.0
    power_brake: float = 0.0
    ecc_uncorrectable: int = 0
    remap_failure: bool = False
    remap_pending: bool = False
    recovery_action: int = 0
    pcie_replays: int = 0
    mig: bool = False
    processes: Mapping[int, int] = field(default_factory=dict)
    instances: tuple[Instance, ...] = ()
    refuse: Mapping[str, int] = field(default_factory=dict)


H100 = FakeGpu(
    uuid="GPU-11111111-2222-3333-4444-000000000000",
    name="NVIDIA H100 80GB HBM3",
    memory_total=85_520_809_984,
    memory_used=61_000 * MIB,
    memory_reserved=502_267_904,
    power=631.95,
    energy=5_000_000.0,
    utilization=98,
    temperature=59,
    sm_mhz=1980,
    processes={4242: 60_000 * MIB},
)

#: With MIG there is no utilisation and there are no rows (nvidia_gpu_exporter, capture; nvidia-container-toolkit 842).
H100_MIG = replace(
    H100,
    power=433.78,
    temperature=53,
    mig=True,
    processes={},
    instances=(
        Instance("MIG-00000000-0000-0000-0000-000000000001", 42_412_802_048, 20_000 * MIB, {4301: 19_900 * MIB}),
        Instance("MIG-00000000-0000-0000-0000-000000000002", 21_074_280_448, 9_000 * MIB, {4302: 8_900 * MIB}),
        Instance("MIG-00000000-0000-0000-0000-000000000003", 10_468_982_784, 5_000 * MIB, {4303: 4_900 * MIB}),
    ),
    refuse=refused(UTILIZATION, ROWS),
)

#: No memory of its own; the processes' is told (nvitop 208, home-ops 13238, llama-swap 782).
GB10 = FakeGpu(
    uuid="GPU-0b100000-0000-0000-0000-000000000010",
    name="NVIDIA GB10",
    pci="0000000F:01:00.0",
    power=11.17,
    energy=900.0,
    temperature=35,
    sm_mhz=2418,
    processes={114_687: 19_135 * MIB},
    refuse=refused(MEMORY, ECC, ROWS, MIG, SLOWDOWN_TIMES),
)

#: Before Volta: everything but the energy counter (aiperf 1350).
P100 = FakeGpu(
    uuid="GPU-0100e000-0000-0000-0000-000000000100",
    name="Tesla P100-PCIE-16GB",
    memory_total=17_071_734_784,
    memory_used=9_000 * MIB,
    power=178.5,
    utilization=77,
    temperature=61,
    sm_mhz=1328,
    processes={777: 8_900 * MIB},
    refuse=refused(ENERGY, ROWS, MIG, SLOWDOWN_TIMES, RECOVERY, POWER[1:]),
)

#: A desktop card: no ECC, no MIG, no rows (nvidia_gpu_exporter, testdata of an RTX 4080).
GEFORCE = FakeGpu(
    uuid="GPU-0f0c0000-0000-0000-0000-000000004080",
    name="NVIDIA GeForce RTX 4080",
    memory_total=17_171_480_576,
    memory_used=1_200 * MIB,
    memory_reserved=370_000_000,
    power=14.6,
    energy=123.0,
    utilization=2,
    temperature=36,
    sm_mhz=210,
    reasons=1,
    refuse=refused(ECC, ROWS, MIG),
)

#: Says yes and knows nothing (nv-monitor 17, vllm 9728).
JETSON = FakeGpu(
    uuid="GPU-0a000000-0000-0000-0000-000000000001",
    name="Orin (nvgpu)",
    pci="00000000:00:00.0",
    refuse=refused(ROWS, MIG, SLOWDOWN_TIMES, RECOVERY, REASONS, PROCESSES),
)

#: On WSL2 (distributed 5342, cudf 9955): no utilisation, the list of processes fails with 999.
WSL = replace(
    GEFORCE,
    refuse=refused(ECC, ROWS, MIG, UTILIZATION) | refused(PROCESSES, code=UNKNOWN),
)

PROFILES: Mapping[str, FakeGpu] = {
    "h100": H100,
    "h100-mig": H100_MIG,
    "gb10": GB10,
    "p100": P100,
    "geforce": GEFORCE,
    "jetson": JETSON,
    "wsl": WSL,
}


def many(gpu: FakeGpu, count: int) -> tuple[FakeGpu, ...]:
    """Return so many of one kind, each with an identity and a PCI address of its own."""
    return tuple(
        replace(gpu, uuid=f"{gpu.uuid[:-4]}{number:04x}", pci=f"00000000:{0x1B + number:02X}:00.0")
        for number in range(count)
    )
