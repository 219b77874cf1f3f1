"""The gate in whatever order things happen: an engine and a proxy as slow and as contrary as they like.

The engine knows what it really runs. It may ignore a cancel for as long as it wants, finish while the cancel is on its
way, hang up, or die. Its page is asked for at one moment and read at a later one.
"""

from dataclasses import dataclass, field

from hypothesis import settings, stateful
from hypothesis import strategies as st

from tokengap.admit.gate import (
    BATCH,
    INTERACTIVE,
    Cancel,
    CloseUpstream,
    EngineSlots,
    Gate,
    Moved,
    Policy,
    Refuse,
    Start,
)
from tokengap.admit.states import ENDS, ZOMBIE, Event, State
from tokengap.readings import EnginePage

SLOTS = {"a": 1, "b": 2}


@dataclass
class Known:
    """One stream as the world sees it."""

    klass: str
    key: str | None
    came: float
    state: State = State.QUEUED
    engine: str = ""
    left: bool = False
    abandoned: bool = False
    cancelled: bool = False
    asked_to_close: bool = False
    closed: bool = False


@dataclass
class World:
    """What each engine really runs, and what its counters say."""

    runs: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in SLOTS})
    work: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SLOTS, 0.0))
    up: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(SLOTS, True))

    def page(self, engine):
        return EnginePage(running=float(len(self.runs[engine])), waiting=0.0, generation_tokens=self.work[engine])


class AnyOrder(stateful.RuleBasedStateMachine):
    """Rules are what may happen; invariants and :meth:`done` are what must hold."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.world = World()
        self.gate = Gate(
            Policy(rules={"interactive": INTERACTIVE, "batch": BATCH}, drain_limit=5.0),
            [EngineSlots(name, slots) for name, slots in SLOTS.items()],
        )
        self.streams = {}
        self.asked = []
        self.started = {"interactive": 0, "batch": 0}
        self.refused = 0
        self.closed = False

    # --- the proxy ---------------------------------------------------------------------------------------------------

    def done(self, effects, *, switching=False):
        """Do what the gate says, and hold it to what it may say."""
        for effect in effects:
            stream = self.streams[effect.stream]
            match effect:
                case Start():
                    assert stream.engine == ""
                    assert self.world.up[effect.engine]
                    assert len(self.world.runs[effect.engine]) < SLOTS[effect.engine], "admitted before it was drained"
                    assert effect.stream > self.started[stream.klass], "not first in, first out"
                    self.started[stream.klass] = effect.stream
                    stream.engine = effect.engine
                    self.world.runs[effect.engine].add(effect.stream)
                case Refuse():
                    assert stream.engine == "", "refused in mid-stream"
                    assert not switching, "dropped by a switch"
                    assert effect.retry_after >= 1
                    assert not (stream.klass == "batch" and effect.decision == "rejected_age")
                    self.refused += 1
                case Cancel():
                    assert stream.left
                    assert not stream.cancelled
                    assert not self.gate.counts_useful(effect.stream), "a token could still count as useful"
                    stream.cancelled = True
                case CloseUpstream():
                    assert stream.cancelled, "closed before the cancel"
                    assert not stream.asked_to_close
                    stream.asked_to_close = True
                case Moved():
                    assert effect.before is stream.state
                    stream.state = effect.after

    def tell(self, stream, event):
        self.done(self.gate.happened(stream, event, self.now))

    def pick(self, data, wanted):
        """One of the streams that are as wanted."""
        some = [number for number, stream in self.streams.items() if wanted(number, stream)]
        return data.draw(st.sampled_from(some)) if some else None

    # --- what may happen ---------------------------------------------------------------------------------------------

    @stateful.rule(klass=st.sampled_from(["interactive", "batch"]), key=st.sampled_from([None, "k", "l"]))
    def a_request_comes(self, klass, key):
        left_behind = (one.key for one in self.streams.values() if one.state in ZOMBIE and one.abandoned)
        zombie = key and key in left_behind
        number = len(self.streams) + 1
        self.streams[number] = Known(klass, key, self.now)
        told, effects = self.gate.arrive(self.now, klass, key=key)
        assert told == number
        self.done(effects)
        if zombie or self.closed:
            assert self.streams[number].state is State.REFUSED, "a retry was let in"

    @stateful.rule(data=st.data(), event=st.sampled_from([Event.CLIENT_LEFT, Event.GAVE_UP]))
    def somebody_leaves(self, data, event):
        if number := self.pick(data, lambda _, one: not one.left and one.state not in ENDS):
            self.streams[number].left = True
            self.streams[number].abandoned = event is Event.CLIENT_LEFT
            self.tell(number, event)
            assert not self.gate.counts_useful(number)

    @stateful.rule(data=st.data())
    def an_answer_begins(self, data):
        if number := self.pick(data, lambda number, one: number in self.world.runs.get(one.engine, ())):
            self.gate.answered(number, self.now)

    @stateful.rule(data=st.data())
    def an_answer_is_whole(self, data):
        if number := self.pick(
            data, lambda number, one: number in self.world.runs.get(one.engine, ()) and not one.closed
        ):
            self.world.runs[self.streams[number].engine].discard(number)
            self.streams[number].closed = True
            self.tell(number, Event.FINISHED)

    @stateful.rule(data=st.data())
    def the_cancel_was_sent(self, data):
        if number := self.pick(data, lambda _, one: one.cancelled):
            self.tell(number, Event.CANCEL_SENT)

    @stateful.rule(data=st.data())
    def upstream_closes(self, data):
        """Because it was asked to, or the engine hung up; it may work on all the same."""
        if number := self.pick(data, lambda _, one: one.engine and not one.closed):
            self.streams[number].closed = True
            self.tell(number, Event.UPSTREAM_CLOSED)

    @stateful.rule(data=st.data())
    def the_engine_drops_one_whose_connection_is_closed(self, data):
        if number := self.pick(data, lambda number, one: one.closed and number in self.world.runs.get(one.engine, ())):
            self.world.runs[self.streams[number].engine].discard(number)

    @stateful.rule(engine=st.sampled_from(sorted(SLOTS)))
    def a_page_is_asked_for(self, engine):
        if self.world.up[engine]:
            self.asked.append((engine, self.now, self.world.page(engine)))

    @stateful.rule()
    def the_page_is_read(self):
        if self.asked:
            engine, asked_at, page = self.asked.pop(0)
            if self.world.up[engine]:
                self.done(self.gate.read(engine, page, asked_at, self.now))

    @stateful.rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 2.5, 7.0]))
    def time_passes(self, seconds):
        until = self.now + seconds
        while (due := self.gate.wake_at()) is not None and due <= until:
            self.advance(max(due, self.now))
            self.done(self.gate.tick(self.now))
            assert self.gate.wake_at() != due, "nothing was done about what was due"
        self.advance(until)
        self.done(self.gate.tick(self.now))

    def advance(self, until):
        for engine, runs in self.world.runs.items():
            self.world.work[engine] += len(runs) * (until - self.now)
        self.now = until

    @stateful.rule(mode=st.sampled_from(["age", "busy"]))
    def the_mode_is_switched(self, mode):
        self.done(self.gate.tick(self.now))
        self.done(self.gate.set_mode(mode, self.now), switching=True)

    @stateful.rule(engine=st.sampled_from(sorted(SLOTS)))
    def an_engine_dies(self, engine):
        """Its connections close with it."""
        self.world.up[engine] = False
        self.asked = [asked for asked in self.asked if asked[0] != engine]
        self.done(self.gate.engine_is(engine, False, self.now))
        for number in sorted(self.world.runs[engine]):
            self.world.runs[engine].discard(number)
            if not self.streams[number].closed:
                self.streams[number].closed = True
                self.tell(number, Event.UPSTREAM_CLOSED)

    @stateful.rule(engine=st.sampled_from(sorted(SLOTS)))
    def an_engine_is_back(self, engine):
        self.world.up[engine] = True
        self.done(self.gate.engine_is(engine, True, self.now))

    # --- what must hold ----------------------------------------------------------------------------------------------

    @stateful.invariant()
    def nobody_waits_past_the_cut_or_beside_a_free_slot(self):
        view = self.gate.view(self.now)
        assert view.classes[0].queue_age < 6.0
        free = sum(engine.states["free"] for engine in view.engines if engine.up)
        assert not free or not any(one.waiting for one in view.classes)

    @stateful.invariant()
    def everybody_is_in_one_place(self):
        view = self.gate.view(self.now)
        states = [one.state for one in self.streams.values()]
        assert sum(one.waiting for one in view.classes) == states.count(State.QUEUED)
        for engine in view.engines:
            assert sum(engine.states.values()) == engine.slots
        held = sum(sum(engine.states.values()) - engine.states["free"] for engine in view.engines)
        assert held == sum(state not in ENDS and state is not State.QUEUED for state in states)
        waited_out = sum(view.decisions.values()) + states.count(State.QUEUED) + states.count(State.DROPPED)
        assert waited_out == len(self.streams)

    def teardown(self):
        """Once engines drop what was cancelled and pages are read, every slot is free: no order of events loses one."""
        for engine in SLOTS:
            self.an_engine_is_back(engine)
        for _ in range(len(self.streams) + 1):
            for number, stream in self.streams.items():
                if number in self.world.runs.get(stream.engine, ()):
                    self.world.runs[stream.engine].discard(number)
                    stream.closed = True
                    self.tell(number, Event.FINISHED)
                if stream.cancelled:
                    self.tell(number, Event.CANCEL_SENT)
                self.tell(number, Event.UPSTREAM_CLOSED)
            self.advance(self.now + 2.0)
            for engine in SLOTS:
                self.done(self.gate.read(engine, self.world.page(engine), self.now, self.now))
        assert all(stream.state in ENDS for stream in self.streams.values())


AnyOrder.TestCase.settings = settings(stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
