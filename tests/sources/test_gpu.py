"""Our end of the GPU reader: what read() gives while the reader works, hangs, crashes, or was never there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tokengap.gpu_readings import GpuSnapshot
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.sources.gpu import NvmlReader, Patience

pytestmark = pytest.mark.e2e

QUICK = Patience(line=1.0, first_line=20.0, ending=0.4, between=(0.05, 0.2))


def reader(nvml: FakeNvml, patience: Patience = QUICK) -> NvmlReader:
    return NvmlReader(interval=0.1, device_patience=0.3, patience=patience, kmsg="", environment=nvml.environment)


async def until(gpus: NvmlReader, condition: Callable[[GpuSnapshot], bool], within: float = 30.0) -> GpuSnapshot:
    """Read until a condition holds of what is read; each read is answered at once, whatever the reader does."""
    deadline = time.monotonic() + within
    while not condition(snapshot := await asyncio.wait_for(gpus.read(), 0.5)):
        assert time.monotonic() < deadline, f"this did not come true in {within} s: {snapshot}"
        await asyncio.sleep(0.02)
    return snapshot


async def test_a_gpu_is_read(nvml: FakeNvml):
    """From nothing known, to a GPU with its values, to newer values of it."""
    async with reader(nvml) as gpus:
        assert (await gpus.read()).reason == "starting"
        first = await until(gpus, lambda s: s.reason == "ok")
        assert [gpu.uuid for gpu in first.gpus] == [nvml.gpus[0].uuid]
        assert first.readers == 1
        later = await until(gpus, lambda s: s.sequence > first.sequence)
        assert later.at > first.at
        assert later.gpus[0].energy > first.gpus[0].energy
