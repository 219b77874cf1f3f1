"""Healthy traffic, a short form of `make soak`: nobody leaves, so nobody is an orphan."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from tokengap.lab.soak import Soaked

WELL = Soaked(
    seconds=10.0,
    requests=50,
    failed=0,
    generated=1000,
    out=1000.0,
    useful=1000.0,
    orphaned=0.0,
    pending=0.0,
    unattributed=0.0,
    most_orphans=0,
    ended={"completed": 50},
    beats=10,
    late_beats=0,
)


@pytest.mark.parametrize(
    "change",
    [{"requests": 0}, {"failed": 1}, {"orphaned": 0.6}, {"most_orphans": 1}, {"ended": {"orphaned": 1}}],
    ids=str,
)
def test_one_orphan_is_too_many(change):
    """And so is a request that failed, or traffic that never flowed."""
    assert WELL.passed
    assert not replace(WELL, **change).passed


async def soak(lasts: str) -> tuple[dict[str, Any], int]:
    """Return what a soak said, and its exit code."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokengap.lab.soak", "--for", lasts, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 300)
    assert out, err.decode()
    soaked = json.loads(out)
    assert soaked["requests"] > 50
    assert soaked["failed"] == 0
    assert soaked["out"] == soaked["generated"]
    return soaked, process.returncode


@pytest.mark.e2e
@pytest.mark.alone
async def test_healthy_traffic_has_few_orphans_if_any():
    """Through three proxies with pooled connections and past them, with polls and health checks: none in three tokens
    of a hundred. Two short answers on one connection within a beat may be taken for one while other tests run; the
    recordings in tests/join/test_healthy.py have none at all."""
    soaked, _ = await soak("15s")
    assert soaked["orphaned"] <= 0.03 * soaked["out"]


@pytest.mark.e2e
@pytest.mark.long
async def test_healthy_traffic_has_no_orphans():
    """Where nothing else runs: none, and 0 tokens."""
    soaked, code = await soak("60s")
    assert (soaked["false_orphans"], soaked["orphaned"], code) == (0, 0, 0)
