"""The command ``tokengap``. Every setting is a flag, a ``TOKENGAP_*`` variable and a key of the file alike.

Exit codes: 0 done or asked to stop, 1 what was examined is not in order, 2 a wrong setting or a missing part.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import click

from tokengap import __version__, logs
from tokengap.config import Settings, load
from tokengap.errors import TokengapError


class Group(click.Group):
    """Commands of which some are imported only when they are asked for: serving needs no lab."""

    lazy: ClassVar = {"drill": "tokengap.lab.drill:drill", "demo": "tokengap.lab.demo:demo"}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, in the order of a newcomer's needs."""
        return ["demo", "serve", "drill", "doctor"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module if need be."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, name = self.lazy[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and show what tokengap raises on purpose as the one line that it is."""
        try:
            return super().main(*args, **kwargs)
        except TokengapError as error:
            click.echo(f"tokengap: {error}", err=True)
            sys.exit(2)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(
    __version__, "--version", message=f"tokengap %(version)s, Python {platform.python_version()}, {platform.system()}"
)
def main() -> None:
    """Join the proxy's sockets, the engine's counters and what they mean: tokens generated for clients who left."""


def selection(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that say what to watch."""
    for option in reversed(
        [
            click.option("--engine", multiple=True, metavar="[NAME=]URL", help="A vLLM server. May be repeated."),
            click.option(
                "--hop",
                multiple=True,
                metavar="NAME=ADDR[,ADDR...]",
                help="A proxy on this host and the addresses or ports it listens on. Outermost first.",
            ),
            click.option("--auto/--no-auto", default=None, help="Find vLLM servers and known proxies on this host."),
            click.option(
                "--config", "--config.file", "config", type=click.Path(path_type=Path), help="A YAML file of settings."
            ),
            click.option("--slots", metavar="N", help="max_num_seqs of the engines, where the command line hides it."),
        ]
    ):
        command = option(command)
    return command


def settings_of(flags: dict[str, Any]) -> Settings:
    """Return the settings, from the flags that were given, the environment and the file."""
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    file = given.pop("config", None) or (
        Path(os.environ["TOKENGAP_CONFIG"]) if os.environ.get("TOKENGAP_CONFIG") else None
    )
    return load(file, os.environ, given)


@main.command()
@selection
@click.option("--listen", "--web.listen-address", "listen", metavar="[HOST]:PORT", help="Where to serve. [:10788]")
@click.option("--web.telemetry-path", "telemetry_path", metavar="PATH", help="Where the series are. [/metrics]")
@click.option("--interval", metavar="TIME", help="The beat: how often everything is read. [1s]")
@click.option("--deadline", metavar="TIME", help="A person waits no longer for the first token. [8s]")
@click.option("--age-cut", metavar="TIME", help="The queue age past which a new stream will not make it. [6s]")
@click.option("--class", "classes", multiple=True, metavar="NAME=TIME", help="Another deadline class.")
@click.option("--window", metavar="TIME", help="One window of no progress; two make an engine stuck. [10s]")
@click.option("--prefill-budget", metavar="TIME", help="How long an engine may show nothing at all. [120s]")
@click.option("--show-addresses/--mask-addresses", default=None, help="Clients' addresses in /api/streams. [masked]")
@click.option("--events/--no-events", default=None, help="Listen for the ends of sockets. [events]")
@click.option("--log.level", "log_level", metavar="LEVEL", help="debug, info, warn or error. [info]")
@click.option("--log.format", "log_format", metavar="FORMAT", help="logfmt or json. [logfmt]")
def serve(**flags: Any) -> None:
    """Watch engines and hops, and serve the joined series to Prometheus."""
    settings = settings_of(flags)
    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    from tokengap.serve import serve as serve_until  # not at the top: `tokengap --version` needs none of it

    asked_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    await serve_until(settings, asked_to_stop)


@main.command()
@selection
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool, **flags: Any) -> None:
    """Say what this host allows, what will be used, and what to do about the rest. Exit 1 if something needs you."""
    from tokengap import doctor as examination

    settings = settings_of(flags)
    findings = asyncio.run(_examine(settings))
    if as_json:
        click.echo(examination.as_json(findings))
    else:
        examination.print_findings(findings, sys.stdout)
    sys.exit(0 if examination.healthy(findings) else 1)


async def _examine(settings: Settings) -> Any:
    from tokengap.doctor import examine
    from tokengap.serve import look

    watched, found = await look(settings)
    return await examine(watched, auto=found)
