"""Who may ask, over what, and how often: the file of ``--web.config.file``, ready for use, and read again when it
changes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from tokengap.config.reading import Place
from tokengap.config.web import CIPHERS, HttpSettings, RateSettings, TlsSettings, read_web
from tokengap.errors import SettingsError

log = logging.getLogger(__name__)

#: Seconds between two looks at whether a file has changed.
LOOK_EVERY: Final = 2.0

_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True, slots=True)
class Tls:
    """What connections are encrypted with. Equal where settings and what stands in their files are."""

    settings: TlsSettings
    digests: tuple[bytes, ...]
    context: ssl.SSLContext = field(compare=False)


@dataclass(frozen=True, slots=True)
class Access:
    """What the file says. Nothing: everybody may ask, in plain HTTP. ``users``: hashes of passwords by name. ``rate``:
    None where it says nothing of it, an interval of 0 where there shall be no limit.

    ``files`` is what it was read from.
    """

    tls: Tls | None = None
    users: Mapping[str, bytes] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    rate: RateSettings | None = None
    files: tuple[Path, ...] = ()


def read_access(path: Path) -> Access:
    """Read the file, and certificates and keys that it names. Raises SettingsError."""
    settings, place = read_web(path)
    tls = settings.tls_server_config
    named = _named(tls, path.parent) if tls is not None and tls.wanted else {}
    http = settings.http_server_config or HttpSettings()
    return Access(
        tls=None if tls is None or not named else _tls(tls, named, place.at("tls_server_config")),
        users={str(name): hashed.encode() for name, hashed in settings.basic_auth_users.items()},
        headers={str(name): str(value) for name, value in http.headers.items()},
        rate=settings.rate_limit,
        files=(path, *named.values()),
    )


def _named(tls: TlsSettings, beside: Path) -> dict[str, Path]:
    """Return the files that are named, by their keys."""
    named = {key: getattr(tls, key) for key in ("cert_file", "key_file", "client_ca_file")}
    return {key: beside / name for key, name in named.items() if name}


def _tls(settings: TlsSettings, files: Mapping[str, Path], place: Place) -> Tls:
    """Return the context. Raises SettingsError, which never shows what stands in a file."""
    contents = {key: _content(file, place.at(key)) for key, file in files.items()}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.min_version]
    context.maximum_version = _VERSIONS[settings.max_version]
    context.set_alpn_protocols(["http/1.1"])
    if not settings.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    _limit_ciphers(context, settings)
    try:
        # An empty password, or OpenSSL would ask for one at the terminal.
        context.load_cert_chain(files["cert_file"], files["key_file"], password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or "no certificate and its key in PEM, not encrypted"
        raise SettingsError(f"{place}: cert_file and key_file cannot be used: {why}") from None
    if settings.client_auth_type != "NoClientCert":
        _ask_for_certificates(context, settings, files, place)
    return Tls(settings, tuple(hashlib.sha256(content).digest() for content in contents.values()), context)


def _content(file: Path, place: Place) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SettingsError(f"{place}: {file} cannot be read: {error.strerror or error}") from None


def _limit_ciphers(context: ssl.SSLContext, settings: TlsSettings) -> None:
    """Leave the suites that are named; those of TLS 1.3 are always on, and where only they are, TLS 1.2 is not."""
    of_tls12 = [CIPHERS[name] for name in settings.cipher_suites if name in CIPHERS]
    if of_tls12:
        context.set_ciphers(":".join(of_tls12))
    elif settings.cipher_suites:
        context.minimum_version = ssl.TLSVersion.TLSv1_3


def _ask_for_certificates(
    context: ssl.SSLContext, settings: TlsSettings, files: Mapping[str, Path], place: Place
) -> None:
    required = settings.client_auth_type == "RequireAndVerifyClientCert"
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    if "client_ca_file" not in files:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # as Go does: the authorities that this system trusts
        return
    try:
        context.load_verify_locations(files["client_ca_file"])
    except (OSError, ValueError):
        file = files["client_ca_file"]
        raise SettingsError(f"{place.at('client_ca_file')}: no certificate in PEM in {file}") from None


#: What is done with what a changed file says.
Take: TypeAlias = Callable[[Access], Awaitable[None]]


@asynccontextmanager
async def followed(access: Access, take: Take, every: float = LOOK_EVERY) -> AsyncIterator[None]:
    """Hand over what the files say whenever that changes, while the block lasts."""
    following = asyncio.create_task(_follow(access, take, every)) if access.files else None
    try:
        yield
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _follow(access: Access, take: Take, every: float) -> None:
    """Look for ever. What cannot be read is said once, and changes nothing.

    A change is taken once the files have stood still between two looks, and until they were read: an editor empties a
    file before it writes it, and an empty one would let everybody in. Certificates are renewed file by file, so one
    that does not fit its key yet is looked at again.
    """
    seen: list[tuple[int, ...]] | None = None
    taken: list[tuple[int, ...]] | None = None
    complaint = ""
    while True:
        stamps = await asyncio.to_thread(_stamps, access.files)
        if stamps == seen and (stamps != taken or complaint):
            taken = stamps
            try:
                new = await asyncio.to_thread(_read_still, access.files, stamps)
                if new is not None and new != access:
                    await take(new)
            except (SettingsError, OSError) as error:
                if str(error) != complaint:
                    log.error("the web configuration is not taken, the one before still holds: %s", error)
                complaint = str(error)
            else:
                if new is None:
                    taken = None
                else:
                    if new != access or complaint:
                        log.info("the web configuration is read again", extra={"file": access.files[0]})
                    access, complaint = new, ""
        seen = stamps
        await asyncio.sleep(every)


def _read_still(files: tuple[Path, ...], stamps: list[tuple[int, ...]]) -> Access | None:
    """Read the files, None where they have changed by then."""
    try:
        found = read_access(files[0])
    except (SettingsError, OSError):
        if _stamps(files) != stamps:
            return None
        raise
    return found if _stamps(files) == stamps else None


def _stamps(files: tuple[Path, ...]) -> list[tuple[int, ...]]:
    """Return what changes when a file does; a link that leads elsewhere, as Kubernetes' mounts do, is a change too."""
    stamps: list[tuple[int, ...]] = []
    for file in files:
        try:
            found = file.stat()
            stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
        except OSError:
            stamps.append(())
    return stamps
