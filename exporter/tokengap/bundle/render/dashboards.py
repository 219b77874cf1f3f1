"""The dashboards as classic Grafana JSON, the only form that Grafana provisions from files.

Plain values, checked in tests against Grafana's own models; see ``docs/decisions`` for why. What stands here is as
Grafana writes it: ``fieldConfig`` is how values look, ``options`` what the kind of panel has of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Final, TypeAlias
from urllib.parse import urlencode

from tokengap.bundle.boards import boards
from tokengap.bundle.boards.board import Board as Drawn
from tokengap.bundle.boards.board import Note, Place, Row, Tile, Word
from tokengap.bundle.render.file import File
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Board, Panel, Query, Threshold, Watch, legend
from tokengap.bundle.watches import watches
from tokengap.series.engines import ENGINE_INFO
from tokengap.series.itself import BUILD_INFO

Json: TypeAlias = dict[str, Any]

#: The newest classic schema. Grafana brings an older one up to date, and none is too new for Grafana 12.
SCHEMA: Final = 42

#: Whatever source of data the reader chose.
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

#: Alerts that fire are marked in every graph, by severity.
_MARKS: Final = {"critical": "red", "warning": "orange"}

#: The same thing has the same colour everywhere: names of lines, and values of labels that name them. Grafana paints
#: the rest.
_COLOURS: Final = {
    "useful": "green",
    "orphaned": "red",
    "not seen or pending": "#808080",
    "unattributed": "#808080",
    "out": "blue",
    "waiting": "yellow",
    "running": "blue",
    "slots": "#808080",
    "clients": "green",
}
_COLOURS_BY_LABEL: Final = {
    "client": {"connected": "green", "stalled": "yellow", "vanished": "dark-red", "gone": "red"},
    "how": {"completed": "green", "cancelled": "blue", "orphaned": "red", "failed": "purple"},
    "basis": {"full": "orange", "active": "yellow", "sole": "red"},
}


def uid(board: Board) -> str:
    """Return the identity of a dashboard in Grafana, the same at every site."""
    return f"tokengap-{board}"


def panel_url(site: Site, panel: Panel, chosen: dict[str, str]) -> str:
    """Return where a panel is seen alone. ``chosen``: values of the dashboard's variables, or templates of alerts."""
    variables = "".join(f"&var-{name}={value}" for name, value in chosen.items())
    return f"{site.dashboards.rstrip('/')}/d/{uid(panel.board)}?{urlencode({'viewPanel': panel.number})}{variables}"


def watch_url(site: Site, watch: Watch) -> str:
    """Return where a watch is seen, as an annotation of its alert: of the instance for which that fires."""
    return panel_url(
        site,
        watch.panel,
        {name: f"{{{{ $labels.{name} | urlquery }}}}" for name in ("job", "instance") if name in watch.labels},
    )


def files(site: Site) -> Iterator[File]:
    """Yield the file of each dashboard."""
    for board in boards(site):
        yield File(f"dashboards/{board.name}.json", json.dumps(dashboard(site, board), indent=2) + "\n")


def dashboard(site: Site, board: Drawn) -> Json:
    """Return a dashboard as Grafana reads it."""
    runbooks = _Runbooks(site)
    return {
        "uid": uid(board.name),
        "title": board.title,
        "description": board.description,
        "tags": ["tokengap"],
        "schemaVersion": SCHEMA,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": board.since, "to": "now"},
        "refresh": board.refresh,
        "links": [
            _link("Decision matrix", site.runbook_url("decision-matrix")),
            _link("Runbooks", site.runbook_url("README")),
            _other_boards(),
        ],
        "annotations": {"list": [_mark(severity, colour) for severity, colour in _MARKS.items()]},
        "templating": {"list": list(_variables())},
        "panels": [_placed(thing, place, runbooks) for thing, place in board.laid_out()],
    }


class _Runbooks:
    """Which runbooks belong to a panel: those of the alerts that are seen in it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._watches = watches(site)

    def links(self, panel: Panel) -> list[Json]:
        """Return a link to each, for the corner of the panel."""
        return [
            _link(f"Runbook: {watch.name}", self._site.runbook_url(watch.name))
            for watch in self._watches
            if (watch.panel.board, watch.panel.title) == (panel.board, panel.title)
        ]


def _link(title: str, url: str) -> Json:
    return {
        "title": title,
        "type": "link",
        "icon": "doc",
        "tooltip": "",
        "url": url,
        "tags": [],
        "asDropdown": False,
        "targetBlank": True,
        "includeVars": False,
        "keepTime": False,
    }


def _other_boards() -> Json:
    """Return the menu of the other dashboards, which keeps what the reader chose."""
    menu = {
        "title": "tokengap",
        "type": "dashboards",
        "icon": "external link",
        "tags": ["tokengap"],
        "asDropdown": True,
    }
    return _link("", "") | menu | {"targetBlank": False, "includeVars": True, "keepTime": True}


def _mark(severity: str, colour: str) -> Json:
    return {
        "name": f"{severity} alerts",
        "datasource": _SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "expr": f'ALERTS{{alertname=~"Tokengap.+",alertstate="firing",severity="{severity}"}}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{engine}} {{hop}} {{uuid}} {{instance}}",
        "step": "15s",
    }


def _variables() -> Iterator[Json]:
    yield {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "current": {"text": "default", "value": "default"},
        "hide": 0,
        "multi": False,
        "includeAll": False,
    }
    # Targets need not have a label cluster: what has none is chosen by all.
    yield _label("cluster", f"label_values({BUILD_INFO}, cluster)", every=".*")
    yield _label("job", f'label_values({BUILD_INFO}{{cluster=~"$cluster"}}, job)')
    yield _label("instance", f'label_values({BUILD_INFO}{{cluster=~"$cluster",job=~"$job"}}, instance)')
    chosen = 'cluster=~"$cluster",job=~"$job",instance=~"$instance"'
    yield _label("engine", f"label_values({ENGINE_INFO}{{{chosen}}}, engine)")


def _label(name: str, asked: str, every: str = ".+") -> Json:
    return {
        "type": "query",
        "name": name,
        "label": name,
        "datasource": _SOURCE,
        "definition": asked,
        "query": {"query": asked, "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 1,  # by name
        "multi": True,
        "includeAll": True,
        "allValue": every,
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _placed(thing: Row | Tile, place: Place, runbooks: _Runbooks) -> Json:
    at = {"gridPos": {"x": place.x, "y": place.y, "w": place.width, "h": place.height}}
    if isinstance(thing, Row):
        return {"type": "row", "id": thing.number, "title": thing.title, "collapsed": False, "panels": []} | at
    if isinstance(thing.panel, Note):
        return _note(thing.panel) | at
    return _panel(thing, thing.panel, runbooks.links(thing.panel)) | at


def _note(note: Note) -> Json:
    return {
        "type": "text",
        "id": note.number,
        "title": note.title,
        "description": note.description,
        "options": {"mode": "markdown", "content": note.text},
    }


def _panel(tile: Tile, panel: Panel, links: list[Json]) -> Json:
    drawn = _DRAWINGS[panel.drawing]
    return {
        "type": panel.drawing,
        "id": panel.number,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "links": links,
        "targets": [_target(query, name, drawn) for query, name in zip(panel.queries, ascii_uppercase, strict=False)],
        "fieldConfig": {"defaults": _look(tile, panel, drawn), "overrides": list(_overrides(panel))},
        "options": drawn.options,
        **({"transformations": [_table(tile)]} if panel.drawing == "table" else {}),
    }


@dataclass(frozen=True, slots=True)
class _Drawing:
    """What a kind of panel has of its own. ``now``: it shows the newest value, and asks for no other."""

    options: Json
    custom: Json
    now: bool = False


_NEWEST: Final = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_TOOLTIP: Final = {"mode": "multi", "sort": "desc"}
_LEGEND: Final = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
_DRAWINGS: Final = {
    "timeseries": _Drawing(
        {"tooltip": _TOOLTIP, "legend": _LEGEND},
        {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False},
    ),
    "stat": _Drawing(
        {
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "value_and_name",
            "wideLayout": True,
            "reduceOptions": _NEWEST,
        },
        {},
        now=True,
    ),
    "state-timeline": _Drawing(
        {"mergeValues": True, "rowHeight": 0.85, "showValue": "auto", "tooltip": _TOOLTIP, "legend": _LEGEND},
        {"lineWidth": 0, "fillOpacity": 70, "spanNulls": False},
    ),
    "bargauge": _Drawing(
        {
            "displayMode": "basic",
            "orientation": "horizontal",
            "valueMode": "color",
            "showUnfilled": True,
            "reduceOptions": _NEWEST,
        },
        {},
        now=True,
    ),
    "table": _Drawing({"showHeader": True, "cellHeight": "sm"}, {"align": "left", "filterable": True}, now=True),
}


def _target(query: Query, name: str, drawn: _Drawing) -> Json:
    return {
        "refId": name,
        "datasource": _SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "editorMode": "code",
        "instant": drawn.now,
        "range": not drawn.now,
        "format": "table" if drawn is _DRAWINGS["table"] else "time_series",
    }


def _look(tile: Tile, panel: Panel, drawn: _Drawing) -> Json:
    """Return how the values of a panel look."""
    custom = dict(drawn.custom)
    if panel.drawing == "timeseries":
        custom["stacking"] = {"mode": "normal" if tile.stacked else "none", "group": "A"}
        custom["thresholdsStyle"] = {"mode": "dashed" if panel.thresholds else "off"}
    look: Json = {
        "unit": panel.unit,
        "noValue": panel.no_value,
        "color": {"mode": "palette-classic" if panel.drawing == "timeseries" else "thresholds"},
        "thresholds": {"mode": "absolute", "steps": list(_steps(panel.thresholds))},
        "mappings": _mappings(tile.words),
        "custom": custom,
    }
    optional = {"min": panel.least, "max": tile.most, "decimals": tile.decimals}
    return look | {key: value for key, value in optional.items() if value is not None}


def _steps(thresholds: tuple[Threshold, ...]) -> Iterator[Json]:
    """Yield the colours from the lowest value up. A panel without a threshold has no bad values, so no red ones."""
    if not thresholds:
        yield {"value": None, "color": "blue"}
        return
    low, *_ = thresholds
    yield {"value": None, "color": "red" if low.comparison == "<" else "green"}
    for threshold in thresholds:
        yield {"value": threshold.value, "color": "green" if threshold.comparison == "<" else "red"}
        if threshold.comparison == "==":
            yield {"value": threshold.value + 1, "color": "green"}


def _mappings(words: tuple[Word, ...]) -> list[Json]:
    if not words:
        return []
    options = {
        str(word.value): {"text": word.text, "color": word.colour, "index": index} for index, word in enumerate(words)
    }
    return [{"type": "value", "options": options}]


def _overrides(panel: Panel) -> Iterator[Json]:
    """Yield the colours of lines by the words in their names."""
    if panel.drawing == "timeseries":
        names = " ".join(query.legend for query in panel.queries)
        colours = {word: colour for word, colour in _COLOURS.items() if re.search(rf"\b{word}\b", names)}
        for label, own in _COLOURS_BY_LABEL.items():
            colours |= own if legend(label) in names else {}
        for word, colour in colours.items():
            look = {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}
            yield {"matcher": {"id": "byRegexp", "options": rf"/\b{word}\b/"}, "properties": [look]}


def _table(tile: Tile) -> Json:
    """Return how a table's columns are ordered: the labels, and the value where it says anything."""
    hidden = ("Time",) if tile.value else ("Time", "Value")
    return {
        "id": "organize",
        "options": {
            "excludeByName": dict.fromkeys(hidden, True),
            "indexByName": {name: index for index, name in enumerate((*tile.columns, "Value"))},
            "renameByName": {"Value": tile.value} if tile.value else {},
        },
    }
