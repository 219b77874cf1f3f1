"""Watches over the GPUs: is one gone, is one slow, does one work for nothing?"""

from __future__ import annotations

from tokengap.bundle.promql import PER_ENGINE, PER_EXPORTER, by, over_time, rate, said
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Step, Threshold, Watch, label, legend
from tokengap.series.cost import BUSY_WITHOUT_TOKENS, ENGINE_GPUS
from tokengap.series.engines import ENGINE_STATE
from tokengap.series.gpus import (
    GPU_ENGINE,
    GPU_UP,
    LATCHED,
    POWER,
    SM_CLOCK,
    TEMPERATURE,
    THROTTLED,
    THROTTLING,
    UTILIZATION,
    XID_LAST,
)

#: Share of the time for which a fault may hold the clocks down: a hot moment is none.
THROTTLED_SHARE = 0.1

#: Share of the time for which a GPU may work without a token to show for it.
IDLE_SHARE = 0.5


def gpu_lost(site: Site) -> Watch:
    """A GPU answers its driver no more."""
    gone = Threshold("==", 0, "0")
    per_gpu = site.per(*PER_EXPORTER, "uuid")
    # The newest minute's best: one that is lost is looked for again and again, and while that is tried nobody knows.
    up = by("max", per_gpu, over_time("max", site.select(GPU_UP), site.lookback))
    lookback = said(site.lookback)
    return Watch(
        name="TokengapGpuLost",
        severity="critical",
        rehearsal="gpu-lost --duration 1m",
        expr=f"{up} {gone}",
        hold=2 * site.scrape,
        keep=300,
        labels=(*PER_EXPORTER, "uuid"),
        summary="A GPU is lost.",
        description=f"{label('uuid')} has not answered its driver for {lookback} and more. The engine that computes on "
        "it fails or hangs in its next step.",
        panel=Panel(
            board="gpu",
            title="GPUs up",
            description="1 while a GPU answers its driver, 0 while it is lost, missing or too slow to answer. Absent "
            "while no GPU can be read at all.",
            unit="none",
            no_value="No GPU is read",
            queries=(Query(by("min", per_gpu, site.select(GPU_UP)), legend("uuid")),),
            thresholds=(gone,),
            drawing="state-timeline",
        ),
        runbook=Runbook(
            first="Find the engine that computes on it (the first number) and take that engine out of the proxy's "
            "rotation: its next step fails or hangs.",
            right_now=(
                Look("whose GPU it is", f"{site.select(GPU_ENGINE)} == 1"),
                Look("GPUs that are lost, by engine", f"{site.select(ENGINE_GPUS, state='lost')} > 0"),
                Look("errors that the driver reported, and when", f"time() - {site.select(XID_LAST)}"),
            ),
            meaning=f"In {lookback} no read of this GPU was answered, while its driver is there. It fell off the bus, "
            "needs a reset, was taken away, or its driver hangs for it alone. A lost GPU does not come back by itself.",
            impact="Answers under way on its engine are lost, those of all other GPUs of the same engine too: tensor "
            "parallel ranks wait for each other. What it would have cost is in no total.",
            decide=(
                Choice("XID 79, or `nvidia-smi` says lost", "it fell off the bus", "reboot the host: mitigation 3"),
                Choice(
                    "`reset_required` in the row of the GPU on the exporter's page",
                    "the driver says what it needs",
                    "reset this GPU: mitigation 2",
                ),
                Choice(
                    "reason `missing`, its node was changed",
                    "it was taken out of this container or host",
                    "start the container anew, with the device",
                ),
                Choice(
                    "its engine is `busy` all the same",
                    "it is slow to answer, or the engine runs on other GPUs",
                    "look again in a minute, do not restart",
                ),
            ),
            diagnosis=(
                Step(
                    "Which one is it, and does its engine still have others?",
                    site.shows(ENGINE_GPUS, GPU_UP),
                    'tokengap_engine_gpus{engine="worker",state="up"} 1.0\n'
                    'tokengap_engine_gpus{engine="worker",state="lost"} 1.0\n'
                    'tokengap_gpu_up{uuid="GPU-11111111-2222-3333-4444-000000000000"} 1.0\n'
                    'tokengap_gpu_up{uuid="GPU-11111111-2222-3333-4444-000000000001"} 0.0',
                ),
                Step(
                    "Does its engine answer, or hang? Asks the engine's page, sends no request to the model.",
                    f"tokengap health {site.engine} --window {said(site.window)}",
                    f"{site.engine} stuck: running 4, waiting 2, nothing moved for 20.4 s, sockets not known",
                    code=1,
                ),
                Step(
                    "What did the driver say? On the host, as root. The number after the address is the XID.",
                    "dmesg -T | grep 'NVRM: Xid' | tail -5",
                    "[...] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
                ),
            ),
            mitigation=(
                Measure(
                    "Take its engine out of the proxy's rotation.",
                    "new requests go to other engines, and their queue age stays below the cut",
                ),
                Measure(
                    "Where the driver asks for a reset: stop the engine and the exporter (both hold the device), "
                    "`nvidia-smi --gpu-reset -i INDEX`, start both.",
                    "`tokengap_gpu_up` is 1 again",
                ),
                Measure("Drain the host and reboot it. After a second loss, replace the GPU.", "as before"),
            ),
            do_not=(
                "Do not only restart the engine on the same GPUs: it fails again, minutes later, while it loads.",
                "Do not SIGKILL what hangs in the driver: that has frozen the other GPUs of a host.",
            ),
            rollback="Put the engine back into rotation when all its GPUs are up and `tokengap health` says `idle`.",
            false_alarm="A GPU taken out on purpose: restart the exporter, it forgets what it had seen. A driver that "
            "needs more than 1.5 s for each answer, as without persistence mode: `nvidia-smi -pm 1`.",
            limits="Where the driver's library crashes or hangs with the lost GPU, no GPU can be read: that is "
            "TokengapSourceFailing, for the source `gpu`. A GPU that computes wrongly is up.",
        ),
    )


def gpu_throttled(site: Site) -> Watch:
    """A fault holds the clocks down."""
    recent, most = said(site.recent), Threshold(">", THROTTLED_SHARE, f"{THROTTLED_SHARE:.0%}")
    # Seconds where the driver counts them; else, of what was seen at each scrape, how much.
    counted, seen = rate(site.select(THROTTLED), site.recent), over_time("avg", site.select(THROTTLING), site.recent)
    held = f"\n  {counted}\n  or\n  {seen}\n"
    by_gpu = by("max", site.per(*PER_EXPORTER, "uuid"), held)
    by_fault = by("max", site.per(*PER_EXPORTER, "uuid", "reason"), held)
    return Watch(
        name="TokengapGpuThrottled",
        severity="warning",
        expr=f"{by_gpu} {most}",
        hold=300,
        labels=(*PER_EXPORTER, "uuid"),
        summary="A fault holds the clocks of a GPU down.",
        description=f"The clocks of {label('uuid')} were held down for more than {most.said} of the last {recent}, by "
        "heat or by its power supply.",
        panel=Panel(
            board="gpu",
            title="GPU throttled",
            description="Share of the time in which a fault held the clocks down, by fault. Idle clocks and the power "
            "cap of the software are no faults and not in here.",
            unit="percentunit",
            no_value="No GPU tells why it is slow",
            queries=(Query(by_fault, f"{legend('uuid')} {legend('reason')}"),),
            thresholds=(most,),
        ),
        runbook=Runbook(
            first="Read the fault: `hw_thermal` and `sw_thermal` are heat, `power_brake` is the power supply of the "
            "host. The rest follows from it.",
            right_now=(
                Look("which fault, and for how much of the time", f"{by_fault} > 0"),
                Look("temperatures", by("max", site.per(*PER_EXPORTER, "uuid"), site.select(TEMPERATURE))),
                Look("clocks of all GPUs, to compare", site.select(SM_CLOCK)),
            ),
            meaning=f"For more than {most.said} of {recent} the GPU ran slower than it was asked to, and for a further "
            "5m since. Seconds in peaks are usual; this is a state.",
            impact="Every token of its engine comes later, and of all GPUs of that engine: ranks wait for the slowest. "
            "Queues get older at a load that was no trouble before.",
            decide=(
                Choice("heat, on one GPU of the host", "its fan, its cooler or its slot", "move load, call hardware"),
                Choice(
                    "heat, on all GPUs of the host or rack",
                    "the room, the fans of the host, a blocked inlet",
                    "call the data centre",
                ),
                Choice(
                    "`power_brake`", "the host's power supply asked for it", "call the data centre: power, not heat"
                ),
                Choice(
                    "`hw_slowdown` alone",
                    "heat or power, and the driver does not tell which",
                    "temperature high: heat; else power",
                ),
            ),
            diagnosis=(
                Step(
                    "Which fault is it, and since when does it grow? Ask twice; what grows is the fault.",
                    site.shows(THROTTLED, THROTTLING),
                    'tokengap_gpu_throttled_seconds_total{reason="hw_thermal",uuid="GPU-..."} 412.5\n'
                    'tokengap_gpu_throttling{reason="hw_thermal",uuid="GPU-..."} 1.0',
                ),
                Step(
                    "The same from the driver, with temperature and clocks, on the host.",
                    "nvidia-smi --query-gpu=index,temperature.gpu,power.draw,clocks.sm,clocks_event_reasons.active "
                    "--format=csv",
                    "index, temperature.gpu, power.draw [W], clocks.current.sm [MHz], clocks_event_reasons.active\n"
                    "0, 87, 412.20 W, 1155 MHz, 0x0000000000000048",
                ),
            ),
            mitigation=(
                Measure(
                    "Give its engine less: lower its weight in the proxy.",
                    "the share falls; the queue age of the engine too",
                ),
                Measure(
                    "Lower the power limit of the GPUs: `nvidia-smi -i INDEX -pl WATTS`. Slower for sure, and evenly.",
                    "temperature falls below the slowdown's",
                ),
                Measure("Drain the host and have it serviced.", "no share above 0 under the same load"),
            ),
            do_not=(
                "Do not restart the engine: it comes back to a hot GPU.",
                "Do not raise clocks or power limits to make up for it.",
            ),
            rollback="Set the former power limit (`nvidia-smi -q -d POWER` shows the default) and weight.",
            false_alarm="Not known. What is normal, such as idle clocks or the power cap of the software, is not "
            "counted.",
            limits="`hw_slowdown`, and all faults on older drivers, are seen at reads only, so short ones are missed.",
        ),
    )


def gpu_busy_without_tokens(site: Site) -> Watch:
    """A GPU computes and its engine has nothing to show for it."""
    recent, most = said(site.recent), Threshold(">", IDLE_SHARE, f"{IDLE_SHARE:.0%}")
    per_engine = site.per(*PER_ENGINE)
    share = by("max", per_engine, rate(site.select(BUSY_WITHOUT_TOKENS), site.recent))
    return Watch(
        name="TokengapGpuBusyWithoutTokens",
        severity="warning",
        expr=f"{share} {most}",
        hold=60,
        labels=PER_ENGINE,
        summary="A GPU computes and its engine generates no tokens.",
        description=f"A GPU of {label('engine')} was at work for more than {most.said} of the last {recent} while the "
        "engine was idle or stuck.",
        panel=Panel(
            board="gpu",
            title="GPU busy without tokens",
            description="Share of the time in which a GPU of the engine worked while no engine on it had a request or "
            "made a token.",
            unit="percentunit",
            no_value="No engine is known to have a GPU",
            queries=(Query(share, legend("engine")),),
            thresholds=(most,),
        ),
        runbook=Runbook(
            first="See who computes there: the first command under Diagnosis lists the processes on each GPU. One that "
            "is not the engine's is the answer.",
            right_now=(
                Look("the engine's verdict", f"{site.select(ENGINE_STATE)} == 1"),
                Look("its GPUs", site.select(GPU_ENGINE)),
                Look("power drawn", site.select(POWER)),
            ),
            meaning="A kernel ran on the GPU while its engine had no request in flight, or is stuck, and made no "
            "token. "
            "A utilization that is latched after a crash is known as such and not counted.",
            impact="Power and a GPU are paid for and nobody is answered. A stranger on the GPU makes the engine slow "
            "as "
            "soon as it has work, and can take its memory.",
            decide=(
                Choice(
                    "a process that is not the engine's",
                    "somebody else's job, or one left from before",
                    "ask its owner, then end it: mitigation 1",
                ),
                Choice(
                    "only the engine's, verdict `stuck`",
                    "it spins, as in a collective that waits",
                    "TokengapEngineStuck",
                ),
                Choice(
                    "only the engine's, verdict `idle: stale gauges`, or steps without tokens",
                    "it computes for requests its front end dropped",
                    "wait for them to end, then restart: mitigation 2",
                ),
                Choice(
                    "only the engine's, verdict `idle`, power at rest",
                    "the utilization is latched, and that cannot be told here",
                    "compare the power with another idle GPU's; see Limits",
                ),
            ),
            diagnosis=(
                Step(
                    "Who computes there? On the host, where all processes are shown.",
                    "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv",
                    "gpu_uuid, pid, used_gpu_memory [MiB]\nGPU-11111111-2222-3333-4444-000000000000, 19914, 61440 MiB",
                ),
                Step(
                    "Is the engine idle, or stuck?",
                    f"tokengap health {site.engine}",
                    f"{site.engine} idle: running 0, waiting 0",
                ),
                Step(
                    "Which GPUs are meant, and what does each do?",
                    site.shows(GPU_ENGINE, UTILIZATION, LATCHED, POWER),
                    'tokengap_gpu_engine_info{by="processes",engine="worker",uuid="GPU-..."} 1.0\n'
                    'tokengap_gpu_utilization_ratio{uuid="GPU-..."} 0.98\n'
                    'tokengap_gpu_utilization_latched{uuid="GPU-..."} 0.0\n'
                    'tokengap_gpu_power_watts{scope="gpu",uuid="GPU-..."} 631.95',
                ),
            ),
            mitigation=(
                Measure(
                    "End the stranger with SIGTERM, after its owner agreed.",
                    "utilization is 0 while the engine is idle",
                ),
                Measure(
                    "Take the engine out of rotation, let it drain, restart it.", "as before, and `health` says `idle`"
                ),
            ),
            do_not=(
                "Do not end processes with SIGKILL: in the middle of a kernel that can latch or freeze the GPU.",
                "Do not restart an engine that became `busy` meanwhile.",
            ),
            rollback="Put the engine back into rotation.",
            false_alarm="A GPU that is shared on purpose with a job that is no engine: silence this for its engine. "
            "One "
            "that is shared with another watched engine counts only while both have nothing to do.",
            limits="Utilization is the share of time in which any kernel ran, not how much of the GPU worked. Not seen "
            "on MIG, Jetson and WSL2, which do not tell it. An engine whose GPUs are not known has none here.",
        ),
    )


WATCHES = (gpu_lost, gpu_throttled, gpu_busy_without_tokens)
