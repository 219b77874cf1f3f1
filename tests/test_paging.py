"""The page arrives: the lab is driven into each critical state, with a real Prometheus, a real Alertmanager and the
ready-made configurations of both. It is told once, with the runbook first, and so is the end.

The long test prints how long a page takes from the instant at which the state begins::

    pytest -m long -n 3 -rP tests/test_paging.py
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deployed import alertmanager_config, prometheus_config
from monitoring import Monitoring, monitored
from test_end_to_end import Watched, state, total, watched
from tokengap.bundle.render.file import as_yaml
from tokengap.bundle.render.rules import alerts, runbook_url
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches
from tokengap.lab.batching import Knobs
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.lab.nvml.profiles import H100, many
from tokengap.lab.parts import running
from tokengap.lab.truth import EngineControl
from tokengap.series.cost import ENGINE_GPUS
from tokengap.series.engines import ENGINE_RUNNING
from tokengap.series.streams import STREAMS

pytestmark = pytest.mark.e2e

#: Seconds after which a page, or its end, will not come any more. Only something broken takes so long.
NEVER = 600.0


@dataclass(frozen=True)
class Lab:
    """What is driven. What a state's end starts goes on in ``later``, until the lab is taken down."""

    watched: Watched
    nvml: FakeNvml
    site: Site
    directory: Path
    later: AsyncExitStack

    @property
    def engine(self) -> EngineControl:
        (port,) = self.watched.engine.part.ports
        return EngineControl(port)

    async def restart(self, part: Any) -> None:
        await self.later.enter_async_context(running(part, self.directory))


#: Brings the lab into a state, yields the instant (``time.monotonic()``) from which on it holds, and ends it.
Drive = Callable[[Lab], AbstractAsyncContextManager[float]]


@asynccontextmanager
async def long_queue(lab: Lab) -> AsyncIterator[float]:
    """One slot is taken for minutes, and two wait for it."""
    asked = time.monotonic()
    async with lab.watched.crowd(3, max_tokens=20_000):
        yield asked + lab.site.age_cut


@asynccontextmanager
async def left_alone(lab: Lab) -> AsyncIterator[float]:
    """All clients leave, and the gateway reads on for them: every slot is held for nobody."""
    async with lab.watched.crowd(4, max_tokens=20_000):
        await lab.watched.exporter.until(lambda page: total(page, ENGINE_RUNNING) == 4)
    left = time.monotonic()
    await lab.watched.exporter.until(lambda page: total(page, STREAMS, client="gone") == 4)
    yield left
    await lab.engine.turn(rate=50_000)


@asynccontextmanager
async def too_old(lab: Lab) -> AsyncIterator[float]:
    """The same, but it is the age of what is held that matters."""
    asked = time.monotonic()
    async with left_alone(lab) as left:
        yield max(left, asked + lab.site.age_cut)


@asynccontextmanager
async def frozen(lab: Lab) -> AsyncIterator[float]:
    """The engine's core hangs with work in flight; its page goes on, with values that stand still."""
    async with lab.watched.crowd(2, max_tokens=20_000):
        await lab.watched.exporter.until(lambda page: total(page, ENGINE_RUNNING) == 2)
        await lab.engine.freeze()
        yield time.monotonic()
        await lab.engine.thaw()


@asynccontextmanager
async def killed(lab: Lab) -> AsyncIterator[float]:
    """The engine's process ends, and is started again."""
    await lab.watched.exporter.until(lambda page: state(page) == "idle")
    lab.watched.engine.signal(signal.SIGKILL)
    yield time.monotonic()
    await lab.restart(lab.watched.engine.part)


@asynccontextmanager
async def gpu_lost(lab: Lab) -> AsyncIterator[float]:
    """One of the engine's two GPUs falls off the bus, and comes back."""
    await lab.watched.exporter.until(lambda page: total(page, ENGINE_GPUS, state="up") == 2)
    lab.nvml.lose(1)
    yield time.monotonic()
    lab.nvml.say()


@asynccontextmanager
async def nobody_watches(lab: Lab) -> AsyncIterator[float]:
    """The exporter's process ends, and is started again."""
    lab.watched.exporter_part.signal(signal.SIGKILL)
    yield time.monotonic()
    await lab.restart(lab.watched.exporter_part.part)


@dataclass(frozen=True)
class State:
    """How the lab comes into the state that one alert is about. ``beside``: what else is right to page then."""

    drive: Drive
    knobs: Knobs = field(default_factory=lambda: Knobs(rate=20))
    leak: bool = False
    beside: frozenset[str] = frozenset()


#: The state of each critical alert.
STATES = {
    "TokengapQueueWillMissDeadline": State(long_queue, Knobs(rate=20, max_num_seqs=1)),
    "TokengapOrphanHoldsSlot": State(too_old, leak=True, beside=frozenset({"TokengapSlotsPinnedAfterDisconnects"})),
    "TokengapSlotsPinnedAfterDisconnects": State(left_alone, leak=True, beside=frozenset({"TokengapOrphanHoldsSlot"})),
    "TokengapEngineStuck": State(frozen),
    "TokengapEngineDead": State(killed),
    "TokengapGpuLost": State(gpu_lost),
    "TokengapDown": State(nobody_watches),
}

CRITICAL = [watch.name for watch in watches(Site()) if watch.severity == "critical"]


@asynccontextmanager
async def on_call(
    state: State, site: Site, nvml: FakeNvml, directory: Path, *more: str, hurried: bool = False
) -> AsyncIterator[tuple[Lab, Monitoring]]:
    """Run everything, from the engine to the pager. ``hurried``: an end is told within seconds, not after a minute."""
    one, two = many(H100, 2)
    nvml.set(one, two)
    variables = {name: nvml.environment[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_CONTROL")}
    rules, told = alerts(site), alertmanager_config(directory)
    if hurried:
        told["route"]["routes"][0]["group_interval"] = "1s"
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule.pop("keep_firing_for", None)
    path = directory / "alerts.yml"
    path.write_text(as_yaml(rules))
    async with (
        watched(directory, state.knobs, *more, variables=variables, leak=state.leak) as lab,
        monitored(
            prometheus_config=prometheus_config(),
            alertmanager_config=told,
            targets=[lab.exporter.target],
            rules=[path],
            scrape=site.scrape,
            directory=directory,
        ) as monitoring,
        AsyncExitStack() as later,
    ):
        nvml.set(*(replace(gpu, processes={lab.engine.pid: 1 << 30}) for gpu in (one, two)))
        await monitoring.prometheus.until(f'up{{job="{site.job}"}}', lambda rows: [v for _, v in rows] == [1], 60)
        assert await monitoring.prometheus.query('ALERTS{alertstate="firing"}') == []
        yield Lab(lab, nvml, site, directory, later), monitoring


def read(alert: str, site: Site, monitoring: Monitoring) -> None:
    """Check what the pager's owner reads: the runbook before everything else, by Slack and by PagerDuty."""
    (watch,) = (watch for watch in watches(site) if watch.name == alert)
    url = runbook_url(site, watch)
    slack = [body["attachments"][0] for body in monitoring.pager.of("slack")]
    texts = [each["text"].splitlines() for each in slack if alert in each["title"]]
    assert texts
    assert {text[0] for text in texts} == {f"Runbook: {url}"}
    assert {text[1] for text in texts} == {watch.summary}
    incidents = [body for body in monitoring.pager.of("pagerduty") if body["event_action"] == "trigger"]
    links = [body["links"][0] for body in incidents if alert in body["payload"]["summary"]]
    assert links == [{"href": url, "text": "Runbook"}]


async def pages(alert: str, lab: Lab, monitoring: Monitoring) -> float:
    """Go through the state of an alert: it is told once, then its end. Return how long the page took, in seconds."""
    pager = monitoring.pager
    async with STATES[alert].drive(lab) as began:
        page = await pager.until(lambda message: message.tells(alert, "firing"), NEVER)
    await pager.until(lambda message: message.tells(alert, "resolved"), NEVER)
    assert [message.tells(alert, "firing") for message in pager.notifications].count(True) == 1
    read(alert, lab.site, monitoring)
    told = {message.body["groupLabels"]["alertname"] for message in pager.notifications if message.channel == "webhook"}
    assert told & set(CRITICAL) <= {alert} | STATES[alert].beside
    return page.at - began


def test_every_critical_alert_is_tried():
    assert set(CRITICAL) <= set(STATES)


async def test_an_engine_that_hangs_is_a_page_and_its_recovery_another(nvml: FakeNvml, tmp_path: Path):
    """From the frozen core to the pager and back, in the time that two short windows take."""
    site, alert = Site(scrape=1, window=1), "TokengapEngineStuck"
    async with on_call(STATES[alert], site, nvml, tmp_path, "--window", "1s", hurried=True) as (lab, monitoring):
        await pages(alert, lab, monitoring)


async def test_a_queue_that_will_miss_its_deadline_is_a_page(nvml: FakeNvml, tmp_path: Path):
    """The page that all of this is about."""
    site, alert = Site(scrape=1, deadline=3, age_cut=2), "TokengapQueueWillMissDeadline"
    settings = ("--deadline", "3s", "--age-cut", "2s")
    async with on_call(STATES[alert], site, nvml, tmp_path, *settings) as (lab, monitoring), long_queue(lab):
        await monitoring.pager.until(lambda message: message.channel == "slack", NEVER)
        await monitoring.pager.until(lambda message: message.channel == "pagerduty", NEVER)
        read(alert, site, monitoring)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scrape", [2, 15])
@pytest.mark.parametrize("alert", CRITICAL)
async def test_the_page_arrives(alert: str, scrape: float, nvml: FakeNvml, tmp_path: Path):
    """In each critical state, with everything as it is by default; and how long it takes."""
    async with on_call(STATES[alert], Site(scrape=scrape), nvml, tmp_path) as (lab, monitoring):
        delay = await pages(alert, lab, monitoring)
    print(f"\n| {alert} | {scrape} s | {delay:.1f} s |")
