"""Watches over the exporter itself: is what the others rest on still true?"""

from __future__ import annotations

from tokengap.bundle.promql import PER_EXPORTER, UP, any_of, by, increase, on, over_time, said
from tokengap.bundle.site import REPOSITORY, Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Step, Threshold, Watch, label, legend
from tokengap.series.gpus import READER_INFO
from tokengap.series.itself import (
    ACCOUNTING_MODE,
    BEAT_INTERVAL,
    BEATS,
    BEATS_LATE,
    LAST_BEAT,
    NETNS,
    SOURCE_DURATION,
    SOURCE_UP,
)

#: Share of its reads that a source must answer.
READ_SHARE = 0.5

#: Beats that the newest page may be old, and the share of beats that may come late.
BEATS_OLD, LATE_SHARE = 5.0, 0.1

#: Sources that are always wanted. An engine's page has a verdict, and alerts of its own.
_WANTED = ("sockets", "proxy", "processes")

#: Why a host without GPUs has none. Nothing is wrong with it.
_NO_GPUS = ("library_not_found", "driver_not_loaded")


def down(site: Site) -> Watch:
    """Nobody watches."""
    gone = Threshold("==", 0, "0")
    up = site.select(UP, job=site.job)
    hold = max(60.0, 4 * site.scrape)
    return Watch(
        name="TokengapDown",
        severity="critical",
        rehearsal="exporter-gone --duration 5m",
        expr=f"{up} {gone}\nor\nabsent({up})",
        hold=hold,
        labels=PER_EXPORTER,
        summary="The exporter cannot be scraped.",
        description="Prometheus gets no page from {{ with $labels.instance }}{{ . }}{{ else }}any exporter of the job "
        f"{site.job}{{{{ end }}}} since {said(hold)}. No other alert of its engines can fire until it answers.",
        outlives_exporter=True,
        panel=Panel(
            board="exporter",
            title="Exporter scraped",
            description="1 where the newest scrape of an exporter succeeded, 0 where it failed.",
            unit="none",
            no_value="No exporter is scraped",
            queries=(Query(up, legend("instance")),),
            thresholds=(gone,),
            drawing="state-timeline",
        ),
        runbook=Runbook(
            first="Ask the exporter itself, from its own host: the first command under Diagnosis. Its answer tells "
            "which side is at fault.",
            right_now=(
                Look("which exporters answer", up),
                Look("when each last read its sources", f"time() - {site.select(LAST_BEAT)}"),
            ),
            meaning=f"Prometheus could not read the page for {said(hold)}, or scrapes no exporter at all. Engines "
            "and proxies may be well: this says only that nobody looks.",
            impact="Blindness. Deadlines can be missed and tokens be generated for nobody without an alert. Requests "
            "of users do not pass the exporter and are not harmed by this.",
            decide=(
                Choice(
                    "it answers on its host",
                    "the way from Prometheus to it is cut",
                    "network, firewall, address: mitigation 1",
                ),
                Choice(
                    "refused on its host", "the process does not run", "start it and read why it ended: mitigation 2"
                ),
                Choice("it hangs on its host", "the process is stopped or starved", "look at the host: memory, CPU"),
                Choice(
                    "no instance in the alert", "Prometheus knows no target", "its scrape configuration: mitigation 3"
                ),
            ),
            diagnosis=(
                Step(
                    "Does it answer where it runs?",
                    f"curl -sS -m 5 {site.exporter}/-/healthy",
                    "healthy",
                ),
                Step(
                    "What can it read on this host? Lines marked `attention` need you.",
                    f"tokengap doctor --engine {site.engine}",
                    "ok         sockets: ...\nok         engine ...",
                ),
                Step(
                    "Why did it end?",
                    "journalctl -u tokengap -n 30 --no-pager",
                    'level=error msg="..." (the last line before the end names the setting or the part)',
                ),
            ),
            mitigation=(
                Measure("Mend the way: open its port for Prometheus.", "`up` is 1 after the next scrape"),
                Measure(
                    "Start it again: `systemctl restart tokengap`. It holds no state that a restart loses.",
                    "`/-/ready` answers 200 within two beats",
                ),
                Measure(
                    "Mend the scrape configuration and reload Prometheus.",
                    f"a target with the job {site.job} is on its page of targets",
                ),
            ),
            do_not=(
                "Do not restart engines or proxies because of this: nothing is known about them.",
                "Do not silence it for longer than the work takes: no other alert here fires meanwhile.",
            ),
            rollback="If it went down with a new version or setting, install or set the former one; `tokengap serve` "
            "names a wrong setting in its one line.",
            false_alarm="A host that was taken away on purpose: remove it from Prometheus' targets.",
            limits=f"An exporter that answers with old values is not down. This page is read at {REPOSITORY}, because "
            "the exporter that could serve it is the one that is gone.",
        ),
    )


def source_failing(site: Site) -> Watch:
    """A source is not read."""
    least = Threshold("<", READ_SHARE, f"{READ_SHARE:.0%}")
    recent = said(site.recent)
    labels = (*PER_EXPORTER, "source", "target")
    answered = _answered(site)
    return Watch(
        name="TokengapSourceFailing",
        severity="warning",
        expr=f"{answered} {least}",
        hold=60,
        labels=labels,
        summary="The exporter cannot read one of its sources.",
        description=f"{label('instance')} has read {{{{ $labels.source }}}}"
        "{{ with $labels.target }} of {{ . }}{{ end }} in fewer than "
        f"{least.said} of the beats of the last {recent}. What rests on it is missing.",
        panel=Panel(
            board="exporter",
            title="Sources read",
            description="Share of the beats in which a source was read. GPUs of a host without a driver, and engines, "
            "whose page has a verdict, are left out.",
            unit="percentunit",
            no_value="No exporter is scraped",
            queries=(Query(answered, f"{legend('instance')} {legend('source')} {legend('target')}"),),
            thresholds=(least,),
        ),
        runbook=Runbook(
            first="Read why, in the exporter's words: the first command under Diagnosis. Each failed source says it in "
            "one line.",
            right_now=(
                Look("which sources are not read", f"{site.select(SOURCE_UP)} == 0"),
                Look("how long each takes", site.select(SOURCE_DURATION)),
                Look("how exact the token ledger still is", f"{site.select(ACCOUNTING_MODE)} == 1"),
            ),
            meaning=f"In fewer than {least.said} of the beats of {recent} the source was read. The others go on: each "
            "source fails alone.",
            impact="Without `sockets`: no orphans, no queue age from sockets. Without `proxy`: no queue inside it, no "
            "HTTP/2 streams. Without `gpu`: no cost. Without `processes`: no slots, no GPU of an engine. Alerts that "
            "rest on it are silent.",
            decide=(
                Choice(
                    "`sockets`", "the kernel refuses, or the host is starved", "command 2 says which right is missing"
                ),
                Choice(
                    "`proxy`, no such file, or permission denied",
                    "its admin interface moved or may not be opened",
                    "mitigation 1",
                ),
                Choice("`gpu`, `hung` or `crashed`", "a GPU may be lost", "`dmesg` on the host, then TokengapGpuLost"),
                Choice(
                    "`gpu`, `version_mismatch`",
                    "the driver was upgraded and not loaded",
                    "reboot the host: mitigation 3",
                ),
                Choice(
                    "`gpu`, `no_gpus` in a container", "its devices are gone, as after a daemon-reload", "start it anew"
                ),
                Choice("several at once, `no answer within`", "the host is starved", "go to TokengapBeatLate"),
            ),
            diagnosis=(
                Step(
                    "Why, for each source? `up` is false where it failed, and `detail` says why.",
                    f"curl -s {site.exporter}/api/sources",
                    '[{"source":"sockets","target":"","up":true,"seconds":0.0096,"detail":"sock_diag, ..."},...]',
                ),
                Step(
                    "What is missing here, and what to do about it? On its host, as its user. Lines that need you "
                    "say `attention`, and then the code is 1.",
                    f"tokengap doctor --engine {site.engine}",
                    "ok         sockets: sock_diag will be used, with every column; it needs no privilege\n"
                    "ok         destroy events: on: the final counters of each socket that ends are read",
                ),
            ),
            mitigation=(
                Measure(
                    "Give the exporter's user access to the proxy's interface, or correct its address in the settings.",
                    "the source is `up` in `/api/sources`, within two beats",
                ),
                Measure(
                    "Leave a source out that this site does not have: `--no-gpu`, or no interface of the proxy.",
                    "it is not in `/api/sources` any more",
                ),
                Measure(
                    "Drain the host and reboot it, for a driver that hangs.", "`tokengap_gpu_up` is 1 for each GPU"
                ),
            ),
            do_not=(
                "Do not run it as root to be rid of this: `tokengap doctor` names the one right that is missing.",
                "Do not read missing values as 0: nothing is known.",
            ),
            rollback="Set the former address or right.",
            false_alarm="A proxy that is stopped on purpose. A host without a GPU driver is not counted.",
            limits=f"Network namespaces that cannot be read are no source of their own: `{NETNS}` counts them. A "
            "source "
            "that answers nonsense is up.",
        ),
    )


def _answered(site: Site) -> str:
    """Return the share of the beats in which each source was read, without the GPUs of a host that has none."""
    per_source, per_exporter = site.per(*PER_EXPORTER, "source", "target"), site.per(*PER_EXPORTER)
    wanted = by("min", per_source, over_time("avg", site.select(SOURCE_UP, source=any_of(*_WANTED)), site.recent))
    gpus = by("min", per_source, over_time("avg", site.select(SOURCE_UP, source="gpu"), site.recent))
    none_here = by(
        "max", per_exporter, over_time("max", site.select(READER_INFO, reason=any_of(*_NO_GPUS)), site.recent)
    )
    return f"(\n  {wanted}\n  or\n  {gpus}\n  unless {on(per_exporter)}\n  {none_here}\n)"


def beat_late(site: Site) -> Watch:
    """What the page shows is old, or comes when it may."""
    old = Threshold(">", BEATS_OLD, f"{BEATS_OLD:.0f} beats")
    most = Threshold(">", LATE_SHARE, f"{LATE_SHARE:.0%}")
    recent = said(site.recent)
    per_exporter = site.per(*PER_EXPORTER)
    newest, beat = site.select(LAST_BEAT), said(site.beat)
    # As old as it was when it was scraped, so that a longer interval between scrapes is no fault of the beat.
    age = by("max", per_exporter, f"(timestamp({newest}) - {newest}) / {site.select(BEAT_INTERVAL)}")
    late = increase(site.select(BEATS_LATE), site.recent)
    share = by("max", per_exporter, f"{late} / {increase(site.select(BEATS), site.recent)}")
    return Watch(
        name="TokengapBeatLate",
        severity="warning",
        expr=f"{age} {old}\nor\n{share} {most}",
        hold=30,
        keep=60,
        labels=PER_EXPORTER,
        summary="The exporter shows old values, or its beats come late.",
        description=f"The page of {label('instance')} was older than {old.said}, or more than {most.said} of its beats "
        f"in {recent} came late. Ages and verdicts are coarser than they say.",
        panel=Panel(
            board="exporter",
            title="Age of the newest beat",
            description="How old the values were when they were scraped, in beats. One is usual.",
            unit="none",
            no_value="No exporter is scraped",
            queries=(Query(age, legend("instance")),),
            thresholds=(old,),
        ),
        runbook=Runbook(
            first="Look at the host: is its CPU or memory all taken, was it suspended? The exporter needs little, and "
            "suffers first.",
            right_now=(
                Look("age of the page when it was scraped, in beats", age),
                Look("share of the beats that came late", share),
                Look("which source takes long", f"topk(5, {site.select(SOURCE_DURATION)})"),
            ),
            meaning=f"A beat of {beat} reads all sources and joins them. Each has its deadline, so a beat that is late "
            "means a process that gets no CPU, a suspended host, or a join that takes too long.",
            impact="No token is lost: totals are counted on. But ages, queue age and verdicts are late by as much, and "
            f"alerts with them. A page that stands still shows a calm that is {old.said} old and more.",
            decide=(
                Choice("load of the host above its CPUs", "the host is starved", "mitigation 1"),
                Choice("one source takes near a beat", "it is slow", "see why on the exporter's page; mitigation 2"),
                Choice(
                    "tens of thousands of streams, `sockets` fast",
                    "the join takes the time",
                    "mitigation 2: longer beats",
                ),
                Choice("the age is steady and shares are 0", "clocks of host and Prometheus differ", "see False alarm"),
            ),
            diagnosis=(
                Step(
                    "Does it beat? Ask twice, some seconds apart: the first number has to grow by one a beat, the "
                    "second "
                    "not.",
                    site.shows(BEATS, BEATS_LATE),
                    "tokengap_beats_total 4321.0\ntokengap_beats_late_total 2.0",
                ),
                Step(
                    "Is the host starved? `some avg10` is the share of the time in which somebody waited for a CPU.",
                    "cat /proc/loadavg /proc/pressure/cpu",
                    "7.92 6.11 3.40 9/412 20672\nsome avg10=61.27 avg60=48.90 avg300=22.15 total=918273645",
                ),
                Step(
                    "Which source takes long?",
                    site.shows(SOURCE_DURATION),
                    'tokengap_source_duration_seconds{source="sockets",target=""} 0.0096\n'
                    'tokengap_source_duration_seconds{source="engine",target="worker"} 0.0218',
                ),
            ),
            mitigation=(
                Measure(
                    "Give it CPU: move what starves the host, or raise its share (`systemctl set-property tokengap "
                    "CPUWeight=1000`).",
                    "the late total stands still",
                ),
                Measure(
                    "Beat less often: a longer `--interval`; give the same to `tokengap bundle`.",
                    "as before, and ages are coarser by as much",
                ),
                Measure("Restart it, if its total of beats stands still. It holds no state that is lost.", "it grows"),
            ),
            do_not=("Do not act on this exporter's verdicts meanwhile: `tokengap health` asks the engine itself.",),
            rollback="Set the former interval or CPU weight.",
            false_alarm=f"The clocks of the host and of Prometheus differ by more than {old.said}: mend the time "
            "service. "
            "A laptop that slept.",
            limits="A process that does not answer at all is TokengapDown.",
        ),
    )


WATCHES = (down, source_failing, beat_late)
