"""Watches over the exporter itself: is what the others rest on still true?"""

from __future__ import annotations

from tokengap.bundle.promql import PER_EXPORTER, UP, said
from tokengap.bundle.site import REPOSITORY, Site
from tokengap.bundle.watch import Choice, Look, Measure, Panel, Query, Runbook, Step, Threshold, Watch, legend
from tokengap.series.itself import LAST_BEAT


def down(site: Site) -> Watch:
    """Nobody watches."""
    gone = Threshold("==", 0, "0")
    up = site.select(UP, job=site.job)
    hold = max(60.0, 4 * site.scrape)
    return Watch(
        name="TokengapDown",
        severity="critical",
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


WATCHES = (down,)
