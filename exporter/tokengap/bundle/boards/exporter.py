"""The exporter itself: does it keep its beat, can it read its sources, and how exact is what it says."""

from __future__ import annotations

from functools import partial

from tokengap.bundle.boards.asking import EXPORTER, Ask, lines, named
from tokengap.bundle.boards.board import Board, Row, Tile, Word, watched
from tokengap.bundle.watch import Panel, Query, Threshold
from tokengap.series import itself

_panel = partial(Panel, "exporter")

_NONE = "no exporter is scraped"

_UP = (Word(0, "fails", "red"), Word(1, "read", "green"))


def exporter(ask: Ask) -> Board:
    """Return the dashboard."""
    return Board(
        name="exporter",
        title="tokengap / exporter",
        description="The exporters themselves: their beat, their sources, and how exact they are.",
        rows=(
            _which(ask),
            watched(ask.seen, "exporter", "What alerts look at"),
            _beat(ask),
            _sources(ask),
            _process(ask),
        ),
    )


def _which(ask: Ask) -> Row:
    return Row(
        "Which there are",
        (
            Tile(
                _panel(
                    title="Exporters",
                    description="The exporters that are scraped, and their versions.",
                    unit="none",
                    no_value=_NONE,
                    queries=(
                        Query(ask.once(ask.select(itself.BUILD_INFO), *EXPORTER, "version", "python"), "exporter"),
                    ),
                    drawing="table",
                ),
                width=12,
                height=6,
                columns=("instance", "version", "python"),
            ),
            Tile(
                _panel(
                    title="How exact the ledger is",
                    description="Exact: the final counters of closed sockets are seen. Beat: up to one beat of a "
                    "closing socket is missed. State: no bytes. None: no sockets.",
                    unit="none",
                    no_value=_NONE,
                    queries=lines(
                        f"{ask.once(ask.select(itself.ACCOUNTING_MODE), 'instance', 'mode')} == 1", "instance", "mode"
                    ),
                    drawing="state-timeline",
                ),
                width=12,
                height=6,
                words=(Word(1, "in use", "green"),),
            ),
        ),
    )


def _beat(ask: Ask) -> Row:
    return Row(
        "The beat",
        (
            Tile(
                _panel(
                    title="Age and interval of the beat",
                    description="Seconds since the newest beat, which is the age of every value. Between two scrapes "
                    "it grows; beyond a few beats and a scrape the exporter does not keep up.",
                    unit="s",
                    no_value=_NONE,
                    queries=(
                        named(f"time() - {ask.once(ask.select(itself.LAST_BEAT), *EXPORTER)}", "age", "instance"),
                        named(ask.once(ask.select(itself.BEAT_INTERVAL), *EXPORTER), "interval", "instance"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Beats a second",
                    description="Rounds of reading all sources and joining them: one over the interval, when all is "
                    "well.",
                    unit="cps",
                    no_value=_NONE,
                    queries=lines(ask.once(ask.rate(itself.BEATS), *EXPORTER), "instance"),
                ),
            ),
            Tile(
                _panel(
                    title="Beats that were late or degraded",
                    description="Late: more than half an interval after they were due. Degraded: sockets or a page "
                    "could not be read, or events of sockets were lost.",
                    unit="short",
                    no_value=_NONE,
                    queries=(
                        named(ask.once(ask.grown(itself.BEATS_LATE), *EXPORTER), "late", "instance"),
                        named(ask.once(ask.grown(itself.BEATS_DEGRADED), *EXPORTER), "degraded", "instance"),
                    ),
                ),
            ),
        ),
    )


def _sources(ask: Ask) -> Row:
    return Row(
        "The sources",
        (
            Tile(
                _panel(
                    title="Sources",
                    description="Whether each source was read in the newest beat. What rests on one that fails is "
                    "missing, not zero; why stands on the exporter's own page.",
                    unit="none",
                    no_value=_NONE,
                    queries=lines(
                        ask.once(ask.select(itself.SOURCE_UP), "instance", "source", "target"), "source", "target"
                    ),
                    drawing="state-timeline",
                ),
                words=_UP,
            ),
            Tile(
                _panel(
                    title="How long sources take",
                    description="Seconds to read each source in the newest beat, failed reads included. Near the "
                    "interval it makes beats late.",
                    unit="s",
                    no_value=_NONE,
                    queries=lines(
                        ask.once(ask.select(itself.SOURCE_DURATION), "instance", "source", "target"), "source", "target"
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Events of sockets lost",
                    description="Times the kernel dropped events of closed sockets because the exporter was too slow "
                    "to take them. Each makes the ledger less exact than its mode says.",
                    unit="short",
                    no_value=_NONE,
                    queries=lines(ask.once(ask.grown(itself.EVENTS_LOST), *EXPORTER), "instance"),
                    thresholds=(Threshold(">", 0, "none"),),
                ),
            ),
            Tile(
                _panel(
                    title="Network namespaces",
                    description="Namespaces whose sockets are read, and those that were asked for and cannot be.",
                    unit="short",
                    no_value=_NONE,
                    queries=lines(ask.once(ask.select(itself.NETNS), *EXPORTER, "state"), "instance", "state"),
                ),
            ),
        ),
    )


#: What every process tells of itself, and Prometheus of each scrape: the names here that are not ours.
_CPU, _MEMORY, _FILES = "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"
_SCRAPE = "scrape_duration_seconds"


def _process(ask: Ask) -> Row:
    return Row(
        "The process",
        (
            Tile(
                _panel(
                    title="CPU",
                    description="Seconds of CPU a second that the exporter takes. The reader of GPUs is a process of "
                    "its own and not in it.",
                    unit="percentunit",
                    no_value=_NONE,
                    queries=lines(ask.once(f"rate({ask.select(_CPU)}[$__rate_interval])", *EXPORTER), "instance"),
                ),
                width=6,
            ),
            Tile(
                _panel(
                    title="Memory",
                    description="Resident memory. It grows with the streams in flight, and falls with them.",
                    unit="bytes",
                    no_value=_NONE,
                    queries=lines(ask.once(ask.select(_MEMORY), *EXPORTER), "instance"),
                ),
                width=6,
            ),
            Tile(
                _panel(
                    title="Open files",
                    description="File descriptors in use. They do not grow with the streams of others.",
                    unit="short",
                    no_value=_NONE,
                    queries=lines(ask.once(ask.select(_FILES), *EXPORTER), "instance"),
                ),
                width=6,
            ),
            Tile(
                _panel(
                    title="Scrapes",
                    description="How long Prometheus waited for the page. It is rendered once a beat, so this does not "
                    "grow with the streams.",
                    unit="s",
                    no_value=_NONE,
                    queries=lines(ask.once(ask.select(_SCRAPE), *EXPORTER), "instance"),
                ),
                width=6,
            ),
        ),
    )
