"""The reader process, with the real binding and our stand-in for NVIDIA's library: what its lines say.

Each state of a GPU is a public report; its number stands beside it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.gpu_readings import Gpu, GpuProcess, GpuSnapshot, Xid
from tokengap.lab.nvml.fake import FakeNvml, compile_library
from tokengap.lab.nvml.profiles import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GB10,
    GEFORCE,
    H100,
    H100_MIG,
    JETSON,
    MIB,
    NO_PERMISSION,
    NOT_FOUND,
    P100,
    POWER,
    RESET_REQUIRED,
    UNKNOWN,
    VERSION_MISMATCH,
    WSL,
    FakeGpu,
    many,
    refused,
)
from tokengap.sources.nvml_reader.device import pci_address
from tokengap.sources.nvml_reader.xids import parse_xid

WITHIN = 30.0


@dataclass
class Reader:
    """A reader process of ours, and what it wrote."""

    process: subprocess.Popen[bytes]
    rest: bytes = b""

    def line(self) -> GpuSnapshot | None:
        """Return the next line, announcements that GPUs are opened again aside; None at the end of its output."""
        while (line := self._line()) is not None and line.reason == "starting":
            pass
        return line

    def _line(self) -> GpuSnapshot | None:
        deadline = time.monotonic() + WITHIN
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.process.stdout], [], [], deadline - time.monotonic())
            assert ready, f"no line within {WITHIN} s"
            piece = os.read(self.process.stdout.fileno(), 65536)
            if not piece:
                return None
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return msgspec.json.decode(line, type=GpuSnapshot)

    def until(self, condition: Callable[[GpuSnapshot], bool]) -> GpuSnapshot:
        """Return the first line of which a condition holds."""
        deadline = time.monotonic() + WITHIN
        while not condition(snapshot := self.line()):
            assert time.monotonic() < deadline, f"this did not come true in {WITHIN} s: {snapshot}"
        return snapshot


@contextmanager
def reading(environment: Mapping[str, str], *, kmsg: str = "", patience: float = 0.5) -> Iterator[Reader]:
    """Run a reader. Whatever a test did to it, it is gone afterwards."""
    command = [sys.executable, "-P", "-m", "tokengap.sources.nvml_reader"]
    arguments = ["--interval", "0.1", "--patience", str(patience), "--kmsg", kmsg]
    with subprocess.Popen(
        command + arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield Reader(process)
        finally:
            process.kill()


def only_line(environment: Mapping[str, str]) -> GpuSnapshot:
    """Run a reader that is expected to write one line and to end; return it."""
    with reading(environment) as reader:
        line = reader.line()
        assert line is not None
        assert reader.line() is None
        assert reader.process.wait(WITHIN) == 0
        return line


def rows(nvml: FakeNvml, *gpus: FakeGpu) -> tuple[Gpu, ...]:
    """Return the rows of the second line: what was refused in the first is remembered, and must not change a thing."""
    nvml.set(*gpus)
    with reading(nvml.environment) as reader:
        first, second = reader.line(), reader.line()
    assert second.sequence == first.sequence + 1
    assert [replace(gpu, at=0, energy=None) for gpu in first.gpus] == [
        replace(gpu, at=0, energy=None) for gpu in second.gpus
    ]
    return second.gpus


def row(nvml: FakeNvml, gpu: FakeGpu) -> Gpu:
    (one,) = rows(nvml, gpu)
    return one


# ---------------------------------------------------------------------------------------------------------------------
# Platforms
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_data_centre_gpu_tells_everything(nvml: FakeNvml):
    """In base units: joules, watts, hertz, bytes, seconds, ratios. What the driver keeps of the memory is not used."""
    told = replace(H100, hw_thermal=2.5, sw_thermal=0.25, power_brake=1.0, reasons=0x40 | 0x4 | 0x80, pcie_replays=3)
    gpu = row(nvml, replace(told, ecc_uncorrectable=2, remap_pending=True, recovery_action=4))
    energy = gpu.energy
    assert 5_000_000.0 < energy < 5_000_000.0 + 632 * 60
    assert gpu == Gpu(
        uuid=H100.uuid,
        index=0,
        at=gpu.at,
        name="NVIDIA H100 80GB HBM3",
        pci="0000:1b:00.0",
        utilization=0.98,
        memory_used=61_000 * MIB,
        memory_total=85_520_809_984,
        power=631.95,
        energy=energy,
        temperature=59.0,
        sm_clock=1.98e9,
        throttled={"sw_thermal": 0.25, "hw_thermal": 2.5, "power_brake": 1.0},
        throttling=("hw_thermal", "power_brake"),
        ecc_uncorrectable=2,
        remap_failure=False,
        remap_pending=True,
        recovery_action="drain_and_reset",
        pcie_replays=3,
        processes=(GpuProcess(4242, 60_000 * MIB),),
        mig=False,
    )


@pytest.mark.e2e
def test_unified_memory_has_no_device_memory(nvml: FakeNvml):
    """GB10 (nvitop 208, home-ops 13238): memory is refused, all else is told, and a process's memory is known."""
    gpu = row(nvml, GB10)
    assert (gpu.up, gpu.unified_memory) == (True, True)
    assert (gpu.memory_used, gpu.memory_total) == (None, None)
    assert (gpu.power, gpu.temperature, gpu.utilization) == (11.17, 35.0, 0.0)
    assert gpu.energy > 900.0
    assert gpu.processes == (GpuProcess(114_687, 20_064_501_760),)
    assert gpu.unsupported["memory"] == "not_supported"


@pytest.mark.e2e
def test_unified_memory_of_an_unknown_name_is_seen_by_its_processes(nvml: FakeNvml):
    """No memory of the device, and memory of a process on it."""
    assert row(nvml, replace(GB10, name="NVIDIA Next")).unified_memory
    assert not row(nvml, replace(GB10, name="NVIDIA Next", processes={})).unified_memory


@pytest.mark.e2e
def test_system_memory_is_never_a_gpus(nvml: FakeNvml):
    """Some firmware of GB10 answers with the host's memory (nvtop 449)."""
    answers = {call: code for call, code in GB10.refuse.items() if "Memory" not in call}
    gpu = row(nvml, replace(GB10, refuse=answers, memory_total=130_662_350_848, memory_used=1 << 30))
    assert (gpu.memory_used, gpu.memory_total, gpu.unified_memory) == (None, None, True)


@pytest.mark.e2e
def test_mig_instances_are_rows_of_their_own(nvml: FakeNvml):
    """No utilisation and no rows with MIG, the rest stays (nvidia_gpu_exporter's capture); instances have memory."""
    card, *instances = rows(nvml, H100_MIG)
    assert (card.mig, card.utilization, card.remap_failure) == (True, None, None)
    assert (card.power, card.temperature, card.ecc_uncorrectable) == (433.78, 53.0, 0)
    assert card.memory_total == 85_520_809_984
    assert {process.pid for process in card.processes} == {4301, 4302, 4303}
    assert card.unsupported == {"utilization": "not_supported", "remapped_rows": "not_supported"}
    assert [(one.uuid, one.parent, one.index) for one in instances] == [
        (instance.uuid, H100_MIG.uuid, 0) for instance in H100_MIG.instances
    ]
    assert [one.memory_total for one in instances] == [42_412_802_048, 21_074_280_448, 10_468_982_784]
    assert [one.processes for one in instances] == [
        (GpuProcess(4301, 19_900 * MIB),),
        (GpuProcess(4302, 8_900 * MIB),),
        (GpuProcess(4303, 4_900 * MIB),),
    ]
    assert all((one.power, one.energy, one.utilization) == (None, None, None) for one in instances)


@pytest.mark.e2e
def test_mig_without_privileges(nvml: FakeNvml):
    """The card's memory may not be read there (nvidia-container-toolkit 842): absent, with that reason; it is up."""
    no_memory = refused(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), code=NO_PERMISSION)
    card, *_ = rows(nvml, replace(H100_MIG, refuse={**H100_MIG.refuse, **no_memory}))
    assert card.up
    assert card.memory_total is None
    assert card.unsupported["memory"] == "no_permission"
    assert not card.unified_memory


@pytest.mark.e2e
def test_an_instance_that_was_destroyed_is_gone(nvml: FakeNvml):
    """And is no lost GPU."""
    nvml.set(H100_MIG)
    with reading(nvml.environment) as reader:
        assert len(reader.line().gpus) == 4
        nvml.set(replace(H100_MIG, instances=H100_MIG.instances[:1]))
        left = reader.until(lambda s: len(s.gpus) != 4)
    assert [gpu.uuid for gpu in left.gpus] == [H100_MIG.uuid, H100_MIG.instances[0].uuid]
    assert all(gpu.up for gpu in left.gpus)


@pytest.mark.e2e
def test_before_volta_there_is_no_energy(nvml: FakeNvml):
    """P100 (aiperf 1350): absent and never 0, and said once."""
    nvml.set(P100)
    with reading(nvml.environment) as reader:
        lines = [reader.line() for _ in range(4)]
    assert [line.gpus[0].energy for line in lines] == [None] * 4
    assert lines[-1].gpus[0].power == 178.5
    assert lines[-1].gpus[0].unsupported["energy"] == "not_supported"
    assert [len(line.warnings) for line in lines] == [1, 0, 0, 0]
    assert "P100" in lines[0].warnings[0]


@pytest.mark.e2e
def test_a_desktop_card_lacks_what_it_lacks(nvml: FakeNvml):
    """No ECC, no rows, no MIG (RTX 4080); an idle clock is no throttling, and an empty list is one that was told."""
    gpu = row(nvml, GEFORCE)
    assert (gpu.ecc_uncorrectable, gpu.remap_failure, gpu.mig) == (None, None, None)
    assert (gpu.up, gpu.throttling, gpu.processes, gpu.power) == (True, (), (), 14.6)


@pytest.mark.e2e
def test_a_driver_that_says_yes_and_knows_nothing_is_not_believed(nvml: FakeNvml):
    """Jetson (nv-monitor 17): SUCCESS with zeros all over. It is listed, and has no values."""
    gpu = row(nvml, JETSON)
    assert gpu.up
    assert gpu.name == "Orin (nvgpu)"
    values = (gpu.utilization, gpu.power, gpu.energy, gpu.temperature, gpu.sm_clock, gpu.memory_total, gpu.processes)
    assert values == (None,) * 7
    assert gpu.unsupported["power"] == "implausible"


@pytest.mark.e2e
def test_what_such_a_driver_does_know_is_kept(nvml: FakeNvml):
    """Thor tells utilisation (jetson_stats 698)."""
    gpu = row(nvml, replace(JETSON, utilization=40))
    assert (gpu.utilization, gpu.power) == (0.4, None)


@pytest.mark.e2e
def test_an_unknown_error_of_a_field_is_no_dead_gpu(nvml: FakeNvml):
    """WSL2 (distributed 5342): the list of processes fails with 999; that is no empty list either."""
    gpu = row(nvml, WSL)
    assert (gpu.up, gpu.utilization, gpu.processes) == (True, None, None)
    assert gpu.memory_used == 1_200 * MIB
    assert gpu.unsupported["processes"] == "unknown"


@pytest.mark.e2e
def test_a_gpu_of_which_nothing_is_known_is_down(nvml: FakeNvml):
    """Every call fails with 999, as on some cards that fell off the bus."""
    nvml.set(*many(H100, 2))
    with reading(nvml.environment) as reader:
        assert all(gpu.up for gpu in reader.line().gpus)
        nvml.lose(1, UNKNOWN)
        lost = reader.until(lambda s: not all(gpu.up for gpu in s.gpus)).gpus
    assert [(gpu.up, gpu.reason) for gpu in lost] == [(True, ""), (False, "unknown")]


# ---------------------------------------------------------------------------------------------------------------------
# Fields
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("refuse", "power", "scope"),
    [
        ({}, 631.95, "gpu"),
        (refused(("field:185/0",)), 631.95, "gpu"),
        (refused(("field:185/0", "nvmlDeviceGetPowerUsage")), 631.95, "gpu"),
        (refused(("field:185/0", "field:186", "nvmlDeviceGetPowerUsage")), 631.95, "module"),
        (refused(POWER), None, "gpu"),
    ],
)
def test_power_in_the_best_way_there_is(nvml: FakeNvml, refuse: dict[str, int], power: float | None, scope: str):
    """Of Grace, some drivers tell only the power of the whole module: then the row says so."""
    gpu = row(nvml, replace(H100, refuse=refuse))
    assert (gpu.power, gpu.scope) == (power, scope)


@pytest.mark.e2e
def test_a_library_without_a_function(nvml: FakeNvml, tmp_path: Path):
    """Then the older one is asked, and a list of processes is no "mismatch" that ends the reader."""
    missing = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV")
    gone = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetFieldValues")
    nvml.library = compile_library(tmp_path, without=missing + gone)
    gpu = row(nvml, replace(H100, reasons=0x8))
    assert gpu.processes == (GpuProcess(4242, 60_000 * MIB),)
    assert gpu.memory_used == 61_000 * MIB + 502_267_904  # version 1 counts what is reserved
    assert gpu.temperature == 59.0
    assert gpu.throttling == ("hw_slowdown",)
    assert gpu.power == 631.95
    assert (gpu.energy, gpu.recovery_action, gpu.throttled) == (None, None, {})
    assert gpu.unsupported["energy"] == "function_not_found"


@pytest.mark.e2e
def test_what_was_refused_for_good_is_not_asked_again(nvml: FakeNvml):
    """To ask on fills the kernel's log on some platforms (nvidia_gpu_exporter 384); a passing error is asked again."""
    ecc, clock = "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetClockInfo"
    nvml.set(replace(H100, refuse={ecc: 3, clock: NOT_FOUND}))
    with reading(nvml.environment) as reader:
        first = reader.line().gpus[0]
        assert (first.unsupported[ecc_field := "ecc_uncorrectable"], first.unsupported["sm_clock"]) == (
            "not_supported",
            "not_found",
        )
        nvml.set(H100)
        healed = reader.until(lambda s: s.gpus[0].sm_clock is not None).gpus[0]
    assert healed.ecc_uncorrectable is None
    assert healed.unsupported == {ecc_field: "not_supported"}


@pytest.mark.e2e
def test_a_value_that_is_late_once_is_not_unsupported(nvml: FakeNvml):
    """Energy that was told before: absent for a cycle, and nobody takes the GPU for one that does not count it."""
    with reading(nvml.environment) as reader:
        assert reader.line().gpus[0].energy is not None
        nvml.set(replace(H100, refuse={"nvmlDeviceGetTotalEnergyConsumption": 10}))
        late = reader.until(lambda s: s.gpus[0].energy is None).gpus[0]
        assert (late.up, late.power, late.unsupported) == (True, 631.95, {})
        nvml.set(H100)
        reader.until(lambda s: s.gpus[0].energy is not None)


@pytest.mark.e2e
def test_the_energy_counter_begins_anew(nvml: FakeNvml):
    """A driver that was loaded again counts from 0: handed on as it is, a fall is the join's to see."""
    with reading(nvml.environment) as reader:
        assert reader.line().gpus[0].energy > 5_000_000.0
        nvml.set(replace(H100, energy=1.0))
        assert reader.until(lambda s: s.gpus[0].energy < 5_000_000.0).gpus[0].up


@pytest.mark.e2e
def test_values_that_cannot_be_are_left_out(nvml: FakeNvml):
    """SUCCESS with garbage (nvtop 110): 37,100 % is no utilisation, pid 4294967295 no process, 0 bytes not known."""
    gpu = row(nvml, replace(H100, utilization=37_100, processes={4_294_967_295: 5, 4242: 0}))
    assert gpu.utilization is None
    assert gpu.unsupported["utilization"] == "implausible"
    assert gpu.processes == (GpuProcess(4242, None),)


#: A binding whose struct for a process has a field more than the driver's, as nvidia-ml-py 12.535.77 has.
LONG_STRUCT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("pynvml", {path!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
class c_nvmlProcessInfo_t(real._PrintableStructure):
    _fields_ = [*real.c_nvmlProcessInfo_v2_t._fields_, ("usedGpuCcProtectedMemory", real.c_ulonglong)]
real.c_nvmlProcessInfo_t = real.c_nvmlProcessInfo_v3_t = c_nvmlProcessInfo_t
sys.modules["pynvml"] = real
"""


@pytest.mark.e2e
def test_a_binding_with_another_struct(nvml: FakeNvml, tmp_path: Path):
    """nvidia-ml-py 12.535.77 reads nonsense from the second process on: the first stays, and a sentence says why."""
    (tmp_path / "pynvml.py").write_text(LONG_STRUCT.format(path=pynvml.__file__))
    nvml.set(replace(H100, processes={4242: 1 << 30, 4243: 1 << 30, 4244: 1 << 30}))
    with reading({**nvml.environment, "PYTHONPATH": str(tmp_path)}) as reader:
        line = reader.line()
    assert line.gpus[0].processes == (GpuProcess(4242, 1 << 30),)
    assert ["12.535.77" in warning for warning in line.warnings] == [True]


# ---------------------------------------------------------------------------------------------------------------------
# GPUs that are lost, hang, come back
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize(("code", "reason"), [(15, "lost"), (RESET_REQUIRED, "reset_required"), (UNKNOWN, "unknown")])
def test_one_of_four_is_lost(nvml: FakeNvml, code: int, reason: str):
    """The others are complete (nvitop 45, k8s-device-plugin 231); the lost one keeps its name, also when the library
    is initialised again and its handle is refused. The library's lookup by UUID, which fails for all, is not used."""
    cards = many(H100, 4)
    nvml.set(*cards)
    with reading(nvml.environment) as reader:
        assert [gpu.up for gpu in reader.line().gpus] == [True] * 4
        nvml.lose(2, code)
        for _ in range(15):  # over the first attempts to get it back
            lost = reader.until(lambda s: not all(gpu.up for gpu in s.gpus)).gpus
            assert [gpu.uuid for gpu in lost] == [card.uuid for card in cards]
            assert [gpu.up for gpu in lost] == [True, True, False, True]
            assert [gpu.power for gpu in lost] == [631.95, 631.95, None, 631.95]
        assert (lost[2].reason, lost[2].energy, lost[2].processes) == (reason, None, None)
        assert lost[2].name == H100.name
        nvml.say()
        assert all(gpu.up for gpu in reader.until(lambda s: s.gpus[2].up).gpus)


@pytest.mark.e2e
def test_a_gpu_that_was_lost_before_the_start(nvml: FakeNvml):
    """It is a row without a name; the others are read."""
    nvml.set(*many(H100, 3))
    nvml.lose(0)
    with reading(nvml.environment) as reader:
        lost, *others = reader.line().gpus
    assert (lost.index, lost.uuid, lost.up, lost.reason) == (0, "", False, "lost")
    assert [gpu.up for gpu in others] == [True, True]


@pytest.mark.e2e
def test_a_gpu_that_is_no_longer_counted(nvml: FakeNvml):
    """After a new start the driver may know fewer GPUs; the one that is missing is down, not forgotten."""
    cards = many(H100, 3)
    nvml.set(*cards)
    with reading(nvml.environment) as reader:
        assert len(reader.line().gpus) == 3
        nvml.gpus = cards[:2]
        nvml.directives = []
        nvml.lose(1)  # makes it start again
        down = reader.until(lambda s: [gpu.up for gpu in s.gpus] == [True, False, False]).gpus
    assert [gpu.uuid for gpu in down] == [card.uuid for card in cards]


@pytest.mark.e2e
def test_a_gpu_that_hangs_holds_up_nobody(nvml: FakeNvml):
    """The others are read on, cycle after cycle; the one that hangs is down, and up when it answers again."""
    nvml.set(*many(H100, 3))
    with reading(nvml.environment, patience=0.3) as reader:
        reader.line()
        nvml.hang("nvmlDeviceGetUtilizationRates", index=0)
        hung = [reader.until(lambda s: not s.gpus[0].up), reader.line(), reader.line()]
        assert {(gpu.index, gpu.reason) for line in hung for gpu in line.gpus if not gpu.up} == {(0, "hung")}
        assert hung[-1].gpus[1].at > hung[0].gpus[1].at
        nvml.say()
        assert all(gpu.up for gpu in reader.until(lambda s: s.gpus[0].up).gpus)


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["input closes", "SIGTERM"])
@pytest.mark.parametrize("call", ["nvmlDeviceGetUtilizationRates", "nvmlInitWithFlags", "nvmlEventSetWait_v2"])
def test_a_reader_that_hangs_can_be_ended(nvml: FakeNvml, call: str, way: str):
    """When its parent is gone, and on SIGTERM, also while the library holds its main thread."""
    if call != "nvmlInitWithFlags":
        nvml.set(H100)
        with reading(nvml.environment) as reader:
            reader.line()
            nvml.hang(call)
            end(reader, way)
    else:
        nvml.hang(call)
        with reading(nvml.environment) as reader:
            threads = Path(f"/proc/{reader.process.pid}/task")
            deadline = time.monotonic() + WITHIN
            while len(list(threads.iterdir())) < 2:  # until it watches its input
                assert time.monotonic() < deadline
                time.sleep(0.01)
            end(reader, way)


def end(reader: Reader, way: str) -> None:
    if way == "SIGTERM":
        reader.process.send_signal(signal.SIGTERM)
    else:
        reader.process.stdin.close()
    assert reader.process.wait(WITHIN) == 0


@pytest.mark.e2e
def test_a_reader_whose_output_breaks_ends(nvml: FakeNvml):
    """Nobody would know of it."""
    with reading(nvml.environment) as reader:
        reader.line()
        reader.process.stdout.close()
        assert reader.process.wait(WITHIN) == 0


@pytest.mark.e2e
def test_a_crash_names_its_call(nvml: FakeNvml):
    """The library takes the process with it when a GPU is lost (nvitop 139)."""
    with reading(nvml.environment) as reader:
        reader.line()
        nvml.segfault("nvmlDeviceGetPcieReplayCounter")
        while reader.line():
            pass
        assert reader.process.wait(WITHIN) == -signal.SIGSEGV
        assert b"nvmlDeviceGetPcieReplayCounter" in reader.process.stderr.read()


# ---------------------------------------------------------------------------------------------------------------------
# No GPUs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (VERSION_MISMATCH, "version_mismatch"),  # nvitop 41, homelab 4110
        (DRIVER_NOT_LOADED, "driver_not_loaded"),
        (NO_PERMISSION, "no_permission"),
        (UNKNOWN, "failed"),  # a container that lost its devices: nvidia-docker 1730
        (123, "failed"),
    ],
)
def test_a_library_that_does_not_start(nvml: FakeNvml, code: int, reason: str):
    """One line says why, and the process ends well: its parent starts another one later."""
    nvml.init = code
    nvml.write()
    line = only_line(nvml.environment)
    assert (line.reason, line.gpus) == (reason, ())
    assert line.detail.startswith("NVML, initialising: ")
    assert ("start a new one" in line.detail) == (code == UNKNOWN)


@pytest.mark.e2e
def test_no_library(tmp_path: Path):
    """A host without a driver, or a container in which it is not mounted."""
    assert only_line({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}).reason == "library_not_found"


@pytest.mark.e2e
def test_no_gpu_is_a_failure_and_not_idle(nvml: FakeNvml):
    """The library is there and counts none: a broken mount."""
    nvml.count = 0
    nvml.write()
    assert only_line(nvml.environment).reason == "no_gpus"


@pytest.mark.e2e
def test_the_driver_is_unloaded_meanwhile(nvml: FakeNvml):
    """The reader ends with the reason; a new one loads the new library."""
    with reading(nvml.environment) as reader:
        reader.line()
        nvml.say(f"refuse nvmlDeviceGetUtilizationRates {DRIVER_NOT_LOADED} -1")
        assert reader.until(lambda s: s.reason != "ok").reason == "driver_not_loaded"
        assert reader.process.wait(WITHIN) == 0


@pytest.mark.e2e
def test_another_package_in_the_place_of_the_binding(nvml: FakeNvml, tmp_path: Path):
    """``pynvml`` and ``nvidia-ml-py3`` bring a module of the same name: named, with the way out."""
    (tmp_path / "pynvml.py").write_text("class NVMLError(Exception): pass\ndef nvmlInit(): pass\n")
    other = tmp_path / "nvidia_ml_py3-7.352.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-ml-py3\nVersion: 7.352.0\n")
    line = only_line({**nvml.environment, "PYTHONPATH": str(tmp_path)})
    assert line.reason == "wrong_binding"
    assert str(tmp_path / "pynvml.py") in line.detail
    assert "nvidia-ml-py3 7.352.0" in line.detail
    assert "pip install" in line.detail


@pytest.mark.e2e
def test_an_init_that_lacks_its_function(nvml: FakeNvml, tmp_path: Path):
    """A library so old that it cannot even be started."""
    nvml.library = compile_library(tmp_path, without=("nvmlInitWithFlags",))
    line = only_line(nvml.environment)
    assert (line.reason, line.detail) == ("failed", "NVML, initialising: function_not_found")
    assert FUNCTION_NOT_FOUND == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


# ---------------------------------------------------------------------------------------------------------------------
# XIDs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_errors_of_a_gpu_are_reported_by_the_library(nvml: FakeNvml):
    """Each event once, with its GPU; the library knows no process."""
    cards = many(H100, 2)
    nvml.set(*cards)
    with reading(nvml.environment) as reader:
        first: tuple[Xid, ...] = ()
        while not first:  # until somebody listens; what came before is lost, as with the real library
            nvml.xid(0, 31)
            first = reader.line().xids
        nvml.xid(1, 79)
        nvml.xid(1, 48)
        found: list[Xid] = []
        while len(found) < 2:
            found += [xid for xid in reader.until(lambda s: s.xids).xids if xid.code != 31]
    assert [(xid.code, xid.uuid, xid.pci, xid.pid) for xid in found] == [
        (79, cards[1].uuid, "0000:1c:00.0", None),
        (48, cards[1].uuid, "0000:1c:00.0", None),
    ]


FLOOD = "NVRM: Xid (PCI:0000:1b:00): 45, pid=1496200, name=distprovers-gpu, Ch 0000000{}\n"


@pytest.mark.e2e
def test_a_flood_in_the_kernels_log_is_handed_on(nvml: FakeNvml, tmp_path: Path):
    """Six lines of one incident (gpud 117) are six reports here: to merge them takes what this process does not know.

    The GPU is found by its PCI address; what stood in the log before is not news.
    """
    log = tmp_path / "kmsg"
    log.write_text(FLOOD.format("9"))
    with reading(nvml.environment, kmsg=str(log)) as reader:
        first: tuple[Xid, ...] = ()
        while not first:  # until somebody reads the log
            with log.open("a") as file:
                file.write("NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=first\n")
            first = reader.line().xids
        assert {xid.code for xid in first} == {31}
        with log.open("a") as file:
            file.write("4,1,2,-;usb 1-1: new device\n" + "".join("4,1,2,-;" + FLOOD.format(c) for c in "abcdef"))
        found: list[Xid] = []
        while len(found) < 6:
            found += [xid for xid in reader.until(lambda s: s.xids).xids if xid.code != 31]
    assert [(x.code, x.pid, x.pci, x.uuid) for x in found] == [(45, 1_496_200, "0000:1b:00.0", H100.uuid)] * 6


@pytest.mark.e2e
def test_an_error_of_an_unknown_gpu_keeps_its_address(nvml: FakeNvml, tmp_path: Path):
    """Through a pipe, as the kernel's log is not a file. No UUID is invented."""
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    with reading(nvml.environment, kmsg=str(log)) as reader:
        reader.line()
        with log.open("w") as pipe:
            pipe.write("NVRM: Xid (PCI:0000:3b:00): 119, pid='<unknown>', name=<unknown>, Timeout waiting for RPC\n")
        (xid,) = reader.until(lambda s: s.xids).xids
    assert (xid.code, xid.uuid, xid.pci, xid.pid) == (119, "", "0000:3b:00.0", None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", (79, "0000:3b:00.0", 1234)),
        (b"NVRM: Xid (0000:03:00): 31, Ch 00000010", (31, "0000:03:00.0", None)),
        (b"6,339,5140900,-;NVRM: Xid (PCI:0008:01:00): 13, pid=4294967295, x", (13, "0008:01:00.0", None)),
        (b"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed", (154, "0000:3b:00.0", None)),
        (b"NVRM: GPU at PCI:0000:3b:00: GPU-1234", None),
        (b"", None),
    ],
)
def test_lines_of_the_kernels_log(line: bytes, expected: tuple[int, str, int | None] | None):
    """An XID, or nothing."""
    xid = parse_xid(line, 7.0)
    assert (xid and (xid.code, xid.pci, xid.pid)) == expected
    assert xid is None or xid.at == 7.0


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_no_line_of_the_log_breaks_the_reader(text: bytes, inside: bytes):
    """Any bytes, also inside a report: a report or none, and never an error."""
    for line in (text, b"NVRM: Xid (PCI:" + inside + b"): " + text, b"NVRM: Xid (PCI:0000:01:00): 45, pid=" + text):
        xid = parse_xid(line, 0.0)
        assert xid is None or (xid.pid is None or 0 < xid.pid <= 1 << 22)


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFF), st.integers(0, 0x1F))
def test_an_address_has_one_form(domain: int, bus: int, device: int):
    """NVML's, the log's and sysfs' are the same one."""
    expected = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    assert pci_address(f"{domain:08X}:{bus:02X}:{device:02X}.0") == expected
    assert pci_address(f"{domain:04x}:{bus:02x}:{device:02x}") == expected


# ---------------------------------------------------------------------------------------------------------------------
# What it costs
# ---------------------------------------------------------------------------------------------------------------------


def test_the_reader_loads_little():
    """None of the exporter's large libraries: the process is there all the time."""
    heavy = ("numpy", "aiohttp", "asyncio", "psutil", "prometheus_client", "rich", "click", "logging", "email")
    code = f"import sys, tokengap.sources.nvml_reader.__main__; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the command that installs it."""
    from tokengap.errors import SetupError

    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("gcc") is None
    with pytest.raises(SetupError, match="gcc is missing; as root: apt-get install -y gcc libc6-dev"):
        compile_library(tmp_path)
