"""Clients who ask again: what a seed makes the same, and how long they pause."""

from __future__ import annotations

import asyncio
import random

import pytest

from lab.serving import engine, until
from tokengap.chaos.clients import Crowd, Load, Retries
from tokengap.lab.parts import free_port

#: Answers that are over in a moment.
LOAD = Load(users=4, prompt_tokens=10, least=1, most=9, think=0.02)


async def questions(port: int, seed: int, count: int = 5) -> set[tuple[str, int]]:
    """Return the first questions of each user: which, and for how many tokens."""
    crowd = Crowd(port, LOAD, Retries(most=2, pause=0.01), seed)
    first = {f"user-{user}-{number}" for user in range(LOAD.users) for number in range(count)}
    coming = asyncio.create_task(crowd.come())

    async def asked() -> bool:
        return first <= {ask.id for ask in crowd.asks}

    await until(asked)
    crowd.close()
    await coming
    return {(ask.id, ask.max_tokens) for ask in crowd.asks if ask.id in first}


@pytest.mark.e2e
async def test_the_same_seed_asks_the_same():
    """However the answers went: an engine that answers, and nobody there. Another seed asks something else."""
    async with engine(rate=2000.0) as port:
        answered, other = await asyncio.gather(questions(port, 7), questions(port, 8))
    assert answered == await questions(free_port(), 7)
    assert answered != other


@pytest.mark.parametrize(
    ("retries", "least", "most"),
    [
        (Retries(most=4, pause=0.2, growth=2.0, jitter=False), [0.2, 0.4, 0.8], [0.2, 0.4, 0.8]),
        (Retries(most=4, pause=0.2, growth=2.0), [0.0, 0.0, 0.0], [0.2, 0.4, 0.8]),
        (Retries(most=1), [], []),
    ],
)
def test_pauses_grow(retries: Retries, least: list[float], most: list[float]):
    """One less than there are attempts; with jitter each is anything up to it."""
    for seed in range(50):
        pauses = list(retries.pauses(random.Random(seed)))
        assert len(pauses) == len(least)
        assert all(low <= pause <= high for low, pause, high in zip(least, pauses, most, strict=True))
