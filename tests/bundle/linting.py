"""What is wrong with a query or a rule, as far as that can be told without data. promtool lets most of it pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import promql_parser as promql
from promql_parser import AggregateExpr, BinaryExpr, Call, MatchOp, MatrixSelector, ParenExpr, VectorSelector

from tokengap.bundle.promql import UP
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Watch
from tokengap.bundle.watches import budgets
from tokengap.series import SERIES
from tokengap.view import ACCOUNTINGS, BLIND_SPOTS, CLIENTS, ENDINGS, ENGINE_STATES, QUEUE_AGES_FROM

#: Labels that Prometheus puts on what it scrapes.
TARGET = frozenset({"job", "instance"})

#: Labels that a site may put on everything.
PLACE = frozenset({"cluster"})

#: What may stand in a label. Labels that are not here may hold anything.
VALUES = {
    ("tokengap_engine_state", "state"): ENGINE_STATES,
    ("tokengap_streams", "client"): CLIENTS,
    ("tokengap_stream_age_seconds", "client"): CLIENTS,
    ("tokengap_stream_age_max_seconds", "client"): CLIENTS,
    ("tokengap_streams_ended_total", "how"): ENDINGS,
    ("tokengap_queue_age_source", "source"): QUEUE_AGES_FROM,
    ("tokengap_blind_spot", "kind"): BLIND_SPOTS,
    ("tokengap_accounting_mode", "mode"): ACCOUNTINGS,
}

COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}
SETS = {"and", "or", "unless"}
OVER_COUNTERS = {"rate", "irate", "increase", "resets"}
#: What says something of a counter that is no rate: that it is there.
ABSENT = {"absent", "absent_over_time", "present_over_time", "count_over_time", "changes"}

#: Grafana's variables, which are no PromQL: what to read in their place.
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "1m"}


@dataclass(frozen=True)
class Known:
    """A name that may be queried. What is ``scraped`` has the labels of its target, what was recorded has not."""

    labels: frozenset[str]
    counter: bool
    scraped: bool = True

    @property
    def all_labels(self) -> frozenset[str]:
        """Those that Prometheus gave it too."""
        return self.labels | TARGET if self.scraped else self.labels


@cache
def known_names() -> Mapping[str, Known]:
    """Every name that Prometheus has of us, and `up`."""
    names = {UP: Known(frozenset(), False)}
    for record in budgets.records(Site()):
        names[record.name] = Known(PLACE | {"engine"}, False, scraped=False)
    for series in SERIES:
        labels = frozenset(series.labels)
        if series.kind == "gaugehistogram":
            names[f"{series}_bucket"] = Known(labels | {"le"}, False)
            names |= {f"{series}_{part}": Known(labels, False) for part in ("gcount", "gsum")}
        else:
            names[series.name] = Known(labels, series.kind == "counter")
    return names


def parsed(query: str) -> promql.Expr:
    """Parse a query, a dashboard's too."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    return promql.parse(query)


def watch_problems(watch: Watch, site: Site) -> list[str]:
    """Everything that is wrong with a watch's rule and panel."""
    rule = parsed(watch.expr)
    problems = [*query_problems(watch.expr, site)]
    if not compares(rule):
        problems.append("the rule has no comparison: it fires on whatever is there")
    if any(node.func.name == "absent" for node in every(rule) if isinstance(node, Call)) and not watch.hold:
        problems.append("absent() without a hold fires on every restart of Prometheus")
    carried = labels(rule)
    sites_own = {matcher.name for matcher in parsed(f"x{{{site.selector}}}").matchers.matchers}
    if carried - sites_own != frozenset(watch.labels) - sites_own:
        problems.append(f"the rule's alerts carry {sorted(carried)}, not {sorted(watch.labels)}")
    named = set(re.findall(r"\$labels\.(\w+)", watch.description))
    problems += [f"the description names {name}, which the alert does not carry" for name in sorted(named - carried)]
    for query in watch.panel.queries:
        problems += query_problems(query.expr, site)
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        problems += [
            f"the legend names {name}, which no line has" for name in sorted(named - labels(parsed(query.expr)))
        ]
    for look in watch.runbook.right_now:
        problems += query_problems(look.query, site)
    return problems


def query_problems(query: str, site: Site, names: Mapping[str, Known] | None = None) -> Iterator[str]:
    """Yield what is wrong with any query, be it a rule's or a panel's."""
    try:
        tree = parsed(query)
    except ValueError as error:
        yield f"cannot be parsed: {error}"
        return
    names = names or known_names()
    unknown = [node.name for node in every(tree) if isinstance(node, VectorSelector) and node.name not in names]
    if unknown:
        yield from (f"{name} is no name of ours" for name in unknown)
        return
    for node in every(tree):
        if isinstance(node, VectorSelector):
            yield from _selector_problems(node, site, names[node.name])
        elif isinstance(node, BinaryExpr):
            yield from _matching_problems(node, names)
        elif isinstance(node, MatrixSelector) and node.range < timedelta(seconds=4 * site.scrape):
            yield f"{node.vector_selector.name}[{node.range}] holds fewer than four scrapes"
        elif isinstance(node, Call) and node.func.name in OVER_COUNTERS:
            yield from (
                f"{node.func.name}() of {name}, which is no counter"
                for name in _inside(node)
                if not names[name].counter
            )
    yield from (f"{name} is a counter: its value alone says nothing" for name in raw_counters(tree, names))


def _selector_problems(node: VectorSelector, site: Site, name: Known) -> Iterator[str]:
    matchers = node.matchers.matchers
    sites_own = {matcher.name for matcher in promql.parse(f"x{{{site.selector}}}").matchers.matchers}
    if name.scraped and (missing := sites_own - {matcher.name for matcher in matchers}):
        yield f"{node.name} is not limited to the site's {', '.join(sorted(missing))}"
    for matcher in matchers:
        if matcher.name not in name.all_labels | PLACE | sites_own:
            yield f"{node.name} has no label {matcher.name}"
        words = VALUES.get((re.sub("_bucket$|_gcount$|_gsum$", "", node.name), matcher.name))
        asked = matcher.value.split("|") if matcher.op in (MatchOp.Re, MatchOp.NotRe) else [matcher.value]
        if words and not set(asked) <= set(words):
            yield f"{node.name} has no {matcher.name} {matcher.value}"


def _matching_problems(node: BinaryExpr, names: Mapping[str, Known]) -> Iterator[str]:
    """Vectors match only where their labels are the same, or the same as far as `on` says; else nothing is said."""
    if is_scalar(node.lhs) or is_scalar(node.rhs) or str(node.op) == "or":
        return
    left, right, on = labels(node.lhs, names), labels(node.rhs, names), _on(node)
    if on is None:
        if left != right:
            yield f"{node.op} between {sorted(left)} and {sorted(right)} never matches: it needs on()"
        return
    for side in (left, right):
        if not on <= side:
            yield f"{node.op} on {sorted(on - side)}, which one side does not have"
    alone = {"ManyToOne": [node.rhs], "OneToMany": [node.lhs], "OneToOne": [node.lhs, node.rhs]}
    for side in alone.get(str(node.modifier.card).rpartition(".")[2], []):
        if differ := _told_apart_by(side, names) - on:
            yield f"{node.op} on {sorted(on)} meets several lines, which differ by {sorted(differ)}"


def _told_apart_by(node: promql.Expr, names: Mapping[str, Known]) -> frozenset[str]:
    """Return the labels by which the lines of a result differ: of the one best of each group, those of the group."""
    if isinstance(node, AggregateExpr) and str(node.op) in ("topk", "bottomk") and str(node.param) == "1":
        return frozenset(node.modifier.labels)
    return labels(node, names)


def compares(node: promql.Expr) -> bool:
    """Tell whether a rule says nothing while all is well: on each of its ways there is a comparison."""
    if isinstance(node, ParenExpr | AggregateExpr):
        return compares(node.expr)
    if isinstance(node, Call):
        return node.func.name == "absent" or any(map(compares, node.args))
    if not isinstance(node, BinaryExpr):
        return False
    if str(node.op) == "or":
        return compares(node.lhs) and compares(node.rhs)
    return str(node.op) in COMPARISONS or compares(node.lhs) or compares(node.rhs)


def labels(node: promql.Expr, names: Mapping[str, Known] | None = None) -> frozenset[str]:
    """Return the labels of a query's result, without those of the site."""
    names = names or known_names()
    match node:
        case VectorSelector():
            return names[node.name].all_labels
        case MatrixSelector():
            return labels(node.vector_selector, names)
        case ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return labels(node.expr, names)
        case AggregateExpr():
            return _aggregated(node, names)
        case Call() if node.func.name == "absent":
            equal = [
                one.name for each in every(node) if isinstance(each, VectorSelector) for one in each.matchers.matchers
            ]
            return frozenset(equal)
        case Call():
            inside = frozenset().union(*(labels(one, names) for one in node.args))
            return inside - {"le"} if node.func.name == "histogram_quantile" else inside
        case BinaryExpr():
            return _joined(node, names)
    return frozenset()


def _aggregated(node: AggregateExpr, names: Mapping[str, Known]) -> frozenset[str]:
    inside = labels(node.expr, names)
    if str(node.op) in ("topk", "bottomk"):
        return inside
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    return named if str(node.modifier.type).endswith("By") else inside - named


def _joined(node: BinaryExpr, names: Mapping[str, Known]) -> frozenset[str]:
    left, right, on = labels(node.lhs, names), labels(node.rhs, names), _on(node)
    if str(node.op) == "or":
        return left | right
    if is_scalar(node.lhs) or is_scalar(node.rhs):
        return left | right
    if str(node.op) in SETS or str(node.op) in COMPARISONS or on is None:
        return left
    card = str(node.modifier.card).rpartition(".")[2]
    more = frozenset(node.modifier.group_labels or ())
    return {"ManyToOne": left | more, "OneToMany": right | more}.get(card, on)


def raw_counters(node: promql.Expr, names: Mapping[str, Known], counted: bool = False) -> Iterator[str]:
    """Yield each counter whose value is used as it stands."""
    if isinstance(node, VectorSelector):
        if names[node.name].counter and not counted:
            yield node.name
        return
    counted = counted or (isinstance(node, Call) and node.func.name in OVER_COUNTERS | ABSENT)
    for child in children(node):
        yield from raw_counters(child, names, counted)


def is_scalar(node: promql.Expr) -> bool:
    if isinstance(node, ParenExpr | promql.UnaryExpr):
        return is_scalar(node.expr)
    if isinstance(node, BinaryExpr):
        return is_scalar(node.lhs) and is_scalar(node.rhs)
    return isinstance(node, promql.NumberLiteral) or (isinstance(node, Call) and node.func.name in ("time", "scalar"))


def every(node: promql.Expr) -> Iterator[promql.Expr]:
    """Yield a query's parts, itself first."""
    yield node
    for child in children(node):
        yield from every(child)


def children(node: promql.Expr) -> list[promql.Expr]:
    match node:
        case BinaryExpr():
            return [node.lhs, node.rhs]
        case Call():
            return list(node.args)
        case MatrixSelector():
            return [node.vector_selector]
        case AggregateExpr() | ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return [node.expr]
    return []


def _inside(node: promql.Expr) -> list[str]:
    return [one.name for one in every(node) if isinstance(one, VectorSelector)]


def _on(node: BinaryExpr) -> frozenset[str] | None:
    """Return the labels of `on`. `ignoring` is not used here: what it leaves changes with every label that is added."""
    matching = node.modifier and node.modifier.matching
    if not matching:
        return None
    assert str(matching.type).endswith("Include"), "ignoring() is not used here: name the labels with on()"
    return frozenset(matching.labels)
