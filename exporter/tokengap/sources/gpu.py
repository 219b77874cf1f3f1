"""The GPUs of this host, as the reader process tells of them (:mod:`tokengap.sources.nvml_reader`).

This side never loads NVIDIA's library and never waits for it. It starts the reader, takes a line a cycle, and gives up
on it when none comes: the values are gone then, not frozen. A reader that hangs gets SIGTERM and is left alone after
that, never SIGKILL: to kill a client of the driver has frozen GPUs (dcgm-exporter 84). One replacement may run beside
it, not two, and none while it sleeps in the kernel where no signal reaches it (state D).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from tokengap.gpu_readings import GpuReason, GpuSnapshot, Xid

log = logging.getLogger(__name__)

#: Readers that may exist at once: one that hangs, and its replacement.
MOST_READERS: Final = 2
#: Lines of one reader's standard error that are logged.
MOST_SAID: Final = 3
#: Lines of all readers that are logged: different ones, numbers apart.
MOST_LOGGED: Final = 50
#: Bytes in a line, which is a snapshot: thousands of processes fit.
LONGEST_LINE: Final = 4 << 20
#: Reports of errors that are kept for the next read.
MOST_XIDS: Final = 10_000
#: Seconds after its last word in which a line still counts: our own loop may have been late.
LATE: Final = 0.1

#: The call in which a reader crashed, as Python's fault handler prints it.
_CALL = re.compile(r"\bin (nvml\w+)")

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")

_decoder = msgspec.json.Decoder(GpuSnapshot)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for what, in seconds.

    ``line``: for a line that is due, ``opening``: for one after GPUs are opened, which can take seconds each.
    ``ending``: for a reader that was told to end. ``between`` is the time between two starts: the shortest, doubled
    with each, and the longest. A reader that lived for longer than the longest makes it the shortest again.
    """

    line: float = 5.0
    opening: float = 30.0
    ending: float = 2.0
    between: tuple[float, float] = (1.0, 60.0)


@dataclass
class Process:
    """A reader process and our ends of its pipes."""

    pid: int
    stdin: int
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    transports: tuple[asyncio.ReadTransport, ...]
    status: int | None = None
    #: What its last line said.
    reason: GpuReason | None = None
    said: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def ended(self) -> bool:
        """Tell whether it has ended, and take note of how; so no zombie stays."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody who waits for every child of ours took the answer
                pid, status = self.pid, 0
            if pid:
                self.status = status
        return self.status is not None

    async def end_within(self, seconds: float) -> bool:
        """Wait for its end."""
        until = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(0.02)
        return True

    def tell_to_end(self) -> None:
        """Ask for its end in both ways it knows: SIGTERM, and our end of its input is closed."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def forget(self) -> None:
        """Close our ends of its pipes."""
        for transport in self.transports:
            transport.close()

    def unreachable(self) -> bool:
        """Tell whether a thread of it is in uninterruptible sleep; not only the first, which waits for the rest."""
        return "D" in {_state(path) for path in Path(f"/proc/{self.pid}/task").glob("*/stat")}


def _state(stat: Path) -> str:
    """Return the third field of ``/proc/PID/stat`` (proc(5)); the second may hold anything, brackets included."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class NvmlReader:
    """The GPUs of this host. ``async with``, or start and close; :meth:`read` as often as wanted.

    ``interval`` is the reader's cycle in seconds, ``device_patience`` what one GPU may take of it, ``kmsg`` the
    kernel's log, empty for none. ``environment`` is the reader's, None for our own.
    """

    def __init__(
        self,
        *,
        interval: float = 1.0,
        device_patience: float = 1.5,
        patience: Patience | None = None,
        kmsg: str = "/dev/kmsg",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._interval = interval
        self._arguments = ("--interval", f"{interval:g}", "--patience", f"{device_patience:g}", "--kmsg", kmsg)
        self._environment = environment
        self._latest = GpuSnapshot("starting")
        self._xids: deque[Xid] = deque(maxlen=MOST_XIDS)
        self._warnings: list[str] = []
        self._warned: set[str] = set()
        self._logged: set[str] = set()
        self._current: Process | None = None
        self._abandoned: list[Process] = []
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> NvmlReader:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def start(self) -> None:
        """Start reading. Does not wait for anything."""
        self._keeper = asyncio.create_task(self._keep(), name="GPU reader")

    async def close(self) -> None:
        """Stop reading: the reader is told to end and given a little time, not more."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        # Those that were given up before had their time.
        if self._abandoned and not self._abandoned[-1].ended():
            await self._abandoned[-1].end_within(self._patience.ending)
        self._reap()

    async def read(self) -> GpuSnapshot:
        """Return the newest snapshot, at once; why there is none is a snapshot too.

        Reports and warnings are handed over once each, those of the lines in between included.
        """
        self._reap()
        xids, warnings = tuple(self._xids), tuple(self._warnings)
        self._xids.clear()
        self._warnings.clear()
        readers = len(self._abandoned) + (self._current is not None)
        return replace(self._latest, xids=xids, warnings=warnings, readers=readers)

    async def _keep(self) -> None:
        """Have a reader, again and again."""
        shortest, longest = self._patience.between
        pause = shortest
        while True:
            began = time.monotonic()
            try:
                await self._one_reader()
            except OSError as error:
                self._none("failed", f"the reader cannot be started: {error.strerror}")
            except Exception as error:
                log.exception("the GPU reader is not looked after as it should be: a bug")
                self._none("failed", f"bug: {type(error).__name__}")
            pause = shortest if time.monotonic() - began >= longest else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            await self._room()

    async def _room(self) -> None:
        """Wait until another reader may be started."""
        while True:
            self._reap()
            if not self._abandoned:
                return
            if len(self._abandoned) < MOST_READERS and not any(process.unreachable() for process in self._abandoned):
                return
            await asyncio.sleep(min(self._patience.between[0], 1.0))

    async def _one_reader(self) -> None:
        """Start a reader and take its lines, until it ends or is given up."""
        self._current = process = await self._spawn()
        listener = asyncio.create_task(self._listen(process), name="GPU reader's stderr")
        try:
            if hung := not await self._follow(process):
                process.tell_to_end()
            if await process.end_within(self._patience.ending):
                await asyncio.wait([listener], timeout=self._patience.ending)
                if not hung:
                    self._ended(process)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
            self._give_up(process)

    def _give_up(self, process: Process) -> None:
        """Have no more to do with a reader, whether it has ended or not."""
        process.tell_to_end()
        process.forget()
        self._current = None
        if not process.ended():
            self._abandoned.append(process)

    async def _follow(self, process: Process) -> bool:
        """Take lines until there are no more; False when none came in time.

        While GPUs are opened, at its start and when one of them was lost, there is more time, and no old values either.
        """
        due = self._interval + self._patience.line
        opening, last = True, time.monotonic()
        while True:
            try:
                line = await _line(process.stdout, due)
            except TimeoutError:
                waited = time.monotonic() - last
                if not opening or waited >= self._patience.opening:
                    self._none("hung", f"NVML has not answered for {waited:.1f} s")
                    return False
                if self._latest.reason == "ok":
                    self._none("starting", "GPUs are opened again, because one was lost")
                continue
            if not line:
                return True
            process.reason, last = self._take(line), time.monotonic()
            opening = process.reason == "starting"

    def _take(self, line: bytes) -> GpuReason:
        """Take a line in; return what it says. That GPUs are opened again changes nothing yet."""
        try:
            snapshot = _decoder.decode(line)
        except msgspec.MsgspecError as error:  # bytes that are no UTF-8 included
            self._none("failed", f"a line of the reader is not a snapshot: {error}")
            return "failed"
        self._xids += snapshot.xids
        new = [warning for warning in snapshot.warnings if warning not in self._warned]
        self._warned.update(new)
        self._warnings += new
        if snapshot.reason != "starting":
            self._latest = snapshot
        return snapshot.reason

    def _ended(self, process: Process) -> None:
        """Say why a reader has ended, where it has not said so itself."""
        assert process.status is not None
        code = os.waitstatus_to_exitcode(process.status)
        if code < 0:
            call = next((match[1] for line in process.said if (match := _CALL.search(line))), "")
            self._none("crashed", f"the reader got {_signal_name(-code)}{f' in {call}' if call else ''}")
        elif process.reason in (None, "ok", "starting"):
            last = process.said[-1] if process.said else "it gave no reason"
            self._none("failed", f"the reader ended with {code}: {last}")

    def _none(self, reason: GpuReason, detail: str) -> None:
        """Have no values from now on. When there last were any stays known."""
        self._latest = replace(self._latest, reason=reason, detail=detail, gpus=())

    async def _spawn(self) -> Process:
        """Start a reader, in a process group of its own: Ctrl-C is for us, and we tell it."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as its:
            its_in, our_in = os.pipe()
            its.callback(os.close, its_in)
            undo.callback(os.close, our_in)
            streams, transports = [], []
            theirs = [its_in]
            for _ in ("stdout", "stderr"):
                ours, its_end = os.pipe()
                its.callback(os.close, its_end)
                theirs.append(its_end)
                stream, transport = await _connect(ours)
                undo.callback(transport.close)
                streams.append(stream)
                transports.append(transport)
            pid = os.posix_spawn(  # noqa: ASYNC221 - a vfork and an exec, a millisecond; asyncio's own kills at its end
                sys.executable,
                # -P: what lies in the directory we were started in is no module of ours
                (sys.executable, "-P", "-m", "tokengap.sources.nvml_reader", *self._arguments),
                os.environ if self._environment is None else self._environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(theirs)],
                setpgroup=0,
                setsigmask=(),
                setsigdef=(signal.SIGTERM, signal.SIGPIPE),
            )
            undo.pop_all()
        return Process(pid, our_in, streams[0], streams[1], tuple(transports))

    async def _listen(self, process: Process) -> None:
        """Keep what a reader says on standard error, and log the beginning of it, each kind of line once."""
        while line := await _line(process.stderr):
            text = line.decode(errors="replace").strip()
            process.said.append(text)
            kind = _NUMBER.sub("#", text)
            if len(process.said) <= MOST_SAID and text and kind not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(kind)
                log.warning("the GPU reader says", extra={"line": text[:500]})

    def _reap(self) -> None:
        self._abandoned = [process for process in self._abandoned if not process.ended()]


async def _connect(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    stream = asyncio.StreamReader(limit=LONGEST_LINE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", 0)
    )
    return stream, transport


async def _line(stream: asyncio.StreamReader, within: float | None = None) -> bytes:
    """Return the next line, empty at the end. Raises TimeoutError."""
    try:
        try:
            async with asyncio.timeout(within):
                return await stream.readline()
        except TimeoutError:
            # Where we ourselves were late, a line may lie there all the while.
            async with asyncio.timeout(LATE):
                return await stream.readline()
    except ValueError:  # longer than a line may be; the stream has dropped it
        return b"too long\n"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
