"""Who else is connected to an engine of this host, as far as one look at the kernel's sockets tells.

A connection that is there may be pooled and at rest, or a scraper's, or carry a stream; a single look cannot tell these
apart, as the exporter can, which watches. What it can tell is that there is none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tokengap.doctor import CONTAINER_DOORS
from tokengap.errors import SourceError
from tokengap.readings import LISTEN
from tokengap.sources.host import Tree, holders, rows_in
from tokengap.sources.sockets import Sockets


@dataclass(frozen=True, slots=True)
class Others:
    """Connections to an engine besides ours, and those among them on which a question came and no answer since."""

    connections: int
    owed: int


class Connections:
    """Looks at the connections to engines' ports on this host."""

    def __init__(self) -> None:
        self._sockets: Sockets | None = None

    async def to(self, port: int) -> Others | None:
        """Return who is connected to a port now; None where that is not known. Ours have to be closed."""
        return await asyncio.to_thread(self._to, port)

    async def complete(self, port: int) -> bool:
        """Tell whether every connection to the port is in this network namespace: a server's own process listens."""
        return await asyncio.to_thread(_served_here, port)

    def close(self) -> None:
        """Give back what the kernel holds for us."""
        if self._sockets is not None:
            self._sockets.close()

    def _to(self, port: int) -> Others | None:
        try:
            self._sockets = self._sockets or Sockets(events=False)
            rows = self._sockets.snapshot(frozenset({port}), frozenset()).open
        except (SourceError, OSError):
            return None
        rows = rows[rows["sport"] == port]
        # Ages in ms; both are the socket's own age until something goes that way, and equal where the answer came at
        # once. What is unknown counts as owed.
        unanswered = (rows["bytes_sent"] <= 0) | (rows["last_data_recv"] < rows["last_data_sent"])
        owed = (rows["bytes_received"] != 0) & unanswered
        return Others(len(rows), int(owed.sum()))


def _served_here(port: int) -> bool:
    try:
        inodes = frozenset(row.inode for row in rows_in(LISTEN) if row.port == port)
    except SourceError:
        return False
    tree = Tree()
    held = holders(tree.pids, inodes)
    names = {tree.name(pid) for pids in held.pids.values() for pid in pids}
    return bool(names) and not names & CONTAINER_DOORS
