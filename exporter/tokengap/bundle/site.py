"""A site's own numbers and addresses: all that differs between two sites' rules, dashboards and runbooks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tokengap.bundle import promql
from tokengap.errors import SettingsError
from tokengap.series.declare import Series
from tokengap.topology import INTERACTIVE, Limits

#: Where this project's files can be read when nothing of a site can.
REPOSITORY: Final = "https://github.com/tokengap/tokengap/blob/main"

_DEFAULTS: Final = Limits()

#: The flag of ``tokengap bundle`` for each part of a site.
FLAGS: Final[Mapping[str, str]] = {
    "deadline": "--deadline",
    "age_cut": "--age-cut",
    "window": "--window",
    "orphan_budget": "--orphan-budget",
    "deadline_budget": "--deadline-budget",
    "beat": "--interval",
    "scrape": "--scrape",
    "job": "--job",
    "selector": "--selector",
    "runbooks": "--runbook-base",
    "dashboards": "--dashboard-base",
    "exporter": "--exporter-url",
    "engine": "--engine-url",
    "prometheus": "--prometheus-url",
    "owner": "--owner",
    "namespace": "--namespace",
    "labels": "--label",
}
_TIMES: Final = ("deadline", "age_cut", "window", "beat", "scrape")
_SHARES: Final = ("orphan_budget", "deadline_budget")

#: A budget that is spent 14 times too fast must still be less than everything.
_MOST: Final = 0.05

_URLS: Final = ("runbooks", "dashboards", "exporter", "engine", "prometheus")

#: Nothing in it may end a word of a shell, a link of Markdown or a text of YAML.
_URL: Final = re.compile(r"https?://[\w.:\[\]-]+(/([\w./:@%+~=#?&-]|\{alert\})*)?")

#: What keeps a dashboard's queries to what its reader chose.
_CHOSEN: Final = 'cluster=~"$cluster",job=~"$job",instance=~"$instance"'
_CHOSEN_ENGINE: Final = promql.Match("=~", "$engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site. Times are in seconds; what is not given is as the exporter has it by default.

    ``deadline``, ``age_cut``, ``window`` and ``beat``: the exporter's settings of these names, the last its
    ``interval``. ``orphan_budget``: the share of the tokens of 30 days that may be generated for nobody, and
    ``deadline_budget``: the share of 30 days in which deadlines may be missed. ``scrape``: how often Prometheus scrapes
    the exporter and evaluates these rules. ``job``: the name of that scrape. ``selector``: matchers that every query
    has besides its own, as ``cluster="a"``. ``runbooks`` and ``dashboards``: where the links of alerts lead;
    ``{alert}`` in the first stands for an alert's name, and without it the name is put behind. ``exporter``,
    ``engine`` and ``prometheus``: addresses in the commands of runbooks. ``owner``: who is called. ``namespace`` and
    ``labels``: of the Kubernetes objects.

    Raises SettingsError for what cannot be.
    """

    deadline: float = _DEFAULTS.deadlines[INTERACTIVE]
    age_cut: float = _DEFAULTS.age_cut
    window: float = _DEFAULTS.window
    orphan_budget: float = 0.01
    deadline_budget: float = 0.005
    beat: float = 1.0
    scrape: float = 5.0
    job: str = "tokengap"
    selector: str = ""
    runbooks: str = f"{REPOSITORY}/runbooks"
    dashboards: str = "http://localhost:3000"
    exporter: str = "http://127.0.0.1:10788"
    engine: str = "http://127.0.0.1:8000"
    prometheus: str = "http://127.0.0.1:9090"
    owner: str = "on-call of the inference platform"
    namespace: str = "monitoring"
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise SettingsError(problem)

    @property
    def reserve(self) -> float:
        """The slack below which a queue older than the age cut is in breach."""
        return self.deadline - self.age_cut

    @property
    def lookback(self) -> float:
        """The shortest range over which a query may look: four scrapes, so that one may fail, and a minute at least."""
        return max(60.0, 4 * self.scrape)

    @property
    def recent(self) -> float:
        """Over how long something that comes and goes is looked at, before it is worth a ticket."""
        return max(300.0, self.lookback)

    def select(self, series: Series | str, part: str = "", /, **labels: str | promql.Match) -> str:
        """Return the vector of a series, as ``name{cluster="a",state="stuck"}``; of its part ``_bucket``, for one."""
        on_dashboard = self.selector.endswith(_CHOSEN)
        if on_dashboard and isinstance(series, Series) and "engine" in series.labels:
            labels = {"engine": _CHOSEN_ENGINE, **labels}
        return promql.vector(f"{series}{part}", self.selector, labels)

    def shows(self, *series: Series) -> str:
        """Return the command that shows the lines of series on the exporter's page."""
        return f"curl -s {self.exporter}/metrics | grep -E '^({'|'.join(map(str, series))})'"

    def per(self, *labels: str) -> tuple[str, ...]:
        """Return what a query is aggregated by: these labels, and those of the selector, which may match several."""
        return tuple(dict.fromkeys((*labels, *promql.labels_of(self.selector))))

    def runbook_url(self, alert: str) -> str:
        """Return where an alert's runbook can be read."""
        return _address(self.runbooks, alert)

    @property
    def options(self) -> str:
        """The options with which ``tokengap bundle`` makes this site: those that differ from the defaults."""
        return shlex.join(self._words())

    def on_dashboards(self) -> Site:
        """Return this site as its dashboards see it: their variables are in every query."""
        return replace(self, selector=f"{self.selector},{_CHOSEN}" if self.selector else _CHOSEN)

    def _words(self) -> Iterator[str]:
        usual = Site()
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if value == getattr(usual, name):
                continue
            for word in [f"{key}={one}" for key, one in value.items()] if name == "labels" else [_written(name, value)]:
                yield from (flag, word)

    def _problems(self) -> Iterator[str]:
        for name in _TIMES:
            if not getattr(self, name) > 0:
                yield f"{FLAGS[name]} is {getattr(self, name):g}; expected more than 0"
        for name in _SHARES:
            if not 0 < getattr(self, name) <= _MOST:
                share, most = promql.percent(getattr(self, name)), promql.percent(_MOST)
                yield f"{FLAGS[name]} is {share}; expected more than 0% and at most {most}"
        if self.age_cut >= self.deadline:
            cut, deadline = promql.said(self.age_cut), promql.said(self.deadline)
            yield f"--age-cut is {cut}; expected less than the deadline, {deadline}"
        if self.selector and not promql.is_matchers(self.selector):
            yield f'--selector {self.selector!r}; expected matchers of labels, such as cluster="a",region=~"eu-.+"'
        if not re.fullmatch(r"[\w./-]+", self.job):
            yield f"--job {self.job!r}; expected the name of Prometheus' scrape job, such as tokengap"
        if not re.fullmatch(r"[^`<|\n]+", self.owner):
            yield f"--owner {self.owner!r}; expected whom to call, in one line without ` < |"
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self.namespace):
            yield f"--namespace {self.namespace!r}; expected the name of a Kubernetes namespace, such as monitoring"
        for name in _URLS:
            url = getattr(self, name)
            if not is_address(url):
                yield f"{FLAGS[name]} {url!r}; expected an address such as https://host/path"


def is_address(url: str) -> bool:
    """Tell whether a URL may stand in commands, links and YAML as it is."""
    return _URL.fullmatch(url) is not None


def repository_url(alert: str) -> str:
    """Return where an alert's runbook can be read while nothing of the site answers."""
    return _address(f"{REPOSITORY}/runbooks", alert)


def _written(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return promql.percent(value) if name in _SHARES else f"{value:.12g}s"


def _address(base: str, alert: str) -> str:
    return base.replace("{alert}", alert) if "{alert}" in base else f"{base.rstrip('/')}/{alert}.md"
