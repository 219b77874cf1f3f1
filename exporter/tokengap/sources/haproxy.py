"""What HAProxy tells on its runtime socket (``stats socket``), versions 2.4 to 3.x.

Each beat ``show info`` and ``show stat``, which cost HAProxy a fraction of a millisecond. Only ``show sess all`` tells
how long requests have waited in its queues. It walks every stream, 0.7 to 1.5 s for 9,000 of them, in which HAProxy
serves more slowly; so it is asked only while something waits, and then for at most a sixtieth of the time.
"""

from __future__ import annotations

import asyncio
import csv
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokengap.errors import SourceError, SourceRefused, SourceTimeout, SourceUnusable
from tokengap.readings import ProxySnapshot

_REST_FACTOR = 60  # after `show sess all`, rest so many times as long as it took
_SESSIONS_SHARE = 0.5  # of the deadline; the ages of what waits are worth less than the counts

#: ``0x55f6...: [29/Nov/2026:14:24:54.104908] id=13 proto=tcpv4 source=127.0.0.1:50308``
_SESSION = re.compile(r"0x[0-9a-f]+: \[")
_FIELD = re.compile(r"(?:^|[ (])(source|frontend|backend|pend_pos|addr|age)=(\(nil\)|[^ )]+)")
#: ``1d2h``, ``3h4m``, ``2m5s``, ``59s``: the two largest units (human_time in HAProxy's tools.c).
_AGE = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


@dataclass(frozen=True, slots=True)
class Session:
    """One stream in HAProxy: its client's address, its own address towards the server (empty before there is one), how
    old it is in seconds, and whether it waits in a queue for a server."""

    source: str
    frontend: str
    upstream: str
    age: float | None
    queued: bool


def parse_info(text: str) -> Mapping[str, str]:
    """Read ``show info``: ``Name: value`` lines. Others are left out."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, colon, value in pairs if colon}


def parse_show_stat(text: str) -> list[Mapping[str, str]]:
    """Read ``show stat``: one mapping per proxy and server, by column name.

    Raises SourceUnusable when there is no header: something else listens there, or HAProxy refused.
    """
    lines = text.lstrip("\n").splitlines()
    if not lines or not lines[0].startswith("# pxname,"):
        raise SourceUnusable(f"no answer to `show stat`: {_first_line(text)}")
    names = lines[0].removeprefix("# ").split(",")
    rows = csv.reader(line for line in lines[1:] if line)
    try:
        return [dict(zip(names, row, strict=False)) for row in rows if len(row) > 1]
    except csv.Error as error:
        raise SourceUnusable(f"`show stat` is malformed: {error}") from None


def parse_show_sess(text: str) -> list[Session]:
    """Read ``show sess all``. Its format is not documented and changes between versions, so what is not recognised is
    left out, and streams of HAProxy itself (this very question, health checks) are.

    Raises SourceUnusable when the answer is no list of sessions (a level below operator: permission denied).
    """
    blocks: list[list[str]] = []
    for line in text.strip("\n").splitlines():
        if _SESSION.match(line):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line)
        else:
            raise SourceUnusable(f"no answer to `show sess all`: {_first_line(text)}")
    return [session for block in blocks if (session := _session(block)) is not None]


def _session(lines: Sequence[str]) -> Session | None:
    found: dict[str, str] = {}
    for line in lines:
        # `addr=` stands behind the listener, the backend and the server; its line tells which of them it is.
        kind = line.strip().partition("=")[0]
        for name, value in _FIELD.findall(line):
            found.setdefault(f"{kind}.{name}" if name == "addr" else name, value)
    if "source" not in found or found.get("frontend", "GLOBAL") == "GLOBAL":
        return None
    return Session(
        source=found["source"],
        frontend=found["frontend"],
        upstream=found.get("backend.addr", ""),
        age=parse_age(found.get("age", "")),
        queued=found.get("pend_pos", "(nil)") not in ("(nil)", "0", "0x0"),
    )


def parse_age(text: str) -> float | None:
    """Return the seconds that ``2m5s`` stands for, None for anything else."""
    match = _AGE.fullmatch(text)
    if match is None or not text:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)


def snapshot(
    info: Mapping[str, str], stat: Iterable[Mapping[str, str]], sessions: Sequence[Session] | None
) -> ProxySnapshot:
    """Put the answers together.

    A FRONTEND row counts connections, a BACKEND row the requests that it took, those in its queue included; servers
    have queues of their own. ``cli_abrt`` is on BACKEND and server rows alike: the former has the sum.
    """
    rows = list(stat)
    frontends = [row for row in rows if row.get("svname") == "FRONTEND"]
    backends = [row for row in rows if row.get("svname") == "BACKEND"]
    queued = _sum((row for row in rows if row.get("svname") != "FRONTEND"), "qcur")
    waited = [s.age for s in sessions or () if s.queued and s.age is not None]
    return ProxySnapshot(
        program="haproxy",
        uptime=_number(info.get("Uptime_sec")),
        connections=_sum(frontends, "scur"),
        streams=_sum(backends, "scur"),
        queued=queued,
        oldest_queued=0.0 if queued == 0 else max(waited, default=None),
        client_aborts=_sum(backends, "cli_abrt"),
        resets=_sum(frontends, "h2_rst_stream_rcvd"),
        h2_connections=_sum(frontends, "h2_open_connections"),
        # Up to 3.x the column of clients' streams is called so too.
        h2_streams=_sum(frontends, "h2_backend_open_streams", "h2_open_streams"),
    )


def _sum(rows: Iterable[Mapping[str, str]], *names: str) -> int | None:
    """Add a column up; None where no row has it."""
    values = [value for row in rows for name in names if (value := _number(row.get(name))) is not None]
    return int(sum(values)) if values else None


def _number(text: str | None) -> float | None:
    return float(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else None


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "nothing")[:80]


class HaproxySource:
    """The runtime socket at a path or at ``HOST:PORT``; level ``user`` is enough, ``operator`` tells queue ages.

    ``deadline`` (seconds) is for the whole read, ``max_bytes`` for each answer.
    """

    def __init__(self, address: str, *, deadline: float, max_bytes: int = 32 * 2**20) -> None:
        self._address = address
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._sessions: Sequence[Session] | None = None
        self._sessions_due = 0.0

    async def read(self) -> ProxySnapshot:
        """Ask. Raises a SourceError."""
        try:
            async with asyncio.timeout(self._deadline):
                info, stat = await self._ask("show info"), await self._ask("show stat")
        except TimeoutError:
            raise SourceTimeout(f"no answer within {self._deadline:g} s") from None
        rows = parse_show_stat(stat)
        told = snapshot(parse_info(info), rows, None)
        if not told.queued:
            self._sessions = None
            return told
        return snapshot(parse_info(info), rows, await self._waiting())

    async def _waiting(self) -> Sequence[Session] | None:
        """Return the streams, or those of the answer before while the next is not due; None where none were told."""
        began = time.monotonic()
        if began >= self._sessions_due:
            try:
                async with asyncio.timeout(_SESSIONS_SHARE * self._deadline):
                    self._sessions = parse_show_sess(await self._ask("show sess all"))
            except (TimeoutError, SourceError):
                self._sessions = None
            ended = time.monotonic()
            self._sessions_due = ended + _REST_FACTOR * (ended - began)
        return self._sessions

    async def _ask(self, command: str) -> str:
        """Ask one question; HAProxy answers it and closes. Raises SourceError, TimeoutError is the caller's."""
        writer = None
        try:
            reader, writer = await self._connect()
            writer.write(command.encode() + b"\n")
            answer = bytearray()
            while piece := await reader.read(65536):
                answer += piece
                if len(answer) > self._max_bytes:
                    raise SourceUnusable(f"the answer to `{command}` is larger than {self._max_bytes} bytes")
        except ConnectionRefusedError:
            raise SourceRefused("connection refused") from None
        except OSError as error:
            known = isinstance(error, FileNotFoundError | PermissionError)
            raise (SourceRefused if known else SourceError)(error.strerror or str(error)) from None
        finally:
            if writer is not None:
                writer.transport.abort()
        return answer.decode(errors="replace")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if is_path(self._address):
            return await asyncio.open_unix_connection(Path(self._address))
        host, _, port = self._address.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))


def is_path(address: str) -> bool:
    """Tell a path from ``HOST:PORT``."""
    return "/" in address
