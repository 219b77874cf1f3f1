"""What is generated for nobody, where, and what it costs: for who pays."""

from __future__ import annotations

from functools import partial

from tokengap.bundle.boards.asking import ENGINE, Ask, lines, share, total
from tokengap.bundle.boards.board import Board, Note, Row, Tile, watched
from tokengap.bundle.watch import Panel, Query
from tokengap.bundle.watches.shared import LEFT
from tokengap.series import cost, streams, tokens

_panel = partial(Panel, "money")

_ALLOCATION = (
    "An allocation by running sequences, not a saving: a step with nine sequences takes nearly as long as one with ten."
)

_HOW_TO_READ = """\
**out = useful + orphaned + pending + unattributed**, after every beat.

| part | means |
| --- | --- |
| useful | a live client acknowledged it |
| orphaned | for clients who had left, by the hop that held on |
| pending | not delivered yet |
| unattributed | for traffic that nobody watches |

GPU time and money are an **allocation**, not a saving. Surely saved would be the energy of basis *sole*.
"""


def money(ask: Ask) -> Board:
    """Return the dashboard."""
    return Board(
        name="money",
        title="tokengap / money",
        description="What is generated for clients who left: in tokens, GPU-seconds and money, by the hop that leaks.",
        since="now-6h",
        refresh="1m",
        rows=(
            _at_a_glance(ask),
            watched(ask.seen, "money", "What alerts look at"),
            _where(ask),
            _what_it_costs(ask),
            _how_streams_end(ask),
        ),
    )


def _out(ask: Ask, expression: str) -> str:
    """Return the sum over engines, each counted once however many exporters read its page."""
    return total(ask.once(expression, *ENGINE, "model"))


def _at_a_glance(ask: Ask) -> Row:
    orphaned, out = total(ask.in_all(tokens.TOKENS_ORPHANED)), _out(ask, ask.in_all(tokens.TOKENS_OUT))
    nobody = total(ask.in_all(cost.ORPHAN_GPU_SECONDS))
    everybody = total(ask.once(ask.in_all(cost.ENGINE_GPU_SECONDS), *ENGINE))
    return Row(
        "In the time shown",
        (
            Tile(
                _panel(
                    title="Share of tokens for nobody",
                    description="Tokens generated for clients who had left, of all that the engines generated in the "
                    "time shown. Nothing that lasts is good; which hop holds on is told below.",
                    unit="percentunit",
                    no_value="no tokens generated",
                    queries=(Query(share(orphaned, out), "for nobody"),),
                    drawing="stat",
                ),
                width=5,
                height=5,
            ),
            Tile(
                _panel(
                    title="Tokens for nobody",
                    description="Output tokens generated for clients that had vanished or gone, in the time shown.",
                    unit="short",
                    no_value="no ledger: are sockets read?",
                    queries=(Query(orphaned, "tokens"),),
                    drawing="stat",
                ),
                width=5,
                height=5,
            ),
            Tile(
                _panel(
                    title="GPU time for nobody",
                    description=f"GPU-seconds that orphans took in the time shown. {_ALLOCATION}",
                    unit="s",
                    no_value="no GPU is known of any engine",
                    queries=(Query(nobody, "GPU time"),),
                    drawing="stat",
                ),
                width=5,
                height=5,
            ),
            Tile(
                _panel(
                    title="GPU share for nobody",
                    description="The orphans' part of the GPU time of the engines, idle time included, in the time "
                    f"shown. {_ALLOCATION}",
                    unit="percentunit",
                    no_value="no GPU is known of any engine",
                    queries=(Query(share(nobody, everybody), "for nobody"),),
                    drawing="stat",
                ),
                width=5,
                height=5,
            ),
            Tile(
                _panel(
                    title="Money for nobody",
                    description="Price of the GPU-seconds that orphans took in the time shown, by the configured price "
                    f"of a GPU-hour. {_ALLOCATION}",
                    unit="none",
                    no_value="no price: set gpu_hour_price",
                    queries=lines(total(ask.in_all(cost.ORPHAN_COST), "currency"), "currency"),
                    drawing="stat",
                ),
                width=4,
                height=5,
                decimals=2,
            ),
        ),
    )


def _where(ask: Ask) -> Row:
    orphaned = total(ask.rate(tokens.TOKENS_ORPHANED), "hop")
    return Row(
        "Where it leaks",
        (
            Tile(
                _panel(
                    title="Tokens for nobody, by hop",
                    description="Output tokens a second for clients who had left, by the first hop that still held "
                    "its upstream. Hop engine: the engine itself ran on with no socket open for the request.",
                    unit="cps",
                    no_value="no ledger: are sockets read?",
                    queries=lines(orphaned, "hop"),
                ),
                width=8,
                stacked=True,
            ),
            Tile(
                _panel(
                    title="What became of the tokens",
                    description="The engines' tokens a second, in parts that add up to all of them but for what is "
                    "pending. Not seen: for traffic that passes none of the watched hops.",
                    unit="cps",
                    no_value="no tokens are counted",
                    queries=(
                        Query(total(ask.delivered()), "useful"),
                        Query(total(ask.rate(tokens.TOKENS_ORPHANED)), "orphaned"),
                        Query(_unseen(ask), "not seen or pending"),
                    ),
                ),
                width=8,
                stacked=True,
            ),
            Tile(
                Note(
                    "How to read this",
                    "The identity behind the numbers, and what may be concluded from them.",
                    _HOW_TO_READ,
                ),
                width=8,
            ),
            Tile(
                _panel(
                    title="Tokens for nobody, by engine and hop",
                    description="Output tokens for clients who had left, in the time shown. The longest bar is the "
                    "first place to mend.",
                    unit="short",
                    no_value="no ledger: are sockets read?",
                    queries=lines(total(ask.in_all(tokens.TOKENS_ORPHANED), *ENGINE, "hop"), "engine", "hop"),
                    drawing="bargauge",
                ),
                width=8,
            ),
            Tile(
                _panel(
                    title="Share of each engine's tokens for nobody",
                    description="Tokens for clients who had left, of all that the engine generated.",
                    unit="percentunit",
                    no_value="no tokens generated",
                    queries=lines(
                        share(
                            total(ask.rate(tokens.TOKENS_ORPHANED), *ENGINE),
                            total(ask.once(ask.rate(tokens.TOKENS_OUT), *ENGINE, "model"), *ENGINE),
                        ),
                        "engine",
                    ),
                ),
                width=8,
                most=1,
            ),
            Tile(
                _panel(
                    title="Streams held for nobody",
                    description="Streams in flight whose client has vanished or gone, by the hop where they are seen.",
                    unit="short",
                    no_value="sockets are not read",
                    queries=lines(total(ask.select(streams.STREAMS, client=LEFT), "hop", "client"), "hop", "client"),
                ),
                width=8,
                stacked=True,
            ),
        ),
    )


def _unseen(ask: Ask) -> str:
    """Return the rest. Each exporter's own tokens_unattributed does not know what the other exporters have seen."""
    out, orphaned = _out(ask, ask.rate(tokens.TOKENS_OUT)), total(ask.rate(tokens.TOKENS_ORPHANED))
    return f"clamp_min({out} - {total(ask.delivered())} - {orphaned}, 0)"


def _what_it_costs(ask: Ask) -> Row:
    nobody = total(ask.rate(cost.ORPHAN_GPU_SECONDS), *ENGINE)
    return Row(
        "What it costs",
        (
            Tile(
                _panel(
                    title="GPUs at work for nobody",
                    description=f"GPU-seconds a second that orphans take: so many GPUs. {_ALLOCATION}",
                    unit="none",
                    no_value="no GPU is known of any engine",
                    queries=lines(nobody, "engine"),
                ),
                stacked=True,
            ),
            Tile(
                _panel(
                    title="Share of GPU time for nobody, by engine",
                    description="The orphans' part of the engine's GPU time, idle or not.",
                    unit="percentunit",
                    no_value="no GPU is known of any engine",
                    queries=lines(share(nobody, ask.once(ask.rate(cost.ENGINE_GPU_SECONDS), *ENGINE)), "engine"),
                ),
                most=1,
            ),
            Tile(
                _panel(
                    title="Money for nobody, an hour",
                    description="What the orphans' GPU-seconds cost at this pace, by the configured price of a "
                    "GPU-hour, power included.",
                    unit="none",
                    no_value="no price: set gpu_hour_price",
                    queries=lines(
                        f"{total(ask.rate(cost.ORPHAN_COST), *ENGINE, 'currency')} * 3600", "engine", "currency"
                    ),
                ),
                stacked=True,
                decimals=2,
            ),
            Tile(
                _panel(
                    title="Power for nobody",
                    description="Joules a second. Full: the orphans' part of all that was drawn. Active: of what "
                    "exceeds idle power. Sole: drawn while nothing but orphans ran, which would surely be saved.",
                    unit="watt",
                    no_value="no GPU tells its energy",
                    queries=lines(total(ask.rate(cost.ORPHAN_ENERGY), "basis"), "basis"),
                ),
            ),
            Tile(
                _panel(
                    title="Power of the engines",
                    description="The whole of which orphans took a part: all that the engines' GPUs drew (full), and "
                    "what exceeds idle power (active).",
                    unit="watt",
                    no_value="no GPU tells its energy",
                    queries=lines(total(ask.once(ask.rate(cost.ENGINE_ENERGY), *ENGINE, "basis"), "basis"), "basis"),
                ),
            ),
            Tile(
                _panel(
                    title="GPU time in no total",
                    description="GPU-seconds a second that are counted nowhere, and why: the GPU or the engine could "
                    "not be read, the beat was late, or it is a MIG instance. While this grows, the costs are too low.",
                    unit="none",
                    no_value="none, or no GPU is known of any engine",
                    queries=lines(total(ask.rate(cost.UNACCOUNTED), *ENGINE, "reason"), "engine", "reason"),
                ),
            ),
            Tile(
                _panel(
                    title="Price of a GPU-hour",
                    description="As configured, power included: do not add a tariff times joules.",
                    unit="none",
                    no_value="no price: set gpu_hour_price",
                    queries=lines(ask.once(ask.select(cost.GPU_HOUR_PRICE), "currency"), "currency"),
                    drawing="stat",
                ),
                width=4,
                height=5,
                decimals=2,
            ),
            Tile(
                _panel(
                    title="GPUs of the engines",
                    description="How many GPUs each engine computes on, where that is known, and how many of them are "
                    "lost.",
                    unit="none",
                    no_value="no GPU is known of any engine",
                    queries=lines(ask.once(ask.select(cost.ENGINE_GPUS), *ENGINE, "state"), "engine", "state"),
                    drawing="stat",
                ),
                width=8,
                height=5,
            ),
        ),
    )


def _how_streams_end(ask: Ask) -> Row:
    return Row(
        "How streams end",
        (
            Tile(
                _panel(
                    title="Streams ended, by how",
                    description="Completed, cancelled (the client left and the engine was told), orphaned (the engine "
                    "ran on without a client), failed. Cancelled is what should become of every orphan.",
                    unit="short",
                    no_value="sockets are not read",
                    queries=lines(total(ask.grown(streams.STREAMS_ENDED), "how"), "how"),
                ),
                width=12,
                stacked=True,
            ),
            Tile(
                _panel(
                    title="Cross-check: tokens of requests that never finished",
                    description="By the engine's own counters, brought up to date when it is at rest. It needs no "
                    "socket and names nobody; over a day it should agree with orphaned and cancelled.",
                    unit="short",
                    no_value="the engine does not tell",
                    queries=lines(ask.once(ask.grown(tokens.TOKENS_UNFINISHED), *ENGINE), "engine"),
                ),
                width=12,
            ),
        ),
    )
