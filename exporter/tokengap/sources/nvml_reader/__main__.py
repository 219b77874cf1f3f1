"""The process: a line a cycle on standard output.

It ends when its standard input closes (whoever started it is gone), when its output breaks, on SIGTERM, and by itself
after a line that says why there are no GPUs: a driver that comes later is found by a new process, which loads the new
library.

    python -m tokengap.sources.nvml_reader [--interval 1] [--patience 1.5] [--kmsg /dev/kmsg]
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import select
import signal
import threading
import time
from typing import Final, NoReturn

import msgspec

from tokengap.gpu_readings import GpuSnapshot
from tokengap.sources.nvml_reader.calls import Absent, load_binding
from tokengap.sources.nvml_reader.reader import Reader
from tokengap.sources.nvml_reader.xids import EVENT_WAIT, follow_kernel_log

#: Seconds in which a cycle that is under way may end, when this process has to.
LAST_WORDS: Final = 0.5


def write(snapshot: GpuSnapshot) -> None:
    """Send one line; ends the process when nobody takes it."""
    line = memoryview(msgspec.json.encode(snapshot) + b"\n")
    try:
        while line:
            line = line[os.write(1, line) :]
    except OSError:
        leave()


def leave() -> NoReturn:
    """End at once: threads that hang in the library would keep an orderly end waiting."""
    os._exit(0)


def watch(stop: threading.Event, ended: threading.Event) -> None:
    """End the process when standard input closes or SIGTERM comes, also while every other thread hangs in a call.

    Python runs a signal's handler between two steps of the main thread, which may never come; the byte that the signal
    writes into a pipe is seen here at once.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the exporter, which then tells us
    signal.set_wakeup_fd(send)

    def wait() -> None:
        readable: list[int] = []
        while receive not in readable:
            readable = select.select([0, receive], [], [])[0]
            if 0 in readable and not os.read(0, 4096):
                break
        stop.set()
        ended.wait(LAST_WORDS + EVENT_WAIT / 1e3)
        leave()

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Write a line a cycle until told to end, or until there is nothing to read."""
    parser = argparse.ArgumentParser(prog="python -m tokengap.sources.nvml_reader", description=__doc__.splitlines()[0])
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one cycle to the next")
    parser.add_argument("--patience", type=float, default=1.5, help="seconds that one GPU may take")
    parser.add_argument("--kmsg", default="/dev/kmsg", help="the kernel's log, empty for none")
    options = parser.parse_args()
    faulthandler.enable(all_threads=False)  # a crash names the call in which it happened
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may crash once a minute for days
    stop, ended = threading.Event(), threading.Event()
    watch(stop, ended)
    try:
        nvml = load_binding()
    except Absent as why:
        write(GpuSnapshot(why.reason, why.detail, at=time.monotonic(), sequence=1))
        leave()
    reader = Reader(nvml, options.patience)
    if options.kmsg:
        threading.Thread(target=follow_kernel_log, args=(options.kmsg, reader.report, stop), daemon=True).start()
    try:
        reader.open()
        due = time.monotonic()
        while not stop.is_set():
            if reader.wants_to_open_again:
                write(reader.opening())
                reader.open_again()
            if (snapshot := reader.cycle()) is not None:
                write(snapshot)
            due = max(due + options.interval, time.monotonic())
            stop.wait(due - time.monotonic())
    except Absent as why:
        write(reader.absent(why))
    reader.close()
    ended.set()
    leave()


if __name__ == "__main__":
    main()
