"""One beat of the sockets source beside ``ss -tinH`` and ``psutil.net_connections('tcp')``, on the same sockets.

Streams are loopback connections between processes of their own, in two shapes::

    direct     client -> engine           two sockets a stream in this namespace, all of them watched
    proxied    client -> hop -> engine    four, of which three are watched (the client's own is not)

All streams exchange a few bytes before each round, then each way of reading takes its turn. The best of the rounds
counts: what else the machine does can only make a turn slower. ``beat`` is all that a beat does: read, decode, join,
and render the page in its four forms. How the source and the beat grow from half the streams to all of them is taken
from their processor time (the kernel's part is done in the reading thread), since on a busy machine a long turn is
interrupted more often than a short one; ``memory_per_stream_bytes`` is what this process grew by meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil

import tokengap.join
from tokengap.readings import EnginePage, ProcessTable, Reading, Readings, SocketSnapshot
from tokengap.series.render import render
from tokengap.sources.sockets import Sockets
from tokengap.topology import Endpoint, Engine, Hop, Topology

REQUEST, ANSWER = b"q" * 300, b"a" * 500

#: The most that a ratio may be, by the beginning of its name. The last is for twice the streams.
BARS = {
    "ratio_beat_to_ss": 1.0,
    "ratio_ours_with_join_to_ss": 1.0,
    "ratio_ours_to_ss": 0.5,
    "ratio_ours_to_psutil": 0.2,
    "ratio_": 2.3,
}


class Joined:
    """The join behind the source, fed with a page that says all streams run and one token came for each."""

    def __init__(self, live: World) -> None:
        (engine_port,) = live.targets or live.listening
        hops = tuple(Hop("edge", (Endpoint(None, port),), ("engine-1",)) for port in live.listening - {engine_port})
        engine = Engine("engine-1", f"http://127.0.0.1:{engine_port}", (Endpoint(None, engine_port),))
        self._topology = Topology((engine,), hops)
        self._state = tokengap.join.start(self._topology)
        self._tokens = 0.0

    def step(self, snapshot: SocketSnapshot, streams: int) -> int:
        """Take one beat's sockets in; returns how many streams are in flight to the engine."""
        now = time.monotonic()
        self._tokens += streams
        page = EnginePage(running=float(streams), waiting=0.0, generation_tokens=self._tokens, finished=0.0)
        readings = Readings(
            now,
            time.time(),
            self._topology,
            Reading(now, 0.02, snapshot),
            {"engine-1": Reading(now, value=page)},
            Reading(now, value=ProcessTable()),
        )
        self._state, self._view = tokengap.join.step(self._state, readings)
        return self._view.engines[0].open_streams

    def beat(self, snapshot: SocketSnapshot, streams: int) -> int:
        """The same, and the page of it."""
        seen = self.step(snapshot, streams)
        render(self._view)
        return seen


# --- the streams ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Processes that hold streams open. ``listening`` and ``targets`` are the ports that an exporter would watch."""

    pipes: Sequence[Connection]
    listening: frozenset[int]
    targets: frozenset[int]

    def tell(self, command: int) -> None:
        """Have all processes open so many streams more, or, for 0, have each stream carry one more answer."""
        for pipe in self.pipes:
            pipe.send(command)
        for pipe in self.pipes:
            pipe.recv()


@contextlib.contextmanager
def world(*, proxied: bool) -> Iterator[World]:
    """Start the processes of one shape; end them, and with them the streams, afterwards."""
    start = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as ending:

        def process(role: Callable[..., None], *ports: int) -> tuple[Connection, int]:
            ours, theirs = start.Pipe()
            child = start.Process(target=role, args=(theirs, *ports), daemon=True)
            child.start()
            ending.callback(child.join, 30)
            ending.callback(ours.send, None)
            return ours, ours.recv()

        pipe, engine = process(hold_engine)
        pipes, listening, nearest = [pipe], {engine}, engine
        if proxied:
            pipe, nearest = process(hold_hop, engine)
            pipes.append(pipe)
            listening.add(nearest)
        pipes.append(process(hold_clients, nearest)[0])
        yield World(pipes, frozenset(listening), frozenset({engine}))


def hold_engine(pipe: Connection) -> None:
    """Accept streams, read a request, answer."""
    server = listen(pipe)
    streams: list[socket.socket] = []
    for command in iter(pipe.recv, None):
        for _ in range(command):
            streams.append(ending_by_reset(server.accept()[0]))
            streams[-1].recv(len(REQUEST))
        for stream in streams:
            stream.sendall(ANSWER)
        pipe.send(True)


def hold_hop(pipe: Connection, engine: int) -> None:
    """Accept streams, connect each to the engine, carry the request up and the answer down."""
    server = listen(pipe)
    streams: list[tuple[socket.socket, socket.socket]] = []
    for command in iter(pipe.recv, None):
        for _ in range(command):
            down = ending_by_reset(server.accept()[0])
            up = ending_by_reset(socket.create_connection(("127.0.0.1", engine)))
            up.sendall(down.recv(len(REQUEST)))
            streams.append((down, up))
        for down, up in streams:
            down.sendall(up.recv(len(ANSWER)))
        pipe.send(True)


def hold_clients(pipe: Connection, port: int) -> None:
    """Connect, ask, read the answer."""
    allow_files()
    pipe.send(0)
    streams: list[socket.socket] = []
    for command in iter(pipe.recv, None):
        for _ in range(command):
            streams.append(ending_by_reset(socket.create_connection(("127.0.0.1", port))))
            streams[-1].sendall(REQUEST)
        for stream in streams:
            stream.recv(len(ANSWER))
        pipe.send(True)


def listen(pipe: Connection) -> socket.socket:
    """Listen on a free port and tell it."""
    allow_files()
    server = socket.create_server(("127.0.0.1", 0), backlog=4096)
    pipe.send(server.getsockname()[1])
    return server


def ending_by_reset(stream: socket.socket) -> socket.socket:
    """Leave no TIME-WAIT behind, which would cost the next shape's readers time."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return stream


def allow_files() -> int:
    """Allow this process as many open files as it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


# --- the measurements -----------------------------------------------------------------------------------------------


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    between: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Let each way run once a round, and return its best time in seconds of ``clock``."""
    best = dict.fromkeys(ways, float("inf"))
    for number in range(rounds + 1):
        between()
        for name, way in ways.items():
            start = clock()
            way()
            took = clock() - start
            if number:  # the round before the first grows buffers and warms caches
                best[name] = min(best[name], took)
    return best


def measure(shape: str, streams: int, rounds: int) -> dict[str, float]:
    """Measure one shape at half the streams, then at all of them."""
    with world(proxied=shape == "proxied") as live, contextlib.closing(Sockets(way="sock_diag")) as source:

        def ours() -> None:
            rows = len(source.snapshot(live.listening, live.targets).open)
            if rows != open_streams * (3 if shape == "proxied" else 2):
                raise SystemExit(f"{shape}: {rows} sockets seen for {open_streams} streams")

        joined = Joined(live)

        def ours_with_join(do: Callable[[SocketSnapshot, int], int] = joined.step) -> None:
            seen = do(source.snapshot(live.listening, live.targets), open_streams)
            if seen != open_streams:
                raise SystemExit(f"{shape}: the join sees {seen} of {open_streams} streams")

        def beat() -> None:
            ours_with_join(joined.beat)

        ways: dict[str, Callable[[], object]] = {
            "ours": ours,
            "ours_with_join": ours_with_join,
            "beat": beat,
            "ss": lambda: subprocess.run(["ss", "-tinH"], stdout=subprocess.DEVNULL, check=True),
            "psutil": lambda: psutil.net_connections("tcp"),
        }

        def refresh() -> None:
            live.tell(0)

        open_streams, processor, beats, memory = 0, {}, {}, {}
        for more in (streams // 2, streams - streams // 2):
            say(f"{shape}: opening {more} streams")
            live.tell(more)
            open_streams += more
            processor[open_streams] = take_turns({"ours": ours}, 3 * rounds, refresh, time.thread_time)["ours"]
            for _ in range(3):  # streams are paired in the first beats; what counts is every beat after
                refresh()
                joined.beat(source.snapshot(live.listening, live.targets), open_streams)
            beats[open_streams] = take_turns({"beat": beat}, rounds, refresh, time.thread_time)["beat"]
            memory[open_streams] = psutil.Process().memory_info().rss
        say(f"{shape}: taking turns")
        turns = take_turns(ways, rounds, refresh)
    return {
        **{f"seconds_{name}": seconds for name, seconds in turns.items()},
        **{f"seconds_processor_ours_{count}": seconds for count, seconds in processor.items()},
        **{f"seconds_processor_beat_{count}": seconds for count, seconds in beats.items()},
        "memory_per_stream_bytes": (memory[streams] - memory[streams // 2]) / (streams - streams // 2),
        "ratio_ours_to_ss": turns["ours"] / turns["ss"],
        "ratio_ours_with_join_to_ss": turns["ours_with_join"] / turns["ss"],
        "ratio_beat_to_ss": turns["beat"] / turns["ss"],
        f"ratio_beat_{streams}_to_{streams // 2}": beats[streams] / beats[streams // 2],
        "ratio_ours_to_psutil": turns["ours"] / turns["psutil"],
        f"ratio_{streams}_to_{streams // 2}": processor[streams] / processor[streams // 2],
    }


def say(line: str) -> None:
    """Show progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure both shapes and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=9000, metavar="N", help="streams of each shape (default 9000)")
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="rounds, of which the best counts (default 7)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if shutil.which("ss") is None:
        raise SystemExit("ss is missing: apt-get install iproute2")
    if (most := allow_files()) < 2 * options.streams + 100:
        raise SystemExit(f"{options.streams} streams need {2 * options.streams + 100} open files, {most} are allowed")
    figures: dict[str, float] = {"streams": options.streams, "rounds": options.rounds}
    for shape in ("direct", "proxied"):
        suffix = "" if shape == "direct" else f"_{shape}"
        figures |= {name + suffix: value for name, value in measure(shape, options.streams, options.rounds).items()}
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if name.startswith("seconds"):
            print(f"{name:40} {value * 1000:8.1f} ms")
        elif name.startswith("memory"):
            print(f"{name:40} {value:8.0f} bytes")
        elif name.startswith("ratio"):
            bar = next(bar for beginning, bar in BARS.items() if name.startswith(beginning))
            print(f"{name:40} {value:8.3f}  (at most {bar})")


if __name__ == "__main__":
    main()
