"""May a free slot be given away? Three conditions under which it may not, whatever utilization says. Pure.

``no_cancel``    clients left, and their streams ran on: a slot does not come back when its client goes
``not_tied``     tokens are generated for nobody: generation is not tied to the client's connection
``slack_short``  less is left of the deadline than a stream lasts on average: a slot that is lost comes back too late

Each is told from what happened to live traffic lately, and is not known while nothing did: nobody left, nothing was
generated, no stream is in flight. `tokengap doctor cancel` tries the first two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokengap.view import Condition

#: Seconds that are looked back at, and between two remembered counts.
WINDOW, EVERY = 600.0, 10.0

#: Share of those who left whose streams ran on, above which cancels do not work. Where they do it is 0.
RAN_ON = 0.1

#: Share of the tokens for nobody that is no accident. What is on its way to clients as they leave is less.
FOR_NOBODY = 0.01


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of one engine at an instant: streams whose client left, those of them that ran on, tokens out and those
    for nobody."""

    at: float
    left: float
    ran_on: float
    out: float
    orphaned: float


@dataclass(frozen=True, slots=True)
class Lately:
    """The counts of the last :data:`WINDOW`, oldest first. ``held``: in the beat before a stream was held for a client
    who had left."""

    counts: tuple[Counts, ...] = ()
    held: bool = False


def observe(
    lately: Lately, now: Counts, *, held: bool, slack: float | None, mean_age: float | None
) -> tuple[Lately, Mapping[Condition, bool]]:
    """Take one beat in. Returns also the conditions that are known, and whether they hold.

    ``slack`` is what is left of the deadline, ``mean_age`` that of the streams in flight, in seconds; None: not known.
    """
    since = next(iter(lately.counts), now)
    conditions: dict[Condition, bool] = {}
    left = now.left - since.left
    if lately.held and held:  # for longer than a cancel takes
        conditions["no_cancel"] = True
    elif left > 0:
        conditions["no_cancel"] = now.ran_on - since.ran_on > RAN_ON * left
    out = now.out - since.out
    if out > 0:
        conditions["not_tied"] = now.orphaned - since.orphaned > FOR_NOBODY * out
    if slack is not None and mean_age is not None:
        conditions["slack_short"] = slack < mean_age
    return Lately(_remember(lately.counts, now), held), conditions


def _remember(counts: tuple[Counts, ...], now: Counts) -> tuple[Counts, ...]:
    if counts and now.at - counts[-1].at < EVERY:
        return counts
    return (*(one for one in counts if now.at - one.at < WINDOW), now)
