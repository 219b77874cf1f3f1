"""Watches over clients: do they vanish, and do they come back while what they left still runs?"""

from __future__ import annotations

from typing import Final

from tokengap.bundle.promql import PER_ENGINE, PER_EXPORTER, by, duration, on, over_time, share
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Step, Threshold, Watch, label, legend
from tokengap.bundle.watches.shared import (
    ENDS_LEFT,
    LET_GO,
    TREND,
    ended,
    orphaned_tokens,
    orphans,
    query_step,
    streams_step,
)
from tokengap.series.engines import ENGINE_RUNNING, ENGINE_WAITING
from tokengap.series.queue import QUEUE_AGE
from tokengap.series.streams import STREAMS, STREAMS_ENDED

#: Vanished clients over requests that run: more than people with a bad network.
VANISHED: Final = Threshold(">", 0.05, "5%")

#: Vanished clients, on average, that may be chance.
FEW: Final = 1


def clients_vanishing(site: Site) -> Watch:
    """Clients are cut off without a word."""
    labels = (*PER_EXPORTER, "hop")
    per_hop, per_exporter, trend = site.per(*labels), site.per(*PER_EXPORTER), duration(TREND)
    vanished = by("sum", per_hop, over_time("avg", site.select(STREAMS, client="vanished"), TREND))
    running = by("sum", per_exporter, over_time("avg", site.select(ENGINE_RUNNING), TREND))
    # Of what runs, not of all streams in flight: those who wait cannot be seen to vanish, and would hide the others.
    part = f"{vanished}\n/ {on(per_exporter)} group_left ()\n({running} > 0)"
    return Watch(
        name="TokengapClientsVanishing",
        severity="warning",
        expr=f"{part} {VANISHED}\nand {on(per_hop)}\n{vanished} > {FEW}",
        hold=60,
        keep=TREND,
        labels=labels,
        summary="Clients vanish without closing their connection.",
        description=f"More than {VANISHED.said} of what runs in {trend} is for clients of {label('hop')} that "
        "acknowledge nothing any more. The proxy will hold each of them for about 15 minutes.",
        panel=Panel(
            board="engine",
            title="Streams to vanished clients",
            description="Streams to clients that acknowledge nothing any more, for each request that runs, over "
            f"{trend}. The proxy does not notice: its kernel retransmits for about 15 minutes.",
            unit="percentunit",
            no_value="Nothing runs",
            queries=(Query(part, legend("hop")),),
            thresholds=(VANISHED,),
        ),
        runbook=Runbook(
            first="See whether they share something: one load balancer, one network, one version of an app. If so it "
            "is there that connections get lost.",
            right_now=(
                Look("vanished clients, by hop", vanished),
                Look("what runs", running),
                Look("tokens a second for nobody", orphaned_tokens(site, "engine", "hop")),
            ),
            meaning="Data to these clients was sent again three times and more and never acknowledged: a phone out of "
            "reach, a suspended laptop, a firewall or NAT that forgot the connection. Nobody sent FIN or RST, so no "
            f"proxy can know. {VANISHED.said} is more than bad networks alone do.",
            impact="The engine generates each answer to its end, up to 15 minutes for nobody. Keep-alive and idle "
            "timeouts do not end it: the proxy keeps writing.",
            decide=(
                Choice(
                    "one load balancer or NAT in front of all", "its idle timeout is shorter than a pause", "raise it"
                ),
                Choice("all at once, then no more", "a network was cut", "they end by themselves; mitigation 2 now"),
                Choice("mobile clients, all the time", "normal, and expensive", "mitigation 1, for good"),
                Choice("client `gone`, not `vanished`", "the proxy was told", "TokengapProxyIgnoresCancel"),
            ),
            diagnosis=(
                Step(
                    "On the proxy's host: connections that retransmit, with what is known of each.",
                    "ss -tino state established '( sport = :8080 )'",
                    "0      12480  10.0.0.5:8080  10.0.9.7:51544 timer:(on,6.2sec,5)\n"
                    "     cubic wscale:7,7 rto:6656 backoff:5 ... unacked:1 retrans:0/5 lost:1 ...",
                ),
                Step(
                    "Which streams (`client` is `vanished`), and how much was generated for each since.",
                    f"curl -s {site.exporter}/api/streams",
                    '[{"id":3,"engine":"worker","hop":"edge","client":"...",...,"orphaned":612.0,...}]',
                ),
            ),
            mitigation=(
                Measure(
                    "Let the kernel give up sooner: `TCP_USER_TIMEOUT` on the proxy's side to clients (HAProxy: "
                    "`tcp-ut 20s` on `bind`).",
                    "no stream to a vanished client is older than half a minute",
                ),
                Measure(
                    "Where a proxy cannot set it: `sysctl -w net.ipv4.tcp_retries2=8` on its host, about 100 s "
                    "instead of 15 minutes, for all its connections.",
                    "the same",
                ),
                Measure(
                    "End those that are there now: `ss -K state established '( sport = :8080 and dst 10.0.9.7 )'`.",
                    "they are gone from the streams within a second",
                ),
            ),
            do_not=(
                "Do not shorten the proxy's idle or read timeouts: data flows, so they never run.",
                "Do not trust bytes sent in the proxy's log: for these clients they overstate delivery by far.",
            ),
            rollback="Remove `tcp-ut` and reload; `sysctl -w net.ipv4.tcp_retries2=15` is the kernel's default.",
            false_alarm="A link that loses packets for seconds and recovers: the streams are then `connected` again, "
            "and what they got counts as useful.",
            limits="Seen when there is something to send: a client that vanishes while it waits for its first token is "
            "not told from one that waits. Not seen where a load balancer in front takes the bytes.",
        ),
    )


def retry_against_zombies(site: Site) -> Watch:
    """People leave, ask again, and queue behind what they left."""
    per_engine = site.per(*PER_ENGINE)
    here, trend = on(per_engine), duration(TREND)
    waiting = by("max", per_engine, site.select(ENGINE_WAITING))
    held = orphans(site, *PER_ENGINE)
    left = ended(site, per_engine, ENDS_LEFT, TREND)
    answered = ended(site, per_engine, "completed", TREND)
    return Watch(
        name="TokengapRetryAgainstZombies",
        severity="warning",
        expr=f"{waiting} > 0\nand {here}\n{held} > 0\nand {here}\n({left} > {here} {answered})",
        hold=60,
        keep=TREND,
        labels=PER_ENGINE,
        summary="Requests queue behind streams that their clients have left.",
        description=f"Requests wait at {label('engine')} while it works for clients who left, and in {trend} more left "
        "than were answered. Who asks again waits behind what he left.",
        panel=Panel(
            board="oncall",
            title="Left and answered",
            description=f"Streams that their clients left and streams that were answered, in {trend}. More left than "
            "answered, with orphans in the slots, feeds itself: who leaves asks again.",
            unit="short",
            no_value="No stream has ended",
            queries=(
                Query(left, f"left at {legend('engine')}"),
                Query(answered, f"answered by {legend('engine')}"),
                Query(held, f"held for nobody at {legend('engine')}"),
            ),
        ),
        runbook=Runbook(
            first="Slow the retries down: answer 429 with `Retry-After` at the proxy. Each retry that is let in makes "
            "the wait longer for the next.",
            right_now=(
                Look("requests that wait", waiting),
                Look("streams held for nobody", held),
                Look("left, for each that is answered", share(left, answered, per_engine)),
            ),
            meaning="Three things at once: a queue, slots that work for clients who left, and more who leave than are "
            "answered. People time out, ask again, and their second request waits behind their first, which still "
            "runs. It does not end by itself while people try.",
            impact="Useful answers go towards none although every slot is busy. It outlasts what set it off.",
            decide=(
                Choice("orphans at a proxy", "cancels are not passed on", "mend that first: mitigation 2"),
                Choice("hop `engine`", "the engine does not end them", "TokengapEngineIgnoresCancel"),
                Choice("clients `vanished`", "they ask again over a new connection", "TokengapClientsVanishing"),
                Choice(
                    "few orphans, many cancelled", "plain overload, people give up", "TokengapQueueWillMissDeadline"
                ),
            ),
            diagnosis=(
                query_step(
                    site,
                    "How streams ended lately.",
                    f"sum by (how) (increase({site.select(STREAMS_ENDED)}[{trend}]))",
                    '{how="completed"} => 3 @[1764453600]\n{how="orphaned"} => 61.4 @[1764453600]',
                ),
                streams_step(site),
            ),
            mitigation=(
                Measure(
                    "Refuse early: 429 with `Retry-After` while the queue is older than "
                    f"{duration(site.age_cut)}. In clients: one retry, with a growing pause.",
                    "nobody waits, and answered streams outnumber those left",
                ),
                LET_GO,
                Measure(
                    "Bound the answers (`max_tokens`), so that what was left ends sooner.",
                    "no orphan is older than the longest answer",
                ),
            ),
            do_not=(
                "Do not restart the engine: all who wait ask again at once.",
                "Do not lengthen the queue (a larger backlog, longer timeouts): more wait for what nobody reads.",
            ),
            rollback="Take the refusal out again when nothing has waited for ten minutes.",
            false_alarm="Load tests with clients that leave by design. Name them to on-call beforehand.",
            limits="Who asks again is not known here: a socket has no name. It is concluded from the three signs, and "
            f"the queue's age is {QUEUE_AGE}.",
        ),
    )


WATCHES = (clients_vanishing, retry_against_zombies)
