"""The token ledger: what the engine generated, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable

from tokengap.series.declare import Sample, Series, per_engine
from tokengap.view import View


def _orphaned(view: View) -> Iterable[Sample]:
    for engine in view.engines:
        for hop in dict.fromkeys((*view.hop_names, *engine.tokens.orphaned)):
            yield Sample((engine.name, hop), engine.tokens.orphaned.get(hop, 0.0))


TOKENS_OUT = Series(
    name="tokengap_tokens_out_total",
    kind="counter",
    help="Output tokens the engine generated, by its own count, since this exporter started: what is paid for. "
    "Equals useful + orphaned + pending + unattributed.",
    labels=("engine", "model"),
    read=lambda view: (Sample((e.name, ",".join(e.models)), e.tokens.out) for e in view.engines),
)

TOKENS_USEFUL = Series(
    name="tokengap_tokens_useful_total",
    kind="counter",
    help="Output tokens whose bytes a live client acknowledged. Delivery as the kernel saw it, not as a proxy "
    "logged it.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.tokens.useful),
)

TOKENS_ORPHANED = Series(
    name="tokengap_tokens_orphaned_total",
    kind="counter",
    help="Output tokens generated for clients that had vanished or gone, by the hop that held on to the stream. "
    "Any lasting rate is money spent on nobody.",
    labels=("engine", "hop"),
    read=_orphaned,
)

TOKENS_PENDING = Series(
    name="tokengap_tokens_pending",
    kind="gauge",
    help="Output tokens generated and not delivered yet, for live clients or for a burst of requests of which it is "
    "not known yet who left: answers that are not streamed, and buffers on the path. They become useful or orphaned.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.tokens.pending),
)

TOKENS_UNATTRIBUTED = Series(
    name="tokengap_tokens_unattributed_total",
    kind="counter",
    help="Output tokens generated for traffic this exporter cannot see (another proxy, a batch job). Never counted as "
    "orphaned; when it grows, name the missing hops.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.tokens.unattributed),
)

TOKENS_UNFINISHED = Series(
    name="tokengap_engine_tokens_unfinished_total",
    kind="counter",
    help="Output tokens of requests that never finished, by the engine's own counters alone, brought up to date when "
    "it is at rest. A cross-check of what cancelled streams left behind: it needs no socket, and names nobody.",
    labels=("engine",),
    read=per_engine(lambda engine: engine.unfinished_tokens),
)

TOKENS = (TOKENS_OUT, TOKENS_USEFUL, TOKENS_ORPHANED, TOKENS_PENDING, TOKENS_UNATTRIBUTED, TOKENS_UNFINISHED)
