"""Sockets of other network namespaces, real ones: which are found, that none are mixed up, and how they end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import netns
import tokengap
from netns import Host, Space
from tokengap.errors import SourceUnusable
from tokengap.lab.matrix import unprivileged
from tokengap.lab.parts import free_port
from tokengap.readings import ESTABLISHED, UNKNOWN, SocketSnapshot, as_ipv6
from tokengap.sources import elsewhere
from tokengap.sources.elsewhere import Elsewhere, Place
from tokengap.sources.namespaces import addresses_in, find, why_not_enter
from tokengap.sources.processes import Processes
from tokengap.sources.sock_diag import Dumper
from tokengap.sources.sockets import Sockets
from tokengap.topology import Endpoint, Engine, Hop, Topology

PORT = free_port()  # and not one that somebody uses in a namespace that `all` finds
PORTS = frozenset({PORT})


@pytest.fixture
def host() -> Iterator[Host]:
    with netns.host() as made:
        yield made


@contextlib.contextmanager
def reading(*wanted: object, **how: object) -> Iterator[Callable[[], SocketSnapshot]]:
    """A source that looks for namespaces in every beat, as a function that takes a snapshot."""
    with contextlib.closing(Sockets(netns=tuple(map(str, wanted)), look_every=0.0, **how)) as source:
        yield lambda: source.snapshot(PORTS, PORTS)


@contextlib.contextmanager
def pairs(
    space: Space, port: int, sources: tuple[int, ...] = ()
) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connections inside a namespace, from these ports of its loopback: the client's end and the server's."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(space.listen(port))
        made = []
        for source in sources:
            client = opened.enter_context(space.connect(port, source=("127.0.0.1", source)))
            made.append((client, opened.enter_context(server.accept()[0])))
        yield made


@contextlib.contextmanager
def process(space: Space, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process inside a namespace that has said something, and so is inside."""
    command = space.command(sys.executable, "-c", "print(1, flush=True); import signal; signal.pause()", *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "1\n"
            yield running
        finally:
            running.kill()


def until(read: Callable[[], SocketSnapshot], true: Callable[[SocketSnapshot], object]) -> SocketSnapshot:
    give_up = time.monotonic() + 5
    while not true(snapshot := read()):
        assert time.monotonic() < give_up, snapshot
        time.sleep(0.01)
    return snapshot


# --- which there are ------------------------------------------------------------------------------------------------


def test_a_namespace_is_found_by_process_and_by_path_and_once(host: Host) -> None:
    """Both name the same one; our own is none of the others; all has it too, and names without a process in them."""
    first, second = host.space(), host.space()
    with process(first) as inside:
        found, problems = find([str(inside.pid), first.path, str(os.getpid()), "/proc/self/ns/net", second.path])
        assert problems == []
        assert [(one.name, one.pid, one.asked) for one in found] == [
            (f"pid {inside.pid}", inside.pid, True),
            (second.path, None, True),
        ]
        everything = {one.key: one for one in find(["all"])[0]}
        assert {one.key for one in found} <= everything.keys()
        assert everything[found[0].key].pid == inside.pid
        assert not everything[found[0].key].asked
    assert not found[0].is_there()
    assert found[1].is_there()


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("999999999", "pid 999999999: no such process"),
        ("/run/netns/no-such", "/run/netns/no-such: no such file, or not for us"),
        ("/etc/passwd", "/etc/passwd: not a network namespace"),
        ("/proc/self/ns/mnt", "/proc/self/ns/mnt: not a network namespace"),
    ],
)
def test_what_is_no_namespace_is_said(wanted: str, says: str) -> None:
    """Each with its reason, and our own sockets are read all the same."""
    with reading(wanted) as read:
        snapshot = read()
    assert snapshot.unread == (says,)
    assert [one.number for one in snapshot.namespaces] == [0]


def test_addresses_are_those_of_the_namespace(host: Host) -> None:
    """Of both families, without loopback; as a process in there shows them, and as they are from inside."""
    space = host.space()
    space.ip("addr", "add", "2001:db8::7/64", "dev", "eth0", "nodad")
    with process(space) as inside:
        shown = addresses_in(Path(f"/proc/{inside.pid}/net"))
    assert shown >= {space.address, "2001:db8::7"}
    assert not shown & {"127.0.0.1", "::1"}
    with reading(space.path) as read:
        own, other = read().namespaces
    assert {as_ipv6(space.address), as_ipv6("2001:db8::7")} <= other.addresses
    assert as_ipv6(host.address) in own.addresses


# --- sockets --------------------------------------------------------------------------------------------------------


def test_equal_connections_of_two_namespaces_are_told_apart(host: Host) -> None:
    """The very same addresses and ports in two namespaces and in our own: each with its bytes, its number, its cookie,
    and its end."""
    spaces = [host.space(address=False), host.space(address=False)]
    with contextlib.ExitStack() as opened:
        ends = [opened.enter_context(pairs(space, PORT, (20001,)))[0] for space in spaces]
        read = opened.enter_context(reading(*(space.path for space in spaces)))
        for number, (client, served) in enumerate(ends, 1):
            client.sendall(b"q" * number)
            served.recv(10)
        snapshot = until(read, lambda s: sorted(s.open["bytes_received"]) == [0, 0, 1, 2])
        assert (snapshot.way, snapshot.events, snapshot.unread) == ("sock_diag", True, ())
        assert len(set(snapshot.open["cookie"])) == 4
        assert set(zip(snapshot.open["sport"], snapshot.open["dport"], strict=True)) == {(PORT, 20001), (20001, PORT)}
        served = snapshot.open[snapshot.open["sport"] == PORT]
        assert {(int(row["netns"]), int(row["bytes_received"])) for row in served} == {(1, 1), (2, 2)}

        before = {int(row["cookie"]) for row in snapshot.open if row["netns"] == 2}
        for end in ends[1]:
            end.close()
        closed: set[int] = set()
        snapshot = until(read, lambda s: closed.update(map(int, s.closed["cookie"])) or closed >= before)
        assert closed == before
        assert set(snapshot.open["netns"]) == {1}


def test_the_filter_in_the_kernel_is_that_of_each_namespace(host: Host) -> None:
    """Other ports of a namespace are left out."""
    space = host.space()
    with pairs(space, PORT + 1, (20001,)), pairs(space, PORT, (20002,)), reading(space.path) as read:
        assert sorted(read().open["sport"]) == sorted([PORT, 20002])


def test_all_reads_where_somebody_listens_and_finds_what_comes_later(host: Host) -> None:
    """A namespace without a listener of a watched port is not read; one that gets it, or is made later, is."""
    first = host.space()
    with reading("all") as read:
        watched = {one.number for one in read().namespaces}
        with pairs(first, PORT, (20001,)):
            (number,) = {one.number for one in read().namespaces} - watched
            assert sorted(read().open["sport"]) == sorted([PORT, 20001])
            later = host.space()
            with pairs(later, PORT, (20001,)):
                assert sorted(read().open["sport"]) == sorted([PORT, PORT, 20001, 20001])
                assert len({one.number for one in read().namespaces} - watched - {number}) == 1


def test_a_namespace_that_ends_ends_quietly(host: Host) -> None:
    """Its sockets are told as closed or are just gone, nothing failed, and the kernel gets it back."""
    space = host.space()
    with reading("all") as read:
        with pairs(space, PORT, (20001,)):
            assert len(read().open) == 2
        host.remove(space)
        snapshot = read()
        assert (len(snapshot.open), snapshot.unread) == (0, ())
        assert set(snapshot.closed["netns"]) <= {1}
        assert len(read().closed) == 0
        # Its end of the bridge goes when nobody holds it any more: no socket of ours.
        until(read, lambda _: space.outside not in [name for _, name in socket.if_nameindex()])
    found, _ = find(["all"])
    assert space.path not in [one.name for one in found]


def test_a_process_that_ends_takes_its_namespace_along_or_another_stands_for_it(host: Host) -> None:
    """By pid: named and not there any more, it is said. By all: another process of the same namespace will do."""
    space = host.space()
    with (
        pairs(space, PORT, (20001,)),
        process(space) as first,
        process(space),
        reading(first.pid) as by_pid,
        reading("all") as by_all,
    ):
        cookies = set(by_all().open["cookie"])
        assert len(by_pid().open) == len(cookies) == 2
        first.kill()
        first.wait()
        assert set(by_all().open["cookie"]) == cookies
        snapshot = by_pid()
        assert len(snapshot.open) == 0
        assert snapshot.unread == (f"pid {first.pid}: no such process",)


def test_a_namespace_that_fails_stands_as_it_was(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for closed, its sockets would look like users who left: they stay, older, and it is said; then all is well
    again. The others are read meanwhile."""
    good, bad = host.space(), host.space()
    with (
        pairs(good, PORT, (20001,)),
        pairs(bad, PORT, (20001,)) as ((client, served),),
        reading(good.path, bad.path) as read,
    ):
        before = read()
        (number,) = {one.number for one in before.namespaces} - {0, 1}
        snapshot_of = Dumper.dump
        dumps = 0

        def dump(dumper: Dumper, *arguments: object) -> object:
            nonlocal dumps
            dumps += 1
            if dumps % 3 == 0:  # our own, the good one, the bad one
                raise SourceUnusable("a bad moment")
            return snapshot_of(dumper, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Dumper, "dump", dump)
            client.sendall(b"q" * 100)
            served.recv(100)
            time.sleep(0.02)  # an age that has to grow
            failed = read()
            assert failed.unread == (f"{bad.path}: a bad moment",)
            assert {one.number for one in failed.namespaces if one.stale} == {number}
            old = np.sort(before.open[before.open["netns"] == number], order="cookie")
            new = np.sort(failed.open[failed.open["netns"] == number], order="cookie")
            assert (new["bytes_received"] == old["bytes_received"]).all()
            assert (new["last_ack_recv"] >= old["last_ack_recv"] + 10).all()
            assert len(failed.open) == len(before.open)
        after = read()
        assert after.unread == ()
        assert not any(one.stale for one in after.namespaces)
        assert max(after.open["bytes_received"]) == 100


def test_lost_events_of_a_namespace_that_ended_stay_counted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count never falls."""
    monkeypatch.setattr("tokengap.sources.sock_diag._EVENTS_BACKLOG", 4096)
    space = host.space()
    with reading("all") as read:
        with pairs(space, PORT, tuple(range(20001, 20041))):
            assert len(read().open) == 80
        assert until(read, lambda s: s.lost).lost == 1
        host.remove(space)
        assert read().lost == 1


def test_numbers_are_used_in_turn(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a namespace that ended is not the next one's; those in use are passed over when all had a turn."""
    monkeypatch.setattr(elsewhere, "_MOST_NAMESPACES", 2)
    first, second = host.space(), host.space()
    with pairs(first, PORT):
        with reading("all") as read, pairs(second, PORT):
            assert [one.number for one in read().namespaces] == [0, 1, 2]
        third = host.space()
        with reading(first.path, second.path) as read:
            read()
    host.remove(second)
    with reading(first.path, third.path) as read:
        assert [one.number for one in read().namespaces] == [0, 1, 2]


def test_without_events_the_others_have_none(host: Host) -> None:
    """Switched off they are off everywhere, and the snapshot says so."""
    space = host.space()
    with pairs(space, PORT, (20001,)), reading(space.path, events=False) as read:
        snapshot = read()
        assert (snapshot.way, snapshot.events, len(snapshot.open)) == ("sock_diag", False, 2)


# --- without privilege ----------------------------------------------------------------------------------------------

NEEDS = "entering other network namespaces needs CAP_SYS_ADMIN"
UNPRIVILEGED = """
import sys
from tokengap.sources.sockets import Sockets
source, port = Sockets(netns=sys.argv[2:]), int(sys.argv[1])
snapshot = source.snapshot(frozenset({port}), frozenset({port}))
print(source.limits())
print(source.describe())
print(snapshot.way, snapshot.events, sorted(map(int, snapshot.open["netns"])), sorted(map(int, snapshot.open["sport"])))
print(sorted(set(map(int, snapshot.open["bytes_acked"]))), snapshot.unread)
"""


def without_privilege(*wanted: object) -> list[str]:
    """Run the source without any capability, as nobody where that user may read the checkout; return what it prints."""
    package = Path(tokengap.__file__).parents[1]
    ran = subprocess.run(
        [*unprivileged(), sys.executable, "-c", UNPRIVILEGED, str(PORT), *map(str, wanted)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(package)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("everything", [False, True], ids=["PID", "all"])
def test_without_privilege_states_are_read_and_one_line_says_so(host: Host, everything: bool) -> None:
    """No setns, and the links of other users' processes are closed: their tables in /proc are open, without bytes."""
    space = host.space()
    with pairs(space, PORT, (20001,)), process(space) as inside:
        said = without_privilege("all" if everything else inside.pid)
    assert said == [
        f"netns: {NEEDS}; states and queues of their sockets are read from /proc/PID/net, no bytes",
        "sock_diag, destroy events on",
        f"proc False [1, 1] {sorted((PORT, 20001))}",
        f"[{UNKNOWN}] ()",
    ]


def test_a_path_that_no_process_shows_cannot_be_read_without_privilege(host: Host) -> None:
    """It is said why, and our own namespace is read."""
    space = host.space()
    said = without_privilege(space.path)
    assert said[2:] == [
        "sock_diag True [] []",
        f"[] ('{space.path}: {NEEDS}',)",
    ]


def test_with_privilege_nothing_is_limited(host: Host) -> None:
    """Nor is anything said where no other namespace is asked for."""
    assert why_not_enter() == ""
    for wanted in ((), ("all",)):
        with contextlib.closing(Sockets(netns=wanted)) as source:
            assert source.limits() == ""


def test_a_reader_without_a_process_to_show_tables_says_so(host: Host) -> None:
    """The fallback reads through a process of the namespace; when the last one has ended there is nothing to read."""
    space = host.space()
    place = Place(find([space.path])[0][0])
    with pytest.raises(SourceUnusable, match="no process is in it"):
        _ = place.net


def test_a_namespace_that_no_reader_can_read_is_said_and_tried_again(host: Host) -> None:
    """In each look; the reader that comes at last is used."""
    space = host.space()
    tries = 0

    class Still:
        way = "sock_diag"

        def snapshot(self, _: object) -> SocketSnapshot:
            return SocketSnapshot(np.zeros(1, dtype=SocketSnapshot(None).closed.dtype))

        def close(self) -> None:
            pass

    def make(_: Place) -> Still:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise SourceUnusable("not now")
        return Still()

    source = Elsewhere((space.path,), make, every=0.0)
    own = SocketSnapshot(np.zeros(0, dtype=SocketSnapshot(None).closed.dtype))
    ports = elsewhere.Ports(PORTS, PORTS)
    assert source.add(own, ports).unread == (f"{space.path}: not now",)
    assert (source.add(own, ports).unread, tries) == ((), 2)
    source.close()


# --- processes ------------------------------------------------------------------------------------------------------

SERVER = """
import os, socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[sys.argv.index("--port") + 1])))
print(1, flush=True)
sys.stdin.readline()
accepted = server.accept()[0]
print(os.fstat(accepted.fileno()).st_ino, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def server(space: Space, script: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    script.write_text(SERVER)
    command = space.command(sys.executable, script, *words)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "1\n"
            yield running
        finally:
            running.kill()


async def test_owners_slots_and_families_are_found_in_other_namespaces(host: Host, tmp_path: Path) -> None:
    """Two engines on the same port of different namespaces are told apart by their addresses."""
    edge, *engines = host.space(), host.space(), host.space()
    with contextlib.ExitStack() as opened:
        proxy = opened.enter_context(server(edge, tmp_path / "proxy", "--port", str(PORT)))
        served = [
            opened.enter_context(
                server(space, tmp_path / "vllm", "serve", "m", "--port", "8000", "--max-num-seqs", str(slots))
            )
            for slots, space in enumerate(engines, 3)
        ]
        client = opened.enter_context(edge.connect(PORT))
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        proxy.stdin.write("\n")
        proxy.stdin.flush()
        inode = int(proxy.stdout.readline())
        topology = Topology(
            tuple(
                Engine(f"e{i}", f"http://{space.address}:8000", (Endpoint(space.address, 8000),))
                for i, space in enumerate(engines)
            ),
            (Hop("edge", (Endpoint(None, PORT),), ("e0", "e1")),),
        )
        asked = frozenset({inode, os.fstat(client.fileno()).st_ino})
        table = await Processes(netns=("all",)).read(topology, asked)
        assert {inode: table.owners[inode] for inode in asked} == {inode: "edge", max(asked - {inode}): ""}
        assert table.slots == {"e0": 3, "e1": 4}
        assert {name: served[int(name[1])].pid in pids for name, pids in table.families.items()} == {
            "e0": True,
            "e1": True,
        }
        assert not table.families["e0"] & table.families["e1"]

        alone = await Processes().read(topology, asked)
        assert (alone.slots, alone.families) == ({}, {})


async def test_a_port_alone_is_our_own_engine_first(host: Host, tmp_path: Path) -> None:
    """An engine that is named by its port is the one here; only without one here it is another namespace's."""
    space = host.space()
    engine = Engine("e", "http://127.0.0.1:8000", (Endpoint(None, 8000),))
    with server(space, tmp_path / "vllm", "serve", "m", "--port", "8000", "--max-num-seqs", "7"):
        assert (await Processes(netns=(space.path,)).read(Topology((engine,)), frozenset())).slots == {"e": 7}
        claims = Engine("f", f"http://{space.address}:8000", (Endpoint(space.address, 8000),))
        table = await Processes(netns=(space.path,)).read(Topology((engine, claims)), frozenset())
        assert table.slots == {"f": 7}


def test_established_is_what_a_row_says(host: Host) -> None:
    """The state of a socket in another namespace, by both ways of reading."""
    space = host.space()
    with pairs(space, PORT, (20001,)), process(space) as inside, reading(inside.pid) as read:
        assert set(read().open["state"]) == {ESTABLISHED}
