"""``make demo-stack``: real Prometheus and Alertmanager beside the demo, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from lab.commands import listening_below
from tokengap.chaos.faults import alive
from tokengap.lab.parts import listens

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-u", "-m", "tokengap.lab.stack")


@asynccontextmanager
async def stack() -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """Start it on free ports, and yield it and its addresses: of the demo, Prometheus and Alertmanager."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--ports", "auto", cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        addresses: list[str] = []
        async with asyncio.timeout(90):
            while len(addresses) < 3:
                line = (await process.stdout.readline()).decode()
                assert line, "it ended"
                addresses += re.findall(r"http://127.0.0.1:\d+", line)
        yield process, addresses
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(url: str, wanted: str) -> list[dict]:
    """Return what Prometheus' API has under a name, as soon as it has some: it looks around once it has started."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as answer:
                if found := (await answer.json())["data"][wanted]:
                    return found
            await asyncio.sleep(0.1)


def test_make_runs_what_is_tested_here():
    """With the ports of the configurations."""
    ran = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo-stack"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1].endswith("python -m tokengap.lab.stack")


async def test_prometheus_has_the_rules_and_tells_alertmanager_and_ctrl_c_ends_all():
    """The demo is scraped, our rules are loaded, the Alertmanager is known; then no process and no port is left."""
    async with stack() as (process, (demo, prometheus, alertmanager)):
        seen = await ask(f"{prometheus}/api/v1/alertmanagers", "activeAlertmanagers")
        (target,) = await ask(f"{prometheus}/api/v1/targets", "activeTargets")
        groups = await ask(f"{prometheus}/api/v1/rules", "groups")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = listening_below(process.pid)
        process.send_signal(signal.SIGINT)
        rest, _ = await asyncio.wait_for(process.communicate(), 30)
    assert [told["url"] for told in seen] == [f"{alertmanager}/api/v2/alerts"]
    assert target["scrapeUrl"] == f"{demo}/metrics"
    assert target["labels"]["cluster"] == "main"
    assert sum(len(group["rules"]) for group in groups if group["file"].endswith("/alerts/alerts.yml")) > 20
    assert any(group["file"].endswith("/alerts/recording.yml") for group in groups)
    assert (process.returncode, b"Traceback" in rest) == (0, False)
    assert [left for left in family if alive(left)] == []
    assert len(listening) == 6  # gateway, engine, exporter, Prometheus, Alertmanager, pager
    assert [port for port in listening if await listens(port)] == []


@pytest.mark.long
async def test_what_leaks_is_told():
    """The demo's gateway holds on to clients who left: within minutes that is printed, with its runbook."""
    async with stack() as (process, _), asyncio.timeout(240):
        said = ""
        while not re.search(r"FIRING warning TokengapProxyIgnoresCancel hop=edge .*\n +https?://\S+\.md", said):
            said += (await process.stdout.readline()).decode()


async def test_a_configuration_that_is_not_there_is_one_line():
    """Exit 2, and what to do."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--deploy", "/nowhere", "--ports", "auto", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 30)
    why = "No such file or directory; run it from the repository, or say --deploy DIR"
    assert (process.returncode, said.decode()) == (2, f"demo-stack: /nowhere/demo/alertmanager.yml: {why}\n")
