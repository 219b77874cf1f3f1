"""GPU series and what orphans cost: fields that are not told are absent, and the parts can be recomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from series.example import rich_view
from series.test_page import samples, value
from tokengap.series.gpus import GPUS
from tokengap.series.render import render

HEALTHY, LOST, UNIFIED = (f"GPU-8f6bb2a1-0000-4000-8000-00000000000{n}" for n in (1, 2, 3))


def test_a_lost_gpu_has_its_identity_and_no_values() -> None:
    """Of a lost GPU: up 0, info, its engine and its totals; no value that would look like an idle one."""
    names = {name for name, labels in samples(render(rich_view())) if ("uuid", LOST) in labels}
    assert names == {
        "tokengap_gpu_up",
        "tokengap_gpu_info",
        "tokengap_gpu_engine_info",
        "tokengap_gpu_energy_resets_total",
    }
    assert value(render(rich_view()), "tokengap_gpu_up", uuid=LOST) == 0.0


def test_a_device_without_memory_of_its_own_shows_none() -> None:
    """GB10: no device memory, the flag instead, and whose it is stands as unknown."""
    page = render(rich_view())
    assert value(page, "tokengap_gpu_memory_total_bytes", uuid=UNIFIED) is None
    assert value(page, "tokengap_gpu_memory_used_bytes", uuid=UNIFIED) is None
    assert value(page, "tokengap_gpu_unified_memory", uuid=UNIFIED) == 1.0
    assert value(page, "tokengap_gpu_engine_info", uuid=UNIFIED, engine="", by="unknown") == 1.0
    assert value(page, "tokengap_gpu_utilization_latched", uuid=UNIFIED) is None


def test_no_process_id_is_in_a_label() -> None:
    """Pids stand on /api/gpus only."""
    assert b"4242" not in render(rich_view()).text


def test_without_gpus_nothing_is_said_but_why() -> None:
    """A host without a driver has the reason and no other GPU series; with --no-gpu there is not even that."""
    view = rich_view()
    none = replace(view, gpus=replace(view.gpus, reason="library_not_found", driver="", read_at=None, gpus=()))
    named = {name for name, _ in samples(render(none)) if name.startswith("tokengap_gpu_")}
    assert named == {
        "tokengap_gpu_reader_info",
        "tokengap_gpu_reader_processes",
        # the engine's account goes on from when it had one
        "tokengap_gpu_busy_without_tokens_seconds_total",
        "tokengap_gpu_hour_price",
    }
    assert value(render(none), "tokengap_gpu_reader_info", way="nvml", driver="", reason="library_not_found") == 1.0
    off = replace(view, gpus=None)
    assert not [sample for series in GPUS for sample in series.read(off)]


def test_cost_can_be_recomputed_from_the_page() -> None:
    """Money is the orphans' GPU-hours times the price, and carries its currency."""
    page = render(rich_view())
    seconds = value(page, "tokengap_orphan_gpu_seconds_total", engine="worker")
    price = value(page, "tokengap_gpu_hour_price", currency="EUR")
    assert seconds is not None
    assert price is not None
    cost = value(page, "tokengap_orphan_cost_total", engine="worker", currency="EUR")
    assert cost == pytest.approx(seconds / 3600 * price)
    assert value(page, "tokengap_engine_gpus", engine="worker", state="lost") == 1.0


def test_without_a_price_there_is_no_cost() -> None:
    """No price, no money; GPU-seconds stay. And an engine whose GPUs are not known has no account at all."""
    names = {name for name, _ in samples(render(replace(rich_view(), price=None)))}
    assert "tokengap_orphan_gpu_seconds_total" in names
    assert not {name for name in names if "cost" in name or "price" in name}
    spare = 'spare "b"\\<b>'
    assert value(render(rich_view()), "tokengap_engine_gpu_seconds_total", engine=spare) is None
