"""Watches over budgets: at this pace, is what a month may lose gone before its end?

A budget is spent at a pace of 1 when it lasts for 30 days. Each pace is looked at over two windows (several windows,
several paces, as Google's workbook on reliability has it): the long one says that it matters, the short one that it
still goes on. Both are over all exporters of an engine, so that what two of them see counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tokengap.bundle import recording
from tokengap.bundle.promql import by, duration, increase, on, over_time, percent, rate, share
from tokengap.bundle.recording import PLACE, Record
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Threshold, Watch, label, legend
from tokengap.bundle.watches.shared import LET_GO, orphaned_tokens, query_step, streams_step
from tokengap.series.queue import DEADLINE_BREACH, DEADLINE_SLACK, QUEUE_AGE
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT

_HOUR: Final = 3600.0
_DAY: Final = 24 * _HOUR

#: The days for which a budget is.
PERIOD: Final = 30


@dataclass(frozen=True, slots=True)
class Burn:
    """A pace that is too fast, and the two windows in which it is seen, in seconds."""

    pace: float
    long: float
    short: float

    def past(self, budget: float) -> Threshold:
        """Return the share of a window above which a budget is spent at this pace."""
        return Threshold(">", round(self.pace * budget, 9), percent(self.pace * budget))

    def __str__(self) -> str:
        spent = percent(round(self.pace * self.long / (PERIOD * _DAY), 3))
        return f"{self.pace:g} times too fast over {duration(self.long)}, which takes {spent} of it"


#: From the fastest: 2, 5, 10 and 10 % of the budget in the long window.
BURNS: Final = (
    Burn(14.4, _HOUR, 300.0),
    Burn(6.0, 6 * _HOUR, 1800.0),
    Burn(3.0, _DAY, 2 * _HOUR),
    Burn(1.0, 3 * _DAY, 6 * _HOUR),
)

#: Every window that is looked at.
_WINDOWS: Final = sorted({window for burn in BURNS for window in (burn.long, burn.short)})

#: How often the shares are recorded, in seconds. They read days at a time.
EVERY: Final = 60.0

#: What tells an engine apart, whoever watches it.
ENGINE: Final = (PLACE, "engine")

#: A pace is believed when it has lasted so long; a rate over five minutes that is high once is no trend.
_HOLD: Final = 900.0

_ORPHANED: Final = "engine:tokengap_tokens_orphaned:ratio_rate"
_BREACHED: Final = "engine:tokengap_deadline_breach:ratio_rate"


def records(site: Site) -> Iterator[Record]:
    """Yield the shares that budgets are compared with, over every window.

    A window of which less than half has been seen has none: two bad minutes after the start are no bad three days.
    """
    per = site.per(*ENGINE)
    out, orphaned = (recording.name(site, "engine", metric) for metric in ("tokens_out", "tokens_orphaned"))
    breached = _name(_BREACHED, BURNS[0].short)
    yield Record(breached, by("max", per, rate(site.select(DEADLINE_BREACH), BURNS[0].short)))
    for window in _WINDOWS:
        tokens = share(over_time("sum", orphaned, window), over_time("sum", out, window), per)
        yield Record(_name(_ORPHANED, window), _half_seen(f"({tokens})", out, window, per))
        if window != BURNS[0].short:
            yield Record(
                _name(_BREACHED, window), _half_seen(over_time("avg", breached, window), breached, window, per)
            )


def _half_seen(share: str, base: str, window: float, per: tuple[str, ...]) -> str:
    return f"{share}\nand {on(per)}\n{base} offset {duration(window / 2)}"


def orphan_budget(site: Site) -> Watch:
    """More tokens are for nobody than a month may have."""
    budget, per_engine = percent(site.orphan_budget), site.per("engine")
    first = BURNS[0]
    past = first.past(site.orphan_budget)
    orphaned = by("sum", per_engine, rate(site.select(TOKENS_ORPHANED), first.long))
    part = share(orphaned, by("sum", per_engine, rate(site.select(TOKENS_OUT), first.long)), per_engine)
    return Watch(
        name="TokengapOrphanBudgetBurning",
        severity="warning",
        expr=_burning(site, _ORPHANED, site.orphan_budget),
        hold=_HOLD,
        labels=ENGINE,
        summary="The month's budget of tokens for nobody is spent too fast.",
        description=f"Too many tokens of {label('engine')} are for clients who left: at this pace the {budget} of a "
        "month do not last.",
        panel=Panel(
            board="money",
            title="Orphan share over an hour",
            description=f"Tokens for clients who had left, of all that were generated in an hour. The budget is "
            f"{budget} of {PERIOD} days; past {past.said} it is spent {first.pace:g} times too fast.",
            unit="percentunit",
            no_value="Nothing was generated",
            queries=(Query(part, legend("engine")),),
            thresholds=(past,),
        ),
        runbook=Runbook(
            first="Is it sudden or slow? Compare the shares of an hour and of three days below. Sudden: what was "
            "deployed as it began?",
            right_now=(
                Look("share of an hour", _name(_ORPHANED, first.long)),
                Look("share of three days", _name(_ORPHANED, BURNS[-1].long)),
                Look("where, in tokens a second", orphaned_tokens(site, "engine", "hop")),
            ),
            meaning=f"A budget of {budget} of the tokens of {PERIOD} days may be for nobody. It is spent "
            + "; or ".join(map(str, BURNS))
            + ". It still goes on.",
            impact="Money. When it is gone, so is the room for deployments and experiments that lose some.",
            decide=(
                Choice("one hop has nearly all", "it does not pass cancels on", "TokengapProxyIgnoresCancel"),
                Choice("hop `engine`", "the engine does not end requests", "TokengapEngineIgnoresCancel"),
                Choice("clients `vanished`", "lost connections", "TokengapClientsVanishing"),
                Choice(
                    "a little everywhere, always", "the budget is smaller than the path can keep", "agree on another"
                ),
            ),
            diagnosis=(
                query_step(
                    site,
                    "Tokens of the last day by hop.",
                    by("sum", ("hop",), increase(site.select(TOKENS_ORPHANED), _DAY)),
                    '{hop="edge"} => 3301.3 @[1764453600]\n{hop="engine"} => 0 @[1764453600]',
                ),
                streams_step(site),
            ),
            mitigation=(
                LET_GO,
                Measure("Bound the answers (`max_tokens`).", "each orphan costs less; the share of an hour falls"),
            ),
            do_not=(
                "Do not raise the budget to silence it before the hop is known.",
                "Do not add capacity: it is spent the same way.",
            ),
            rollback="Set the former configuration of the hop that was changed last, and reload it.",
            false_alarm="A drill or a load test with clients who leave. It ends with the short windows, within hours.",
            limits="A window counts from when half of it has been seen: three days need a day and a half after the "
            "start. What no exporter can attribute is not in it.",
        ),
    )


def deadline_budget(site: Site) -> Watch:
    """Deadlines are missed for more of the time than a month may have."""
    budget, per_engine = percent(site.deadline_budget), site.per("engine")
    cut, deadline = duration(site.age_cut), duration(site.deadline)
    first = BURNS[0]
    past = first.past(site.deadline_budget)
    part = by("max", per_engine, rate(site.select(DEADLINE_BREACH), first.long))
    return Watch(
        name="TokengapDeadlineBudgetBurning",
        severity="warning",
        expr=_burning(site, _BREACHED, site.deadline_budget),
        hold=_HOLD,
        labels=ENGINE,
        summary="The month's budget of missed deadlines is spent too fast.",
        description=f"The queue of {label('engine')} is too old for the deadline of {deadline} too often: at this pace "
        f"the {budget} of a month do not last.",
        panel=Panel(
            board="oncall",
            title="Time in breach over an hour",
            description=f"Share of an hour in which the queue was older than {cut} with too little slack. The budget "
            f"is {budget} of {PERIOD} days; past {past.said} it is spent {first.pace:g} times too fast.",
            unit="percentunit",
            no_value="No queue is known",
            queries=(Query(part, legend("engine")),),
            thresholds=(past,),
        ),
        runbook=Runbook(
            first="Does it go on now? If the queue is old at this moment, the page for that is "
            "TokengapQueueWillMissDeadline; this one is for the trend.",
            right_now=(
                Look("share of an hour", _name(_BREACHED, first.long)),
                Look("share of three days", _name(_BREACHED, BURNS[-1].long)),
                Look("the queue's age now", by("max", per_engine, site.select(QUEUE_AGE))),
            ),
            meaning=f"For {budget} of {PERIOD} days the queue may be older than {cut} with too little slack for a "
            f"deadline of {deadline}. It is spent " + "; or ".join(map(str, BURNS)) + ". It still goes on.",
            impact="Users: in that time nobody who came was answered in time.",
            decide=(
                Choice("orphans while it is in breach", "slots work for nobody", "TokengapOrphanHoldsSlot"),
                Choice("the same hours every day", "more is asked then", "add engines for those hours"),
                Choice("since a deployment", "the engine got slower", "TokengapLatencyDoubled"),
                Choice("after restarts", "the others took its load", "look at the restarts, not at the queue"),
            ),
            diagnosis=(
                query_step(
                    site,
                    "Seconds in breach of the last day, by engine.",
                    by("max", ("engine",), increase(site.select(DEADLINE_BREACH), _DAY)),
                    '{engine="worker"} => 1284 @[1764453600]',
                ),
                query_step(
                    site,
                    "The least slack of the last hour: how late is late?",
                    by("min", ("engine",), over_time("min", site.select(DEADLINE_SLACK), _HOUR)),
                    '{engine="worker"} => -15.9 @[1764453600]',
                ),
            ),
            mitigation=(
                Measure(f"Refuse early: 429 while the queue is older than {cut}.", "who is let in is in time"),
                Measure("Add an engine for the hours in question.", "the share of an hour falls below the budget"),
                LET_GO,
            ),
            do_not=(
                "Do not lengthen the deadline to save the budget: users do not wait longer for it.",
                "Do not restart engines that are `busy`.",
            ),
            rollback="Take engines out again when the share of a day has been within the budget for a week.",
            false_alarm="Batch work that is measured by the deadline of people: give it a class of its own.",
            limits="It counts time, not requests: a second with one late request weighs as much as one with a hundred. "
            "Who was refused, or waits in a proxy's own queue, is not in it.",
        ),
    )


WATCHES = (orphan_budget, deadline_budget)


def _burning(site: Site, ratio: str, budget: float) -> str:
    here = on(site.per(*ENGINE))
    both = (
        f"(\n{_name(ratio, burn.long)} {past}\nand {here}\n{_name(ratio, burn.short)} {past}\n)"
        for burn, past in ((burn, burn.past(budget)) for burn in BURNS)
    )
    return "\nor\n".join(both)


def _name(ratio: str, window: float) -> str:
    return f"{ratio}{duration(window)}"
