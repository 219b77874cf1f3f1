"""A client that vanished (half-open) costs seconds of tokens, not the quarter of an hour that proxies take."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


@pytest.mark.e2e
async def test_who_vanishes_is_let_go_of_and_who_stalls_is_not():
    """By its own socket's tcp_info: some seconds for a stream. A reader that stalls is there, and gets everything."""
    if os.geteuid():
        pytest.fail("a network of its own takes root: run the tests as root")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "admit.vanishing"), cwd=TESTS, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60.0)
    said = json.loads(out)
    vanished, whole, stalled = (said["requests"][name] for name in ("vanish-True", "vanish-False", "stall-True"))
    assert vanished["state"] == "aborted"
    assert vanished["noticed_after"] < 15.0  # some two seconds, where the machine has nothing else to do
    assert whole["state"] == "finished"  # nothing was sent to it until the end, so nothing could tell
    assert (stalled["how"], stalled["got"], stalled["state"]) == ("completed", 400, "finished")
    page = said["page"]
    useful = vanished["got"] + stalled["got"]
    # What it read last was not acknowledged any more, or what was acknowledged not read: 0.1 s of tokens.
    assert page["tokengap_tokens_useful_total{e0}"] == pytest.approx(useful, abs=5)
    assert page["tokengap_streams_ended_total{e0,admit,cancelled}"] == 1
