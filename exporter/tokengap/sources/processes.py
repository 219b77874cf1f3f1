"""The processes of this host: whose socket is this, with how many slots was an engine started, which
processes are its own, what could be watched.

Looking through the open files of every process costs seconds at 100,000 sockets, so the processes of hops are looked
at first, all others rarely, and never more than a fiftieth of the time. What may not be seen stays unanswered.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import psutil

from tokengap.readings import CLOSE_WAIT, ESTABLISHED, LISTEN, ProcessTable, UnseenSockets
from tokengap.sources.commandlines import (
    KNOWN_PROXIES,
    OPERATOR_PORTS,
    api_port,
    is_vllm,
    option,
    proxy_program,
    slots_of,
)
from tokengap.sources.host import ANY_ADDRESS, Held, Row, Tree, holders, is_own, listens, own_addresses, rows_in
from tokengap.sources.namespaces import Listening, look_inside
from tokengap.sources.unseen import connected_to, quic_ports, udp_rows, unix_sockets
from tokengap.topology import Endpoint, Engine, Hop, Topology

_REST_FACTOR = 49  # after a walk through /proc, rest this many times as long
_EVERYONE_SECONDS = 5.0  # at the soonest, between walks through all processes
_FORGET_SECONDS = 120.0  # an answer that nobody asks for lives once to twice as long
_MOST_ANSWERS = 100_000


class Processes:
    """Answers the join's questions about socket inodes, and finds engines' slots on their command lines.

    ``refresh`` is how often (seconds) listeners and the processes behind them are looked up anew. Walks run in a
    thread, one at a time; one that outlasts a beat goes on, and its answers come with a later beat. ``netns`` are
    further network namespaces in which hops and engines may listen.
    """

    def __init__(self, *, refresh: float = 30.0, netns: Sequence[str] = ()) -> None:
        self._host = _Host(refresh, netns)
        self._topology: Topology | None = None
        self._walk: asyncio.Future[_Found] | None = None
        self._slots: Mapping[str, int] = {}
        self._families: Mapping[str, frozenset[int]] = {}
        self._unseen: Mapping[str, UnseenSockets] = {}
        # Two generations of answers: what is asked for moves to the younger, and the older is dropped in turn.
        self._answers: dict[int, str] = {}
        self._older: dict[int, str] = {}
        self._turned = time.monotonic()

    async def read(self, topology: Topology, questions: frozenset[int]) -> ProcessTable:
        """Return what is known about the asked inodes, after a walk through ``/proc`` if one is due.

        Raises SourceError where there is no ``/proc``.
        """
        now = time.monotonic()
        if topology != self._topology:
            self._answers, self._older, self._topology = {}, {}, topology
        answers = self._recall(questions, now)
        missing = questions - answers.keys() - {0}  # no inode: not accepted yet, or closed by its process
        if self._walk is None and self._host.due(now, topology, missing):
            self._walk = asyncio.ensure_future(asyncio.to_thread(self._host.look, topology, missing))
        if self._walk is not None:
            walk = self._walk
            try:
                found = await asyncio.shield(walk)
            finally:
                if walk.done():
                    self._walk = None
            if found.topology == topology:
                self._answers.update(found.owners)
                self._slots, self._families, self._unseen = found.slots, found.families, found.unseen
                answers |= {inode: owner for inode, owner in found.owners.items() if inode in questions}
        # Our own sockets without being asked: our reads of an engine's page go where the streams go.
        own = frozenset(holders((os.getpid(),), None).pids)
        return ProcessTable(answers, own, self._slots, self._families, self._unseen)

    def _recall(self, questions: frozenset[int], now: float) -> dict[int, str]:
        if now - self._turned > _FORGET_SECONDS or len(self._answers) > _MOST_ANSWERS:
            self._answers, self._older, self._turned = {}, self._answers, now
        self._answers.update({inode: self._older[inode] for inode in questions if inode in self._older})
        return {inode: self._answers[inode] for inode in questions if inode in self._answers}


@dataclass(frozen=True, slots=True)
class _Found:
    """What one walk brought: owners by inode, slots and processes by engine, and for which topology."""

    topology: Topology
    owners: Mapping[int, str]
    slots: Mapping[str, int]
    families: Mapping[str, frozenset[int]]
    unseen: Mapping[str, UnseenSockets]


class _Host:
    """What is known about this host's processes; used by one thread at a time."""

    def __init__(self, refresh: float, netns: Sequence[str]) -> None:
        self._refresh, self._netns = refresh, netns
        self._topology: Topology | None = None
        self._refresh_due = 0.0
        self._walk_due = 0.0
        self._everyone_due = 0.0
        self._listener_pids: frozenset[int] = frozenset()
        self._hop_of: dict[int, str] = {}
        self._all_hops_seen = False
        self._surveyed: frozenset[int] = frozenset()
        self._slots: dict[str, int] = {}
        self._families: dict[str, frozenset[int]] = {}
        self._unseen: dict[str, UnseenSockets] = {}
        self._unseen_due = 0.0

    def due(self, now: float, topology: Topology, missing: frozenset[int]) -> bool:
        """Tell whether a walk is worth its cost now."""
        looks_anew = now >= self._refresh_due or (bool(topology.hops) and now >= self._unseen_due)
        return topology != self._topology or looks_anew or (bool(missing) and now >= self._walk_due)

    def look(self, topology: Topology, missing: frozenset[int]) -> _Found:
        """Find the owners of inodes: first among the processes of hops, then, if it is time, among all."""
        began = time.monotonic()
        found_for = self._topology
        if topology != self._topology or began >= self._refresh_due:
            self._survey(topology, frozenset())
        owners: dict[int, str] = {}
        if missing:
            held = holders(self._hop_of, missing)
            owners = {inode: self._owner(topology, pids) for inode, pids in held.pids.items()}
            missing -= owners.keys()
            if self._all_hops_seen and not held.hidden:
                # Who was there at the survey and is no hop's is none now either; who came since may be.
                newer = holders(frozenset(psutil.pids()) - self._surveyed, missing)
                others = missing - newer.pids.keys() if not newer.hidden else frozenset()
                owners |= dict.fromkeys(others, "")
                missing -= others
        ended = time.monotonic()
        self._walk_due = ended + _REST_FACTOR * (ended - began)
        if missing and ended >= self._everyone_due:
            held = self._survey(topology, missing)
            owners |= {inode: self._owner(topology, held.pids[inode]) for inode in missing & held.pids.keys()}
            if not held.hidden and self._all_hops_seen:  # then nobody has it: an absence proves something
                owners |= dict.fromkeys(missing - held.pids.keys(), "")
            took = time.monotonic() - ended
            self._everyone_due = ended + took + max(_EVERYONE_SECONDS, _REST_FACTOR * took)
        if topology.hops and (topology != found_for or time.monotonic() >= self._unseen_due):
            self._look_beyond_tcp(topology)
        return _Found(topology, owners, dict(self._slots), dict(self._families), dict(self._unseen))

    def _look_beyond_tcp(self, topology: Topology) -> None:
        """Find what the processes of hops hold that is not TCP."""
        began = time.monotonic()
        held = holders(self._hop_of, None)
        udp, unix = udp_rows(), unix_sockets()
        self._unseen = {}
        for hop in topology.hops:
            pids = {pid for pid, name in self._hop_of.items() if name == hop.name}
            if not pids or pids & held.hidden:
                self._unseen[hop.name] = UnseenSockets()
                continue
            inodes = frozenset(inode for inode, of in held.pids.items() if of & pids)
            quic = quic_ports(udp, frozenset(endpoint.port for endpoint in hop.listen), inodes)
            self._unseen[hop.name] = UnseenSockets(quic, None if unix is None else connected_to(unix, inodes))
        ended = time.monotonic()
        self._unseen_due = ended + max(_EVERYONE_SECONDS, _REST_FACTOR * (ended - began))

    def _owner(self, topology: Topology, pids: frozenset[int]) -> str:
        """Return the hop, the outermost if several, that one of the processes belongs to, or ``""``."""
        hops = {self._hop_of[pid] for pid in pids if pid in self._hop_of}
        return next((hop.name for hop in topology.hops if hop.name in hops), "")

    def _survey(self, topology: Topology, inodes: frozenset[int]) -> Held:
        """Look up the processes behind hops and engines, and on the way (through all processes) who holds inodes."""
        tree = Tree()
        spaces = look_inside(self._netns)
        rows = [row for space in spaces for row in space.rows]
        of_hop = {
            hop.name: {row.inode for row in rows if any(listens(row, endpoint) for endpoint in hop.listen)}
            for hop in topology.hops
        }
        here = {
            engine.name: {
                e.port for e in engine.endpoints if e.address is None or any(space.has(e.address) for space in spaces)
            }
            for engine in topology.engines
        }
        of_engine = _listeners_of(topology.engines, spaces)
        wanted = frozenset().union(*of_hop.values(), *of_engine.values())
        held = holders(self._listener_pids & tree.pids, wanted)
        if inodes or wanted - held.pids.keys():
            held = holders(tree.pids, wanted | inodes)
        held_by = {name: _union(held.pids, inodes) for name, inodes in (of_hop | of_engine).items()}

        self._hop_of = {}
        for hop in topology.hops:
            others = [pids for name, pids in held_by.items() if name != hop.name]
            for pid in tree.family(held_by[hop.name], stop=frozenset().union(*others)):
                self._hop_of.setdefault(pid, hop.name)
        self._slots, self._families = {}, {}
        for name, ports in here.items():
            others = [pids for other, pids in held_by.items() if other != name]
            if of_engine[name]:
                family = tree.family(held_by[name], stop=frozenset().union(*others))
                self._families[name] = frozenset(family)
            slots = _slots_at(tree, held_by[name], ports) if of_engine[name] else None
            if slots is not None:
                self._slots[name] = slots
        self._topology, self._surveyed = topology, tree.pids
        self._listener_pids = _union(held.pids, wanted)
        self._all_hops_seen = frozenset().union(*of_hop.values()) <= held.pids.keys()
        all_up = all(of_hop.values()) and all(of_engine[name] for name, ports in here.items() if ports)
        self._refresh_due = time.monotonic() + (self._refresh if all_up else min(self._refresh, _EVERYONE_SECONDS))
        return held


def _listeners_of(engines: Sequence[Engine], spaces: Sequence[Listening]) -> dict[str, set[int]]:
    """Return the inodes of each engine's listeners. A port alone means our own namespace, else one that no other
    engine has by its address."""

    def at(engine: Engine, spaces: Iterable[Listening], *, addressed: bool) -> set[int]:
        return {
            row.inode
            for space in spaces
            for endpoint in engine.endpoints
            if (endpoint.address is not None) == addressed and (endpoint.address is None or space.has(endpoint.address))
            for row in space.rows
            if row.port == endpoint.port
        }

    own, others = spaces[:1], spaces[1:]
    by_address = {engine.name: at(engine, spaces, addressed=True) for engine in engines}
    claimed = set().union(*by_address.values())
    return {
        engine.name: by_address[engine.name]
        | (at(engine, own, addressed=False) or at(engine, others, addressed=False) - claimed)
        for engine in engines
    }


def _union(pids: Mapping[int, frozenset[int]], inodes: Iterable[int]) -> frozenset[int]:
    return frozenset().union(*(pids.get(inode, frozenset()) for inode in inodes))


def _slots_at(tree: Tree, listeners: frozenset[int], ports: Iterable[int]) -> int | None:
    """Return the slots that the command line behind a listener names.

    With several API servers the listener is held by children titled ``VLLM::APIServer``, so their parents are read too.
    Where it is hidden who holds it, the command line that names the port is taken: command lines are open to all.
    """
    for pid in sorted(listeners):
        parents = takewhile(lambda parent: is_vllm(tree.argv(parent)), tree.ancestors(pid))
        for candidate in (pid, *parents):
            slots = slots_of(tree.argv(candidate))
            if slots is not None:
                return slots
    if not listeners:
        for argv in map(tree.argv, sorted(tree.pids)):
            if is_vllm(argv) and api_port(argv) in ports:
                return slots_of(argv)
    return None


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found on this host, hops outermost first, and sentences that tell a person so, and what was not seen."""

    engines: tuple[Engine, ...]
    hops: tuple[Hop, ...]
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Proxy:
    """The processes of one running proxy, and the listening ports and open connections they hold."""

    program: str
    pid: int
    hidden: bool
    ports: tuple[int, ...]
    connections: tuple[Row, ...]


def discover() -> Discovery:
    """Find vLLM servers and known proxies on this host, by process and by listening port.

    Blocks for some 10 ms per 1,000 open sockets. Raises SourceError where there is no ``/proc``.
    """
    tree = Tree()
    rows = rows_in(LISTEN, ESTABLISHED, CLOSE_WAIT)
    listening = [row for row in rows if row.state == LISTEN]
    engines, sentences = _find_engines(tree, listening)
    engine_of = {endpoint.port: engine.name for engine in engines for endpoint in engine.endpoints}
    proxies = _find_proxies(tree, rows, engine_of.keys())

    names = _names(proxies)
    targets = engine_of | {port: name for name, proxy in names.items() for port in proxy.ports}
    own = own_addresses()
    hops: list[Hop] = []
    for name, proxy in names.items():
        what = f"{proxy.program} (pid {proxy.pid})"
        if not proxy.ports:
            why = "may not be looked into" if proxy.hidden else "listens on no TCP port"
            sentences.append(f"{what} {why}, so it is left out")
            continue
        towards = {
            targets[row.remote_port]: None
            for row in proxy.connections
            if row.port not in proxy.ports and row.remote_port in targets and is_own(row.remote, own)
        }
        towards.pop(name, None)
        where = ", ".join(f":{port}" for port in proxy.ports)
        if towards:
            seen = f"is connected to {', '.join(towards)}"
        else:
            seen = "holds no connection to an engine now, so it may forward to any of them"
        sentences.append(f"{what} listens on {where} and {seen}")
        to = tuple(towards or (engine.name for engine in engines))
        hops.append(Hop(name, tuple(Endpoint(None, port) for port in proxy.ports), to))
    if not engines:
        sentences.append("no vLLM server found: none runs and listens here, or its command line is hidden")
    if not names:
        sentences.append(f"no proxy found (looked for {', '.join(KNOWN_PROXIES)})")
    if any(proxy.hidden for proxy in proxies):
        sentences.append(
            "to look into other users' processes, run as root or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        )
    return Discovery(tuple(engines), _outermost_first(hops), tuple(sentences))


def _find_engines(tree: Tree, listening: Sequence[Row]) -> tuple[list[Engine], list[str]]:
    """Return engines by port, and sentences about them. A wrapper names the same port as the server it started."""
    servers = [pid for pid in sorted(tree.pids) if is_vllm(tree.argv(pid))]
    held = holders(tree.descendants(servers), frozenset(row.inode for row in listening))
    engines: dict[int, Engine] = {}
    sentences = []
    waiting = {}
    for pid in servers:
        argv = tree.argv(pid)
        family = tree.descendants([pid])
        if family & held.hidden:  # then the command line alone must do
            rows = [row for row in listening if row.port == api_port(argv)]
        else:
            rows = [row for row in listening if held.pids.get(row.inode, frozenset()) & family]
        ports = {row.port for row in rows}
        port = ports.pop() if len(ports) == 1 else api_port(argv)  # alone: the port may stand in a configuration file
        at = [row.address for row in rows if row.port == port]
        if not at:
            waiting[port] = f"a vLLM server (pid {pid}) does not listen on its port {port} yet, so it is left out"
        elif port not in engines:
            scheme = "https" if option(argv, "--ssl-certfile") else "http"
            url = f"{scheme}://{_reachable(at)}:{port}"
            engines[port] = Engine(f"vllm-{port}", url, (Endpoint(None, port),))
            slots = slots_of(argv)
            known = "its command line does not say how many slots it has" if slots is None else f"{slots} slots"
            sentences.append(f"vLLM server (pid {pid}) at {url}: {known}")
    sentences += [sentence for port, sentence in waiting.items() if port not in engines]
    return [engines[port] for port in sorted(engines)], sentences


def _reachable(addresses: Sequence[str]) -> str:
    """Choose the address, as it stands in a URL, at which a listener is reached from here."""
    if set(addresses) & {"127.0.0.1", *ANY_ADDRESS}:
        return "127.0.0.1"
    return f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]


def _find_proxies(tree: Tree, rows: Sequence[Row], engine_ports: Iterable[int]) -> list[_Proxy]:
    programs = {pid: proxy_program(tree.name(pid), tree.argv(pid)) for pid in tree.pids}
    roots = {pid for pid, program in programs.items() if program}
    roots -= {pid for pid in roots if any(programs.get(above) == programs[pid] for above in tree.ancestors(pid))}
    proxies = []
    for root in sorted(roots):
        program = programs[root] or ""
        held = holders(tree.descendants([root]), None)
        mine = [row for row in rows if row.inode in held.pids]
        ports = {row.port for row in mine if row.state == LISTEN} - set(engine_ports)
        users = ports - OPERATOR_PORTS.get(program, frozenset()) or ports
        connections = tuple(row for row in mine if row.state != LISTEN)
        proxies.append(_Proxy(program, root, bool(held.hidden), tuple(sorted(users)), connections))
    return proxies


def _names(proxies: Sequence[_Proxy]) -> dict[str, _Proxy]:
    """Name proxies after their programs; where one runs several times, after its lowest port (or process) as well."""
    count = Counter(proxy.program for proxy in proxies)
    return {
        proxy.program if count[proxy.program] == 1 else f"{proxy.program}-{(*proxy.ports, proxy.pid)[0]}": proxy
        for proxy in proxies
    }


def _outermost_first(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """Order hops so that each stands before those it forwards to, as far as they form no ring."""
    ordered: list[Hop] = []
    rest = list(hops)
    while rest:
        inner = {name for hop in rest for name in hop.to if name != hop.name}
        outermost = [hop for hop in rest if hop.name not in inner] or rest
        ordered += outermost
        rest = [hop for hop in rest if hop not in outermost]
    return tuple(ordered)
