"""``tokengap demo``: the exporter at work within seconds, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest

from lab.commands import ARTICLE, listening_below, started, tokengap
from tokengap.chaos.faults import alive
from tokengap.lab.parts import LOOPBACK, free_port, listens
from tokengap.series.tokens import TOKENS_ORPHANED

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parent.parent.parent


def test_make_run_is_the_demo():
    """What the README promises of ``make run`` holds for the command that is tested here."""
    ran = subprocess.run(
        ["make", "--no-print-directory", "-n", "run"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1].endswith("/tokengap demo")


@pytest.mark.alone
async def test_it_ends_by_itself_and_tells_the_truth():
    """With --for and --json: one object, the names of the article in both halves, and they agree."""
    ran = await tokengap("demo", "--for", "8s", "--port", 0, "--json", within=60)
    assert ran.code == 0, ran
    assert list(ran.json) == ["truth", "measured", "error_ratio", "passed", "users"]
    truth, measured = ran.json["truth"], ran.json["measured"]
    assert set(ARTICLE) <= truth.keys() == measured.keys()
    assert truth["tokens_out_total"] == measured["tokens_out_total"] > 0
    assert ran.json["passed"], ran
    assert ran.json["users"]["served"] > 0


async def test_a_taken_port_is_said_in_one_line():
    """Exit 2, and what to do about it."""
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = await tokengap("demo", "--port", port)
    assert (ran.code, ran.out) == (2, ""), ran
    assert len(ran.err.splitlines()) == 1
    assert f"port {port} on 127.0.0.1 is taken: choose another with --port" in ran.err


async def test_a_time_that_is_none_is_refused():
    """Exit 2, and what is expected."""
    ran = await tokengap("demo", "--for", "soon")
    assert ran.code == 2
    assert "'soon'; expected a time such as" in ran.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_shows_its_address_and_ends_when_told(number: signal.Signals):
    """Within seconds the series are at the address that it prints. Ctrl-C is its usual end, so it exits with 0."""
    port = free_port()
    async with started("demo", "--port", port) as process:
        async with asyncio.timeout(20):
            while f"http://127.0.0.1:{port}/metrics" not in (await process.stdout.readline()).decode():
                pass
        page = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
        assert f"\n{TOKENS_ORPHANED}" in page
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = listening_below(process.pid)
        assert port in listening
        process.send_signal(number)
        await asyncio.wait_for(process.communicate(), 15)
    assert process.returncode == 0
    assert [left for left in family if alive(left)] == []
    assert [port for port in listening if await listens(port)] == []


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()
