"""The gate in the world of sockets: tells it what happens, and does what it says.

Everything that is decided is decided in :mod:`tokengap.admit.gate`, which knows no clock; here is the clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import NoReturn, TypeAlias

from tokengap.admit.gate import Cancel, CloseUpstream, Effect, Gate, Mode, Moved, Refuse, Rule, Start
from tokengap.admit.states import Event
from tokengap.errors import SourceError, SourceRefused
from tokengap.sources.engine import EngineSource

log = logging.getLogger(__name__)

#: Seconds between two reads of an engine's page, at rest and while a slot waits for what it says.
READ_EVERY, READ_SOON = 1.0, 0.25

Verdict: TypeAlias = Start | Refuse


class Seat:
    """One request's place: in the queue, then in a slot of an engine.

    ``close_upstream`` is called, at most once, when its connection to the engine is to be closed.
    """

    def __init__(self, admission: Admission, close_upstream: Callable[[], None]) -> None:
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.close_upstream = close_upstream
        self._admission = admission
        self._number = 0

    def happened(self, event: Event) -> None:
        """Tell the gate of an event of this stream."""
        self._admission.happened(self._number, event)

    def answered(self) -> None:
        """The engine has begun to answer."""
        self._admission.gate.answered(self._number, time.monotonic())


class Admission:
    """The gate, its clock and the engines' pages."""

    def __init__(self, gate: Gate, pages: Mapping[str, EngineSource]) -> None:
        self.gate = gate
        self._pages = pages
        self._seats: dict[int, Seat] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._soon = asyncio.Event()
        #: The models that an engine serves, by its page.
        self.models: dict[str, tuple[str, ...]] = {}

    def arrive(self, klass: str, key: Hashable | None, close_upstream: Callable[[], None]) -> Seat:
        """Take a request in. Its seat's ``verdict`` says when it starts and where, or why it does not."""
        seat = Seat(self, close_upstream)
        number, effects = self.gate.arrive(time.monotonic(), klass, key=key)
        seat._number = number
        self._seats[number] = seat
        self._do(effects)
        return seat

    def happened(self, stream: int, event: Event) -> None:
        """Tell the gate of an event of a stream."""
        self._do(self.gate.happened(stream, event, time.monotonic()))

    def left(self, seat: Seat) -> None:
        """Forget a seat whose request is over. What the gate still says of it needs nobody."""
        self._seats.pop(seat._number, None)

    def engine_is(self, engine: str, up: bool) -> None:
        """Tell the gate whether an engine takes connections."""
        self._do(self.gate.engine_is(engine, up, time.monotonic()))

    def engine_failed(self, engine: str) -> None:
        """Tell the gate that an engine did not answer as it should."""
        self.gate.engine_failed(engine, time.monotonic())

    def set_mode(self, mode: Mode) -> None:
        """Switch the mode."""
        self._do(self.gate.set_mode(mode, time.monotonic()))

    def set_rules(self, rules: Mapping[str, Rule]) -> None:
        """Set cuts and deadlines anew."""
        self._do(self.gate.set_rules(rules, time.monotonic()))

    def close(self) -> None:
        """Admit nobody from now on."""
        self._do(self.gate.close(time.monotonic()))

    async def read_pages(self) -> NoReturn:
        """Read the engines' pages for ever: those at once on which it depends whether a slot is free."""
        read_at = dict.fromkeys(self._pages, float("-inf"))
        while True:
            wanted = set(self.gate.engines_to_read())
            now = time.monotonic()
            due = [name for name in self._pages if name in wanted or now - read_at[name] >= READ_EVERY]
            read_at |= dict.fromkeys(due, now)
            await asyncio.gather(*(self._read(name) for name in due))
            if self.gate.engines_to_read():
                await asyncio.sleep(READ_SOON)
                continue
            self._soon.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_EVERY):
                    await self._soon.wait()

    async def _read(self, name: str) -> None:
        asked_at = time.monotonic()
        try:
            page = await self._pages[name].read()
        except SourceRefused:
            self.engine_is(name, up=False)
        except SourceError as error:
            log.debug("no page", extra={"engine": name, "why": str(error)})
        else:
            self.models[name] = page.models
            self.engine_is(name, up=True)
            self._do(self.gate.read(name, page, asked_at, time.monotonic()))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start() | Refuse():
                    verdict = self._seats[effect.stream].verdict
                    if not verdict.done():  # its request was cancelled, and says so in a moment
                        verdict.set_result(effect)
                case Cancel():
                    # Closing the connection is the only cancel that an engine of the OpenAI API has.
                    self.happened(effect.stream, Event.CANCEL_SENT)
                case CloseUpstream():
                    self._close_upstream(effect.stream)
                case Moved():
                    self._tell(effect)
        self._arm()

    def _close_upstream(self, stream: int) -> None:
        seat = self._seats.get(stream)
        if seat is None:
            self.happened(stream, Event.UPSTREAM_CLOSED)
        else:
            seat.close_upstream()

    def _tell(self, moved: Moved) -> None:
        """Log a move, at ``info`` where a stream is taken apart and at ``debug`` where all is well."""
        usual = moved.event in (Event.ADMIT, Event.FINISHED, Event.REFUSE)
        level = logging.DEBUG if usual else logging.WARNING if moved.event is Event.DRAIN_LATE else logging.INFO
        if log.isEnabledFor(level):
            log.log(
                level,
                "stream",
                extra={
                    "stream": moved.stream,
                    "engine": moved.engine,
                    "class": moved.klass,
                    "before": moved.before,
                    "event": moved.event,
                    "after": moved.after,
                    "age": round(moved.age, 3),
                },
            )

    def _arm(self) -> None:
        """Set the clock to when the gate has something to do, and read pages at once if it waits for one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.gate.wake_at()
        if due is not None:  # a loop's own clock is time.monotonic() (asyncio.BaseEventLoop.time)
            self._timer = asyncio.get_running_loop().call_at(due, self._tick)
        if self.gate.engines_to_read():
            self._soon.set()

    def _tick(self) -> None:
        self._timer = None
        self._do(self.gate.tick(time.monotonic()))
