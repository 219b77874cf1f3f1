"""``tokengap admit``: the gateway as a process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from tokengap import logs
from tokengap.admit.service import serve
from tokengap.config import Settings, load
from tokengap.config.flags import options
from tokengap.config.settings import OF_ADMIT

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
        settings = load(config, os.environ, flags)
        logs.configure(settings.log_level, settings.log_format)
        asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    asked_to_stop = asyncio.Event()

    def stop() -> None:
        if asked_to_stop.is_set():
            os._exit(130)  # asked twice: at once
        asked_to_stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await serve(settings, asked_to_stop)
