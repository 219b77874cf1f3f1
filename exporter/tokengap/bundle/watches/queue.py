"""Watches over the wait: will the next request make its deadline?"""

from __future__ import annotations

from typing import Final

from tokengap.bundle.promql import PER_ENGINE, by, duration, increase, on, over_time, percent, rate, said, share
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
from tokengap.bundle.watches.shared import ENDS_LEFT, LET_GO, RAN_ON, TREND, ended, query_step, streams_step
from tokengap.series.queue import DEADLINE_BREACH, DEADLINE_SLACK, QUEUE_AGE, SLOT_UTILIZATION
from tokengap.series.streams import STREAM_AGE, STREAMS_ENDED
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT
from tokengap.topology import INTERACTIVE

#: Seconds in breach, of those that are looked back at, that are no passing peak.
IN_BREACH = 5.0

#: Seconds that are compared with as many long ago, and with what was usual: an hour, ending an hour or a week ago. An
#: hour that ended just now would take in what is compared with it, and 1 % of it is all that a p99 needs.
RECENT: Final = 600.0
USUAL: Final = 3600.0
WEEK: Final = 7 * 86400.0

#: How much older streams are that take "twice as long".
TWICE: Final = 2

#: Streams in flight, on average, of which a 99th percentile says more than how long one of them is.
FEW: Final = 2

#: An age that is felt. Below it the buckets do not tell what doubles.
FELT: Final = longer_than(1.0)


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
        rehearsal="disconnect-storm --users 4 --slots 2 --read-timeout 1m --duration 1m",
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


def latency_doubled(site: Site) -> Watch:
    """Answers take twice as long as they did."""
    per_engine = site.per(*PER_ENGINE)
    here = on(per_engine)
    streams = by("sum", per_engine, over_time("avg", site.select(STREAM_AGE, "_gcount", client="connected"), RECENT))
    now, before, last_week = (_p99(site, *window) for window in ((RECENT, 0), (USUAL, USUAL), (USUAL, WEEK)))
    recent, usual, known = map(duration, (RECENT, USUAL, 1.5 * USUAL))
    half_of_it = by("max", per_engine, f"{site.select(STREAM_AGE, '_gcount', client='connected')} offset {known}")
    return Watch(
        name="TokengapLatencyDoubled",
        severity="warning",
        # What is older must have been known for half an hour, so that some minutes after a start are no baseline.
        expr=f"{now} {FELT}\nand {here}\n{streams} > {FEW}\nand {here}\n(\n"
        f"(\n{now} > {TWICE} * {before}\nand {here}\n{half_of_it} >= 0\n)\nor\n{now} > {TWICE} * {last_week}\n)",
        hold=120,
        keep=TREND,
        labels=PER_ENGINE,
        summary="Streams take more than twice as long as usual.",
        description=f"The oldest of a hundred streams in flight to {label('engine')} is now more than twice as old as "
        "an hour ago, or as a week ago.",
        panel=Panel(
            board="engine",
            title="Age of streams in flight (p99)",
            description=f"Age that 99 of 100 streams in flight with a client stay below, over {recent}; and the same "
            f"over the {usual} that ended an hour ago, and a week ago. Below {FELT.said} nobody feels it double.",
            unit="s",
            no_value="No stream in flight",
            queries=(
                Query(now, f"{legend('engine')} now"),
                Query(before, f"{legend('engine')} an hour ago"),
                Query(last_week, f"{legend('engine')} a week ago"),
            ),
            thresholds=(FELT,),
        ),
        runbook=Runbook(
            first="Split it in two: do requests wait longer (queue age), or are they generated more slowly (tokens a "
            "second of each)? The two have nothing in common.",
            right_now=(
                Look("p99 of the age of streams in flight", now),
                Look("how long the head of the queue has waited", by("max", per_engine, site.select(QUEUE_AGE))),
                Look("tokens a second", by("sum", per_engine, rate(site.select(TOKENS_OUT), site.lookback))),
            ),
            meaning=f"Over {recent}, streams that have a client were more than {TWICE} times as old (p99) as an hour "
            "ago, or as in the same hour a week ago. Streams of clients who left are not in it.",
            impact="People wait longer for the end of their answers; timeouts on the way begin to cut them off.",
            decide=(
                Choice("queue age up, orphans in the slots", "slots work for nobody", "TokengapOrphanHoldsSlot"),
                Choice("queue age up, no orphans", "more is asked than before", "add an engine, refuse early"),
                Choice("queue short, tokens a second down", "the engine is slower", "look at its GPUs: clocks, power"),
                Choice(
                    "queue short, tokens a second as before", "answers or prompts got longer", "who asks what since?"
                ),
            ),
            diagnosis=(
                Step(
                    "How much it generates now, and for how many.",
                    f"tokengap health {site.engine}",
                    f"{site.engine} busy: running 4, waiting 0, generation +48 in 1.0 s",
                ),
                query_step(
                    site,
                    "What each one running got a second, then: compare with before.",
                    f"sum by (engine) (rate({site.select(TOKENS_OUT)}[5m] offset 1h))",
                    '{engine="worker"} => 187.4 @[1764453600]',
                ),
            ),
            mitigation=(
                Measure(
                    "Send less to this engine: lower its weight at the proxy.", "its p99 falls within two answers' time"
                ),
                Measure("Bound the answers (`max_tokens`) where they got longer.", "p99 falls, tokens a second do not"),
                Measure("Take back what was deployed as it began: engine, model, options.", "p99 is as a week ago"),
            ),
            do_not=(
                "Do not restart a `busy` engine: slow is not stuck.",
                "Do not raise timeouts first: they hide it, and orphans live longer.",
            ),
            rollback="Give the engine its weight back when p99 has been usual for ten minutes.",
            false_alarm="A new kind of use with longer answers. After an hour or two it is the usual, and this ends; "
            "the comparison with last week goes on for a week.",
            limits="This is the age of streams in flight, which the exporter sees for every engine, not the engine's "
            "own histograms: `vllm:time_to_first_token_seconds` and `vllm:e2e_request_latency_seconds` are not on this "
            f"page, and count no request that was aborted. It needs more than {FEW} streams in flight, "
            f"{known} of history, and is as fine as its buckets.",
        ),
    )


def free_capacity_unsafe(site: Site) -> Watch:
    """Slots are free, and to admit by free slots would be wrong."""
    per_engine = site.per(*PER_ENGINE)
    here, trend = on(per_engine), duration(TREND)
    used = by("max", per_engine, over_time("avg", site.select(SLOT_UTILIZATION), TREND))
    ran_on = share(ended(site, per_engine, "orphaned"), ended(site, per_engine, ENDS_LEFT), per_engine)
    orphaned = by("sum", per_engine, rate(site.select(TOKENS_ORPHANED), TREND))
    wasted = share(orphaned, by("sum", per_engine, rate(site.select(TOKENS_OUT), TREND)), per_engine)
    slack = by("min", per_engine, over_time("min", site.select(DEADLINE_SLACK, **{"class": INTERACTIVE}), TREND))
    ages, counts = (
        by("sum", per_engine, over_time("avg", site.select(STREAM_AGE, part), TREND)) for part in ("_gsum", "_gcount")
    )
    age = share(ages, counts, per_engine)
    untied = Threshold(">", site.orphan_budget, percent(site.orphan_budget))
    return Watch(
        name="TokengapFreeCapacityUnsafe",
        severity="warning",
        expr=f"{used} < 1\nand {here}\n{ran_on} {RAN_ON}\nand {here}\n{wasted} {untied}\nand {here}\n"
        f"({slack} < {here} {age})",
        hold=60,
        keep=TREND,
        labels=PER_ENGINE,
        summary="Slots are free, and it is not safe to fill them.",
        description=f"{label('engine')} has free slots, but clients can leave without a cancel, tokens are generated "
        "without them, and streams last longer than the deadline has slack.",
        panel=Panel(
            board="oncall",
            title="Slack and mean stream age",
            description=f"The least slack and the mean age of streams in flight, over {trend}. Where streams last "
            "longer than slack, a slot that an orphan takes does not come back in time.",
            unit="s",
            no_value="No stream in flight",
            queries=(
                Query(slack, f"least slack at {legend('engine')}"),
                Query(age, f"mean age at {legend('engine')}"),
            ),
            least=None,
        ),
        runbook=Runbook(
            first="Do not raise limits, weights or the number of users because slots are free. Mend the cancel first.",
            right_now=(
                Look("slots that are in use", used),
                Look("of those who left, whose streams ran on", ran_on),
                Look("mean age of streams in flight", age),
            ),
            meaning="Three conditions, all true: clients leave and their streams run on (more than "
            f"{RAN_ON.said} of those who left), generation is not tied to the client's connection (more than "
            f"{untied.said} of the tokens are for nobody), and the least slack in {trend} is shorter than the mean "
            "stream. Then a free slot says nothing of the next request: some who left can fill all slots for longer "
            "than anybody can wait.",
            impact="Nobody is late yet. The next clients who leave together turn it into missed deadlines, at a load "
            "that looked harmless.",
            decide=(
                Choice("orphans at a proxy", "it does not pass cancels on", "TokengapProxyIgnoresCancel"),
                Choice("orphans at `engine`", "the engine does not end them", "TokengapEngineIgnoresCancel"),
                Choice("clients `vanished`", "nobody is told", "TokengapClientsVanishing"),
                Choice("a queue already", "it has happened", "TokengapQueueWillMissDeadline"),
            ),
            diagnosis=(
                query_step(
                    site,
                    "How streams of clients who left have ended. All `cancelled` is safe.",
                    f"sum by (hop, how) ({increase(site.select(STREAMS_ENDED, how=ENDS_LEFT), TREND)})",
                    '{hop="edge", how="cancelled"} => 0 @[1764453600]\n'
                    '{hop="edge", how="orphaned"} => 21 @[1764453600]',
                ),
                streams_step(site),
            ),
            mitigation=(
                Measure(
                    f"Admit by age and not by free slots: refuse what cannot start within {duration(site.age_cut)}.",
                    "slack stays above the mean stream age, or those refused know at once",
                ),
                LET_GO,
                Measure("Bound the answers (`max_tokens`).", "the mean stream age falls below the slack"),
            ),
            do_not=(
                "Do not send more traffic to this engine.",
                "Do not let an autoscaler take engines away because slots are free.",
            ),
            rollback="Nothing was changed; if limits were raised, lower them again.",
            false_alarm="An engine for batch work alone: give it a class of its own, without a deadline.",
            limits="Concluded from what happened to clients who left: while nobody leaves nothing is known, and it is "
            "silent. Whether a proxy would pass a cancel on is not tried here.",
        ),
    )


def _p99(site: Site, seconds: float, before: float) -> str:
    """Return the age that 99 of 100 streams in flight stayed below, over all of a time: of the mean distribution."""
    buckets = over_time("avg", site.select(STREAM_AGE, "_bucket", client="connected"), seconds, before)
    return f"histogram_quantile(0.99, {by('sum', (*site.per(*PER_ENGINE), 'le'), buckets)})"


WATCHES = (queue_will_miss_deadline, latency_doubled, free_capacity_unsafe)
