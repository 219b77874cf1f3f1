"""Errors that the driver reports (XIDs): from the library's events, and from the kernel's log."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from tokengap.gpu_readings import Xid
from tokengap.sources.nvml_reader.calls import Nvml, Refused, key_of
from tokengap.sources.nvml_reader.device import HIGHEST_PID, Device, pci_address

#: nvmlEventTypeXidCriticalError
XID_EVENTS: Final = 0x8
#: Milliseconds of one wait for an event.
EVENT_WAIT: Final = 500
#: Bytes that one record of the kernel's log has at most, and some more.
RECORD: Final = 16_384

_XID_LINE = re.compile(rb"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]+)\): (?P<code>\d+)(?:, *pid=(?P<pid>\d+))?")


def parse_xid(line: bytes, at: float) -> Xid | None:
    """Read one line of the kernel's log: ``NVRM: Xid (PCI:0000:3b:00): 45, pid=1496200, name=...``.

    None for any other line. A pid of ``'<unknown>'`` is none.
    """
    match = _XID_LINE.search(line)
    if match is None:
        return None
    pid = int(match["pid"]) if match["pid"] else 0
    code = int(match["code"][:9])
    return Xid(at, code, pci=pci_address(match["pci"].decode()), pid=pid if 0 < pid <= HIGHEST_PID else None)


def follow_kernel_log(path: str, report: Callable[[Xid], None], stop: threading.Event) -> None:
    """Report each error that the kernel's log tells from now on, until ``stop``. A log that may not be read is silence.

    The event interface misses some (DCGM 235), and the log is often closed to us; both serve.
    """
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    with contextlib.suppress(OSError):  # a pipe has no end to go to
        os.lseek(log, 0, os.SEEK_END)
    rest = b""
    while not stop.is_set():
        select.select([log], [], [], 1.0)
        try:
            piece = os.read(log, RECORD)
        except BlockingIOError:
            continue
        except BrokenPipeError:  # what we did not read in time was overwritten: go on behind it
            continue
        except OSError:
            return
        if not piece:  # a file's end, or a pipe that nobody writes to
            stop.wait(0.2)
            continue
        *lines, rest = (rest + piece).split(b"\n")
        rest = rest[-RECORD:]
        for line in lines:
            if (xid := parse_xid(line, time.monotonic())) is not None:
                report(xid)


class Events:
    """Waits for the errors of some GPUs in a thread of its own."""

    def __init__(self, nvml: Nvml, devices: Iterable[Device], report: Callable[[Xid], None]) -> None:
        self._nvml, self._report = nvml, report
        self._devices = {key_of(device.handle): device for device in devices}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Stop waiting; False when the library does not let go."""
        self._stop.set()
        self._thread.join(4 * EVENT_WAIT / 1e3)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            events = self._nvml("nvmlEventSetCreate")
        except Refused:
            return
        registered = [device for device in self._devices.values() if self._registers(device, events)]
        while registered and not self._stop.is_set():
            self._wait(events)
        try:
            self._nvml("nvmlEventSetFree", events)
        except Refused:
            return

    def _registers(self, device: Device, events: Any) -> bool:
        try:
            self._nvml("nvmlDeviceRegisterEvents", device.handle, XID_EVENTS, events)
        except Refused:
            return False
        return True

    def _wait(self, events: Any) -> None:
        try:
            event = self._nvml("nvmlEventSetWait_v2", events, EVENT_WAIT)
        except Refused as error:
            if error.word != "timeout":  # as when a GPU was lost: it would be answered so at once, again and again
                self._stop.wait(1.0)
            return
        if event.eventType == XID_EVENTS:
            device = self._devices.get(key_of(event.device))
            known = (device.uuid, device.pci) if device else ("", "")
            self._report(Xid(time.monotonic(), int(event.eventData), *known))
