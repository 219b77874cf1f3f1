"""What watches over streams have in common: where clients have left, and the steps that find it."""

from __future__ import annotations

from typing import Final

from tokengap.bundle.promql import Match, any_of, by, increase, rate
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Measure, Step, Threshold
from tokengap.series.streams import STREAMS, STREAMS_ENDED
from tokengap.series.tokens import TOKENS_ORPHANED

#: Clients that are not there any more.
LEFT: Final = any_of("vanished", "gone")

#: How the streams of those clients end: their engine was told, or ran them to their end.
ENDS_LEFT: Final = any_of("cancelled", "orphaned")

#: Seconds of which rates are taken for warnings: some minutes, so that a single client who leaves is no trend.
TREND: Final = 300.0

#: Seconds of which endings are counted. Streams are long; a few minutes hold too few of them.
ENDINGS: Final = 600.0

#: Share of those who left whose streams ran on, above which that is how something works. Where all is well it is 0.
RAN_ON: Final = Threshold(">", 0.1, "10%")


def orphans(site: Site, *labels: str) -> str:
    """Return how many streams are held for clients who left."""
    return by("sum", site.per(*labels), site.select(STREAMS, client=LEFT))


def orphaned_tokens(site: Site, *labels: str) -> str:
    """Return how many tokens a second are generated for clients who left."""
    return by("sum", site.per(*labels), rate(site.select(TOKENS_ORPHANED), site.lookback))


def ended(site: Site, labels: tuple[str, ...], how: str | Match, within: float = ENDINGS, **more: str | Match) -> str:
    """Return how many streams ended like this in the last seconds. ``labels`` are as of :meth:`Site.per`."""
    return by("sum", labels, increase(site.select(STREAMS_ENDED, how=how, **more), within))


def streams_step(site: Site) -> Step:
    """Return the step that shows the streams one by one."""
    return Step(
        "Which streams, since when, and where they are held (`leaks_at`).",
        f"curl -s {site.exporter}/api/streams",
        '[{"id":3,"engine":"worker","hop":"edge","client":"gone",...,"leaks_at":"edge","age_seconds":31.2,...}]',
    )


def query_step(site: Site, why: str, query: str, prints: str) -> Step:
    """Return the step that asks Prometheus for something."""
    return Step(why, f"promtool query instant {site.prometheus} '{query}'", prints)


LET_GO: Final = Measure(
    "Let the proxy close its upstream connection when a client leaves (nginx: remove `proxy_ignore_client_abort on`; "
    "HAProxy: `option abortonclose` in `defaults`) and reload it.",
    "new streams of clients who leave end within a second, and `gone` does not come back",
)
