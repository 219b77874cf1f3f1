"""``tokengap admit``: the gateway as a process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from tokengap import logs
from tokengap.admit.control import Order, tell, usual_path
from tokengap.admit.service import serve
from tokengap.config import Settings, load
from tokengap.config.flags import options
from tokengap.config.settings import OF_ADMIT
from tokengap.view import MODES, AdmitMode
from tokengap.web.server import parse_listen

#: The settings that it shares with the exporter.
SHARED = ("engines", "slots", "deadline", "age_cut", "classes", "log_level", "log_format")


@click.group(invoke_without_command=True)
@options(*SHARED, *OF_ADMIT)
@click.pass_context
def admit(context: click.Context, /, config: Path | None, **flags: Any) -> None:
    """Stand between proxy and engine: admit by age, tie each generation to its client, and count exactly."""
    if context.invoked_subcommand is not None:
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the loop takes both
    with suppress(KeyboardInterrupt):
        again = partial(load, config, os.environ, flags)
        settings = again()
        logs.configure(settings.log_level, settings.log_format)
        # What was imported stays: to look through it again and again for what may go stops all streams for 40 ms.
        gc.collect()
        gc.freeze()
        asyncio.run(_serve(settings, again))


@admit.command("mode")
@click.argument("wanted", type=click.Choice(MODES), required=False)
@click.option("--why", default="", help="Is logged with who and when.")
@options("admit_listen", "admit_control")
def set_mode(wanted: AdmitMode | None, why: str, config: Path | None, **flags: Any) -> None:
    """Say how a running gateway decides, or switch it: age, or busy (the state to roll back to). Drops no stream."""
    settings = load(config, os.environ, flags)
    _, port = parse_listen(settings.admit_listen)
    standing = tell(Path(settings.admit_control or usual_path(port)), Order(wanted, why))
    line = f"mode {standing.mode}"
    if standing.by:
        when = datetime.fromtimestamp(standing.at).astimezone().isoformat(timespec="seconds")
        line += f", before {standing.was}; set {when} by {standing.by}: {standing.why or 'not said why'}"
    click.echo(line)


async def _serve(settings: Settings, again: Callable[[], Settings]) -> None:
    asked_to_stop, hangup = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        if asked_to_stop.is_set():
            os._exit(130)  # asked twice: at once
        asked_to_stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    await serve(settings, asked_to_stop, hangup, again)
