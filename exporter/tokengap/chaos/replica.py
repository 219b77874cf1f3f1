"""One replica of an engine, to be broken: ``python -m tokengap.chaos.replica --port 8100``.

The stand-in engine of the lab, in two processes as vLLM V1 is. The front end serves; the core
(:mod:`tokengap.chaos.core`) is what a GPU's fault hits. When the core is killed, the front end does what that of vLLM
0.32 was seen to do: whoever waits is told in its stream, ``/health`` says 503, the page stands still, and after three
seconds it ends, with code 0. When the core only hangs, nobody is told: ``/health`` says 200 and nothing moves.

``--load`` is how long it loads its model before it listens, as vLLM does not before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import click
from aiohttp import web

from tokengap.lab.batching import Knobs
from tokengap.lab.engine import EngineServer
from tokengap.lab.parts import LOOPBACK, Part, serve_app

#: Seconds of silence after which the core is taken to hang: many beats, for a busy host is no fault.
SILENCE = 0.5

#: Seconds for which the front end outlives its core.
OUTLIVES = 3.0

#: What vLLM says then.
DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."


async def _live(server: EngineServer, core: asyncio.subprocess.Process) -> None:
    """Generate while the core beats, and end some seconds after it has ended."""
    assert core.stdout is not None
    while await _beats(server, core.stdout):
        pass
    server.die(DEATH)
    await asyncio.sleep(OUTLIVES)
    os.kill(os.getpid(), signal.SIGTERM)


async def _beats(server: EngineServer, pipe: asyncio.StreamReader) -> bool:
    """Wait for the next beats; stand still while there are none. False: there will be none."""
    try:
        async with asyncio.timeout(SILENCE):
            return bool(await pipe.read(4096))
    except TimeoutError:
        server.freeze()
    if not await pipe.read(4096):
        return False
    server.thaw()
    return True


def replica_app(server: EngineServer) -> web.Application:
    """Return the stand-in engine's application, alive with a core of its own."""
    app = server.app()

    async def core(_: web.Application) -> AsyncIterator[None]:
        # Its own pipe: what the front end prints is no beat.
        started = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokengap.chaos.core",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert started.stdout is not None
        await started.stdout.readexactly(1)  # who finds us listening finds our core
        living = asyncio.create_task(_live(server, started))
        yield
        living.cancel()
        if started.returncode is None:
            started.kill()
        await started.wait()

    app.cleanup_ctx.append(core)
    return app


def replica_part(
    name: str, port: int, hosts: Sequence[str], knobs: Knobs, *, seed: int = 0, load: float = 0.0, within: float = 20.0
) -> Part:
    """Return the part that serves a replica. ``within``: seconds after its model is loaded by which it must listen."""
    command = [sys.executable, "-m", "tokengap.chaos.replica", "--port", str(port), "--seed", str(seed)]
    for host in hosts:
        command += ["--host", host]
    if load:
        command += ["--load", f"{load:g}"]
    for key in ("max_num_seqs", "rate", "prefill_rate"):
        command += [f"--{key.replace('_', '-')}", str(getattr(knobs, key))]
    return Part(name, tuple(command), (port,), ready_within=load + within)


_DEFAULT = Knobs()


@click.command()
@click.option("--host", "hosts", multiple=True, default=(LOOPBACK,), show_default=True)
@click.option("--port", type=int, required=True)
@click.option("--seed", default=0, show_default=True, help="Of ids and texts.")
@click.option("--load", default=0.0, show_default=True, help="Seconds for which the model is loaded first.")
@click.option("--max-num-seqs", default=_DEFAULT.max_num_seqs, show_default=True, help="Slots.")
@click.option("--rate", default=_DEFAULT.rate, show_default=True, help="Tokens a second of each running sequence.")
@click.option("--prefill-rate", default=_DEFAULT.prefill_rate, show_default=True, help="Prompt tokens a second.")
def main(hosts: tuple[str, ...], port: int, seed: int, load: float, **knobs: Any) -> None:
    """Serve a stand-in engine that can be broken."""
    time.sleep(load)
    serve_app(replica_app(EngineServer(Knobs(**knobs), seed=seed)), hosts, port, handler_cancellation=True)


if __name__ == "__main__":
    main()
