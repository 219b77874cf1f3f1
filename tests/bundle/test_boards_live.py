"""The panels of the dashboards, asked of a real Prometheus as Grafana would: does each show something, and what?"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bundle.panels import Line, Span, panels, shown
from deployed import prometheus_config
from monitoring import Prometheus, aimed, prometheus
from test_end_to_end import Watched, everything, total, watched
from tokengap.bundle.boards import boards
from tokengap.bundle.boards.asking import VERDICTS
from tokengap.bundle.render.dashboards import dashboard
from tokengap.bundle.render.file import as_yaml
from tokengap.bundle.render.rules import alerts
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches
from tokengap.lab.batching import Knobs
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.lab.users import User, Visit
from tokengap.series.admit import ADMISSION
from tokengap.series.cost import COST
from tokengap.series.engines import LINES_SKIPPED
from tokengap.series.gpus import GPUS
from tokengap.series.proxies import BLIND_SPOT, PROXIES
from tokengap.series.streams import STREAMS, STREAMS_ENDED

pytestmark = pytest.mark.e2e

#: Seconds between two scrapes.
SCRAPE = 1.0

VERDICT = {word.value: word.text for word in VERDICTS}

Place = tuple[str, str]

#: Every panel that asks something, as Grafana reads it, by its dashboard and title.
PANELS = {(board.name, panel["title"]): panel for board in boards(Site()) for panel in panels(dashboard(Site(), board))}


WATCHED = {(watch.panel.board, watch.panel.title) for watch in watches(Site())}


@dataclass
class Looking:
    """Somebody who looks at the dashboards."""

    prometheus: Prometheus

    async def at(self, board: str, title: str, seconds: float = 15.0) -> list[list[Line]]:
        """Return what each query of a panel shows of the last seconds."""
        now = time.time()
        return await shown(PANELS[board, title], self.prometheus, Span(now - seconds, now, step=1.0, scrape=SCRAPE))

    async def newest(self, board: str, title: str) -> dict[str, float]:
        """Return the newest value of each line of a panel."""
        return {line.name: line.newest for lines in await self.at(board, title) for line in lines}

    async def until(self, condition: Callable[[dict[str, float]], bool], board: str, title: str, within: float = 30.0):
        """Look at one panel until a condition holds of its newest values."""
        deadline = time.monotonic() + within
        while not condition(values := await self.newest(board, title)):
            assert time.monotonic() < deadline, f"{title} is {values}"
            await asyncio.sleep(0.3)

    async def empty(self, places: Iterable[Place]) -> set[Place]:
        """Return the panels with a query without a value; of what alerts look at, with none: some are of last week."""
        return {place for place in places if not (any if place in WATCHED else all)(await self.at(*place))}


@asynccontextmanager
async def looking(lab: Watched, directory: Path) -> AsyncIterator[Looking]:
    rules = directory / "alerts.yml"
    rules.write_text(as_yaml(alerts(Site(scrape=SCRAPE))))
    async with prometheus(aimed(prometheus_config(), [lab.exporter.target], [rules], scrape=1), directory) as server:
        yield Looking(server)


async def test_no_panel_is_empty(tmp_path: Path, nvml: FakeNvml):
    """With everything that there can be, one stream that ran to its end for nobody, and a leak that starves people
    until an alert fires: every query of every panel has a value, and those that matter most have the right one."""
    async with everything(tmp_path, nvml) as lab, AsyncExitStack() as stack:
        reader = await stack.enter_async_context(looking(lab, tmp_path))
        await reader.until(lambda running: running.get("running worker") == 0, "engine", "Running and waiting")
        await Visit(User("left", max_tokens=200, leave_at=2.5), lab.edge_port).run()
        await lab.exporter.until(lambda page: total(page, STREAMS_ENDED, how="orphaned") == 1)
        users = await stack.enter_async_context(lab.crowd(4, max_tokens=5000))
        await lab.exporter.until(lambda page: total(page, STREAMS, engine="worker") == 4)
        users[0].cancel()  # it has the one slot, and the gateway reads on for it
        await reader.until(lambda slack: slack.get("worker interactive", 8) < 0, "oncall", "Deadline slack now")
        empty, deadline = set(PANELS), time.monotonic() + 20
        while empty and time.monotonic() < deadline:
            empty = await reader.empty(empty)
            await asyncio.sleep(0.5)
        assert sorted(empty) == []
        assert VERDICT[(await reader.newest("oncall", "Verdict now"))["worker"]] == "busy"
        assert (await reader.newest("oncall", "Queue age now"))["worker"] > Site().age_cut
        assert (await reader.newest("money", "Streams held for nobody"))["edge gone"] == 1
        page = 'ALERTS{alertname="TokengapQueueWillMissDeadline",alertstate="firing"}'
        await reader.prometheus.until(page, bool, within=30)
        firing = [line.labels["alertname"] for lines in await reader.at("oncall", "Firing") for line in lines]
        assert "TokengapQueueWillMissDeadline" in firing


#: What a site has no value of that has no GPU, asks no proxy and no gateway, and whose engine writes a page that can be
#: read.
UNKNOWN = (
    *GPUS,
    *COST,
    *ADMISSION,
    *(series for series in PROXIES if series is not BLIND_SPOT),
    LINES_SKIPPED,
    "ALERTS",
)


@pytest.mark.long
async def test_what_is_not_known_is_not_shown(tmp_path: Path):
    """A healthy engine at work, no GPU, neither proxy nor gateway that is asked: what rests on those is empty and
    not 0, nothing fires, and everything else has a value."""
    unknown = re.compile(rf"\b({'|'.join(map(str, UNKNOWN))})\b")
    expected = {
        place for place, panel in PANELS.items() if any(unknown.search(target["expr"]) for target in panel["targets"])
    }
    async with (
        watched(tmp_path, Knobs(rate=50), "--no-gpu") as lab,
        lab.crowd(2, max_tokens=5000),
        looking(lab, tmp_path) as reader,
    ):
        await reader.until(lambda age: age != {}, "engine", "Age of streams in flight")
        empty, deadline = set(PANELS), time.monotonic() + 20
        while empty != expected and time.monotonic() < deadline:
            empty = await reader.empty(PANELS)
            await asyncio.sleep(0.5)
        assert sorted(empty) == sorted(expected)
        assert VERDICT[(await reader.newest("oncall", "Verdict now"))["worker"]] == "busy"


@pytest.mark.long
async def test_an_engine_dies(tmp_path: Path):
    """It is called dead, and what was known of its queue is no longer shown."""
    async with watched(tmp_path, Knobs(rate=50), "--no-gpu") as lab, looking(lab, tmp_path) as reader:
        async with lab.crowd(2, max_tokens=5000):
            await reader.until(lambda verdict: verdict.get("worker") == 2, "oncall", "Verdict now")
            lab.engine.signal(signal.SIGKILL)
            await reader.until(lambda verdict: VERDICT[verdict["worker"]] == "dead", "oncall", "Verdict now")
        await reader.until(lambda age: age == {}, "oncall", "Queue age now")
