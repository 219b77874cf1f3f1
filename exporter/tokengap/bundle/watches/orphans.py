"""Watches over streams that go on without a client: who holds on, and what does it take from the others?"""

from __future__ import annotations

from typing import Final

from tokengap.bundle.promql import (
    PER_ENGINE,
    PER_EXPORTER,
    by,
    duration,
    increase,
    on,
    other_than,
    over_time,
    rate,
    share,
)
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
)
from tokengap.bundle.watches.shared import (
    ENDINGS,
    ENDS_LEFT,
    LEFT,
    LET_GO,
    RAN_ON,
    TREND,
    ended,
    orphaned_tokens,
    orphans,
    query_step,
    streams_step,
)
from tokengap.series.engines import COVERAGE, ENGINE_GHOST_STEPS, ENGINE_OPEN, ENGINE_RUNNING
from tokengap.series.queue import SLOT_UTILIZATION, SLOTS
from tokengap.series.streams import STREAM_AGE_MAX, STREAMS
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT
from tokengap.topology import ENGINE_HOP

#: A hop that is a proxy, and not the engine itself.
PROXY: Final = other_than(ENGINE_HOP)

#: Streams of those endings that are no accident: one that leaves as its answer ends looks as if it had run to its end.
SOME: Final = 3.0

#: Share of the tokens for nobody that is a trend. What is on the way to clients as they leave is less.
GROWING: Final = Threshold(">", 0.05, "5%")

#: By how much the mean utilization may change and still be the same load.
FLAT: Final = 0.2

#: Streams seen over requests in the engine, from which on free slots and pinned ones can be told apart.
SEEN: Final = 0.9

#: Scheduler steps without a token in the time in which endings are counted. A step is some 20 ms.
GHOSTS: Final = 100.0


def orphan_holds_slot(site: Site) -> Watch:
    """A stream whose client is gone is older than the age cut."""
    cut = longer_than(site.age_cut)
    labels = (*PER_ENGINE, "hop")
    age = by("max", site.per(*labels), site.select(STREAM_AGE_MAX, client=LEFT))
    hold = 2 * site.scrape
    return Watch(
        name="TokengapOrphanHoldsSlot",
        severity="critical",
        rehearsal="partition-client --through nginx --tokens 4000 --duration 2m",
        expr=f"{age} {cut}",
        hold=hold,
        keep=60,
        labels=labels,
        summary="A stream goes on although its client is gone.",
        description=f"At {label('hop')} a stream to {label('engine')} is held for a client who left, and is older than "
        f"{cut.said}.",
        panel=Panel(
            board="oncall",
            title="Oldest stream without a client",
            description=f"Age of the oldest stream whose client has vanished or gone, by the hop that holds it. Past "
            f"{cut.said} nobody is going to let go of it by himself.",
            unit="s",
            no_value="No sockets are read",
            queries=(Query(age, f"{legend('engine')} at {legend('hop')}"),),
            thresholds=(cut,),
        ),
        runbook=Runbook(
            first="See at which hop it is held: the alert's label `hop`. Whoever runs that proxy must make it let go; "
            "the engine is doing what it was told.",
            right_now=(
                Look("the oldest stream for nobody", age),
                Look("how many there are", orphans(site, *labels)),
                Look("tokens a second for them", orphaned_tokens(site, "engine", "hop")),
            ),
            meaning="A client has left, by closing or by vanishing, and the hop in the label still holds the "
            f"connection to the engine. {cut.said} is the age past which a new stream is not let in: an older one "
            "without a client takes a slot from somebody who could still be served.",
            impact="The engine generates to the end of the answer, which nobody reads: a slot, GPU time and power. "
            "While others wait, it costs them their deadline.",
            decide=(
                Choice(
                    "client `gone`, hop is a proxy", "the proxy does not pass the end on", "TokengapProxyIgnoresCancel"
                ),
                Choice("client `vanished`", "nobody told the proxy", "TokengapClientsVanishing"),
                Choice("hop `engine`", "the engine was left and goes on", "TokengapEngineIgnoresCancel"),
                Choice("all slots so, few clients left", "pinned", "roll back: TokengapSlotsPinnedAfterDisconnects"),
            ),
            diagnosis=(
                streams_step(site),
                Step(
                    "Is anybody kept waiting by it? If so this is urgent.",
                    f"tokengap health {site.engine}",
                    f"{site.engine} busy: running 4, waiting 9, generation +200 in 1.0 s",
                ),
                Step(
                    "On the proxy's host: clients who have closed and were not closed in turn.",
                    "ss -tn state close-wait",
                    "Recv-Q Send-Q   Local Address:Port    Peer Address:Port Process\n"
                    "1      0             10.0.0.5:8080       10.0.9.7:51544",
                ),
            ),
            mitigation=(
                LET_GO,
                Measure(
                    "End the held connections: reload the proxy with a short limit for old workers (nginx: "
                    "`worker_shutdown_timeout 10s`; HAProxy: `hard-stop-after 10s`).",
                    "the oldest stream without a client is younger than a minute",
                ),
                Measure(
                    "Bound what one orphan can cost: a lower `max_tokens` at the proxy or the engine.",
                    "no stream for nobody is older than the longest answer",
                ),
            ),
            do_not=(
                "Do not restart the engine: it is busy, and those who are still there lose their answers.",
                "Do not add engines: they fill with orphans too.",
            ),
            rollback="Set the proxy's former configuration and reload it. At the latest orphans end with their answer.",
            false_alarm="A client that ends its side and reads on is not taken for gone while it acknowledges bytes. "
            "One that pauses for longer than a beat right after may be, until it reads again.",
            limits="Streams over HTTP/2 cannot be told apart by sockets (`tokengap_blind_spot`). A request that an "
            "engine runs without any socket has no age here; see TokengapEngineIgnoresCancel. One that waits in the "
            "engine's queue is held too, though not in a slot yet.",
        ),
    )


def slots_pinned_after_disconnects(site: Site) -> Watch:
    """Every slot is taken and too few clients are there to take them: roll back."""
    per_engine = site.per(*PER_ENGINE)
    here = on(per_engine)
    utilization = by("max", per_engine, site.select(SLOT_UTILIZATION))
    coverage = by("max", per_engine, site.select(COVERAGE))
    slots = by("max", per_engine, site.select(SLOTS))
    connected = (
        f"{by('max', per_engine, site.select(ENGINE_OPEN))}\n"
        f"- {here}\n"
        f"{by('sum', per_engine, site.select(STREAMS, client=LEFT))}"
    )
    hold = max(30.0, 3 * site.scrape)
    return Watch(
        name="TokengapSlotsPinnedAfterDisconnects",
        severity="critical",
        rehearsal="partition-client --through nginx --users 2 --slots 4 --clients 8 --tokens 4000 --duration 2m",
        expr=f"{utilization} >= 1\nand {here}\n{coverage} > {SEEN}\nand {here}\n(\n{connected}\n< {here}\n{slots}\n)",
        hold=hold,
        keep=60,
        labels=PER_ENGINE,
        summary="All slots are taken, and fewer clients are connected than there are slots.",
        description=f"Every slot of {label('engine')} has been in use for {duration(hold)}, with fewer clients "
        "connected than slots: the others work for nobody. Roll the last change on the path back.",
        panel=Panel(
            board="oncall",
            title="Slots and connected clients",
            description="Slots of each engine, how many run, and how many streams still have a client. Running at the "
            "slots with fewer clients than that is the sign to roll back.",
            unit="short",
            no_value="No slots or no sockets are known",
            queries=(
                Query(slots, f"slots of {legend('engine')}"),
                Query(by("max", per_engine, site.select(ENGINE_RUNNING)), f"running in {legend('engine')}"),
                Query(connected, f"clients of {legend('engine')}"),
            ),
        ),
        runbook=Runbook(
            first="Was a proxy, a gateway or an engine changed today? Take that change back now, and find out why "
            "afterwards.",
            right_now=(
                Look("streams that have a client", connected),
                Look("slots", slots),
                Look("streams without a client, by hop", orphans(site, "engine", "hop")),
            ),
            meaning="Clients left, and their slots did not come free. With a working path utilization falls as they "
            "leave; here it stays at 1 while fewer clients are connected than there are slots.",
            impact="Whoever comes now waits behind answers that nobody reads. To a dashboard of utilization the engine "
            "looks well used.",
            decide=(
                Choice("streams without a client at a proxy", "that proxy holds on", "roll it back: mitigation 1"),
                Choice("none at any hop", "the engine holds on", "TokengapEngineIgnoresCancel"),
                Choice("clients `vanished`", "the network dropped them", "TokengapClientsVanishing"),
                Choice("verdict `stuck`", "no slot can come free", "TokengapEngineStuck"),
            ),
            diagnosis=(
                Step(
                    "Busy for nobody, or stuck? The number running is the slots that are taken.",
                    f"tokengap health {site.engine}",
                    f"{site.engine} busy: running 4, waiting 0, generation +200 in 1.0 s",
                ),
                streams_step(site),
            ),
            mitigation=(
                Measure(
                    "Set the proxy's last known configuration and reload it: timeouts and cancel on disconnect.",
                    "utilization falls below 1 within the length of an answer",
                ),
                LET_GO,
                Measure(
                    "If it is the engine that holds on: take it out of rotation, let it run empty, put it back.",
                    "`tokengap health` says `idle` before it goes back",
                ),
            ),
            do_not=(
                "Do not add engines or slots: capacity is not what is missing.",
                "Do not restart the engine while some clients are connected: theirs are the only useful answers.",
            ),
            rollback="Mitigation 1 is the rollback. If the change was not the cause, set it again when utilization "
            "has come down.",
            false_alarm="Slots that were never set nor read off a command line are the most seen running "
            '(`tokengap_slots{source="observed"}`): too few after a quiet night. Set `slots` in the exporter.',
            limits=f"Not told where less than {SEEN:.0%} of the engine's requests are seen on sockets: what is unseen "
            "may be well served. Streams that wait inside a proxy with a queue of its own are taken for held in the "
            "engine once their client is gone.",
        ),
    )


def orphan_gap_growing(site: Site) -> Watch:
    """The load is the same, and a part of it is for nobody."""
    per_engine = site.per(*PER_ENGINE)
    here, trend = on(per_engine), duration(TREND)
    orphaned = by("sum", per_engine, rate(site.select(TOKENS_ORPHANED), TREND))
    out = by("sum", per_engine, rate(site.select(TOKENS_OUT), TREND))
    used = site.select(SLOT_UTILIZATION)
    now, before = (by("max", per_engine, over_time("avg", used, TREND, ago)) for ago in (0.0, TREND))
    wasted = share(orphaned, out, per_engine)
    return Watch(
        name="TokengapOrphanGapGrowing",
        severity="warning",
        expr=f"{wasted} {GROWING}\nand {here}\nabs({now} - {here} {before}) < {FLAT}",
        hold=120,
        keep=TREND,
        labels=PER_ENGINE,
        summary="Tokens are generated for nobody while the load is the same.",
        description=f"More than {GROWING.said} of the tokens of {label('engine')} in {trend} were for clients who had "
        "left, and its utilization is what it was before: a cost, not a lack of capacity.",
        panel=Panel(
            board="money",
            title="Share of tokens generated for nobody",
            description=f"Tokens for clients who had left, of all that were generated, over {trend}. Utilization does "
            "not show it.",
            unit="percentunit",
            no_value="Nothing was generated",
            queries=(Query(wasted, legend("engine")),),
            thresholds=(GROWING,),
        ),
        runbook=Runbook(
            first="Nobody has to get up for this. Find the hop that leaks, and hand it to whoever runs it.",
            right_now=(
                Look("share of tokens for nobody", wasted),
                Look("which hop holds on, in tokens a second", orphaned_tokens(site, "engine", "hop")),
                Look("utilization, by which this cannot be seen", by("max", per_engine, used)),
            ),
            meaning=f"Of the tokens of {trend} more than {GROWING.said} went to nobody, and the mean utilization "
            f"moved by less than {FLAT:.0%}: the same slots, less for them. When clients who leave are let go, what "
            "is lost is what was on the way to them, a token or two each.",
            impact="Whoever pays for GPUs pays for it. Users notice nothing until a queue forms.",
            decide=(
                Choice("most of it at one proxy", "it does not pass cancels on", "TokengapProxyIgnoresCancel"),
                Choice("most of it at `engine`", "the engine does not end requests", "TokengapEngineIgnoresCancel"),
                Choice("clients `vanished`", "lost connections, each held for minutes", "TokengapClientsVanishing"),
                Choice("a queue as well", "it costs deadlines now", "TokengapOrphanHoldsSlot"),
            ),
            diagnosis=(
                query_step(
                    site,
                    "By hop, in tokens of the last minutes.",
                    by("sum", ("hop",), increase(site.select(TOKENS_ORPHANED), TREND)),
                    '{hop="edge"} => 3301.3 @[1764453600]\n{hop="engine"} => 0 @[1764453600]',
                ),
                streams_step(site),
            ),
            mitigation=(
                LET_GO,
                Measure(
                    "Bound the answers (`max_tokens`), so that each orphan costs less.",
                    "the share falls, with as many orphans as before",
                ),
            ),
            do_not=(
                "Do not scale out on it: more engines generate more for nobody.",
                "Do not take its cost for a saving: a step with nine sequences takes nearly as long as one with ten.",
            ),
            rollback="Set the proxy's former configuration and reload it.",
            false_alarm="Very short answers with many who leave at once: the token or two on the way to each can be "
            f"{GROWING.said} of them. The orphans are then never older than a second.",
            limits="Tokens are attributed by bytes on sockets, and for answers that are not streamed by what the "
            "engine counted at their end. What no hop shows is unattributed and not in it.",
        ),
    )


def proxy_ignores_cancel(site: Site) -> Watch:
    """Clients leave, and what they asked for runs on behind one proxy."""
    labels = (*PER_EXPORTER, "hop")
    per_hop, per_exporter, lately = site.per(*labels), site.per(*PER_EXPORTER), duration(ENDINGS)
    ran_on = ended(site, per_hop, "orphaned", hop=PROXY)
    left = ended(site, per_exporter, ENDS_LEFT)
    gone = by("max", per_hop, over_time("max", site.select(STREAMS, client="gone", hop=PROXY), ENDINGS))
    part = f"{ran_on}\n/ {on(per_exporter)} group_left ()\n({left} > 0)"
    here = on(per_hop)
    return Watch(
        name="TokengapProxyIgnoresCancel",
        severity="warning",
        expr=f"{part} {RAN_ON}\nand {here}\n{ran_on} > {SOME:g}\nand {here}\n{gone} > 0",
        hold=60,
        keep=TREND,
        labels=labels,
        summary="A proxy does not tell the engine that clients have left.",
        description=f"At {label('hop')} the streams of more than {RAN_ON.said} of those who left in {lately} ran to "
        "their end for nobody.",
        panel=Panel(
            board="money",
            title="Left streams that ran on at a proxy",
            description=f"Of the streams whose client left in {lately}, the part that a hop held to the end of the "
            "answer. 0 where cancels are passed on.",
            unit="percentunit",
            no_value="Nobody left",
            queries=(Query(part, legend("hop")),),
            thresholds=(RAN_ON,),
        ),
        runbook=Runbook(
            first="The label `hop` names the proxy. Look what was changed in it last; most often it is one line.",
            right_now=(
                Look("streams that ran on, by hop", ran_on),
                Look(
                    "streams that are held now, by hop",
                    by("sum", per_hop, site.select(STREAMS, client="gone", hop=PROXY)),
                ),
                Look("tokens a second for nobody, by hop", orphaned_tokens(site, "hop")),
            ),
            meaning="This hop was told that its client left, by FIN or RST, and kept its connection to the engine. "
            "The engine cannot know. Hops behind it are not blamed: each orphan counts where it is held first.",
            impact="Every client who leaves costs the rest of its answer, and a slot for that long.",
            decide=(
                Choice("nginx", "`proxy_ignore_client_abort`, `proxy_cache` or `proxy_store` is on", "turn it off"),
                Choice("HAProxy before 3.3", "no `option abortonclose` in `defaults`", "set it there"),
                Choice("Caddy 2.6 to 2.8", "`flush_interval -1`", "upgrade or remove it"),
                Choice(
                    "a gateway in Python", "its handler reads the answer on when the client is gone", "cancel in it"
                ),
                Choice("the held streams are `vanished`", "it was not told", "TokengapClientsVanishing"),
            ),
            diagnosis=(
                streams_step(site),
                Step(
                    "On its host: clients who have closed, not closed in turn.",
                    "ss -tn state close-wait",
                    "Recv-Q Send-Q   Local Address:Port    Peer Address:Port Process\n"
                    "1      0             10.0.0.5:8080       10.0.9.7:51544",
                ),
            ),
            mitigation=(
                LET_GO,
                Measure(
                    "In a gateway of your own: end the upstream request when the client's connection ends. LiteLLM: "
                    "upgrade past 1.80.",
                    "left streams are counted as `cancelled`, no longer as `orphaned`",
                ),
            ),
            do_not=(
                "Do not shorten read timeouts instead: long prompts die of it, and orphans that stream do not.",
                "Do not look for it in the proxy's log: nginx logs streams that were cut off as 200.",
            ),
            rollback="Set the former configuration and reload. Nothing is lost but tokens.",
            false_alarm="Answers that are cached on purpose are read to their end whoever left "
            "(nginx `proxy_cache`): then it is a price, not a fault.",
            limits="Who left is seen on this hop's sockets. Behind a load balancer that keeps its connections open no "
            "client is seen to leave, and this stays silent (`tokengap_blind_spot`). A stream counts when it ends, "
            "which for long answers is late; TokengapOrphanHoldsSlot is not.",
        ),
    )


def engine_ignores_cancel(site: Site) -> Watch:
    """The connection is closed and the engine goes on."""
    per_engine = site.per(*PER_ENGINE)
    here, lately = on(per_engine), duration(ENDINGS)
    ran_on = ended(site, per_engine, "orphaned", hop=ENGINE_HOP)
    part = share(ran_on, ended(site, per_engine, ENDS_LEFT), per_engine)
    ghosts = by("max", per_engine, increase(site.select(ENGINE_GHOST_STEPS), ENDINGS))
    return Watch(
        name="TokengapEngineIgnoresCancel",
        severity="warning",
        # Either it counts the tokens that it makes for nobody, or only the steps: its front end has dropped the rest.
        expr=f"(\n{part} {RAN_ON}\nand {here}\n{ran_on} > {SOME:g}\n)\nor\n{ghosts} > {GHOSTS:g}",
        hold=60,
        keep=TREND,
        labels=PER_ENGINE,
        summary="An engine runs requests on whose connection is closed.",
        description=f"{label('engine')} ran requests to their end in {lately} although their connection had been "
        "closed, or made steps for requests that it had dropped.",
        panel=Panel(
            board="engine",
            title="Left streams that ran on in the engine",
            description=f"Of the streams whose client left in {lately}, the part that an engine ran to its end "
            "without a connection. 0 where it ends what is left.",
            unit="percentunit",
            no_value="Nobody left",
            queries=(Query(part, legend("engine")),),
            thresholds=(RAN_ON,),
        ),
        runbook=Runbook(
            first="Note the engine's version and how it was started: this is its fault, or of what is wrapped around "
            "its front end.",
            right_now=(
                Look("requests that ran on without a connection", ran_on),
                Look("steps without a token", ghosts),
                Look(
                    "running, and open streams to it",
                    f"{by('max', per_engine, site.select(ENGINE_RUNNING))}\n- {here}\n"
                    f"{by('max', per_engine, site.select(ENGINE_OPEN))}",
                ),
            ),
            meaning="Every hop let go: the sockets to the engine are closed. It runs more requests than it has "
            "connections, and finishes them. An engine that works aborts a request within a step or two.",
            impact="No proxy can mend it. Slots come free only when answers end, whoever left.",
            decide=(
                Choice(
                    "a middleware in front of vLLM (`BaseHTTPMiddleware`)", "it swallows the disconnect", "remove it"
                ),
                Choice(
                    "answers that are not streamed", "the handler does not listen for the end", "upgrade the engine"
                ),
                Choice(
                    "steps without tokens, running above open streams", "core and front end disagree", "mitigation 3"
                ),
                Choice("another client on the engine's host", "a batch job this exporter does not see", "False alarm"),
            ),
            diagnosis=(
                Step(
                    "What it says it runs, without a request to the model.",
                    f"tokengap health {site.engine}",
                    f"{site.engine} busy: running 4, waiting 0, generation +200 in 1.0 s",
                ),
                query_step(
                    site,
                    "The same by its sockets. Fewer than running: the rest runs for nobody.",
                    site.select(ENGINE_OPEN),
                    'tokengap_engine_streams_open{engine="worker", instance="10.0.0.5:10788", job="tokengap"} => 2 '
                    "@[1764453600]",
                ),
            ),
            mitigation=(
                Measure(
                    "Bound the answers: `max_tokens` at the proxy, or the engine's own default.",
                    "no request runs on for longer than the longest answer",
                ),
                Measure(
                    "Start it without the middleware, or with the version before.",
                    "clients who leave are counted as `cancelled`",
                ),
                Measure(
                    "Take it out of rotation, let it run empty, restart it, put it back.",
                    "running and open streams are the same again",
                ),
            ),
            do_not=(
                "Do not restart it with clients connected: let it run empty first.",
                "Do not trust vLLM's `request_success_total` with reason abort: it stays 0 when clients leave.",
            ),
            rollback="Start the engine with the version and options it had.",
            false_alarm="Requests from where no hop is watched can end as others leave, and look like theirs. "
            "`tokengap_coverage_ratio` is below 1 then: name the missing hop.",
            limits="It is told from counts: running plus waiting on its page against sockets. Which request it is "
            "cannot be said. Steps without tokens are counted where the engine publishes its iterations.",
        ),
    )


WATCHES = (
    orphan_holds_slot,
    slots_pinned_after_disconnects,
    orphan_gap_growing,
    proxy_ignores_cancel,
    engine_ignores_cancel,
)
