"""``tokengap doctor``: what this host allows, what will be used, and what to do about the rest.

First everything is looked at, with the sources that serving uses; then pure functions say what it means. Nothing is
changed, and an engine is asked for its page and its version only: never ``/health`` (on SGLang it generates), never a
completion.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, TextIO, TypeAlias, TypeVar

import aiohttp
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tokengap.join
from tokengap import __version__
from tokengap.beat import Beat, GpuSource, Sources, deadline
from tokengap.errors import SourceError, SourceRefused, SourceTimeout
from tokengap.gpu_readings import ABSENT, GpuReason, GpuSnapshot
from tokengap.join.gpus import engines_of
from tokengap.readings import LISTEN, EnginePage, GatewayPage, ProcessTable, ProxySnapshot
from tokengap.series.engines import public_url
from tokengap.sources.commandlines import proxy_program
from tokengap.sources.engine import EngineSource, metrics_url
from tokengap.sources.engine_families import FAMILY_NAMED
from tokengap.sources.gateway import GatewaySource
from tokengap.sources.host import Row, Tree, holders, listens, rows_in
from tokengap.sources.namespaces import ALL, Netns, find, look_inside, why_not_enter
from tokengap.sources.processes import Discovery, Processes
from tokengap.sources.proxies import proxy_source
from tokengap.sources.sockets import SocketAccess, Sockets, probe
from tokengap.topology import Endpoint, Engine, Hop, ProxyInterface, Topology
from tokengap.view import BlindSpot, BlindSpotView, Condition, View

T = TypeVar("T")

#: ``ok`` needs nothing. ``note``: it works, with a limit worth knowing. ``attention``: something will be missing.
Level: TypeAlias = Literal["ok", "note", "attention"]

#: Seconds for an engine to answer, more than a beat gives it: "slow" is a better answer than "nothing".
PATIENCE: Final = 5.0
#: Seconds for a program to tell its version.
_VERSION_WITHIN: Final = 2.0
#: How many sockets should be able to end within one beat before the kernel drops events. Its default receive buffer
#: (net.core.rmem_max 212992) has room for 332.
_ROOM: Final = 2000
#: ``struct tcp_info`` up to ``tcpi_bytes_sent``, in Linux 4.19: every column that is read.
_WHOLE_TCP_INFO: Final = 208

#: The capabilities that make a difference, and their bits (linux/capability.h).
_CAPABILITIES: Final = {"CAP_DAC_READ_SEARCH": 2, "CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19}

#: How known proxies tell their version.
_VERSION_FLAGS: Final = {"nginx": "-v", "haproxy": "-v", "envoy": "--version", "caddy": "version", "traefik": "version"}
#: Proxies that speak HTTP/2 to clients unless told otherwise.
_HTTP2: Final = frozenset({"caddy", "envoy", "traefik"})
#: What to do when a proxy's own interface cannot be read.
_INTERFACE_ADVICE: Final = {
    "haproxy": "it needs `stats socket PATH mode 660 level operator` in HAProxy, and this process in its group",
    "envoy": "it needs the `admin` address of Envoy's configuration, reached from here",
    "nginx": "it needs a `location` with `stub_status`, open to this address",
}
#: Programs that listen for a container, whose own sockets are in another network namespace.
CONTAINER_DOORS: Final = frozenset({"docker-proxy", "rootlessport", "conmon"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, how it is, and one line of advice. Only ``ok`` may go without."""

    subject: str
    level: Level
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.advice, f"no advice about {self.subject}"


async def examine(
    watched: Topology, *, auto: Discovery | None = None, netns: Sequence[str] = (), gpu: GpuSource | None = None
) -> list[Finding]:
    """Look at this host and at what is to be watched, in the namespaces ``netns`` too; ``auto`` is what was found on
    it. Takes seconds at most."""
    async with aiohttp.ClientSession() as session:
        access, listeners, spaces, processes, gpus, answers = await asyncio.gather(
            asyncio.to_thread(probe),
            asyncio.to_thread(look_at_listeners, watched.hops, netns),
            asyncio.to_thread(look_at_namespaces, netns),
            _or_error(Processes(netns=netns).read(watched, frozenset())),
            look_at_gpus(gpu),
            asyncio.gather(*(ask(engine, session) for engine in watched.engines)),
        )
        told = await asyncio.gather(
            *(_or_error(proxy_source(one, session, deadline=PATIENCE).read()) for one in watched.interfaces)
        )
        seen = await look_for_some_beats(watched, session)
        gateway = await ask_gateway(watched, session)
    capabilities = effective_capabilities()
    table = processes if isinstance(processes, ProcessTable) else ProcessTable()
    slots = table.slots
    return [
        about_versions(access.kernel),
        *about_sockets(access, capabilities),
        *about_namespaces(spaces),
        *(Finding("auto", "ok", sentence) for sentence in (auto.sentences if auto else ())),
        *about_selection(watched),
        *(
            finding
            for engine, answer in zip(watched.engines, answers, strict=True)
            for finding in (
                about_engine(engine, answer, deadline(watched.interval)),
                about_slots(engine, slots.get(engine.name)),
            )
        ),
        *(finding for hop in watched.hops for finding in about_hop(hop, listeners, capabilities)),
        *about_gpus(gpus, watched, table),
        *(about_interface(one, answer) for one, answer in zip(watched.interfaces, told, strict=True)),
        *about_blind_spots(seen.blind_spots if seen is not None else ()),
        *about_gateway(watched, gateway),
        *about_capacity(seen),
    ]


def healthy(findings: Iterable[Finding]) -> bool:
    """Tell whether nothing needs attention."""
    return all(finding.level != "attention" for finding in findings)


# --- shown ----------------------------------------------------------------------------------------------------------


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as one JSON object: ``healthy``, and under ``findings`` one object each."""
    rows = [asdict(finding) for finding in findings]
    return json.dumps({"healthy": healthy(findings), "findings": rows}, indent=2, ensure_ascii=False)


def print_findings(findings: Sequence[Finding], out: TextIO) -> None:
    """Print a table on a terminal, and elsewhere a plain line a finding, its advice on the next."""
    if not out.isatty():
        for finding in findings:
            out.write(f"{finding.level:<11}{finding.subject}: {finding.found}\n")
            if finding.advice:
                out.write(f"{'':<11}-> {finding.advice}\n")
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("", "what", "found", "advice"):
        table.add_column(column, overflow="fold")
    styles: dict[Level, str] = {"ok": "green", "note": "yellow", "attention": "bold red"}
    for finding in findings:
        # Text and not markup, which would take an address in brackets for a style.
        plain = (Text(words) for words in (finding.subject, finding.found, finding.advice))
        table.add_row(Text(finding.level, styles[finding.level]), *plain)
    Console(file=out).print(table)


# --- this program and this kernel -----------------------------------------------------------------------------------


def about_versions(kernel: str) -> Finding:
    """Name what a report of a fault has to name."""
    return Finding("versions", "ok", f"tokengap {__version__}, Python {platform.python_version()}, {kernel}")


def effective_capabilities() -> frozenset[str]:
    """Return which of the capabilities that matter here this process has (proc(5), CapEff)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return frozenset()
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return frozenset(name for name, bit in _CAPABILITIES.items() if mask >> bit & 1)


def about_sockets(access: SocketAccess, capabilities: frozenset[str]) -> Iterator[Finding]:
    """Say how sockets are read, whether the kernel tells when one ends, and how many may end at once."""
    if not access.sock_diag:
        tells = "states and queues, no bytes" if access.way == "proc" else "states only"
        yield Finding(
            "sockets",
            "attention",
            f"{access.way} will be used, it tells {tells}; sock_diag: {access.sock_diag_reason}",
            "no token can be called useful so; load tcp_diag (modprobe), allow AF_NETLINK (systemd, seccomp), or leave "
            "the sandbox; no capability is needed",
        )
        return
    if access.tcp_info is not None and access.tcp_info < _WHOLE_TCP_INFO:
        found = f"sock_diag will be used; this kernel tells {access.tcp_info} of {_WHOLE_TCP_INFO} bytes of tcp_info"
        yield Finding("sockets", "note", found, "some columns stay unknown; Linux 4.19 or newer has them all")
    else:
        yield Finding("sockets", "ok", "sock_diag will be used, with every column; it needs no privilege")
    if not access.events:
        lacks = "" if "CAP_NET_ADMIN" in capabilities else "; this process lacks CAP_NET_ADMIN, which some kernels want"
        yield Finding(
            "destroy events",
            "note",
            f"off, so up to one beat of each socket that ends is missed: {access.events_reason}{lacks}",
            "try with CAP_NET_ADMIN or on a newer kernel; a shorter --interval misses less",
        )
    elif access.events_room is not None and access.events_room < _ROOM and "CAP_NET_ADMIN" not in capabilities:
        yield Finding(
            "destroy events",
            "note",
            f"on; when more than {access.events_room} sockets end within a beat, the kernel drops some",
            f"sysctl net.core.rmem_max={32 * 1024 * 1024}, or run with CAP_NET_ADMIN",
        )
    else:
        yield Finding("destroy events", "ok", "on: the final counters of each socket that ends are read")


# --- network namespaces ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Door:
    """A known proxy that listens in a network namespace other than our own."""

    program: str
    pid: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Namespaces:
    """What is to be watched besides our own network namespace, and proxies that listen where nothing is.

    ``watched`` are names; ``missing`` says why others that were asked for are not there. ``refused``: why none may be
    entered, empty where they may.
    """

    watched: Sequence[str] = ()
    missing: Sequence[str] = ()
    refused: str = ""
    doors: Sequence[Door] = ()


def look_at_namespaces(netns: Sequence[str]) -> Namespaces:
    """Look for the wanted namespaces, and for proxies in those that are not."""
    wanted, missing = find(netns)
    keys = {there.key for there in wanted}
    others = [] if ALL in netns else [there for there in find([ALL])[0] if there.key not in keys]
    refused = why_not_enter() if netns else ""
    return Namespaces([there.name for there in wanted], missing, refused, list(_doors(others)) if others else [])


def _doors(others: Iterable[Netns]) -> Iterator[Door]:
    port_of: dict[int, int] = {}
    for there in others:
        if there.net is not None:
            with suppress(SourceError, OSError):  # its process has ended
                port_of |= {row.inode: row.port for row in rows_in(LISTEN, net=there.net)}
    tree = Tree()
    listening: dict[int, set[int]] = {}
    for inode, pids in holders(tree.pids, frozenset(port_of)).pids.items():
        listening.setdefault(min(pids), set()).add(port_of[inode])
    for pid, ports in sorted(listening.items()):
        program = proxy_program(tree.name(pid), tree.argv(pid))
        if program is not None:
            yield Door(program, pid, tuple(sorted(ports)))


def about_namespaces(spaces: Namespaces) -> Iterator[Finding]:
    """Say which network namespaces are watched besides our own, and which proxies are in others."""
    subject = "network namespaces"
    if spaces.watched and spaces.refused:
        found = f"{', '.join(spaces.watched)}, states and queues of their sockets only: {spaces.refused}"
        yield Finding(subject, "attention", found, "run with CAP_SYS_ADMIN; without it no token can be called useful")
    elif spaces.watched:
        yield Finding(subject, "ok", f"{', '.join(spaces.watched)}, besides our own")
    for why in spaces.missing:
        yield Finding(subject, "attention", why, "start what is in it, or correct --netns")
    for door in spaces.doors:
        where = ", ".join(f":{port}" for port in door.ports)
        found = f"{door.program} (pid {door.pid}) listens on {where} in another network namespace"
        yield Finding(subject, "note", found, f"to watch it: --netns {door.pid}")


def about_selection(watched: Topology) -> Iterator[Finding]:
    """Say whether there is something to watch."""
    if not watched.engines:
        yield Finding("engines", "attention", "none to watch", "name one with --engine URL, or let --auto look for it")
    if not watched.hops:
        found = "none to watch: only what clients of the engines themselves do is seen"
        yield Finding("hops", "note", found, "name the proxies on this host with --hop NAME=PORT, or let --auto look")


# --- engines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered: its page or why there is none, how long that took, and the version it tells."""

    page: EnginePage | SourceError
    took: float = 0.0
    version: str | None = None


async def ask(engine: Engine, session: aiohttp.ClientSession) -> Answer:
    """Read an engine's page and version."""
    began = time.monotonic()
    page = await _or_error(EngineSource(engine, session, deadline=PATIENCE).read())
    took = time.monotonic() - began
    return Answer(page, took, None if isinstance(page, SourceError) else await _version(engine, session))


async def _version(engine: Engine, session: aiohttp.ClientSession) -> str | None:
    """Ask for ``/version``, which is static: it costs an engine with work nothing, and says nothing about health."""
    url = metrics_url(engine.url).removesuffix("metrics") + "version"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_VERSION_WITHIN)) as answer:
            said = json.loads(await answer.content.read(65536))
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    version = said.get("version") if isinstance(said, dict) else None
    return version if isinstance(version, str) else None


async def _or_error(read: Awaitable[T]) -> T | SourceError:
    try:
        return await read
    except SourceError as error:
        return error


def about_engine(engine: Engine, answer: Answer, within: float) -> Finding:
    """Say whether an engine's page can be read, and by a beat, which gives it ``within`` seconds."""
    subject, page = f"engine {engine.name}", answer.page
    if isinstance(page, SourceError):
        advice = (
            "its /metrics has to be reached from here, and to show an engine's series (vLLM: no --disable-log-stats)"
        )
        if isinstance(page, SourceRefused):
            advice = "start it, or correct its address"
        elif isinstance(page, SourceTimeout):
            advice = "see whether it is stuck, or what on the way keeps the answer back"
        return Finding(subject, "attention", str(page), advice)
    if not engine.endpoints:
        advice = "name the addresses at which proxies reach it (addresses, in the file of settings)"
        return Finding(subject, "attention", "it answers, but its name did not resolve at first", advice)
    if answer.took > within:
        found = f"its page took {answer.took:.1f} s, and a beat waits {within:.1f} s"
        return Finding(subject, "attention", found, "set a longer --interval, or see what slows its API server down")
    title = FAMILY_NAMED[page.family].title
    what = f"{title} {answer.version}" if answer.version else f"a page of {title}"
    models = f" with {', '.join(page.models)}" if page.models else ""
    where = ", ".join(map(str, engine.endpoints))
    if page.generation_tokens is None:
        found = f"{what}{models} at {where}, which counts no tokens yet"
        return Finding(subject, "note", found, "some versions show their counters after the first request")
    return Finding(subject, "ok", f"{what}{models} at {where}")


def about_slots(engine: Engine, on_command_line: int | None) -> Finding:
    """Say whether it is known how many sequences an engine runs at once."""
    subject = f"slots of {engine.name}"
    if engine.slots is not None:
        return Finding(subject, "ok", f"{engine.slots}, by the settings")
    if on_command_line is not None:
        return Finding(subject, "ok", f"{on_command_line}, by its command line")
    found = "not known: no page of vLLM tells, nor a command line that can be read from here"
    return Finding(subject, "note", found, "tell its max_num_seqs with --slots; else the most ever seen running counts")


# --- GPUs -----------------------------------------------------------------------------------------------------------

#: What to do where GPUs cannot be read and it is no normal state; docs/gpu.md has more.
_GPU_ADVICE: Final[Mapping[GpuReason, str]] = {
    "version_mismatch": "reboot, or unload and load the driver's modules: it was upgraded and runs in its old version",
    "no_permission": "let this user open /dev/nvidia*, or run as root",
    "no_gpus": "start the container anew: its devices are gone, often after systemctl daemon-reload",
    "wrong_binding": "install nvidia-ml-py, and remove the package that took its place",
    "hung": "run nvidia-smi on the host: if it hangs too, this GPU needs a reset or the host a reboot",
    "crashed": "run nvidia-smi on the host: a GPU is probably lost",
}


async def look_at_gpus(source: GpuSource | None) -> GpuSnapshot | SourceError | None:
    """Return what is told of the GPUs, once there is an answer; None where they are not asked for."""
    until = time.monotonic() + PATIENCE
    while source is not None:
        answer = await _or_error(source.read())
        if isinstance(answer, SourceError) or answer.reason != "starting" or time.monotonic() >= until:
            return answer
        await asyncio.sleep(0.05)
    return None


def about_gpus(answer: GpuSnapshot | SourceError | None, watched: Topology, table: ProcessTable) -> Iterator[Finding]:
    """Say whether GPUs are read, and on which of them each engine computes."""
    if answer is None:
        return
    if isinstance(answer, SourceError):
        yield Finding("gpus", "attention", str(answer), "correct --dcgm, or start the dcgm-exporter")
        return
    if answer.reason != "ok":
        told = f"none can be read ({answer.reason}): {answer.detail}"
        if answer.reason in ABSENT:
            yield Finding("gpus", "ok", f"none: no NVIDIA driver here ({answer.reason})")
        else:
            yield Finding("gpus", "attention", told, _GPU_ADVICE.get(answer.reason, "see docs/gpu.md"))
        return
    whole = [gpu for gpu in answer.gpus if not gpu.parent]
    lost = [f"{gpu.index} ({gpu.uuid or 'UUID not known'}): {gpu.reason}" for gpu in whole if not gpu.up]
    if lost:
        yield Finding("gpus", "attention", f"lost: {', '.join(lost)}", "see docs/gpu.md; its engine may hang")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in whole if gpu.up))
    yield Finding("gpus", "ok", f"{len(whole) - len(lost)} read by {answer.way}: {names}, driver {answer.driver}")
    for engine in watched.engines:
        mine = [gpu.uuid for gpu in answer.gpus if engine.name in engines_of(gpu, watched, table.families)[0]]
        if mine:
            yield Finding(f"gpus of {engine.name}", "ok", ", ".join(mine))
        else:
            found = "not known: no process of it is seen on a GPU, so what its orphans cost is not known"
            advice = "name them by UUID (gpus, in the file of settings), or let this see the host's processes"
            yield Finding(f"gpus of {engine.name}", "note", found, advice)


# --- hops -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Program:
    """Who listens: a known proxy or the name of a process, its lowest pid, and the version that is installed."""

    name: str
    pid: int
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Listeners:
    """The listeners of the hops in the network namespaces that are watched.

    ``programs`` by inode; a listener that is not in it is held by a process that may not be looked into. ``error``:
    why none of this is known.
    """

    rows: Sequence[Row] = ()
    programs: Mapping[int, Program] = field(default_factory=dict)
    error: str = ""


def look_at_listeners(hops: Sequence[Hop], netns: Sequence[str] = ()) -> Listeners:
    """Look at who listens where the hops should."""
    endpoints = [endpoint for hop in hops for endpoint in hop.listen]
    try:
        every = [row for space in look_inside(netns) for row in space.rows]
        rows = [row for row in every if any(listens(row, endpoint) for endpoint in endpoints)]
    except SourceError as error:
        return Listeners(error=str(error))
    tree = Tree()
    held = holders(tree.pids, frozenset(row.inode for row in rows))
    lowest = {inode: min(pids) for inode, pids in held.pids.items()}
    names = {pid: proxy_program(tree.name(pid), tree.argv(pid)) or tree.name(pid) for pid in lowest.values()}
    versions = {name: installed_version(name) for name in set(names.values())}
    programs = {inode: Program(names[pid], pid, versions[names[pid]]) for inode, pid in lowest.items()}
    return Listeners(rows, programs)


def installed_version(name: str) -> str | None:
    """Return the version of a known proxy, as the program on our PATH tells it.

    Not the one that runs is asked: root must not start whatever another user has called nginx.
    """
    path = shutil.which(name) if name in _VERSION_FLAGS else None
    if path is None:
        return None
    try:
        said = subprocess.run(  # noqa: S603 - a known program with a fixed argument
            (path, _VERSION_FLAGS[name]), capture_output=True, text=True, timeout=_VERSION_WITHIN, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return next(filter(None, map(str.strip, (said.stdout + said.stderr).splitlines())), None)


def about_hop(hop: Hop, listeners: Listeners, capabilities: frozenset[str]) -> Iterator[Finding]:
    """Say who listens at each address of a hop."""
    if listeners.error:
        advice = "on this system hops are known by their ports alone"
        yield Finding(f"hop {hop.name}", "note", f"who listens is not known: {listeners.error}", advice)
        return
    for endpoint in hop.listen:
        inodes = [row.inode for row in listeners.rows if listens(row, endpoint)]
        programs = [listeners.programs[inode] for inode in inodes if inode in listeners.programs]
        if not inodes:
            advice = "start the proxy, or correct --hop; if it is in another network namespace, name that with --netns"
            yield Finding(f"hop {hop.name}", "attention", f"nobody listens on {endpoint}", advice)
        elif not programs:
            missing = " and ".join(sorted({"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"} - capabilities))
            lacks = f": this process lacks {missing}" if missing else ""
            found = f"listens on {endpoint}; its process may not be looked into{lacks}"
            advice = "without it a client's connection may be taken for another program's; run as its user, or as root"
            yield Finding(f"hop {hop.name}", "note", found, advice)
        else:
            yield _about_program(hop, endpoint, min(programs, key=lambda program: program.pid))


def about_interface(interface: ProxyInterface, answer: ProxySnapshot | SourceError) -> Finding:
    """Say what a proxy tells about itself."""
    subject = f"{interface.program} of {interface.hop}"
    if isinstance(answer, SourceError):
        advice = _INTERFACE_ADVICE[interface.program]
        return Finding(subject, "attention", f"{public_url(interface.address)}: {answer}", advice)
    parts = {
        "streams": answer.streams,
        "queued": answer.queued,
        "clients that left": answer.client_aborts,
        "connections of HTTP/2": answer.h2_connections,
    }
    found = "it tells " + ", ".join(f"{value} {what}" for what, value in parts.items() if value is not None)
    if answer.queued and answer.oldest_queued is None and interface.program == "haproxy":
        advice = "how long requests wait in its queue is told at level operator (stats socket PATH level operator)"
        return Finding(subject, "note", found, advice)
    return Finding(subject, "ok", found)


#: Beats that are watched for blind spots: the first two tell what changes.
_BEATS: Final = 3

_BLIND_ADVICE: Final[Mapping[BlindSpot, str]] = {
    "http2_clients": "name the interface that counts them: --haproxy-socket, --envoy-admin or --nginx-status",
    "http3_clients": "their requests are never called orphans; Envoy's own interface counts them (--envoy-admin)",
    "unix_upstream": "let the proxy call the engine over TCP; until then its tokens are unattributed",
    "load_balancer": "run tokengap in front as well: here a client is there until what is in front lets go",
}


async def look_for_some_beats(watched: Topology, session: aiohttp.ClientSession) -> View | None:
    """Watch for a few beats, as `serve` does, and return what is known then. None where there is nothing to see."""
    if not watched.hops:
        return None
    try:
        sockets = await asyncio.to_thread(Sockets)
    except SourceError:
        return None
    within = deadline(watched.interval)
    sources = Sources(
        sockets=sockets,
        engines={engine.name: EngineSource(engine, session, deadline=within) for engine in watched.engines},
        processes=Processes(),
        proxies={one.hop: proxy_source(one, session, deadline=within) for one in watched.interfaces},
    )

    async def nowhere(_: View) -> None:
        return None

    beat = Beat(watched, sources, tokengap.join, nowhere)
    try:
        view = await beat.once()
        for _ in range(_BEATS - 1):
            await asyncio.sleep(min(watched.interval, 1.0))
            view = await beat.once()
    finally:
        sockets.close()
    return view


#: What each condition is, in words.
_UNSAFE: Final[Mapping[Condition, str]] = {
    "no_cancel": "clients left and their streams ran on",
    "not_tied": "tokens are generated for nobody",
    "slack_short": "less is left of the deadline than a stream lasts",
}


def about_capacity(seen: View | None) -> Iterator[Finding]:
    """Say whether free slots may be given away, as far as it shows now."""
    for engine in seen.engines if seen is not None else ():
        subject = f"free capacity of {engine.name}"
        true = [words for condition, words in _UNSAFE.items() if engine.unsafe.get(condition)]
        if true:
            level: Level = "attention" if len(true) == len(_UNSAFE) else "note"
            advice = "do not admit by free slots until cancels arrive: docs/rollback.md, or `tokengap admit`"
            yield Finding(subject, level, "; ".join(true), advice)
        elif len(engine.unsafe) == len(_UNSAFE):
            yield Finding(subject, "ok", "clients who leave free their slots, and slack is longer than streams last")
        else:
            unknown = "whether it may be given away does not show in a few seconds without clients who leave"
            advice = "`tokengap doctor cancel` tries it; `tokengap_free_capacity_unsafe` tells it of live traffic"
            yield Finding(subject, "note", unknown, advice)


async def ask_gateway(watched: Topology, session: aiohttp.ClientSession) -> GatewayPage | SourceError | None:
    """Ask the gateway, where there is one."""
    if watched.gateway is None:
        return None
    return await _or_error(GatewaySource(watched.gateway.url, session, deadline=PATIENCE).read())


def about_gateway(watched: Topology, told: GatewayPage | SourceError | None) -> Iterator[Finding]:
    """Say what the gateway tells, and whether it is about the engines that are watched."""
    if watched.gateway is None or told is None:
        return
    subject = f"gateway {public_url(watched.gateway.url)}"
    if isinstance(told, SourceError):
        yield Finding(subject, "attention", str(told), "start `tokengap admit`, or correct --admit")
        return
    unknown = [engine.name for engine in watched.engines if engine.name not in told.engines]
    if len(unknown) == len(watched.engines):
        found = f"it has no engine named {', '.join(unknown)}, but {', '.join(told.engines)}"
        yield Finding(subject, "attention", found, "give engines the same names in both: --engine NAME=URL")
        return
    found = f"it admits by {told.mode}" if told.mode == "age" else "it refuses when every slot is busy: rolled back"
    held = sum(engine.slots.get("held", 0) for engine in told.engines.values())
    if held:
        advice = "the engine ignores cancels: runbooks/TokengapSlotHeldAgainstCancel.md"
        yield Finding(subject, "attention", f"{found}; {held} slots are held against their cancel", advice)
    elif told.mode == "age":
        yield Finding(subject, "ok", found)
    else:
        yield Finding(subject, "note", found, "back: tokengap admit mode age")


def about_blind_spots(spots: Iterable[BlindSpotView]) -> Iterator[Finding]:
    """Say what cannot be seen, as far as it shows now."""
    for spot in spots:
        if spot.blind:
            yield Finding(f"hop {spot.hop}", "note", f"{spot.kind}: {spot.why}", _BLIND_ADVICE[spot.kind])


def _about_program(hop: Hop, endpoint: Endpoint, program: Program) -> Finding:
    installed = f" ({program.version} is installed)" if program.version else ""
    found = f"{program.name} (pid {program.pid}) listens on {endpoint}{installed}"
    if program.name in CONTAINER_DOORS:
        advice = "its container has sockets of its own: watch them with --netns, with the container's port as the hop"
        return Finding(f"hop {hop.name}", "attention", f"{found} for a container", advice)
    if program.name in _HTTP2:
        advice = "clients on HTTP/2 share a connection, in which the kernel cannot tell their streams apart"
        return Finding(f"hop {hop.name}", "note", found, advice)
    return Finding(f"hop {hop.name}", "ok", found)
