"""What people reported, told again over time: sockets and pages through the whole join, beat by beat.

Numbers are those of the reports, which the names give (bare ones are vLLM issues). Where a report gives none, the
kernel's side is simulated: users behind a proxy, whose sockets stay open or close as the report says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from join.world import Person, World
from tokengap.errors import SourceUnusable
from tokengap.join import start, step
from tokengap.readings import EnginePage, Reading
from tokengap.sources.engine import parse_page
from tokengap.view import CLIENTS, EngineView, View

RECORDED = Path(__file__).parent.parent / "recorded"
REST = EnginePage(
    running=0.0,
    waiting=0.0,
    generation_tokens=10_000.0,
    prompt_tokens=40_000.0,
    steps=5_000.0,
    step_tokens=50_000.0,
    preemptions=0.0,
    finished=100.0,
    finished_tokens=9_000.0,
    kv_usage=0.0,
    asleep=False,
    start_time=1_700_000_000.0,
    models=("m",),
    ranks=1,
    family="vllm",
)

#: What the engine's page says so many seconds into the story: a page, or a reason why there is none.
Tale = Callable[[float], EnginePage | str]


@dataclass(frozen=True)
class Seen:
    """One beat of a story."""

    at: float
    view: View

    @property
    def engine(self) -> EngineView:
        return self.view.engines[0]


def told(tale: Tale, seconds: float, people: list[Person] | None = None, every: float = 1.0, **world) -> list[Seen]:
    """Tell a story, and return what the join knew after each beat. Without ``people`` no socket is open."""
    return list(_told(tale, seconds, World(people or [], slots=200, **world), every))


def _told(tale: Tale, seconds: float, world: World, every: float) -> Iterator[Seen]:
    state, due = start(world.topology), world.now
    while (elapsed := due - world.start) <= seconds:
        while world.now < due:
            world.tick()
        readings = world.readings()
        page = tale(elapsed)
        at = world.start + elapsed  # the world's clock adds up hundredths, and is off by as little
        reading: Reading[EnginePage] = (
            Reading(at, error=page, refused=page == "connection refused")
            if isinstance(page, str)
            else Reading(at, value=page)
        )
        state, view = step(state, replace(readings, at=at, engines={"worker": reading}))
        yield Seen(elapsed, view)
        due += every


def waiting_for_ever(count: int, asks: float = 0.5) -> list[Person]:
    """Return users whose answers never come; told with ``rate=0`` their streams stay open and silent."""
    return [Person(asks, 1_000_000) for _ in range(count)]


def states(story: list[Seen]) -> list[tuple[str, float]]:
    """Return each verdict and the second from which on it stood."""
    changes: list[tuple[str, float]] = []
    for seen in story:
        if not changes or changes[-1][0] != seen.engine.state:
            changes.append((seen.engine.state, seen.at))
    return changes


def test_55634_five_streams_closed_by_their_clients():
    """Running 5 to 0, 3,010 prompt tokens and nothing finished: idle, five cancelled by the proxy's own count."""

    def tale(at: float) -> EnginePage:
        if at < 1:
            return REST
        if at < 4:
            return replace(REST, running=5.0, generation_tokens=10_000 + 250 * (at - 0.5), kv_usage=0.1)
        return replace(REST, generation_tokens=10_875.0, prompt_tokens=43_010.0)

    story = told(tale, 20, [Person(0.5, 1000, leaves=3.0) for _ in range(5)])
    assert states(story) == [("idle", 0), ("busy", 1), ("idle", 4)]
    assert dict(story[-1].view.endings) == {("worker", "edge", "cancelled"): 5}
    assert story[-1].engine.open_streams == 0


class Test22545StaleGaugesAfterAMassAbort:
    """Running 106, waiting 15, KV 0.904, every counter flat (also 29928)."""

    page = replace(REST, running=106.0, waiting=15.0, kv_usage=0.904)

    @pytest.mark.parametrize("every", [1.0, 10.0])
    def test_no_socket(self, every):
        """Idle from one window on, however often it is read; nobody has waited, and it rests on the sockets."""
        story = told(lambda _: self.page, 60, every=every)
        assert states(story)[-1] == ("idle", 10)
        assert "stale gauges" in story[-1].engine.evidence
        assert (story[-1].engine.utilization, story[-1].engine.queue_age) == (0, 0)
        assert (story[-1].engine.running, story[-1].engine.waiting) == (106, 15)  # what the engine says is shown
        assert "stuck" not in dict(states(story))

    def test_the_abort_seen(self):
        """The 121 sockets close while we watch, the gauges stay: busy, then idle, never stuck. From then on nobody
        waits, no slot is taken, and the 121 count as cancelled."""
        people = [Person(0.5, 1_000_000, leaves=4.5) for _ in range(121)]
        story = told(lambda at: self.page if at >= 1 else REST, 60, people, rate=0)
        assert [state for state, _ in states(story)] == ["idle", "busy", "idle"]
        assert states(story)[-1][1] <= 5 + 10
        assert (story[-1].engine.utilization, story[-1].engine.queue_age) == (0, 0)
        assert dict(story[-1].view.endings) == {("worker", "edge", "cancelled"): 121}

    def test_the_same_with_open_sockets(self):
        """The users are still there: stuck."""
        story = told(lambda at: self.page if at >= 1 else REST, 140, waiting_for_ever(121), rate=0)
        assert states(story)[-1][0] == "stuck"
        assert story[-1].engine.open_streams == 121


class Test42897FrozenInACudaWait:
    """Running 4, four sockets, counters flat for 120 s."""

    def tale(self, at: float) -> EnginePage:
        working = min(at, 10.0)
        page = replace(REST, running=4.0 if at >= 1 else 0.0, kv_usage=0.4, prompt_tokens=41_600.0 if at >= 2 else 4e4)
        return replace(page, generation_tokens=10_000 + 200 * working, step_tokens=50_000 + 200 * working)

    def test_two_windows_after_the_last_token(self):
        """Busy while it works, stuck from 20 s after its last token until the end."""
        story = told(self.tale, 130, waiting_for_ever(4), rate=0)
        assert states(story)[-2:] == [("busy", 1), ("stuck", 30)]
        assert story[-1].engine.evidence == "running 4, nothing moved for 120.0 s, 4 open sockets"
        assert story[-1].engine.progress_age == pytest.approx(120)

    def test_the_streams_grow_older_and_cost_nothing(self):
        """Their age goes on, and no token is orphaned."""
        story = told(self.tale, 130, waiting_for_ever(4), rate=0)
        assert story[-1].view.groups[0].age_max == pytest.approx(129.5, abs=1.5)
        assert sum(story[-1].engine.tokens.orphaned.values()) == 0

    def test_a_pause_of_less_is_none(self):
        """Frozen for 15 s and going on, three times: busy throughout."""

        def tale(at: float) -> EnginePage:
            return self.tale(1 + 3 * (at // 18) + min(at % 18, 3.0) / 3 if at >= 1 else 0)

        assert dict(states(told(tale, 60, waiting_for_ever(4), rate=0))).keys() <= {"idle", "busy"}


def test_39863_waiting_and_never_scheduled():
    """Running 0, waiting 3, KV 0: stuck two windows after they came."""
    story = told(lambda at: replace(REST, waiting=3.0 if at >= 1 else 0.0), 60, waiting_for_ever(3), rate=0)
    assert states(story) == [("idle", 0), ("busy", 1), ("stuck", 21)]
    assert story[-1].engine.evidence == "running 0, waiting 3, nothing moved for 59.0 s, 3 open sockets"


class TestFastllmProxy19EightyFiveMinutesOfADeadBackend:
    """Running 2 and 0 tokens/s from 07:37 to 09:01, then refused, then up with a new start time."""

    stuck_until, back_at = 85 * 60.0, 87 * 60.0

    def tale(self, at: float) -> EnginePage | str:
        if at < self.stuck_until:
            return replace(REST, running=2.0, kv_usage=0.1)
        if at < self.back_at:
            return "connection refused"
        grown = 30.0 * max(0.0, at - self.back_at - 15)
        return EnginePage(
            running=1.0 if grown else 0.0,
            waiting=0.0,
            generation_tokens=grown,
            prompt_tokens=100.0 if grown else 0.0,
            start_time=REST.start_time + self.back_at,
        )

    def test_stuck_dead_restarted(self):
        """Each verdict within its two windows, one restart, and not one token made up across it."""
        people = [Person(0.0, 1_000_000, leaves=self.stuck_until) for _ in range(2)]
        story = told(self.tale, self.back_at + 60, people, rate=0, every=5.0)
        found = states(story)
        assert [state for state, _ in found] == ["busy", "stuck", "dead", "restarted", "idle", "busy"]
        times = dict(found[1:4])
        assert times["stuck"] <= 20
        assert (times["dead"], times["restarted"]) == (self.stuck_until, self.back_at)
        assert story[-1].engine.restarts == 1
        assert story[-1].engine.tokens.out == 30 * 45


class TestLlmScaler391SlowButAlive:
    """Running 1, waiting 14, 54 tokens in 10 s, KV 0.765 to 0.768."""

    def tale(self, at: float) -> EnginePage:
        kv = 0.765 + 0.001 * (at // 10)
        return replace(REST, running=1.0, waiting=14.0, generation_tokens=10_000 + 5.4 * at, kv_usage=kv)

    @pytest.mark.parametrize("every", [1.0, 10.0])
    def test_busy(self, every):
        """Busy in every beat, at a page a second and at one in ten."""
        story = told(self.tale, 300, waiting_for_ever(15), rate=0, every=every)
        assert {seen.engine.state for seen in story} == {"busy"}

    def test_a_token_now_and_then(self):
        """Slower still, one in 19 s: busy."""
        story = told(lambda at: replace(self.tale(0), generation_tokens=10_000 + at // 19), 300, waiting_for_ever(15))
        assert {seen.engine.state for seen in story} == {"busy"}

    def test_nobody_listens(self):
        """The proxy's client left: still busy, and all 54 tokens of each 10 s are orphaned."""
        person = Person(0.0, 1_000_000, leaves=5.0)
        world = World([person], slots=1, rate=5.4, leaks="edge", prefill=0.0)
        story = list(_told(lambda _: replace(REST, running=1.0, generation_tokens=world.generated), 65, world, 1.0))
        assert {seen.engine.state for seen in story} == {"busy"}
        ten = sum(story[60].engine.tokens.orphaned.values()) - sum(story[50].engine.tokens.orphaned.values())
        assert ten == pytest.approx(54, abs=3)


class Test51261ChunkedPrefillOfALongPrompt:
    """A prompt of 100,000 tokens in chunks of 2,048: counters stand still for 49 steps, only KV usage moves."""

    def test_one_chunk_a_second(self):
        """Busy until its first token and after it."""

        def tale(at: float) -> EnginePage:
            if at < 1:
                return REST
            if at < 50:
                return replace(REST, running=1.0, kv_usage=0.01 * at)
            tokens = 30 * (at - 49)
            page = replace(REST, running=1.0, kv_usage=0.5, prompt_tokens=140_000.0, steps=5_000 + tokens)
            return replace(page, generation_tokens=10_000 + tokens)

        story = told(tale, 80, waiting_for_ever(1), rate=0)
        assert states(story) == [("idle", 0), ("busy", 1)]

    def test_one_chunk_in_fifteen_seconds(self):
        """A slow machine: KV usage moves every 15 s, for twelve minutes. Busy."""
        story = told(
            lambda at: replace(REST, running=1.0, kv_usage=0.01 * (at // 15)), 735, waiting_for_ever(1), rate=0
        )
        assert states(story) == [("busy", 0)]

    def test_nothing_shows_it(self):
        """No KV usage on the page: busy until the prefill budget is spent, stuck from there."""
        story = told(
            lambda at: replace(REST, running=1.0 if at >= 1 else 0.0, kv_usage=None), 150, waiting_for_ever(1), rate=0
        )
        assert states(story) == [("idle", 0), ("busy", 1), ("stuck", 121)]

    @pytest.mark.parametrize("sockets", [0, 1])
    def test_as_vllm_0_32_0_showed_it(self, sockets):
        """The recorded pages, each until the next: busy."""
        pages = {
            at: parse_page((RECORDED / "vllm-0.32.0" / f"long-prefill-{at:02}s.prom").read_bytes())
            for at in (1, 5, 10, 15, 20, 25)
        }
        story = told(
            lambda at: pages[max(second for second in pages if second <= at + 1)],
            24,
            waiting_for_ever(sockets, asks=0.0),
            rate=0,
        )
        assert states(story) == [("busy", 0)]


@pytest.mark.parametrize("every", [1.0, 10.0, 30.0])
def test_vllm_0_6_6_documentation_v0_idle_ticks(every):
    """The step count rises by one each 10 s with a flat sum and no start time: idle, never busy, never restarted."""
    first = parse_page((RECORDED / "vllm-written" / "vllm-0.6.6-v0-idle-00s.prom").read_bytes())
    last = parse_page((RECORDED / "vllm-written" / "vllm-0.6.6-v0-idle-60s.prom").read_bytes())
    assert (first.steps, last.steps, last.step_tokens, last.start_time) == (3, 9, 0, None)
    story = told(lambda at: replace(first, steps=3.0 + at // 10), 600, every=every)
    assert states(story) == [("idle", 0)]
    assert story[-1].engine.restarts == 0


@pytest.mark.parametrize("flowing", [True, False], ids=["streams flow", "no stream"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'python_info{version="3.12"} 1.0\nprocess_start_time_seconds 1.7e9\n',
        (RECORDED / "vllm-0.32.0" / "nostats.prom").read_bytes(),
    ],
    ids=["empty", "process only", "statistics off"],
)
def test_8612_and_7188_a_page_without_the_engine(body, flowing):
    """Blind from the first such page to the last, whatever was known before; never idle, never dead."""
    with pytest.raises(SourceUnusable) as error:
        parse_page(body)
    people = [Person(0.5, 10_000)] if flowing else []
    story = told(lambda at: REST if at < 3 else str(error.value), 60, people)
    assert states(story)[-1] == ("blind", 3)
    assert ("streams still carry bytes" in story[-1].engine.evidence) == flowing


def test_49983_a_page_that_fails_now_and_then():
    """HTTP 500 every other beat while the engine works: blind and busy in turn, never dead, never stuck, no restart."""
    story = told(
        lambda at: "HTTP 500" if at % 2 else replace(REST, running=1.0, generation_tokens=10_000 + at), 60, every=1.0
    )
    assert {seen.engine.state for seen in story} == {"busy", "blind"}
    assert story[-1].engine.restarts == 0


def test_litellm_30244_the_proxy_keeps_its_upstream():
    """The client left at once, the engine generates 50 tokens a second for 60 s: busy, 3,000 orphaned, one orphan of
    60 s; it ends as `length`, and is counted as orphaned."""
    person = Person(0.0, 3_050, leaves=1.0)
    world = World([person], slots=1, rate=50.0, leaks="edge", prefill=0.0)

    def tale(_: float) -> EnginePage:
        running = float(person.active)
        return replace(REST, running=running, generation_tokens=world.generated, finished=100.0 + world.finished)

    story = list(_told(tale, 70, world, 1.0))
    assert {seen.engine.state for seen in story[:61]} == {"busy"}
    sixty = story[60]
    assert sum(sixty.engine.tokens.orphaned.values()) == pytest.approx(2_950, abs=50)
    (orphan,) = sixty.view.streams
    assert CLIENTS[orphan["client"]] == "gone"
    assert orphan["age"] == pytest.approx(60, abs=1)
    assert dict(story[-1].view.endings) == {("worker", "edge", "orphaned"): 1}
    assert story[-1].engine.state == "idle"
