"""The exporter about itself: does it beat, can it read its sources, and how exact is what it says."""

from __future__ import annotations

import platform

from tokengap import __version__
from tokengap.series.declare import Sample, Series, one_of
from tokengap.view import ACCOUNTINGS


def _overall(value: float) -> tuple[Sample]:
    """Return the one sample of a series without labels."""
    return (Sample((), value),)


SOURCE_UP = Series(
    name="tokengap_source_up",
    kind="gauge",
    help="1 when the source was read in the newest beat, 0 when not; why not stands on the live page. Values that "
    "rest on a failed source are missing, not 0; the rest goes on.",
    labels=("source", "target"),
    read=lambda view: (Sample((s.source, s.target), float(s.up)) for s in view.sources),
)

SOURCE_DURATION = Series(
    name="tokengap_source_duration_seconds",
    kind="gauge",
    help="How long reading the source took in the newest beat, in seconds, failed reads included. Near the interval of "
    "the beat it makes beats late.",
    labels=("source", "target"),
    read=lambda view: (Sample((s.source, s.target), s.seconds) for s in view.sources),
)

LAST_BEAT = Series(
    name="tokengap_last_beat_timestamp_seconds",
    kind="gauge",
    help="Unix time of the newest beat, the one this page shows. time() minus this is the age of every value here; "
    "alert when it exceeds a few intervals.",
    labels=(),
    read=lambda view: _overall(view.wall),
)

BEAT_INTERVAL = Series(
    name="tokengap_beat_interval_seconds",
    kind="gauge",
    help="Configured seconds between two beats. Sources are read on this timer and not on scrapes, because ages and "
    "verdicts need a steady pulse; all scrapers share it.",
    labels=(),
    read=lambda view: _overall(view.interval),
)

BEATS = Series(
    name="tokengap_beats_total",
    kind="counter",
    help="Beats since this exporter started: rounds of reading all sources and joining them.",
    labels=(),
    read=lambda view: _overall(view.beats),
)

BEATS_LATE = Series(
    name="tokengap_beats_late_total",
    kind="counter",
    help="Beats that came more than half an interval after they were due: a starved host or a suspended process. What "
    "happened in the gap is told by counters, not guessed.",
    labels=(),
    read=lambda view: _overall(view.late_beats),
)

BEATS_DEGRADED = Series(
    name="tokengap_beats_degraded_total",
    kind="counter",
    help="Beats in which the sockets or an engine's page could not be read, or events of sockets were lost, or that "
    "came late. tokengap_source_up says what it is now.",
    labels=(),
    read=lambda view: _overall(view.degraded_beats),
)

ACCOUNTING_MODE = Series(
    name="tokengap_accounting_mode",
    kind="gauge",
    help="How exact the token ledger is, 1 for the mode in use: exact (final counters of closed sockets are seen), "
    "beat (up to one beat of a closing socket is missed), state (no bytes), none (no sockets).",
    labels=("mode",),
    read=lambda view: one_of(ACCOUNTINGS, view.accounting),
)

EVENTS_LOST = Series(
    name="tokengap_socket_events_lost_total",
    kind="counter",
    help="Times the kernel dropped events of closed sockets because this exporter was too slow to take them. Each one "
    "makes the ledger less exact than its mode says.",
    labels=(),
    read=lambda view: _overall(view.events_lost),
)

NETNS = Series(
    name="tokengap_netns",
    kind="gauge",
    help="Network namespaces by state: watched (their sockets are read; the exporter's own is one of them), failed "
    "(asked for with --netns and not there, or not to be read; why stands on the live page).",
    labels=("state",),
    read=lambda view: (Sample((state,), float(count)) for state, count in view.namespaces.items()),
)

BUILD_INFO = Series(
    name="tokengap_build_info",
    kind="gauge",
    help="Always 1: the version of this exporter and of the Python that runs it.",
    labels=("version", "python"),
    read=lambda _: (Sample((__version__, platform.python_version()), 1.0),),
)

ITSELF = (
    SOURCE_UP,
    SOURCE_DURATION,
    LAST_BEAT,
    BEAT_INTERVAL,
    BEATS,
    BEATS_LATE,
    BEATS_DEGRADED,
    ACCOUNTING_MODE,
    EVENTS_LOST,
    NETNS,
    BUILD_INFO,
)
