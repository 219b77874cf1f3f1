"""A dcgm-exporter page: what it says of GPUs, what changed on it since the last read, and what is no such page."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from tokengap.errors import SourceError, SourceRefused, SourceTimeout, SourceUnusable
from tokengap.gpu_readings import Gpu, GpuSnapshot
from tokengap.sources.dcgm import DcgmPage, page_url, parse_page, why_blank

PAGES = Path(__file__).parent.parent / "recorded" / "dcgm-pages"
H100 = (PAGES / "h100-two.prom").read_bytes()
MIG = (PAGES / "h100-mig.prom").read_bytes()
BLANKS = (PAGES / "t4-blanks.prom").read_bytes()
PODS = (PAGES / "h100-shared-by-pods.prom").read_bytes()

BUSY = "GPU-11111111-2222-3333-4444-555555555550"
IDLE = "GPU-11111111-2222-3333-4444-555555555551"
MIB = 2**20

ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
POWER = "DCGM_FI_DEV_POWER_USAGE"
LAST_XID = "DCGM_FI_DEV_XID_ERRORS"
XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
XID_TOTAL = "DCGM_EXP_XID_ERRORS_TOTAL"


def line(name: str, value: object, **labels: str) -> bytes:
    pairs = {"gpu": "0", "UUID": BUSY, "pci_bus_id": "00000000:3B:00.0"} | labels
    labels_text = ",".join(f'{key}="{text}"' for key, text in pairs.items())
    return f"{name}{{{labels_text}}} {value}\n".encode()


def xid(name: str, code: int, count: int) -> bytes:
    return line(name, count, xid=str(code))


def only(snapshot: GpuSnapshot) -> Gpu:
    (gpu,) = snapshot.gpus
    return gpu


def without_reasons(gpu: Gpu) -> Gpu:
    return replace(gpu, unsupported={})


# One page


def test_two_gpus_field_by_field() -> None:
    """MiB become bytes, mJ joules, MHz hertz, percent a ratio and ns seconds; names, address and driver are labels."""
    snapshot = parse_page(H100, at=7.0)
    assert (snapshot.reason, snapshot.way, snapshot.at, snapshot.driver) == ("ok", "dcgm", 7.0, "590.48.01")
    busy, idle = snapshot.gpus
    assert without_reasons(busy) == Gpu(
        uuid=BUSY,
        index=0,
        at=7.0,
        name="NVIDIA H100 80GB HBM3",
        pci="00000000:3B:00.0",
        utilization=0.97,
        memory_used=75067 * MIB,
        memory_total=(75067 + 6012 + 480) * MIB,
        power=631.95,
        energy=48212345.678,
        temperature=59,
        sm_clock=1980e6,
        throttled={"hw_thermal": 0.0, "sw_thermal": 0.25},
        throttling=(),  # the power cap alone, which is no fault
        ecc_uncorrectable=0,
        remap_failure=False,
        pcie_replays=0,
    )
    assert without_reasons(idle) == Gpu(
        uuid=IDLE,
        index=1,
        at=7.0,
        name="NVIDIA H100 80GB HBM3",
        pci="00000000:4B:00.0",
        utilization=0.0,
        memory_used=158 * MIB,
        memory_total=(158 + 80921 + 480) * MIB,
        power=71.15,
        energy=9301234.567,
        temperature=38,
        sm_clock=345e6,
        throttled={"hw_thermal": 1.5, "sw_thermal": 0.0},
        throttling=("hw_thermal", "sw_thermal"),
        ecc_uncorrectable=2,
        remap_failure=True,
        pcie_replays=3,
    )
    unknown = dict.fromkeys(("mig", "processes", "recovery_action", "remap_pending"), "not_exported")
    assert busy.unsupported == idle.unsupported == unknown
    assert (snapshot.xids, snapshot.warnings) == ((), ())  # XID 43 was there before


def test_mig_instances_have_memory_and_activity_and_their_parent_the_board() -> None:
    """The board's power and energy, repeated on each instance's line, are the parent's, once."""
    parent, *instances = parse_page(MIG, at=1.0).gpus
    assert without_reasons(parent) == Gpu(
        uuid=BUSY,
        index=0,
        at=1.0,
        name="NVIDIA H100 80GB HBM3",
        pci="00000000:3B:00.0",
        power=433.91,
        energy=7012389.0,
        temperature=42,
        sm_clock=1755e6,
        pcie_replays=0,
        mig=True,
    )
    assert {name: parent.unsupported[name] for name in ("utilization", "memory_used", "memory_total")} == {
        "utilization": "mig",
        "memory_used": "mig",
        "memory_total": "mig",
    }
    assert [(gpu.uuid, gpu.parent, gpu.utilization, gpu.memory_used, gpu.memory_total) for gpu in instances] == [
        (f"{BUSY}/1", BUSY, 0.41, 21034 * MIB, (21034 + 19000 + 150) * MIB),
        (f"{BUSY}/2", BUSY, 0.02, 11 * MIB, (11 + 40033 + 150) * MIB),
        (f"{BUSY}/9", BUSY, 0.0, 7 * MIB, (7 + 9728 + 150) * MIB),
    ]
    for gpu in instances:
        assert (gpu.power, gpu.energy, gpu.sm_clock, gpu.pcie_replays) == (None,) * 4
        assert gpu.unsupported["energy"] == "of_parent"
        assert (gpu.up, gpu.processes) == (True, None)


def test_a_mig_board_that_gives_no_energy_says_why() -> None:
    """A blank on the lines of the instances is the board's; memory of one instance is a sign of life of the board."""
    instance = {"GPU_I_ID": "1"}
    parent, child = parse_page(
        line(ENERGY, 2**47 + 2, **instance) + line("DCGM_FI_DEV_FB_USED", 7, **instance), 0.0
    ).gpus
    assert (parent.up, parent.energy, parent.unsupported["energy"]) == (True, None, "not_supported")
    assert (child.up, child.unsupported["energy"]) == (True, "of_parent")


def test_the_last_error_is_no_sign_of_life() -> None:
    """DCGM remembers it without asking the GPU, of which it may be the end."""
    gpu = only(parse_page(line(LAST_XID, 79) + line(POWER, 2**47), at=0.0))
    assert (gpu.up, gpu.reason) == (False, "unknown")


def test_pods_that_share_a_gpu_do_not_multiply_it() -> None:
    """Three lines that differ by pod are one GPU with the values of one."""
    gpu = only(parse_page(PODS, at=0.0))
    assert (gpu.power, gpu.energy, gpu.utilization, gpu.memory_used) == (402.1, 5000.0, 0.88, 40000 * MIB)
    assert gpu.memory_total is None  # without the reserved part, used and free are not all of it
    assert gpu.unsupported["memory_total"] == "not_exported"


def test_blank_values_are_absent_and_a_gpu_of_blanks_is_not_up() -> None:
    """Numbers that stand for no value never show, and their kind is the reason; the rest of the GPU stays."""
    first, second = parse_page(BLANKS, at=0.0).gpus
    assert (first.up, first.power, first.temperature, first.utilization) == (True, 27.316, 31, 0.12)
    assert (first.energy, first.unsupported["energy"]) == (None, "not_supported")
    blank = Gpu(uuid=IDLE, index=1, at=0.0, up=False, reason="unknown", name="Tesla T4")
    assert without_reasons(second) == blank
    assert second.unsupported["energy"] == "no_permission"
    assert second.unsupported["pcie_replays"] == "not_found"
    assert second.unsupported["utilization"] == "not_supported"


@given(
    first=st.sampled_from((0x7FFFFFF0, 2**47, 0x7FFFFFFFFFFFFFF0)),
    offset=st.integers(0, 15),
    name=st.sampled_from(
        (ENERGY, POWER, "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_THERMAL_VIOLATION")
    ),
    written=st.sampled_from(("%d", "%d.000000", "%.17e")),
)
def test_no_blank_becomes_a_value(first: int, offset: int, name: str, written: str) -> None:
    """Each of the 48 blanks, however it is written, leaves its field None; its neighbour below is a value."""
    gpu = parse_page(line(name, written % (first + offset)) + line("DCGM_FI_DEV_GPU_TEMP", 40), at=0.0).gpus[0]
    assert (gpu.energy, gpu.power, gpu.memory_used, gpu.utilization, gpu.throttled) == (None, None, None, None, {})
    assert (gpu.up, gpu.temperature) == (True, 40)
    assert why_blank(first + offset)
    assert not why_blank(first - 1)


@given(st.integers(0, 10**13))
def test_energy_is_exact_to_the_millijoule(millijoules: int) -> None:
    """Up to 300 years of 1 kW, no energy is mistaken for a blank, but for sixteen numbers, nor rounded."""
    gpu = parse_page(line(ENERGY, millijoules), at=0.0).gpus[0]
    if 0x7FFFFFF0 <= millijoules <= 0x7FFFFFFF:
        assert gpu.energy is None
    else:
        assert gpu.energy is not None
        assert round(gpu.energy * 1000) == millijoules


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("DCGM_FI_DEV_GPU_UTIL", 101, "utilization"),
        ("DCGM_FI_DEV_GPU_UTIL", -1, "utilization"),
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "1.5", "utilization"),
        (POWER, "-0.1", "power"),
        (POWER, "NaN", "power"),
        (ENERGY, "+Inf", "energy"),
        ("DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", 9, "recovery_action"),
        ("DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "0.5", "recovery_action"),
    ],
)
def test_a_value_that_cannot_be_is_absent(name: str, value: object, field: str) -> None:
    """A ratio above 1, a negative power, NaN: None, with a reason."""
    gpu = only(parse_page(line(name, value) + line("DCGM_FI_DEV_GPU_TEMP", 40), at=0.0))
    assert getattr(gpu, field) is None
    assert gpu.unsupported[field] in ("out_of_range", "blank", "unknown_value")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (line("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1980000000), {"sm_clock": 1980e6}),
        (line("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 12), {"energy": 12.0}),
        (line("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 12) + line(ENERGY, 12345), {"energy": 12.345}),
        (line("DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", 2), {"recovery_action": "reboot"}),
        (line("DCGM_FI_DEV_GPU_RECOVERY_ACTION", 0), {"recovery_action": "none"}),
        (line("DCGM_FI_DEV_BOARD_POWER_WATTS", "71.5"), {"power": 71.5}),
        (line("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 40), {"temperature": 40}),
        (line("DCGM_FI_DEV_PCIE_REPLAY_TOTAL", 4), {"pcie_replays": 4}),
        (line("DCGM_FI_DEV_ROW_REMAP_FAILED", 1), {"remap_failure": True}),
        (line("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", "0.25"), {"utilization": 0.25}),
        (line("DCGM_FI_DEV_ROW_REMAP_PENDING", 1), {"remap_pending": True}),
        (line("DCGM_FI_DEV_MIG_MODE", 0), {"mig": False}),
        (line("DCGM_FI_DEV_FB_TOTAL", 81559), {"memory_total": 81559 * MIB}),
        (line("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 0x88), {"throttling": ("hw_slowdown", "power_brake")}),
        (
            line("DCGM_FI_DEV_THERMAL_VIOLATION", 5e9)
            + line("DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", 2e9),
            {"throttled": {"sw_thermal": 2.0}},
        ),
        # MIG is off, and the profiling unit is there as well: the driver's figure counts
        (line("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0.5") + line("DCGM_FI_DEV_GPU_UTIL", 60), {"utilization": 0.6}),
        (line("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0.5"), {"utilization": 0.5}),
        (
            b"".join(
                line(f"DCGM_FI_DEV_FB_{part}", value) for part, value in (("USED", 5), ("FREE", "NaN"), ("RESERVED", 3))
            ),
            {"memory_used": 5 * MIB, "memory_total": None},
        ),
    ],
)
def test_other_names_for_what_a_gpu_says(body: bytes, expected: dict[str, object]) -> None:
    """Newer names in base units, names of custom counter files, and which of two names counts."""
    gpu = only(parse_page(body, at=0.0))
    assert {field: getattr(gpu, field) for field in expected} == expected


def test_lines_without_a_gpu_are_passed_over() -> None:
    """CPUs, switches and unknown names make no GPU and no warning."""
    others = (
        b'DCGM_FI_DEV_CPU_POWER_UTIL_CURRENT{cpu="0"} 90\n'
        b'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID=""} 90\n'
        b'DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{nvswitch="nvswitch0"} [n/a]\n'
        b"go_goroutines 12\n"
    )
    snapshot = parse_page(others + line(POWER, 71), at=0.0)
    assert (only(snapshot).power, snapshot.warnings) == (71, ())


def test_a_line_that_cannot_be_read_costs_itself_and_is_told() -> None:
    """A value that is text, or half a line, leaves the other lines as they are; the warning quotes it."""
    snapshot = parse_page(line("DCGM_FI_DEV_GPU_TEMP", "<<<NULL>>>") + line(POWER, 71), at=0.0)
    assert (only(snapshot).power, only(snapshot).temperature) == (71, None)
    (warning,) = snapshot.warnings
    assert "cannot be read: 1" in warning
    assert "<<<NULL>>>" in warning

    snapshot = parse_page(line("DCGM_FI_DEV_GPU_TEMP", 40, pod="x" * 10_000) + line(POWER, 71), at=0.0)
    assert (only(snapshot).power, only(snapshot).temperature) == (71, None)
    assert "cannot be read: 1" in snapshot.warnings[0]
    assert len(snapshot.warnings[0]) < 400

    snapshot = parse_page(line(POWER, 71) + line(ENERGY, 123456)[:-3], at=0.0)
    assert (only(snapshot).power, only(snapshot).energy) == (71, None)  # 1234 mJ would look like a reset
    assert snapshot.warnings == ("on the DCGM page, the last line has no end and was left out",)


def test_an_openmetrics_page_reads_the_same() -> None:
    """A proxy in front may add what OpenMetrics asks for at the end."""
    assert parse_page(H100 + b"# EOF\n", at=0.0) == parse_page(H100, at=0.0)


@given(st.binary(max_size=200), st.integers(0, len(H100)), st.booleans())
def test_any_bytes_are_a_snapshot_or_one_clear_line(noise: bytes, where: int, alone: bool) -> None:
    """Noise in a page, or noise alone, is a snapshot of plausible GPUs or a SourceUnusable of one line."""
    body = noise if alone else H100[:where] + noise + H100[where:]
    try:
        snapshot = parse_page(body, at=0.0)
    except SourceUnusable as error:
        assert "\n" not in str(error)  # noqa: PT017  # either end is right
    else:
        assert snapshot.gpus
        assert all("\n" not in warning for warning in snapshot.warnings)


_texts = st.text(st.sampled_from(' \t"\\{}=,#0aA_.-+eNnif\u00a0\u0662'), max_size=30)


@given(_texts, _texts)
@example(", =0", "")  # an IndexError in prometheus_client 0.26
def test_any_line_is_read_or_told_of(labels: str, value: str) -> None:
    """Whatever follows a known name, the page next to it is read."""
    odd = f"{POWER}{{{labels}}} {value}\n".encode()
    assert BUSY in {gpu.uuid for gpu in parse_page(odd + line("DCGM_FI_DEV_GPU_TEMP", 40), at=0.0).gpus}


# Several reads


class Story:
    """A page that changes, read by the second."""

    def __init__(self) -> None:
        self.body = b""
        self.now = 0.0

    async def handle(self, _: web.Request) -> web.Response:
        return web.Response(body=self.body, content_type="text/plain")


class Reader:
    def __init__(self, story: Story, page: DcgmPage) -> None:
        self.story, self.page = story, page

    async def __call__(self, now: float, *lines: bytes) -> GpuSnapshot:
        self.story.now, self.story.body = now, b"".join(lines)
        return await self.page.read()


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/metrics", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def read() -> AsyncIterator[Reader]:
    story = Story()
    async with serving(story.handle) as url, aiohttp.ClientSession() as session:
        yield Reader(story, DcgmPage(url, session, deadline=10, clock=lambda: story.now))


async def test_an_unchanged_page_is_the_same_cycle(read: Reader) -> None:
    """Between two collections of the exporter, sequence and times stand still; a change moves them to that read."""
    first = await read(1.0, line(ENERGY, 1000), line(POWER, 300))
    assert (first.sequence, first.at, only(first).at) == (1, 1.0, 1.0)
    assert await read(2.0, line(POWER, 300), line(ENERGY, 1000)) == first  # the order of lines says nothing
    assert await read(3.0, line(POWER, 300, pod="new"), line(ENERGY, 1000, pod="new")) == first  # nor who has the GPU
    changed = await read(31.0, line(ENERGY, 9001000), line(POWER, 310))
    assert (changed.sequence, changed.at, only(changed).at) == (2, 31.0, 31.0)
    assert only(changed).energy == 9001.0


async def test_a_gpu_is_as_old_as_its_energy(read: Reader) -> None:
    """A new temperature with the energy of before is a new cycle in which the GPU's time stays."""
    await read(1.0, line(ENERGY, 1000), line("DCGM_FI_DEV_GPU_TEMP", 50))
    snapshot = await read(2.0, line(ENERGY, 1000), line("DCGM_FI_DEV_GPU_TEMP", 51))
    assert (snapshot.sequence, snapshot.at, only(snapshot).at, only(snapshot).temperature) == (2, 2.0, 1.0, 51)


async def test_without_energy_power_tells_the_time(read: Reader) -> None:
    """A GPU older than the energy counter is as old as its power; with neither, as old as the page."""
    await read(1.0, line(POWER, 60), line("DCGM_FI_DEV_GPU_TEMP", 50))
    assert only(await read(2.0, line(POWER, 60), line("DCGM_FI_DEV_GPU_TEMP", 51))).at == 1.0
    assert only(await read(3.0, line(POWER, 61), line("DCGM_FI_DEV_GPU_TEMP", 51))).at == 3.0
    assert only(await read(4.0, line("DCGM_FI_DEV_GPU_TEMP", 51))).at == 4.0
    assert only(await read(5.0, line("DCGM_FI_DEV_GPU_TEMP", 52))).at == 5.0


async def test_an_instance_is_as_old_as_its_parent(read: Reader) -> None:
    """Energy is the board's, and so is the time of an instance."""
    first = await read(1.0, MIG)
    assert {gpu.at for gpu in first.gpus} == {1.0}
    second = await read(2.0, MIG.replace(b"0.410000", b"0.420000"))
    assert second.gpus[1].utilization == 0.42
    assert {gpu.at for gpu in second.gpus} == {1.0}


async def test_a_gpu_that_leaves_the_page_is_missing(read: Reader) -> None:
    """The others go on; the lost one keeps its name and no values, until it is back."""
    other = {"gpu": "1", "UUID": IDLE}
    await read(1.0, line(POWER, 70), line(POWER, 71, **other))
    here, gone = (await read(2.0, line(POWER, 72))).gpus
    assert (here.up, here.power) == (True, 72)
    assert gone == Gpu(IDLE, 1, 1.0, up=False, reason="missing", pci="00000000:3B:00.0")
    here, back = (await read(3.0, line(POWER, 72), line(POWER, 73, **other))).gpus
    assert (back.up, back.power, back.at) == (True, 73, 3.0)


async def codes(read: Reader, *pages: tuple[bytes, ...]) -> list[list[int]]:
    """Return the codes of the errors that each page reports, in a story of which each page also has a new energy."""
    story = []
    for number, lines in enumerate(pages):
        snapshot = await read(float(number), line(ENERGY, 1000 * number), *lines)
        assert {(report.at, report.uuid, report.pci) for report in snapshot.xids} <= {
            (float(number), BUSY, "00000000:3B:00.0")
        }
        story.append([report.code for report in snapshot.xids])
    return story


def last(code: int) -> tuple[bytes, ...]:
    return (line(LAST_XID, code, err_code=str(code), err_msg="made up"),)


@pytest.mark.parametrize(
    ("pages", "reported"),
    [
        pytest.param([last(43), last(43)], [[], []], id="what is there at first sight is old"),
        pytest.param([last(0), last(79), last(79)], [[], [79], []], id="a change is one report"),
        pytest.param([(), (line("DCGM_FI_DEV_XID_ERROR", 79),)], [[], [79]], id="by its new name"),
        pytest.param([(), last(79)], [[], [79]], id="newer exporters have no line before the first error"),
        pytest.param([last(43), last(79), last(43)], [[], [79], [43]], id="back and forth are two"),
        pytest.param([last(79), last(0), last(79)], [[], [], [79]], id="after a reset the same code is new"),
        pytest.param([last(79), (), last(79)], [[], [], []], id="a line that was missing once brings nothing back"),
        pytest.param(
            [(xid(XID_TOTAL, 79, 3),), (xid(XID_TOTAL, 79, 5),)], [[], [79, 79]], id="growth of the total is reports"
        ),
        pytest.param([(), (xid(XID_TOTAL, 79, 1),)], [[], [79]], id="a total begins with the first error"),
        pytest.param(
            [(xid(XID_TOTAL, 79, 3),), (xid(XID_TOTAL, 79, 1),)], [[], [79]], id="a total that fell began again"
        ),
        pytest.param(
            [(xid(XID_TOTAL, 79, 1),), (), (xid(XID_TOTAL, 79, 1),)], [[], [], [79]], id="and from nothing to 1"
        ),
        pytest.param(
            [(xid(XID_COUNT, 43, 2),), (xid(XID_COUNT, 43, 1),), (xid(XID_COUNT, 43, 2),)],
            [[], [], [43]],
            id="a count in a window falls without a report",
        ),
        pytest.param(
            [
                (line(XID_COUNT, 0),),
                (xid(XID_COUNT, 0, 2),),
                (line(XID_COUNT, 3, xid="x"),),
                (line(XID_COUNT, 3, xid="9" * 5000),),
            ],
            [[], [], [], []],
            id="a code of 0, none, or no number is no error",
        ),
        pytest.param(
            [
                last(0),
                (*last(79), xid(XID_TOTAL, 79, 1), xid(XID_COUNT, 79, 1)),
                (*last(79), xid(XID_TOTAL, 79, 2), xid(XID_COUNT, 79, 2)),
            ],
            [[], [79], [79]],
            id="one error on three lines is one report",
        ),
        pytest.param(
            [last(0), last(79), (*last(79), xid(XID_TOTAL, 79, 1)), (*last(79), xid(XID_TOTAL, 79, 2))],
            [[], [79], [], [79]],
            id="nor two where the total comes a page later",
        ),
        pytest.param([(), (xid(XID_TOTAL, 45, 10_000),)], [[], [45] * 100], id="a flood of one code is cut"),
    ],
)
async def test_which_errors_are_new(read: Reader, pages: list[tuple[bytes, ...]], reported: list[list[int]]) -> None:
    """What a change of the last code, of the total and of the count in a window report."""
    assert await codes(read, *pages) == reported


async def test_a_count_that_fell_behind_still_reports(read: Reader) -> None:
    """Errors that only the last code showed do not hide those that, minutes later, only the total shows."""
    for now, code in enumerate((43, 79, 43, 79)):
        await read(float(now), *last(code))
    late = await read(600.0, *last(79), xid(XID_TOTAL, 79, 1))
    assert [report.code for report in late.xids] == [79]


async def test_the_errors_of_a_mig_board_are_reported_once(read: Reader) -> None:
    """Every instance shows the errors of the board."""
    instances = ({"GPU_I_ID": str(number), "GPU_I_PROFILE": "1g.10gb"} for number in range(3))
    lines = [
        line(POWER, 400, **instance) + line(LAST_XID, 94, **instance) + line(XID_COUNT, 1, xid="94", **instance)
        for instance in instances
    ]
    await read(1.0, *(one.replace(b"} 94", b"} 0").replace(b"} 1", b"} 0") for one in lines))
    assert [(report.code, report.uuid) for report in (await read(2.0, *lines)).xids] == [(94, BUSY)]


async def test_an_error_on_a_gpu_that_was_away_is_new(read: Reader) -> None:
    """A GPU that left the page and came back with another code had an error in between; the old ones are still old."""
    other = line(POWER, 70, gpu="1", UUID=IDLE)
    await read(1.0, other, line(POWER, 70), *last(43), xid(XID_TOTAL, 43, 2))
    assert (await read(2.0, other)).xids == ()
    back = await read(3.0, other, line(POWER, 70), *last(79), xid(XID_TOTAL, 43, 2))
    assert [report.code for report in back.xids] == [79]


# On the wire


@asynccontextmanager
async def reading(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], deadline: float = 10.0, max_bytes: int = 8 * 2**20
) -> AsyncIterator[DcgmPage]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(handler))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield DcgmPage(url, session, deadline=deadline, max_bytes=max_bytes)


def always(body: bytes, status: int = 200) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status, content_type="text/plain")

    return handler


async def test_a_page_is_read_from_a_server() -> None:
    """The real way: an address without a path, plain text asked for, the monotonic clock."""
    accepted = []

    async def handler(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"])
        return web.Response(body=H100, content_type="text/plain")

    async with reading(handler) as page:
        snapshot = await page.read()
    expected = parse_page(H100, snapshot.at)
    assert snapshot == replace(expected, sequence=1)
    assert accepted == ["text/plain;version=0.0.4"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"internal error", 500, "HTTP 500"),
        (H100, 503, "HTTP 503"),
        (b"", 200, "the page is empty"),
        (random.Random(1).randbytes(5000), 200, "not text"),
        (b"<html>\n<body>It works</body>\n", 200, "no GPU on the page"),
        (b"vllm:num_requests_running 4\n", 200, "no GPU on the page"),
        (line(POWER, "[n/a]"), 200, "no GPU on the page"),
        (b"# " + b"x" * 70_000 + b"\n" + H100, 200, "larger than 65536 bytes"),
    ],
)
async def test_an_answer_that_is_no_page_is_unusable(body: bytes, status: int, reason: str) -> None:
    """Status, emptiness, binary data, another page and a page too large each give one line."""
    async with reading(always(body, status), max_bytes=65536) as page:
        with pytest.raises(SourceUnusable, match=reason) as caught:
            await page.read()
    assert "\n" not in str(caught.value)


async def test_a_failed_read_changes_nothing() -> None:
    """After an error of the server the next page continues where the last one stood."""
    answers = iter((line(POWER, 70) + b"".join(last(0)), None, line(POWER, 71) + b"".join(last(79))))

    async def handler(request: web.Request) -> web.Response:
        body = next(answers)
        return web.Response(status=500) if body is None else web.Response(body=body)

    async with reading(handler) as page:
        assert (await page.read()).sequence == 1
        with pytest.raises(SourceUnusable):
            await page.read()
        snapshot = await page.read()
    assert (snapshot.sequence, [report.code for report in snapshot.xids]) == (2, [79])


async def test_nobody_listening_is_refused() -> None:
    """A closed port says that no exporter is there."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            page = DcgmPage(f"http://127.0.0.1:{unused.getsockname()[1]}", session, deadline=10)
            with pytest.raises(SourceRefused, match="connection refused"):
                await page.read()


async def test_a_host_without_an_address_is_said() -> None:
    """A name that does not resolve is no refusal."""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(SourceError, match=r"nowhere\.invalid does not resolve"):
            await DcgmPage("http://nowhere.invalid:9400", session, deadline=10).read()


async def test_an_exporter_that_hangs_times_out() -> None:
    """DCGM hangs when a GPU does; the deadline ends the read, and the server sees the connection go."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        while await reader.read(65536):
            pass
        gone.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(SourceTimeout, match=r"no page within 0\.2 s"):
            await DcgmPage(url, session, deadline=0.2).read()
        await asyncio.wait_for(asked.wait(), 30)
        await asyncio.wait_for(gone.wait(), 30)


@pytest.mark.parametrize(
    ("given_url", "asked"),
    [
        ("http://node:9400", "http://node:9400/metrics"),
        (" http://node:9400/ ", "http://node:9400/metrics"),
        ("http://node:9400/metrics", "http://node:9400/metrics"),
        ("https://[::1]:9400/gpu/metrics?x=1", "https://[::1]:9400/gpu/metrics?x=1"),
    ],
)
def test_the_address_of_the_page(given_url: str, asked: str) -> None:
    """An address without a path means /metrics; any other is asked as it is."""
    assert page_url(given_url) == asked


@pytest.mark.parametrize("url", ["", "node:9400", "ftp://node:9400", "http://", "http://node:99999", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """No scheme, no host, no such port."""
    with pytest.raises(ValueError, match=r"\S"):
        page_url(url)
