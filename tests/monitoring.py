"""A real Prometheus to ask, as a site runs it: its configuration, and queries over HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from tokengap.lab.parts import LOOPBACK, Part, free_port, running


@dataclass(frozen=True)
class Prometheus:
    """A running one. ``url`` is its address."""

    url: str
    session: aiohttp.ClientSession

    async def query(self, query: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query, each with ``metric`` (its labels) and ``value``."""
        async with self.session.get(f"{self.url}/api/v1/query", params={"query": query}) as answer:
            said = await answer.json()
        assert said["status"] == "success", said
        return said["data"]["result"]

    async def values(self, query: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of an instant query by the values of these labels, an absent one being empty."""
        return {
            tuple(row["metric"].get(label, "") for label in labels): float(row["value"][1])
            for row in await self.query(query)
        }


@asynccontextmanager
async def prometheus(directory: Path, configuration: Mapping[str, Any]) -> AsyncIterator[Prometheus]:
    """Run one with this configuration, and yield it once it answers."""
    program = shutil.which("prometheus")
    assert program, "prometheus is not installed: apt-get install prometheus"
    file, port = directory / "prometheus.yml", free_port()
    file.write_text(json.dumps(configuration))  # which is YAML too
    command = (
        *(program, f"--config.file={file}", f"--storage.tsdb.path={directory}/data"),
        f"--web.listen-address={LOOPBACK}:{port}",
    )
    url = f"http://{LOOPBACK}:{port}"
    async with running(Part("prometheus", command, (port,)), directory), aiohttp.ClientSession() as session:
        async with asyncio.timeout(20):  # it accepts connections before it answers queries
            while (await session.get(f"{url}/-/ready")).status != HTTPStatus.OK:  # noqa: ASYNC110 - another process's event
                await asyncio.sleep(0.1)
        yield Prometheus(url, session)


def scraping(every: str, targets: Mapping[str, Mapping[str, str]], *rules: Path) -> dict[str, Any]:
    """Return a configuration: what to scrape how often, with the labels of each target, and which files of rules."""
    return {
        "global": {"scrape_interval": every, "scrape_timeout": "1s", "evaluation_interval": every},
        "rule_files": [str(rule) for rule in rules],
        "scrape_configs": [
            {
                "job_name": "tokengap",
                "static_configs": [{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()],
            }
        ],
    }
