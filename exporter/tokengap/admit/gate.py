"""Who is admitted, to which engine, and when: the decisions of ``tokengap admit``. Pure: no clock, no I/O, no async.

How the proxy uses it
---------------------

Every method takes ``now`` (monotonic seconds) and returns :data:`Effects`, in the order in which they are to be done:

* :class:`Start`: send this stream to that engine, now.
* :class:`Refuse`: answer ``status`` with ``Retry-After``; the stream is over.
* :class:`Cancel`: send the engine its cancel, if it has one; then say ``CANCEL_SENT``, also where that failed.
* :class:`CloseUpstream`: close the connection to the engine; say ``UPSTREAM_CLOSED`` when it is closed.
* :class:`Moved`: nothing to do; one line for the structured log and the counter of transitions.

::

    stream, effects = gate.arrive(now, "interactive", key=...)     a request came
    gate.happened(stream, Event.CLIENT_LEFT, now)                  and the other events of states.py, as they come
    gate.answered(stream, now)                                     the engine's first bytes, headers included
    gate.read(engine, page, asked_at, now)                         an engine's page; asked_at: before it was asked for
    gate.engine_is(engine, up, now)                                False: it refuses connections, so nothing runs there
    gate.set_mode("busy", now); gate.set_rules({...}, now)         at run time; no stream is dropped
    gate.close(now)                                                refuse whoever comes from now on (SIGTERM)
    gate.tick(now), due at gate.wake_at()                          what becomes due by the passing of time
    gate.engines_to_read()                                         whose pages are wanted now, about four times a second
    gate.counts_useful(stream)                                     whether tokens acknowledged now are useful
    gate.view(now)                                                 everything for /metrics

An event that comes late or twice, or of a stream that is over, changes nothing. So the proxy need not know what state a
stream is in, and says what it sees.

What decides
------------

Mode ``age``: a request is refused when its age at its expected start (``forecast.py``) is past the cut of its class; it
waits otherwise, first come first served within its class. Who waits is refused at the cut, and before it once the start
is expected past the deadline itself: the two seconds between cut and deadline keep a noisy estimate from refusing whom
it has just accepted. Between classes whoever must start earliest goes first; a class without a cut yields to those that
have one. Mode ``busy``: no free slot, no queue. Whoever waited already when it was switched on waits on.

A slot is taken from ``Start`` until the engine shows that the stream is gone. An engine that has a page shows it there:
no more requests than there are streams of ours with a client, and what else it usually has (``usual``: traffic that
does not come through here). One without is believed when its connection is closed. If it does not show it within
``drain_limit`` the slot is *held*: an engine that ignores cancels, the leak. With ``when_held="hold"`` nobody is
admitted to a held slot; with ``"admit"`` the next one is, and waits in the engine behind what is still running there.

A retry is told by its ``key``, whatever the proxy takes for the same request of the same client: while a stream of that
key still holds a slot without a client, the request is refused (``rejected_retry``), so that a retry never doubles the
cost of what it left behind. A request without a key is only kept from the slot itself.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from tokengap.admit.forecast import Durations, Forecast, Occupied, forecast
from tokengap.admit.states import CONNECTED, DRAINABLE, ENDS, HOLDS_SLOT, ZOMBIE, Action, Event, State, move
from tokengap.readings import EnginePage

Mode: TypeAlias = Literal["age", "busy"]
WhenHeld: TypeAlias = Literal["hold", "admit"]
Decision: TypeAlias = Literal["admitted", "rejected_age", "rejected_busy", "rejected_retry", "rejected_closed"]
DECISIONS: Final[tuple[Decision, ...]] = (
    "admitted",
    "rejected_age",
    "rejected_busy",
    "rejected_retry",
    "rejected_closed",
)

#: An engine has registered a request when its answer has begun, or after so many seconds.
REGISTERED_AFTER: Final = 1.0
#: An engine that shows requests, but has not moved for so long while no stream of ours is there, shows stale gauges
#: (vLLM issues 22545, 29928: they stay high after aborts until the next request).
STILL_AFTER: Final = 3.0
#: Seconds for which an engine that failed a request is the last choice. Its page brings it back no sooner: vLLM's can
#: still be read when its core is gone.
AVOIDED_FOR: Final = 10.0
#: Reads of a page, without a stream of ours that is leaving, whose least number of other requests is the usual one.
USUAL_OF: Final = 5
#: Ends of streams remembered: more than end while a page is read.
MAX_ENDED: Final = 1000
#: A forecast is used again for so long: it ages with what it is about.
FORECAST_FOR: Final = 0.1
#: Refused requests whose return is reckoned with at most.
MAX_PROMISES: Final = 1000


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for a class of streams, in seconds from the arrival. None: no limit.

    ``cut``: it has to start by then. ``deadline``: its first token is useful until then; what lies between is for
    draining a slot and for the prompt.
    """

    cut: float | None = None
    deadline: float | None = None

    @property
    def latest_start(self) -> float:
        """The cut; infinite where there is none."""
        return math.inf if self.cut is None else self.cut

    @property
    def patience(self) -> float:
        """The age past which an expected start is of no use to one that waits already."""
        return self.latest_start if self.deadline is None else self.deadline


INTERACTIVE: Final = Rule(cut=6.0, deadline=8.0)
BATCH: Final = Rule()


@dataclass(frozen=True, slots=True)
class EngineSlots:
    """One engine: how many streams it is given at once, and whether its page shows when one is gone."""

    name: str
    slots: int
    has_page: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """What is set once. ``retry_after_max``: the longest ``Retry-After``, and the answer where nothing can be told."""

    mode: Mode = "age"
    rules: Mapping[str, Rule] = field(default_factory=lambda: {"interactive": INTERACTIVE, "batch": BATCH})
    balance: Literal["least", "robin"] = "least"
    queue_limit: int = 1000
    drain_limit: float = 10.0
    when_held: WhenHeld = "hold"
    retry_after_max: float = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    """Send ``stream`` to ``engine``. ``waited``: its age, in seconds."""

    stream: int
    engine: str
    waited: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer ``status``, with ``Retry-After: retry_after`` (whole seconds); ``why`` in words."""

    stream: int
    decision: Decision
    retry_after: int
    why: str

    @property
    def status(self) -> int:
        """429, or 503 where nobody is admitted at all."""
        return 503 if self.decision == "rejected_closed" else 429


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell ``engine`` to cancel ``stream``."""

    stream: int
    engine: str


@dataclass(frozen=True, slots=True)
class CloseUpstream:
    """Close the connection of ``stream`` to ``engine``."""

    stream: int
    engine: str


@dataclass(frozen=True, slots=True)
class Moved:
    """``stream`` went from one state to another. ``age``: seconds since it arrived."""

    stream: int
    engine: str
    klass: str
    before: State
    event: Event
    after: State
    age: float


Effect: TypeAlias = Start | Refuse | Cancel | CloseUpstream | Moved
Effects: TypeAlias = list[Effect]


@dataclass(slots=True)
class _Stream:
    id: int
    klass: str
    key: Hashable | None
    since: float
    state: State = State.QUEUED
    engine: str = ""
    started_at: float = 0.0
    answered_at: float | None = None
    client_left: bool = False
    left_at: float | None = None
    closed_at: float | None = None

    def registered(self, asked_at: float) -> bool:
        """Tell whether a page asked for then must have shown it, and it is a client's."""
        seen = self.started_at + REGISTERED_AFTER if self.answered_at is None else self.answered_at
        return self.state is State.STREAMING and seen <= asked_at

    def closed_before(self, asked_at: float) -> bool:
        """Tell whether a page asked for then may show that it is gone."""
        return self.closed_at is not None and self.closed_at <= asked_at

    def drained_by(self, policy: Policy) -> float:
        """Return when it is late, having left."""
        return (self.left_at or 0.0) + policy.drain_limit


@dataclass(slots=True)
class _Engine:
    """``streams``: those that hold a slot. ``ended``: when the last of them were released. ``others``: requests it had
    that are not ours, in the last reads. ``moved_at``: since when its page shows the same work ``done``. ``failed_at``:
    when it last failed a request."""

    of: EngineSlots
    up: bool = True
    failed_at: float = -math.inf
    streams: dict[int, _Stream] = field(default_factory=dict)
    ended: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))
    others: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_OF))
    done: tuple[float | None, ...] = ()
    moved_at: float = 0.0

    @property
    def usual(self) -> float:
        """Return how many requests it has that do not come through here."""
        return min(self.others) if len(self.others) == USUAL_OF else 0.0

    def unsure(self, asked_at: float) -> int:
        """Return how many streams of ours a page asked for then may show or not: they came or ended around it."""
        came = sum(not one.registered(asked_at) for one in self.streams.values())
        return came + sum(ended >= asked_at for ended in self.ended)

    def streaming(self, klass: str) -> Iterator[_Stream]:
        """Yield the streams of a class that have a client."""
        return (one for one in self.streams.values() if one.state is State.STREAMING and one.klass == klass)

    def note_work(self, page: EnginePage, now: float) -> None:
        """Remember when it last moved."""
        if page.done != self.done:
            self.done, self.moved_at = page.done, now

    def is_still(self, page: EnginePage, now: float) -> bool:
        """Tell whether it shows requests that it does not work on."""
        ours = any(one.state is State.STREAMING for one in self.streams.values())
        return page.live and not ours and now - self.moved_at >= STILL_AFTER

    def now(self, now: float) -> EngineNow:
        """Return what is shown of it."""
        slots = {"free": max(0, self.of.slots - len(self.streams))}
        slots |= {str(state): 0 for state in State if state in HOLDS_SLOT}
        for one in self.streams.values():
            slots[str(one.state)] += 1
        held = [now - (one.left_at or now) for one in self.streams.values() if one.state is State.HELD]
        return EngineNow(self.of.name, self.up, self.of.slots, slots, self.usual, max(held, default=0.0))


@dataclass(frozen=True, slots=True)
class EngineNow:
    """One engine: whether it takes connections, its slots, and how many are in which state, ``free`` among them.

    ``usual``: requests it has that do not come through here. ``held_for``: how long ago the client of the oldest held
    slot left, in seconds; 0 while none is held.
    """

    name: str
    up: bool
    slots: int
    states: Mapping[str, int]
    usual: float
    held_for: float


@dataclass(frozen=True, slots=True)
class ClassNow:
    """The queue of one class: how many wait, the age of the oldest, and in how many seconds one that came now would
    start (None: not known; infinite: no slot is ever expected to be free)."""

    name: str
    waiting: int
    queue_age: float
    expected_start: float | None


@dataclass(frozen=True, slots=True)
class GateView:
    """Everything about the gate that is shown. Counts are since start."""

    mode: Mode
    closed: bool
    engines: Sequence[EngineNow]
    classes: Sequence[ClassNow]
    decisions: Mapping[tuple[str, Decision], int]
    moves: Mapping[tuple[State, Event, State], int]


class Gate:
    """The admission. See the module's docstring for how it is used."""

    def __init__(self, policy: Policy, engines: Iterable[EngineSlots]) -> None:
        self._policy = policy
        self._mode: Mode = policy.mode
        self._rules = dict(policy.rules)
        self._engines = {of.name: _Engine(of) for of in engines}
        self._streams: dict[int, _Stream] = {}
        self._queues: dict[str, dict[int, _Stream]] = {klass: {} for klass in self._rules}
        self._durations = {klass: Durations() for klass in self._rules}
        self._drains = Durations()
        self._promised: deque[float] = deque(maxlen=MAX_PROMISES)
        self._forecasts: dict[str, tuple[float, Forecast | None]] = {}
        self._last_engine = ""
        self._last_id = 0
        self._closed = False
        self._decisions: Counter[tuple[str, Decision]] = Counter()
        self._moves: Counter[tuple[State, Event, State]] = Counter()

    @property
    def mode(self) -> Mode:
        """The mode it is in."""
        return self._mode

    # --- what happens -----------------------------------------------------------------------------------------------

    def arrive(self, now: float, klass: str, *, key: Hashable | None = None) -> tuple[int, Effects]:
        """Take a request of one of the classes in, and return its number."""
        self._last_id += 1
        stream = _Stream(self._last_id, klass, key, now)
        self._streams[stream.id] = stream
        self._queues[klass][stream.id] = stream
        refusal = self._refusal(stream, now)
        effects = list(self._refuse(stream, refusal, now) if refusal else self._settle(now))
        return stream.id, effects

    def happened(self, stream: int, event: Event, now: float) -> Effects:
        """Tell what happened to a stream. :class:`Event` says which events there are."""
        known = self._streams.get(stream)
        if known is None:
            return []
        known.client_left |= event is Event.CLIENT_LEFT
        effects = list(self._move(known, event, now))
        if event is Event.UPSTREAM_CLOSED and known.state in DRAINABLE:
            known.closed_at = now
            engine = self._engines[known.engine]
            if not (engine.up and engine.of.has_page):
                effects += self._move(known, Event.DRAINED, now)
        return [*effects, *self._settle(now)]

    def answered(self, stream: int, now: float) -> None:
        """Tell that the engine has begun to answer: it has the stream on its page by now."""
        known = self._streams.get(stream)
        if known is not None and known.answered_at is None:
            known.answered_at = now

    def read(self, engine: str, page: EnginePage, asked_at: float, now: float) -> Effects:
        """Tell what an engine's page says, which was asked for at ``asked_at``."""
        mine = self._engines[engine]
        mine.note_work(page, now)
        zombies = [one for one in mine.streams.values() if one.state in ZOMBIE]
        excess = page.requests - sum(one.registered(asked_at) for one in mine.streams.values())
        if not zombies:
            mine.others.append(max(0.0, excess - mine.unsure(asked_at)))
            return []
        there = 0 if mine.is_still(page, now) else max(0, math.ceil(excess - mine.usual))
        gone = sorted((one for one in zombies if one.closed_before(asked_at)), key=lambda one: one.left_at or 0.0)
        return self._drained(gone[: max(0, len(gone) - there)], now)

    def engine_is(self, engine: str, up: bool, now: float) -> Effects:
        """Tell whether an engine takes connections. One that refuses them runs nothing any more."""
        mine = self._engines[engine]
        if mine.up == up:
            return []
        mine.up = up
        self._forecasts.clear()
        closed = (one for one in mine.streams.values() if one.closed_at is not None)
        return self._drained([] if up else list(closed), now)

    def engine_failed(self, engine: str, now: float) -> None:
        """Tell that an engine did not answer as it should. For a while others come first: who refuses everything has
        the fewest streams, and would get every next one."""
        self._engines[engine].failed_at = now

    def set_mode(self, mode: Mode, now: float) -> Effects:
        """Switch the mode. Nobody who streams or waits is dropped."""
        self._mode = mode
        return list(self._settle(now))

    def set_rules(self, rules: Mapping[str, Rule], now: float) -> Effects:
        """Set cuts and deadlines anew. Classes that are not named keep theirs; ones that are new are added."""
        for klass, rule in rules.items():
            self._rules[klass] = rule
            self._queues.setdefault(klass, {})
            self._durations.setdefault(klass, Durations())
        return list(self._settle(now))

    def close(self, now: float) -> Effects:
        """Admit nobody who comes from now on. Who streams or waits is served."""
        self._closed = True
        return list(self._settle(now))

    def tick(self, now: float) -> Effects:
        """Do what became due by the passing of time."""
        late = [one for one in self._leaving() if now >= one.drained_by(self._policy)]
        effects = [effect for one in late for effect in self._move(one, Event.DRAIN_LATE, now)]
        return [*effects, *self._settle(now)]

    # --- what is asked ----------------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        """Return when :meth:`tick` is due; None while nothing depends on time."""
        cuts = [one.since + self._rules[one.klass].latest_start for one in self._heads()]
        drains = [one.drained_by(self._policy) for one in self._leaving()]
        due = min([*cuts, *drains], default=math.inf)
        return None if math.isinf(due) else due

    def engines_to_read(self) -> list[str]:
        """Return the engines on whose page it depends whether a slot is free."""
        return [
            name
            for name, engine in self._engines.items()
            if engine.of.has_page and any(one.state in DRAINABLE for one in engine.streams.values())
        ]

    def counts_useful(self, stream: int) -> bool:
        """Tell whether tokens of a stream that are acknowledged now are useful: its client has not left."""
        known = self._streams.get(stream)
        return known is not None and known.state in CONNECTED

    def view(self, now: float) -> GateView:
        """Return what is shown."""
        return GateView(
            self._mode,
            self._closed,
            [engine.now(now) for engine in self._engines.values()],
            [self._class_now(klass, now) for klass in self._queues],
            dict(self._decisions),
            dict(self._moves),
        )

    def _class_now(self, klass: str, now: float) -> ClassNow:
        queue = self._queues[klass]
        oldest = next((now - one.since for one in queue.values()), 0.0)
        newcomer = _Stream(self._last_id + 1, klass, None, now)
        start = 0.0 if not queue and self._free_engine(now) else self._expected_start(newcomer, now)
        return ClassNow(klass, len(queue), oldest, start)

    # --- admission --------------------------------------------------------------------------------------------------

    def _refusal(self, stream: _Stream, now: float) -> tuple[Decision, str] | None:
        """Return why a stream that came just now is refused; None when it is not."""
        if self._closed or not any(engine.up for engine in self._engines.values()):
            return "rejected_closed", "shutting down" if self._closed else "no engine takes connections"
        if self._zombie_of(stream) is not None:
            return "rejected_retry", "the request before it still holds its slot"
        if self._free_engine(now) and not any(self._ahead(stream)):
            return None
        if self._mode == "busy":
            return "rejected_busy", "every slot is taken"
        if len(self._queues[stream.klass]) > self._policy.queue_limit:
            return "rejected_busy", f"{self._policy.queue_limit} wait already"
        age = now - stream.since + (self._expected_start(stream, now) or 0.0)
        if age > self._rules[stream.klass].latest_start:
            return "rejected_age", f"it would start {age:.1f} s old"
        return None

    def _settle(self, now: float) -> Iterator[Effect]:
        """Refuse whose time is up, admit while there are free slots, and refuse those who would wait in vain."""
        for head in self._heads():
            yield from self._cut(head.klass, now)
        while (stream := self._next()) and (engine := self._free_engine(now)):
            yield from self._admit(stream, engine, now)
        for klass in list(self._queues):
            yield from self._give_up_the_last(klass, now)

    def _cut(self, klass: str, now: float) -> Iterator[Effect]:
        """Refuse, from the head of the queue, who has waited up to the cut."""
        for stream in list(self._queues[klass].values()):
            waited = now - stream.since
            if waited < self._rules[klass].latest_start:
                return
            yield from self._refuse(stream, ("rejected_age", f"it waited {waited:.1f} s"), now)

    def _give_up_the_last(self, klass: str, now: float) -> Iterator[Effect]:
        """Refuse, from the end of the queue, who is expected to start when it is of no use any more."""
        patience = self._rules[klass].patience
        for stream in list(reversed(self._queues[klass].values())):
            age = now - stream.since + (self._expected_start(stream, now) or 0.0)
            if age <= patience:
                return
            yield from self._refuse(stream, ("rejected_age", f"it would start {age:.1f} s old"), now)

    def _admit(self, stream: _Stream, engine: _Engine, now: float) -> Iterator[Effect]:
        stream.engine, stream.started_at = engine.of.name, now
        self._last_engine = engine.of.name
        self._decisions[stream.klass, "admitted"] += 1
        yield from self._move(stream, Event.ADMIT, now)

    def _refuse(self, stream: _Stream, why: tuple[Decision, str], now: float) -> Iterator[Effect]:
        decision, words = why
        after = self._retry_after(stream, decision, now)
        self._decisions[stream.klass, decision] += 1
        yield from self._move(stream, Event.REFUSE, now)
        yield Refuse(stream.id, decision, after, words)

    def _retry_after(self, stream: _Stream, decision: Decision, now: float) -> int:
        """Return when it may come again, in whole seconds: when a slot is expected to be free for it.

        Those who were told the same before it are reckoned with: else they would all come back at once.
        """
        if decision == "rejected_closed":
            wait: float | None = 0.0 if self._closed else self._policy.drain_limit
        elif decision == "rejected_retry":
            wait = self._drain_left(stream, now)
        else:
            wait = self._expected_start(stream, now, promised=self._promises(now))
            wait = self._rules[stream.klass].cut if wait is None else wait
        longest = self._policy.retry_after_max
        wait = longest if wait is None else min(wait, longest)
        if decision in ("rejected_age", "rejected_busy"):
            self._promised.append(now + wait)
        return max(1, math.ceil(wait))

    def _promises(self, now: float) -> int:
        """Return how many were told to come back and are not due yet."""
        while self._promised and self._promised[0] <= now:
            self._promised.popleft()
        return len(self._promised)

    def _drain_left(self, stream: _Stream, now: float) -> float:
        """Return how long the slot that a stream left behind is expected to drain still."""
        zombie = self._zombie_of(stream)
        gone_for = 0.0 if zombie is None else now - (zombie.left_at or now)
        usual = self._drains.mean or 0.0
        return usual - gone_for if gone_for < usual else gone_for

    # --- the queue --------------------------------------------------------------------------------------------------

    def _urgency(self, stream: _Stream) -> tuple[float, float, int]:
        return stream.since + self._rules[stream.klass].latest_start, stream.since, stream.id

    def _heads(self) -> list[_Stream]:
        return [next(iter(queue.values())) for queue in self._queues.values() if queue]

    def _next(self) -> _Stream | None:
        return min(self._heads(), key=self._urgency, default=None)

    def _ahead(self, stream: _Stream) -> Iterator[_Stream]:
        """Yield who is admitted before a stream that waits."""
        mine = self._urgency(stream)
        for klass, queue in self._queues.items():
            for other in queue.values():
                if other is stream or (klass != stream.klass and self._urgency(other) > mine):
                    break
                yield other

    def _expected_start(self, stream: _Stream, now: float, promised: int = 0) -> float | None:
        """Return in how many seconds a stream is expected to start; None while nothing is measured."""
        known = self._forecast(stream.klass, now)
        return None if known is None else known.start(sum(1 for _ in self._ahead(stream)) + promised)

    def _forecast(self, klass: str, now: float) -> Forecast | None:
        made_at, known = self._forecasts.get(klass, (-math.inf, None))
        if now - made_at > FORECAST_FOR:
            known = self._forecast_now(klass, now)
            self._forecasts[klass] = now, known
        return known

    def _forecast_now(self, klass: str, now: float) -> Forecast | None:
        up = [engine for engine in self._engines.values() if engine.up]
        everything = [seconds for durations in self._durations.values() for seconds in durations.known]
        occupied = [
            Occupied(
                durations.known or everything, [now - one.started_at for engine in up for one in engine.streaming(name)]
            )
            for name, durations in self._durations.items()
        ]
        left = [now - (one.left_at or now) for engine in up for one in self._taken(engine) if one.state in ZOMBIE]
        occupied.append(Occupied(self._drains.known, left))
        cuts = [rule.cut for rule in self._rules.values() if rule.cut is not None]
        free = sum(self._free(engine) for engine in up)
        return forecast(occupied, free, self._durations[klass].known or everything, 2 * min(cuts, default=60.0))

    # --- slots ------------------------------------------------------------------------------------------------------

    def _taken(self, engine: _Engine) -> list[_Stream]:
        """Return the streams that keep others from an engine's slots."""
        every = engine.streams.values()
        return [one for one in every if one.state is not State.HELD or self._policy.when_held == "hold"]

    def _free(self, engine: _Engine) -> int:
        return max(0, engine.of.slots - len(self._taken(engine)))

    def _free_engine(self, now: float) -> _Engine | None:
        """Return the engine that gets the next stream."""
        free = {name: engine for name, engine in self._engines.items() if engine.up and self._free(engine)}
        if not free:
            return None
        free = {name: engine for name, engine in free.items() if now - engine.failed_at >= AVOIDED_FOR} or free
        if self._policy.balance == "least":
            return min(free.values(), key=lambda engine: len(engine.streams) / engine.of.slots)
        names = list(self._engines)
        after = names.index(self._last_engine) + 1 if self._last_engine else 0
        return next(free[name] for name in names[after:] + names[:after] if name in free)

    def _zombie_of(self, stream: _Stream) -> _Stream | None:
        """Return the stream whose retry this one is, while it still holds its slot.

        Its client has left it: one whom an engine failed does not ask for the same twice.
        """
        if stream.key is None:
            return None
        every = (one for engine in self._engines.values() for one in engine.streams.values() if one.client_left)
        return next((one for one in every if one.state in ZOMBIE and one.key == stream.key), None)

    def _leaving(self) -> list[_Stream]:
        """Return the zombies that are not late yet."""
        every = (one for engine in self._engines.values() for one in engine.streams.values())
        return [one for one in every if one.state in ZOMBIE and one.state is not State.HELD]

    def _drained(self, streams: Sequence[_Stream], now: float) -> Effects:
        effects = [effect for one in streams for effect in self._move(one, Event.DRAINED, now)]
        return [*effects, *self._settle(now)]

    # --- one move ---------------------------------------------------------------------------------------------------

    def _move(self, stream: _Stream, event: Event, now: float) -> Iterator[Effect]:
        before, leads = stream.state, move(stream.state, event)
        if leads.to is before:
            return
        stream.state = leads.to
        self._moves[before, event, leads.to] += 1
        self._place(stream, before, now)
        yield Moved(stream.id, stream.engine, stream.klass, before, event, leads.to, now - stream.since)
        if leads.action is Action.START:
            yield Start(stream.id, stream.engine, now - stream.since)
        elif leads.action is Action.SEND_CANCEL:
            yield Cancel(stream.id, stream.engine)
        elif leads.action is Action.CLOSE_UPSTREAM:
            yield CloseUpstream(stream.id, stream.engine)

    def _place(self, stream: _Stream, before: State, now: float) -> None:
        """Put a stream where its new state belongs: out of the queue, into a slot, out of it."""
        if before is State.QUEUED:
            del self._queues[stream.klass][stream.id]
        if before in HOLDS_SLOT or stream.state in HOLDS_SLOT:
            self._forecasts.clear()
        if stream.state in HOLDS_SLOT:
            self._engines[stream.engine].streams[stream.id] = stream
        elif before in HOLDS_SLOT:
            engine = self._engines[stream.engine]
            del engine.streams[stream.id]
            engine.ended.append(now)
            self._durations[stream.klass].add(now - stream.started_at)
            if stream.left_at is not None:
                self._drains.add(now - stream.left_at)
        if stream.state in ZOMBIE and stream.left_at is None:
            stream.left_at = now
        if stream.state in ENDS:
            del self._streams[stream.id]
