"""Running the command ``tokengap`` in a process of its own, as a user does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

#: The names of the fields in the source article.
ARTICLE = (
    *("tokens_out_total", "tokens_useful_total", "gap", "cancelled_orphan", "stream_age_seconds", "client_connected"),
    *("slot_utilization", "queue_age_seconds", "deadline_slack_seconds"),
)

COMMAND = (sys.executable, "-m", "tokengap")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command said and with what it exited."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output, which has to be one JSON object and nothing else."""
        return json.loads(self.out)

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"


async def tokengap(*arguments: object, within: float = 90.0, **environment: str) -> Ran:
    """Run it to its end."""
    async with started(*arguments, **environment) as process:
        out, err = await asyncio.wait_for(process.communicate(), within)
    return Ran(process.returncode, out.decode(), err.decode())


@asynccontextmanager
async def started(*arguments: object, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start it; killed at the end of the block if it still runs then."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *map(str, arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def listening_below(pid: int) -> set[int]:
    """Return the ports on which a process and its children listen. A child may end meanwhile."""
    ports = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            ports |= {has.laddr.port for has in process.net_connections("tcp") if has.status == psutil.CONN_LISTEN}
    return ports
