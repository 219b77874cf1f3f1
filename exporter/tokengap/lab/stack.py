"""``make demo-stack``: the demo with a Prometheus, an Alertmanager and somebody who is told beside it.

The configurations are those of ``deploy/``, with our rules; ``deploy/compose.yml`` runs the same in containers::

    the demo :10788  <-- Prometheus :9090 --> Alertmanager :9093 --> the pager, which prints
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Never

import click
from aiohttp import web

from tokengap.errors import SetupError
from tokengap.lab import pager
from tokengap.lab.parts import LOOPBACK, Part, free_ports, installed, taken
from tokengap.lab.stage import run, staged


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on loopback; the defaults are those in the configurations."""

    exporter: int = 10788
    prometheus: int = 9090
    alertmanager: int = 9093
    pager: int = pager.PORT


def configured(source: Path, directory: Path, ports: Ports) -> Path:
    """Copy a configuration into a directory, with these ports and with rules where they are. Return its new place.

    Raises SetupError for one that cannot be read.
    """
    try:
        text = source.read_text()
    except OSError as error:
        raise SetupError(f"{source}: {error.strerror}; run it from the repository, or say --deploy DIR") from error
    usual = Ports()
    for before, after in (
        (f"localhost:{usual.exporter}", f"{LOOPBACK}:{ports.exporter}"),
        (f"localhost:{usual.alertmanager}", f"{LOOPBACK}:{ports.alertmanager}"),
        (f"localhost:{usual.pager}", f"{LOOPBACK}:{ports.pager}"),
        ("../alerts/", f"{source.resolve().parent.parent}/alerts/"),
    ):
        text = text.replace(before, after)
    copy = directory / source.name
    copy.write_text(text)
    return copy


def stack_parts(deploy: Path, directory: Path, ports: Ports) -> list[Part]:
    """Return the programs, in the order in which they start. Raises SetupError for one that is not installed."""
    alertmanager = (
        installed("prometheus-alertmanager", "alertmanager"),
        f"--config.file={configured(deploy / 'demo' / 'alertmanager.yml', directory, ports)}",
        f"--storage.path={directory / 'alertmanager'}",
        f"--web.listen-address={LOOPBACK}:{ports.alertmanager}",
        "--cluster.listen-address=",  # one alone
    )
    prometheus = (
        installed("prometheus"),
        f"--config.file={configured(deploy / 'prometheus.yml', directory, ports)}",
        f"--storage.tsdb.path={directory / 'prometheus'}",
        f"--web.listen-address={LOOPBACK}:{ports.prometheus}",
    )
    demo = (sys.executable, "-m", "tokengap", "demo", "--port", str(ports.exporter))
    return [
        Part("alertmanager", alertmanager, (ports.alertmanager,), ready_within=60.0),
        Part("prometheus", prometheus, (ports.prometheus,), ready_within=60.0),
        # It has parts of its own, which it ends when it is told to.
        Part("demo", demo, (ports.exporter,), orphan_signal=SIGTERM, ready_within=60.0),
    ]


@asynccontextmanager
async def _told(port: int, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Take messages while the block lasts. Raises SetupError where the port is taken."""
    if taken(port):
        raise SetupError(f"the pager cannot start: port {port} on {LOOPBACK} is taken")
    runner = web.AppRunner(pager.pager_app(say), shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, port).start()
        yield
    finally:
        await runner.cleanup()


async def stack(deploy: Path, ports: Ports, say: Callable[[str], None]) -> Never:
    """Run everything until cancelled. Raises SetupError when a part cannot start or ends."""
    with tempfile.TemporaryDirectory(prefix="tokengap-stack-") as name:
        parts = stack_parts(deploy, Path(name), ports)
        say("starting Alertmanager, Prometheus and the demo ...")
        async with _told(ports.pager, say), staged(parts, Path(name)) as stage:
            say(WELCOME.format(loopback=LOOPBACK, ports=ports))
            await stage.guard()


WELCOME = """\
  http://{loopback}:{ports.exporter}/          the live page of the demo
  http://{loopback}:{ports.prometheus}/alerts     our rules in Prometheus
  http://{loopback}:{ports.alertmanager}/           Alertmanager
What it tells is printed here; the first comes within two minutes. Ctrl-C ends it and leaves nothing behind.
"""


@click.command()
@click.option(
    "--deploy", type=click.Path(path_type=Path), default="deploy", show_default=True, help="Of configurations."
)
@click.option("--ports", "which", type=click.Choice(["usual", "auto"]), default="usual", show_default=True)
def main(deploy: Path, which: str) -> None:
    """Run the demo, a Prometheus and an Alertmanager with our rules, and print what is told."""
    ports = Ports() if which == "usual" else Ports(*free_ports(4))
    try:
        run(stack(deploy, ports, click.echo), interrupted=0)
    except SetupError as error:
        click.echo(f"demo-stack: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
