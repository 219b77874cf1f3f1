"""The loop with sources of the tests' own: each fails alone, none delays the page, missed beats are marked."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokengap.join
from tokengap.beat import Asker, Beat, Sources, deadline
from tokengap.errors import SourceRefused, SourceUnusable
from tokengap.gpu_readings import GpuSnapshot
from tokengap.readings import SOCKET, EnginePage, ProcessTable, ProxySnapshot, Readings, SocketSnapshot
from tokengap.topology import Endpoint, Engine, Topology

TOPOLOGY = Topology(
    engines=(
        Engine("a", "http://127.0.0.1:1", (Endpoint(None, 1),)),
        Engine("b", "http://127.0.0.1:2", (Endpoint(None, 2),)),
    ),
    interval=0.2,
)


@dataclass
class Source:
    """Answers with ``answer``; raises it when it is an error; waits for it when it is an event."""

    answer: object
    asked: list[tuple] = field(default_factory=list)
    takes_its_time: bool = False

    async def read(self, *question):
        self.asked.append((time.monotonic(), *question))
        if isinstance(self.answer, asyncio.Event):
            await self.answer.wait()
            raise SourceUnusable("too late")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class Late:
    """Answers when told to: the first time with ``answer``, after that with ``then``."""

    answer: object
    then: object
    come: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0
    takes_its_time: bool = False

    async def read(self, *_question):
        self.asked += 1
        answer = self.answer if self.asked == 1 else self.then
        await self.come.wait()
        return answer


class Notebook:
    """A join that keeps the readings and asks about inode 7."""

    def __init__(self) -> None:
        self.readings: list[Readings] = []

    def start(self, _topology):
        return ()

    def step(self, state, readings):
        self.readings.append(readings)
        return state, SimpleNamespace(beat=len(self.readings))

    def questions(self, _state):
        return frozenset({7})


class Views(list):
    """What was published; ``reach`` waits until there are so many."""

    def __init__(self):
        super().__init__()
        self._more = asyncio.Condition()

    async def publish(self, view):
        async with self._more:
            self.append(view)
            self._more.notify_all()

    async def reach(self, count):
        async with self._more:
            await asyncio.wait_for(self._more.wait_for(lambda: len(self) >= count), 10)


def snapshot() -> SocketSnapshot:
    return SocketSnapshot(np.zeros(0, dtype=SOCKET))


def beat(*, sockets=None, a=None, b=None, processes=None, gpu=None, proxies=None, join=None):
    join = join or Notebook()
    views = Views()

    sources = Sources(
        sockets=sockets or Source(snapshot()),
        engines={"a": a or Source(EnginePage(running=1.0)), "b": b or Source(EnginePage(running=2.0))},
        processes=processes or Source(ProcessTable()),
        gpu=gpu,
        proxies=proxies or {},
    )
    return Beat(TOPOLOGY, sources, join, views.publish), join, views


async def test_proxies_that_are_asked_fail_alone():
    """One tells, one is down, one hangs: the beat has the answer of the first and the reasons of the others."""
    told = ProxySnapshot("haproxy", streams=3)
    proxies = {
        "edge": Source(told),
        "admit": Source(SourceRefused("connection refused")),
        "far": Source(asyncio.Event()),
    }
    heart, join, _ = beat(proxies=proxies)
    await heart.once()
    (readings,) = join.readings
    assert readings.proxies["edge"].value == told
    assert (readings.proxies["admit"].error, readings.proxies["admit"].refused) == ("connection refused", True)
    assert readings.proxies["far"].error == "no answer within 0.2 s"
    assert readings.engines["a"].value == EnginePage(running=1.0)
    proxies["far"].answer.set()


async def test_one_beat_reads_everything_and_publishes_the_view():
    """Sockets, every engine's page and the process table are in the readings, with the join's questions asked."""
    processes = Source(ProcessTable(owners={7: "edge"}))
    heart, join, views = beat(processes=processes)
    await heart.once()
    readings = join.readings[0]
    assert readings.sockets.value is not None
    assert {name: page.value.running for name, page in readings.engines.items()} == {"a": 1.0, "b": 2.0}
    assert readings.processes.value.owners == {7: "edge"}
    assert processes.asked[0][1:] == (TOPOLOGY, frozenset({7}))
    assert len(views) == 1


async def test_gpus_are_read_where_they_are_asked_for():
    """Their snapshot is in the readings; with no such source there is no reading, not one that failed."""
    told = GpuSnapshot("library_not_found")
    heart, join, _ = beat(gpu=Source(told))
    await heart.once()
    assert join.readings[0].gpu.value is told
    heart, join, _ = beat()
    await heart.once()
    assert join.readings[0].gpu is None


async def test_the_sockets_are_read_before_the_pages():
    """A token that is counted has, if anything, bytes that were not seen yet: the dump comes first."""
    sockets, a = Source(snapshot()), Source(EnginePage())
    heart, _, _ = beat(sockets=sockets, a=a)
    await heart.once()
    assert sockets.asked[0][0] < a.asked[0][0]


async def test_a_source_that_fails_does_so_alone():
    """Its reading carries the reason; refused is told from failing; the others are read as ever."""
    heart, join, views = beat(a=Source(SourceRefused("connection refused")), b=Source(SourceUnusable("HTTP 503")))
    await heart.once()
    a, b = join.readings[0].engines["a"], join.readings[0].engines["b"]
    assert (a.value, a.error, a.refused) == (None, "connection refused", True)
    assert (b.value, b.error, b.refused) == (None, "HTTP 503", False)
    assert join.readings[0].sockets.value is not None
    assert len(views) == 1


async def test_a_source_that_hangs_is_given_up_for_the_beat_and_not_asked_twice():
    """The page goes on within the interval, the reading says why there is no value, and no second question is out."""
    hangs = Source(asyncio.Event())
    heart, join, views = beat(a=hangs)
    began = time.monotonic()
    await heart.once()
    await heart.once()
    assert time.monotonic() - began < 3 * TOPOLOGY.interval
    assert join.readings[0].engines["a"].error == "no answer within 0.2 s"
    assert join.readings[1].engines["a"].error == "still no answer to an earlier read"
    assert len(hangs.asked) == 1
    assert [readings.engines["b"].value.running for readings in join.readings] == [2.0, 2.0]
    hangs.answer.set()
    await asyncio.sleep(0)
    await heart.once()
    assert len(hangs.asked) == 2
    assert len(views) == 3


async def test_a_snapshot_that_comes_late_is_not_lost():
    """It holds sockets that ended, and nothing tells of them again: the next beat takes it, then asks anew."""
    late = SocketSnapshot(np.zeros(0, dtype=SOCKET), np.zeros(3, dtype=SOCKET), events=True)
    sockets = Late(late, then=snapshot())
    heart, join, _ = beat(sockets=sockets)
    await heart.once()
    sockets.come.set()
    await asyncio.sleep(0)
    began = time.monotonic()
    await heart.once()
    await heart.once()
    first, second, third = (readings.sockets for readings in join.readings)
    assert first.error == "no answer within 0.2 s"
    assert second.value is late
    assert second.at < began
    assert third.value is not late
    assert sockets.asked == 2


async def test_a_page_that_comes_late_is_thrown_away():
    """It was taken before this beat's sockets: it would show fewer tokens than there are bytes."""
    page = Late(EnginePage(running=1.0), then=EnginePage(running=3.0))
    heart, join, _ = beat(a=page)
    await heart.once()
    page.come.set()
    await asyncio.sleep(0)
    await heart.once()
    assert join.readings[1].engines["a"].value.running == 3.0


async def test_a_late_page_of_an_engine_that_takes_its_time_is_the_next_beats():
    """One whose page comes between two steps would never be read otherwise; and it is never asked twice at once."""
    page = Late(EnginePage(running=1.0), then=EnginePage(running=3.0), takes_its_time=True)
    heart, join, _ = beat(a=page)
    await heart.once()
    await heart.once()
    assert page.asked == 1
    page.come.set()
    await asyncio.sleep(0)
    await heart.once()
    await heart.once()
    readings = [each.engines["a"] for each in join.readings]
    assert [reading.late for reading in readings] == [True, True, False, False]
    assert [reading.value.running for reading in readings[2:]] == [1.0, 3.0]


async def test_a_long_walk_through_the_processes_leaves_what_is_known():
    """On a large host it takes many beats; slots that were read from a command line do not come and go with it."""
    processes = Late(ProcessTable(slots={"a": 8}), then=ProcessTable(slots={"a": 16}))
    processes.come.set()
    heart, join, _ = beat(processes=processes)
    await heart.once()
    processes.come.clear()
    await heart.once()
    await heart.once()
    processes.come.set()
    await asyncio.sleep(0)
    await heart.once()
    assert [readings.processes.value.slots["a"] for readings in join.readings] == [8, 8, 8, 16]


async def test_a_bug_in_a_source_is_a_failed_reading_and_logged_once(caplog):
    """An error that no source should raise ends neither the beat nor the process, and fills no log."""
    heart, join, views = beat(a=Source(ZeroDivisionError("oops")))
    with caplog.at_level(logging.ERROR):
        await heart.once()
        await heart.once()
    assert join.readings[0].engines["a"].error == "bug: ZeroDivisionError: oops"
    assert len([r for r in caplog.records if r.exc_info]) == 1
    assert len(views) == 2


async def test_beats_keep_their_grid_and_a_late_one_says_so():
    """Beats come on a grid; after the process was held up for three beats, one beat comes at once, marked late."""
    heart, join, views = beat()
    task = asyncio.create_task(heart.run())
    await views.reach(3)
    time.sleep(0.7)  # noqa: ASYNC251 - the point of the test: the whole loop is held up
    await views.reach(6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    late = [readings.late for readings in join.readings]
    assert not any(late[:3])
    assert any(late[3:5])
    assert not late[5]
    gaps = np.diff([readings.at for readings in join.readings[:3]])
    assert gaps == pytest.approx([0.2, 0.2], abs=0.1)


async def test_the_beat_after_one_that_took_too_long_is_late():
    """Reading took more than a beat: the beats that were missed are not made up for, and the next one says so."""
    heart, join, views = beat(sockets=Source(asyncio.Event()), a=Source(asyncio.Event()))  # 2 deadlines, 1.6 beats
    task = asyncio.create_task(heart.run())
    await views.reach(4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [readings.late for readings in join.readings[:4]] == [False, True, False, False]
    began = join.readings[0].at - 1.6 * TOPOLOGY.interval
    at = [(readings.at - began) / TOPOLOGY.interval for readings in join.readings[1:4]]
    assert at == pytest.approx([2, 3, 4], abs=0.4)


@given(
    st.lists(st.sampled_from(["answers", "fails", "has a bug", "is late"]), min_size=1, max_size=8),
)
@settings(max_examples=25, deadline=None)
def test_whatever_a_source_does_each_beat_has_exactly_one_answer_or_reason(turns):
    """And no source is ever asked while it still owes an answer."""

    async def beats() -> None:
        out = 0
        waiting: list[asyncio.Event] = []

        async def question(turn: str) -> str:
            nonlocal out
            out += 1
            assert out == 1
            try:
                if turn == "fails":
                    raise SourceUnusable("no")
                if turn == "has a bug":
                    raise KeyError("x")
                if turn == "is late":
                    waiting.append(asyncio.Event())
                    await waiting[-1].wait()
                return turn
            finally:
                out -= 1

        asker: Asker[str] = Asker("source", keep_late=True)
        for turn in turns:
            reading = await asker.ask(partial(question, turn), 0.001)
            assert (reading.value is None) != (reading.error is None)
            for event in waiting:
                event.set()
            await asyncio.sleep(0)
        asker.cancel()

    asyncio.run(beats())


async def test_it_ends_when_cancelled_with_a_source_hanging():
    """A cancelled beat leaves no task behind."""
    heart, _, _ = beat(sockets=Source(asyncio.Event()))
    task = asyncio.create_task(heart.run())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("interval", "seconds"), [(0.05, 0.04), (1.0, 0.8), (60.0, 10.0)])
def test_a_source_may_take_most_of_a_beat_and_never_more_than_ten_seconds(interval, seconds):
    """The rest of the interval is for the join and the page."""
    assert deadline(interval) == pytest.approx(seconds)


async def test_the_real_join_fits_the_loop():
    """The module ``tokengap.join`` is what the beat expects of a join."""
    heart, _, views = beat(join=tokengap.join)
    await heart.once()
    assert [engine.running for engine in views[0].engines] == [1.0, 2.0]
