"""Watches over the engine: is it busy, or is it stuck?"""

from __future__ import annotations

from urllib.parse import urlsplit

from tokengap.bundle.promql import PER_ENGINE, by, increase, over_time, rate, said
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Step, Threshold, Watch, label, legend
from tokengap.series.engines import (
    COVERAGE,
    ENGINE_OPEN,
    ENGINE_PROGRESS_AGE,
    ENGINE_RESTARTS,
    ENGINE_RUNNING,
    ENGINE_STATE,
    ENGINE_WAITING,
)
from tokengap.series.gpus import GPU_UP
from tokengap.series.itself import SOURCE_DURATION
from tokengap.series.tokens import TOKENS_OUT, TOKENS_UNATTRIBUTED

#: Seconds of "again and again", and the restarts in them that are still no loop. An engine needs minutes to load, so a
#: loop makes few. A half, because increase() of a whole number is not whole.
RESTARTS_WITHIN, RESTARTS = 1800.0, 2.5

#: Share of the time for which an engine may be blind.
BLIND_SHARE = 0.5

#: Share of the engine's requests whose sockets have to be seen.
COVERED = 0.9


def engine_stuck(site: Site) -> Watch:
    """Work is in flight and nothing moves."""
    proven = Threshold("==", 1, "1")
    per_engine = site.per(*PER_ENGINE)
    stuck = by("max", per_engine, site.select(ENGINE_STATE, state="stuck"))
    window, windows = said(site.window), said(2 * site.window)
    return Watch(
        name="TokengapEngineStuck",
        severity="critical",
        rehearsal="engine-freeze --duration 1m",
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


def engine_dead(site: Site) -> Watch:
    """Nobody listens where the engine was."""
    proven = Threshold("==", 1, "1")
    per_engine = site.per(*PER_ENGINE)
    dead = by("max", per_engine, site.select(ENGINE_STATE, state="dead"))
    hold = site.lookback
    return Watch(
        name="TokengapEngineDead",
        severity="critical",
        rehearsal="engine-crash --duration 3m",
        expr=f"{dead} {proven}",
        hold=hold,
        keep=60,
        labels=PER_ENGINE,
        summary="An engine is gone.",
        description=f"Connections to {label('engine')} have been refused for {said(hold)}: its process ended, or is "
        "still loading.",
        panel=Panel(
            board="oncall",
            title="Engine dead",
            description="1 while connections to an engine are refused: nothing listens at its address.",
            unit="none",
            no_value="No verdict yet",
            queries=(Query(dead, legend("engine")),),
            thresholds=(proven,),
            drawing="state-timeline",
        ),
        runbook=Runbook(
            first="Ask its supervisor whether it is being started: an engine that loads its model refuses connections, "
            "for minutes, and needs nothing.",
            right_now=(
                Look("the verdict", f"{site.select(ENGINE_STATE)} == 1"),
                Look(
                    "do the other engines carry it? their queues",
                    by("max", site.per("engine"), site.select(ENGINE_WAITING)),
                ),
                Look("GPUs that are lost", f"{site.select(GPU_UP)} == 0"),
            ),
            meaning=f"For {said(hold)} every connection was refused. That is no slow engine: where one listens, a "
            "connection is accepted however busy it is. A quick restart is over before that.",
            impact="All answers under way were lost. The proxy answers 502, or sends everything to the engines that "
            "are "
            "left, whose queues grow.",
            decide=(
                Choice("its supervisor starts it, first time", "it loads", "wait; vLLM listens when it is done"),
                Choice(
                    "it is started again and again",
                    "it dies while loading",
                    "read the reason: command 3, then mitigation 2",
                ),
                Choice("a GPU is lost", "it cannot start", "go to TokengapGpuLost"),
                Choice(
                    "it runs and listens, on its own host",
                    "its address changed, or a firewall refuses",
                    "correct `--engine` of the exporter, and the proxy",
                ),
            ),
            diagnosis=(
                Step(
                    "Is it still so?",
                    f"tokengap health {site.engine}",
                    f"{site.engine} dead: connection refused for 0.4 s",
                    code=2,
                ),
                Step(
                    "Is it being started, and for how long?",
                    "systemctl status vllm --no-pager -n 5",
                    "Active: active (running) since ...; 41s ago\n(or: Active: failed (Result: signal) since ...)",
                ),
                Step(
                    "Why did it end? The first error after the last good line; what follows is its echo.",
                    "journalctl -u vllm --since -30min --no-pager | grep -m 5 -E 'ERROR|Error:'",
                    "... ERROR ... EngineCore encountered a fatal error.\n"
                    "... torch.OutOfMemoryError: CUDA out of memory. ...",
                ),
            ),
            mitigation=(
                Measure(
                    "Take it out of the proxy's rotation, if the proxy does not do that by itself.",
                    "no more 502; the queue age of the others stays below the cut",
                ),
                Measure(
                    "Start it with the version and options that ran last.",
                    "`tokengap health` says `idle` or `busy`",
                ),
                Measure("Start a spare on other GPUs.", "it is in rotation, and the others' queues get younger"),
            ),
            do_not=(
                "Do not restart it while it loads: that begins from zero.",
                "Do not restart the other engines: they are busy with its work too.",
            ),
            rollback="When it was replaced by a spare: let the spare drain, then stop it.",
            false_alarm="An engine that was stopped on purpose: silence this for it, or take it out of the exporter's "
            "settings. A deployment whose load takes longer: silence it for that time.",
            limits="Told from this exporter's host. An engine that accepts connections and answers nothing is `blind` "
            "or `stuck`. One that comes and goes faster is TokengapEngineRestartLoop.",
        ),
    )


def engine_restart_loop(site: Site) -> Watch:
    """It comes back, and dies again."""
    most = Threshold(">", RESTARTS, f"{RESTARTS:.0f} restarts")
    within = said(RESTARTS_WITHIN)
    per_engine = site.per(*PER_ENGINE)
    restarts = by("max", per_engine, increase(site.select(ENGINE_RESTARTS), RESTARTS_WITHIN))
    return Watch(
        name="TokengapEngineRestartLoop",
        severity="warning",
        expr=f"{restarts} {most}",
        hold=0,
        labels=PER_ENGINE,
        summary="An engine restarts again and again.",
        description=f"{label('engine')} has had more than {most.said} in {within}.",
        panel=Panel(
            board="engine",
            title="Engine restarts",
            description=f"Processes of an engine that were new, in {within}: its start time changed, or its counters "
            "fell.",
            unit="none",
            no_value="No engine is watched",
            queries=(Query(restarts, legend("engine")),),
            thresholds=(most,),
        ),
        runbook=Runbook(
            first="Look who restarts it: a watchdog that takes a full queue for a fault, or the engine's own end. That "
            "decides all else.",
            right_now=(
                Look("restarts, by engine", restarts),
                Look("the verdict", f"{site.select(ENGINE_STATE)} == 1"),
                Look("tokens a second that it still makes", by("sum", per_engine, rate(site.select(TOKENS_OUT), 300))),
            ),
            meaning=f"More than {most.said} in {within}: its process is new each time. One restart is an event; these "
            "have a cause that a restart does not take away.",
            impact="Each restart loses every answer under way, and the users ask again. While it loads, the other "
            "engines carry its load.",
            decide=(
                Choice(
                    "a watchdog's line in the log before each end",
                    "a health check that uses what it guards",
                    "stop the watchdog, give it `tokengap health`: mitigation 1",
                ),
                Choice("out of memory, of GPU or host", "too much asked of it", "mitigation 2, then its options"),
                Choice("since a new version or option", "that", "roll back: mitigation 3"),
                Choice("the same request before each end", "a request that kills it", "refuse that one at the proxy"),
            ),
            diagnosis=(
                Step(
                    "Who ended it? A signal comes from outside, an error from within.",
                    "journalctl -u vllm --since -1h --no-pager | grep -E 'process exited|Stopping|fatal' | tail",
                    "... vllm.service: Main process exited, code=killed, status=9/KILL\n... Stopping vllm.service ...",
                ),
                Step(
                    "Did the kernel do it?",
                    "journalctl -k --since -1h --no-pager | grep -iE 'out of memory|NVRM: Xid'",
                    "... Out of memory: Killed process 19914 (VLLM::EngineCor) ...",
                ),
                Step(
                    "How is it now?",
                    f"tokengap health {site.engine}",
                    f"{site.engine} busy: running 4, waiting 9, generation +50 in 1.0 s",
                ),
            ),
            mitigation=(
                Measure(
                    "Disable the watchdog (`systemctl stop` of its timer; Kubernetes: remove the liveness probe).",
                    "no restart within one of its periods, while the queue is full",
                ),
                Measure(
                    "Give the engine less: lower its weight in the proxy.", "it stays up; queues stay below the cut"
                ),
                Measure("Start it with the version and options that ran last.", "it stays up for half an hour"),
            ),
            do_not=(
                "Do not restart it once more to see: that is what happens already.",
                "Do not shorten the watchdog's period or its deadline.",
            ),
            rollback="Raise the weight again step by step. A watchdog goes back in only with a check that sends no "
            "request to the model.",
            false_alarm="A rollout that restarts one engine several times. Elastic scaling of data parallel ranks "
            "makes "
            "counters anew in the same process; that is not counted.",
            limits="Restarts between two reads of the page count as one. One that dies before it ever listens is "
            "TokengapEngineDead.",
        ),
    )


def engine_blind(site: Site) -> Watch:
    """It answers, and says nothing."""
    most = Threshold(">", BLIND_SHARE, f"{BLIND_SHARE:.0%}")
    recent, window = said(site.recent), said(site.window)
    per_engine = site.per(*PER_ENGINE)
    blind = by("max", per_engine, over_time("avg", site.select(ENGINE_STATE, state="blind"), site.recent))
    return Watch(
        name="TokengapEngineBlind",
        severity="warning",
        expr=f"{blind} {most}",
        hold=60,
        labels=PER_ENGINE,
        summary="An engine cannot be judged.",
        description=f"{label('engine')} was blind for more than {most.said} of the last {recent}: its page does not "
        "come, or says nothing of an engine. Whether it is stuck nobody would see.",
        panel=Panel(
            board="engine",
            title="Engine blind",
            description="Share of the time in which the exporter could not tell what an engine does.",
            unit="percentunit",
            no_value="No verdict yet",
            queries=(Query(blind, legend("engine")),),
            thresholds=(most,),
        ),
        runbook=Runbook(
            first="Read the reason in the evidence: the first command under Diagnosis. Its words are the rows of the "
            "table below.",
            right_now=(
                Look("the verdict", f"{site.select(ENGINE_STATE)} == 1"),
                Look(
                    "how long a read of its page takes",
                    site.select(SOURCE_DURATION, source="engine"),
                ),
                Look("streams that its sockets show", site.select(ENGINE_OPEN)),
            ),
            meaning=f"For more than {most.said} of {recent} there was no page from which to judge: neither `busy` nor "
            "`stuck` can be said. It is no sign that the engine is ill.",
            impact="Tokens, queue age and verdict are missing, and with them every other alert about this engine. What "
            "sockets show goes on.",
            decide=(
                Choice(
                    "`no answer within`, streams open and old",
                    "its API server hangs, or is starved",
                    "look at its host's CPU; if requests get no bytes either: mitigation 3",
                ),
                Choice("`no answer within`, users are served", "the page is slow", "raise `--interval`: mitigation 1"),
                Choice("`no series of an engine on the page`", "wrong address, or statistics are off", "mitigation 2"),
                Choice("an HTTP status, as `401`", "a proxy or a key stands before it", "read the page past it"),
                Choice("`several backends`", "the address is a load balancer's", "name each engine by its own address"),
            ),
            diagnosis=(
                Step(
                    "What cannot be told, in the exporter's words.",
                    f"curl -s {site.exporter}/api/sources",
                    '[...,{"source":"engine","target":"worker","up":false,"seconds":0.83,'
                    '"detail":"no answer within 0.8 s"},...]',
                ),
                Step(
                    "The same from here, with more patience. Code 3 means that it cannot be told.",
                    f"tokengap health {site.engine} --window {window} --timeout 1s",
                    f"{site.engine} blind: no page within 1 s for 12.0 s",
                    code=3,
                ),
                Step(
                    "Does the page come at all? 200 and more than a second: it is slow; 000: it does not come.",
                    f"curl -s -m 3 -o /dev/null -w '%{{http_code}} %{{time_total}} s %{{size_download}} bytes\\n' "
                    f"{site.engine}/metrics",
                    "000 3.002215 s 0 bytes",
                    code=28,
                ),
            ),
            mitigation=(
                Measure(
                    "Give a slow page more time: a longer `--interval` of the exporter; a read may take 0.8 of it.",
                    "`/api/sources` says `up` for the engine",
                ),
                Measure(
                    "Start the engine without `--disable-log-stats`, or name its own address with `--engine`.",
                    "the exporter's page shows its model",
                ),
                Measure(
                    "Take the engine out of rotation, then restart it, if users get no byte from it either.",
                    "the verdict is `idle` or `busy`",
                ),
            ),
            do_not=(
                "Do not restart it on this alone: it may serve everybody well.",
                "Do not point a watchdog at `/health`: it answers 200 whatever the core does.",
            ),
            rollback="Set the former interval or address of the exporter.",
            false_alarm="An engine whose page moves only when a request ends (TensorRT-LLM without iteration "
            "statistics) is blind while a long answer is quiet: turn its statistics on.",
            limits="Told from this exporter's host: the way between them counts. Connections that are refused are "
            "TokengapEngineDead.",
        ),
    )


def coverage_low(site: Site) -> Watch:
    """A part of the traffic does not pass where it is watched."""
    least = Threshold("<", COVERED, f"{COVERED:.0%}")
    recent = said(site.recent)
    labels = ("job", "engine")
    port = urlsplit(site.engine).port or 80
    covered = over_time("avg", site.select(COVERAGE), site.recent)
    # Each exporter sees the share of its own proxies: those of several in front of one engine add up.
    seen = by("sum", site.per(*labels), covered)
    return Watch(
        name="TokengapCoverageLow",
        severity="warning",
        expr=f"{seen} {least}",
        hold=60,
        labels=labels,
        summary="A part of an engine's traffic is not seen.",
        description=f"Of the requests in {label('engine')} fewer than {least.said} had a socket that is watched, over "
        f"the last {recent}. The rest is in no count of orphans.",
        panel=Panel(
            board="engine",
            title="Coverage",
            description="Share of an engine's requests whose sockets are seen, by all exporters in front of it; 1 at "
            "rest.",
            unit="percentunit",
            no_value="No sockets can be read, or the engine's page cannot",
            queries=(Query(seen, legend("engine")),),
            thresholds=(least,),
        ),
        runbook=Runbook(
            first="Ask who calls the engine past the proxies that are watched: another proxy, a batch job, another "
            "host. "
            "The second command under Diagnosis lists the connections.",
            right_now=(
                Look("coverage, by exporter", covered),
                Look(
                    "requests in the engine, and streams seen",
                    f"{site.select(ENGINE_RUNNING)} + {site.select(ENGINE_WAITING)} - {site.select(ENGINE_OPEN)}",
                ),
                Look("tokens a second for nobody knows whom", rate(site.select(TOKENS_UNATTRIBUTED), site.lookback)),
            ),
            meaning=f"The engine says how many requests it has, the sockets how many streams lead to it. For {recent} "
            f"fewer than {least.said} of the former were among the latter.",
            impact="What is not seen is `unattributed`: it is counted neither as useful nor as orphaned. The orphan "
            "gap "
            "is understated, and queue age and slack are of the seen part.",
            decide=(
                Choice("connections from a proxy that is not watched", "a second way in", "watch it too: mitigation 1"),
                Choice(
                    "the proxy runs in a container or pod",
                    "its sockets are in another network namespace",
                    "mitigation 2",
                ),
                Choice(
                    "`unix_upstream` or `http2_clients` among the blind spots",
                    "the kernel shows no TCP socket of the engine's side",
                    "let the proxy use TCP to the engine, or accept it",
                ),
                Choice(
                    "no connection is missing",
                    "requests whose clients have left run on in the engine",
                    "look at the orphans of the hop `engine`",
                ),
            ),
            diagnosis=(
                Step(
                    "What can be seen of each hop, and what not?",
                    f"curl -s {site.exporter}/api/hops",
                    '[{"hop":"edge","proxy":null,"blind_spots":{"http2_clients":{"blind":false,"why":""},...}}]',
                ),
                Step(
                    "Who is connected to the engine? On the engine's host, with its port.",
                    f"ss -Htn state established sport = :{port} | awk '{{print $4}}' | sed 's/:[0-9]*$//' | sort | "
                    "uniq -c",
                    "     12 10.0.0.11\n      7 10.0.0.23",
                ),
            ),
            mitigation=(
                Measure(
                    "Name the other proxy: `--hop NAME=ADDRESS` of the exporter on its host. Two exporters may watch "
                    "one engine, under the same name.",
                    f"coverage is above {least.said} within {recent}",
                ),
                Measure("Let the exporter read those namespaces: `--netns all`.", "as before"),
            ),
            do_not=(
                "Do not trust a low orphan count while this fires.",
                "Do not close the other way in before you know who uses it.",
            ),
            rollback="Take the hop or the namespaces out of the settings again; nothing but what is shown changes.",
            false_alarm="A batch job that calls the engine directly from another host, on purpose. Watch its host too, "
            "or silence this for that engine.",
            limits="Engines of the same name at several exporters are taken for one engine, and their coverage is "
            "added "
            "up: give different engines different names. It says nothing while an engine is at rest.",
        ),
    )


WATCHES = (engine_stuck, engine_dead, engine_restart_loop, engine_blind, coverage_low)
