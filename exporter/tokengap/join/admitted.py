"""The ledger where a gateway counts: exact, in place of the estimate from sockets. Pure.

A ``tokengap admit`` knows of each stream what it wrote and what its client acknowledged. What it cannot know is what
became of a stream further out (its client may be a proxy that reads on for nobody): that stays the sockets' word. Nor
what an engine generates that never comes to it. Of the engine's own count this leaves tokens *missing* at the gateway:

* they are on their way, or an answer that is not streamed: pending;
* they are missing still when the engine is at rest, or for all of :data:`WINDOW`, and streams were cancelled since: the
  engine generated them for streams that were cancelled, orphaned at the hop ``engine``;
* the same, and nothing was cancelled: they are of traffic that does not come through the gateway, unattributed.

As in :mod:`~tokengap.join.ledger`, ``out = useful + orphaned + pending + unattributed``, and no total ever falls: each
part grows towards what was counted, all together by no more than is pending.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tokengap.readings import EnginePage, GatewayEngine, GatewayPage
from tokengap.topology import ENGINE_HOP
from tokengap.view import DECISIONS, ENDINGS, AdmissionView, AdmitMode, Client, Decision, Ending, StreamGroup, Tokens

#: Seconds for which tokens may be on their way. An answer that is not streamed takes minutes.
WINDOW = 600.0

#: Beats at rest until what is missing is taken for lost: an engine's page may be a beat behind.
AT_REST = 2

#: How streams end that an engine was told to drop.
_CUT: tuple[Ending, ...] = ("cancelled", "failed")

Orphaned: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counted:
    """One engine's tokens by the gateway, between beats.

    ``shown`` is what is published, ``base`` what was when the gateway was first read, and ``outer`` what the sockets
    said then of the hops before it. ``started`` and ``last`` are its process and its counts when last read, ``useful``,
    ``orphaned`` and ``ended`` how these grew since the first read, ``ended`` on top of what the sockets said until
    then. ``lost`` and ``strange`` are tokens that never came to it, by whether streams were cancelled.

    ``missing`` is the least that was missing since ``since`` (monotonic), of a window in which ``cut`` tells whether
    streams were cancelled; ``rested`` counts beats at rest.
    """

    shown: Tokens
    base: Tokens
    outer: Orphaned
    started: float
    last: GatewayEngine
    useful: float = 0.0
    orphaned: float = 0.0
    lost: float = 0.0
    strange: float = 0.0
    ended: Mapping[Ending, int] = field(default_factory=dict)
    missing: float = math.inf
    since: float = 0.0
    cut: bool = False
    rested: int = 0

    def endings(self, hop: str) -> dict[tuple[str, Ending], int]:
        """Return how streams ended, at the hop that the gateway is."""
        return {(hop, how): ended for how, ended in self.ended.items()}


def begin(
    tokens: Tokens,
    outer: Orphaned,
    ended: Mapping[Ending, int],
    page: GatewayPage,
    engine: GatewayEngine,
    at: float,
) -> Counted:
    """Return what is known at the first read: what was estimated until now stays."""
    return Counted(tokens, tokens, outer, page.started, engine, ended=ended, since=at)


def owe(counted: Counted, out: float) -> Counted:
    """Take the engine's own count in: what it generated is pending until the gateway tells of it."""
    grown = max(out - counted.shown.out, 0.0)
    shown = replace(counted.shown, out=counted.shown.out + grown, pending=counted.shown.pending + grown)
    return replace(counted, shown=shown)


def count(
    counted: Counted, gateway: GatewayPage, name: str, engine: EnginePage | None, outer: Orphaned, hop: str, at: float
) -> Counted:
    """Take a read of the gateway in.

    ``engine`` is the engine's page in this beat, ``outer`` what the sockets say is orphaned at hops before the gateway,
    ``hop`` the one that the gateway is.
    """
    now = gateway.engines[name]
    # A process that started anew counts from 0: what the one before counted last and was not read is not known.
    last = counted.last if gateway.started == counted.started else GatewayEngine(0, 0, 0, {}, {}, 0.0, True)
    grown: dict[Ending, int] = {how: max(now.ended.get(how, 0) - last.ended.get(how, 0), 0) for how in ENDINGS}
    idle = engine is not None and not engine.requests and now.slots.get("free") == sum(now.slots.values())
    counted = replace(
        counted,
        started=gateway.started,
        last=now,
        useful=counted.useful + max(now.useful - last.useful, 0.0),
        orphaned=counted.orphaned + max(now.orphaned - last.orphaned, 0.0),
        ended={how: counted.ended.get(how, 0) + grown[how] for how in ENDINGS},
        cut=counted.cut or any(grown[how] for how in _CUT),
        rested=counted.rested + 1 if idle else 0,
    )
    return _settle(_grow(counted, outer, hop), outer, hop, at)


def _settle(counted: Counted, outer: Orphaned, hop: str, at: float) -> Counted:
    """Say of what is missing for too long whose it was."""
    now = max(counted.shown.pending - counted.last.pending, 0.0)
    missing = now if counted.rested >= AT_REST else min(counted.missing, now)
    if counted.rested < AT_REST and at - counted.since < WINDOW:
        return replace(counted, missing=missing)
    if counted.cut:
        counted = replace(counted, lost=counted.lost + missing)
    else:
        counted = replace(counted, strange=counted.strange + missing)
    return replace(_grow(counted, outer, hop), missing=math.inf, since=at, cut=False)


def _grow(counted: Counted, outer: Orphaned, hop: str) -> Counted:
    """Bring what is shown towards what was counted, as far as there are tokens for it."""
    base, shown = counted.base, counted.shown
    left = shown.pending

    def toward(target: float, now: float) -> float:
        nonlocal left
        step = min(max(target - now, 0.0), left)
        left -= step
        return now + step

    further_out = {name: outer[name] - counted.outer.get(name, 0.0) for name in outer}
    targets = {name: base.orphaned.get(name, 0.0) + tokens for name, tokens in further_out.items()}
    targets[hop] = base.orphaned.get(hop, 0.0) + counted.orphaned
    targets[ENGINE_HOP] = base.orphaned.get(ENGINE_HOP, 0.0) + counted.lost
    orphaned = dict(shown.orphaned)
    for name, target in targets.items():
        orphaned[name] = toward(target, orphaned.get(name, 0.0))
    useful = toward(base.useful + counted.useful - sum(further_out.values()), shown.useful)
    unattributed = toward(base.unattributed + counted.strange, shown.unattributed)
    tokens = replace(shown, useful=useful, orphaned=orphaned, unattributed=unattributed, pending=left)
    return replace(counted, shown=tokens)


def groups(page: GatewayPage, hop: str) -> Iterator[StreamGroup]:
    """Yield the streams in flight at the gateway, which is that ``hop``."""
    for one in page.streams:
        client: Client = one.client  # type: ignore[assignment]  # the source has looked
        yield StreamGroup(one.engine, hop, client, one.count, one.ages, one.age_sum, one.age_max)


def admission(page: GatewayPage) -> AdmissionView:
    """Return what the gateway says of its admission, to be shown as it is."""
    mode: AdmitMode = "busy" if page.mode == "busy" else "age"
    decisions: dict[tuple[str, Decision], int] = {
        (name, decision): one.decisions[decision]
        for name, one in page.classes.items()
        for decision in DECISIONS
        if decision in one.decisions
    }
    return AdmissionView(
        mode=mode,
        closed=page.closed,
        decisions=decisions,
        moves={(before, event, after): times for before, event, after, times in page.moves},
        waiting={name: one.waiting for name, one in page.classes.items()},
        queue_ages={name: one.queue_age for name, one in page.classes.items()},
        expected_starts={
            name: one.expected_start for name, one in page.classes.items() if one.expected_start is not None
        },
        slots={(name, state): slots for name, one in page.engines.items() for state, slots in one.slots.items()},
        held_for={name: one.held_for for name, one in page.engines.items()},
        engines_up={name: one.up for name, one in page.engines.items()},
    )
