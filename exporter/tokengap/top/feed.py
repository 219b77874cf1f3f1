"""Where ``tokengap top`` gets what it shows: from an exporter that runs, or from a beat of its own on this host."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol

import aiohttp
import msgspec

from tokengap.config import Settings
from tokengap.errors import SettingsError, SourceRefused, SourceTimeout, SourceUnusable
from tokengap.health.access import tls_context
from tokengap.logs import without_secrets
from tokengap.serve import beating, find
from tokengap.topology import Topology
from tokengap.view import View
from tokengap.web.history import History
from tokengap.web.now import Now, Wanted, now

#: Seconds that an exporter may take to answer.
PATIENCE: Final = 5.0

#: The first beat that tells something: one to see what is there, one to see what moves, one to be sure.
SETTLED: Final = 3


class Feed(Protocol):
    """What is shown, and where it is from."""

    name: str

    async def now(self, want: Wanted) -> Now:
        """Return what there is to show now. SourceError when there is nothing."""


@dataclass(frozen=True, slots=True)
class Login:
    """What opens an exporter: a user with a password, and TLS where it is not checked as this system does."""

    user: str | None = None
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


def tls(ca_file: Path | None, cert_file: Path | None) -> ssl.SSLContext | None:
    """Return what trusts an authority (None: those of this system) and shows a certificate. Raises SettingsError."""
    if cert_file is None:
        return tls_context(ca_file, verify=True)
    context = tls_context(ca_file, verify=True) or ssl.create_default_context()
    try:
        context.load_cert_chain(cert_file, password="")  # or OpenSSL would ask for one
    except OSError as error:  # SSLError is one
        why = "no certificate with its key in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingsError(f"--cert-file {cert_file} cannot be used: {why}") from None
    return context


class Remote:
    """An exporter that runs, at its URL."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.name = without_secrets(url)
        self._url, self._session = url.rstrip("/") + "/api/now", session

    async def now(self, want: Wanted) -> Now:
        """Return what it shows now."""
        query = [("sort", want.sort), ("top", str(want.top)), *(("client", client) for client in sorted(want.clients))]
        try:
            async with self._session.get(self._url, params=query) as answer:
                body = await answer.read()
        except TimeoutError as error:
            raise SourceTimeout(f"{self.name} has not answered within {PATIENCE:g} s") from error
        except aiohttp.ClientSSLError as error:
            raise SourceUnusable(f"no TLS with {self.name} (--ca-file names its authority): {_why(error)}") from error
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno or 0  # below 0 where the name does not resolve
            why = os.strerror(number) if number > 0 else str(error.os_error.strerror or error.os_error)
            raise SourceRefused(f"no exporter answers at {self.name}: {why.lower()}") from error
        except aiohttp.ClientError as error:
            if self._url.startswith("https:") and isinstance(error, aiohttp.ClientConnectionError):
                # In TLS 1.3 the client is done before the server has looked at its certificate.
                raise SourceUnusable(f"{self.name} ends the connection; it may want another --cert-file") from error
            raise SourceUnusable(f"{self.name} does not answer: {type(error).__name__}") from error
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise SourceUnusable(f"{self.name} wants a --user and the right password")
        if answer.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            raise SourceUnusable(f"{self.name} says: {' '.join(body.decode(errors='replace').split())[:200]}")
        try:
            return msgspec.json.decode(body, type=Now)
        except msgspec.DecodeError as error:
            raise SourceUnusable(
                f"{self.name} does not answer as an exporter of this version does (status {answer.status})"
            ) from error


def _why(error: aiohttp.ClientSSLError) -> str:
    """Return what OpenSSL says of a certificate or of a handshake."""
    cause = error.__cause__
    return str(getattr(cause, "verify_message", None) or getattr(cause, "reason", None) or type(error).__name__)


class Alone:
    """A beat of its own, as an exporter has it, that nobody else sees."""

    def __init__(self, watched: Topology, *, show_addresses: bool) -> None:
        self.name = "this host"
        self._watched, self._show_addresses = watched, show_addresses
        self._history = History()
        self._view: View | None = None
        self._settled = asyncio.Event()

    async def publish(self, view: View) -> None:
        """Take the view of a beat."""
        self._view = view
        self._history.add(view)
        if view.beats >= SETTLED:
            self._settled.set()

    async def now(self, want: Wanted) -> Now:
        """Return the newest beat, the first as soon as it tells something."""
        await self._settled.wait()
        assert self._view is not None
        trend = self._history.trend()
        return now(self._view, self._watched, trend, want, show_addresses=self._show_addresses)


@asynccontextmanager
async def remote(url: str, login: Login) -> AsyncIterator[Feed]:
    """Ask an exporter while the block lasts."""
    auth = login.user is not None and aiohttp.encode_basic_auth(login.user, login.password, encoding="utf-8")
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if login.tls is None else login.tls),
        headers={"Authorization": auth} if auth else {},
        timeout=aiohttp.ClientTimeout(total=PATIENCE),
    ) as session:
        yield Remote(url, session)


@asynccontextmanager
async def alone(settings: Settings) -> AsyncIterator[Feed]:
    """Read this host while the block lasts. SettingsError where there is no engine."""
    watched, _ = await find(settings)
    feed = Alone(watched, show_addresses=settings.show_addresses)
    async with beating(settings, watched, feed.publish):
        yield feed
