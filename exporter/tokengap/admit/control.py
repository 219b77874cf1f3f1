"""Steering a gateway while it runs, by a command and over a unix socket.

Who it was is said by the kernel (``SO_PEERCRED``), not by the caller. The socket is its owner's alone; another user
than its owner or root is refused all the same. Of a SIGHUP, which reads the settings again, Python is not told the
sender.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import socket
import stat
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from tokengap.errors import SetupError
from tokengap.view import AdmitMode

log = logging.getLogger(__name__)

#: Seconds for one order, of either side.
WITHIN: Final = 5.0
#: The longest order or answer, bytes.
LONGEST: Final = 4096
#: Who switched, where it was a signal.
SIGHUP: Final = "SIGHUP, sender not told"
#: ``struct ucred`` (unix(7)): pid, uid, gid.
_UCRED: Final = struct.Struct("3i")


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the command asks: another mode and why, or, without a mode, which one it is."""

    mode: AdmitMode | None = None
    why: str = ""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The mode, and the last switch: from what, when (Unix time), by whom and why. ``by`` is empty before the first."""

    mode: AdmitMode
    was: AdmitMode
    at: float
    by: str = ""
    why: str = ""


class Switch:
    """The mode of a gateway, and who set it. ``set_mode`` is told."""

    def __init__(self, mode: AdmitMode, set_mode: Callable[[AdmitMode], None]) -> None:
        self.standing = Standing(mode=mode, was=mode, at=time.time())
        self._set_mode = set_mode

    def to(self, mode: AdmitMode, by: str, why: str) -> Standing:
        """Switch, and log who did it and why; when is the line's own time."""
        was = self.standing.mode
        self._set_mode(mode)
        self.standing = Standing(mode=mode, was=was, at=time.time(), by=by, why=why)
        log.warning("mode", extra={"mode": mode, "was": was, "by": by, "why": why or "not said"})
        return self.standing


# --- the socket -------------------------------------------------------------------------------------------------------


def usual_path(port: int) -> Path:
    """Return where the gateway of a port is steered unless settings say otherwise: where only its user may look."""
    name = f"tokengap-admit-{port}.sock"
    if given := os.environ.get("RUNTIME_DIRECTORY") or os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given.split(":")[0]) / name
    if os.geteuid() == 0:
        return Path("/run") / name
    return Path(tempfile.gettempdir()) / f"tokengap-{os.geteuid()}" / name


@asynccontextmanager
async def listening(path: Path, switch: Switch) -> AsyncIterator[None]:
    """Take orders while the block lasts. Where the socket cannot be made, say so and go on: it is not worth a stop."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(WITHIN):
                writer.write(_answer(await reader.readuntil(b"\n"), writer.get_extra_info("socket"), switch) + b"\n")
                await writer.drain()
        writer.close()

    try:
        bound = _bound(path)
    except OSError as error:
        why = f"{path}: {error.strerror or error}"
        log.warning("`tokengap admit mode` cannot reach this gateway", extra={"why": why})
        yield
        return
    async with await asyncio.start_unix_server(serve, sock=bound, limit=LONGEST):
        yield
    _remove(path)


def _bound(path: Path) -> socket.socket:
    """Return a socket that is bound there, and its owner's alone."""
    if path.parent.parent == Path(tempfile.gettempdir()):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.stat().st_uid != os.geteuid():
            raise PermissionError(0, f"{path.parent} belongs to another user")
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise FileExistsError(0, "it exists and is no socket")
    path.unlink(missing_ok=True)  # of one that was killed: two cannot run, they listen on one port
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _answer(line: bytes, peer: socket.socket, switch: Switch) -> bytes:
    pid, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid not in (0, os.geteuid()):
        log.warning("an order was refused", extra={"by": who(uid, pid)})
        return msgspec.json.encode({"error": "only its own user and root may steer it"})
    try:
        order = msgspec.json.decode(line, type=Order)
    except ValueError as wrong:
        return msgspec.json.encode({"error": str(wrong)})
    standing = switch.standing if order.mode is None else switch.to(order.mode, who(uid, pid), order.why)
    return msgspec.json.encode(standing)


def who(uid: int, pid: int) -> str:
    """Return a user by name, and the process that acted for it."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    return f"{name}, pid {pid}"


class _Said(msgspec.Struct, frozen=True):
    error: str = ""


def tell(path: Path, order: Order) -> Standing:
    """Send an order and return how it stands. SetupError when nobody answers or it is refused."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(WITHIN)
        try:
            asking.connect(str(path))
            asking.sendall(msgspec.json.encode(order) + b"\n")
            said = asking.makefile("rb").readline(LONGEST)
        except OSError as error:
            why = error.strerror or str(error)
            raise SetupError(f"no `tokengap admit` answers at {path} ({why}): is it running, as this user?") from error
    try:
        if error_ := msgspec.json.decode(said, type=_Said).error:
            raise SetupError(f"`tokengap admit` refused: {error_}")
        return msgspec.json.decode(said, type=Standing)
    except ValueError as wrong:
        raise SetupError(f"what answers at {path} is no `tokengap admit`: {wrong}") from wrong
