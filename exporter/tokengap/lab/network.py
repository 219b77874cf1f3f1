"""A network of the lab's own, in which users can vanish: their packets are dropped, and nobody is told.

A process that is allowed to (CAP_SYS_ADMIN) moves into a new network namespace, with nothing in it but loopback. The
parts that it starts are born there, so that what is dropped is the lab's alone, the host's firewall is not touched, and
nothing is left when the process ends.

Packets are dropped on arrival (nftables, hook ``input``): dropped on departure, the sending socket would hear of it and
its counters of transmissions would not be those of a network that loses packets.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokengap.errors import SetupError
from tokengap.lab.parts import on_path

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h

_RULES = """\
table inet lab {
    set gone { type inet_service; }
    chain arrives {
        type filter hook input priority 0;
        tcp sport @gone drop
        tcp dport @gone drop
    }
}
"""


@dataclass(frozen=True, slots=True)
class Network:
    """A network of the lab's own, made by :func:`own_network`. Its users are told by their ports, of which each has
    one that no other socket here has."""

    nft: Path

    async def cut(self, port: int) -> None:
        """Drop from now on whatever comes from or goes to this port."""
        await self.run(f"add element inet lab gone {{ {port} }}")

    async def mend(self) -> None:
        """Drop nothing any more."""
        await self.run("flush set inet lab gone")

    async def run(self, rules: str) -> None:
        """Hand rules to nft. SetupError: it refuses them."""
        await self._nft("-f", "-", rules=rules)

    async def tell(self, *what: str) -> list[dict[str, Any]]:
        """Return what there is, as nft tells it in JSON: ``tell("list", "tables")``. SetupError: there is no such."""
        told: list[dict[str, Any]] = json.loads(await self._nft("--json", *what))["nftables"]
        return told

    async def _nft(self, *arguments: str, rules: str = "") -> str:
        process = await asyncio.create_subprocess_exec(
            self.nft,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate(rules.encode())
        said = output.decode(errors="replace")
        if process.returncode:
            asked = rules.splitlines()[0] if rules else " ".join(arguments)
            raise SetupError(f"nft refused {asked!r}: {said.strip()}")
        return said


async def own_network() -> Network | str:
    """Move this thread, and with it all that it starts from now on, into a network of its own; or say why not.

    To be called from the main thread before any part was started and any socket opened.
    """
    nft = on_path("nft")
    if nft is None:
        return "nft is not installed: apt-get install nftables"
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNET):
        return f"a network namespace of its own takes root: {os.strerror(ctypes.get_errno())}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    network = Network(nft)
    await network.run(_RULES)
    return network
