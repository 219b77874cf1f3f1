"""The page of NVIDIA's dcgm-exporter, read into the same snapshot as NVML.

For sites that run DCGM and must not run a second NVML client. What the page cannot tell: the processes of a GPU, the
UUIDs of MIG instances, whether power is that of the GPU or of a Grace module, and whether memory is the host's.

Names and units are those of the exporter's counter files and DCGM's field identifiers. The ``*_VIOLATION`` counters are
nanoseconds in every version, though the exporter called them microseconds until 2025 (dcgm-exporter pull request 589).
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from yarl import URL

from tokengap.errors import SourceUnusable
from tokengap.gpu_readings import RECOVERY_ACTIONS, THROTTLE_REASONS, Gpu, GpuSnapshot, ThrottleReason, Xid
from tokengap.sources.page import MetricsPage


def _over(divisor: float) -> Callable[[float], float]:
    return lambda value: value / divisor


def _times(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


def _mebibytes(number: float) -> int:
    return int(number * 2**20)


def _action(number: float) -> str:
    if number not in range(len(RECOVERY_ACTIONS)):
        raise ValueError("unknown_value")
    return RECOVERY_ACTIONS[int(number)]


def _faults(mask: float) -> tuple[ThrottleReason, ...]:
    return tuple(reason for reason in THROTTLE_REASONS if int(mask) & _FAULT_BITS[reason])


@dataclass(frozen=True, slots=True)
class _Measure:
    """What a name on the page says: a field of Gpu, in which unit, and the highest value that makes sense.

    ``of_board``: a MIG instance has none of its own. The exporter repeats the board's value on each instance's line,
    where it must not be added up.
    """

    field: str
    convert: Callable[[float], Any]
    highest: float = math.inf
    lowest: float = 0.0
    of_board: bool = True


#: The first name of a field that has a value counts.
_MEASURES: Mapping[str, _Measure] = {
    "DCGM_FI_DEV_GPU_UTIL": _Measure("utilization", _over(100), highest=100, of_board=False),
    # Where MIG is on, the driver tells no utilisation; the profiling unit does, for each instance.
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": _Measure("utilization", float, highest=1, of_board=False),
    "DCGM_FI_DEV_FB_USED": _Measure("memory_used", _mebibytes, of_board=False),
    "DCGM_FI_DEV_FB_TOTAL": _Measure("memory_total", _mebibytes, of_board=False),
    "DCGM_FI_DEV_POWER_USAGE": _Measure("power", float),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": _Measure("energy", _over(1000)),  # millijoules
    "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": _Measure("energy", float),  # newer, and coarser
    "DCGM_FI_DEV_GPU_TEMP": _Measure("temperature", float, lowest=-273.15),
    "DCGM_FI_DEV_SM_CLOCK": _Measure("sm_clock", _times(1e6)),
    "DCGM_FI_DEV_SM_CLOCK_HERTZ": _Measure("sm_clock", float),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": _Measure("throttling", _faults),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": _Measure("throttling", _faults),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _Measure("ecc_uncorrectable", int),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": _Measure("remap_failure", bool),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": _Measure("remap_pending", bool),
    "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": _Measure("recovery_action", _action),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": _Measure("pcie_replays", int),
    "DCGM_FI_DEV_MIG_MODE": _Measure("mig", bool),
}

#: Nanoseconds. A violation counter does not say whether hardware or software slowed the clocks for heat; software does
#: so first. Power capping, sync boost, the board's limit and low utilisation are no faults.
_THROTTLED: Mapping[str, ThrottleReason] = {
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": "hw_thermal",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": "sw_thermal",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": "power_brake",
    "DCGM_FI_DEV_THERMAL_VIOLATION": "sw_thermal",
}
_FAULT_BITS: Mapping[ThrottleReason, int] = {
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}

# Together they are all memory (dcgm-exporter issue 271); older counter files lack the reserved part, some 500 MiB.
_USED, _FREE, _RESERVED = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_RESERVED"
_XID_LAST = "DCGM_FI_DEV_XID_ERRORS"
_XID_TOTAL = "DCGM_EXP_XID_ERRORS_TOTAL"
_XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"

#: Names since DCGM 4.6, where a counter file uses them. Not DCGM_FI_DEV_GPU_UTIL_RATIO: percent in 4.6, a ratio in 4.7.
_RENAMED: Mapping[str, str] = {
    "DCGM_FI_DEV_BOARD_POWER_WATTS": "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_GPU_RECOVERY_ACTION": "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION",
    "DCGM_FI_DEV_GPU_TEMP_CELSIUS": "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_PCIE_REPLAY_TOTAL": "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "DCGM_FI_DEV_ROW_REMAP_FAILED": "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "DCGM_FI_DEV_XID_ERROR": _XID_LAST,
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
}

_NAMES = frozenset((*_MEASURES, *_THROTTLED, _FREE, _RESERVED, _XID_LAST, _XID_TOTAL, _XID_COUNT, *_RENAMED))
_OF_BOARD = frozenset((*(name for name, measure in _MEASURES.items() if measure.of_board), *_THROTTLED, _XID_LAST))
_OF_BOARD_FIELDS = frozenset(("throttled", *(measure.field for measure in _MEASURES.values() if measure.of_board)))
_FIELDS = sorted({*_OF_BOARD_FIELDS, *(measure.field for measure in _MEASURES.values())})
_NAME = re.compile(r"[ \t]*+([A-Za-z_:][A-Za-z0-9_:]*+)")

_DRIVER = "DCGM_FI_DRIVER_VERSION"

#: Characters; with all labels of a pod a line has a thousand. The parser's time grows faster than a line's length.
_LONGEST_LINE = 8192

#: Reports of one code in one read. One incident makes thousands; no more is learnt from them.
_MOST_XIDS = 100

#: Within so many seconds, what two names for errors show is the same errors; the exporter collects every 30.
_XID_SKEW = 120.0

_Values = dict[str, float]


def why_blank(value: float) -> str:
    """Return why DCGM gives no value, where this number stands for none; else an empty string.

    Each of DCGM's three kinds of numbers has sixteen that are no values: from 0x7ffffff0 (32 bits), from 2**47
    (floating point) and from 0x7ffffffffffffff0 (64 bits; everything above is no value of anything either).
    """
    for first in (0x7FFFFFF0, 2**47, 0x7FFFFFFFFFFFFFF0):
        if first <= value < first + 16:
            return {1: "not_found", 2: "not_supported", 3: "no_permission"}.get(int(value - first), "blank")
    return "blank" if value >= 2**63 else ""


@dataclass(slots=True)
class _Rows:
    """The lines of one GPU, or of one MIG instance of it. Pods and containers that share it do not multiply it."""

    labels: Mapping[str, str]
    values: _Values = field(default_factory=dict)
    blanks: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, value: float, why: str) -> None:
        """Take one line. Of several values, which differ by a moment at most, the highest counts."""
        if why:
            self.blanks[name] = why
        else:
            self.values[name] = max(value, self.values.get(name, value))

    @property
    def answered(self) -> bool:
        """Whether the GPU gave any value. The last XID is remembered without it."""
        return not self.values.keys() <= {_XID_LAST}


@dataclass(frozen=True, slots=True)
class _Page:
    """What one page says. ``last`` is the last XID by UUID; ``counted`` are XIDs by UUID, name of the counter, code."""

    driver: str
    gpus: tuple[Gpu, ...]
    last: Mapping[str, int]
    counted: Mapping[tuple[str, str, int], float]
    warnings: tuple[str, ...]


def parse_page(body: bytes, at: float) -> GpuSnapshot:
    """Read the GPUs on a page. ``at`` is when it was read, monotonic seconds.

    A MIG instance is a GPU with a ``parent``; its UUID is not on the page, so it is called by its parent's and its
    number. The parent has the values of the whole board, which the exporter writes on the lines of the instances. A GPU
    without one value is not up. Of errors there are none: which are new, only :class:`DcgmPage` knows.

    Lines that cannot be read are left out and told of in a warning. Raises SourceUnusable when the page is not text, or
    when nothing on it can be used.
    """
    page = _parse(*_lines(body))
    gpus = tuple(replace(gpu, at=at) for gpu in page.gpus)
    return GpuSnapshot("ok", way="dcgm", at=at, driver=page.driver, gpus=gpus, warnings=page.warnings)


def _parse(lines: list[str], warnings: tuple[str, ...]) -> _Page:
    rows: dict[tuple[str, str], _Rows] = {}  # by UUID and number of the MIG instance
    counted: dict[tuple[str, str, int], float] = {}
    samples, unreadable = _samples(lines)
    for sample in samples:
        uuid, instance = sample.labels.get("UUID", ""), sample.labels.get("GPU_I_ID", "")
        if not uuid:  # of a CPU, a switch or a link
            continue
        value = sample.value
        why = why_blank(value) or ("" if math.isfinite(value) else "blank")
        entity = rows.setdefault((uuid, instance), _Rows(sample.labels))
        if sample.name in (_XID_TOTAL, _XID_COUNT):
            code = _number(sample.labels.get("xid", ""))
            if not why and code > 0:  # there is no such label, or 0, where there was no error
                key = (uuid, sample.name, code)  # each instance shows the errors of the whole
                counted[key] = max(value, counted.get(key, 0.0))
        else:
            entity.take(_RENAMED.get(sample.name, sample.name), value, why)
    if not rows:
        raise SourceUnusable("no GPU on the page: expected dcgm-exporter's DCGM_FI_DEV_... lines with UUID labels")

    gpus: list[Gpu] = []
    last: dict[str, int] = {}
    for uuid in dict.fromkeys(uuid for uuid, _ in rows):
        instances = {instance: row for (of, instance), row in rows.items() if of == uuid and instance}
        board = rows.get((uuid, "")) or _Rows(next(iter(instances.values())).labels)
        for row in instances.values():
            for name in _OF_BOARD & row.values.keys():
                board.take(name, row.values[name], "")
            for name in _OF_BOARD & row.blanks.keys():
                board.blanks.setdefault(name, row.blanks[name])
        up = board.answered or any(row.answered for row in instances.values())
        gpus.append(_gpu(uuid, board, up=up, has_instances=bool(instances)))
        gpus += (_gpu(f"{uuid}/{number}", row, up=row.answered, parent=uuid) for number, row in instances.items())
        if board.values.get(_XID_LAST, -1.0) >= 0:
            last[uuid] = int(board.values[_XID_LAST])
    gpus.sort(key=lambda gpu: (gpu.index, gpu.parent or gpu.uuid, len(gpu.uuid), gpu.uuid))  # an instance after its GPU
    drivers = (row.labels.get(_DRIVER, "") for row in rows.values())
    driver = next((driver for driver in drivers if driver and not driver.startswith("<<<")), "")
    return _Page(driver, tuple(gpus), last, counted, warnings + unreadable)


def _lines(body: bytes) -> tuple[list[str], tuple[str, ...]]:
    """Return the lines with a known name, in one order whatever the page's, and what was left out."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise SourceUnusable(f"the page is not text (byte {error.start} is not UTF-8)") from None
    if not text.strip():
        raise SourceUnusable("the page is empty")
    whole, _, cut = text.rpartition("\n")
    lines = sorted(line for line in whole.split("\n") if (name := _NAME.match(line)) and name[1] in _NAMES)
    return lines, ("on the DCGM page, the last line has no end and was left out",) if cut.strip() else ()


def _samples(lines: list[str]) -> tuple[list[Sample], tuple[str, ...]]:
    """Read the lines; say which cannot be."""
    samples: list[Sample] = []
    unreadable = [line for line in lines if len(line) > _LONGEST_LINE]
    readable = [line for line in lines if len(line) <= _LONGEST_LINE]
    try:
        samples = _read("\n".join(readable))
    except ValueError:
        for line in readable:
            try:
                samples += _read(line)
            except ValueError:
                unreadable.append(line)
    if not unreadable:
        return samples, ()
    first = unreadable[0][:200]
    return samples, (f"on the DCGM page, lines that cannot be read: {len(unreadable)}, the first is {first!r}",)


def _read(text: str) -> list[Sample]:
    """Read lines of samples; without their ``# TYPE`` the parser leaves the names of counters as they are."""
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except IndexError:  # of the parser 0.26, on a label without a name
        raise ValueError("malformed") from None


def _number(label: str) -> int:
    """Return a number in a label, -1 where there is none."""
    return int(label) if label.isascii() and label.isdigit() and len(label) < 10 else -1


def _gpu(uuid: str, rows: _Rows, *, up: bool, parent: str = "", has_instances: bool = False) -> Gpu:
    """Return a GPU from its lines, ``at`` left at 0."""
    found: dict[str, Any] = {}
    unsupported: dict[str, str] = {}
    values = {name: value for name, value in rows.values.items() if not parent or name not in _OF_BOARD}
    for name, measure in _MEASURES.items():
        if measure.field in found:
            continue
        if name in values:
            try:
                if not measure.lowest <= values[name] <= measure.highest:
                    raise ValueError("out_of_range")
                found[measure.field] = measure.convert(values[name])
            except ValueError as why:
                unsupported[measure.field] = str(why)
        elif name in rows.blanks:
            unsupported.setdefault(measure.field, rows.blanks[name])

    throttled: dict[ThrottleReason, float] = {}
    for name, reason in _THROTTLED.items():
        if values.get(name, -1.0) >= 0:
            throttled.setdefault(reason, values[name] / 1e9)
    if throttled:
        found["throttled"] = throttled

    parts = [values.get(part, -1.0) for part in (_USED, _FREE, _RESERVED)]
    if "memory_total" not in found and min(parts) >= 0:
        found["memory_total"] = _mebibytes(sum(parts))
    if has_instances:
        found["mig"] = True
    for name in _FIELDS:
        if parent and name in _OF_BOARD_FIELDS:
            unsupported[name] = "of_parent"
        elif has_instances and name not in _OF_BOARD_FIELDS:
            unsupported.setdefault(name, "mig")
        else:
            unsupported.setdefault(name, "not_exported")
    return Gpu(
        uuid=uuid,
        index=_number(rows.labels.get("gpu", "")),
        at=0.0,
        up=up,
        reason="" if up else "unknown",
        parent=parent,
        name=rows.labels.get("modelName", ""),
        pci=rows.labels.get("pci_bus_id", ""),
        unsupported={"processes": "not_exported"}
        | {name: unsupported[name] for name in unsupported if name not in found},
        **found,
    )


class _XidWatch:
    """Which XIDs on the pages are new.

    The exporter has three names for them, each optional: the last code, which shows no second error of the same code;
    a total since the exporter started; and a count within a window, which falls as errors leave it. One error is on all
    of them, not always at once, so what is new is how far the highest of their growths went past what was reported.

    What is there when a GPU is first seen is old. Without an error a total or a count has no line, so no line is 0. The
    last code stays what it was while its line is missing: a field that fails once must not bring an old error back.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._last: dict[str, int] = {}
        self._counted: Mapping[tuple[str, str, int], float] = {}
        self._grown: Counter[tuple[str, str, int]] = Counter()
        self._reported: dict[tuple[str, int], tuple[int, float]] = {}  # how many, and when the last of them

    def new(self, page: _Page, at: float) -> tuple[Xid, ...]:
        """Return the errors since the page before."""
        reports: list[Xid] = []
        for gpu in page.gpus:
            if gpu.parent:
                continue
            growth = self._growth(gpu.uuid, page)
            for code in sorted({code for _, code in growth}) if gpu.uuid in self._seen else ():
                reported, when = self._reported.get((gpu.uuid, code), (0, at))
                highest = reported
                for name in (_XID_LAST, _XID_TOTAL, _XID_COUNT):
                    before = reported if at - when > _XID_SKEW else self._grown[gpu.uuid, name, code]
                    self._grown[gpu.uuid, name, code] = before + growth.get((name, code), 0)
                    highest = max(highest, self._grown[gpu.uuid, name, code])
                self._reported[gpu.uuid, code] = highest, at
                reports += [Xid(at, code, gpu.uuid, gpu.pci)] * min(highest - reported, _MOST_XIDS)
        there = {gpu.uuid for gpu in page.gpus}
        self._seen |= there
        self._last |= page.last
        away = {key: count for key, count in self._counted.items() if key[0] not in there}
        self._counted = away | dict(page.counted)
        return tuple(reports)

    def _growth(self, uuid: str, page: _Page) -> dict[tuple[str, int], int]:
        """Return how many errors each name shows that it did not show on the page before, by name and code."""
        growth: dict[tuple[str, int], int] = {}
        last = page.last.get(uuid, 0)
        if last and last != self._last.get(uuid):
            growth[_XID_LAST, last] = 1
        for key in page.counted:
            of, name, code = key
            now, before = page.counted[key], self._counted.get(key, 0.0)
            if of == uuid and now > before:
                growth[name, code] = int(now - before)
            elif of == uuid and now < before and name == _XID_TOTAL:  # the exporter started again
                growth[name, code] = int(now)
        return growth


def page_url(url: str) -> str:
    """Return the address of the page: ``/metrics`` where the address has no path, else as it was given.

    Raises ValueError, saying what is expected, when it is no HTTP address.
    """
    parts = URL(url.strip())
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ValueError("expected http://HOST:9400/metrics")
    return str(parts if parts.path.strip("/") else parts.with_path("/metrics"))


class DcgmPage:
    """The page of one dcgm-exporter, and what changes on it from one read to the next.

    The exporter collects every 30 s unless told otherwise, and shows the same values until then, energy among them. An
    interval between two reads would then have no energy at all, and the next one that of 30 s. So ``Gpu.at`` is when
    its energy (its power, where it has no energy; its parent's, for a MIG instance) was first seen with this value, and
    as long as the page says the same, the snapshot is the same, with its ``sequence`` and ``at``. A page that never
    changes again is thus as old as it looks.

    A GPU that was on the page and is not any more stays in the snapshot, not ``up``, for the reason ``missing``.

    ``deadline`` is seconds; ``max_bytes`` is five times what 64 MIG instances take. The session is the caller's. Raises
    ValueError for a bad URL.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        deadline: float,
        max_bytes: int = 2 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = MetricsPage(page_url(url), session, max_bytes=max_bytes)
        self._deadline = deadline
        self._clock = clock
        self._lines: list[str] | None = None
        self._page: _Page | None = None
        self._snapshot = GpuSnapshot("starting", way="dcgm")
        self._xids = _XidWatch()
        self._whole: dict[str, Gpu] = {}

    async def read(self) -> GpuSnapshot:
        """Fetch and read the page. Raises a SourceError."""
        body = (await self._source.fetch(self._deadline)).body
        lines, warnings = _lines(body)
        if lines != self._lines:  # most pages are those of the read before; to parse one costs 50 us a line
            page = _parse(lines, warnings)
            self._take(page, self._clock())
            self._lines = lines
        return self._snapshot

    def _take(self, page: _Page, now: float) -> None:
        if page == self._page:
            return
        gpus: list[Gpu] = []
        for gpu in page.gpus:  # an instance comes after its parent
            if gpu.parent:
                gpus.append(replace(gpu, at=self._whole[gpu.parent].at))
                continue
            before = self._whole.get(gpu.uuid)
            measured = _measured(gpu)
            same = before is not None and measured is not None and _measured(before) == measured
            self._whole[gpu.uuid] = replace(gpu, at=before.at if before is not None and same else now)
            gpus.append(self._whole[gpu.uuid])
        there = {gpu.uuid for gpu in gpus}
        gpus += (_missing(gpu) for uuid, gpu in self._whole.items() if uuid not in there)
        self._page = page
        self._snapshot = GpuSnapshot(
            "ok",
            way="dcgm",
            at=now,
            sequence=self._snapshot.sequence + 1,
            driver=page.driver,
            gpus=tuple(gpus),
            xids=self._xids.new(page, now),
            warnings=page.warnings,
        )


def _measured(gpu: Gpu) -> tuple[str, float] | None:
    """Return the value whose change shows that DCGM has collected."""
    if gpu.energy is not None:
        return "energy", gpu.energy
    return None if gpu.power is None else ("power", gpu.power)


def _missing(gpu: Gpu) -> Gpu:
    return Gpu(gpu.uuid, gpu.index, gpu.at, up=False, reason="missing", name=gpu.name, pci=gpu.pci)
