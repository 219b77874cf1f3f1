"""What orphans cost on a real NVIDIA GPU, by the whole exporter: ``make test-gpu``.

The engine is the lab's, which computes nothing; a child of its process keeps the GPU busy, as an engine's workers do.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_end_to_end import total, watched
from tokengap.lab.batching import Knobs
from tokengap.series.cost import ENGINE_ENERGY, ENGINE_GPU_SECONDS, ORPHAN_COST, ORPHAN_ENERGY, ORPHAN_GPU_SECONDS
from tokengap.series.gpus import GPU_ENGINE
from tokengap.series.tokens import TOKENS_OUT
from tokengap.sources.nvml_reader.calls import Nvml, load_binding

pytestmark = pytest.mark.gpu

#: One cent a second, and some watts for nothing: the exporter does not see this GPU rest.
PRICE = ("--gpu-hour-price", "36", "--currency", "EUR", "--gpu-idle-power", "75")

BEAT = 1.0

#: Starts a child that keeps the first GPU busy for as long as its parent lives, and becomes the program it is given.
WITH_A_WORKER = """
import ctypes, os, subprocess, sys
if sys.argv[1] != "work":
    subprocess.Popen([sys.executable, __file__, "work", str(os.getpid())])
    os.execv(sys.argv[1], sys.argv[1:])
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code:
        raise SystemExit(f"CUDA says {code}")
context, memory, device, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_size_t(1 << 30)
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), size))
while os.getppid() == int(sys.argv[2]):
    for _ in range(100):
        check(cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), size))
    check(cuda.cuCtxSynchronize())
"""


def joules(nvml: Nvml) -> float:
    """Return what the first GPU's own counter says now."""
    return nvml("nvmlDeviceGetTotalEnergyConsumption", nvml("nvmlDeviceGetHandleByIndex", 0)) / 1e3


@pytest.fixture
def driver() -> Iterator[Nvml]:
    nvml = load_binding()
    nvml("nvmlInit")
    yield nvml
    nvml("nvmlShutdown")


async def test_what_orphans_cost_by_the_driver_own_counter(tmp_path: Path, driver: Nvml):
    """The GPU is found by the engine's child. Four users leave and the gateway reads on: from then on all the GPU does
    is for nobody, its seconds, joules and cents, and the joules are those that the driver counts meanwhile."""
    program = tmp_path / "engine_with_worker.py"
    program.write_text(WITH_A_WORKER)
    async with watched(tmp_path, Knobs(rate=20), *PRICE, wrapped=(sys.executable, str(program))) as lab:
        await lab.exporter.until(lambda page: total(page, GPU_ENGINE, engine="worker", by="processes") == 1)
        async with lab.crowd(4, max_tokens=600):
            await lab.exporter.until(lambda page: total(page, TOKENS_OUT) > 100)
        first = await lab.exporter.until(lambda page: total(page, ORPHAN_GPU_SECONDS) > 2)
        began, counted = time.monotonic(), joules(driver)
        await asyncio.sleep(12)
        last, took, counted = await lab.exporter.scrape(), time.monotonic() - began, joules(driver) - counted

    def grown(series: object, **labels: str) -> float:
        return total(last, series, **labels) - total(first, series, **labels)

    watts = counted / took
    print(f"\n{took:.1f} s at {watts:.0f} W by the driver's counter: {counted:.0f} J")
    for series in (ENGINE_GPU_SECONDS, ORPHAN_GPU_SECONDS, ORPHAN_COST):
        print(f"{series}: {grown(series):.3f}")
    for basis in ("full", "active", "sole"):
        print(f"{ORPHAN_ENERGY} {basis}: {grown(ORPHAN_ENERGY, basis=basis):.0f} J")
    assert grown(ORPHAN_GPU_SECONDS) == pytest.approx(took, abs=2 * BEAT)
    assert grown(ORPHAN_GPU_SECONDS) == pytest.approx(grown(ENGINE_GPU_SECONDS))
    assert grown(ORPHAN_COST) == pytest.approx(grown(ORPHAN_GPU_SECONDS) / 100)
    assert grown(ORPHAN_ENERGY, basis="full") == pytest.approx(counted, abs=2 * BEAT * watts)
    assert grown(ORPHAN_ENERGY, basis="full") == pytest.approx(grown(ENGINE_ENERGY, basis="full"))
    assert grown(ORPHAN_ENERGY, basis="sole") == pytest.approx(grown(ORPHAN_ENERGY, basis="full"))
    spared = grown(ORPHAN_ENERGY, basis="full") - grown(ORPHAN_ENERGY, basis="active")
    assert spared == pytest.approx(75 * grown(ORPHAN_GPU_SECONDS), rel=0.02)
