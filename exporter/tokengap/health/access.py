"""How engines and proxies are reached: API key, TLS, and single requests that end in an answer or in a SourceError."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from tokengap.errors import SettingsError, SourceError, SourceRefused, SourceTimeout, SourceUnusable
from tokengap.logs import without_secrets

#: Bytes of an answer that are read, and characters of it that are shown.
_MOST: Final = 65_536
_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class Access:
    """What opens the doors. ``key`` goes into the header ``Authorization`` and is shown nowhere."""

    key: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    def session(self, url: str) -> aiohttp.ClientSession:
        """Return a session for one address; each request has a connection of its own.

        A balancer keeps the requests of one connection with one backend, and several backends would look like one.
        Credentials in the URL win over the key, which then is not sent.
        """
        own = "@" in urlsplit(url).netloc
        headers = {"Authorization": f"Bearer {self.key}"} if self.key and not own else {}
        connector = aiohttp.TCPConnector(ssl=self.tls if self.tls is not None else True, force_close=True)
        # Every request brings its deadline with it.
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)

    def clean(self, text: str) -> str:
        """Return a text as one line without the key and without credentials in URLs."""
        text = text.replace(self.key, "***") if self.key else text
        return without_secrets(" ".join(text.split()))


def read_key(file: Path) -> str:
    """Return the key in a file. Raises SettingsError, which does not show it."""
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"the API key cannot be read from {file}: {why}") from None
    return checked_key(key, str(file))


def checked_key(key: str, where: str) -> str:
    """Return a key that can stand in a header. Raises SettingsError, which does not show it."""
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError(f"{where} holds no API key; expected one word of printable ASCII")
    return key


def tls_context(ca_file: Path | None, *, verify: bool) -> ssl.SSLContext | None:
    """Return what TLS is checked with; None: the authorities that this system trusts. Raises SettingsError."""
    if not verify:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:  # SSLError: no certificate in it
        why = "no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingsError(f"--ca-file {ca_file} cannot be used: {why}") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, whatever its status; ``body`` is its beginning."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON. Raises ValueError."""
        return json.loads(self.body)

    @property
    def said(self) -> str:
        """What it says, in short: the message of an OpenAI error, else the text."""
        text = self.body.decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            error = json.loads(text)
            text = str(error.get("error", error)["message"])
        text = " ".join(text.split())
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


async def request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    within: float | None,
    body: Mapping[str, Any] | None = None,
) -> Answer:
    """Make one request and return the answer. Raises SourceTimeout, SourceRefused or SourceError."""
    try:
        async with asyncio.timeout(within), session.request(method, url, json=body) as response:
            return Answer(response.status, await response.content.read(_MOST))
    except TimeoutError:
        raise SourceTimeout(f"no answer within {within or 0.0:g} s") from None
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(error):
            raise SourceRefused("connection refused") from None
        raise SourceError(f"cannot connect: {error.os_error}") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise SourceUnusable(f"the answer is broken: {error or type(error).__name__}") from None
