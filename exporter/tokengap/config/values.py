"""Single values: each kind reads what a person writes, or raises ValueError; ``expects`` says what it takes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from math import isfinite
from typing import Any, ClassVar, Protocol, Self
from urllib.parse import urlsplit

from tokengap.logs import FORMATS, LEVELS
from tokengap.topology import Endpoint
from tokengap.view import MODES

_PORT = re.compile(r"[1-9]\d{0,4}", re.ASCII)


class Kind(Protocol):
    """What the kinds of values have in common."""

    expects: ClassVar[str]
    metavar: ClassVar[str]

    @classmethod
    def read(cls, value: object, /) -> Any:
        """Return the value. Raises ValueError."""


class Seconds(float):
    """A length of time, more than 0."""

    __slots__ = ()
    expects: ClassVar = "a time such as 8s, 500ms, 1m or 2h (a bare number is seconds)"
    metavar: ClassVar = "TIME"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read a number, or a number with its unit."""
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(ms|s|m|h|)", str(value).strip(), re.ASCII)
        seconds = float(match[1]) * {"ms": 0.001, "m": 60, "h": 3600}.get(match[2], 1) if match else 0.0
        if not (seconds > 0 and isfinite(seconds)):
            raise ValueError
        return cls(seconds)

    def __str__(self) -> str:
        return f"{float(self):.6f}".rstrip("0").rstrip(".") + "s"


class Address(str):
    """Where something listens on this host: ``:8080`` for every address, ``10.0.0.5:8080``, ``[2001:db8::5]:8080``."""

    __slots__ = ()
    expects: ClassVar = "PORT, :PORT, IPV4:PORT or [IPV6]:PORT, with a port from 1 to 65535"
    metavar: ClassVar = "ADDR"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read a port, or an address with one."""
        host, colon, port = str(value).strip().rpartition(":")
        if isinstance(value, float) or not _PORT.fullmatch(port) or int(port) > 65535:
            raise ValueError
        if not colon or host in ("", "*"):
            return cls(Endpoint(None, int(port)))
        if host.startswith("[") and host.endswith("]"):
            six = ipaddress.IPv6Address(host[1:-1])
            ip: ipaddress.IPv4Address | ipaddress.IPv6Address = six.ipv4_mapped or six
        else:
            ip = ipaddress.IPv4Address(host)
        return cls(Endpoint(None if ip.is_unspecified else str(ip), int(port)))

    @property
    def endpoint(self) -> Endpoint:
        """The same, as sockets are searched for it."""
        host, _, port = self.rpartition(":")
        return Endpoint(host.strip("[]") or None, int(port))


class Listen(str):
    """Where this exporter serves."""

    __slots__ = ()
    expects: ClassVar = "[HOST]:PORT such as :10788 or 127.0.0.1:10788, with a port from 0 (any free one) to 65535"
    metavar: ClassVar = "[HOST]:PORT"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read a port, or a host with one."""
        host, _, port = str(value).strip().rpartition(":")
        if isinstance(value, float) or not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > 65535:
            raise ValueError
        if host.startswith("[") and host.endswith("]"):
            ipaddress.IPv6Address(host[1:-1])
        elif not re.fullmatch(r"[\w.-]*", host, re.ASCII):
            raise ValueError
        return cls(f"{host}:{port}")


class Url(str):
    """The address of an engine's API or of an exporter. Credentials in it are used, and never shown."""

    __slots__ = ()
    expects: ClassVar = "http://HOST:PORT or https://HOST:PORT"
    metavar: ClassVar = "URL"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it; what it is the address of is ``/metrics`` below it, which may stand there or not."""
        text = str(value).strip()
        parts = urlsplit(text)
        if re.search(r"\s", text) or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
        if parts.query or parts.fragment or parts.port == 0:  # a port above 65535 raises by itself
            raise ValueError
        return cls(text.rstrip("/"))

    @property
    def short(self) -> str:
        """A name for what is there: host and port, and the path where there is one."""
        parts = urlsplit(self)
        return parts.netloc.rpartition("@")[2].lower() + re.sub(r"/(?:v1|metrics)$", "", parts.path)


class RuntimeSocket(str):
    """Where HAProxy's runtime socket is."""

    __slots__ = ()
    expects: ClassVar = "an absolute path such as /run/haproxy/admin.sock, or HOST:PORT"
    metavar: ClassVar = "PATH"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        text = str(value).strip()
        host, _, port = text.rpartition(":")
        if not text.startswith("/"):
            if "/" in text or not host or not _PORT.fullmatch(port) or int(port) > 65535:
                raise ValueError
        elif not text.isprintable() or len(text.encode()) > 107:  # sun_path of sockaddr_un, unix(7)
            raise ValueError
        return cls(text)


class SocketPath(str):
    """Where a unix socket is."""

    __slots__ = ()
    expects: ClassVar = "an absolute path such as /run/tokengap/admit.sock"
    metavar: ClassVar = "PATH"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        text = str(value).strip()
        if not text.startswith("/") or not text.isprintable() or len(text.encode()) > 107:  # as above
            raise ValueError
        return cls(text)


class PagePath(str):
    """A path of the exporter's own server."""

    __slots__ = ()
    #: What is served there anyway.
    taken: ClassVar = (
        *("/", "/streams", "/engines", "/gpus"),
        *("/api/now", "/api/history", "/api/streams", "/api/engines", "/api/hops", "/api/gpus", "/api/sources"),
        *("/runbooks", "/runbooks/", "/-/healthy", "/-/ready"),
    )
    expects: ClassVar = f"a path such as /metrics, and none of {', '.join(taken)}"
    metavar: ClassVar = "PATH"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        if value in cls.taken or not re.fullmatch(r"/[\w./-]*", str(value), re.ASCII):
            raise ValueError
        return cls(value)


class Name(str):
    """A name of something; it becomes the value of a label."""

    __slots__ = ()
    expects: ClassVar = "a name of letters, digits and . _ - : / (at most 63)"
    metavar: ClassVar = "NAME"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,62}", str(value)):
            raise ValueError
        return cls(value)


class Netns(str):
    """A network namespace: by a process in it, by a file, or every one."""

    __slots__ = ()
    expects: ClassVar = "a process id, an absolute path such as /run/netns/NAME, or all"
    metavar: ClassVar = "PID|PATH|all"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        text = str(value).strip()
        if isinstance(value, (bool, float)) or not re.fullmatch(r"[1-9]\d{0,9}|/.+|all", text, re.ASCII):
            raise ValueError
        return cls(text)


class Count(int):
    """How many of something there are, at least one."""

    __slots__ = ()
    expects: ClassVar = "a whole number from 1 to 1000000"
    metavar: ClassVar = "N"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,7}", text, re.ASCII) or not 1 <= int(text) <= 1_000_000:
            raise ValueError
        return cls(text)


class Size(int):
    """An amount of memory in bytes, more than 0."""

    __slots__ = ()
    expects: ClassVar = "a size such as 32MiB, 512KiB or 1GiB (a bare number is bytes)"
    metavar: ClassVar = "SIZE"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read a whole number, or one with its unit."""
        match = re.fullmatch(r"(\d{1,12})\s*(KiB|MiB|GiB|)", str(value).strip(), re.ASCII)
        size = int(match[1]) * 1024 ** ("", "KiB", "MiB", "GiB").index(match[2]) if match else 0
        if isinstance(value, bool) or size < 1:
            raise ValueError
        return cls(size)

    def __str__(self) -> str:
        for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
            if self % 1024**power == 0:
                return f"{self // 1024**power}{unit}"
        return str(int(self))


class GpuUuid(str):
    """The identity of a GPU, or of a MIG instance."""

    __slots__ = ()
    expects: ClassVar = "a UUID as `nvidia-smi -L` prints it, such as GPU-8f6bb2a1-... or MIG-..."
    metavar: ClassVar = "UUID"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        if not re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z./-]{4,80}", str(value)):
            raise ValueError
        return cls(value)


class Amount(float):
    """An amount of money or of power, more than 0."""

    __slots__ = ()
    expects: ClassVar = "a number above 0"
    metavar: ClassVar = "NUMBER"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        text = str(value).strip()
        if not re.fullmatch(r"\d{1,9}\.?\d*|\.\d+", text, re.ASCII) or float(text) == 0:
            raise ValueError
        return cls(text)

    def __str__(self) -> str:
        return f"{float(self):g}"


class FilePath(str):
    """A file of this host."""

    __slots__ = ()
    expects: ClassVar = "the path of a file"
    metavar: ClassVar = "FILE"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        if not isinstance(value, str) or not value or not value.isprintable():
            raise ValueError
        return cls(value)


class Currency(str):
    """The currency of a price."""

    __slots__ = ()
    expects: ClassVar = "a currency of three letters such as USD or EUR (ISO 4217)"
    metavar: ClassVar = "CODE"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        if not re.fullmatch(r"[A-Z]{3}", str(value)):
            raise ValueError
        return cls(value)


class Switch:
    """Yes or no; read as a ``bool``, of which there can be no subclass."""

    expects: ClassVar = "true or false"
    metavar: ClassVar = ""

    @classmethod
    def read(cls, value: object) -> bool:
        """Read it."""
        try:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]
        except KeyError:
            raise ValueError from None


class Choice(str):
    """One of a few words."""

    __slots__ = ()
    among: ClassVar[Collection[str]]

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        if value not in cls.among:
            raise ValueError
        return cls(value)


class LogLevel(Choice):
    """From which level up is logged."""

    __slots__ = ()
    among = LEVELS
    expects: ClassVar = f"one of {', '.join(LEVELS)}"
    metavar: ClassVar = "LEVEL"


class LogFormat(Choice):
    """The form of a line in the log."""

    __slots__ = ()
    among = FORMATS
    expects: ClassVar = f"one of {', '.join(FORMATS)}"
    metavar: ClassVar = "FORMAT"


class Sign(str):
    """What tells the class of a request."""

    __slots__ = ()
    expects: ClassVar = "CLASS=header:NAME:VALUE, CLASS=path:/PATH or CLASS=key:SHA256 (of the API key, 64 hex digits)"
    metavar: ClassVar = "CLASS=BY:VALUE"

    @classmethod
    def read(cls, value: object) -> Self:
        """Read it."""
        if not re.fullmatch(
            r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,62}=(header:[\w-]+:\s*\S.*|path:/\S*|key:[0-9a-f]{64})",
            str(value),
            re.ASCII,
        ):
            raise ValueError
        return cls(value)

    @property
    def parts(self) -> tuple[str, str, str]:
        """The class, by what it is told, and the value of that."""
        klass, _, sign = self.partition("=")
        by, _, value = sign.partition(":")
        return klass, by, value


class AdmitMode(Choice):
    """How the gateway decides."""

    __slots__ = ()
    among = MODES
    expects: ClassVar = f"one of {', '.join(MODES)}"
    metavar: ClassVar = "MODE"


class Balance(Choice):
    """Which of several engines gets the next stream."""

    __slots__ = ()
    among = ("least", "robin")
    expects: ClassVar = "one of least, robin"
    metavar: ClassVar = "HOW"


class WhenHeld(Choice):
    """What happens to a slot that an engine does not give back."""

    __slots__ = ()
    among = ("hold", "admit")
    expects: ClassVar = "one of hold, admit"
    metavar: ClassVar = "WHAT"
