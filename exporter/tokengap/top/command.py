"""``tokengap top``: what is in flight and for whom, in a terminal, over a pipe, or as JSON for scripts.

Against an exporter that runs it costs that exporter no more than a browser does; standing alone it reads this host as
an exporter would, and nobody needs to have set one up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live

from tokengap import logs
from tokengap.config import Settings, load
from tokengap.config.flags import SELECTION, Value, options
from tokengap.config.values import Url
from tokengap.errors import SourceError
from tokengap.top import feed as feeds
from tokengap.top.feed import Feed, Login, tls
from tokengap.top.screen import FILTERS, ORDER_KEYS, Shown, frame
from tokengap.top.terminal import keys, resized
from tokengap.topology import Endpoint
from tokengap.web.api import plain
from tokengap.web.now import MOST, ORDERS, Wanted
from tokengap.web.server import parse_listen

#: How settings of a beat of one's own are given.
_ALONE: Final = (*SELECTION, "interval", "deadline", "age_cut", "window", "prefill_budget", "show_addresses")

#: The variable that may hold the password; on the command line others on this host would see it.
PASSWORD_VARIABLE: Final = "TOKENGAP_PASSWORD"  # noqa: S105 - the name of a variable

#: Streams that are shown where there is no screen to fill, and the width of a line.
_ROWS, _WIDTH = 50, 120


@click.command(short_help="Show streams, engines and what leaks in this terminal.")
@click.option("--url", type=Value(Url), help="An exporter that runs. [default: this host's, unless engines are named]")
@click.option("--user", metavar="NAME", help=f"A user of that exporter; the password is in {PASSWORD_VARIABLE}, or:")
@click.option("--password-file", type=click.Path(path_type=Path), help="A file with the password.")
@click.option(
    "--ca-file",
    type=click.Path(path_type=Path),
    help="The authority of its certificate. [default: those of this system]",
)
@click.option("--cert-file", type=click.Path(path_type=Path), help="Your certificate and its key, in one file.")
@click.option("--sort", type=click.Choice(ORDERS), default="cost", show_default=True, help="The order of streams.")
@click.option(
    "--client", "clients", type=click.Choice(list(FILTERS)), default="all", show_default=True, help="Whose streams."
)
@click.option("--rows", type=click.IntRange(0, MOST), help=f"Streams at most. [default: a screen, or {_ROWS}]")
@click.option("--once", is_flag=True, help="Print what there is once, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a beat, as /api/now has it.")
@options(*_ALONE)
def top(
    url: str | None,
    user: str | None,
    password_file: Path | None,
    ca_file: Path | None,
    cert_file: Path | None,
    sort: str,
    clients: str,
    rows: int | None,
    once: bool,
    as_json: bool,
    config: Path | None,
    **flags: Any,
) -> None:
    """Show streams, engines and what leaks in this terminal, as long as it is open.

    \b
    tokengap top                                    the exporter on this host
    tokengap top --url http://proxy-3:10788         one elsewhere
    tokengap top --url https://proxy-3:10788 --ca-file ca.crt --user alice
    tokengap top --engine http://127.0.0.1:8000     no exporter: reads this host itself
    tokengap top --once --json | jq .troubles       for scripts
    """
    settings = load(config, os.environ, flags)
    if url is not None and any(flags.values()):
        raise click.UsageError("--url names an exporter, which has settings of its own: leave the others out")
    login = Login(user, _password(user, password_file), tls(ca_file, cert_file))
    want = Wanted(sort, FILTERS[clients], _ROWS if rows is None else rows)
    logs.configure("error", settings.log_format)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # a terminal that has no such letters
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH, highlight=False)
    with suppress(BrokenPipeError):  # whoever read has seen enough
        asyncio.run(_top(_feed(url, login, settings), console, Plan(want, rows, once, as_json)))


def _password(user: str | None, file: Path | None) -> str:
    """Return the password of a user, "" where there is no user. UsageError where there is none or it cannot be read."""
    if user is None:
        if file is not None:
            raise click.UsageError("--password-file without a --user")
        return ""
    if file is None:
        if PASSWORD_VARIABLE not in os.environ:
            raise click.UsageError(f"--user needs a password: in {PASSWORD_VARIABLE}, or in the file --password-file")
        return os.environ[PASSWORD_VARIABLE]
    try:
        return file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise click.UsageError(f"--password-file {file} cannot be read: {why}") from None


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. ``rows``: streams, None for as many as a screen has room for."""

    want: Wanted
    rows: int | None
    once: bool
    as_json: bool


@asynccontextmanager
async def _feed(url: str | None, login: Login, settings: Settings) -> AsyncIterator[Feed]:
    if url is None and (settings.engines or settings.auto):
        async with feeds.alone(settings) as feed:
            yield feed
    else:
        host, port = parse_listen(settings.listen)
        async with feeds.remote(url or f"http://{Endpoint(host or '127.0.0.1', port)}", login) as feed:
            yield feed


async def _top(opened: Any, console: Console, plan: Plan) -> None:
    """Show until there is enough, or until asked to stop."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        async with opened as feed:
            if plan.once or plan.as_json or not sys.stdout.isatty() or console.is_dumb_terminal:
                await _print(feed, console, plan)
            else:
                await _Screen(feed, console, plan).show()


async def _print(feed: Feed, console: Console, plan: Plan) -> None:
    """Print once, or beat after beat."""
    shown = Shown(feed.name, plan.want)
    while True:
        shown.take(now := await feed.now(plan.want))
        if plan.as_json:
            print(msgspec.json.encode(now, enc_hook=plain).decode(), flush=True)
        else:
            console.print(*frame(shown, console.width), sep="\n", soft_wrap=True)
        if plan.once:
            return
        await asyncio.sleep(now.interval)
        if not plan.as_json:
            console.print()


class _Screen:
    """A screen that follows the beat and obeys keys."""

    def __init__(self, feed: Feed, console: Console, plan: Plan) -> None:
        self._feed, self._console, self._rows = feed, console, plan.rows
        self._shown = Shown(feed.name, plan.want)
        self._touched = asyncio.Event()
        self._ended = False

    async def show(self) -> None:
        """Show until the user has seen enough."""
        async with AsyncExitStack() as stack:
            self._shown.keys = stack.enter_context(keys(self.press))
            stack.enter_context(resized(self._touched.set))
            live = stack.enter_context(Live(console=self._console, screen=True, auto_refresh=False))
            while not self._ended:
                self._paint(live)
                if not self._shown.paused:
                    await self._ask()
                    self._paint(live)
                await self._pause()

    def press(self, key: str) -> None:
        """Obey a key; those without a meaning do nothing."""
        shown, want = self._shown, self._shown.want
        if key == "q":
            self._ended = True
        elif key == "p":
            shown.paused = not shown.paused
        elif key in ORDER_KEYS:
            shown.want = replace(want, sort=ORDER_KEYS[key])
        elif key == "f":
            filters = list(FILTERS.values())
            following = filters.index(want.clients) + 1
            shown.want = replace(want, clients=filters[following % len(filters)])
        self._touched.set()

    async def _ask(self) -> None:
        rows = self._console.height if self._rows is None else self._rows
        self._shown.want = replace(self._shown.want, top=min(rows, MOST))
        try:
            self._shown.take(await self._feed.now(self._shown.want))
        except SourceError as error:
            self._shown.complaint = str(error)

    async def _pause(self) -> None:
        now = self._shown.now
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0 if now is None else max(now.interval, 0.2)):
                await self._touched.wait()
        self._touched.clear()

    def _paint(self, live: Live) -> None:
        width, height = self._console.size
        live.update(Group(*frame(self._shown, width, height)), refresh=True)
