"""The recording rules in a real Prometheus over four exporters: two clusters, and an engine behind two proxies."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from bundle.sites import DEFAULT
from deployed import prometheus_config
from lab.serving import served, until
from monitoring import aimed, prometheus
from tokengap.bundle.render import rules
from tokengap.lab.parts import LOOPBACK
from tokengap.series.engines import ENGINE_INFO, ENGINE_OPEN, ENGINE_RUNNING, ENGINE_WAITING
from tokengap.series.queue import DEADLINE_SLACK, QUEUE_AGE
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT, TOKENS_USEFUL

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@dataclass(frozen=True)
class Seen:
    """What one exporter sees of one engine: tokens a second, streams, and the worst of waits."""

    engine: str
    model: str
    out: float
    useful: float
    orphaned: float
    in_flight: float
    streams: float
    queue_age: float

    def page(self, seconds: float) -> str:
        """Return its page after so many seconds."""
        mine = f'engine="{self.engine}"'
        return "\n".join(
            (
                f'{TOKENS_OUT}{{{mine},model="{self.model}"}} {self.out * seconds}',
                f"{TOKENS_USEFUL}{{{mine}}} {self.useful * seconds}",
                f'{TOKENS_ORPHANED}{{{mine},hop="edge"}} {self.orphaned * seconds}',
                f"{ENGINE_RUNNING}{{{mine}}} {self.in_flight}",
                f"{ENGINE_WAITING}{{{mine}}} 0",
                f"{ENGINE_OPEN}{{{mine}}} {self.streams}",
                f"{QUEUE_AGE}{{{mine}}} {self.queue_age}",
                f'{DEADLINE_SLACK}{{{mine},class="interactive"}} {8 - self.queue_age}',
                f'{ENGINE_INFO}{{{mine},model="{self.model}",url="http://x",family="vllm"}} 1',
                "",
            )
        )


EXPORTERS: tuple[tuple[str, Seen], ...] = (
    ("a", Seen("big", "llama", out=1000, useful=600, orphaned=100, in_flight=8, streams=5, queue_age=3)),
    ("a", Seen("big", "llama", out=1000, useful=200, orphaned=100, in_flight=8, streams=3, queue_age=7)),
    ("a", Seen("small", "llama", out=500, useful=500, orphaned=0, in_flight=4, streams=2, queue_age=0)),
    ("b", Seen("big", "qwen", out=2000, useful=0, orphaned=2000, in_flight=1, streams=1, queue_age=1)),
)


def exporter(seen: Seen, began: float) -> web.Application:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text=seen.page(time.monotonic() - began))

    app = web.Application()
    app.router.add_get("/metrics", page)
    return app


def written_rules(directory: Path) -> list[Path]:
    """Write the rules, recorded more often than they are so that a test need not wait, and return the files."""
    written = []
    for file in rules.files(DEFAULT):
        written.append(directory / Path(file.path).name)
        written[-1].write_text(file.text.replace("interval: 30s", "interval: 1s"))
    return written


async def test_four_exporters(tmp_path: Path):
    """No token is counted twice, and none is lost; the worst wait is the fleet's."""
    files = written_rules(tmp_path)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        config = aimed(prometheus_config(), [], files, scrape=1)
        targets = []
        for cluster, seen in EXPORTERS:
            port = await stack.enter_async_context(served(exporter(seen, began)))
            targets.append({"targets": [f"{LOOPBACK}:{port}"], "labels": {"cluster": cluster}})
        config["scrape_configs"][0]["static_configs"] = targets
        server = await stack.enter_async_context(prometheus(config, tmp_path))

        async def shares(level: str, *labels: str) -> dict[tuple[str, ...], list[float]]:
            """Return what became of the tokens out, as shares: a rate over five minutes is low after a few seconds."""
            out, *parts = [
                await server.values(f"{level}:tokengap_tokens_{what}:rate5m", *labels)
                for what in ("out", "useful", "orphaned", "unattributed")
            ]
            return {key: [part.get(key, 0) / out[key] for part in parts] for key in out if out[key]}

        async def settled() -> bool:
            found = await shares("engine", "cluster", "engine")
            wanted = {("a", "big"): [0.8, 0.2, 0], ("a", "small"): [1, 0, 0], ("b", "big"): [0, 1, 0]}
            return found.keys() == wanted.keys() and all(found[key] == near(wanted[key]) for key in wanted)

        await until(settled, within=30)
        assert await shares("model", "model") == {
            ("llama",): near([1300 / 1500, 200 / 1500, 0]),
            ("qwen",): near([0, 1, 0]),
        }
        assert await shares("cluster", "cluster") == {
            ("a",): near([1300 / 1500, 200 / 1500, 0]),
            ("b",): near([0, 1, 0]),
        }
        assert await server.values("cluster:tokengap_coverage:ratio", "cluster") == {("a",): near(10 / 12), ("b",): 1}
        assert await server.values("cluster:tokengap_queue_age_seconds:max", "cluster") == {("a",): 7, ("b",): 1}
        slack = "cluster:tokengap_deadline_slack_seconds:min"
        assert await server.values(slack, "cluster", "class") == {("a", "interactive"): 1, ("b", "interactive"): 7}


def near(value):
    """What scrapes at different moments make of it."""
    return pytest.approx(value, abs=0.05)
