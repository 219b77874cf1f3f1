"""Watches over the wait: will the next request make its deadline?"""

from __future__ import annotations

from tokengap.bundle.promql import PER_ENGINE, by, increase, on, rate, said
from tokengap.bundle.site import Site
from tokengap.bundle.watch import (
    Choice,
    Look,
    Measure,
    Panel,
    Query,
    Runbook,
    Step,
    Threshold,
    Watch,
    label,
    legend,
    longer_than,
    shorter_than,
)
from tokengap.series.queue import DEADLINE_BREACH, DEADLINE_SLACK, QUEUE_AGE
from tokengap.series.tokens import TOKENS_ORPHANED
from tokengap.topology import INTERACTIVE

#: Seconds in breach, of those that are looked back at, that are no passing peak.
IN_BREACH = 5.0


def queue_will_miss_deadline(site: Site) -> Watch:
    """The page: what is queued now will not be answered in time."""
    cut, reserve = longer_than(site.age_cut), shorter_than(site.reserve)
    breach = Threshold(">", IN_BREACH, said(IN_BREACH))
    deadline, lookback = said(site.deadline), said(site.lookback)
    per_engine = site.per(*PER_ENGINE)
    age = by("max", per_engine, site.select(QUEUE_AGE))
    slack = by("min", per_engine, site.select(DEADLINE_SLACK, **{"class": INTERACTIVE}))
    breached = by("max", per_engine, increase(site.select(DEADLINE_BREACH), site.lookback))
    return Watch(
        name="TokengapQueueWillMissDeadline",
        severity="critical",
        # Two forms of the same: what a scrape sees now, and what a counter kept of the seconds between two scrapes.
        expr=f"(\n  {age} {cut}\n  and {on(per_engine)}\n  {slack} {reserve}\n)\nor\n{breached} {breach}",
        hold=5,
        keep=60,
        labels=PER_ENGINE,
        summary="Requests will miss their deadline.",
        description=f"The queue of {label('engine')} is older than {cut.said} with less than {reserve.said} left to "
        f"the deadline of {deadline}, or was so for more than {breach.said} of the last {lookback}.",
        panel=Panel(
            board="oncall",
            title="Queue age",
            description=f"How long the head of each engine's queue has waited. Past {cut.said} what is queued now does "
            f"not make the deadline of {deadline}.",
            unit="s",
            no_value="No engine tells its queue",
            queries=(Query(age, legend("engine")),),
            thresholds=(cut,),
        ),
        runbook=Runbook(
            first="Look whether the engine is `busy`, and whether it works for clients who have left. That decides all "
            "else.",
            right_now=(
                Look("how long the head of the queue has waited", age),
                Look("what is left of the deadline", slack),
                Look(
                    "tokens a second for clients who left",
                    by("sum", site.per("engine", "hop"), rate(site.select(TOKENS_ORPHANED), site.lookback)),
                ),
            ),
            meaning=f"The head of the queue has waited longer than {cut.said} and less than {reserve.said} of the "
            f"{deadline} are left: the engine cannot drain a slot and begin an answer in that time. Utilization is no "
            "part of it: full slots are normal, a queue that ages is not.",
            impact="People wait and give up, then ask again, which makes the queue longer. Whoever pays the engine "
            "pays for answers that come too late.",
            decide=(
                Choice(
                    "verdict `busy`, tokens orphaned above 0",
                    "slots are held for clients who left",
                    "cut the orphans at the hop that holds them: mitigation 1",
                ),
                Choice(
                    "verdict `busy`, no tokens orphaned",
                    "more is asked than the engine can do",
                    "refuse early or add an engine: mitigations 2 and 3",
                ),
                Choice("verdict `stuck`", "the engine makes no progress", "go to TokengapEngineStuck"),
                Choice(
                    "verdict `dead` or `blind`",
                    "the engine is gone, or does not tell",
                    "take it out of the proxy's rotation",
                ),
            ),
            diagnosis=(
                Step(
                    "Is it busy or stuck? One look, without a request to the model.",
                    f"tokengap health {site.engine}",
                    f"{site.engine} busy: running 4, waiting 9, generation +50 in 1.0 s",
                ),
                Step(
                    "Which streams are held, how old are they, and at which hop do they leak?",
                    f"curl -s {site.exporter}/api/streams",
                    '[{"id":3,"engine":"worker","hop":"edge","client":"gone",...,"leaks_at":"edge","age_seconds":31.2,...',
                ),
            ),
            mitigation=(
                Measure(
                    "Let the proxy close its upstream connection when a client leaves (nginx: remove "
                    "`proxy_ignore_client_abort on`; HAProxy: `option abortonclose`) and reload it.",
                    "`gone` disappears from the streams, the queue gets younger within seconds",
                ),
                Measure(
                    f"Refuse what cannot make it: answer 429 at the proxy while the queue is older than {cut.said}.",
                    "slack rises above the reserve; some are refused, the rest are in time",
                ),
                Measure("Add an engine to the proxy's rotation.", "waiting falls on every engine"),
            ),
            do_not=(
                "Do not restart an engine that is `busy`: every answer under way is lost, and all will be asked again.",
                "Do not raise the proxy's timeouts: streams of clients who left live longer then.",
            ),
            rollback="Reload the proxy with the configuration it had; take the added engine out when slack has been "
            "whole for ten minutes.",
            false_alarm="A batch job behind the same engine may queue for long and be in time: give it a class of its "
            "own (`classes`), so that its wait is not measured by the deadline of people.",
            limits="By the time you read this the request that fired it is late. The queue inside the proxy itself is "
            "`tokengap_proxy_queue_age_seconds`, not this. Where no hop is watched the age comes from the engine's "
            "counters alone (`tokengap_queue_age_source`).",
        ),
    )


WATCHES = (queue_will_miss_deadline,)
