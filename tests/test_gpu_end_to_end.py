"""GPUs and what orphans cost, as they run: real sockets, the real reader, and a stand-in for NVIDIA's library."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from lab.serving import served
from test_end_to_end import Samples, total, watched
from tokengap.lab.batching import Knobs
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.lab.nvml.profiles import H100, many
from tokengap.lab.parts import LOOPBACK
from tokengap.series.cost import (
    BUSY_WITHOUT_TOKENS,
    ENGINE_ENERGY,
    ENGINE_GPU_SECONDS,
    ENGINE_GPUS,
    ORPHAN_COST,
    ORPHAN_ENERGY,
    ORPHAN_GPU_SECONDS,
    UNACCOUNTED,
)
from tokengap.series.gpus import GPU_ENGINE, GPU_INFO, GPU_UP, POWER, READER_INFO
from tokengap.series.tokens import TOKENS_OUT

pytestmark = pytest.mark.e2e

PRICE = ("--gpu-hour-price", "3600", "--currency", "EUR")  # one a second


def variables(nvml: FakeNvml) -> dict[str, str]:
    return {name: nvml.environment[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_CONTROL")}


def knows_its_gpus(page: Samples) -> bool:
    return total(page, GPU_ENGINE, engine="worker", by="processes") == 2


async def test_what_orphans_cost(nvml: FakeNvml, tmp_path: Path):
    """An engine on two GPUs, found by its process. Four users leave and the gateway reads on: from then on all that
    runs is orphans, so GPU-seconds, joules and money are theirs alone, and in proportion to each other."""
    one, two = many(H100, 2)
    nvml.set(one, two)
    async with watched(tmp_path, Knobs(rate=50), *PRICE, variables=variables(nvml)) as lab:
        memory = {lab.engine.pid: 60 << 30}
        nvml.set(*(replace(gpu, processes=memory) for gpu in (one, two)))
        await lab.exporter.until(knows_its_gpus)
        async with lab.crowd(4, max_tokens=400):
            before = await lab.exporter.until(
                lambda page: total(page, TOKENS_OUT) > 100 and total(page, ENGINE_GPU_SECONDS) > 2
            )
        assert total(before, ORPHAN_GPU_SECONDS) < 1
        page = await lab.exporter.until(lambda page: total(page, ORPHAN_GPU_SECONDS) > 4)
        assert total(page, ENGINE_GPUS, engine="worker", state="up") == 2
        assert total(page, ORPHAN_COST, currency="EUR") == pytest.approx(total(page, ORPHAN_GPU_SECONDS))
        assert total(page, ORPHAN_GPU_SECONDS) <= total(page, ENGINE_GPU_SECONDS)
        full, sole = (total(page, ORPHAN_ENERGY, basis=basis) for basis in ("full", "sole"))
        assert 0 < sole <= full <= total(page, ENGINE_ENERGY, basis="full")
        watts = full / total(page, ORPHAN_GPU_SECONDS)
        assert watts == pytest.approx(H100.power, rel=0.35)  # a reading may be a beat behind


async def test_a_gpu_is_lost_while_its_engine_answers(nvml: FakeNvml, tmp_path: Path):
    """It is said to be lost, with its identity and engine and no value; the other one and the engine go on; what is not
    known of its time is said."""
    one, two = many(H100, 2)
    nvml.set(one, two)
    async with watched(tmp_path, Knobs(rate=50), variables=variables(nvml)) as lab:
        nvml.set(*(replace(gpu, processes={lab.engine.pid: 1 << 30}) for gpu in (one, two)))
        await lab.exporter.until(knows_its_gpus)
        nvml.lose(1)
        page = await lab.exporter.until(lambda page: total(page, ENGINE_GPUS, state="lost") == 1)
        assert total(page, GPU_UP, uuid=one.uuid) == 1
        assert total(page, GPU_UP, uuid=two.uuid) == 0
        assert total(page, GPU_INFO, uuid=two.uuid) == 1
        assert not [labels for name, labels in page if name == str(POWER) and ("uuid", two.uuid) in labels]
        async with lab.crowd(1, max_tokens=20) as users:
            assert [outcome.how for outcome in await asyncio.gather(*users)] == ["completed"]
        await lab.exporter.until(lambda page: total(page, UNACCOUNTED, reason="gpu") > 0)


async def test_a_library_that_hangs_costs_its_values_and_nothing_else(nvml: FakeNvml, tmp_path: Path):
    """Values of GPUs go, every scrape is answered, streams are seen as before; and when the exporter ends, nothing of
    it is left."""
    async with watched(tmp_path, Knobs(rate=50), variables=variables(nvml)) as lab:
        await lab.exporter.until(lambda page: total(page, GPU_UP) == 1)
        readers = [
            child for child in psutil.Process(lab.exporter_part.pid).children() if "nvml_reader" in str(child.cmdline())
        ]
        assert len(readers) == 1
        nvml.hang("nvmlDeviceGetUUID")
        nvml.hang("nvmlDeviceGetUtilizationRates")
        page = await lab.exporter.until(
            lambda page: total(page, GPU_UP) == 0 or total(page, READER_INFO, reason="hung") == 1
        )
        assert not [name for name, _ in page if name == str(POWER)]
        async with lab.crowd(1, max_tokens=20) as users:
            assert [outcome.how for outcome in await asyncio.gather(*users)] == ["completed"]
    assert not [process for process in readers if process.is_running()]


async def test_a_gpu_that_works_for_an_idle_engine(nvml: FakeNvml, tmp_path: Path):
    """97 % busy while the engine has nothing to do: seconds are counted."""
    async with watched(tmp_path, Knobs(rate=50), variables=variables(nvml)) as lab:
        nvml.set(replace(H100, utilization=97, processes={lab.engine.pid: 1 << 30}))
        await lab.exporter.until(lambda page: total(page, BUSY_WITHOUT_TOKENS, engine="worker") > 0)


DCGM = """
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-dddd",modelName="H100"} 59
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-dddd",modelName="H100"} 600
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-dddd",modelName="H100"} {energy}
"""


async def test_a_dcgm_exporter_in_place_of_the_library(tmp_path: Path):
    """Its page is read, a GPU is the engine's by the settings, and nothing of NVIDIA's is loaded here."""
    read = 0

    async def page(_: web.Request) -> web.Response:
        nonlocal read
        read += 1
        return web.Response(text=DCGM.replace("{energy}", str(600_000 * read)))

    app = web.Application()
    app.router.add_get("/metrics", page)
    async with (
        served(app) as port,
        watched(tmp_path, Knobs(rate=50), "--dcgm", f"http://{LOOPBACK}:{port}", gpus=["GPU-dddd"]) as lab,
    ):
        now = await lab.exporter.until(lambda page: total(page, ENGINE_ENERGY, basis="full") > 0)
        assert total(now, GPU_ENGINE, engine="worker", uuid="GPU-dddd", by="settings") == 1
        assert total(now, READER_INFO, way="dcgm", reason="ok") == 1
        assert psutil.Process(lab.exporter_part.pid).children() == []
