"""One GPU read field by field, with answers that are made up: what any mix of errors makes of a row."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.gpu_readings import Gpu
from tokengap.sources.nvml_reader import reader as reader_module
from tokengap.sources.nvml_reader.calls import CODES, GONE, OVER, PERMANENT, Nvml, Over, Refused, refusal
from tokengap.sources.nvml_reader.device import Device, DeviceReader
from tokengap.sources.nvml_reader.reader import Worker

#: What a GPU answers to each call when nothing is wrong with it.
GOOD: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, used=10 << 30),
    "nvmlDeviceGetMemoryInfo_v2": SimpleNamespace(total=80 << 30, used=10 << 30),
    "nvmlDeviceGetPowerUsage": 300_000,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
    "nvmlDeviceGetTemperatureV": 40,
    "nvmlDeviceGetTemperature": 40,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": 0,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetPcieReplayCounter": 0,
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetComputeRunningProcesses_v3": [SimpleNamespace(pid=7, usedGpuMemory=1 << 30)],
    "nvmlDeviceGetComputeRunningProcesses_v2": [SimpleNamespace(pid=7, usedGpuMemory=1 << 30)],
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": [],
    "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
}
#: The values of a row that a whole GPU has, by the name under which it says what it lacks.
VALUES = {
    "power": "power",
    "energy": "energy",
    "utilization": "utilization",
    "memory": "memory_total",
    "temperature": "temperature",
    "sm_clock": "sm_clock",
    "throttling": "throttling",
    "ecc_uncorrectable": "ecc_uncorrectable",
    "remapped_rows": "remap_failure",
    "pcie_replays": "pcie_replays",
    "mig": "mig",
    "processes": "processes",
    "recovery_action": "recovery_action",
}


class MadeUp(Nvml):
    """A library in which calls and field values fail with given codes. ``asked`` counts the calls."""

    def __init__(self, codes: dict[str, int]) -> None:
        self.codes = codes
        self.asked: dict[str, int] = {}

    def __call__(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlDeviceGetMemoryInfo" and len(arguments) > 1:
            name = "nvmlDeviceGetMemoryInfo_v2"
        self.asked[name] = self.asked.get(name, 0) + 1
        if name in self.codes:
            raise refusal(self.codes[name])
        if name == "nvmlDeviceGetFieldValues":
            return [self.value(field) for field, _ in arguments[1]]
        return GOOD[name]

    def value(self, field: int) -> Any:
        code = self.codes.get(f"field:{field}", 0)
        return SimpleNamespace(
            nvmlReturn=code, valueType=1, value=SimpleNamespace(uiVal=0 if field == 230 else 300_000)
        )

    @property
    def reads_processes(self) -> bool:
        return True


def device() -> Device:
    return Device(None, 0, "GPU-1", "NVIDIA Made Up")


calls = st.sampled_from([*GOOD, "nvmlDeviceGetFieldValues", *(f"field:{n}" for n in (185, 186, 230, 269, 270, 271))])
codes = st.sampled_from([*CODES, 77, 2_000_000_000])


@given(st.dictionaries(calls, codes, max_size=12))
def test_any_errors_make_a_row_or_end_the_reader(errors: dict[str, int]):
    """What is missing is None and has a reason, what is not was given; the row travels as JSON and comes back."""
    nvml = MadeUp(errors)
    one = DeviceReader(nvml, device(), lambda _: None)
    try:
        (gpu,) = one.read()
    except Over:
        assert {CODES.get(code) for code in errors.values()} & set(OVER)
        return
    assert msgspec.json.decode(msgspec.json.encode(gpu), type=Gpu) == gpu
    if not gpu.up:
        assert gpu.reason in GONE | {"unknown"}
        assert gpu.energy is None
        return
    for name, value in VALUES.items():
        assert (getattr(gpu, value) is None) == (name in gpu.unsupported), name
    assert set(gpu.unsupported.values()) <= {*CODES.values(), "error_77", "error_2000000000"}


@given(st.dictionaries(calls, st.sampled_from([3, 4, 13, 26]), max_size=12))
def test_what_is_refused_for_good_is_asked_once(errors: dict[str, int]):
    """Over three cycles; what is given is asked each time."""
    nvml = MadeUp(errors)
    one = DeviceReader(nvml, device(), lambda _: None)
    first, _, third = one.read(), one.read(), one.read()
    assert {gpu.uuid: gpu.unsupported for gpu in first} == {gpu.uuid: gpu.unsupported for gpu in third}
    for call in errors:
        assert call.startswith("field:") or call == "nvmlDeviceGetFieldValues" or nvml.asked.get(call, 0) <= 1
    assert nvml.asked.get("nvmlDeviceGetUtilizationRates") == (1 if "nvmlDeviceGetUtilizationRates" in errors else 3)


def test_classes_of_errors_do_not_overlap():
    """Each word is in one at most: for good, gone, over; the rest passes."""
    assert not PERMANENT & GONE
    assert not (PERMANENT | GONE) & set(OVER)
    assert (PERMANENT | GONE | set(OVER)) <= set(CODES.values())


def test_an_unlisted_code_is_an_error_like_others():
    """Its text would be a call into the library that just failed."""
    error = refusal(4711)
    assert (type(error), error.word) == (Refused, "error_4711")


def test_a_worker_that_is_late_is_asked_for_the_same_answer(monkeypatch: pytest.MonkeyPatch):
    """A thread that hangs holds up nobody; what it brings then counts, unless it is old."""
    go, started = threading.Event(), threading.Event()
    calls: list[int] = []

    def work() -> int:
        calls.append(len(calls))
        started.set()
        assert go.wait(30)
        return len(calls)

    worker = Worker(work)
    assert worker.ask(0.01) is None
    assert started.wait(30)
    began = time.monotonic()
    assert worker.ask(30.0) is None  # not waited for again
    assert time.monotonic() - began < 10
    go.set()
    assert answer_of(worker) == 1
    assert worker.ask(30.0) == 2
    go.clear()
    assert worker.ask(0.01) is None
    monkeypatch.setattr(reader_module, "STALE", 0.0)
    go.set()
    assert answer_of(worker) == 4  # the third was too old
    worker.leave()


def answer_of(worker: Worker[int]) -> int:
    deadline = time.monotonic() + 30
    while (answer := worker.ask(30.0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


def test_a_workers_error_is_raised_where_it_is_asked():
    """And not lost in its thread."""

    def fail() -> None:
        raise Over("driver_not_loaded")

    with pytest.raises(Over):
        Worker(fail).ask(30.0)
