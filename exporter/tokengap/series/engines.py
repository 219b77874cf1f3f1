"""The engine: the verdict and what it rests on, and both sides of what the engine and the sockets say."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from tokengap.series.declare import Sample, Series, one_of, per_engine
from tokengap.view import ENGINE_STATES, View


def public_url(url: str) -> str:
    """Return ``url`` without what may be a secret: user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _states(view: View) -> Iterable[Sample]:
    for engine in view.engines:
        yield from one_of(ENGINE_STATES, engine.state, engine.name)


def _open(view: View) -> Iterable[Sample]:
    if view.accounting != "none":
        for engine in view.engines:
            yield Sample((engine.name,), engine.open_streams)


def _skipped(view: View) -> Iterable[Sample]:
    for engine in view.engines:
        for reason, lines in engine.skipped.items():
            yield Sample((engine.name, reason), lines)


ENGINE_STATE = Series(
    name="tokengap_engine_state",
    kind="gauge",
    help="The verdict on the engine, 1 for the state it is in: busy, idle, stuck, restarted, dead, blind (no usable "
    "metrics), sleeping. Never restart an engine that is busy.",
    labels=("engine", "state"),
    read=_states,
)

ENGINE_RESTARTS = Series(
    name="tokengap_engine_restarts_total",
    kind="counter",
    help="Restarts of the engine seen since this exporter started: its start time changed or its counters fell. Totals "
    "go on across a restart.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.restarts),
)

ENGINE_PROGRESS_AGE = Series(
    name="tokengap_engine_progress_age_seconds",
    kind="gauge",
    help="Seconds since the engine last showed progress of any kind. Means something only while work is in flight: an "
    "idle engine makes none.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.progress_age),
)

ENGINE_GHOST_STEPS = Series(
    name="tokengap_engine_ghost_steps_total",
    kind="counter",
    help="Scheduler steps of the engine that brought no counted token while it ran more requests than have an open "
    "socket: work for requests that its front end dropped.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.ghost_steps),
)

ENGINE_RUNNING = Series(
    name="tokengap_engine_requests_running",
    kind="gauge",
    help="Requests the engine says it is running. Compare with the open streams: what runs without a socket runs for "
    "nobody, or for clients this exporter cannot see.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.running),
)

ENGINE_WAITING = Series(
    name="tokengap_engine_requests_waiting",
    kind="gauge",
    help="Requests the engine says are waiting for a slot. How long the first of them has waited is the queue age.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.waiting),
)

ENGINE_OPEN = Series(
    name="tokengap_engine_streams_open",
    kind="gauge",
    help="Streams in flight to the engine as its sockets show them: the other side of requests running plus waiting.",
    labels=("engine",),
    read=_open,
)

COVERAGE = Series(
    name="tokengap_coverage_ratio",
    kind="gauge",
    help="Streams seen by sockets over requests running plus waiting in the engine. Below 1 a part of the traffic does "
    "not pass the hops that are watched, and its tokens are unattributed.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.coverage),
)

ENGINE_INFO = Series(
    name="tokengap_engine_info",
    kind="gauge",
    help="Always 1: where the engine's page is read (without credentials), which models it names, and which family of "
    "engines it is of. Join on engine to put these labels on other series.",
    labels=("engine", "url", "model", "family"),
    read=lambda view: (Sample((e.name, public_url(e.url), ",".join(e.models), e.family), 1.0) for e in view.engines),
)

LINES_SKIPPED = Series(
    name="tokengap_engine_page_lines_skipped_total",
    kind="counter",
    help="Lines of the engine's page that could not be used, by reason. The rest of the page counts; a lasting rate "
    "means that the engine writes what this exporter cannot read.",
    labels=("engine", "reason"),
    read=_skipped,
)

ENGINES = (
    ENGINE_STATE,
    ENGINE_RESTARTS,
    ENGINE_PROGRESS_AGE,
    ENGINE_GHOST_STEPS,
    ENGINE_RUNNING,
    ENGINE_WAITING,
    ENGINE_OPEN,
    COVERAGE,
    ENGINE_INFO,
    LINES_SKIPPED,
)
