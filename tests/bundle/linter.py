"""The seventeen rules of Grafana's dashboard-linter, as functions over a dashboard's JSON.

Written from what each rule says it checks; the original is a Go program that is not packaged for these machines. Where
a rule of ours is stricter than the original, its docstring says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

from bundle.grafana import UNITS

Json = Mapping[str, Any]

#: What stands for Grafana's own variables while an expression is parsed: durations that nobody would write.
STAND_INS = {"$__rate_interval": "61s", "$__range": "3607s", "$__interval": "17s"}
RATE_INTERVAL = promql.parse_duration(STAND_INS["$__rate_interval"])
RANGE = promql.parse_duration(STAND_INS["$__range"])

#: Panels that show no query.
SILENT = frozenset({"row", "text", "dashlist", "alertlist"})

#: Every rule, by the name that the original gives it.
RULES: dict[str, Callable[[Json], Iterator[str]]] = {}

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def lint(dashboard: Json) -> list[str]:
    """Return what all rules have to say."""
    return [f"{name}: {said}" for name, rule in RULES.items() for said in rule(dashboard)]


def panels(dashboard: Json) -> Iterator[Json]:
    """Yield all panels, those in collapsed rows included, and no row."""
    for panel in dashboard["panels"]:
        yield from (panel.get("panels", ()) if panel["type"] == "row" else (panel,))


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel, with its expression as a tree."""

    panel: Json
    json: Json
    tree: promql.Expr

    def __str__(self) -> str:
        return f"{self.panel['title']!r}: {self.json['expr']}"


def plain(expression: str) -> str:
    """Return an expression with Grafana's variables replaced by what a parser takes for durations and values."""
    for name, stand_in in STAND_INS.items():
        expression = expression.replace(name, stand_in)
    return expression


def targets(dashboard: Json) -> Iterator[Target]:
    """Yield all queries that can be parsed; what cannot is a rule of its own."""
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            try:
                yield Target(panel, target, promql.parse(plain(target["expr"])))
            except ValueError:
                continue


def nodes(tree: promql.Expr) -> Iterator[tuple[promql.Expr, tuple[promql.Expr, ...]]]:
    """Yield every node with its ancestors, the nearest last."""
    found: list[tuple[promql.Expr, tuple[promql.Expr, ...]]] = []
    above: list[promql.Expr] = []

    def enter(node: promql.Expr) -> None:
        found.append((node, tuple(above)))
        above.append(node)

    def leave(_: promql.Expr) -> None:
        above.pop()

    promql.walk(tree, enter, leave)
    yield from found


def selectors(tree: promql.Expr) -> Iterator[promql.VectorSelector]:
    """Yield every selector, those under a range included."""
    yield from (node for node, _ in nodes(tree) if isinstance(node, promql.VectorSelector))


def variables(dashboard: Json) -> dict[str, Json]:
    """Return the template variables by name."""
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def rule(name: str) -> Callable[[Callable[[Json], Iterator[str]]], Callable[[Json], Iterator[str]]]:
    """Add a rule under the original's name."""

    def add(function: Callable[[Json], Iterator[str]]) -> Callable[[Json], Iterator[str]]:
        RULES[name] = function
        return function

    return add


@rule("template-datasource-rule")
def _template_datasource(dashboard: Json) -> Iterator[str]:
    sources = [variable for variable in variables(dashboard).values() if variable["type"] == "datasource"]
    if [(one["name"], one["label"], one["query"]) for one in sources] != [("datasource", "Data source", "prometheus")]:
        yield "one variable of type datasource, named datasource, labelled Data source, of prometheus is expected"


def _template(dashboard: Json, name: str) -> Iterator[str]:
    variable = variables(dashboard).get(name)
    if variable is None:
        yield f"there is no variable {name}"
        return
    wanted = {"datasource": DATASOURCE, "type": "query", "label": name, "multi": True, "includeAll": True}
    for key, value in (wanted | {"allValue": ".+"}).items():
        if variable.get(key) != value:
            yield f"{name}: {key} is {variable.get(key)!r} and not {value!r}"


@rule("template-job-rule")
def _template_job(dashboard: Json) -> Iterator[str]:
    yield from _template(dashboard, "job")


@rule("template-instance-rule")
def _template_instance(dashboard: Json) -> Iterator[str]:
    yield from _template(dashboard, "instance")


@rule("template-label-promql-rule")
def _template_label_promql(dashboard: Json) -> Iterator[str]:
    for variable in variables(dashboard).values():
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), *(\w+)\)", variable["definition"])
            if asked is None:
                yield f"{variable['name']}: {variable['definition']!r} is no label_values(selector, label)"
                continue
            try:
                promql.parse(asked[1])
            except ValueError as wrong:
                yield f"{variable['name']}: {wrong}"


@rule("template-on-time-change-reload-rule")
def _template_on_time_change_reload(dashboard: Json) -> Iterator[str]:
    for variable in variables(dashboard).values():
        if variable["type"] == "query" and variable.get("refresh") != 2:
            yield f"{variable['name']} is not looked up anew when the time range changes"


@rule("panel-datasource-rule")
def _panel_datasource(dashboard: Json) -> Iterator[str]:
    """Stricter: of every target as well."""
    for panel in panels(dashboard):
        if panel["type"] not in SILENT:
            for place in (panel, *panel["targets"]):
                if place.get("datasource") != DATASOURCE:
                    yield f"{panel['title']!r} uses {place.get('datasource')}"


@rule("panel-title-description-rule")
def _panel_title_description(dashboard: Json) -> Iterator[str]:
    """Stricter: of every panel, whatever its type."""
    for panel in panels(dashboard):
        if not panel.get("title") or not panel.get("description"):
            yield f"{panel.get('title')!r} needs a title and a description"


@rule("panel-units-rule")
def _panel_units(dashboard: Json) -> Iterator[str]:
    """Stricter: of every panel with a query, and of every override."""
    for panel in panels(dashboard):
        if panel["type"] not in SILENT:
            config = panel["fieldConfig"]
            overridden = [p["value"] for o in config["overrides"] for p in o["properties"] if p["id"] == "unit"]
            for unit in (config["defaults"].get("unit"), *overridden):
                if unit not in UNITS:
                    yield f"{panel['title']!r} has the unit {unit!r}"


@rule("panel-no-targets-rule")
def _panel_no_targets(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        if panel["type"] not in SILENT and not panel.get("targets"):
            yield f"{panel['title']!r} asks nothing"


@rule("target-logql-rule")
@rule("target-logql-auto-rule")
def _target_logql(dashboard: Json) -> Iterator[str]:
    """Two rules on LogQL, of which there is to be none at all."""
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            if target.get("datasource", {}).get("type") == "loki":
                yield f"{panel['title']!r} asks for logs"


@rule("target-promql-rule")
def _target_promql(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            try:
                promql.parse(plain(target["expr"]))
            except ValueError as wrong:
                yield f"{panel['title']!r}: {wrong}"


@rule("target-rate-interval-rule")
def _target_rate_interval(dashboard: Json) -> Iterator[str]:
    """Stricter: of every range, not only under rate(). A sum over what the reader looks at is ``$__range``."""
    for target in targets(dashboard):
        for node, above in nodes(target.tree):
            if isinstance(node, promql.MatrixSelector):
                allowed = {RATE_INTERVAL, RANGE} if _function(above) == "increase" else {RATE_INTERVAL}
                if node.range not in allowed:
                    yield f"{target} has a range of its own, {node.range}"


def _function(above: tuple[promql.Expr, ...]) -> str:
    """Return the function that is called with what has these ancestors, or nothing."""
    return above[-1].func.name if above and isinstance(above[-1], promql.Call) else ""


def _target_matches(dashboard: Json, label: str) -> Iterator[str]:
    for target in targets(dashboard):
        for selector in selectors(target.tree):
            matched = {(matcher.name, str(matcher.op), matcher.value) for matcher in selector.matchers.matchers}
            if (label, str(promql.MatchOp.Re), f"${label}") not in matched:
                yield f'{target}: {selector.name} is not limited by {label}=~"${label}"'


@rule("target-job-rule")
def _target_job(dashboard: Json) -> Iterator[str]:
    yield from _target_matches(dashboard, "job")


@rule("target-instance-rule")
def _target_instance(dashboard: Json) -> Iterator[str]:
    yield from _target_matches(dashboard, "instance")


@rule("target-counter-agg-rule")
def _target_counter_agg(dashboard: Json) -> Iterator[str]:
    for target in targets(dashboard):
        for node, above in nodes(target.tree):
            if isinstance(node, promql.VectorSelector) and (node.name or "").endswith("_total"):
                ranged = bool(above) and isinstance(above[-1], promql.MatrixSelector)
                if not ranged or _function(above[:-1]) not in ("rate", "irate", "increase"):
                    yield f"{target}: the counter {node.name} is under no rate"


@rule("uneditable-dashboard-rule")
def _uneditable(dashboard: Json) -> Iterator[str]:
    if dashboard.get("editable") is not False:
        yield "it can be edited, and edits would be lost"
