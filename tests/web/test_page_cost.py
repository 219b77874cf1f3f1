"""What the live page and ``tokengap top`` may cost with 2,000 streams, measured as ``make bench`` does, and printed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.alone]

BENCH = Path(__file__).parents[2] / "bench"

#: The bars, in the units of the benches.
PAGE = {"first_paint_seconds": 1.0, "cores": 0.2, "json_bytes": 500_000}
TOP = {"redraw_ms": 50.0}


@pytest.mark.parametrize(("bench", "bars"), [("page.py", PAGE), ("top.py", TOP)])
async def test_under_the_bars(bench: str, bars: dict[str, float]):
    """Each figure is under its bar."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, BENCH / bench, "--json", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, wrong = await process.communicate()
    assert process.returncode == 0, wrong.decode()
    measured = json.loads(said)
    print(measured)
    assert {name: measured[name] for name, bar in bars.items() if measured[name] >= bar} == {}
