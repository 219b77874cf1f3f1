"""Our end of the GPU reader: what read() gives while the reader works, hangs, crashes, or was never there."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tokengap.chaos.faults import alive
from tokengap.gpu_readings import GpuSnapshot
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.lab.nvml.profiles import P100, VERSION_MISMATCH, many
from tokengap.sources.gpu import NvmlReader, Patience, _line

pytestmark = pytest.mark.e2e

QUICK = Patience(line=0.8, opening=20.0, ending=2.0, between=(0.05, 0.2))


def reader(nvml: FakeNvml, patience: Patience = QUICK) -> NvmlReader:
    return NvmlReader(interval=0.1, device_patience=0.3, patience=patience, kmsg="", environment=nvml.environment)


async def until(gpus: NvmlReader, condition: Callable[[GpuSnapshot], bool], within: float = 30.0) -> GpuSnapshot:
    """Read until a condition holds of what is read; each read is answered at once, whatever the reader does."""
    deadline = time.monotonic() + within
    while not condition(snapshot := await asyncio.wait_for(gpus.read(), 0.5)):
        assert time.monotonic() < deadline, f"this did not come true in {within} s: {snapshot}"
        await asyncio.sleep(0.02)
    return snapshot


async def test_a_gpu_is_read(nvml: FakeNvml):
    """From nothing known, to a GPU with its values, to newer values of it."""
    async with reader(nvml) as gpus:
        assert (await gpus.read()).reason == "starting"
        first = await until(gpus, lambda s: s.reason == "ok")
        assert [gpu.uuid for gpu in first.gpus] == [nvml.gpus[0].uuid]
        assert first.readers == 1
        later = await until(gpus, lambda s: s.sequence > first.sequence)
        assert later.at > first.at
        assert later.gpus[0].energy > first.gpus[0].energy


BEFORE: set[int] = set()


def children() -> list[psutil.Process]:
    """Return the readers that we have, zombies included: our children that were not there before the test."""
    return [process for process in psutil.Process().children() if process.pid not in BEFORE]


@pytest.fixture(autouse=True)
def no_reader_stays() -> Iterator[None]:
    """Those that a test made unkillable are killed after it: here they are no clients of a driver."""
    BEFORE.clear()
    BEFORE.update(process.pid for process in psutil.Process().children())
    yield
    for process in children():
        process.kill()
        process.wait()


def open_files() -> int:
    """Return how many files we have open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_closing_leaves_nothing(nvml: FakeNvml):
    """No process, no zombie, no open file."""
    before = open_files()
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        assert len(children()) == 1
    assert children() == []
    await asyncio.sleep(0)  # the loop closes pipes one turn later
    assert open_files() == before


async def test_who_stops_reading_as_a_line_comes_has_stopped():
    """A cancellation in the moment of a line is one: `close` waited for ever for a keeper that had missed it."""
    stream = asyncio.StreamReader()
    taking = asyncio.create_task(_line(stream, 5.0))
    for _ in range(5):
        await asyncio.sleep(0)  # it waits for a line by then
    stream.feed_data(b"{}\n")
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_the_reader_has_a_process_group_of_its_own(nvml: FakeNvml):
    """Ctrl-C on the exporter is the exporter's."""
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        (process,) = children()
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)


async def test_reports_and_warnings_are_handed_over_once(nvml: FakeNvml):
    """Those of all lines between two reads, whoever reads how often."""
    nvml.set(P100)
    async with reader(nvml) as gpus:
        warnings: list[str] = []
        codes: list[int] = []
        for code in (1, 2):  # the first is only to know that somebody listens
            while code not in codes:
                nvml.xid(0, code)
                snapshot = await gpus.read()
                warnings += snapshot.warnings
                codes += [xid.code for xid in snapshot.xids]
                await asyncio.sleep(0.05)
        for code in (31, 45, 79):
            nvml.xid(0, code)
        latest = await gpus.read()
        # Several lines go by before the next read.
        while gpus._latest.sequence < latest.sequence + 5:  # noqa: ASYNC110 - nothing there could set an event
            await asyncio.sleep(0.02)
        codes += [xid.code for xid in latest.xids] + [xid.code for xid in (await gpus.read()).xids]
        assert [code for code in codes if code > 2] == [31, 45, 79]
        assert (await until(gpus, lambda s: s.sequence > latest.sequence + 10)).warnings == ()
    assert len(warnings) == 1
    assert "no energy counter" in warnings[0]


async def test_a_reader_that_hangs_is_given_up(nvml: FakeNvml):
    """Values are gone after the deadline and not frozen; when they last were there stays known. It ends on SIGTERM, and
    a new one reads on when the library does."""
    async with reader(nvml) as gpus:
        good = await until(gpus, lambda s: s.reason == "ok")
        nvml.hang("nvmlDeviceGetPowerUsage")
        nvml.set(replace(nvml.gpus[0], refuse={"field:185": 3}))
        hung = await until(gpus, lambda s: s.reason == "hung")
        assert hung.gpus == ()
        assert hung.at >= good.at
        assert hung.driver == good.driver
        assert hung.detail.startswith("NVML has not answered for ")
        nvml.say()
        again = await until(gpus, lambda s: s.reason == "ok")
        assert again.at > hung.at
    assert children() == []


@pytest.mark.parametrize(("mode", "most"), [("stop", 2), ("disk", 1)])
async def test_readers_that_cannot_be_ended_do_not_pile_up(nvml: FakeNvml, mode: str, most: int):
    """Hung for as long as many deadlines and pauses take: two at most, and none beside one in state D, where a second
    would end as well; no zombies; a read is answered at once all the while; none of them is ever killed."""
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        nvml.hang("nvmlDeviceGetTotalEnergyConsumption", mode)
        await until(gpus, lambda s: s.reason == "hung")
        await until(gpus, lambda s: s.readers == most)
        seen = {process.pid for process in children()}
        until_then = time.monotonic() + 3 * (QUICK.line + QUICK.ending + QUICK.between[1])
        while time.monotonic() < until_then:
            began = time.monotonic()
            snapshot = await gpus.read()
            assert time.monotonic() - began < 0.5
            assert (snapshot.reason, snapshot.gpus) == ("hung", ())
            assert snapshot.readers <= most
            now = children()
            assert len(now) <= most
            assert psutil.STATUS_ZOMBIE not in [process.status() for process in now]
            seen |= {process.pid for process in now}
            await asyncio.sleep(0.05)
        assert len(seen) == most
        assert {process.pid for process in children()} == seen
        closing = time.monotonic()
    assert time.monotonic() - closing < QUICK.ending + 2.0


async def test_reading_goes_on_when_the_hung_ones_end(nvml: FakeNvml):
    """The driver lets go: they end of the SIGTERM that they got, and a new reader finds the GPUs."""
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        nvml.hang("nvmlDeviceGetTotalEnergyConsumption", "stop")
        await until(gpus, lambda s: s.readers == 2)
        nvml.say()
        for process in children():
            process.send_signal(signal.SIGCONT)
        good = await until(gpus, lambda s: s.reason == "ok" and s.readers == 1)
        assert good.gpus[0].up
    assert children() == []


async def test_a_slow_start_is_no_hang(nvml: FakeNvml):
    """Opening GPUs takes seconds each where nothing keeps them open: the first line has longer."""
    nvml.hang("nvmlDeviceGetHandleByIndex_v2")
    async with reader(nvml) as gpus:
        deadline = time.monotonic() + 2 * QUICK.line
        while time.monotonic() < deadline:
            assert (await gpus.read()).reason == "starting"
            await asyncio.sleep(0.05)
        nvml.say()
        await until(gpus, lambda s: s.reason == "ok")


async def test_values_are_gone_while_gpus_are_opened_again(nvml: FakeNvml):
    """One was lost, and to look for it lasts longer than a line may: not old values, and no hang either."""
    nvml.set(*many(nvml.gpus[0], 2))
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        nvml.hang("nvmlInitWithFlags")
        nvml.lose(1)
        again = await until(gpus, lambda s: s.reason != "ok")
        assert (again.reason, again.gpus, again.readers) == ("starting", (), 1)
        nvml.say(nvml.directives[-1])
        back = await until(gpus, lambda s: s.reason != "starting")
        assert (back.reason, [gpu.up for gpu in back.gpus], back.readers) == ("ok", [True, False], 1)


async def test_a_rare_cycle_is_no_hang(nvml: FakeNvml):
    """The deadline of a line begins when it is due."""
    patience = Patience(line=0.5, opening=20.0, ending=2.0, between=(0.05, 0.2))
    async with NvmlReader(interval=1.5, patience=patience, kmsg="", environment=nvml.environment) as gpus:
        first = await until(gpus, lambda s: s.reason == "ok")
        reasons = set()
        while (snapshot := await gpus.read()).sequence < first.sequence + 2:
            reasons.add(snapshot.reason)
            await asyncio.sleep(0.05)
    assert reasons == {"ok"}


async def test_a_library_that_appears_is_found(nvml: FakeNvml, tmp_path: Path):
    """A container without a driver is a quiet state; once the driver is mounted, the GPUs are there."""
    mounted = tmp_path / "lib"
    mounted.mkdir()
    library, nvml.library = nvml.library, mounted / nvml.library.name
    async with reader(nvml) as gpus:
        none = await until(gpus, lambda s: s.reason != "starting")
        assert (none.reason, none.gpus) == ("library_not_found", ())
        await until(gpus, lambda s: s.readers == 0)
        assert (await gpus.read()).reason == "library_not_found"
        nvml.library.symlink_to(library)
        assert (await until(gpus, lambda s: s.reason != "library_not_found")).reason == "ok"


async def test_an_upgraded_driver_is_no_crash_loop(nvml: FakeNvml):
    """NVML refuses for hours (nvitop 41): the reason stays, start after start, and goes when it works again."""
    nvml.init = VERSION_MISMATCH
    nvml.write()
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "version_mismatch")
        starts = set()
        while len(starts) < 4:
            assert (await gpus.read()).reason == "version_mismatch"
            starts |= {process.pid for process in children()}
            await asyncio.sleep(0.01)
        nvml.init = 0
        nvml.write()
        await until(gpus, lambda s: s.reason == "ok")


async def test_starts_become_rare(nvml: FakeNvml):
    """The pause doubles up to the longest: a host without a driver is left in peace."""
    nvml.init = VERSION_MISMATCH
    nvml.write()
    async with reader(nvml, Patience(between=(0.05, 60.0))) as gpus:
        starts: dict[int, float] = {}
        while len(starts) < 6:
            for process in children():
                starts.setdefault(process.pid, process.create_time())
            await gpus.read()
            await asyncio.sleep(0.005)
    times = sorted(starts.values())
    pauses = [later - earlier for earlier, later in pairwise(times)]
    for number, pause in enumerate(pauses):
        assert pause > 0.05 * 2**number - 0.03  # create_time() counts in hundredths


async def test_a_crash_is_told_and_survived(nvml: FakeNvml, caplog: pytest.LogCaptureFixture):
    """By its signal and the call; a new reader is started; what it printed is a few lines of the log."""
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        with caplog.at_level(logging.WARNING):
            nvml.segfault("nvmlDeviceGetTotalEnergyConsumption")
            crashed = await until(gpus, lambda s: s.reason == "crashed")
            assert crashed.gpus == ()
            assert crashed.detail == "the reader got SIGSEGV in nvmlDeviceGetTotalEnergyConsumption"
            for _ in range(20):  # several more of them
                assert (await gpus.read()).reason == "crashed"
                await asyncio.sleep(0.05)
        nvml.say()
        await until(gpus, lambda s: s.reason == "ok")
    assert 1 <= len(caplog.records) <= 5


async def test_a_reader_that_is_killed_is_replaced(nvml: FakeNvml):
    """The kernel's memory killer does not ask either."""
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        (process,) = children()
        process.kill()
        assert (await until(gpus, lambda s: s.reason != "ok")).detail == "the reader got SIGKILL"
        await until(gpus, lambda s: s.reason == "ok")


IMPOSTOR = """
import sys
print({line!r}, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("line", ["not JSON", '{"reason": "splendid"}', "[]", '{"reason": "ok", "at": "now"}', ""])
async def test_a_line_that_is_no_snapshot(nvml: FakeNvml, tmp_path: Path, line: str):
    """Says so, and no values are made of it."""
    package = tmp_path / "tokengap" / "sources"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "nvml_reader.py").write_text(IMPOSTOR.format(line=line))
    environment = {**nvml.environment, "PYTHONPATH": str(tmp_path)}
    async with NvmlReader(patience=QUICK, kmsg="", environment=environment) as gpus:
        failed = await until(gpus, lambda s: s.reason == "failed")
    assert failed.gpus == ()
    assert "is not a snapshot" in failed.detail


async def test_many_gpus_in_one_line(nvml: FakeNvml):
    """Sixteen GPUs, a thousand processes: longer than a pipe holds."""
    cards = many(replace(nvml.gpus[0], processes=dict.fromkeys(range(1000, 1060), 1 << 30)), 16)
    nvml.set(*cards)
    async with reader(nvml) as gpus:
        full = await until(gpus, lambda s: s.reason == "ok")
    assert [len(gpu.processes) for gpu in full.gpus] == [60] * 16


PARENT = """
import asyncio
from tokengap.sources.gpu import NvmlReader

async def main():
    async with NvmlReader(interval=0.1, kmsg="") as gpus:
        while (await gpus.read()).reason != "ok":
            await asyncio.sleep(0.01)
        print("reading", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("hangs", [False, True])
async def test_no_reader_outlives_its_exporter(nvml: FakeNvml, number: signal.Signals, hangs: bool):
    """Not even kill -9 of the exporter leaves one behind, nor a call that hangs."""
    command = [sys.executable, "-c", PARENT]
    parent = await asyncio.create_subprocess_exec(
        *command, env=nvml.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert await asyncio.wait_for(parent.stdout.readline(), 30) == b"reading\n"
    (process,) = psutil.Process(parent.pid).children()
    if hangs:
        nvml.hang("nvmlDeviceGetTotalEnergyConsumption")
    parent.send_signal(number)
    await asyncio.wait_for(parent.wait(), 20)
    deadline = time.monotonic() + 20
    while alive(process):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_bug_of_ours_ends_nothing(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It is told as what it is, the reader that it happened with is ended, and the next one is read."""
    async with reader(nvml) as gpus:
        with monkeypatch.context() as broken:
            broken.setattr(gpus, "_take", lambda _: 1 / 0)
            failed = await until(gpus, lambda s: s.reason == "failed")
            assert failed.detail == "bug: ZeroDivisionError"
        await until(gpus, lambda s: s.reason == "ok" and s.readers == 1)
        assert len(children()) == 1
    assert "ZeroDivisionError" in caplog.text


async def test_a_reader_that_cannot_start_says_why(nvml: FakeNvml, tmp_path: Path):
    """Its last words, also where the one before it hung: that is no longer what is wrong."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('not for this machine')")
    async with reader(nvml) as gpus:
        await until(gpus, lambda s: s.reason == "ok")
        nvml.hang("nvmlDeviceGetTotalEnergyConsumption")
        gpus._environment = {**nvml.environment, "PYTHONPATH": str(tmp_path)}
        await until(gpus, lambda s: s.reason == "hung")
        failed = await until(gpus, lambda s: s.reason == "failed")
    assert failed.detail == "the reader ended with 1: ImportError: not for this machine"
