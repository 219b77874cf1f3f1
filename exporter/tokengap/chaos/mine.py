"""``--engine-pid``: the same two faults on an engine of one's own, which has to be asked for in so many words.

Only the core below that process is touched. No client is sent and nothing is judged but the fault: that it was there,
and that it is gone. After a crash it is for the engine's own supervisor to start it again, which is what shows here.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable

import psutil

from tokengap.chaos.bench import core_of
from tokengap.chaos.faults import alive
from tokengap.chaos.timeline import Timeline
from tokengap.errors import SetupError

#: Seconds within which a signal must show.
SHOWS_WITHIN = 10.0


def listening(pid: int) -> set[int]:
    """Return the ports on which a process and those below it listen. SetupError when it may not be looked into."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        held = [each for process in family for each in process.net_connections("tcp")]
    except psutil.NoSuchProcess:
        raise SetupError(f"there is no process {pid}") from None
    except psutil.AccessDenied:
        raise SetupError(f"process {pid} may not be looked into: run this as its user, or as root") from None
    return {each.laddr.port for each in held if each.status == psutil.CONN_LISTEN}


async def freeze(pid: int, seconds: float, timeline: Timeline) -> bool:
    """Stop the core for so many seconds, and let it go on whatever happens. Tell whether that was to be seen.

    This process may be killed meanwhile: then another one, which waits for its end, lets the core go on.
    """
    core = core_of(pid)
    heir = await asyncio.create_subprocess_exec(
        *("sh", "-c", f"read _; kill -CONT {core.pid}"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )
    assert heir.stdin is not None
    try:
        core.suspend()
        timeline.note("fault", f"SIGSTOP to process {core.pid} ({core.name()})")
        stopped = await _shows(lambda: core.status() == psutil.STATUS_STOPPED)
        timeline.note("proof", f"process {core.pid} is {core.status()}")
        await asyncio.sleep(seconds)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            core.resume()
        timeline.note("heal", f"SIGCONT to process {core.pid}")
        heir.stdin.close()
        await heir.wait()
    if not alive(core):
        timeline.note("heal", f"process {core.pid} is gone: somebody killed it meanwhile")
        return False
    goes_on = await _shows(lambda: core.status() != psutil.STATUS_STOPPED)
    timeline.note("heal", f"process {core.pid} is {core.status()}")
    return stopped and goes_on


async def crash(pid: int, number: signal.Signals, seconds: float, timeline: Timeline) -> bool:
    """Kill the core, and wait for so many seconds at most until somebody listens again where the engine did.

    Tell whether the core went and the engine came back.
    """
    ports, core = listening(pid), core_of(pid)
    if not ports:
        raise SetupError(f"process {pid} listens nowhere: it is no engine that could come back")
    name = core.name()
    core.send_signal(number)
    broken = timeline.note("fault", f"{number.name} to process {core.pid} ({name})")
    if not await _shows(lambda: not alive(core)):
        timeline.note("proof", f"process {core.pid} is still there")
        return False
    timeline.note("proof", f"process {core.pid} is gone")
    seen_away = False
    while time.monotonic() < broken + seconds:
        there = _listened()
        seen_away |= not ports <= there
        if seen_away and ports <= there:
            back = time.monotonic() - broken
            timeline.note("heal", f"somebody listens on {_ports(ports)} again, {back:.1f} s after the signal")
            return True
        await asyncio.sleep(0.2)
    timeline.note("heal", f"nobody listens on {_ports(ports)} again within {seconds:g} s")
    return False


async def _shows(condition: Callable[[], bool]) -> bool:
    """Wait until what a signal does is to be seen. Tell whether it was in time."""
    deadline = time.monotonic() + SHOWS_WITHIN
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def _listened() -> set[int]:
    """Return the ports on which anybody listens on this host."""
    every = psutil.net_connections("tcp")
    return {each.laddr.port for each in every if each.laddr and each.status == psutil.CONN_LISTEN}


def _ports(ports: set[int]) -> str:
    return ", ".join(map(str, sorted(ports)))
