"""Parts start, are ready, say why they are not, and never outlive who started them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lab.serving import until
from tokengap.chaos.faults import alive
from tokengap.errors import SetupError
from tokengap.lab import parts
from tokengap.lab.parts import LOOPBACK, Part, free_port, free_ports, listens, running

pytestmark = pytest.mark.e2e

SERVE = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), None).serve_forever()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVE}"


def python(name: str, code: str, *arguments: str, ports: tuple[int, ...] = ()) -> Part:
    return Part(name, (sys.executable, "-c", code, *arguments), ports)


def server(port: int, code: str = SERVE) -> Part:
    return python("server", code, str(port), ports=(port,))


async def test_a_part_serves_while_the_block_lasts(tmp_path: Path):
    """Ready when entered, in a process group of its own, and gone afterwards."""
    port = free_port()
    async with running(server(port), tmp_path) as part:
        assert await listens(port)
        assert os.getpgid(part.pid) == part.pid != os.getpgid(0)
    assert part.ended
    assert not await listens(port)


async def test_a_part_that_dies_says_why(tmp_path: Path):
    """The error has the last lines of what it said."""
    part = python("broken", "print('one'); raise SystemExit('no such flag: --frob')", ports=(free_port(),))
    with pytest.raises(SetupError, match=r"(?s)broken ended with 1.*no such flag: --frob"):
        async with running(part, tmp_path):
            pytest.fail("it was not ready")


async def test_a_part_that_never_serves_is_given_up(tmp_path: Path):
    """Within the time that was given to it, and it is ended."""
    part = python("mute", "import time; time.sleep(60)", ports=(free_port(),))
    with pytest.raises(SetupError, match=r"mute is not ready after 0\.3 s"):
        async with running(replace(part, ready_within=0.3), tmp_path):
            pytest.fail("it was not ready")


async def test_a_missing_program_is_named(tmp_path: Path):
    """No traceback: which program, and what the system said."""
    with pytest.raises(SetupError, match="ghost cannot start: /nonexistent/ghost: No such file"):
        async with running(Part("ghost", ("/nonexistent/ghost",), ()), tmp_path):
            pytest.fail("it cannot start")


async def test_a_port_that_is_taken_is_named(tmp_path: Path):
    """Before anything is started: else another's server would pass for the part."""
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} on {LOOPBACK} is taken"):
            async with running(server(port), tmp_path):
                pytest.fail("the port is taken")


def test_free_ports_are_no_clients():
    """The kernel gives a client none of them, whoever connects before the server has it."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < lowest


def test_no_two_processes_are_given_a_port():
    """Not even one that nobody listens on yet. And a process is given one again only after many others."""
    ours = set(free_ports(50)) | set(free_ports(50))
    assert len(ours) == 100
    tell = "from tokengap.lab.parts import free_ports; print(*free_ports(100)); input()"
    with contextlib.ExitStack() as running:
        others: list[int] = []
        for _ in range(3):
            process = subprocess.Popen([sys.executable, "-c", tell], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            running.enter_context(process)
            running.callback(process.terminate)
            others += map(int, process.stdout.readline().split())
        assert len(set(others)) == 300
        assert not ours & set(others)


def test_a_port_that_is_held_is_not_free(monkeypatch: pytest.MonkeyPatch):
    """Where there are not as many, that is said."""
    held, free = free_ports(2)
    monkeypatch.setattr(parts, "_own_ports", lambda _pid: itertools.cycle([held, free]))
    monkeypatch.setattr(parts, "_BLOCK", 2)
    assert free_ports(2) == [held, free]
    with socket.create_server((LOOPBACK, held)):
        assert free_ports(1) == [free]
        with pytest.raises(SetupError, match=r"^not 2 free ports on 127\.0\.0\.1, but 1 of 2$"):
            free_ports(2)


async def test_a_part_that_does_not_listen_to_sigterm_is_killed(tmp_path: Path):
    """After its deadline."""
    port = free_port()
    async with running(server(port, DEAF), tmp_path) as part:
        await part.stop(within=0.2)
        assert part.process.returncode == -signal.SIGKILL


async def test_a_stopped_part_ends_too(tmp_path: Path):
    """A part that a drill froze with SIGSTOP would keep its SIGTERM pending."""
    port = free_port()
    async with running(server(port), tmp_path) as part:
        part.signal(signal.SIGSTOP)
    assert part.process.returncode == -signal.SIGTERM


UNTIDY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SERVE!r}, sys.argv[1]], process_group=0)
print(child.pid, flush=True)
time.sleep(60)
"""


async def test_what_it_leaves_behind_is_found(tmp_path: Path):
    """A child in another process group that goes on listening is reported, not left."""
    port = free_port()
    with pytest.raises(SetupError, match=f"something still listens on {LOOPBACK}:{port}"):
        async with running(python("untidy", UNTIDY, str(port), ports=(port,)), tmp_path) as part:
            left_behind = int(part.log.read_text().split()[0])
    os.kill(left_behind, signal.SIGKILL)


async def test_the_blocks_own_error_is_not_hidden(tmp_path: Path):
    """Ending the part does not replace what went wrong."""
    with pytest.raises(ZeroDivisionError):
        async with running(server(free_port()), tmp_path):
            1 / 0  # noqa: B018 - raises


PARENT = """
import asyncio, sys
from pathlib import Path
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import running
from tokengap.lab.proxies import PROXIES, Wiring

async def main(directory, engine, edge):
    proxy = PROXIES["nginx"].part(Wiring(edge, engine, False, directory))
    async with running(engine_part(engine), directory) as one, running(proxy, directory) as two:
        print(one.pid, two.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_nothing_survives_the_one_who_started_it(tmp_path: Path, number: signal.Signals):
    """Not even kill -9 leaves a part behind, nginx's workers included."""
    ports = free_ports(2)
    command = [sys.executable, "-c", PARENT, str(tmp_path), *map(str, ports)]
    parent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    family: list[psutil.Process] = []

    async def complete() -> bool:
        family[:] = [process for pid in pids for process in (psutil.Process(pid), *psutil.Process(pid).children())]
        return len(family) == 4  # the engine, nginx and its two workers, which come after it listens

    await until(complete)
    parent.send_signal(number)
    await asyncio.wait_for(parent.wait(), 10)

    async def gone() -> bool:
        return not any(map(alive, family))

    await until(gone)
    assert not any([await listens(port) for port in ports])


def test_free_ports_are_different():
    """And can be bound."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with socket.socket() as probe:
        probe.bind((LOOPBACK, ports[0]))
