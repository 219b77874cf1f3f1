"""Starting and ending the lab's programs: each its own process group, none of which outlives this process.

A part that cannot start says why (:class:`~tokengap.errors.SetupError` with its last lines), and one that was stopped
leaves nothing that listens on its ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import itertools
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tokengap.errors import SetupError

LOOPBACK = "127.0.0.1"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

#: Ports of servers for an hour: over the known ones, and under where ``ip_local_port_range`` begins on Linux.
_SERVERS = range(15_000, 32_768)
#: How many of them a process has for itself. A port that a server has closed on its clients is in use for a minute.
_BLOCK = 500
_random = random.SystemRandom()  # whoever seeds the common one does not mean this

#: Where Debian puts servers, which is on the path of root only.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def on_path(program: str) -> Path | None:
    """Return where a program is, None where it is not installed."""
    found = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN]))
    return None if found is None else Path(found)


def installed(*names: str) -> str:
    """Return a program by the first of its names that is there: Debian's, and that of its makers. Raises SetupError."""
    for name in names:
        if found := on_path(name):
            return str(found)
    raise SetupError(f"{names[0]} is not installed: apt-get install {names[0]}")


@dataclass(frozen=True, slots=True)
class Part:
    """A program to run. ``ports`` are those on loopback at which it serves; it is ready when each accepts.

    ``ready_within`` is how many seconds that may take.
    ``orphan_signal`` is what the kernel sends it when this process dies without stopping it. SIGKILL fits programs of
    one process; a master that must take its workers along needs SIGTERM.
    """

    name: str
    command: tuple[str, ...]
    ports: tuple[int, ...]
    orphan_signal: signal.Signals = signal.SIGKILL
    ready_within: float = 20.0


@dataclass(frozen=True, slots=True)
class RunningPart:
    """A part that was started."""

    part: Part
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self.process.pid

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self.process.returncode is not None

    def last_lines(self, count: int = 12) -> str:
        """Return the end of what it said on stdout and stderr."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def stop(self, within: float = 5.0) -> None:
        """End it: SIGTERM, and SIGKILL to what is left of it after ``within`` seconds."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process would keep its SIGTERM pending
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self.process.wait()
        self.signal(signal.SIGKILL)
        await self.process.wait()


@contextlib.asynccontextmanager
async def running(part: Part, directory: Path) -> AsyncIterator[RunningPart]:
    """Run a part while the block lasts; its output goes to ``directory``.

    Raises SetupError when a port of it is taken, when it ends before it is ready or is not ready in time, and after the
    block when something still listens on its ports.
    """
    for port in part.ports:
        if taken(port):
            raise SetupError(f"{part.name} cannot start: port {port} on {LOOPBACK} is taken")
    log = directory / f"{part.name}.log"
    with log.open("ab") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *part.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
                preexec_fn=_tie_to_this_process(part.orphan_signal),
            )
        except OSError as error:
            raise SetupError(f"{part.name} cannot start: {part.command[0]}: {error.strerror}") from error
    started = RunningPart(part, process, log)
    try:
        await _ready(started, part.ready_within)
        yield started
    finally:
        await started.stop()
    await _nothing_listens(part)


async def _ready(started: RunningPart, within: float) -> None:
    part = started.part
    deadline = time.monotonic() + within
    while not all([await listens(port) for port in part.ports]):
        if started.ended:
            raise SetupError(f"{part.name} ended with {started.process.returncode}:\n{started.last_lines()}")
        if time.monotonic() > deadline:
            raise SetupError(f"{part.name} is not ready after {within:g} s:\n{started.last_lines()}")
        await asyncio.sleep(0.05)


async def _nothing_listens(part: Part, within: float = 2.0) -> None:
    deadline = time.monotonic() + within
    for port in part.ports:
        while await listens(port):
            if time.monotonic() > deadline:
                raise SetupError(f"{part.name} was stopped and something still listens on {LOOPBACK}:{port}")
            await asyncio.sleep(0.05)


async def listens(port: int) -> bool:
    """Tell whether a connection to this port on loopback is accepted."""
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(LOOPBACK, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def taken(port: int) -> bool:
    """Tell whether somebody holds this port on loopback. SetupError when it may not be used at all."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has closed and lingers is no owner
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise SetupError(f"port {port} on {LOOPBACK}: {error.strerror}") from error
            return True
    return False


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that nobody uses, all different. SetupError when there are not so many.

    They lie below those that the kernel gives to clients. One of these would be anybody's next client: before our
    server has it, or beside it on another address, where who watches the port sees a socket too many.
    """
    ports: list[int] = []
    for port in itertools.islice(_own_ports(os.getpid()), _BLOCK):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise SetupError(f"not {count} free ports on {LOOPBACK}, but {len(ports)} of {_BLOCK}")


@functools.cache
def _own_ports(_pid: int) -> Iterator[int]:
    """Return this process's ports, round and round: no other that asks here is given them while this one lives.

    The claim is a name of an abstract Unix socket (unix(7)): it is of one network namespace, as ports are, and goes
    with the process.
    """
    blocks = range(_SERVERS.start, _SERVERS.stop - _BLOCK, _BLOCK)
    for start in _random.sample(blocks, k=len(blocks)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            if sys.platform == "linux":
                claim.bind(f"\0tokengap-ports-{start}")
        except OSError:
            claim.close()
        else:
            claim.detach()  # its number stays open, and nobody is to close it
            # In another network namespace somebody may have the same: in no order, these have other ports in use.
            return itertools.cycle(_random.sample(range(start, start + _BLOCK), k=_BLOCK))
    raise SetupError(f"all ports from {_SERVERS.start} to {_SERVERS.stop} are claimed")


def free_port() -> int:
    """Return one free port on loopback."""
    return free_ports(1)[0]


def serve_app(app: web.Application, host: str | Sequence[str], port: int, *, handler_cancellation: bool) -> None:
    """Serve an application as the whole of this process, for thousands of streams, until it is told to stop.

    The limit of open files is raised as far as it goes: thousands of streams are thousands of sockets.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    web.run_app(
        app,
        host=host,
        port=port,
        backlog=16_384,
        handler_cancellation=handler_cancellation,
        shutdown_timeout=0.5,
        access_log=None,
        print=None,
    )


def _tie_to_this_process(number: signal.Signals) -> Callable[[], None]:
    """Return what a child runs before exec so that it gets ``number`` when this process dies, kill -9 included.

    prctl(2), PR_SET_PDEATHSIG: kept across exec, and sent when the *thread* that forked ends, so parts are started from
    the thread of the event loop. Elsewhere than on Linux nothing ties the child.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork: the child of a process with threads may not load it
    parent = os.getpid()

    def tie() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return tie
