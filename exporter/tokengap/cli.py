"""The command ``tokengap``. Every setting is a flag, a ``TOKENGAP_*`` variable and a key of the file alike.

Exit codes: 0 done or asked to stop, 1 what was examined is not in order, 2 a wrong setting or a missing part. Those of
`health` are verdicts, see there.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click

from tokengap import __version__, logs
from tokengap.config import SETTINGS, Settings, load
from tokengap.config.flags import SELECTION, options
from tokengap.config.settings import OF_ADMIT
from tokengap.errors import TokengapError


class Group(click.Group):
    """Commands of which some are imported only when they are asked for: serving needs no lab."""

    lazy: ClassVar = {
        "demo": "tokengap.lab.demo:demo",
        "top": "tokengap.top.command:top",
        "health": "tokengap.health.command:health",
        "drill": "tokengap.lab.drill:drill",
        "admit": "tokengap.admit.command:admit",
        "bundle": "tokengap.bundle.command:bundle",
        "chaos": "tokengap.chaos.command:chaos",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, in the order of a newcomer's needs."""
        return ["demo", "serve", "top", "health", "drill", "admit", "doctor", "bundle", "chaos"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module if need be."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, name = self.lazy[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and show what tokengap or click raises on purpose as one line."""
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except TokengapError as error:
            _give_up("tokengap", str(error), 2)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            _give_up(context.command_path if context else "tokengap", error.format_message(), error.exit_code)
        except click.Abort:
            _give_up("tokengap", "interrupted", 128 + signal.SIGINT)
        sys.exit(code if isinstance(code, int) else 0)


def _give_up(who: str, why: str, code: int) -> NoReturn:
    click.echo(f"{who}: {' '.join(why.split())}", err=True)
    sys.exit(code)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(
    __version__, "--version", message=f"tokengap %(version)s, Python {platform.python_version()}, {platform.system()}"
)
def main() -> None:
    """Join the proxy's sockets, the engine's counters and what they mean: tokens generated for clients who left."""


#: Seconds within which `serve` ends when it is asked to. Docker and Kubernetes kill after 10 and 30.
STOP_WITHIN = 5.0


@main.command()
@options(*(setting.key for setting in SETTINGS if setting.key not in OF_ADMIT))
def serve(config: Path | None, **flags: Any) -> None:
    """Watch engines and hops, and serve the joined series to Prometheus."""
    # Until the loop takes both signals they raise KeyboardInterrupt: asked to stop while it starts, it has stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        settings = load(config, os.environ, flags)
        logs.configure(settings.log_level, settings.log_format)
        asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    from tokengap.serve import serve as serve_until  # not at the top: `tokengap --version` needs none of it

    asked_to_stop = asyncio.Event()

    def stop() -> None:
        asked_to_stop.set()
        # A read that hangs in the kernel cannot be cancelled, and Python waits for its thread; nobody else should.
        last_resort = threading.Timer(STOP_WITHIN, os._exit, [0])
        last_resort.daemon = True
        last_resort.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await serve_until(settings, asked_to_stop)


@main.group(invoke_without_command=True)
@options(*SELECTION)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, /, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Say what this host allows, what will be used, and what to do about the rest. Exit 1 if something needs you."""
    if context.invoked_subcommand is not None:
        return
    settings = load(config, os.environ, flags)
    from tokengap import doctor as examination  # not at the top: serving needs none of it

    findings = asyncio.run(_examine(settings))
    if as_json:
        click.echo(examination.as_json(findings))
    else:
        examination.print_findings(findings, sys.stdout)
    sys.exit(0 if examination.healthy(findings) else 1)


@doctor.command()
@click.option("--url", required=True, help="Where clients call: the outermost proxy, or the engine itself.")
@click.option("--engine", required=True, metavar="URL", help="The engine behind it, whose /metrics is watched.")
@click.option("--early", is_flag=True, help="Leave before the first token, not in mid-answer.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="How the answer is asked for.")
@click.option("--max-tokens", type=click.IntRange(10), default=2000, show_default=True, help="Of the answer.")
@click.option("--within", type=click.FloatRange(1, 600), default=30.0, show_default=True, help="Seconds to watch.")
@click.option("--model", default="", help="To ask for. The engine's first by default.")
@click.option("--force", is_flag=True, help="Also where the engine has work.")
@click.option("--json", "as_json", is_flag=True, help="Print the finding as JSON.")
def cancel(as_json: bool, url: str, engine: str, early: bool, **plan: Any) -> None:
    """Send one stream, leave, and watch whether the engine is told. It generates; exit 1 if nobody cancels.

    An API key is taken from TOKENGAP_API_KEY.
    """
    from tokengap import doctor as examination  # not at the top: serving needs none of it
    from tokengap import doctor_cancel

    key = os.environ.get("TOKENGAP_API_KEY", "")
    asked = doctor_cancel.Plan(url, engine, "early" if early else "streaming", key=key, **plan)
    findings = [asyncio.run(doctor_cancel.examine(asked))]
    if as_json:
        click.echo(examination.as_json(findings))
    else:
        examination.print_findings(findings, sys.stdout)
    sys.exit(0 if examination.healthy(findings) else 1)


async def _examine(settings: Settings) -> Any:
    import aiohttp

    from tokengap.doctor import PATIENCE, examine
    from tokengap.serve import gpus, look

    watched, found = await look(settings)
    netns = tuple(map(str, settings.netns))
    async with aiohttp.ClientSession() as session, gpus(settings, session, PATIENCE) as gpu:
        return await examine(watched, auto=found, netns=netns, gpu=gpu)
