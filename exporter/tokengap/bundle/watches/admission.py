"""Watches over the gateway that admits: does the engine give back the slots of streams that were cut?"""

from __future__ import annotations

from typing import Final

from tokengap.bundle.promql import PER_ENGINE, by
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Step, Threshold, Watch, label, legend
from tokengap.bundle.watches.shared import query_step
from tokengap.series.admit import ADMIT_HELD, ADMIT_SLOTS, ADMIT_WAITING

#: A slot that is held at all is one that was not given back within the gateway's own limit.
HELD: Final = Threshold(">", 0, "0s")


def slot_held_against_cancel(site: Site) -> Watch:
    """The engine was told that a client left, and works on."""
    per_engine = site.per(*PER_ENGINE)
    held = by("max", per_engine, site.select(ADMIT_HELD))
    slots = by("sum", per_engine, site.select(ADMIT_SLOTS, state="held"))
    free = by("sum", per_engine, site.select(ADMIT_SLOTS, state="free"))
    return Watch(
        name="TokengapSlotHeldAgainstCancel",
        severity="warning",
        expr=f"{held} {HELD}",
        hold=2 * site.scrape,
        keep=60,
        labels=PER_ENGINE,
        summary="The engine works on for a stream that the gateway has cancelled.",
        description=f"A slot of {label('engine')} is held: its client left, the engine was told, and its page still "
        "shows the stream. The gateway gives that slot to nobody, unless it is set to.",
        panel=Panel(
            board="oncall",
            title="Slots held against their cancel",
            description="How long ago the client left of the stream that an engine has worked on for longest although "
            "it was told to stop. 0 where cancels work.",
            unit="s",
            no_value="No gateway is asked",
            queries=(Query(held, legend("engine")),),
            thresholds=(HELD,),
        ),
        runbook=Runbook(
            first="See how many slots are free beside the held ones. With none the gateway serves nobody: mitigation 1 "
            "now.",
            right_now=(
                Look("how long the oldest has been held", held),
                Look("slots that are held", slots),
                Look("slots that are free", free),
                Look("requests that wait in the gateway", by("sum", site.per("class"), site.select(ADMIT_WAITING))),
            ),
            meaning="A client left, the gateway closed its connection to the engine, and after `admit_drain_limit` the "
            "engine's page still shows more requests than there are clients. Either the engine ignores the end of a "
            "connection, or somebody else sends it requests past the gateway.",
            impact="Each held slot is one less for people, until the answer that nobody reads has come to its end.",
            decide=(
                Choice(
                    "the engine's sockets are fewer than it runs", "it ignores cancels", "TokengapEngineIgnoresCancel"
                ),
                Choice("another client is connected to the engine", "traffic past the gateway", "send it through"),
                Choice("its page does not move at all", "it is stuck, or its gauges are stale", "TokengapEngineStuck"),
                Choice("it ended by itself within a minute", "a long prompt was being computed", "False alarm"),
            ),
            diagnosis=(
                query_step(
                    site,
                    "What the slots are taken by.",
                    site.select(ADMIT_SLOTS),
                    'tokengap_admit_slots{engine="worker", state="held"} => 1 @[1764453600]',
                ),
                Step(
                    "What the engine says it runs, without a request to the model.",
                    f"tokengap health {site.engine}",
                    f"{site.engine} busy: running 1, waiting 0, generation +50 in 1.0 s",
                ),
            ),
            mitigation=(
                Measure(
                    "Where no slot is free: set `admit_when_held: admit` and restart the gateway. Who comes next waits "
                    "in the engine behind what still runs there.",
                    "requests are admitted again",
                ),
                Measure(
                    "Bound the answers: `max_tokens` at the edge, or the engine's own default.",
                    "no slot is held for longer than the longest answer",
                ),
                Measure(
                    "Start the engine with the version and options it had when cancels worked.",
                    "`tokengap doctor cancel` says `ok`",
                ),
            ),
            do_not=(
                "Do not raise `--slots` of the gateway to make up for held ones: they come back.",
                "Do not restart the engine with clients connected: let it run empty first.",
            ),
            rollback="`admit_when_held: hold`, and restart the gateway: streams come to their end first.",
            false_alarm="A prompt of many seconds in one step: an engine cannot stop in the midst of it. If that is "
            "usual, raise `admit_drain_limit` above the longest prompt.",
            limits="It is told from counts on the engine's page: which request it is cannot be said. An engine without "
            "a page is believed when its connection is closed, and nothing is ever held there.",
        ),
    )


WATCHES = (slot_held_against_cancel,)
