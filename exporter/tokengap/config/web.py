"""The file of ``--web.config.file``: TLS, users, headers and rates, in the format of Prometheus' exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md; ``promtool check web-config``
reads the same files. What of it Python's TLS cannot do, or what verifies nothing, is refused rather than passed over
(``docs/web.md`` has the list).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from msgspec import Struct

from tokengap.config import file as settings_file
from tokengap.config.reading import Place, structure
from tokengap.config.values import Choice, Count, FilePath, Seconds
from tokengap.errors import SettingsError

#: The cipher suites of TLS 1.2 that may be named, by Go's names, as OpenSSL calls them: those that encrypt with forward
#: secrecy and authenticate. The others that Go knows are out of use.
CIPHERS: Final = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}

#: What a header that may be set can be; None: any text.
_HEADERS: Final[Mapping[str, tuple[str, ...] | None]] = {
    "Content-Security-Policy": None,
    "Strict-Transport-Security": None,
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": None,
}


class ClientAuth(Choice):
    """What clients must show. Go's two that ask for a certificate and do not verify it protect nothing."""

    __slots__ = ()
    among = ("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
    expects: ClassVar = f"one of {', '.join(among)}"


class TlsVersion(Choice):
    """A version of TLS. RFC 8996 forbids those before."""

    __slots__ = ()
    among = ("TLS12", "TLS13")
    expects: ClassVar = "TLS12 or TLS13"


class Cipher(Choice):
    """A cipher suite, by the name it has in Go. Those of TLS 1.3 may stand there, and are always on."""

    __slots__ = ()
    among = (*CIPHERS, "TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
    expects: ClassVar = f"one of {', '.join(among)}"


class UserName(str):
    """The name of a user; without a colon, which would end it in the header (RFC 7617)."""

    __slots__ = ()
    expects: ClassVar = "a name without a colon"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        text = str(value)
        if not text or ":" in text or not text.isprintable():
            raise ValueError
        return cls(text)


class PasswordHash(str):
    """A password, hashed with bcrypt. What is no hash may be a password: it is not shown."""

    __slots__ = ()
    secret: ClassVar = True
    expects: ClassVar = "a bcrypt hash such as `htpasswd -nBC 10 NAME` prints, of a cost from 4 to 16"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it. A cost of 16 is seconds of computing for each new password; more would be anybody's to waste."""
        match = re.fullmatch(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}", str(value))
        if match is None or not 4 <= int(match[1]) <= 16:
            raise ValueError
        return cls(value)


class HeaderName(Choice):
    """A header that may be set."""

    __slots__ = ()
    among = _HEADERS
    expects: ClassVar = f"one of {', '.join(_HEADERS)}"


class HeaderValue(str):
    """The value of a header: one line. An empty one takes the header away."""

    __slots__ = ()
    expects: ClassVar = "one line of ASCII"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        text = str(value)
        if not text.isascii() or (text and not text.isprintable()):
            raise ValueError
        return cls(text)


class Spacing(float):
    """The time between two requests; 0 where there is no limit."""

    __slots__ = ()
    expects: ClassVar = "a time such as 1s or 100ms, or 0"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it; a bare number would be nanoseconds to Go, so only 0 may stand without its unit."""
        if isinstance(value, bool) or (isinstance(value, int | float) and value != 0):
            raise ValueError
        return cls(0 if str(value) in ("0", "0s") else Seconds.read(value))


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of the file."""

    expects: ClassVar = "a mapping"

    @staticmethod
    def in_one_word(_: str) -> Mapping[str, object]:
        """Refuse a word: ValueError."""
        raise ValueError


class TlsSettings(Section, frozen=True):
    """``tls_server_config``."""

    cert_file: Annotated[FilePath | None, "The certificate of this server, and those that lead to its authority."] = (
        None
    )
    key_file: Annotated[FilePath | None, "Its key, not encrypted."] = None
    client_auth_type: Annotated[ClientAuth, "Whether clients need a certificate."] = ClientAuth("NoClientCert")
    client_ca_file: Annotated[FilePath | None, "The authorities that clients' certificates are from."] = None
    min_version: Annotated[TlsVersion, "The lowest version of TLS."] = TlsVersion("TLS12")
    max_version: Annotated[TlsVersion, "The highest version of TLS."] = TlsVersion("TLS13")
    cipher_suites: Annotated[tuple[Cipher, ...], "The suites of TLS 1.2, in the order of preference."] = ()
    prefer_server_cipher_suites: Annotated[bool, "Choose by this order and not by the client's."] = True

    @property
    def wanted(self) -> bool:
        """Whether TLS is asked for at all."""
        return bool(self.cert_file or self.key_file or self.client_ca_file) or self.client_auth_type != "NoClientCert"


class HttpSettings(Section, frozen=True):
    """``http_server_config``."""

    http2: Annotated[bool, "Of no effect: this exporter speaks HTTP/1.1."] = True
    headers: Annotated[Mapping[HeaderName, HeaderValue], "Headers of every answer, in place of its own."] = {}


class RateSettings(Section, frozen=True):
    """``rate_limit``: a bucket from which every request takes."""

    interval: Annotated[Spacing, "The time between two requests, on average."] = Spacing(0)
    burst: Annotated[Count, "How many may come at once."] = Count(1)


class WebSettings(Section, frozen=True):
    """The whole file."""

    tls_server_config: Annotated[TlsSettings | None, "TLS."] = None
    http_server_config: Annotated[HttpSettings | None, "HTTP."] = None
    basic_auth_users: Annotated[Mapping[UserName, PasswordHash], "Who may ask, and their passwords' hashes."] = {}
    rate_limit: Annotated[RateSettings | None, "How often all together may ask."] = None


def read_web(path: Path) -> tuple[WebSettings, Place]:
    """Return what stands in the file, and its place, by which messages say where. Raises SettingsError."""
    file = settings_file.read(path)
    place = Place(str(path), file)
    if not isinstance(file.values.get("basic_auth_users"), dict | None):  # before anything shows what stands there
        raise SettingsError(f"{place.at('basic_auth_users')} is no mapping; expected lines such as `alice: $2y$10$...`")
    settings: WebSettings = structure(WebSettings, file.values, place)
    for name, value in (settings.http_server_config or HttpSettings()).headers.items():
        allowed = _HEADERS[name]
        if allowed is not None and value not in allowed:
            where = place.at("http_server_config", "headers", name)
            raise SettingsError(f"{where} is {value!r}; expected {' or '.join(allowed)}")
    if (tls := settings.tls_server_config) is not None:
        _check(tls, place.at("tls_server_config"))
    return settings, place


def _check(tls: TlsSettings, place: Place) -> None:
    """Refuse what does not fit together."""
    for key in ("cert_file", "key_file"):
        if tls.wanted and not getattr(tls, key):
            raise SettingsError(f"{place} has no {key}; expected {FilePath.expects}")
    if tls.client_ca_file and tls.client_auth_type == "NoClientCert":
        raise SettingsError(
            f"{place.at('client_ca_file')} is of no use with client_auth_type NoClientCert; expected a "
            f"client_auth_type, such as RequireAndVerifyClientCert"
        )
    if tls.min_version > tls.max_version:
        raise SettingsError(f"{place.at('min_version')} is above max_version, {tls.max_version}")
