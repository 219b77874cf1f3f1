"""The reader on a real NVIDIA GPU, and a table of what each of its values said. ``make test-gpu``.

Needs a driver and one GPU that may be used for some seconds; it takes 1 GiB of its memory.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tokengap.gpu_readings import Gpu, GpuSnapshot
from tokengap.sources.gpu import NvmlReader
from tokengap.sources.nvml_reader.calls import Nvml, Refused, load_binding
from tokengap.sources.nvml_reader.device import (
    FIELDS,
    OTHER_LISTS,
    RECOVERY_ACTION,
    THROTTLED_FIELDS,
    Device,
)
from tokengap.sources.nvml_reader.reader import Reader

pytestmark = pytest.mark.gpu

GIB = 1 << 30
CYCLES = 20

#: Takes memory of the first GPU by the driver's own API, says so, and keeps it until its input closes.
USER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code:
        raise SystemExit(f"CUDA says {code}")
context, memory, device = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 30)))
check(cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), ctypes.c_size_t(1 << 30)))
check(cuda.cuCtxSynchronize())
print("taken", flush=True)
sys.stdin.read()
check(cuda.cuCtxDestroy_v2(context))
"""


async def until(gpus: NvmlReader, condition: Callable[[GpuSnapshot], bool], within: float = 60.0) -> GpuSnapshot:
    deadline = time.monotonic() + within
    while not condition(snapshot := await gpus.read()):
        assert time.monotonic() < deadline, f"this did not come true in {within} s: {snapshot}"
        await asyncio.sleep(0.05)
    return snapshot


async def test_a_real_gpu_is_read():
    """It has a name, memory, power, temperature, and energy that grows as its power says."""
    async with NvmlReader() as gpus:
        first = await until(gpus, lambda s: s.reason != "starting")
        assert first.reason == "ok", first
        print(f"\ndriver {first.driver}; {first.warnings or 'no warnings'}")
        for gpu in first.gpus:
            print(gpu)
        later = await until(gpus, lambda s: s.reason != "ok" or s.sequence >= first.sequence + 5)
        assert later.reason == "ok", later
        assert later.readers == 1
        up = [(a, b) for a, b in zip(first.gpus, later.gpus, strict=True) if a.up and b.up]
        assert up
        for before, after in up:
            assert before.uuid == after.uuid
            assert before.uuid.startswith(("GPU-", "MIG-"))
            assert before.name
            assert 0 <= before.memory_used <= before.memory_total
            if before.parent:
                continue
            assert 1 < before.power < 2000
            assert 0 < before.temperature < 120
            watts = (after.energy - before.energy) / (after.at - before.at)
            print(f"{before.power:.1f} W then {after.power:.1f} W by the sensor, {watts:.1f} W by the energy counter")
            assert after.energy > before.energy
            assert watts < 2000
    assert psutil.Process().children() == []


@contextmanager
def user_of_the_gpu() -> Iterator[int]:
    """Run a process that holds 1 GiB of the first GPU; give its pid."""
    with subprocess.Popen([sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"taken\n"
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(30)


def held(snapshot: GpuSnapshot) -> int:
    return sum(gpu.memory_used or 0 for gpu in snapshot.gpus if not gpu.parent)


def processes(snapshot: GpuSnapshot) -> dict[int, int | None]:
    return {process.pid: process.memory for gpu in snapshot.gpus for process in gpu.processes or ()}


async def test_who_uses_it_is_seen():
    """A process that takes 1 GiB: the GPU's memory rises by it, and the process stands in the list with it.

    Its pid is ours where the driver speaks of our PID namespace, else one that we do not know.
    """
    async with NvmlReader() as gpus:
        before = await until(gpus, lambda s: s.reason == "ok")
        with user_of_the_gpu() as pid:
            grown = await until(gpus, lambda s: held(s) >= held(before) + GIB)
            new = {key: value for key, value in processes(grown).items() if key not in processes(before)}
            print(f"\n{(held(grown) - held(before)) / GIB:.2f} GiB more; new processes: {new}; ours is {pid}")
            assert len(new) == 1, "no new process in the list: is this a container without the host's PID namespace?"
            ((seen, memory),) = new.items()
            assert memory is None or memory >= GIB
            if memory is None:
                print("the driver does not tell how much memory it has")
            if seen != pid:
                print(f"the driver speaks of another PID namespace: {pid} here is {seen} there")
                assert not psutil.pid_exists(seen)
        await until(gpus, lambda s: seen not in processes(s))


def timed(read: Callable[[], object]) -> tuple[float, object]:
    """Return the median time of a call in milliseconds, and its answer."""
    times, answer = [], None
    for _ in range(CYCLES):
        began = time.perf_counter()
        try:
            answer = read()
        except Refused as error:
            answer = f"refused: {error.word}"
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times), answer


def table(nvml: Nvml, device: Device) -> Iterator[tuple[str, float, object]]:
    """Ask one GPU for everything, in every way there is."""
    for name, ways in FIELDS.items():
        for number, way in enumerate(ways):
            yield f"{name} [{number}]", *timed(lambda way=way: way(nvml, device))
    for name in OTHER_LISTS:
        yield name, *timed(lambda name=name: nvml(name, device.handle))
    wanted = [*THROTTLED_FIELDS, RECOVERY_ACTION]
    yield "fields", *timed(lambda: nvml.fields(device.handle, wanted))


def test_what_each_value_says_and_costs():
    """Printed; and a cycle is a small part of a second."""
    nvml = load_binding()
    reader = Reader(nvml, patience=5.0)
    began = time.perf_counter()
    reader.open()
    print(f"\nopening took {(time.perf_counter() - began) * 1e3:.1f} ms")
    try:
        cycles = []
        for _ in range(CYCLES):
            began = time.perf_counter()
            snapshot = reader.cycle()
            cycles.append((time.perf_counter() - began) * 1e3)
        (first, *_), last = snapshot.gpus, cycles[-1]
        print(f"a cycle: first {cycles[0]:.2f} ms, median {statistics.median(cycles):.2f}, last {last:.2f}")
        assert isinstance(first, Gpu)
        print(f"not supported: {dict(first.unsupported)}")
        handle = nvml("nvmlDeviceGetHandleByIndex", 0)
        for name, milliseconds, answer in table(nvml, Device(handle, 0, first.uuid, first.name)):
            print(f"{name:48} {milliseconds:8.3f} ms  {str(answer)[:100]}")
        assert statistics.median(cycles) < 500
    finally:
        assert reader.close()
