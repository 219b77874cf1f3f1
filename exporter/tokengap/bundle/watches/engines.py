"""Watches over the engine: is it busy, or is it stuck?"""

from __future__ import annotations

from tokengap.bundle.promql import PER_ENGINE, by, said
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Step, Threshold, Watch, label, legend
from tokengap.series.engines import ENGINE_PROGRESS_AGE, ENGINE_RUNNING, ENGINE_STATE, ENGINE_WAITING


def engine_stuck(site: Site) -> Watch:
    """Work is in flight and nothing moves."""
    proven = Threshold("==", 1, "1")
    per_engine = site.per(*PER_ENGINE)
    stuck = by("max", per_engine, site.select(ENGINE_STATE, state="stuck"))
    window, windows = said(site.window), said(2 * site.window)
    return Watch(
        name="TokengapEngineStuck",
        severity="critical",
        expr=f"{stuck} {proven}",
        hold=2 * site.scrape,
        keep=60,
        labels=PER_ENGINE,
        summary="An engine has work in flight and makes no progress.",
        description=f"{label('engine')} has shown no progress of any kind for {windows} and more, with requests in "
        "flight.",
        panel=Panel(
            board="oncall",
            title="Engine stuck",
            description=f"1 while an engine has work in flight and showed no progress in two windows of {window}.",
            unit="none",
            no_value="No verdict yet",
            queries=(Query(stuck, legend("engine")),),
            thresholds=(proven,),
            drawing="state-timeline",
        ),
        runbook=Runbook(
            first="Take the engine out of the proxy's rotation: nothing that is sent to it now will be answered.",
            right_now=(
                Look("the verdict", f"{site.select(ENGINE_STATE)} == 1"),
                Look("since when nothing moved", by("max", per_engine, site.select(ENGINE_PROGRESS_AGE))),
                Look(
                    "what hangs in it",
                    f"{site.select(ENGINE_RUNNING)} + {site.select(ENGINE_WAITING)}",
                ),
            ),
            meaning=f"Requests run or wait, and in two windows of {window} no token was generated, no prompt computed, "
            "nothing finished, preempted or moved in the KV cache. One window is a pause; two are a fault.",
            impact="Everyone whose request is in it waits for nothing. Its GPUs are paid for and idle, or spin.",
            decide=(
                Choice(
                    "`stuck`, and a second look says the same", "the engine's core hangs", "restart it: mitigation 2"
                ),
                Choice("`busy` on the second look", "a very long prompt was computed", "put it back, see False alarm"),
                Choice("`dead`", "it ended meanwhile", "let its supervisor start it"),
                Choice(
                    "several engines are stuck at once",
                    "what they share: a GPU, storage, the network between ranks",
                    "look there first; a restart of one will hang again",
                ),
            ),
            diagnosis=(
                Step(
                    f"A second opinion, of this moment. It takes up to {windows}; code 1 means proven stuck.",
                    f"tokengap health {site.engine} --window {window}",
                    f"{site.engine} stuck: running 4, waiting 4, nothing moved for 20.0 s",
                    code=1,
                ),
                Step(
                    "What the verdict rests on, in one sentence for each engine.",
                    f"curl -s {site.exporter}/api/engines",
                    '[{"name":"worker",...,"state":"stuck","evidence":"running 4, waiting 4, nothing moved for ...',
                ),
                Step(
                    "What the core did last. Before the restart, which loses it.",
                    "journalctl -u vllm --since -10min --no-pager | tail -50",
                    "... EngineCore ... (the last lines name the step, the rank or the CUDA call it hangs in)",
                ),
            ),
            mitigation=(
                Measure(
                    "Take it out of the proxy's rotation (HAProxy: `disable server`; nginx: `down`, then reload).",
                    "new requests go to other engines; the queue age of those stays below the cut",
                ),
                Measure(
                    "Restart the engine's process, not the host. Only on the verdict `stuck`.",
                    "`tokengap health` says `idle` or `busy`; then put it back",
                ),
            ),
            do_not=(
                "Do not trust `/health` or `/v1/models`: both answer 200 while the core hangs.",
                "Do not restart on high utilization or a long queue alone: that is a `busy` engine.",
                "Do not send test completions to it: they hang too and lengthen its queue.",
            ),
            rollback="Put the engine back into rotation. If it was restarted with other options or another version, "
            "start it with those it had.",
            false_alarm=f"A prompt so long that nothing shows for {windows}: raise `--prefill-budget` and `--window` "
            "of the exporter above the longest prefill you accept.",
            limits="Seen through the engine's page and its sockets. An engine that publishes no counters is `blind`, "
            "not `stuck`. An engine that generates nonsense makes progress.",
        ),
    )


WATCHES = (engine_stuck,)
