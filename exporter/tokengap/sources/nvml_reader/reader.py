"""All GPUs of this host, once a cycle: one after another, each in a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from tokengap.gpu_readings import Gpu, GpuSnapshot, Xid
from tokengap.sources.nvml_reader.calls import Absent, Nvml, Over, Refused, absent
from tokengap.sources.nvml_reader.device import Device, DeviceReader, lost_row, pci_address
from tokengap.sources.nvml_reader.xids import Events

T = TypeVar("T")

#: Seconds between attempts to get a lost GPU back: of the first, and at most.
REINIT: Final = (1.0, 60.0)
#: Seconds after which a late answer is none.
STALE: Final = 5.0


class Worker(Generic[T]):
    """A thread that does one thing when asked; one that does not come back can be left."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answer: T | BaseException
        self._leave = False
        self.busy = False
        #: Seconds that the last answer took.
        self.took = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, patience: float) -> T | None:
        """Return the answer, None when it does not come in time; the next call may find it, if it is not too old."""
        if self.busy and not self._answered.is_set():
            return None  # it had its time
        if not self.busy or self.took > STALE:
            self.busy = True
            self._answered.clear()
            self._asked.set()
        if not self._answered.wait(patience):
            return None
        self.busy = False
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def leave(self) -> None:
        """End the thread, as soon as it is back."""
        self._leave = True
        self._asked.set()

    def _run(self) -> None:
        while self._asked.wait() and not self._leave:
            self._asked.clear()
            began = time.monotonic()
            try:
                self._answer = self._work()
            except BaseException as error:
                self._answer = error
            self.took = time.monotonic() - began
            self._answered.set()


class Reader:
    """The GPUs of this host, read once a cycle."""

    def __init__(self, nvml: Nvml, patience: float) -> None:
        self._nvml, self._patience = nvml, patience
        self._sequence = 0
        self._xids: queue.SimpleQueue[Xid] = queue.SimpleQueue()
        self._warned: set[str] = set()
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._workers: list[tuple[DeviceReader, Worker[list[Gpu]]]] = []
        self._down: list[Gpu] = []
        #: All GPUs that were ever seen, by index and identity: what is lost keeps its name.
        self._seen: dict[tuple[int, str], Device] = {}
        self._events: Events | None = None
        self._again_at, self._again_after = 0.0, REINIT[0]
        self._driver = ""

    def report(self, xid: Xid) -> None:
        """Take in an error that the driver reported."""
        self._xids.put(xid)

    def open(self) -> None:
        """Find the GPUs. Raises Absent."""
        try:
            self._nvml("nvmlInitWithFlags", 0)
        except Refused as error:
            raise absent(error.word, "initialising") from None
        try:
            self._driver = str(self._nvml("nvmlSystemGetDriverVersion"))
        except Refused:
            self._driver = ""
        try:
            count = self._nvml("nvmlDeviceGetCount")
        except Refused as error:
            raise absent(error.word, "counting GPUs") from None
        if count == 0 and not self._seen:
            raise Absent("no_gpus", "NVML answers and counts no GPU: is a device missing in this container?")
        devices = [device for index in range(count) if (device := self._find(index)) is not None]
        self._workers = [(one := DeviceReader(self._nvml, d, self._warn), Worker(one.read)) for d in devices]
        self._events = Events(self._nvml, devices, self.report)
        here = {device.uuid for device in devices} | {row.uuid for row in self._down}
        self._down += [lost_row(d, "lost") for d in self._seen.values() if d.uuid and d.uuid not in here]

    def close(self) -> bool:
        """Let go of all GPUs; False when the library does not come back."""
        if any(worker.busy for _, worker in self._workers) or (self._events and not self._events.close()):
            return False
        for _, worker in self._workers:
            worker.leave()
        self._workers, self._down, self._events = [], [], None
        with contextlib.suppress(Refused):  # there was nothing to let go of
            self._nvml("nvmlShutdown")
        return True

    @property
    def wants_to_open_again(self) -> bool:
        """Whether a GPU was lost, and it is time to look whether it is back."""
        return bool(self._again_at) and time.monotonic() >= self._again_at

    def open_again(self) -> None:
        """Let go of all GPUs, unless one hangs, and find them anew. Raises Absent."""
        self._again_at = 0.0
        if self.close():
            self.open()

    def opening(self) -> GpuSnapshot:
        """Return the line that says that the next one may take longer."""
        return GpuSnapshot("starting", at=time.monotonic(), sequence=self._sequence, driver=self._driver)

    def cycle(self) -> GpuSnapshot | None:
        """Read every GPU; None when none of them answers in time. Raises Absent."""
        rows = list(self._down)
        answered = not self._workers
        for reader, worker in sorted(self._workers, key=lambda pair: (pair[1].busy, pair[1].took > self._patience / 2)):
            try:
                answer = worker.ask(self._patience)
            except Over as error:
                raise absent(error.word, "reading a GPU") from None
            answered = answered or answer is not None
            rows += [reader.down("hung")] if answer is None else answer
        if not answered:
            return None
        self._try_again(rows)
        self._sequence += 1
        rows.sort(key=lambda gpu: (gpu.index, gpu.parent != "", gpu.uuid))
        return GpuSnapshot(
            "ok",
            at=time.monotonic(),
            sequence=self._sequence,
            driver=self._driver,
            gpus=tuple(rows),
            xids=tuple(self._named(xid) for xid in drain(self._xids)),
            warnings=tuple(drain(self._warnings)),
        )

    def absent(self, why: Absent) -> GpuSnapshot:
        """Return the line that says why there are no GPUs."""
        return GpuSnapshot(
            why.reason,
            why.detail,
            at=time.monotonic(),
            sequence=self._sequence + 1,
            driver=self._driver,
            xids=tuple(drain(self._xids)),
            warnings=tuple(drain(self._warnings)),
        )

    def _find(self, index: int) -> Device | None:
        """Return the GPU at an index; a row of those that are down when it does not answer."""
        try:
            # By index: by UUID, one lost GPU makes the others unreachable (nvml.h).
            handle = self._nvml("nvmlDeviceGetHandleByIndex", index)
            device = Device(handle, index, str(self._nvml("nvmlDeviceGetUUID", handle)))
        except Over as error:
            raise absent(error.word, "opening a GPU") from None
        except Refused as error:
            before = [device for (at, _), device in self._seen.items() if at == index]
            self._down.append(lost_row(before[-1] if before else Device(None, index, ""), error.word))
            return None
        try:
            device.name = str(self._nvml("nvmlDeviceGetName", handle))
            device.pci = pci_address(self._nvml("nvmlDeviceGetPciInfo", handle).busId)
        except Refused:
            pass  # it has a UUID, which is what matters
        self._seen.pop((index, device.uuid), None)  # the newest of an index comes last
        self._seen[index, device.uuid] = device
        return device

    def _try_again(self, rows: list[Gpu]) -> None:
        """Plan a fresh start while a GPU is down: at once, then ever more rarely. Most need a reboot."""
        if all(gpu.up or gpu.reason == "hung" for gpu in rows):
            self._again_after = REINIT[0]
        elif not self._again_at:
            self._again_at = time.monotonic() + self._again_after
            self._again_after = min(2 * self._again_after, REINIT[1])

    def _named(self, xid: Xid) -> Xid:
        """Complete a report of the log, which knows a PCI address only."""
        if xid.uuid:
            return xid
        uuid = next((device.uuid for device in self._seen.values() if device.pci and device.pci == xid.pci), "")
        return Xid(xid.at, xid.code, uuid, xid.pci, xid.pid)

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warnings.put(sentence)


def drain(waiting: queue.SimpleQueue[T]) -> list[T]:
    """Take everything out."""
    return [waiting.get() for _ in range(waiting.qsize())]
