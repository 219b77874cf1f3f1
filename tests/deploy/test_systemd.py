"""The systemd unit: systemd finds nothing wrong with it, and the exporter does its work within what it allows."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

import netns
from deploy.unit import CONFIG, NETNS, UNIT, refused, settings
from tokengap.config import load
from tokengap.lab.matrix import NO_CAPABILITIES
from tokengap.lab.parts import LOOPBACK, Part, free_port, running

pytestmark = pytest.mark.e2e

#: The most that `systemd-analyze security` may say, from 0 (nothing is exposed) to 10.
EXPOSURE = 4.5

#: The exporter behind prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN), the kernel's own MemoryDenyWriteExecute=.
DENY_WRITE_EXECUTE = (
    "import ctypes; assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0, 'needs Linux 6.3'; "
    "from tokengap.cli import main; main(prog_name='tokengap')"
)


def analyze(*arguments: object) -> tuple[int, str]:
    assert shutil.which("systemd-analyze"), "systemd-analyze is not installed: apt-get install systemd"
    command = ["systemd-analyze", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(params=["as it is", "with the drop-in for namespaces"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The unit in a folder of its own; systemd wants the program to be there, so it is this interpreter's."""
    program = Path(sys.executable).parent / "tokengap"
    text = UNIT.read_text()
    assert text.count("ExecStart=/usr/local/bin/tokengap ") == 1
    path = tmp_path / UNIT.name
    path.write_text(text.replace("ExecStart=/usr/local/bin/tokengap ", f"ExecStart={program} "))
    if request.param != "as it is":
        (tmp_path / NETNS.parent.name).mkdir()
        shutil.copy(NETNS, tmp_path / NETNS.parent.name)
    return path


def test_systemd_finds_nothing_wrong(unit: Path):
    """No unknown key, no value that is not understood."""
    code, said = analyze("verify", "--man=no", unit)
    assert (code, [line for line in said.splitlines() if unit.name in line]) == (0, [])


def test_little_is_exposed(unit: Path):
    """Also where a drop-in gives capabilities."""
    code, said = analyze("security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE * 10:g}", unit)
    assert code == 0, said
    assert float(re.search(r"Overall exposure level for \S+: ([\d.]+)", said)[1]) <= EXPOSURE


def test_the_example_of_its_settings_is_right():
    """The file that the unit's head says to install."""
    watched = load(CONFIG, {}, {})
    assert [engine.name for engine in watched.engines] == ["worker"]
    assert [hop.name for hop in watched.hops] == ["edge"]


@asynccontextmanager
async def serving(prefix: tuple[str, ...], directory: Path, *arguments: str) -> AsyncIterator[str]:
    """Run ``tokengap serve`` behind a prefix, and yield its page when a second beat has come."""
    port = free_port()
    serve = ("serve", "--listen", f"{LOOPBACK}:{port}", *arguments)
    part = Part("exporter", (*prefix, sys.executable, "-c", DENY_WRITE_EXECUTE, *serve), (port,))
    async with running(part, directory), aiohttp.ClientSession() as session, asyncio.timeout(20):
        page = ""
        while not re.search(r"^tokengap_beats_total [^01]", page, re.MULTILINE):
            await asyncio.sleep(0.2)
            async with session.get(f"http://{LOOPBACK}:{port}/metrics") as answer:
                page = await answer.text()
        yield page


async def test_it_works_within_what_the_unit_allows(tmp_path: Path):
    """Without a capability, with every system call refused that the filter refuses and no page of memory
    both writable and executable: bytes are read, the end of sockets is heard, and nothing failed."""
    assert shutil.which("strace"), "strace is not installed: apt-get install strace"
    names = ",".join(f"?{name}" for name in sorted(refused(settings(UNIT)["SystemCallFilter"])))
    refuse = ("strace", "--quiet=all", "-f", "--seccomp-bpf", "-o", "/dev/null", f"-etrace={names}")
    strace = (*refuse, f"-einject={names}:error=EPERM")
    hop = ("--hop", "edge=:8080", "--engine", "http://127.0.0.1:1")
    async with serving((*NO_CAPABILITIES, *strace), tmp_path, *hop) as page:
        assert 'tokengap_accounting_mode{mode="exact"} 1.0' in page
        assert re.search(r'^tokengap_source_up{source="sockets",[^}]*} 1.0$', page, re.MULTILINE)


async def test_the_drop_in_is_enough_for_namespaces(tmp_path: Path):
    """As nobody with its capabilities and no other: another namespace is read in full."""
    names = settings(NETNS)["AmbientCapabilities"][0].lower().replace("cap_", "")
    assert settings(NETNS)["CapabilityBoundingSet"] == settings(NETNS)["AmbientCapabilities"]
    given = ",".join(f"+{name}" for name in names.split())
    prefix = (
        *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"),
        *("--bounding-set", f"-all,{given}", "--inh-caps", f"-all,{given}", "--ambient-caps", f"-all,{given}"),
    )
    with netns.host() as host:
        space = host.space()
        watch = ("--hop", "edge=:8080", "--engine", "http://127.0.0.1:1", "--netns", space.path)
        async with serving(prefix, tmp_path, *watch) as page:
            assert 'tokengap_netns{state="watched"} 2.0' in page
            assert 'tokengap_netns{state="failed"} 0.0' in page
            assert 'tokengap_accounting_mode{mode="exact"} 1.0' in page
