"""A real Prometheus, a real Alertmanager and somebody who is told, on loopback: does a page arrive, and when?

Both run with the configurations that are handed in, such as those in ``deploy/``; what changes is only where they
listen, what is scraped how often, and that messages come to a :class:`Pager` in place of the services outside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeAlias

import aiohttp
import yaml
from aiohttp import web

from tokengap.errors import SetupError
from tokengap.lab.parts import LOOPBACK, Part, free_port, free_ports, installed, running

#: What Prometheus answers: labels and value of each series.
Rows: TypeAlias = list[tuple[Mapping[str, str], float]]

Channel: TypeAlias = Literal["webhook", "slack", "pagerduty"]

#: Seconds that either program may take to be ready. Alertmanager first settles its cluster, of one.
READY_WITHIN = 30.0

#: Kinds of receivers that call an address, by what they call it in their configuration.
_ADDRESSES: Mapping[Channel, str] = {"webhook": "url", "slack": "api_url", "pagerduty": "url"}


@dataclass(frozen=True, slots=True)
class Notification:
    """A message as it came. ``at``: ``time.monotonic()``. ``body``: the JSON of that channel."""

    at: float
    channel: Channel
    body: Mapping[str, Any]

    def tells(self, alert: str, status: Literal["firing", "resolved"]) -> bool:
        """Whether it is Alertmanager's own JSON, and says this of this alert."""
        if self.channel != "webhook" or self.body["status"] != status:
            return False
        return bool(self.body["groupLabels"].get("alertname") == alert)


class Pager:
    """Whoever is told: takes what webhooks, Slack and PagerDuty would get, and remembers it in order."""

    def __init__(self) -> None:
        self.notifications: list[Notification] = []
        self._came = asyncio.Event()

    def app(self) -> web.Application:
        """Return the application that takes messages, each channel at a path of its name."""
        app = web.Application()
        for channel in _ADDRESSES:
            app.router.add_post(f"/{channel}", self._take(channel))
        return app

    def of(self, channel: Channel) -> list[Mapping[str, Any]]:
        """Return the messages of one channel."""
        return [message.body for message in self.notifications if message.channel == channel]

    async def until(self, condition: Callable[[Notification], bool], within: float) -> Notification:
        """Return the first message for which the condition holds, as soon as it is there. TimeoutError: none came."""
        async with asyncio.timeout(within):
            while True:
                self._came.clear()
                for message in self.notifications:
                    if condition(message):
                        return message
                await self._came.wait()

    def _take(self, channel: Channel) -> Callable[[web.Request], Any]:
        async def take(request: web.Request) -> web.Response:
            self.notifications.append(Notification(time.monotonic(), channel, await request.json()))
            self._came.set()
            # Slack says "ok", PagerDuty 202; both clients want no more than a 2xx.
            return web.Response(status=HTTPStatus.ACCEPTED, text="ok")

        return take


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, which answers queries."""

    url: str
    session: aiohttp.ClientSession

    async def query(self, expression: str) -> Rows:
        """Return what an expression is now. SetupError: it is refused."""
        return [(row["metric"], float(row["value"][1])) for row in await self.ask("query", query=expression)]

    async def ask(self, what: Literal["query", "query_range"], **parameters: str | float) -> list[dict[str, Any]]:
        """Return the result of a query as Prometheus words it, with the parameters of its API."""
        async with self.session.get(f"{self.url}/api/v1/{what}", params=parameters) as answer:
            said = await answer.json()
        if said["status"] != "success":
            raise SetupError(f"Prometheus refuses {parameters}: {said['error']}")
        result: list[dict[str, Any]] = said["data"]["result"]
        return result

    async def values(self, expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the same by the values of these labels, empty where one is missing."""
        rows = await self.query(expression)
        return {tuple(has.get(label, "") for label in labels): value for has, value in rows}

    async def until(self, expression: str, condition: Callable[[Rows], bool], within: float) -> Rows:
        """Ask until a condition holds of the answer, and return that. SetupError: not within so many seconds."""
        deadline = time.monotonic() + within
        while not condition(rows := await self.query(expression)):
            if time.monotonic() > deadline:
                raise SetupError(f"{expression!r} is not as expected after {within:g} s: {rows}")
            await asyncio.sleep(0.2)
        return rows


@dataclass(frozen=True, slots=True)
class Monitoring:
    """A Prometheus that scrapes and evaluates, an Alertmanager that it tells, and who is told by that."""

    prometheus: Prometheus
    alertmanager: str
    pager: Pager


def redirected(config: Mapping[str, Any], pager: str, mail: str = "") -> dict[str, Any]:
    """Return an Alertmanager's configuration in which every message goes to the pager at an address.

    Each receiver keeps its channels, whose secrets become words, and tells a webhook too. Mail goes to the SMTP server
    ``mail``, HOST:PORT; there is none without it.
    """
    receivers = []
    for receiver in config["receivers"]:
        new: dict[str, Any] = {"name": receiver["name"]}
        for channel, key in _ADDRESSES.items():
            kept = [
                {k: v for k, v in one.items() if not k.endswith("_file")}
                for one in receiver.get(f"{channel}_configs", ())
            ]
            new[f"{channel}_configs"] = [one | {key: f"{pager}/{channel}"} for one in kept]
        for one in new["pagerduty_configs"]:
            one["routing_key"] = "secret"
        if len(receiver) > 1:  # a receiver of nothing stays one
            new["webhook_configs"] = [{"url": f"{pager}/webhook", "send_resolved": True}]
        new["email_configs"] = list(receiver.get("email_configs", ())) if mail else []
        receivers.append(new)
    everywhere = dict(config.get("global", {}))
    if mail:
        everywhere |= {"smtp_smarthost": mail, "smtp_require_tls": False}
    return {**config, "global": everywhere, "receivers": receivers}


def aimed(
    config: Mapping[str, Any], targets: Sequence[str], rules: Sequence[Path], scrape: float, alertmanager: int = 0
) -> dict[str, Any]:
    """Return a Prometheus' configuration that scrapes these targets every so many seconds, with these rules.

    Of its own it keeps labels and relabelling. ``alertmanager`` is a port on loopback; 0: nobody is told.
    """
    (job,) = config["scrape_configs"]
    (static,) = job["static_configs"]
    job = {
        **job,
        "scrape_interval": f"{scrape:g}s",
        "scrape_timeout": f"{min(scrape, 4.0):g}s",
        "static_configs": [{**static, "targets": list(targets)}],
    }
    told = [{"static_configs": [{"targets": [f"{LOOPBACK}:{alertmanager}"]}]}] if alertmanager else []
    return {
        "global": {"scrape_interval": f"{scrape:g}s", "evaluation_interval": f"{scrape:g}s"},
        "rule_files": [str(path) for path in rules],
        "alerting": {"alertmanagers": told},
        "scrape_configs": [job],
    }


@asynccontextmanager
async def prometheus(config: Mapping[str, Any], directory: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus while the block lasts; it answers queries from the beginning of it on."""
    port = free_port()
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    command = (
        installed("prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={directory / 'prometheus-data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
    )
    async with running(Part("prometheus", command, (port,)), directory), aiohttp.ClientSession() as session:
        url = f"http://{LOOPBACK}:{port}"
        await _ready("prometheus", url, session)
        yield Prometheus(url, session)


@asynccontextmanager
async def alertmanager(config: Mapping[str, Any], directory: Path, port: int = 0) -> AsyncIterator[str]:
    """Run an Alertmanager while the block lasts, and yield its address. Its templates are found in the directory."""
    port = port or free_port()
    path = directory / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    command = (
        installed("prometheus-alertmanager"),
        f"--config.file={path}",
        f"--storage.path={directory / 'alertmanager-data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
        "--cluster.listen-address=",  # one alone: it would wait for others, and listen to everybody
    )
    async with running(Part("alertmanager", command, (port,)), directory), aiohttp.ClientSession() as session:
        url = f"http://{LOOPBACK}:{port}"
        await _ready("prometheus-alertmanager", url, session)
        yield url


@asynccontextmanager
async def paged(pager: Pager) -> AsyncIterator[str]:
    """Listen for messages while the block lasts, and yield the address to which they go."""
    runner = web.AppRunner(pager.app(), shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, 0).start()
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def monitored(
    *,
    prometheus_config: Mapping[str, Any],
    alertmanager_config: Mapping[str, Any],
    targets: Sequence[str],
    rules: Sequence[Path],
    scrape: float,
    directory: Path,
) -> AsyncIterator[Monitoring]:
    """Watch targets (HOST:PORT) with rules, and tell a pager, while the block lasts."""
    (port,) = free_ports(1)
    pager = Pager()
    async with (
        paged(pager) as address,
        alertmanager(redirected(alertmanager_config, address), directory, port) as told,
        prometheus(aimed(prometheus_config, targets, rules, scrape, port), directory) as asked,
    ):
        yield Monitoring(asked, told, pager)


async def _ready(name: str, url: str, session: aiohttp.ClientSession) -> None:
    """Wait until a program that accepts connections answers requests too."""
    deadline = time.monotonic() + READY_WITHIN
    while True:
        async with session.get(f"{url}/-/ready") as answer:
            if answer.status == HTTPStatus.OK:
                return
        if time.monotonic() > deadline:
            raise SetupError(f"{name} is not ready within {READY_WITHIN:g} s")
        await asyncio.sleep(0.1)
