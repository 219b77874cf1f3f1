"""What can be set. Flags, variables, checks and the table of ``docs/configuration.md`` are made from what stands here.

The annotation of a field holds its kind and its meaning; its default is its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Final, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct, field

from tokengap.config.values import (
    Address,
    AdmitMode,
    Amount,
    Balance,
    Count,
    Currency,
    FilePath,
    GpuUuid,
    Listen,
    LogFormat,
    LogLevel,
    Name,
    Netns,
    PagePath,
    RuntimeSocket,
    Seconds,
    Sign,
    Size,
    SocketPath,
    Switch,
    Url,
    WhenHeld,
)
from tokengap.topology import INTERACTIVE


class EngineSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. ``[NAME=]URL`` says the same in one word."""

    expects: ClassVar = "[NAME=]URL, or a mapping with url and, where wanted, name, slots, class, addresses, gpus"
    metavar: ClassVar = "[NAME=]URL"

    url: Annotated[Url, "Where its API is; `/metrics` is read there. Credentials in it are used and never shown."]
    name: Annotated[Name, "The value of the label `engine`. Host and port of the URL by default."] = Name()
    slots: Annotated[Count | None, "Its `max_num_seqs`, summed over data-parallel ranks."] = None
    klass: Annotated[Name, "The deadline class of its streams."] = field(name="class", default=Name(INTERACTIVE))
    addresses: Annotated[
        tuple[Address, ...], "Where proxies reach it besides the URL's host, such as the address of a service."
    ] = ()
    gpus: Annotated[
        tuple[GpuUuid, ...],
        "The UUIDs of the GPUs it computes on. Those on which its processes are seen by default; needed where they "
        "cannot be seen (another host, a container without the host's pids, a dcgm-exporter).",
    ] = ()

    @staticmethod
    def in_one_word(text: str) -> dict[str, Any]:
        """Return the mapping that ``[NAME=]URL`` stands for."""
        name, equals, url = text.partition("=")
        return {"name": name, "url": url} if equals and "/" not in name else {"url": text}


class HopSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One hop. ``NAME=ADDR[,ADDR...]`` says the same in one word."""

    expects: ClassVar = "NAME=ADDR[,ADDR...], or a mapping with name, listen and, where wanted, to, class"
    metavar: ClassVar = "NAME=ADDR[,ADDR...]"

    name: Annotated[Name, "The value of the label `hop`."]
    listen: Annotated[tuple[Address, ...], "Where its clients connect to it, on this host."]
    to: Annotated[
        tuple[Name, ...],
        "The engines and hops that it forwards to. Hops without it form a chain in the order given, and the last of "
        "them forwards to all engines.",
    ] = ()
    klass: Annotated[Name | None, "The deadline class of streams that enter here. The engine's by default."] = field(
        name="class", default=None
    )

    @staticmethod
    def in_one_word(text: str) -> dict[str, Any]:
        """Return the mapping that ``NAME=ADDR[,ADDR...]`` stands for. Raises ValueError."""
        name, _, addresses = text.partition("=")
        listen = [address for address in addresses.split(",") if address]
        if not name or not listen:
            raise ValueError
        return {"name": name, "listen": listen}


class HaproxySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The runtime socket of one HAProxy. ``[HOP=]PATH`` says the same in one word."""

    expects: ClassVar = "[HOP=]PATH, or a mapping with socket and, where there are several hops, hop"
    metavar: ClassVar = "[HOP=]PATH"

    socket: Annotated[
        RuntimeSocket, "Its `stats socket`: a path, or HOST:PORT. Level `user` will do; `operator` tells queue ages."
    ]
    hop: Annotated[Name, "The hop that it is. May be left out where there is only one."] = Name()

    @staticmethod
    def in_one_word(text: str) -> dict[str, Any]:
        """Return the mapping that ``[HOP=]PATH`` stands for."""
        return _of_hop(text, "socket")


class InterfaceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The page on which one proxy tells about itself. ``[HOP=]URL`` says the same in one word."""

    expects: ClassVar = "[HOP=]URL, or a mapping with url and, where there are several hops, hop"
    metavar: ClassVar = "[HOP=]URL"

    url: Annotated[Url, "Where it is: Envoy's admin address, or nginx's page of `stub_status`."]
    hop: Annotated[Name, "The hop that it is. May be left out where there is only one."] = Name()

    @staticmethod
    def in_one_word(text: str) -> dict[str, Any]:
        """Return the mapping that ``[HOP=]URL`` stands for."""
        return _of_hop(text, "url")


def _of_hop(text: str, key: str) -> dict[str, Any]:
    hop, equals, address = text.partition("=")
    return {"hop": hop, key: address} if equals and "/" not in hop and ":" not in hop else {key: text}


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set."""

    engines: Annotated[tuple[EngineSettings, ...], "The vLLM servers to watch."] = ()
    hops: Annotated[tuple[HopSettings, ...], "The proxies in front of them on this host, outermost first."] = ()
    auto: Annotated[bool, "Look for vLLM servers and known proxies on this host, and watch them as well."] = False
    slots: Annotated[
        Count | None,
        "`max_num_seqs` of each engine that has no `slots` of its own. Read from the command line of a local engine by "
        "default.",
    ] = None
    interval: Annotated[Seconds, "One beat: how often everything is read and joined."] = Seconds(1)
    deadline: Annotated[
        Seconds, f"How long a person waits for the first token: the deadline of the class `{INTERACTIVE}`."
    ] = Seconds(8)
    age_cut: Annotated[
        Seconds,
        "The queue age past which a new stream cannot make the deadline. Three quarters of `deadline` where only that "
        "is set.",
    ] = Seconds(6)
    classes: Annotated[
        Mapping[Name, Seconds | None], "Further classes of streams, each with its deadline, or `none`."
    ] = field(default_factory=dict)
    window: Annotated[Seconds, "One window without progress. Two in a row make an engine `stuck`."] = Seconds(10)
    prefill_budget: Annotated[Seconds, "How long an engine that shows nothing at all may be computing a prompt."] = (
        Seconds(120)
    )
    events: Annotated[
        bool, "Listen to the kernel for sockets that end. Without it up to one beat of each such socket is missed."
    ] = True
    netns: Annotated[
        tuple[Netns, ...],
        "Further network namespaces whose sockets to read, as those of containers: of a process, at a path, or all of "
        "this host. Needs CAP_SYS_ADMIN; see [containers.md](containers.md).",
    ] = ()
    haproxy_socket: Annotated[
        tuple[HaproxySettings, ...],
        "HAProxy's runtime socket, a path or HOST:PORT: what waits inside it, streams of HTTP/2, clients that left.",
    ] = ()
    envoy_admin: Annotated[
        tuple[InterfaceSettings, ...],
        "Envoy's admin interface, such as http://127.0.0.1:9901: streams of HTTP/2, what waits inside it, clients that "
        "left.",
    ] = ()
    nginx_status: Annotated[
        tuple[InterfaceSettings, ...], "nginx's page of `stub_status`: how many requests it has at work."
    ] = ()
    admit: Annotated[
        Url | None,
        "A `tokengap admit` in front of the engines, such as http://127.0.0.1:8090: its exact counts take the place of "
        "estimates, and its series are on this page too. Engines need the same names in both.",
    ] = None
    gpu: Annotated[bool, "Read this host's GPUs where there is an NVIDIA driver."] = True
    dcgm: Annotated[
        Url | None, "A dcgm-exporter to read GPUs from, where no second client of the driver may run. Replaces `gpu`."
    ] = None
    gpu_idle_power: Annotated[
        Amount | None, "Watts that one GPU draws when it does nothing. The least of each at rest by default."
    ] = None
    gpu_hour_price: Annotated[
        Amount | None, "What one GPU costs an hour, power included. Without it no `tokengap_orphan_cost_total`."
    ] = None
    currency: Annotated[Currency, "The currency of `gpu_hour_price`."] = Currency("USD")
    listen: Annotated[Listen, "Where the page is served."] = Listen(":10788")
    web_config_file: Annotated[
        FilePath | None,
        "TLS, users and their passwords, headers and rates, in the format of Prometheus' exporters; see "
        "[web.md](web.md).",
    ] = None
    telemetry_path: Annotated[PagePath, "The path of the series."] = PagePath("/metrics")
    show_addresses: Annotated[
        bool, "Show clients' addresses on the live page and in the JSON. They are masked otherwise."
    ] = False
    admit_listen: Annotated[Listen, "Where `tokengap admit` takes requests."] = Listen(":8090")
    admit_mode: Annotated[
        AdmitMode,
        "How it decides: `age` refuses for whom the deadline is lost, `busy` whoever finds no free slot.",
    ] = AdmitMode("age")
    admit_control: Annotated[
        SocketPath | None,
        "The unix socket over which `tokengap admit mode` reaches it. By default one named after its port, in the "
        "runtime directory of its user.",
    ] = None
    admit_signs: Annotated[
        tuple[Sign, ...],
        "What tells the class of a request that does not say it in a header `X-Tokengap-Class`; the first that fits. "
        f"Without one it is `{INTERACTIVE}`.",
    ] = ()
    admit_balance: Annotated[Balance, "Which of several engines gets the next stream: the emptiest, or by turns."] = (
        Balance("least")
    )
    admit_queue_limit: Annotated[Count, "How many requests of a class may wait at once."] = Count(1000)
    admit_drain_limit: Annotated[
        Seconds, "How long an engine may take to give the slot of a cancelled stream back. Then the slot is `held`."
    ] = Seconds(10)
    admit_when_held: Annotated[
        WhenHeld, "Whether a held slot is kept empty, or the next stream is admitted to it and waits in the engine."
    ] = WhenHeld("hold")
    admit_retry_after_max: Annotated[Seconds, "The longest `Retry-After`."] = Seconds(120)
    admit_max_body: Annotated[Size, "The largest body of a request."] = Size(32 * 2**20)
    admit_silence: Annotated[
        Seconds, "How long an engine may say nothing while it has a request. Then it is given up, and its client told."
    ] = Seconds(300)
    admit_stop_within: Annotated[
        Seconds, "How long streams may go on once `tokengap admit` was asked to stop. Nobody is admitted meanwhile."
    ] = Seconds(30)
    log_level: Annotated[LogLevel, "Log from this level up, to standard error."] = LogLevel("info")
    log_format: Annotated[LogFormat, "One line of this form per event."] = LogFormat("logfmt")


# --- the same, as a person meets it ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A field's annotation, taken apart: what one value is, how many there are, whether none will do, what it means.

    ``one`` has ``read`` (a kind of :mod:`~tokengap.config.values`) or is one of the structs above. ``many`` is tuple,
    Mapping, or None for a single value. ``key`` is the kind of a mapping's keys.
    """

    one: Any
    many: type[tuple[Any, ...]] | type[Mapping[Any, Any]] | None
    optional: bool
    meaning: str
    key: Any = None

    @classmethod
    def of(cls, annotation: Any) -> Shape:
        """Take an annotation apart."""
        meaning, optional, many, key = "", False, None, None
        if get_origin(annotation) is Annotated:
            annotation, meaning = get_args(annotation)
        if get_origin(annotation) in (tuple, Mapping):
            many = get_origin(annotation)
            key, annotation, *_ = (None, *get_args(annotation)) if many is tuple else get_args(annotation)
        if isinstance(annotation, UnionType):
            optional = True
            (annotation,) = (choice for choice in get_args(annotation) if choice is not NoneType)
        return cls(Switch if annotation is bool else annotation, many, optional, meaning, key)

    @property
    def expects(self) -> str:
        """What is expected, in words."""
        words = f"NAME=VALUE, the value {self.one.expects}" if self.many is Mapping else self.one.expects
        return f"{words}, or none" if self.optional else words


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its key in a file, its flags, its variable. ``default`` is as a person would write it."""

    key: str
    flags: tuple[str, ...]
    variable: str
    default: str
    metavar: str
    shape: Shape


def words(text: str, key: str) -> list[str]:
    """Split the variable of a list or mapping: at commas, and hops, whose addresses are so split, at blanks."""
    return [word.strip() for word in text.split(None if key == "hops" else ",") if word.strip()]


#: A list or mapping is added to by a flag of its own, in the singular.
_SINGULAR: Final = {"engines": "engine", "hops": "hop", "classes": "class", "admit_signs": "admit_sign"}

#: The spellings of Prometheus' exporter-toolkit.
_TOOLKIT_FLAGS: Final = {
    "listen": ("--web.listen-address",),
    "web_config_file": ("--web.config.file",),
    "telemetry_path": ("--web.telemetry-path",),
    "log_level": ("--log.level",),
    "log_format": ("--log.format",),
}


def _described() -> Iterator[Setting]:
    for declared in msgspec.structs.fields(Settings):
        key, shape = declared.name, Shape.of(declared.type)
        word = _SINGULAR.get(key, key)
        yield Setting(
            key=key,
            flags=(f"--{word.replace('_', '-')}", *_TOOLKIT_FLAGS.get(key, ())),
            variable=f"TOKENGAP_{word.upper()}",
            default=_written(declared.default),
            metavar="NAME=TIME" if shape.many is Mapping else shape.one.metavar,
            shape=shape,
        )


def _written(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default in ((), None, NODEFAULT) else str(default)


#: Every setting, in the order of the documentation.
SETTINGS: Final = tuple(_described())

#: The settings that only ``tokengap admit`` has.
OF_ADMIT: Final = tuple(setting.key for setting in SETTINGS if setting.key.startswith("admit_"))
