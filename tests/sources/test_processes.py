"""The process table, on real processes: who holds a socket, how many slots an engine has, what `--auto` finds."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tokengap.readings import ESTABLISHED, ProcessTable, UnseenSockets
from tokengap.sources import host, processes
from tokengap.sources.host import Row, rows_in
from tokengap.sources.processes import Discovery, Processes, discover
from tokengap.topology import Endpoint, Engine, Hop, Topology

T = TypeVar("T")

#: A server that answers nothing. Each line on stdin is a command; each answer is a line on stdout.
SERVER = """
import os, signal, socket, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
sockets = []
def options(name):
    return [sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == name]
def inode(s):
    return str(os.fstat(s.fileno()).st_ino)
for fd in options("--fd"):
    sockets.append(socket.socket(fileno=int(fd)))
if not sockets:
    sockets.append(socket.create_server(("127.0.0.1", int((options("--port") or ["0"])[0]))))
print(sockets[0].getsockname()[1], os.getpid(), flush=True)
while command := sys.stdin.readline().split():
    if command[0] == "accept":
        sockets.append(sockets[0].accept()[0])
        print(inode(sockets[-1]), flush=True)
    elif command[0] == "connect":
        sockets.append(socket.create_connection(("127.0.0.1", int(command[1]))))
        print(inode(sockets[-1]), flush=True)
    elif command[0] == "udp":  # at the port of the listener, or at any
        sockets.append(socket.socket(type=socket.SOCK_DGRAM))
        sockets[-1].bind(("127.0.0.1", sockets[0].getsockname()[1] if command[1:] == ["same"] else 0))
        print("ok", flush=True)
    elif command[0] == "unix":  # connect to a path
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].connect(command[1])
        print("ok", flush=True)
    elif command[0] == "listen-unix":  # at a path, and be connected to it
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(command[1])
        sockets[-1].listen()
        sockets += [socket.socket(socket.AF_UNIX), *socket.socketpair()]
        sockets[-3].connect(command[1])
        sockets.append(sockets[-4].accept()[0])
        print("ok", flush=True)
    elif command[0] == "fork":  # a worker that keeps what is open, or gives the listener back
        ready, told = os.pipe()
        if os.fork() == 0:
            if command[1:] == ["drained"]:
                sockets[0].close()
            os.write(told, b"x")
            signal.pause()
        os.read(ready, 1)
        print("ok", flush=True)
    elif command[0] == "drop":  # the last socket: only workers hold it now
        sockets.pop().close()
        print("ok", flush=True)
"""


class Server:
    """A running SERVER."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        port, pid = process.stdout.readline().split()
        self.port, self.pid = int(port), int(pid)

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def accept(self) -> tuple[socket.socket, int]:
        """Connect to it; return our end and the inode of its end."""
        return socket.create_connection(("127.0.0.1", self.port)), int(self.tell("accept"))

    def connect(self, port: int) -> int:
        return int(self.tell(f"connect {port}"))


@contextmanager
def started(*words: str, script: Path | None = None, fds: tuple[int, ...] = ()) -> Iterator[Server]:
    """Run SERVER, or a script of its kind, with arguments, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, *(["-c", SERVER] if script is None else [str(script)]), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
        start_new_session=True,
    )
    try:
        yield Server(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def lent_a_listener() -> Iterator[Server]:
    """Run SERVER on a listener that this process opened, and goes on to hold."""
    with socket.create_server(("127.0.0.1", 0)) as end:
        fd = end.fileno()
        with started("--fd", str(fd), fds=(fd,)) as server:
            yield server


def inode_of(end: socket.socket) -> int:
    return os.fstat(end.fileno()).st_ino


def behind(*hops: tuple[str, int], engine: int | None = None) -> Topology:
    """A topology of hops by name and port, and an engine at a port."""
    engines = () if engine is None else (Engine("e", f"http://127.0.0.1:{engine}", (Endpoint(None, engine),)),)
    return Topology(engines, tuple(Hop(name, (Endpoint(None, port),), ("e",)) for name, port in hops))


def told(table: ProcessTable, asked: frozenset[int]) -> dict[int, str]:
    """What was answered of what was asked; our own sockets are told unasked."""
    return {inode: owner for inode, owner in table.owners.items() if inode in asked}


async def unseen(topology: Topology) -> UnseenSockets:
    """What the processes of the first hop hold that is not TCP."""
    return (await Processes().read(topology, frozenset())).unseen[topology.hops[0].name]


async def test_what_a_hop_holds_that_is_not_tcp(tmp_path: Path) -> None:
    """A UDP socket at the port on which it listens, and a path at which another process listens. Not: any other UDP
    port, what it listens at itself, a pair of sockets between its processes, what is of the system."""
    path, own = str(tmp_path / "engine.sock"), str(tmp_path / "own.sock")
    with started() as edge, socket.socket(socket.AF_UNIX) as engine:
        topology = behind(("edge", edge.port))
        edge.tell("udp any")
        edge.tell(f"listen-unix {own}")
        assert await unseen(topology) == UnseenSockets((), ())
        edge.tell("udp same")
        engine.bind(path)
        engine.listen()
        edge.tell(f"unix {path}")
        accepted, _ = engine.accept()
        with accepted:
            assert await unseen(topology) == UnseenSockets((edge.port,), (path,))


async def test_of_processes_that_may_not_be_looked_into_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of a hop on which nobody listens: None, not "none"."""
    with started() as edge, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert await unseen(behind(("edge", nobody.getsockname()[1]))) == UnseenSockets()
        looked = host.holders

        def hidden(pids, inodes):
            return (
                host.Held(looked(pids, inodes).pids, frozenset({edge.pid})) if inodes is None else looked(pids, inodes)
            )

        monkeypatch.setattr(processes, "holders", hidden)
        assert await unseen(behind(("edge", edge.port))) == UnseenSockets()


async def owners(topology: Topology, *inodes: int) -> dict[int, str]:
    asked = frozenset(inodes)
    return told(await Processes().read(topology, asked), asked)


async def test_both_sockets_of_a_hop_are_its_own_and_a_clients_is_not() -> None:
    """Of a proxied request: downstream and upstream belong to the hop, the client's end to no hop."""
    with started() as engine, started() as edge, ExitStack() as ends:
        client, downstream = edge.accept()
        ends.enter_context(client)
        upstream = edge.connect(engine.port)
        at_engine = int(engine.tell("accept"))
        answers = await owners(
            behind(("edge", edge.port), engine=engine.port),
            client_inode := inode_of(client),
            downstream,
            upstream,
            at_engine,
        )
        assert answers == {client_inode: "", downstream: "edge", upstream: "edge", at_engine: ""}


async def test_hops_of_a_chain_are_told_apart() -> None:
    """edge -> admit: each end of the connection between them belongs to its own hop."""
    with started() as admit, started() as edge:
        upstream = edge.connect(admit.port)
        downstream = int(admit.tell("accept"))
        answers = await owners(behind(("edge", edge.port), ("admit", admit.port)), upstream, downstream)
        assert answers == {upstream: "edge", downstream: "admit"}


async def test_workers_count_also_those_that_gave_the_listener_back() -> None:
    """After a reload old workers hold streams and no listener; they still are the hop."""
    with started() as edge:
        client, downstream = edge.accept()
        with client:
            edge.tell("fork")
            edge.tell("fork drained")
            edge.tell("drop")  # now only the workers hold the client
            assert await owners(behind(("edge", edge.port)), downstream) == {downstream: "edge"}


async def test_a_supervisor_that_lends_the_listener_is_not_the_hop() -> None:
    """Socket activation: who opened the listener holds it too, and its other sockets are not the hop's."""
    with lent_a_listener() as edge:
        client, downstream = edge.accept()
        with client:
            answers = await owners(behind(("edge", edge.port)), downstream, inode_of(client))
            assert answers == {downstream: "edge", inode_of(client): ""}


async def test_a_child_that_serves_another_hop_is_that_hops() -> None:
    """One program that starts the next: the child's sockets belong to the hop whose listener it holds."""
    # The test itself is the outer hop, and the parent of the inner one.
    with lent_a_listener() as inner, socket.create_server(("127.0.0.1", 0)) as outer:
        client, downstream = inner.accept()
        with client:
            topology = behind(("edge", outer.getsockname()[1]), ("admit", inner.port))
            answers = await owners(topology, inode_of(client), downstream)
            assert answers == {inode_of(client): "edge", downstream: "admit"}


async def test_what_no_process_of_a_hop_holds_is_no_hops() -> None:
    """An inode that none of them holds, where all of them may be looked into. 0 is no inode."""
    with started() as edge:
        assert await owners(behind(("edge", edge.port)), 2**62, 0) == {2**62: ""}


async def test_a_process_that_came_since_the_survey_may_be_a_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a new worker of the hop: what it holds is not answered before the next survey."""
    monkeypatch.setattr(processes, "_REST_FACTOR", 0)
    source = Processes()
    with started() as edge, started() as other:
        topology, old = behind(("edge", edge.port)), other.connect(edge.port)
        assert told(await source.read(topology, frozenset({old})), frozenset({old})) == {old: ""}
        source._host._everyone_due = float("inf")
        with started() as newcomer:
            new, older = newcomer.connect(edge.port), other.connect(edge.port)
            asked = frozenset({new, older})
            assert told(await source.read(topology, asked), asked) == {older: ""}


async def test_a_hop_whose_processes_are_not_visible_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener without a visible holder (another pid namespace): an inode nobody holds may be that hop's."""
    with started() as edge:
        see = host.holders
        hide = edge.pid
        monkeypatch.setattr(processes, "holders", lambda pids, inodes: host.Held(see(set(pids) - {hide}, inodes).pids))
        client, downstream = edge.accept()
        with client:
            answers = await owners(behind(("edge", edge.port)), downstream, inode_of(client))
            assert answers == {inode_of(client): ""}


@contextmanager
def nobody() -> Iterator[None]:
    """Give up root for a while, in all threads."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up root")


@needs_root
async def test_what_may_not_be_seen_is_unanswered_but_command_lines_are_open(tmp_path: Path) -> None:
    """Without permission an inode is missing, never "not a hop's"; slots still come from the engine's command line."""
    with (
        started(
            "serve", "m", "--max-num-seqs", "4", "--port", str(port := free_port()), script=named(tmp_path, "vllm")
        ),
        started() as edge,
    ):
        client, downstream = edge.accept()
        with client, nobody():
            asked = frozenset({downstream})
            table = await Processes().read(behind(("edge", edge.port), engine=port), asked)
    assert (told(table, asked), table.slots) == ({}, {"e": 4})


async def test_answers_are_kept_while_asked_for_and_then_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer outlives its process while it is asked for in every beat, and goes some minutes after."""
    source = Processes()
    with started() as edge:
        client, downstream = edge.accept()
        client.close()
        topology, asked = behind(("edge", edge.port)), frozenset({downstream})
        assert told(await source.read(topology, asked), asked) == {downstream: "edge"}
    for _ in range(3):  # the process is gone: only memory can answer
        assert told(await source.read(topology, asked), asked) == {downstream: "edge"}
    monkeypatch.setattr(processes, "_FORGET_SECONDS", 0.0)
    for _ in range(3):  # asked for in each turn of the memory
        assert told(await source.read(topology, asked), asked) == {downstream: "edge"}
    for _ in range(2):
        await source.read(topology, frozenset())
    assert told(await source.read(topology, asked), asked) != {downstream: "edge"}


@pytest.mark.parametrize("watches_a_hop", [True, False])
async def test_nothing_is_looked_through_without_need(watches_a_hop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known who listens, beats without a question walk through nothing for seconds."""
    walks = []
    look = processes._Host.look

    def count(*arguments):
        walks.append(arguments)
        return look(*arguments)

    monkeypatch.setattr(processes._Host, "look", count)
    source = Processes()
    with started() as edge:
        topology = behind(*([("edge", edge.port)] if watches_a_hop else []))
        for _ in range(20):
            await source.read(topology, frozenset())
    assert len(walks) == 1


async def test_our_own_sockets_are_told_unasked() -> None:
    """The exporter reads an engine's page where streams go, and must not take its own connection for one."""
    with socket.socket() as own:
        table = await Processes().read(Topology(), frozenset())
        assert inode_of(own) in table.own


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many inodes are asked for, no more than two turns of answers are kept."""
    monkeypatch.setattr(processes, "_MOST_ANSWERS", 10)
    monkeypatch.setattr(processes, "holders", lambda _pids, inodes: host.Held({i: frozenset() for i in inodes or ()}))
    monkeypatch.setattr(processes, "_EVERYONE_SECONDS", 0.0)
    monkeypatch.setattr(processes, "_REST_FACTOR", 0)
    source = Processes()
    for beat in range(50):
        asked = frozenset(range(1 + beat * 10, 11 + beat * 10))
        assert told(await source.read(Topology(), asked), asked).keys() == asked
    assert len(source._answers) + len(source._older) <= 50


async def test_a_slow_walk_outlasts_its_beat_and_is_not_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is given up leaves the walk running; the next beat takes its answers."""
    go_on = threading.Event()
    walks = 0
    look: Callable[..., object] = processes._Host.look

    def slow(*arguments: object) -> object:
        nonlocal walks
        walks += 1
        assert go_on.wait(10)
        return look(*arguments)

    monkeypatch.setattr(processes._Host, "look", slow)
    source = Processes()
    with started() as edge:
        client, downstream = edge.accept()
        with client:
            topology, asked = behind(("edge", edge.port)), frozenset({downstream})
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(source.read(topology, asked), 0.02)
            go_on.set()
            assert told(await source.read(topology, asked), asked) == {downstream: "edge"}
    assert walks == 1


async def test_unanswerable_questions_do_not_cost_a_walk_in_every_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are looked through at most every five seconds."""
    full = 0
    see = host.holders

    def counted(pids: object, inodes: frozenset[int]) -> host.Held:
        nonlocal full
        found = see(pids, inodes)  # type: ignore[arg-type]  # passed through
        full += inodes is not None and os.getpid() in pids  # type: ignore[operator]  # the test is one of all processes
        return host.Held(found.pids, frozenset({1}))

    monkeypatch.setattr(processes, "holders", counted)
    source = Processes()
    with started() as edge:
        for _ in range(10):
            await source.read(behind(("edge", edge.port)), frozenset({2**62}))
    assert full == 2  # to find the listener, and for the question


async def test_another_topology_is_another_question() -> None:
    """Answers about one topology are not given for the next."""
    source = Processes()
    with started() as edge:
        client, downstream = edge.accept()
        with client:
            asked = frozenset({downstream})
            assert told(await source.read(behind(("edge", edge.port)), asked), asked) == {downstream: "edge"}
            assert told(await source.read(behind(("outer", edge.port)), asked), asked) == {downstream: "outer"}


async def test_the_first_that_holds_a_socket_of_two_hops_is_the_outermost() -> None:
    """One process that serves two hops cannot be told apart; the outermost is named."""
    with started() as edge, started() as both:
        client, downstream = both.accept()
        with client:
            topology = behind(("edge", edge.port), ("outer", both.port), ("inner", both.port))
            assert await owners(topology, downstream) == {downstream: "outer"}


# Slots


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def named(directory: Path, name: str) -> Path:
    """SERVER as a script of some name."""
    script = directory / name
    script.write_text(SERVER)
    return script


async def slots(topology: Topology) -> dict[str, int]:
    return dict((await Processes().read(topology, frozenset())).slots)


async def test_slots_come_from_the_command_line_behind_the_port(tmp_path: Path) -> None:
    """`--max-num-seqs` times the data-parallel size; an engine that does not say has none."""
    with started("serve", "m", "--max-num-seqs=4", "-dp", "2", script=named(tmp_path, "vllm")) as engine:
        assert await slots(behind(engine=engine.port)) == {"e": 8}
    with started("serve", "m", script=named(tmp_path, "vllm")) as engine:
        assert await slots(behind(engine=engine.port)) == {}


async def test_slots_are_read_behind_titled_api_servers(tmp_path: Path) -> None:
    """With `--api-server-count 2` a child titled VLLM::APIServer_0 holds the listener; its parent knows the slots."""
    script = tmp_path / "vllm"
    script.write_text(
        "import os, socket, subprocess\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "child = subprocess.Popen(['VLLM::APIServer_0', '600'], executable='/bin/sleep', pass_fds=[s.fileno()])\n"
        "print(s.getsockname()[1], os.getpid(), flush=True)\n"
        "s.close()\n"
        "child.wait()\n"
    )
    with started("serve", "m", "--api-server-count", "2", "--max-num-seqs", "4", script=script) as engine:
        assert await slots(behind(engine=engine.port)) == {"e": 4}


async def test_the_processes_of_an_engine_are_those_below_its_listeners_master(tmp_path: Path) -> None:
    """GPU work is done in a child of the API server (vLLM's EngineCore): it is the engine's, a stranger is not."""
    with (
        started("serve", "m", script=named(tmp_path, "vllm")) as engine,
        started("--port", str(free_port())) as stranger,
    ):
        engine.tell("fork")
        (family,) = (await Processes().read(behind(engine=engine.port), frozenset())).families.values()
        children = {child.pid for child in psutil.Process(engine.pid).children()}
        assert children
        assert family == {engine.pid, *children}
        assert stranger.pid not in family


async def test_an_engine_behind_a_proxy_does_not_own_the_proxy_that_started_it(tmp_path: Path) -> None:
    """A launcher that lends the engine its listener, or listens itself, has processes that are not the engine's."""
    with started() as edge, started("serve", "m", script=named(tmp_path, "vllm")) as engine:
        table = await Processes().read(behind(("edge", edge.port), engine=engine.port), frozenset())
        assert table.families == {"e": {engine.pid}}


async def test_slots_of_an_engine_elsewhere_are_not_looked_for_here(tmp_path: Path) -> None:
    """A remote engine on the same port number is not the local one."""
    with started("serve", "m", "--max-num-seqs", "4", script=named(tmp_path, "vllm")) as engine:
        remote = Engine("e", "http://192.0.2.7", (Endpoint("192.0.2.7", engine.port),))
        table = await Processes().read(Topology((remote,)), frozenset())
        assert (table.slots, table.families) == ({}, {})


async def test_an_engine_that_starts_later_is_found_at_the_next_refresh(tmp_path: Path) -> None:
    """Restarted with other slots, the engine's new command line counts."""
    source = Processes(refresh=0.0)
    topology = behind(engine=free_port())
    port = str(topology.engines[0].endpoints[0].port)
    assert (await source.read(topology, frozenset())).slots == {}
    for count in (4, 8):
        with started("serve", "m", "--port", port, "--max-num-seqs", str(count), script=named(tmp_path, "vllm")):
            assert (await source.read(topology, frozenset())).slots == {"e": count}


# discover


def hop_at(found: Discovery, port: int) -> Hop:
    return next(hop for hop in found.hops if any(endpoint.port == port for endpoint in hop.listen))


def engine_at(found: Discovery, port: int) -> Engine:
    return next(engine for engine in found.engines if engine.endpoints == (Endpoint(None, port),))


def test_discover_finds_an_engine_and_a_chain_of_proxies(tmp_path: Path) -> None:
    """A vLLM server and two proxies: names, addresses, who forwards to whom, outermost first, and sentences."""
    arguments = ("serve", "m", "--port", str(free_port()), "--max-num-seqs", "4")
    with (
        started(*arguments, script=named(tmp_path, "vllm")) as engine,
        started(script=named(tmp_path, "litellm")) as inner,
        started(script=named(tmp_path, "litellm")) as outer,
    ):
        inner.connect(engine.port)
        outer.connect(inner.port)
        found = discover()
    e = engine_at(found, engine.port)
    assert e == Engine(f"vllm-{engine.port}", f"http://127.0.0.1:{engine.port}", (Endpoint(None, engine.port),))
    first, second = hop_at(found, outer.port), hop_at(found, inner.port)
    assert second == Hop(f"litellm-{inner.port}", (Endpoint(None, inner.port),), (e.name,))
    assert first.to == (second.name,)
    assert found.hops.index(first) < found.hops.index(second)
    said = "\n".join(found.sentences)
    assert f"vLLM server (pid {engine.pid}) at http://127.0.0.1:{engine.port}: 4 slots" in said
    assert f"litellm (pid {inner.pid}) listens on :{inner.port} and is connected to {e.name}" in said


def test_a_proxy_without_traffic_may_forward_to_every_engine(tmp_path: Path) -> None:
    """No connection tells where it forwards to, so every engine is taken, and that is said."""
    with (
        started("serve", "m", "--port", str(free_port()), script=named(tmp_path, "vllm")) as engine,
        started(script=named(tmp_path, "litellm")) as proxy,
    ):
        found = discover()
    assert engine_at(found, engine.port).name in hop_at(found, proxy.port).to
    assert any(f"(pid {proxy.pid})" in line and "holds no connection" in line for line in found.sentences)


def test_a_server_that_does_not_listen_yet_is_left_out(tmp_path: Path) -> None:
    """A vLLM that is still loading its model is named, with its port, and not watched."""
    script = tmp_path / "vllm"
    script.write_text("import os, signal\nprint(0, os.getpid(), flush=True)\nsignal.pause()\n")
    port = free_port()
    with started("serve", "m", "--port", str(port), script=script) as server:
        found = discover()
    assert (
        f"a vLLM server (pid {server.pid}) does not listen on its port {port} yet, so it is left out" in found.sentences
    )
    assert all(engine.endpoints != (Endpoint(None, port),) for engine in found.engines)


def test_a_port_from_elsewhere_than_the_command_line_is_found(tmp_path: Path) -> None:
    """`--config` may hold the port: a server with one listening port listens there."""
    with started("serve", "m", "--config", "x.yaml", script=named(tmp_path, "vllm")) as engine:
        assert engine_at(discover(), engine.port).url == f"http://127.0.0.1:{engine.port}"


def test_tls_is_seen_on_the_command_line(tmp_path: Path) -> None:
    """A server with a certificate is asked over https."""
    with started("serve", "m", "--ssl-certfile", "c.pem", script=named(tmp_path, "vllm")) as engine:
        assert engine_at(discover(), engine.port).url == f"https://127.0.0.1:{engine.port}"


@needs_root
def test_discover_without_permission_says_what_it_lacks(tmp_path: Path) -> None:
    """The engine is found by its command line; the proxy's ports are hidden, and the cure is named."""
    with (
        started("serve", "m", "--port", str(free_port()), script=named(tmp_path, "vllm")) as engine,
        started(script=named(tmp_path, "litellm")) as proxy,
        nobody(),
    ):
        found = discover()
    assert engine_at(found, engine.port).url == f"http://127.0.0.1:{engine.port}"
    assert f"litellm (pid {proxy.pid}) may not be looked into, so it is left out" in found.sentences
    assert any("CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH" in sentence for sentence in found.sentences)


# Real proxies

NGINX = """
daemon off; worker_processes 2; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u;
  scgi_temp_path {dir}/s;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
listen edge
  bind 127.0.0.1:{port}
  server engine 127.0.0.1:{upstream}
"""
#: Configuration, arguments, the signal that reloads, and how many processes there are at rest.
PROXIES = {
    "nginx": (NGINX, ("-p", "{dir}", "-c", "{config}"), signal.SIGHUP, 3),
    "haproxy": (HAPROXY, ("-W", "-f", "{config}"), signal.SIGUSR2, 2),
}


@contextmanager
def proxy(name: str, directory: Path, upstream: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    assert program, f"{name} is missing: apt-get install {name}"
    text, arguments, _, _ = PROXIES[name]
    port, config = free_port(), directory / "proxy.conf"
    config.write_text(text.format(dir=directory, port=port, upstream=upstream))
    words = [word.format(dir=directory, config=config) for word in arguments]
    process = subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)
    try:
        yield port, process
    finally:
        process.terminate()  # both then end at once, and reap their workers
        process.wait(10)


def within_five_seconds(attempt: Callable[[], T | None], what: str) -> T:
    """Poll until there is a result."""
    for _ in range(100):
        result = attempt()
        if result is not None:
            return result
        threading.Event().wait(0.05)
    raise AssertionError(what)


def connected(port: int) -> socket.socket | None:
    with suppress(ConnectionRefusedError):
        return socket.create_connection(("127.0.0.1", port))
    return None


def inode_at(accept: Callable[[Row], bool]) -> int:
    """Return the inode of the one open socket that fits, once there is one."""

    def find() -> int | None:
        return next((row.inode for row in rows_in(ESTABLISHED) if accept(row) and row.inode), None)

    return within_five_seconds(find, "no such socket")


@pytest.mark.e2e
@pytest.mark.parametrize("name", PROXIES)
async def test_master_and_workers_are_one_hop_also_while_they_reload(name: str, tmp_path: Path) -> None:
    """Both sockets of a request in flight are the proxy's, before and after a reload leaves them to an old worker."""
    with (
        started() as engine,
        proxy(name, tmp_path, engine.port) as (port, process),
        within_five_seconds(lambda: connected(port), f"{name} does not listen") as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        engine.tell("accept")
        ours = client.getsockname()[1]
        downstream = inode_at(lambda row: row.port == port and row.remote_port == ours)
        upstream = inode_at(lambda row: row.remote_port == engine.port)
        expected = {downstream: "edge", upstream: "edge", inode_of(client): ""}
        topology = behind(("edge", port), engine=engine.port)
        assert await owners(topology, *expected) == expected
        assert hop_at(discover(), port).listen == (Endpoint(None, port),)

        _, _, reload, count = PROXIES[name]
        before = host.Tree().descendants([process.pid])
        assert len(before) == count
        process.send_signal(reload)

        def reloaded() -> bool | None:
            now = host.Tree().descendants([process.pid])
            return True if len(now - before) == count - 1 and len(now & before) > 1 else None

        within_five_seconds(reloaded, f"{name} did not start new workers beside an old one")
        assert await owners(topology, *expected) == expected
