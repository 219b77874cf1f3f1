"""What a person on call looks at, in the order of the decisions: the deadline, the verdict, then who is served."""

from __future__ import annotations

from functools import partial

from tokengap.bundle.boards.asking import ENGINE, HOP, VERDICTS, Ask, lines, named, total
from tokengap.bundle.boards.board import Board, Note, Row, Tile, watched
from tokengap.bundle.promql import said
from tokengap.bundle.watch import Panel, Query, longer_than, shorter_than
from tokengap.series import engines, itself, proxies, queue, streams, tokens

_panel = partial(Panel, "oncall")

#: What fires now. Alerts have the labels that their rule left them, which need not be job and instance.
_FIRING = 'ALERTS{alertname=~"Tokengap.+",alertstate="firing"}'


def oncall(ask: Ask) -> Board:
    """Return the dashboard."""
    return Board(
        name="oncall",
        title="tokengap / on-call",
        description="Will the next request make its deadline, is the engine stuck or only busy, whom does it serve?",
        refresh="10s",
        rows=(
            _decide(ask),
            watched(ask.seen, "oncall", "What rings"),
            _deadline(ask),
            _served(ask),
            _believed(ask),
        ),
    )


def _matrix(ask: Ask) -> str:
    cut, reserve, page = said(ask.site.age_cut), said(ask.site.reserve), ask.site.runbook_url("decision-matrix")
    return f"""\
**Queue age before utilization. Slack before token rate. Verdict before restart.**

| see | it is | do |
| --- | --- | --- |
| queue age under {cut}, slots full | good use | nothing; full slots are what you pay for |
| queue age over {cut}, nobody gone | too few slots | shed, or add capacity |
| queue age over {cut}, streams for nobody | a leak that starves people | cut it at the hop that is named; no capacity |
| slack under {reserve} | requests will be late | admit nothing new until it recovers |
| tokens for nobody, queue short | a cost, no outage | a ticket for the hop; do not scale |
| busy | working, however slow it looks | **never restart** |
| stuck | two windows without any progress | take it out of rotation, then restart |
| dead, restarted | its clients have failed already | see that it comes back |
| blind, coverage below 1 | unknown | believe nothing below until it can be seen |

[The whole matrix]({page})
"""


def _decide(ask: Ask) -> Row:
    return Row(
        "Decide",
        (
            Tile(
                Note(
                    "What it is, and what to do",
                    "The decision matrix in short. Its page has the reasons and the commands.",
                    _matrix(ask),
                ),
                width=12,
                height=15,
            ),
            Tile(
                _panel(
                    title="Deadline slack now",
                    description="What is left of the deadline of the worst stream that still waits for its first "
                    f"token; the full deadline when nobody waits. Below {said(ask.site.reserve)} a request that is "
                    "queued now will be late.",
                    unit="s",
                    no_value="not known: is the engine blind?",
                    queries=lines(ask.least(ask.select(queue.DEADLINE_SLACK), *ENGINE, "class"), "engine", "class"),
                    thresholds=(shorter_than(ask.site.reserve),),
                    drawing="stat",
                    least=None,
                ),
                width=5,
                height=5,
            ),
            Tile(
                _panel(
                    title="Queue age now",
                    description="How long the head of the engine's queue has waited. Past "
                    f"{said(ask.site.age_cut)} a new request cannot make its deadline.",
                    unit="s",
                    no_value="not known: is the engine blind?",
                    queries=lines(ask.once(ask.select(queue.QUEUE_AGE), *ENGINE), "engine"),
                    thresholds=(longer_than(ask.site.age_cut),),
                    drawing="stat",
                ),
                width=3,
                height=5,
            ),
            Tile(
                _panel(
                    title="Verdict now",
                    description="What the engine is, by its own progress and the open sockets. Never restart one that "
                    "is busy.",
                    unit="none",
                    no_value="no engine is watched",
                    queries=lines(ask.verdict(), "engine"),
                    drawing="stat",
                ),
                width=4,
                height=5,
                words=VERDICTS,
            ),
            Tile(
                _panel(
                    title="Firing",
                    description="Alerts of this bundle that fire now. Each has a runbook: its link is in the "
                    "notification, and above.",
                    unit="none",
                    no_value="nothing fires",
                    queries=(Query(f"max by (severity, alertname, engine, hop, uuid) ({_FIRING})", "alert"),),
                    drawing="table",
                ),
                width=12,
                height=10,
                columns=("severity", "alertname", "engine", "hop", "uuid"),
            ),
        ),
    )


def _deadline(ask: Ask) -> Row:
    return Row(
        "The deadline",
        (
            Tile(
                _panel(
                    title="Deadline slack",
                    description="Deadline minus time waited of the worst stream that waits for its first token, by "
                    "class; the full deadline when nobody waits, negative once it is missed.",
                    unit="s",
                    no_value="not known: is the engine blind?",
                    queries=lines(ask.least(ask.select(queue.DEADLINE_SLACK), *ENGINE, "class"), "engine", "class"),
                    thresholds=(shorter_than(ask.site.reserve),),
                    least=None,
                ),
            ),
            Tile(
                _panel(
                    title="Seconds in breach",
                    description="How long the queue was older than the age cut with slack below the reserve, between "
                    "two points of this graph. A counter: it keeps what a slow scrape misses.",
                    unit="s",
                    no_value="not known: is the engine blind?",
                    queries=lines(ask.once(ask.grown(queue.DEADLINE_BREACH), *ENGINE), "engine"),
                ),
            ),
            Tile(
                _panel(
                    title="Running, waiting and slots",
                    description="Requests that run and that wait, by the engine's own count, and how many it can run "
                    "at once. All slots taken is normal; look at the queue age before you add capacity.",
                    unit="short",
                    no_value="the engine tells no counts",
                    queries=(
                        named(ask.once(ask.select(engines.ENGINE_RUNNING), *ENGINE), "running"),
                        named(ask.once(ask.select(engines.ENGINE_WAITING), *ENGINE), "waiting"),
                        named(ask.once(ask.select(queue.SLOTS), *ENGINE), "slots"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Verdict",
                    description="What the engine was, by its own progress and the open sockets.",
                    unit="none",
                    no_value="no engine is watched",
                    queries=lines(ask.verdict(), "engine"),
                    drawing="state-timeline",
                ),
                words=VERDICTS,
            ),
            Tile(
                _panel(
                    title="Since the last progress",
                    description="Seconds since the engine last showed progress of any kind. Means something only "
                    "while work is in flight. Two windows without any make it stuck.",
                    unit="s",
                    no_value="the engine shows no progress of any kind",
                    queries=lines(ask.least(ask.select(engines.ENGINE_PROGRESS_AGE), *ENGINE), "engine"),
                    thresholds=(longer_than(2 * ask.site.window),),
                ),
            ),
            Tile(
                _panel(
                    title="Requests that wait in the proxy",
                    description="Requests inside a proxy that wait for a server, by its own count. The engine does not "
                    "know of them, so they are not in its queue age.",
                    unit="short",
                    no_value="no proxy is asked: --haproxy-socket, --envoy-admin",
                    queries=lines(total(ask.select(proxies.PROXY_QUEUED), *HOP), "hop"),
                ),
            ),
        ),
    )


def _served(ask: Ask) -> Row:
    return Row(
        "Whom it serves",
        (
            Tile(
                _panel(
                    title="Streams by client",
                    description="Streams in flight at the hops, by the state of their client. Vanished and gone: they "
                    "hold a slot for nobody.",
                    unit="short",
                    no_value="sockets are not read",
                    queries=lines(total(ask.select(streams.STREAMS), "client"), "client"),
                ),
                stacked=True,
            ),
            Tile(
                _panel(
                    title="Tokens out and for nobody",
                    description="Output tokens a second, and those of them for clients who had left. A token rate that "
                    "looks well says nothing of the deadline.",
                    unit="cps",
                    no_value="no tokens are counted",
                    queries=(
                        Query(total(ask.once(ask.rate(tokens.TOKENS_OUT), *ENGINE, "model")), "out"),
                        Query(total(ask.rate(tokens.TOKENS_ORPHANED)), "orphaned"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Streams ended a second, by how",
                    description="Cancelled: the client left and the engine was told. Orphaned: the engine ran on for "
                    "nobody. Failed: the answer broke off.",
                    unit="cps",
                    no_value="sockets are not read",
                    queries=lines(total(ask.rate(streams.STREAMS_ENDED), "how"), "how"),
                ),
                stacked=True,
            ),
            Tile(
                _panel(
                    title="Tokens for nobody, by hop",
                    description="Output tokens a second for clients who had left, by the first hop that still held "
                    "its upstream: the place to mend. Hop engine: the engine itself ran on.",
                    unit="cps",
                    no_value="no ledger: are sockets read?",
                    queries=lines(total(ask.rate(tokens.TOKENS_ORPHANED), "hop"), "hop"),
                ),
                stacked=True,
            ),
        ),
    )


def _believed(ask: Ask) -> Row:
    return Row(
        "Can it be believed?",
        (
            Tile(
                _panel(
                    title="Coverage",
                    description="Streams that sockets show over the requests that the engine says it has. Below 1 a "
                    "part of the traffic passes no hop that is watched.",
                    unit="percentunit",
                    no_value="the engine tells no counts",
                    queries=lines(ask.coverage(), "engine"),
                ),
                most=1,
            ),
            Tile(
                _panel(
                    title="Sources that fail",
                    description="Sources that could not be read in the newest beat. What rests on them is missing, not "
                    "zero; why stands on the exporter's own page.",
                    unit="none",
                    no_value="no exporter is scraped",
                    queries=lines(
                        f"sum by (job, instance) (1 - {ask.select(itself.SOURCE_UP)})",
                        "instance",
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Age of what is shown",
                    description="Seconds since the newest beat of each exporter. It should stay within a few beats "
                    "and a scrape.",
                    unit="s",
                    no_value="no exporter is scraped",
                    queries=lines(f"time() - {ask.once(ask.select(itself.LAST_BEAT), 'job', 'instance')}", "instance"),
                ),
            ),
        ),
    )
