"""One engine in detail: what it says of itself, what its sockets say, and how the two agree."""

from __future__ import annotations

from functools import partial

from tokengap.bundle.boards.asking import ENGINE, EXPORTER, HOP, VERDICTS, Ask, lines, named, total
from tokengap.bundle.boards.board import Board, Row, Tile, Word, watched
from tokengap.bundle.watch import Panel, Query, longer_than
from tokengap.series import admit, engines, proxies, queue, streams, tokens

_panel = partial(Panel, "engine")

_HOLDS = (Word(0, "no", "green"), Word(1, "yes", "orange"))
_SEEN = (Word(0, "seen", "green"), Word(1, "not seen", "orange"))


def engine(ask: Ask) -> Board:
    """Return the dashboard."""
    return Board(
        name="engine",
        title="tokengap / engine",
        description="Engines in detail: verdict, requests, queue, tokens, streams, and the proxies in front of them.",
        rows=(
            _what_it_is(ask),
            watched(ask.seen, "engine", "What alerts look at"),
            _requests(ask),
            _tokens(ask),
            _streams(ask),
            _proxies(ask),
            _gateway(ask),
        ),
    )


def _what_it_is(ask: Ask) -> Row:
    return Row(
        "What it is",
        (
            Tile(
                _panel(
                    title="Engines",
                    description="The engines that are watched: where the page is read, the models it names, and which "
                    "family of engines it is of.",
                    unit="none",
                    no_value="no engine is watched",
                    queries=(
                        Query(ask.once(ask.select(engines.ENGINE_INFO), "engine", "model", "family", "url"), "engine"),
                    ),
                    drawing="table",
                ),
                width=12,
                height=6,
                columns=("engine", "model", "family", "url"),
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
                width=12,
                height=6,
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
                height=7,
            ),
            Tile(
                _panel(
                    title="Restarts",
                    description="Restarts of the engine that were seen: its start time changed or its counters fell.",
                    unit="short",
                    no_value="no engine is watched",
                    queries=lines(ask.once(ask.grown(engines.ENGINE_RESTARTS), *ENGINE), "engine"),
                ),
                height=7,
            ),
            Tile(
                _panel(
                    title="Steps without a token",
                    description="Scheduler steps a second that brought no counted token while more requests ran than "
                    "have an open socket: work for requests that the engine's front end dropped.",
                    unit="cps",
                    no_value="the engine counts no steps",
                    queries=lines(ask.once(ask.rate(engines.ENGINE_GHOST_STEPS), *ENGINE), "engine"),
                ),
                height=7,
            ),
        ),
    )


def _requests(ask: Ask) -> Row:
    return Row(
        "Requests and the queue",
        (
            Tile(
                _panel(
                    title="Running and waiting",
                    description="Requests by the engine's own count.",
                    unit="short",
                    no_value="the engine tells no counts",
                    queries=(
                        named(ask.once(ask.select(engines.ENGINE_RUNNING), *ENGINE), "running"),
                        named(ask.once(ask.select(engines.ENGINE_WAITING), *ENGINE), "waiting"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Requests and open streams",
                    description="What the engine says it has, and the streams that its sockets show. What runs "
                    "without a socket runs for nobody, or for clients that this exporter cannot see.",
                    unit="short",
                    no_value="the engine tells no counts",
                    queries=(
                        named(
                            f"{ask.once(ask.select(engines.ENGINE_RUNNING), *ENGINE)}"
                            f" + {ask.once(ask.select(engines.ENGINE_WAITING), *ENGINE)}",
                            "requests",
                        ),
                        named(total(ask.select(engines.ENGINE_OPEN), *ENGINE), "streams"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Coverage by all exporters",
                    description="Streams that sockets show over the requests that the engine says it has. Below 1 a "
                    "part of the traffic passes no hop that is watched, and its tokens are unattributed.",
                    unit="percentunit",
                    no_value="the engine tells no counts",
                    queries=lines(ask.coverage(), "engine"),
                ),
                most=1,
            ),
            Tile(
                _panel(
                    title="Queue age",
                    description="How long the head of the engine's queue has waited; 0 when nothing waits.",
                    unit="s",
                    no_value="not known: is the engine blind?",
                    queries=lines(ask.once(ask.select(queue.QUEUE_AGE), *ENGINE), "engine"),
                    thresholds=(longer_than(ask.site.age_cut),),
                ),
            ),
            Tile(
                _panel(
                    title="Queue age is taken from",
                    description="Sockets (exact) or the curve of arrivals and departures on the engine's page. None "
                    "while the queue age is not known.",
                    unit="none",
                    no_value="no engine is watched",
                    queries=lines(ask.once(ask.select(queue.QUEUE_AGE_SOURCE), *ENGINE, "source"), "engine", "source"),
                    drawing="state-timeline",
                ),
                words=(Word(0, "no", "text"), Word(1, "in use", "green")),
            ),
            Tile(
                _panel(
                    title="Slots taken",
                    description="Running sequences over slots. High is what you pay for, whoever the slots work for: "
                    "never act on it alone.",
                    unit="percentunit",
                    no_value="the engine's slots are not known",
                    queries=lines(ask.once(ask.select(queue.SLOT_UTILIZATION), *ENGINE), "engine"),
                ),
                most=1,
            ),
            Tile(
                _panel(
                    title="Slots",
                    description="Sequences the engine can run at once, and how that is known. Observed is the highest "
                    "number seen running: a lower bound.",
                    unit="short",
                    no_value="the engine's slots are not known",
                    queries=lines(ask.once(ask.select(queue.SLOTS), *ENGINE, "source"), "engine", "source"),
                    drawing="stat",
                ),
                height=6,
            ),
            Tile(
                _panel(
                    title="Lines of the page that were skipped",
                    description="Lines of the engine's page a second that could not be used, by reason. The rest "
                    "counts; a lasting rate means that the engine writes what cannot be read.",
                    unit="cps",
                    no_value="every line is read",
                    queries=lines(ask.once(ask.rate(engines.LINES_SKIPPED), *ENGINE, "reason"), "engine", "reason"),
                ),
                width=16,
                height=6,
            ),
            _capacity(ask),
        ),
    )


def _tokens(ask: Ask) -> Row:
    return Row(
        "Tokens",
        (
            Tile(
                _panel(
                    title="Tokens out, by model",
                    description="Output tokens a second by the engine's own count: what is paid for.",
                    unit="cps",
                    no_value="no tokens are counted",
                    queries=lines(ask.once(ask.rate(tokens.TOKENS_OUT), *ENGINE, "model"), "engine", "model"),
                ),
            ),
            Tile(
                _panel(
                    title="Tokens that an exporter cannot attribute",
                    description="Output tokens a second for traffic that passes none of the hops that this exporter "
                    "watches. Another one may see it: coverage says what nobody sees.",
                    unit="cps",
                    no_value="no ledger: are sockets read?",
                    queries=lines(
                        ask.once(ask.rate(tokens.TOKENS_UNATTRIBUTED), *EXPORTER, "engine"), "engine", "instance"
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Tokens pending",
                    description="Generated and not delivered yet: answers that are not streamed, and buffers on the "
                    "path. They become useful or orphaned.",
                    unit="short",
                    no_value="no ledger: are sockets read?",
                    queries=lines(total(ask.select(tokens.TOKENS_PENDING), *ENGINE), "engine"),
                ),
            ),
        ),
    )


def _streams(ask: Ask) -> Row:
    ages = total(ask.select(streams.STREAM_AGE, "_bucket"), "le")
    return Row(
        "Streams",
        (
            Tile(
                _panel(
                    title="Streams by hop and client",
                    description="Streams in flight at each hop, by the state of their client.",
                    unit="short",
                    no_value="sockets are not read",
                    queries=lines(total(ask.select(streams.STREAMS), "hop", "client"), "hop", "client"),
                ),
                stacked=True,
            ),
            Tile(
                _panel(
                    title="Age of streams in flight",
                    description="How old the streams are that are in flight now, from the distribution as it is: it "
                    "is no counter. Empty while none is in flight.",
                    unit="s",
                    no_value="no stream in flight",
                    queries=tuple(Query(f"histogram_quantile({q}, {ages})", name) for q, name in _QUANTILES),
                ),
            ),
            Tile(
                _panel(
                    title="Oldest stream, by client",
                    description="Age of the oldest stream in flight, by the state of its client.",
                    unit="s",
                    no_value="sockets are not read",
                    queries=lines(ask.once(ask.select(streams.STREAM_AGE_MAX), "client"), "client"),
                ),
            ),
            Tile(
                _panel(
                    title="Clients still there",
                    description="Share of the streams in flight at a hop whose client is there; 1 when none is in "
                    "flight. Of several exporters the lowest.",
                    unit="percentunit",
                    no_value="sockets are not read",
                    queries=lines(ask.least(ask.select(streams.CLIENT_CONNECTED), *ENGINE, "hop"), "engine", "hop"),
                ),
                most=1,
            ),
            Tile(
                _panel(
                    title="Streams ended, by hop and how",
                    description="Streams that ended between two points of this graph.",
                    unit="short",
                    no_value="sockets are not read",
                    queries=lines(total(ask.grown(streams.STREAMS_ENDED), "hop", "how"), "hop", "how"),
                ),
                width=16,
            ),
        ),
    )


_QUANTILES = ((0.5, "half are younger"), (0.9, "9 of 10"), (0.99, "99 of 100"))


def _proxies(ask: Ask) -> Row:
    return Row(
        "The proxies in front",
        (
            Tile(
                _panel(
                    title="What cannot be seen of a hop",
                    description="HTTP/2 and HTTP/3 clients share connections, a unix-domain upstream has no TCP, a "
                    "load balancer stands before the clients. What is not seen is never called an orphan.",
                    unit="none",
                    no_value="not known of any hop",
                    queries=lines(ask.once(ask.select(proxies.BLIND_SPOT), *HOP, "kind"), "hop", "kind"),
                    drawing="state-timeline",
                ),
                words=_SEEN,
            ),
            Tile(
                _panel(
                    title="Requests, by the proxy's own count",
                    description="Requests in flight in the whole proxy, those that it queues and each stream of "
                    "HTTP/2 included.",
                    unit="short",
                    no_value=_NOT_ASKED,
                    queries=lines(total(ask.select(proxies.PROXY_STREAMS), *HOP), "hop"),
                ),
            ),
            Tile(
                _panel(
                    title="Waiting inside the proxy",
                    description="Requests that wait inside the proxy for a server, and the age of the oldest: the "
                    "engine's queue age knows nothing of them.",
                    unit="short",
                    no_value=_NOT_ASKED,
                    queries=(
                        named(total(ask.select(proxies.PROXY_QUEUED), *HOP), "requests", "hop"),
                        named(ask.once(ask.select(proxies.PROXY_QUEUE_AGE), *HOP), "seconds", "hop"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="HTTP/2",
                    description="Connections of clients on HTTP/2, and the streams in flight over them.",
                    unit="short",
                    no_value=_NOT_ASKED,
                    queries=(
                        named(total(ask.select(proxies.PROXY_HTTP2_CONNECTIONS), *HOP), "connections", "hop"),
                        named(total(ask.select(proxies.PROXY_HTTP2_STREAMS), *HOP), "streams", "hop"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Clients that left, as the proxy noticed",
                    description="Requests a second whose client left before the end, and streams of HTTP/2 that were "
                    "reset while their connection went on. One that vanished is noticed a quarter of an hour late.",
                    unit="cps",
                    no_value=_NOT_ASKED,
                    queries=(
                        named(total(ask.rate(proxies.PROXY_CLIENT_ABORTS), *HOP), "aborted", "hop"),
                        named(total(ask.rate(proxies.PROXY_RESETS), *HOP), "reset", "hop"),
                    ),
                ),
                width=16,
            ),
        ),
    )


def _capacity(ask: Ask) -> Tile:
    return Tile(
        _panel(
            title="Why not to fill free slots",
            description="1 for each condition under which a free slot must not be given away: clients leave and their "
            "streams run on, tokens are generated for nobody, slack is shorter than streams last.",
            unit="none",
            no_value="not known: nobody left, nothing was generated",
            queries=lines(ask.once(ask.select(queue.FREE_CAPACITY_UNSAFE), *ENGINE, "reason"), "engine", "reason"),
            drawing="state-timeline",
        ),
        width=24,
        height=5,
        words=_HOLDS,
    )


def _gateway(ask: Ask) -> Row:
    return Row(
        "The gateway that admits",
        (
            Tile(
                _panel(
                    title="Decisions",
                    description="What the gateway decided, a second, by class. Refusals by age are what keeps the "
                    "others' deadlines.",
                    unit="reqps",
                    no_value=_NO_GATEWAY,
                    queries=lines(total(ask.rate(admit.ADMISSIONS), "class", "decision"), "class", "decision"),
                ),
            ),
            Tile(
                _panel(
                    title="Waiting in the gateway",
                    description="Requests that wait for a slot, by class, and the age of the oldest of them.",
                    unit="short",
                    no_value=_NO_GATEWAY,
                    queries=(
                        named(total(ask.select(admit.ADMIT_WAITING), "class"), "requests", "class"),
                        named(ask.once(ask.select(admit.ADMIT_QUEUE_AGE), "class"), "seconds", "class"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Expected start",
                    description="In how many seconds a request that came now would start. Past the age cut it is "
                    "refused.",
                    unit="s",
                    no_value="no stream has ended yet, or there is no gateway",
                    queries=lines(ask.once(ask.select(admit.ADMIT_EXPECTED_START), "class"), "class"),
                    thresholds=(longer_than(ask.site.age_cut),),
                ),
            ),
            Tile(
                _panel(
                    title="What takes the slots",
                    description="Slots of each engine by what they are taken by. Cancelling, closing, draining and "
                    "held are streams whose client left.",
                    unit="short",
                    no_value=_NO_GATEWAY,
                    queries=lines(ask.once(ask.select(admit.ADMIT_SLOTS), *ENGINE, "state"), "engine", "state"),
                ),
            ),
            Tile(
                _panel(
                    title="How it decides",
                    description="1 for the mode that the gateway is in: by age, or busy, which is the rollback. And "
                    "whether engines take its connections.",
                    unit="short",
                    no_value=_NO_GATEWAY,
                    queries=(
                        named(ask.once(ask.select(admit.ADMIT_MODE), "mode"), "mode", "mode"),
                        named(ask.once(ask.select(admit.ADMIT_ENGINE_UP), *ENGINE), "takes connections:"),
                    ),
                ),
            ),
            Tile(
                _panel(
                    title="Moves of streams",
                    description="From one state to the next, a second, by event. docs/admit.md has the table.",
                    unit="cps",
                    no_value=_NO_GATEWAY,
                    queries=lines(total(ask.rate(admit.ADMIT_MOVES), "before", "event", "after"), "before", "event"),
                ),
            ),
        ),
    )


_NO_GATEWAY = "no gateway is asked: --admit"
_NOT_ASKED = "no proxy is asked: --haproxy-socket, --envoy-admin, --nginx-status"
