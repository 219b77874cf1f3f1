"""Clients as they are in earnest: each asks, reads its stream, and asks again when it was told of an error.

An :class:`Ask` is what somebody wanted once; its :class:`Attempt` values are the requests that it took. What each
received, and when, is the truth that a run is judged by.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from tokengap.lab.users import Leaving, User, Visit

#: How an attempt ended. ``refused``: an HTTP error, or no connection. ``told``: an error inside the stream. ``broken``:
#: the answer broke off in a way that HTTP shows. ``impatient``: the client gave up waiting. ``left``: it wanted to go.
#: ``truncated``: an end without `[DONE]` or a finish reason that looks like any other: the one that nobody notices.
End = Literal["completed", "refused", "told", "broken", "impatient", "left", "truncated"]

#: Ends after which a client asks again: it knows that it did not get what it wanted.
RETRIED: frozenset[End] = frozenset({"refused", "told", "broken", "impatient"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request. Times are ``time.monotonic()``; ``arrivals`` are those of its tokens. ``detail`` says why it failed.
    ``answers``: how many answers its events claim to be of; more than one is an answer that was begun again."""

    id: str
    sent: float
    ended: float
    end: End
    arrivals: tuple[float, ...] = ()
    status: int | None = None
    detail: str = ""
    answers: int = 1

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return len(self.arrivals)


@dataclass(slots=True)
class Ask:
    """What somebody wanted once: an answer of so many tokens. ``attempts`` is empty until the first has ended."""

    id: str
    max_tokens: int
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def asked(self) -> float:
        """When it was asked for first."""
        return self.attempts[0].sent

    @property
    def first_token(self) -> float | None:
        """When the first token came, of whichever attempt."""
        return next((attempt.arrivals[0] for attempt in self.attempts if attempt.arrivals), None)

    @property
    def answered(self) -> bool:
        """Whether somebody who wanted to stay got the whole answer, or left as they wanted."""
        return self.attempts[-1].end in ("completed", "left")


@dataclass(frozen=True, slots=True)
class Retries:
    """How clients ask again: ``most`` attempts in all, after a pause that begins with ``pause`` seconds and becomes
    ``growth`` times as long each time.

    With ``jitter`` a pause is anything up to that. ``patience``: seconds for which a first token is waited for; None:
    as long as the gateway lets them.
    """

    most: int = 4
    pause: float = 0.2
    growth: float = 2.0
    jitter: bool = True
    patience: float | None = None

    def pauses(self, chance: random.Random) -> Iterator[float]:
        """Yield the pause before each further attempt."""
        for number in range(self.most - 1):
            longest = self.pause * self.growth**number
            yield chance.uniform(0, longest) if self.jitter else longest


@dataclass(frozen=True, slots=True)
class Load:
    """``users`` ask again and again, each with a prompt of ``prompt_tokens`` and for ``least`` to ``most`` tokens, with
    up to ``think`` seconds between two questions."""

    users: int = 16
    prompt_tokens: int = 800
    least: int = 20
    most: int = 40
    think: float = 0.2


class Crowd:
    """The clients of a run, at the port of a gateway. ``cut`` cuts a port off from the network, for who vanishes."""

    def __init__(
        self,
        port: int,
        load: Load,
        retries: Retries,
        seed: int,
        cut: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.asks: list[Ask] = []
        self.here: dict[str, Visit] = {}
        self.retries = retries
        self._port = port
        self._load = load
        self._seed = seed
        self._cut = cut
        self._closed = asyncio.Event()
        self._strangers = itertools.count()

    @property
    def received(self) -> int:
        """Tokens received so far, by all of them."""
        ended = sum(attempt.tokens for ask in self.asks for attempt in ask.attempts)
        return ended + sum(visit.tokens for visit in self.here.values())

    def close(self) -> None:
        """Nobody asks anything new from now on; who has asked stays."""
        self._closed.set()

    async def come(self) -> None:
        """Let the users ask again and again until closed."""
        async with asyncio.TaskGroup() as users:
            for number in range(self._load.users):
                users.create_task(self._user(number))

    async def visit(self, count: int, leaving: Leaving, leave_at: float, leavers: int, max_tokens: int) -> None:
        """Let ``count`` others come at once, ``leavers`` of whom leave in a way of theirs and do not come back."""

        async def stranger(number: int) -> None:
            name = f"visitor-{next(self._strangers)}"
            user = User(
                name,
                self._load.prompt_tokens,
                max_tokens,
                leave_at=leave_at if number < leavers else None,
                leaving=leaving,
            )
            ask = self._new(name, max_tokens)
            ask.attempts.append(await self._attempt(user, None))

        async with asyncio.TaskGroup() as visits:
            for number in range(count):
                visits.create_task(stranger(number))

    def _new(self, name: str, max_tokens: int) -> Ask:
        ask = Ask(name, max_tokens)
        self.asks.append(ask)
        return ask

    async def _user(self, number: int) -> None:
        # Two, so that the questions are the same however often some had to be asked again.
        chance = random.Random(f"{self._seed} {number}")  # noqa: S311 - traffic, nothing secret
        pauses = random.Random(f"{self._seed} {number} again")  # noqa: S311 - the same
        load = self._load
        await asyncio.sleep(chance.uniform(0, 1))
        for question in itertools.count():
            if self._closed.is_set():
                return
            ask = self._new(f"user-{number}-{question}", chance.randint(load.least, load.most))
            await self._ask(ask, pauses)
            await asyncio.sleep(chance.uniform(0, load.think))

    async def _ask(self, ask: Ask, chance: random.Random) -> None:
        pauses = self.retries.pauses(chance)
        while True:
            # What is asked again is the same to the last byte: a gateway may know it.
            user = User(ask.id, self._load.prompt_tokens, ask.max_tokens)
            attempt = await self._attempt(user, self.retries.patience)
            ask.attempts.append(replace(attempt, id=f"{ask.id}.{len(ask.attempts)}"))
            pause = next(pauses, None)
            if ask.attempts[-1].end not in RETRIED or pause is None:
                return
            await asyncio.sleep(pause)

    async def _attempt(self, user: User, patience: float | None) -> Attempt:
        visit = Visit(user, self._port, cut=self._cut)
        began = time.monotonic()
        self.here[user.id] = visit
        visiting = asyncio.create_task(visit.run())
        try:
            done, _ = await asyncio.wait([visiting], timeout=patience)
            if not done and visit.first_token is not None:
                done, _ = await asyncio.wait([visiting])
        finally:
            visiting.cancel()
            await asyncio.gather(visiting, return_exceptions=True)
            del self.here[user.id]
        return read_attempt(visit, began, time.monotonic())


def read_attempt(visit: Visit, began: float, ended: float) -> Attempt:
    """Return what became of a visit that is over. One that was interrupted had no more patience."""
    outcome, answer = visit.outcome, visit.answer
    end: End
    if outcome is None:
        end = "impatient"
    elif outcome.how == "left":
        end = "left"
    elif outcome.how == "completed":
        end = "completed" if answer.finish_reason else "truncated"
    elif answer.truncated:
        end = "truncated"
    elif answer.status is None or answer.status >= 400:
        end = "refused"
    else:
        end = "told" if answer.said_error else "broken"
    return Attempt(
        id=visit.user.id,
        sent=began if visit.sent is None else visit.sent,
        ended=ended,
        end=end,
        arrivals=tuple(visit.arrivals),
        status=answer.status,
        detail="" if outcome is None else outcome.detail,
        answers=max(1, len(answer.ids)),
    )
