"""The page at ``/``: what an on-call person wants at one glance, in plain HTML that needs no script.

Everything that comes from outside (names, URLs, evidence, errors) is escaped, and the page's own policy lets nothing
run and nothing load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from tokengap import __version__
from tokengap.series.engines import public_url
from tokengap.view import CLIENTS, EngineView, GpuView, View
from tokengap.web.html import document

#: Engine states that somebody should look at.
_BAD_STATES = ("stuck", "dead", "blind")
_UNKNOWN = "not known"


class _Number(str):
    """A cell that is aligned as a number."""


class _Bad(str):
    """A cell that stands out."""


def landing_page(view: View | None, telemetry_path: str) -> bytes:
    """Return the page for the newest view, None before the first beat."""
    if view is None:
        body = "<p>The first beat is not done yet.</p>"
        interval = 1.0
    else:
        body = "".join(
            (
                _engines(view),
                _hops(view),
                _proxies(view),
                _blind_spots(view),
                _cost(view),
                _gpus(view),
                _sources(view),
                _beat(view),
            )
        )
        interval = view.interval
    links = f"""<h1>tokengap {escape(__version__)}</h1>
<p>Tokens generated, tokens delivered, and for whom the rest was: sockets, engines and proxies joined.</p>
<nav>
<a href="{escape(telemetry_path)}">Metrics</a>
<a href="/api/streams">Streams</a>
<a href="/api/engines">Engines</a>
<a href="/api/hops">Hops</a>
<a href="/api/gpus">GPUs</a>
<a href="/api/sources">Sources</a>
<a href="/runbooks/">Runbooks</a>
<a href="/-/healthy">Healthy</a>
<a href="/-/ready">Ready</a>
</nav>
"""
    return document("tokengap", links + body, refresh=max(2, round(interval)))


def _engines(view: View) -> str:
    numbers = ("tokens out", "useful", "orphaned", "running", "waiting", "slots used", "queue age", "slack")
    columns = ("engine", "state", "evidence", *map(_Number, numbers))
    return _table("Engines", columns, map(_engine_cells, view.engines))


def _engine_cells(engine: EngineView) -> Sequence[str]:
    orphaned = sum(engine.tokens.orphaned.values())
    slack = ", ".join(f"{klass} {seconds:.1f} s" for klass, seconds in engine.slack.items())
    return (
        f"{engine.name} ({public_url(engine.url)})",
        _Bad(engine.state) if engine.state in _BAD_STATES else engine.state,
        engine.evidence,
        _count(engine.tokens.out),
        _count(engine.tokens.useful),
        _count(orphaned),
        _count(engine.running),
        _count(engine.waiting),
        _Number(_UNKNOWN if engine.utilization is None else f"{engine.utilization:.0%}"),
        _seconds(engine.queue_age),
        _Number(slack or _UNKNOWN),
    )


def _hops(view: View) -> str:
    columns = ("hop", "engine", *map(_Number, CLIENTS), _Number("oldest"), _Number("oldest orphan"))
    if view.accounting == "none":
        return "<h2>Streams in flight</h2><p>Not known: no sockets can be read.</p>"
    return _table("Streams in flight", columns, _hop_rows(view))


def _hop_rows(view: View) -> Iterable[Sequence[str]]:
    for hop in view.hop_names:
        groups = [group for group in view.groups if group.hop == hop]
        for engine in dict.fromkeys((*(engine.name for engine in view.engines), *(group.engine for group in groups))):
            found = {group.client: group for group in groups if group.engine == engine}
            orphans = [found[client] for client in ("vanished", "gone") if client in found]
            yield (
                hop,
                engine or _UNKNOWN,
                *(_count(found[client].count if client in found else 0) for client in CLIENTS),
                _seconds(max((group.age_max for group in found.values()), default=0.0)),
                _seconds(max((group.age_max for group in orphans), default=0.0)),
            )


def _proxies(view: View) -> str:
    """Return what proxies tell about themselves; nothing where none is asked."""
    numbers = ("streams", "queued", "oldest queued", "HTTP/2 connections", "HTTP/2 streams", "clients left", "resets")
    rows = [
        (
            proxy.hop,
            _Bad(f"{proxy.program}: its count has leaked") if proxy.stale else proxy.program or _UNKNOWN,
            _count(proxy.streams),
            _count(proxy.queued),
            _seconds(proxy.oldest_queued),
            _count(proxy.h2_connections),
            _count(proxy.h2_streams),
            _count(proxy.client_aborts),
            _count(proxy.resets),
        )
        for proxy in view.proxies
    ]
    return _table("What proxies tell", ("hop", "proxy", *map(_Number, numbers)), rows) if rows else ""


def _blind_spots(view: View) -> str:
    """Return what cannot be seen; nothing where all can."""
    rows = [(spot.hop, spot.kind, spot.why) for spot in view.blind_spots if spot.blind]
    return _table("Blind spots", ("hop", "what", "why"), rows) if rows else ""


def _cost(view: View) -> str:
    """Return what orphans took of each engine's GPUs; nothing where no engine has one."""
    costs = [(engine.name, engine.cost) for engine in view.engines if engine.cost is not None]
    if not costs:
        return ""
    money = view.price.currency if view.price is not None else ""
    columns = ["engine", "GPUs", *map(_Number, ("GPU time", "of it orphans", "energy", "of it orphans"))]
    rows = []
    for name, cost in costs:
        gpus = f"{cost.gpus_up}" + (f", {cost.gpus_lost} lost" if cost.gpus_lost else "")
        row = [
            name,
            _Bad(gpus) if cost.gpus_lost else gpus,
            _hours(cost.gpu_seconds),
            _hours(cost.orphan_gpu_seconds),
            _energy(cost.joules.get("full")),
            _energy(cost.orphan_joules.get("full")),
        ]
        if view.price is not None:
            price = (cost.orphan_gpu_seconds or 0.0) * view.price.per_hour / 3600
            row.append(_Number(_UNKNOWN if cost.orphan_gpu_seconds is None else f"{price:,.2f} {money}"))
        rows.append(row)
    return _table("What orphans cost", columns + ([_Number("price")] if money else []), rows)


def _gpus(view: View) -> str:
    """Return a row per GPU; nothing where there is none, which the row of the source explains."""
    if view.gpus is None or not view.gpus.gpus:
        return ""
    numbers = ("utilization", "memory", "power", "temperature", "clock")
    columns = ("GPU", "state", "engine", *map(_Number, numbers), "trouble")
    return _table("GPUs", columns, map(_gpu_cells, view.gpus.gpus))


def _gpu_cells(gpu: GpuView) -> Sequence[str]:
    row = gpu.row
    state = {True: "up", False: _Bad(row.reason or "lost"), None: _UNKNOWN}[gpu.up]
    if row.memory_used is None or row.memory_total is None:
        memory = "the host's" if row.unified_memory else _UNKNOWN
    else:
        memory = f"{row.memory_used / 2**30:,.1f} of {row.memory_total / 2**30:,.1f} GiB"
    trouble = [f"XID {code} ({xid.incidents})" for code, xid in gpu.xids.items()]
    trouble += [f"slowed down: {reason}" for reason in row.throttling or ()]
    trouble += ["utilization latched"] if gpu.latched else []
    trouble += [f"wants: {row.recovery_action}"] if row.recovery_action not in (None, "none") else []
    return (
        f"{row.index} {row.name} ({row.uuid})",
        state,
        ", ".join(gpu.engines) or _UNKNOWN,
        _Number(_UNKNOWN if row.utilization is None else f"{row.utilization:.0%}"),
        _Number(memory),
        _Number(_UNKNOWN if row.power is None else f"{row.power:,.0f} W"),
        _Number(_UNKNOWN if row.temperature is None else f"{row.temperature:.0f} °C"),
        _Number(_UNKNOWN if row.sm_clock is None else f"{row.sm_clock / 1e6:,.0f} MHz"),
        _Bad(", ".join(trouble)) if trouble else "",
    )


def _sources(view: View) -> str:
    rows = (
        (
            source.source,
            source.target,
            "up" if source.up else _Bad("down"),
            _Number(f"{source.seconds * 1000:.0f} ms"),
            source.detail,
        )
        for source in view.sources
    )
    return _table("Sources", ("source", "target", "state", _Number("took"), "detail"), rows)


def _beat(view: View) -> str:
    at = datetime.fromtimestamp(view.wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"<p>Beat {view.beats} at {at}, every {view.interval:g} s; {view.late_beats} late, "
        f"{view.degraded_beats} degraded. Accounting: {escape(view.accounting)}.</p>\n"
    )


def _count(value: float | None) -> _Number:
    return _Number(_UNKNOWN if value is None else f"{value:,.0f}")


def _seconds(value: float | None) -> _Number:
    return _Number(_UNKNOWN if value is None else f"{value:.1f} s")


def _hours(seconds: float | None) -> _Number:
    if seconds is None:
        return _Number(_UNKNOWN)
    return _Number(f"{seconds:,.1f} s" if seconds < 3600 else f"{seconds / 3600:,.2f} h")


def _energy(joules: float | None) -> _Number:
    if joules is None:
        return _Number(_UNKNOWN)
    return _Number(f"{joules:,.0f} J" if joules < 3.6e6 else f"{joules / 3.6e6:,.2f} kWh")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(_cell("th", column) for column in columns)
    body = "\n".join("<tr>" + "".join(_cell("td", cell) for cell in row) + "</tr>" for row in rows)
    return (
        f'<h2>{title}</h2>\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body or '<tr><td>none</td></tr>'}\n</tbody></table></div>\n"
    )


def _cell(tag: str, text: str) -> str:
    """Return one table cell. The only place where text becomes HTML, and so the only place that escapes it."""
    kind = ' class="number"' if isinstance(text, _Number) else ' class="bad"' if isinstance(text, _Bad) else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
