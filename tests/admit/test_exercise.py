"""The exercise of the source article, as it is printed there: its ports, its loop of curl, and what it is to show."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import netns
from lab.commands import tokengap
from lab.serving import until
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.gateway import gateway_part
from tokengap.lab.parts import listens
from tokengap.lab.truth import EngineControl, Truth

#: As printed in the article.
LOOP = "for i in $(seq 1 8); do curl -N -m 1.5 -X POST http://127.0.0.1:8090/v1/stream & done"

ADMIT = (
    *(sys.executable, "-m", "tokengap", "admit", "--engine", "http://127.0.0.1:8100", "--slots", "1"),
    *("--admit-listen", "127.0.0.1:8090", "--admit-control", "admit.sock"),
)
NAIVE = gateway_part(8090, 8100, leak=True).command


@contextlib.contextmanager
def topology(in_front: tuple[str, ...], directory: Path) -> Iterator[netns.Space]:
    """The engine at 8100 and a gateway at 8090, in a network namespace of their own, where both ports are free."""
    engine = engine_part(8100, Knobs(max_num_seqs=1, rate=100.0)).command
    in_front = tuple(word if word != "admit.sock" else str(directory / word) for word in in_front)
    with netns.host() as host:
        space = host.space(address=False)
        running = [subprocess.Popen(space.command(*command), cwd=directory) for command in (engine, in_front)]
        try:
            for port in (8100, 8090):
                space.run(lambda port=port: asyncio.run(until(lambda: listens(port), within=20)))
            yield space
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait(20)


def truth(space: netns.Space) -> Truth:
    return space.run(lambda: asyncio.run(EngineControl(8100).truth()))


def after_the_loop(space: netns.Space) -> float:
    """Run the loop to its end, and return when that was."""
    loop = subprocess.run(space.command("bash", "-c", f"{LOOP}\nwait"), capture_output=True, timeout=60, check=True)
    assert b"data:" in loop.stdout, "nobody was answered"
    return time.monotonic()


@pytest.mark.e2e
def test_after_the_cuts_nobody_holds_a_slot(tmp_path: Path):
    """One stream ran and was cut in mid-answer; of the other seven none, or those that were there for some ms longer
    than the first, reached the engine, and were cut there. The slot is free within a second."""
    with topology(ADMIT, tmp_path) as space:
        ended = after_the_loop(space)
        while (now := truth(space)).now.running and time.monotonic() < ended + 5:
            time.sleep(0.05)
        assert max(sample.running for sample in now.history) == 1, "the slot was used"
        assert all(sample.running == 0 for sample in now.history if sample.at > ended + 1.0)
        assert {request.state for request in now.requests.values()} == {"aborted"}
        cut, *after = sorted(now.requests.values(), key=lambda request: request.arrived)
        assert cut.generated < 256
        assert all(request.generated <= 5 for request in after)
        assert sum(request.generated - request.written for request in now.requests.values()) <= 5


@pytest.mark.e2e
@pytest.mark.long
def test_through_the_naive_gateway_they_hold_it_on(tmp_path: Path):
    """What the article shows: two seconds after everybody left the slot is full, and works for nobody."""
    with topology(NAIVE, tmp_path) as space:
        ended = after_the_loop(space)
        time.sleep(max(ended + 2.0 - time.monotonic(), 0))
        now = truth(space)
        assert now.now.running == 1
        assert now.generated > 300, "the second stream of those that left is being generated"


@pytest.mark.e2e
@pytest.mark.long
async def test_the_drill_through_admit(tmp_path: Path):
    """20 users, one slot, 8 leave: nobody who left and nobody who was refused costs a token."""
    ran = await tokengap("drill", "--through", "admit", "--ports", "auto", "--rate", 400, "--json")
    truth, users = ran.json["truth"], ran.json["users"]
    assert users["served"] + users["left"] + users["refused"] == 20, ran
    assert users["served"] >= 4
    assert users["refused"] >= 1
    assert truth["gap"] <= 8, ran
    assert truth["tokens_useful_total"] >= 256 * users["served"]
    assert truth["slot_utilization"] == 1.0
    assert truth["queue_age_seconds"] < 0.5, "nobody waits in the engine"
    assert truth["deadline_slack_seconds"] > 0, "who is served is served within the deadline"
    measured = ran.json["measured"]
    for exact in ("tokens_out_total", "tokens_useful_total", "gap", "cancelled_orphan", "tokens_unattributed_total"):
        assert measured[exact] == truth[exact], "with --admit nothing of it is an estimate"


@pytest.mark.e2e
@pytest.mark.long
async def test_side_by_side(tmp_path: Path):
    """The naive gateway leaks what both modes do not; of these the one that refuses by age serves more."""
    ran = await tokengap("drill", "--side-by-side", "--ports", "auto", "--json", within=240)
    by_age, busy, naive = ran.json.values()
    assert all(way["passed"] for way in ran.json.values()), ran
    assert by_age["truth"]["gap"] <= 8
    assert busy["truth"]["gap"] <= 8
    assert naive["truth"]["gap"] > 1500
    assert by_age["users"]["served"] > busy["users"]["served"] == 1
    assert naive["truth"]["deadline_slack_seconds"] < 0 < by_age["truth"]["deadline_slack_seconds"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--side-by-side", "--target", "http://127.0.0.1:1"), "all of --target, --engine, --this-is-my-system"),
        (("--through", "admit", "--leak", "edge"), "--leak edge: there is no such hop"),
    ],
    ids=["target", "leak"],
)
async def test_what_does_not_go_together_is_said(arguments, said):
    """In one line, with exit 2."""
    ran = await tokengap("drill", "--ports", "auto", *arguments)
    assert (ran.code, ran.out) == (2, ""), ran
    assert said in ran.err.splitlines()[-1]
