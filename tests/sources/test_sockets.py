"""The sockets source on real loopback sockets; the kernel's other answers about the same sockets are the oracle."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import tokengap
from tokengap.errors import SourceRefused, SourceUnusable
from tokengap.lab.parts import free_port
from tokengap.readings import (
    CLOSE,
    CLOSE_WAIT,
    ESTABLISHED,
    FIN_WAIT1,
    TIMER_PROBE,
    UNKNOWN,
    SocketSnapshot,
    SocketTable,
)
from tokengap.sources import sock_diag
from tokengap.sources.sock_diag import DestroyEvents, Dumper, Link, Ports
from tokengap.sources.sockets import Sockets, probe
from tokengap.topology import Endpoint, Engine, Hop, Topology

LOCALHOST_V4 = 0xFFFF_7F00_0001
NONE: frozenset[int] = frozenset()
SO_COOKIE = 57  # asm-generic/socket.h
FAMILIES = {
    "v4": (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
    "v6": (socket.AF_INET6, "::1", "::1"),
    "v4-mapped": (socket.AF_INET6, "::", "127.0.0.1"),
}


@dataclass
class Pair:
    """A connection: the client's socket and the one that the listening side accepted."""

    client: socket.socket
    served: socket.socket
    port: int

    def close(self) -> None:
        self.client.close()
        self.served.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as opened:

        def pair(kind: str = "v4", server: socket.socket | None = None) -> Pair:
            family, bind, host = FAMILIES[kind]
            if server is None:
                server = socket.create_server((bind, free_port()), family=family, dualstack_ipv6=bind == "::")
                opened.enter_context(server)
            client = opened.enter_context(socket.create_connection((host, server.getsockname()[1])))
            served = opened.enter_context(server.accept()[0])
            return Pair(client, served, server.getsockname()[1])

        yield pair


@pytest.fixture
def source() -> Iterator[Sockets]:
    source = Sockets()
    yield source
    source.close()


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data))
    return data


def until(read: Callable[[], SocketSnapshot], true: Callable[[SocketSnapshot], object]) -> SocketSnapshot:
    """Take snapshots until one is as wanted, five seconds at most."""
    give_up = time.monotonic() + 5
    while True:
        snapshot = read()
        if true(snapshot):
            return snapshot
        assert time.monotonic() < give_up, snapshot
        time.sleep(0.01)


def both(pair: Pair) -> tuple[frozenset[int], frozenset[int]]:
    return frozenset({pair.port}), frozenset({pair.port})


def row_of(table: SocketTable, sock: socket.socket) -> np.void:
    """Return the one row of this socket, found by the kernel's cookie."""
    (cookie,) = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
    (row,) = table[table["cookie"] == cookie]
    return row


def stuff(sock: socket.socket) -> int:
    """Write until neither our nor the peer's kernel takes any more."""
    sock.setblocking(False)
    written = 0
    try:
        while True:
            written += sock.send(bytes(65536))
    except BlockingIOError:
        return written


# --- open sockets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_counters_are_what_was_sent_and_what_getsockopt_says(
    kind: str, connect: Callable[..., Pair], source: Sockets
) -> None:
    """Both ends of a connection, of each family, are found by cookie with inode, addresses and exact counters."""
    pair = connect(kind)
    pair.client.sendall(b"q" * 300)
    receive(pair.served, 300)
    pair.served.sendall(b"a" * 5000)
    receive(pair.client, 5000)

    snapshot = until(lambda: source.snapshot(*both(pair)), lambda s: row_of(s.open, pair.served)["bytes_acked"] == 5000)

    assert snapshot.way == "sock_diag"
    assert len(snapshot.open) == 2
    served, client = row_of(snapshot.open, pair.served), row_of(snapshot.open, pair.client)
    assert (served["sport"], client["dport"]) == (pair.port, pair.port)
    assert served["dport"] == client["sport"] == pair.client.getsockname()[1]
    address = 1 if kind == "v6" else LOCALHOST_V4
    for row, sock in ((served, pair.served), (client, pair.client)):
        assert (row["src_hi"], row["src_lo"], row["dst_hi"], row["dst_lo"]) == (0, address, 0, address)
        assert row["inode"] == os.fstat(sock.fileno()).st_ino
        assert row["state"] == ESTABLISHED
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
        for name, offset, code in (
            *(("rto_us", 8, "I"), ("unacked", 24, "I"), ("notsent", 144, "I"), ("rwnd_limited_us", 176, "Q")),
            *(("bytes_acked", 120, "Q"), ("bytes_received", 128, "Q"), ("bytes_sent", 200, "Q")),
        ):
            assert row[name] == struct.unpack_from(f"={code}", info, offset)[0], name
        for name in ("last_data_sent", "last_data_recv", "last_ack_recv"):
            assert 0 <= row[name] < 5000
        assert (row["rqueue"], row["wqueue"], row["retransmits"], row["backoff"]) == (0, 0, 0, 0)
    assert (served["bytes_received"], served["bytes_sent"], served["bytes_acked"]) == (300, 5000, 5000)
    assert (client["bytes_received"], client["bytes_sent"], client["bytes_acked"]) == (5000, 300, 301)


def test_only_watched_ports_are_returned(connect: Callable[..., Pair], source: Sockets) -> None:
    """Listened ports match the local side, targets the remote side; a listening socket itself is no stream."""
    first, second, third = connect(), connect("v6"), connect()
    listened = source.snapshot(frozenset({first.port, second.port}), NONE).open
    assert sorted(listened["sport"]) == sorted([first.port, second.port])
    targets = source.snapshot(NONE, frozenset({third.port, second.port})).open
    assert sorted(targets["dport"]) == sorted([third.port, second.port])
    assert len(source.snapshot(frozenset({first.port}), frozenset({third.port})).open) == 2
    assert len(source.snapshot(NONE, NONE).open) == 0


@pytest.mark.parametrize("equal", [True, False], ids=["S_EQ", "S_GE+S_LE"])
def test_the_kernel_runs_both_dialects_of_the_filter(equal: bool, connect: Callable[..., Pair]) -> None:
    """What leaves the kernel are the watched sockets alone, in the new and in the old way of asking for them."""
    pairs = [connect("v6") for _ in range(3)]
    ports = Ports(frozenset({pairs[0].port, pairs[1].port, 1}), frozenset({pairs[1].port, 2}))
    inbox = bytearray(1 << 20)
    with sock_diag.open_link() as link:
        link.send(sock_diag.dump_request(socket.AF_INET6, sock_diag.dump_program(ports, equal=equal)))
        size = link.recv_into(inbox)
    table = sock_diag.decode(memoryview(inbox)[:size])
    assert sorted(table["sport"][table["sport"] != pairs[1].client.getsockname()[1]]) == sorted(
        [pairs[0].port, pairs[1].port]
    )
    assert len(table) == 3


def test_more_ports_than_the_kernel_filters_work_too(connect: Callable[..., Pair], source: Sockets) -> None:
    """Hundreds of ports are picked from the whole table, with and without a filter in the kernel."""
    pair = connect()
    other = connect()
    for many in (sock_diag.MAX_FILTERED_PORTS - 1, sock_diag.MAX_FILTERED_PORTS, 3000):
        unused = [port for port in range(1, 10_000) if port not in (pair.port, other.port)][:many]
        rows = source.snapshot(frozenset({pair.port, *unused}), NONE).open
        assert pair.port in rows["sport"]
        assert other.port not in rows["sport"]


def test_a_client_that_closed_its_side_is_close_wait(connect: Callable[..., Pair], source: Sockets) -> None:
    """After FIN the served socket stays, in CLOSE-WAIT, its FIN counted in rqueue until it is read."""
    pair = connect()
    pair.client.sendall(b"q")
    receive(pair.served, 1)
    pair.client.shutdown(socket.SHUT_WR)
    snapshot = until(lambda: source.snapshot(*both(pair)), lambda s: (s.open["state"] == CLOSE_WAIT).any())
    row = row_of(snapshot.open, pair.served)
    assert (row["bytes_received"], row["rqueue"]) == (2, 1)
    pair.served.sendall(b"still delivered")
    until(lambda: source.snapshot(*both(pair)), lambda s: row_of(s.open, pair.served)["bytes_acked"] == 15)


def test_unread_data_is_queued_at_both_ends(connect: Callable[..., Pair], source: Sockets) -> None:
    """What the client has not read is in its rqueue; what does not fit there waits in wqueue, partly not sent."""
    pair = connect()
    written = stuff(pair.served)
    snapshot = until(
        lambda: source.snapshot(*both(pair)),
        lambda s: (
            row_of(s.open, pair.served)["timer"] == TIMER_PROBE and row_of(s.open, pair.served)["rwnd_limited_us"] > 0
        ),
    )
    served, client = row_of(snapshot.open, pair.served), row_of(snapshot.open, pair.client)
    assert served["bytes_acked"] + served["wqueue"] == written
    assert client["rqueue"] == client["bytes_received"] == served["bytes_acked"]
    assert 0 < served["notsent"] <= served["wqueue"]


def test_a_socket_closed_with_data_unsent_stays_as_fin_wait1(connect: Callable[..., Pair], source: Sockets) -> None:
    """The process is gone from it (inode 0), the kernel still delivers."""
    pair = connect()
    stuff(pair.served)
    pair.served.close()
    snapshot = source.snapshot(*both(pair))
    (row,) = snapshot.open[snapshot.open["sport"] == pair.port]
    assert (row["state"], row["inode"]) == (FIN_WAIT1, 0)
    assert row["wqueue"] > 0


# --- sockets that ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_closed_sockets_are_told_once_with_exact_counters(
    kind: str, connect: Callable[..., Pair], source: Sockets
) -> None:
    """Bytes that move between the last snapshot and the close are in the closed row, whose cookie is never open."""
    pair = connect(kind)
    before = source.snapshot(*both(pair))
    served = row_of(before.open, pair.served)["cookie"]
    client = row_of(before.open, pair.client)["cookie"]
    pair.client.sendall(b"q" * 123)
    receive(pair.served, 123)
    pair.served.sendall(b"a" * 45_678)
    receive(pair.client, 45_678)
    pair.close()

    closed: list[np.void] = []

    def read() -> SocketSnapshot:
        snapshot = source.snapshot(*both(pair))
        closed.extend(snapshot.closed)
        assert not set(snapshot.open["cookie"]) & {row["cookie"] for row in closed}
        return snapshot

    until(read, lambda _: len(closed) >= 2)
    snapshot = read()
    assert snapshot.events
    assert (len(snapshot.open), len(snapshot.closed), snapshot.lost) == (0, 0, 0)
    final = {row["cookie"]: row for row in closed}
    assert final.keys() == {served, client}
    assert len(closed) == 2
    assert (final[served]["bytes_sent"], final[served]["bytes_received"] - 123) in ((45_678, 0), (45_678, 1))
    # Its own FIN counts as acknowledged, on the client its SYN too.
    assert final[served]["bytes_acked"] - 45_678 in (0, 1)
    assert (final[client]["bytes_sent"], final[client]["bytes_received"]) == (123, 45_679)
    assert final[client]["bytes_acked"] - 123 in (1, 2)
    assert {int(row["state"]) for row in closed} == {CLOSE}


def test_a_reset_leaves_no_row_and_an_event(connect: Callable[..., Pair], source: Sockets) -> None:
    """After RST the proxy may hold the descriptor, but the row is gone; its counters are told once it is closed."""
    pair = connect()
    pair.served.sendall(b"a" * 1000)
    until(lambda: source.snapshot(*both(pair)), lambda s: row_of(s.open, pair.client)["bytes_received"] == 1000)
    cookie = row_of(source.snapshot(*both(pair)).open, pair.served)["cookie"]
    pair.client.close()  # with data unread: this sends RST, not FIN
    until(lambda: source.snapshot(*both(pair)), lambda s: not len(s.open))
    assert pair.served.fileno() >= 0
    pair.served.close()
    snapshot = until(lambda: source.snapshot(*both(pair)), lambda s: cookie in s.closed["cookie"])
    (row,) = snapshot.closed[snapshot.closed["cookie"] == cookie]  # the client's end may be told as late
    assert row["bytes_acked"] == 1000


def test_a_socket_wiped_by_its_owner_tells_nothing(connect: Callable[..., Pair], source: Sockets) -> None:
    """SO_LINGER 0 clears a socket's counters before it is freed: no row with zeros for it, only the peer's."""
    pair = connect()
    pair.served.sendall(b"a" * 1000)
    receive(pair.client, 1000)
    cookies = {
        end: int(row_of(source.snapshot(*both(pair)).open, getattr(pair, end))["cookie"])
        for end in ("client", "served")
    }
    pair.served.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pair.served.close()
    with contextlib.suppress(ConnectionResetError):
        pair.client.recv(1)
    pair.client.close()
    closed: list[np.void] = []

    def read() -> SocketSnapshot:
        snapshot = source.snapshot(*both(pair))
        closed.extend(snapshot.closed)
        return snapshot

    until(read, lambda s: closed and not len(s.open))
    assert [(int(row["cookie"]), int(row["bytes_received"])) for row in closed] == [(cookies["client"], 1000)]


def test_a_socket_that_ends_between_dump_and_events_is_closed_only(
    connect: Callable[..., Pair], source: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump still has it, its event is there too: the event wins."""
    pair = connect()
    stays = connect()
    ports = frozenset({pair.port, stays.port})
    cookie = row_of(source.snapshot(ports, NONE).open, pair.served)["cookie"]
    dump = Dumper.dump
    observer = DestroyEvents.open()
    observer.watch(Ports(ports, NONE))

    def dump_then_close(dumper: Dumper, link: Link, ports: Ports) -> SocketTable:
        rows = dump(dumper, link, ports)
        pair.close()
        give_up = time.monotonic() + 5
        while not len(observer.drain(ports)):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        time.sleep(0.02)  # the kernel sends it to one subscriber after the other
        return rows

    monkeypatch.setattr(Dumper, "dump", dump_then_close)
    snapshot = source.snapshot(ports, NONE)
    observer.close()
    assert cookie in snapshot.closed["cookie"]
    assert cookie not in snapshot.open["cookie"]
    assert row_of(snapshot.open, stays.served)["state"] == ESTABLISHED


def test_without_events_nothing_is_closed(connect: Callable[..., Pair]) -> None:
    """Events can be left out; the snapshot says so, and a socket that ends just goes."""
    pair = connect()
    with contextlib.closing(Sockets(events=False)) as source:
        assert source.describe() == "sock_diag, destroy events off (not asked for)"
        assert len(source.snapshot(*both(pair)).open) == 2
        pair.close()
        snapshot = until(lambda: source.snapshot(*both(pair)), lambda s: not len(s.open))
        assert (snapshot.events, len(snapshot.closed)) == (False, 0)


def test_refused_events_leave_the_rest(connect: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gives the dump but not the events is used for the dump, and the reason is told."""

    def refuse() -> DestroyEvents:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(DestroyEvents, "open", refuse)
    pair = connect()
    with contextlib.closing(Sockets()) as source:
        assert source.describe() == "sock_diag, destroy events off (Operation not permitted)"
        snapshot = source.snapshot(*both(pair))
        assert (len(snapshot.open), snapshot.events) == (2, False)
    access = probe()
    assert (access.sock_diag, access.events, access.events_reason) == (True, False, "Operation not permitted")


def test_events_that_did_not_fit_are_counted(connect: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """When more sockets end than the kernel's queue holds, the overrun is counted, and later events come again."""
    monkeypatch.setattr(sock_diag, "_EVENTS_BACKLOG", 4096)
    with contextlib.closing(Sockets()) as source:
        server = socket.create_server(("127.0.0.1", free_port()))
        with server:
            pairs = [connect(server=server) for _ in range(40)]
            ports = both(pairs[0])
            assert len(source.snapshot(*ports).open) == 80
            for pair in pairs:
                pair.close()
            snapshot = until(lambda: source.snapshot(*ports), lambda s: s.lost)
            assert (snapshot.lost, len(snapshot.open)) == (1, 0)
            assert len(snapshot.closed) < 80
            pair = connect(server=server)
            source.snapshot(*ports)
            pair.close()
            snapshot = until(lambda: source.snapshot(*ports), lambda s: len(s.closed))
            assert snapshot.lost == 1


def test_events_of_other_ports_do_not_fill_the_queue(
    connect: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket filter keeps a busy host's other sockets out: many end, none is counted as lost."""
    monkeypatch.setattr(sock_diag, "_EVENTS_BACKLOG", 4096)
    watched = connect()
    with contextlib.closing(Sockets()) as source, socket.create_server(("127.0.0.1", free_port())) as server:
        source.snapshot(*both(watched))
        for pair in [connect(server=server) for _ in range(40)]:
            pair.close()
        watched.close()
        snapshot = until(lambda: source.snapshot(*both(watched)), lambda s: len(s.closed))
        assert snapshot.lost == 0


def test_ports_too_many_for_a_filter_still_give_events(connect: Callable[..., Pair], source: Sockets) -> None:
    """A program over the kernel's 4,096 instructions is done without; the rows are picked all the same."""
    pair, other = connect(), connect()
    ports = frozenset({pair.port, *range(1, 3000)} - {other.port})
    source.snapshot(ports, NONE)
    other.close()
    pair.close()
    snapshot = until(lambda: source.snapshot(ports, NONE), lambda s: len(s.closed))
    assert set(snapshot.closed["sport"]) == {pair.port}


# --- against others -------------------------------------------------------------------------------------------------


def test_ss_says_the_same(connect: Callable[..., Pair], source: Sockets) -> None:
    """iproute2's own decoder agrees on states, queues and counters of the same sockets."""
    if shutil.which("ss") is None:
        pytest.fail("ss is missing: apt-get install iproute2")
    pairs = [connect(kind) for kind in FAMILIES]
    ports = frozenset(pair.port for pair in pairs)
    for pair in pairs:
        pair.client.sendall(b"q" * 200)
        receive(pair.served, 200)
        pair.served.sendall(b"a" * 3000)
        receive(pair.client, 2500)
    pairs[0].client.shutdown(socket.SHUT_WR)
    snapshot = until(
        lambda: source.snapshot(ports, NONE),
        lambda s: (s.open["bytes_acked"] == 3000).all() and (s.open["state"] == CLOSE_WAIT).sum() == 1,
    )
    filters = " or ".join(f"sport = :{port}" for port in ports)
    lines = subprocess.run(["ss", "-tinHeO", filters], capture_output=True, text=True, check=True).stdout.splitlines()
    lines = [line for line in lines if not line.startswith("LISTEN")]
    assert len(lines) == len(snapshot.open) == 3
    states = {"ESTAB": ESTABLISHED, "CLOSE-WAIT": CLOSE_WAIT}
    for line in lines:
        state, rqueue, wqueue, local, remote = line.split()[:5]
        (row,) = snapshot.open[snapshot.open["cookie"] == int(re.search(r"sk:(\w+)", line)[1], 16)]
        assert (row["state"], row["rqueue"], row["wqueue"]) == (states[state], int(rqueue), int(wqueue))
        assert (row["sport"], row["dport"]) == (int(local.rpartition(":")[2]), int(remote.rpartition(":")[2]))
        assert row["inode"] == int(re.search(r"ino:(\d+)", line)[1])
        for name in ("bytes_sent", "bytes_acked", "bytes_received"):
            assert row[name] == int(re.search(rf"{name}:(\d+)", line)[1]), name


def test_nobody_without_capabilities_gets_everything(connect: Callable[..., Pair]) -> None:
    """No privilege is needed: not for the dump with tcp_info, not for the filter, not for the events."""
    if os.geteuid() != 0:
        pytest.skip("without root all tests here run without a privilege")
    pair = connect()
    pair.served.sendall(b"a" * 700)
    receive(pair.client, 700)
    code = """if True:
        import os, sys, time
        from tokengap.sources.sockets import Sockets
        os.setgroups([])  # only now: nobody may perhaps not read the checkout
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)  # and with root all capabilities go, capabilities(7)
        held = [line for line in open("/proc/self/status") if line.startswith(("CapPrm:", "CapEff:"))]
        assert [int(line.split()[1], 16) for line in held] == [0, 0]
        source, ports = Sockets(), frozenset({int(sys.argv[1])})
        row, = source.snapshot(ports, frozenset()).open
        print(source.describe(), "|", row["bytes_acked"], flush=True)
        sys.stdin.readline()
        give_up = time.monotonic() + 5
        while not len(closed := source.snapshot(ports, frozenset()).closed) and time.monotonic() < give_up:
            time.sleep(0.01)
        print(*closed["bytes_sent"], flush=True)
    """
    paths = [str(Path(tokengap.__file__).parent.parent), *(path for path in sys.path if path)]
    command = [sys.executable, "-c", code, str(pair.port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "sock_diag, destroy events on | 700\n"
        pair.served.sendall(b"a" * 11)
        pair.close()
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "711\n"


# --- the source -----------------------------------------------------------------------------------------------------


async def test_read_takes_the_ports_of_the_topology(connect: Callable[..., Pair], source: Sockets) -> None:
    """Hops are watched where they listen, engines where they are reached, from both sides."""
    hop, engine, other = connect(), connect(), connect()
    topology = Topology(
        engines=(Engine("a", f"http://127.0.0.1:{engine.port}", (Endpoint("127.0.0.1", engine.port),)),),
        hops=(Hop("edge", (Endpoint(None, hop.port),), ("a",)),),
    )
    snapshot = await source.read(topology)
    assert sorted(snapshot.open["sport"]) == sorted([hop.port, engine.port, engine.client.getsockname()[1]])
    assert other.port not in snapshot.open["sport"]


def test_snapshots_from_several_threads_do_not_mix(connect: Callable[..., Pair], source: Sockets) -> None:
    """A beat that was given up on and the next one may overlap in threads: each gets its own whole answer."""
    pairs = [connect() for _ in range(4)]
    wrong: list[SocketTable] = []

    def read(pair: Pair) -> None:
        for _ in range(20):
            rows = source.snapshot(*both(pair)).open
            if len(rows) != 2 or pair.port not in rows["sport"]:
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_kernel_error_is_an_error_of_the_source(
    connect: Callable[..., Pair], source: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal and a bad moment are told apart, each with the kernel's own words; the next snapshot is whole again."""
    pair = connect()
    for number, kind in ((13, SourceRefused), (105, SourceUnusable), (2, SourceRefused), (22, SourceUnusable)):
        with monkeypatch.context() as patch:
            answer = struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -number)
            patch.setattr(sock_diag._Inbox, "received", lambda _, answer=answer: memoryview(answer))
            with pytest.raises(kind, match=os.strerror(number)):
                source.snapshot(*both(pair))
    assert len(source.snapshot(*both(pair)).open) == 2


def test_probe_tells_what_this_host_allows() -> None:
    """On Linux with sock_diag: everything, and a tcp_info that has every column."""
    access = probe()
    assert (access.way, access.sock_diag, access.events) == ("sock_diag", True, True), access
    assert access.sock_diag_reason == access.events_reason == ""
    assert access.kernel == f"Linux {os.uname().release}"
    assert access.tcp_info is not None
    assert access.tcp_info >= 208
    assert access.events_room is not None
    assert access.events_room > 0


def test_every_column_of_a_socket_is_known_here(connect: Callable[..., Pair], source: Sockets) -> None:
    """With a current kernel nothing is UNKNOWN."""
    snapshot = source.snapshot(*both(connect()))
    for name in snapshot.open.dtype.names:
        assert (snapshot.open[name].astype(np.int64) != UNKNOWN).all(), name
