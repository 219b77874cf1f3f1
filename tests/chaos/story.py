"""Runs that never happened, for what is pure: clients who were answered, and what the exporter said of them."""

from __future__ import annotations

from dataclasses import replace

from tokengap.chaos.clients import Ask, Attempt, End
from tokengap.chaos.evidence import Evidence, Span
from tokengap.chaos.looks import EngineLook, Look

#: Seconds from the question to the first token, and between two tokens, where all is well.
FIRST, NEXT, TOKENS = 1.0, 0.05, 20

BASELINE, FAULT, RECOVERY = Span(0, 10), Span(10, 20), Span(20, 30)

IDLE = EngineLook("idle", 0.0, 0.0, 0.0, 0.0, 0.0)


def attempt(
    sent: float,
    *,
    first: float = FIRST,
    tokens: int = TOKENS,
    end: End = "completed",
    after: float = 0.0,
    answers: int = 1,
) -> Attempt:
    """One request: its first token ``first`` seconds after it was sent, its end ``after`` seconds after the last."""
    arrivals = tuple(sent + first + NEXT * number for number in range(tokens))
    last = arrivals[-1] if arrivals else sent
    return Attempt("user", sent, last + after, end, arrivals, 200, answers=answers)


def ask(*attempts: Attempt, max_tokens: int = TOKENS) -> Ask:
    return Ask("user", max_tokens, list(attempts))


def look(
    at: float, useful: float = 0.0, *, a: EngineLook = IDLE, b: EngineLook = IDLE, gone: float = 0.0, **more: float
) -> Look:
    out = more.get("out", useful)
    parts = {name: more.get(name, 0.0) for name in ("orphaned", "pending", "unattributed")}
    return Look(at, int(at), {"a": a, "b": b}, out, useful, **parts, clients={"gone": gone}, gpus_up={}, throttled={})


def run(*asks: Ask, every: float = 0.25) -> Evidence:
    """A run in which somebody asked every so many seconds and was answered, and in which also ``asks`` happened."""
    usual = [ask(attempt(number * every)) for number in range(int(28.5 / every))]
    every_ask = [*usual, *asks]
    received = sum(each.tokens for one in every_ask for each in one.attempts)
    looks = [look(at, received * at / 31) for at in range(32)]
    return Evidence(every_ask, looks, BASELINE, FAULT, RECOVERY, {"a": 0, "b": 0})


def saying(evidence: Evidence, *looks: Look) -> Evidence:
    """The same run, of which the exporter said something else."""
    return replace(evidence, looks=looks)
