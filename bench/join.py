"""What one beat's join costs with 200 and 2,000 streams through a proxy, all of them served, waiting, or just come.

No sockets: rows as the kernel would give them, one proxy, one engine, a chunk for each stream in each beat.
``ratio_served_to_dict`` compares the whole step (streams, clients, ledger, queue, verdict, view) with the least that a
join in plain Python does: one pass over the same rows that looks each socket's counters of the beat before up in a dict
and takes the difference. ``ratio_served_to_rest`` compares it with the step over as many connections at rest.
``ratio_waiting_to_served`` and ``ratio_burst_to_served`` compare a beat in which all wait in the queue, and the one in
which all came at once and none has its client yet, with one of the same streams served; ``..._slow`` is that burst
through a proxy so slow that the instants of the requests do not tell whose is whose.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tokengap.join import State, start, step
from tokengap.readings import ESTABLISHED, SOCKET, EnginePage, ProcessTable, Reading, Readings, SocketSnapshot
from tokengap.topology import Endpoint, Engine, Hop, Topology

EDGE, WORKER = 8080, 8100
LOOPBACK = 0x0000FFFF_7F000001
TOPOLOGY = Topology(
    engines=(Engine("worker", f"http://127.0.0.1:{WORKER}", (Endpoint(None, WORKER),)),),
    hops=(Hop("edge", (Endpoint(None, EDGE),), ("worker",)),),
)
STREAMS = (200, 2000)
BEATS = 8
ROUNDS = 5

#: Bytes of a request, of an answer's header and of a chunk; seconds over which the requests came, and after which a
#: slow proxy sends one on.
QUESTION, HEADER, CHUNK = 400, 180, 220
SPREAD, SLOW = 2.0, 0.2


def sockets(count: int, at: float, asked: np.ndarray, got: int, slow: float) -> np.ndarray:
    """Return both sockets of each stream: the client's, and the proxy's to the engine.

    ``asked``: when each client asked. ``got``: the bytes that each answer has so far; 0: nobody asked yet.
    """
    rows = np.zeros(2 * count, dtype=SOCKET)
    rows["src_lo"] = rows["dst_lo"] = LOOPBACK
    rows["cookie"] = rows["inode"] = 1 + np.arange(2 * count)
    rows["state"] = ESTABLISHED
    down, up = rows[:count], rows[count:]
    down["sport"], down["dport"] = EDGE, 10_000 + np.arange(count)
    up["sport"], up["dport"] = 30_000 + np.arange(count), WORKER
    question = np.where(asked <= at, QUESTION, 0)
    down["bytes_received"] = up["bytes_sent"] = up["bytes_acked"] = question
    down["bytes_sent"] = down["bytes_acked"] = up["bytes_received"] = np.where(asked + slow <= at, got, 0)
    since = ((at - asked) * 1e3).astype(np.int64).clip(0)
    answer = since - int(slow * 1e3) if got <= HEADER else np.full(count, 4)
    down["last_data_recv"], down["last_data_sent"] = since, answer.clip(0)
    up["last_data_sent"], up["last_data_recv"] = (since - int(slow * 1e3)).clip(0), answer.clip(0)
    rows["last_ack_recv"] = 4
    return rows


def beat(at: float, rows: np.ndarray, tokens: float, *, running: int, waiting: int) -> Readings:
    """Return a beat's readings."""
    page = EnginePage(running=float(running), waiting=float(waiting), generation_tokens=tokens, finished=0.0)
    return Readings(
        at=at,
        wall=1.7e9 + at,
        topology=TOPOLOGY,
        sockets=Reading(at, value=SocketSnapshot(rows, rows[:0], "sock_diag", True)),
        engines={"worker": Reading(at, value=page)},
        processes=Reading(at, value=ProcessTable()),
    )


def history(count: int, kind: str) -> list[Readings]:
    """Return beats of streams that are ``served``, are ``waiting``, came in a ``burst``, or are at ``rest``."""
    asked = 1001.5 + np.linspace(0.0, 0.005 if "burst" in kind else SPREAD, count)
    if kind == "rest":
        asked += 1e6
    slow = SLOW if kind == "burst slow" else 0.004
    came = {"burst": 1002.0, "burst slow": 1002.0}.get(kind, 1004.0)
    beats = []
    for number in range(int(came - 1000) + BEATS + 1):
        at = 1000.0 + number
        chunks = max(number - int(came - 1000), 0) if kind == "served" else 0
        rows = sockets(count, at, asked, HEADER + CHUNK * chunks, slow)
        here = int((asked <= at).sum())
        running = here if kind == "served" else 0
        beats.append(beat(at, rows, float(chunks * count), running=running, waiting=here - running))
    return beats


def stepping(state: State, readings: list[Readings]) -> tuple[State, list[float], int]:
    """Join the beats; return the state after, the seconds that each took, and how many streams the last one shows."""
    took, shown = [], 0
    for each in readings:
        began = time.perf_counter()
        state, view = step(state, each)
        took.append(time.perf_counter() - began)
        shown = len(view.streams)
    return state, took, shown


def timed(count: int, kind: str) -> float:
    """Return the seconds of one beat: the median of the last, or the one in which a burst came."""
    readings = history(count, kind)
    first = len(readings) - BEATS
    state, _, _ = stepping(start(TOPOLOGY), readings[: first - 1 if "burst" in kind else first])
    now = readings[first - 1 : first] if "burst" in kind else readings[first:]
    _, took, shown = stepping(state, now)
    assert shown == (0 if kind == "rest" else count), (kind, shown)
    return statistics.median(took)


def by_dict(count: int) -> float:
    """Return the seconds of one pass in plain Python over the same rows: each socket's growth since the beat before."""
    before: dict[int, tuple[int, int]] = {}
    took = []
    for readings in history(count, "served")[-BEATS:]:
        rows = readings.sockets.value.open if readings.sockets.value is not None else np.zeros(0, dtype=SOCKET)
        began = time.perf_counter()
        now = {
            cookie: (acked, received)
            for cookie, acked, received in zip(
                rows["cookie"].tolist(), rows["bytes_acked"].tolist(), rows["bytes_received"].tolist(), strict=True
            )
        }
        growth = {}
        for cookie, (acked, received) in now.items():
            old = before.get(cookie, (0, 0))
            growth[cookie] = acked - old[0], received - old[1]
        before = now
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure(count: int) -> dict[str, float]:
    """Measure each kind of beat in turn, several times; the medians."""
    ways: dict[str, Callable[[], float]] = {
        kind: lambda kind=kind: timed(count, kind)  # type: ignore[misc]
        for kind in ("served", "waiting", "burst", "burst slow", "rest")
    }
    ways["dict"] = lambda: by_dict(count)
    rounds = [{name: way() for name, way in ways.items()} for _ in range(ROUNDS)]
    took = {name: statistics.median(each[name] for each in rounds) for name in ways}
    return {
        f"ratio_served_to_dict_{count}": round(took["served"] / took["dict"], 2),
        f"ratio_served_to_rest_{count}": round(took["served"] / took["rest"], 2),
        f"ratio_waiting_to_served_{count}": round(took["waiting"] / took["served"], 2),
        f"ratio_burst_to_served_{count}": round(took["burst"] / took["served"], 2),
        f"ratio_burst_to_served_slow_{count}": round(took["burst slow"] / took["served"], 2),
        f"served_ms_{count}": round(took["served"] * 1e3, 2),
        f"dict_ms_{count}": round(took["dict"] * 1e3, 2),
    }


def main() -> None:
    """Print the figures as a table, or as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for count in STREAMS:
        figures |= measure(count)
    few, many = (figures[f"served_ms_{count}"] for count in STREAMS)
    figures["ratio_2000_to_200"] = round(many / few, 2)
    if arguments.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:36} {value:>10g}")


if __name__ == "__main__":
    main()
