"""Sockets of several network namespaces in one snapshot: nothing is mixed up, and what belongs together is joined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from join.test_fold import crowd, play
from join.world import ADMIT, EDGE, LOOPBACK, TICK, WORKER, World
from tokengap.join import start, step
from tokengap.join.ledger import totals
from tokengap.join.sockets import caller_keys, connection_keys, sides
from tokengap.readings import (
    SOCKET,
    Namespace,
    ProcessTable,
    Reading,
    Readings,
    SocketSnapshot,
    SocketTable,
    as_ipv6,
)
from tokengap.topology import Endpoint, Engine, Hop, Topology
from tokengap.view import View

ADDRESSES = ("10.244.0.5", "10.244.0.6", "10.244.0.7")


def row(
    source: tuple[str, int], destination: tuple[str, int], netns: int = 0, cookie: int = 1, **columns: int
) -> SocketTable:
    made = np.zeros(1, dtype=SOCKET)
    for end, (address, port) in (("src", source), ("dst", destination)):
        number = as_ipv6(address)
        made[f"{end}_hi"], made[f"{end}_lo"], made[f"{end[0]}port"] = number >> 64, number & (1 << 64) - 1, port
    made["netns"], made["cookie"], made["state"] = netns, cookie, 1
    for name, value in columns.items():
        made[name] = value
    return made


# --- whole histories ------------------------------------------------------------------------------------------------


def moved(table: SocketTable, netns: int) -> SocketTable:
    """The same sockets in another namespace: same addresses, ports, and, as on kernels before 5.10, cookies."""
    table = table.copy()
    table["netns"] = netns
    table["cookie"] ^= np.uint64(netns << 48)
    table["inode"] += np.uint64(netns << 40)
    return table


def merged(worlds: list[World], topology: Topology) -> Readings:
    """One beat of several worlds that know nothing of each other, each in a namespace of its own."""
    beats = [world.readings() for world in worlds]
    tables = [beat.sockets.value for beat in beats]
    owners = {
        inode + (netns << 40): hop
        for netns, beat in enumerate(beats, 1)
        for inode, hop in beat.processes.value.owners.items()
    }
    namespaces = (
        Namespace(0, frozenset({as_ipv6("192.0.2.1")})),
        *(Namespace(i, frozenset({as_ipv6(a)})) for i, a in enumerate(ADDRESSES[: len(worlds)], 1)),
    )
    return Readings(
        at=beats[0].at,
        wall=beats[0].wall,
        topology=topology,
        sockets=Reading(
            beats[0].at,
            value=SocketSnapshot(
                np.concatenate([moved(table.open, i) for i, table in enumerate(tables, 1)]),
                np.concatenate([moved(table.closed, i) for i, table in enumerate(tables, 1)]),
                events=True,
                namespaces=namespaces,
            ),
        ),
        engines={f"e{i}": beat.engines["worker"] for i, beat in enumerate(beats)},
        processes=Reading(beats[0].at, value=ProcessTable(owners=owners)),
    )


def play_together(worlds: list[World], seconds: int = 60) -> View:
    """Join worlds in which everything happens at the same addresses, ports and instants."""
    chain = worlds[0].chain
    engines = tuple(
        Engine(f"e{i}", f"http://{a}:{WORKER}", (Endpoint(a, WORKER),)) for i, a in enumerate(ADDRESSES[: len(worlds)])
    )
    names = tuple(engine.name for engine in engines)
    hops = (Hop("edge", (Endpoint(None, EDGE),), ("admit",) if chain else names),)
    hops += (Hop("admit", (Endpoint(None, ADMIT),), names),) if chain else ()
    topology = Topology(engines, hops)
    state = start(topology)
    for _ in range(seconds):
        state, view = step(state, merged(worlds, topology))
        for engine in view.engines:
            assert totals(engine.tokens)["sum"] == pytest.approx(engine.tokens.out, abs=1e-6)
        for world in worlds:
            target = world.now + 1
            while world.now < target - TICK / 2:
                world.tick()
    return view


@pytest.mark.parametrize("chain", [False, True], ids=["one hop", "two hops"])
@pytest.mark.parametrize("local", [False, True], ids=["engine far", "engine here"])
def test_pods_alike_in_everything_are_not_mixed(chain: bool, local: bool) -> None:
    """Two pods, the same in every address, port and instant, one with users who leave and a hop that leaks: its tokens
    are orphaned as in a world of its own, and the other has no orphan."""
    leaky = World(crowd(), slots=20, leaks="edge", chain=chain, local=local)
    sound = World(crowd(leavers=0), slots=20, leaks="edge", chain=chain, local=local)
    view = play_together([leaky, sound])
    for engine, world in zip(view.engines, (leaky, sound), strict=True):
        assert engine.tokens.out == world.truth["out"]
        assert engine.tokens.useful == pytest.approx(world.truth["useful"], abs=0.01 * world.truth["out"])
        assert engine.tokens.unattributed == pytest.approx(0, abs=0.5)
    assert view.engines[1].tokens.orphaned == {}
    ended = {key: n for key, n in view.endings.items() if n}
    assert ended == {("e0", "edge", "completed"): 12, ("e0", "edge", "orphaned"): 8, ("e1", "edge", "completed"): 20}
    assert view.namespaces == {"watched": 3, "failed": 0}


@settings(max_examples=12)
@given(leavers=st.tuples(*[st.integers(0, 6)] * 3), slots=st.integers(1, 6))
def test_each_of_three_pods_gets_its_own(leavers: tuple[int, int, int], slots: int) -> None:
    """However many leave in each, no pod's orphans are put down to another."""
    worlds = [World(crowd(6, left, 60), slots=slots, leaks="edge") for left in leavers]
    view = play_together(worlds, 90)
    for engine, world in zip(view.engines, worlds, strict=True):
        assert engine.tokens.out == world.truth["out"]
        assert engine.tokens.useful == pytest.approx(world.truth["useful"], abs=0.01 * world.truth["out"] + 1)


def test_a_namespace_that_is_stale_degrades_the_beat_and_one_that_is_not_there_does_not() -> None:
    """What was named and is gone is a state of the world; what cannot be read now is a loss."""
    (readings, *_) = World(crowd(1, 0)).beats(5)
    snapshot = readings.sockets.value
    assert snapshot is not None

    def seen(*namespaces: Namespace, unread: tuple[str, ...]) -> View:
        value = SocketSnapshot(snapshot.open, snapshot.closed, events=True, namespaces=namespaces, unread=unread)
        beat = replace(readings, sockets=Reading(readings.at, value=value))
        return step(start(readings.topology), beat)[1]

    gone = seen(Namespace(0), unread=("pid 12: no such process",))
    assert (gone.degraded_beats, gone.namespaces) == (0, {"watched": 1, "failed": 1})
    assert gone.sources[0].detail.endswith("; 1 network namespaces; not read: pid 12: no such process")
    assert gone.sources[0].up
    stale = seen(Namespace(0), Namespace(1, stale=True), Namespace(2), unread=("pid 12: a bad moment",))
    assert (stale.degraded_beats, stale.namespaces) == (1, {"watched": 2, "failed": 1})


def test_without_namespaces_our_own_is_the_one() -> None:
    """Also where nothing else was asked for the series is there."""
    view = play(World(crowd(1, 0)), 3)[-1]
    assert view.namespaces == {"watched": 1, "failed": 0}


# --- addresses ------------------------------------------------------------------------------------------------------


def test_which_ends_are_of_one_connection() -> None:
    """Between namespaces by their addresses; what loops back only in its own."""
    across = row((ADDRESSES[0], 40000), (ADDRESSES[1], 8000), netns=1)
    far_end = row((ADDRESSES[1], 8000), (ADDRESSES[0], 40000), netns=2)
    assert connection_keys(across, reverse=True) == connection_keys(far_end)
    assert connection_keys(across) != connection_keys(far_end)
    for address in ("127.0.0.1", "127.8.0.1", "::1", "10.0.0.2"):
        near, far = (address, 40000), (address, 8000)
        one, other, third = row(near, far, netns=1), row(far, near, netns=1), row(far, near, netns=2)
        assert connection_keys(one, reverse=True) == connection_keys(other)
        assert connection_keys(one, reverse=True) != connection_keys(third)
        ours = row(far, near)
        assert connection_keys(one, reverse=True) != connection_keys(ours)
        # With others beside it or alone, a socket of our own namespace keeps its number.
        assert connection_keys(np.concatenate([ours, third]))[0] == connection_keys(ours)[0]


def test_an_address_that_is_translated_leaves_the_caller() -> None:
    """A proxy calls a service's address, the engine sees itself called at its own: the caller is the same."""
    up = row((ADDRESSES[0], 40000), ("10.96.0.10", 80), netns=1)
    at_engine = row((ADDRESSES[1], 8000), (ADDRESSES[0], 40000), netns=2)
    first, second = np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)
    assert caller_keys(up, "src", first) == caller_keys(at_engine, "dst", first)
    assert caller_keys(up, "src", first) != caller_keys(at_engine, "dst", second)
    assert caller_keys(up, "src", first) != caller_keys(at_engine, "src", first)


def test_which_side_of_what_a_socket_is_in_several_namespaces() -> None:
    """A port alone is any address of any watched namespace. An engine's address is its namespace's loopback too."""
    topology = Topology(
        engines=(
            Engine("host", "http://127.0.0.1:8000", (Endpoint(None, 8000),)),
            Engine("pod", f"http://{ADDRESSES[0]}:8000", (Endpoint(ADDRESSES[0], 8000),)),
        ),
        hops=(Hop("edge", (Endpoint(None, 8080),), ("host", "pod")),),
    )
    namespaces = (
        Namespace(0, frozenset({as_ipv6("192.0.2.1")})),
        Namespace(1, frozenset({as_ipv6(ADDRESSES[0])})),
        Namespace(2, frozenset({as_ipv6(ADDRESSES[1])})),
    )
    user, caller = ("203.0.113.9", 50000), (ADDRESSES[1], 40000)
    cases = [
        # socket, in which namespace, then: hop, engine's own, to which engine
        (((ADDRESSES[1], 8080), user, 2), (0, -1, -1)),
        ((caller, ("192.0.2.1", 8000), 2), (-1, -1, 0)),  # the host's engine, called from a container
        ((caller, (ADDRESSES[0], 8000), 2), (-1, -1, 1)),
        ((caller, (ADDRESSES[1], 8000), 2), (-1, -1, 0)),  # at this host, and no engine has it by address
        ((caller, ("198.51.100.1", 8000), 2), (-1, -1, -1)),  # somewhere else
        ((("127.0.0.1", 40000), ("127.0.0.1", 8000), 1), (-1, -1, 1)),  # a sidecar
        ((("127.0.0.1", 40000), ("127.0.0.1", 8000), 0), (-1, -1, 0)),
        ((("127.0.0.1", 8000), ("127.0.0.1", 40000), 1), (-1, 1, -1)),
        ((("::1", 8000), ("::1", 40000), 1), (-1, 1, -1)),
        (((ADDRESSES[0], 8000), caller, 1), (-1, 1, -1)),
        ((("192.0.2.1", 8000), caller, 0), (-1, 0, -1)),
    ]
    table = np.concatenate([row(*socket) for socket, _ in cases])
    side = sides(table, topology, namespaces)
    found = list(zip(side.down.tolist(), side.engine_side.tolist(), side.to_engine.tolist(), strict=True))
    assert found == [expected for _, expected in cases]


def test_loopback_is_what_it_is_called() -> None:
    """The world's own addresses are loopback, or these tests would test nothing."""
    assert as_ipv6("127.0.0.1") == LOOPBACK
