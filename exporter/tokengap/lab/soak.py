"""Healthy traffic for as long as you like, in which nobody leaves: ``python -m tokengap.lab.soak --for 1h``.

Every orphan that the exporter sees in it is a false one. The traffic has what has been taken for orphans elsewhere:
connections that clients and proxies keep and use again, health checks and polls of ``/v1/models`` through proxies and
past them, scrapers of the engine's page, answers in one piece, prompts that prefill for seconds, and a queue.

::

    clients, pollers --> nginx, HAProxy, gateway (each with pooled connections) --> engine <-- clients, pollers, scraper
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Never

import aiohttp
import click
import yaml
from rich.console import Console

from tokengap.errors import SetupError
from tokengap.lab import progress
from tokengap.lab.batching import Knobs
from tokengap.lab.demo import Time
from tokengap.lab.engine import engine_part
from tokengap.lab.gateway import gateway_part
from tokengap.lab.parts import LOOPBACK, Part, free_ports
from tokengap.lab.proxies import ENGINE, PROXIES, Wiring, nginx_config
from tokengap.lab.scrape import Exporter, Scrape
from tokengap.lab.stage import DIRECT, beside, exporter_part, run, staged
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit

#: Clients at each entrance who keep their connection, and those who come with a new one each time.
KEEPING, COMING = 2, 1

#: Seconds between two health checks, and two polls of the models, at each entrance; and two scrapes at the engine.
POLLS = {"/health": 1.0, "/v1/models": 1.5}
SCRAPES = {"/metrics": 2.0}

READ_EVERY = 0.5
BEATS_AT_REST = 3
PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Soaked:
    """What came of it. ``orphaned``: tokens that the exporter called so; ``most_orphans``: streams, at one instant.

    ``ended``: streams by how the exporter saw them end. ``generated`` and ``requests`` are the truth.
    """

    seconds: float
    requests: int
    failed: int
    generated: int
    out: float
    useful: float
    orphaned: float
    pending: float
    unattributed: float
    most_orphans: int
    ended: Mapping[str, int]
    beats: int
    late_beats: int

    @property
    def false_orphans(self) -> int:
        """Streams called orphans, gone or vanished: none was."""
        return max(self.most_orphans, self.ended.get("orphaned", 0))

    @property
    def passed(self) -> bool:
        """Whether traffic flowed, and nobody and nothing was called orphaned."""
        return self.requests > 0 and self.failed == 0 and self.false_orphans == 0 and self.orphaned < 0.5

    def sentence(self) -> str:
        """Say it in words."""
        late = f"; {self.late_beats} of {self.beats} beats came late" if self.late_beats else ""
        return (
            f"{self.requests:,} requests in {self.seconds:,.0f} s, {self.failed} failed; {self.generated:,} tokens "
            f"generated, {self.out:,.0f} seen, {self.useful:,.1f} of them useful: {self.orphaned:.1f} called orphaned, "
            f"{self.false_orphans} streams called orphans{late}"
        )


@dataclass(slots=True)
class Soak:
    """A soak under way."""

    entries: Mapping[str, int]
    engine: EngineControl
    seed: int
    until: float
    requests: int = 0
    failed: int = 0
    failure: str = ""
    last: Scrape | None = None
    most_orphans: int = 0

    def see(self, scrape: Scrape) -> None:
        """Take a scrape in."""
        self.last = scrape
        self.most_orphans = max(self.most_orphans, scrape.orphans)

    def line(self) -> str:
        """Say how far it is."""
        left = max(self.until - time.monotonic(), 0.0)
        orphaned = self.last.gap if self.last is not None else None
        return f"{left:,.0f} s to go: {self.requests:,} requests, {orphaned or 0:.1f} tokens called orphaned"

    async def act(self, exporter: Exporter) -> Soaked:
        """Let the traffic flow, wait for rest, and report."""
        began = time.monotonic()
        polls = [
            asyncio.create_task(self._poll(port, path, every))
            for name, port in self.entries.items()
            for path, every in (POLLS | SCRAPES if name == DIRECT else POLLS).items()
        ]
        try:
            clients = []
            for number, port in enumerate(self.entries.values()):
                clients += [self._keeping(port, f"{number}.{n}") for n in range(KEEPING)]
                clients += [self._coming(port, f"{number}-{n}") for n in range(COMING)]
            await asyncio.gather(*clients)
            async with asyncio.timeout(PATIENCE):
                await rest(self.engine)
                self.see(await exporter.beats(BEATS_AT_REST))
        except TimeoutError:
            raise SetupError(f"the engine is not at rest after {PATIENCE:g} s") from None
        finally:
            for task in polls:
                task.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
        truth = await self.engine.truth(since=time.monotonic())
        last = self.last
        assert last is not None
        if self.failure:
            click.echo(f"a request failed, and perhaps others: {self.failure}", err=True)
        return Soaked(
            seconds=round(time.monotonic() - began, 1),
            requests=self.requests,
            failed=self.failed,
            generated=truth.generated,
            out=last.tokens_out or 0.0,
            useful=last.tokens_useful or 0.0,
            orphaned=sum(last.tokens_orphaned.values()),
            pending=last.tokens_pending or 0.0,
            unattributed=last.tokens_unattributed or 0.0,
            most_orphans=self.most_orphans,
            ended=last.streams_ended,
            beats=last.beats,
            late_beats=last.late_beats,
        )

    async def _poll(self, port: int, path: str, every: float) -> Never:
        """Ask for a page again and again over one connection that is kept. The gateway answers some with 404."""
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://{LOOPBACK}:{port}{path}") as answer:
                    await answer.read()
                await asyncio.sleep(every)

    def _users(self, name: str) -> Callable[[int], User]:
        chance = random.Random(f"{self.seed} {name}")  # noqa: S311 - traffic, nothing secret

        def user(number: int) -> User:
            return User(
                id=f"{name}/{number}",
                prompt_tokens=chance.choice((20, 100, 400, 8000)),
                max_tokens=chance.choice((1, 10, 60, 200)),
                stream=chance.random() < 0.7,
            )

        return user

    async def _coming(self, port: int, name: str) -> None:
        """Come again and again, each time over a connection of its own."""
        users, pauses, number = self._users(name), random.Random(name), 0  # noqa: S311
        while time.monotonic() < self.until:
            outcome = await Visit(users(number), port).run()
            self._count(outcome.how == "completed", outcome.detail)
            number += 1
            await asyncio.sleep(pauses.uniform(0.0, 0.5))

    async def _keeping(self, port: int, name: str) -> None:
        """Ask again and again over one connection."""
        users, pauses, number = self._users(name), random.Random(name), 0  # noqa: S311
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE), headers=headers) as session:
            while time.monotonic() < self.until:
                _, _, body = users(number).request(LOOPBACK).partition(b"\r\n\r\n")
                try:
                    url = f"http://{LOOPBACK}:{port}/v1/chat/completions"
                    async with session.post(url, data=body) as answer:
                        said = await answer.read()
                        self._count(answer.status == 200, said[:200].decode(errors="replace"))
                except (aiohttp.ClientError, TimeoutError) as error:
                    self._count(False, repr(error))
                number += 1
                await asyncio.sleep(pauses.uniform(0.0, 1.0))

    def _count(self, well: bool, detail: str) -> None:
        self.requests += 1
        if not well:
            self.failed += 1
            self.failure = self.failure or detail


async def rest(engine: EngineControl) -> None:
    """Wait until the engine has nothing to do."""
    while True:
        now = (await engine.truth(since=time.monotonic())).now
        if not now.running + now.waiting:
            return
        await asyncio.sleep(0.1)


def parts(directory: Path) -> tuple[list[Part], dict[str, int], int, int]:
    """Return the parts in the order of their start, the entrances by name, and the engine's and exporter's ports."""
    nginx, haproxy, gateway, engine, exporter = free_ports(5)
    proxies = []
    for name, port in (("nginx", nginx), ("haproxy", haproxy)):
        own = directory / name
        own.mkdir()
        proxy = PROXIES[name]
        if name == "nginx":
            proxy = replace(proxy, config=partial(nginx_config, pool=True))
        proxies.append(proxy.part(Wiring(port, engine, leak=False, directory=own)))
    entries = {"nginx": nginx, "haproxy": haproxy, "gateway": gateway}
    settings = {
        "engines": [{"name": ENGINE, "url": f"http://{LOOPBACK}:{engine}"}],
        "hops": [{"name": name, "listen": [f"{LOOPBACK}:{port}"], "to": [ENGINE]} for name, port in entries.items()],
    }
    config = directory / "tokengap.yaml"
    config.write_text(yaml.safe_dump(settings))
    started = [
        engine_part(engine, Knobs(max_num_seqs=6, rate=100.0)),
        *proxies,
        gateway_part(gateway, engine, leak=False, pool=True),
        exporter_part(exporter, ["serve", "--listen", f"{LOOPBACK}:{exporter}", "--config", str(config)]),
    ]
    return started, entries | {DIRECT: engine}, engine, exporter


async def soak(lasts: float, seed: int) -> Soaked:
    """Let it soak for so many seconds."""
    with tempfile.TemporaryDirectory(prefix="tokengap-soak-") as name:
        started, entries, engine, port = parts(Path(name))
        async with staged(started, Path(name)) as stage, aiohttp.ClientSession() as session:
            exporter = Exporter(f"http://{LOOPBACK}:{port}", session)
            await exporter.ready()
            soaking = Soak(entries, EngineControl(engine), seed, time.monotonic() + lasts)
            return await beside(
                soaking.act(exporter),
                exporter.scrape_for_ever(READ_EVERY, soaking.see),
                progress.show(Console(stderr=True), soaking.line),
                stage.guard(),
            )


@click.command()
@click.option("--for", "lasts", type=Time(), default="1h", show_default=True, metavar="TIME")
@click.option("--seed", default=0, show_default=True, help="Of the traffic.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a sentence.")
def main(lasts: float, seed: int, as_json: bool) -> None:
    """Let healthy traffic flow, and count what the exporter calls orphaned. Exits with 1 if it is anything."""
    soaked = run(soak(lasts, seed))
    result = asdict(soaked) | {"false_orphans": soaked.false_orphans, "passed": soaked.passed}
    click.echo(json.dumps(result) if as_json else soaked.sentence())
    sys.exit(0 if soaked.passed else 1)


if __name__ == "__main__":
    main()
