"""What is said to be unseen, and that nobody is an orphan for it: sockets, processes and proxies made up by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from join.world import EDGE, WORKER, Sock
from tokengap.join import start, step
from tokengap.join.blind import SIGN_SECONDS
from tokengap.join.proxies import ProxyMemory, observe
from tokengap.readings import (
    SOCKET,
    EnginePage,
    ProcessTable,
    ProxySnapshot,
    Reading,
    Readings,
    SocketSnapshot,
    UnseenSockets,
)
from tokengap.topology import Endpoint, Engine, Hop, Topology
from tokengap.view import BLIND_SPOTS, CLIENTS, View

CHUNK, FRAME = 220, 13


class Bench:
    """Sockets that a test moves by hand, one beat a second, between one hop and one engine on another host."""

    def __init__(self, *, hops: tuple[str, ...] = ("edge",)) -> None:
        listen = {"edge": EDGE, "admit": EDGE + 1}
        chain = dict(zip(hops, (*hops[1:], "worker"), strict=True))
        self.topology = Topology(
            (Engine("worker", "http://10.0.0.7:8100", (Endpoint(None, WORKER),)),),
            tuple(Hop(hop, (Endpoint(None, listen[hop]),), (chain[hop],)) for hop in hops),
        )
        self.state = start(self.topology)
        self.now = 1000.0
        self.sockets: list[Sock] = []
        self.proxy: ProxySnapshot | None = None
        self.unseen: UnseenSockets | None = UnseenSockets((), ())
        self.page = EnginePage(running=0.0, waiting=0.0, generation_tokens=0.0, finished=0.0, start_time=1.0)
        self.views: list[View] = []
        self._cookies = 1

    def socket(self, sport: int, dport: int) -> Sock:
        self._cookies += 1
        self.sockets.append(Sock(self._cookies, sport, dport, sent_at=self.now, recv_at=self.now, ack_at=self.now))
        return self.sockets[-1]

    def client(self, *, asks: int = 300) -> Sock:
        down = self.socket(EDGE, 40000 + self._cookies)
        down.received = asks
        return down

    def upstream(self) -> Sock:
        up = self.socket(50000 + self._cookies, WORKER)
        up.sent = 160
        return up

    def feed(self, up: Sock, down: Sock | None, size: int = CHUNK) -> None:
        up.received, up.recv_at = up.received + size, self.now
        if down is not None:
            down.sent, down.acked = down.sent + size, down.acked + size
            down.sent_at = down.ack_at = self.now

    def says(self, down: Sock, size: int) -> None:
        down.received, down.recv_at = down.received + size, self.now

    def close(self, sock: Sock) -> np.ndarray:
        self.sockets.remove(sock)
        return sock.row(self.now)

    def beat(self, *closed: np.ndarray, readable: bool = True) -> View:
        self.now += 1.0
        empty = np.zeros(0, dtype=SOCKET)
        rows = [sock.row(self.now) for sock in self.sockets]
        snapshot = SocketSnapshot(np.concatenate([empty, *rows]), np.concatenate([empty, *closed]), events=True)
        ups = {sock.cookie: "edge" for sock in self.sockets if sock.dport == WORKER}
        unseen = {} if self.unseen is None else {"edge": self.unseen}
        sockets = Reading(self.now, value=snapshot) if readable else Reading(self.now, error="no")
        proxies = {} if self.proxy is None else {"edge": Reading(self.now, value=self.proxy)}
        self.state, view = step(
            self.state,
            Readings(
                at=self.now,
                wall=1.7e9 + self.now,
                topology=self.topology,
                sockets=sockets,
                engines={"worker": Reading(self.now, value=self.page)},
                processes=Reading(self.now, value=ProcessTable(owners=ups, unseen=unseen)),
                proxies=proxies,
            ),
        )
        self.views.append(view)
        return view


def spots(view: View, hop: str = "edge") -> dict[str, bool | None]:
    return {spot.kind: spot.blind for spot in view.blind_spots if spot.hop == hop}


def clients(view: View) -> list[str]:
    return [CLIENTS[code] for code in view.streams["client"]]


def no_orphan(bench: Bench) -> bool:
    return not any({"gone", "vanished"} & set(clients(view)) for view in bench.views)


# --- HTTP/2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speaks", [0, FRAME], ids=["silent", "frames"])
def test_one_client_socket_three_streams_then_two(speaks: int):
    """Three requests at once over one connection; one is reset: no orphan, and no client that left."""
    bench = Bench()
    bench.beat()
    down = bench.client()
    ups = [bench.upstream() for _ in range(3)]
    bench.page = EnginePage(running=3.0, waiting=0.0, generation_tokens=0.0, finished=0.0, start_time=1.0)
    tokens = 0
    closed: tuple[np.ndarray, ...] = ()
    for n in range(12):
        for up in ups:
            bench.feed(up, down)
            tokens += 1
        if n == 6:
            closed = (bench.close(ups.pop()),)
            bench.says(down, FRAME)
        elif speaks:
            bench.says(down, speaks)
        bench.page = EnginePage(
            running=float(len(ups)), waiting=0.0, generation_tokens=float(tokens), finished=0.0, start_time=1.0
        )
        view, closed = bench.beat(*closed), ()
        if n >= 3:
            assert clients(view) == ["connected"] * len(ups)
            assert spots(view)["http2_clients"] is True
    assert no_orphan(bench)
    assert sum(view.engines[0].tokens.orphaned.values()) == 0
    assert dict(view.endings) == {("worker", "edge", "cancelled"): 1}


def test_a_client_that_left_within_a_beat_is_not_taken_for_another_stream():
    """Two users come at the same instant and one leaves before the next beat, while the proxy goes on: an orphan."""
    bench = Bench()
    bench.beat()
    stays, leaves = bench.client(), bench.client()
    ups = [bench.upstream(), bench.upstream()]
    bench.page = EnginePage(running=2.0, waiting=0.0, generation_tokens=0.0, finished=0.0, start_time=1.0)
    closed = (bench.close(leaves),)
    for _ in range(6):
        bench.feed(ups[0], stays)
        bench.feed(ups[1], None)
        view, closed = bench.beat(*closed), ()
    assert sorted(clients(view)) == ["connected", "gone"]
    assert spots(view)["http2_clients"] is False


def test_frames_between_requests_are_none_that_waits():
    """A ping after the answer is no request that the proxy holds back."""
    bench = Bench()
    bench.beat()
    down, up = bench.client(), bench.upstream()
    for _ in range(3):
        bench.feed(up, down)
        bench.beat()
    closed = (bench.close(up),)
    bench.says(down, FRAME)
    for _ in range(5):
        view, closed = bench.beat(*closed), ()
    assert clients(view) == []


def test_what_the_proxy_says_of_its_clients_counts():
    """Requests without a client of their own, which would be orphans, are not while it has clients on HTTP/2."""
    bench = Bench()
    bench.proxy = ProxySnapshot("envoy", streams=2, connections=1, h2_connections=1, h2_streams=2)
    bench.beat()
    ups = [bench.upstream(), bench.upstream()]
    for _ in range(5):
        for up in ups:
            bench.feed(up, None)
        bench.beat()
    assert no_orphan(bench)
    assert bench.views[-1].proxies[0].h2_streams == 2
    bench.proxy = ProxySnapshot("envoy", streams=2, connections=0, h2_connections=0, h2_streams=0)
    for _ in range(3):
        for up in ups:
            bench.feed(up, None)
        view = bench.beat()
    assert clients(view) == ["gone", "gone"]


@pytest.mark.parametrize("speaks", [True, False])
def test_what_was_there_before_the_exporter(speaks: bool):
    """Two requests, one client. If it sends a frame within ten seconds, it is the client of both; else one is an orphan
    that the exporter missed the beginning of."""
    bench = Bench()
    down, ups = bench.client(), [bench.upstream()]
    bench.now += 1.0
    down.recv_at = bench.now
    ups.append(bench.upstream())
    for n in range(14):
        for up in ups:
            bench.feed(up, down)
        if speaks and n == 6:
            bench.says(down, FRAME)
        view = bench.beat()
        assert n > 9 or no_orphan(bench)
    assert sorted(clients(view)) == ["connected", "connected" if speaks else "gone"]


# --- HTTP/3, unix-domain sockets, load balancers --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unseen", "told", "blind"),
    [
        (UnseenSockets((EDGE,), ()), None, True),
        (UnseenSockets((), ()), None, False),
        (UnseenSockets(None, None), None, None),
        (None, None, None),
        (UnseenSockets((EDGE,), ()), ProxySnapshot("envoy", h3_connections=0), False),
        (UnseenSockets((), ()), ProxySnapshot("envoy", h3_connections=2), True),
    ],
)
def test_clients_on_http3_have_no_socket_here(unseen, told, blind):
    """Where there are some, or may be, a request without a client is none that lost it; where it is not known whether
    the hop takes such clients, its own processes could not be looked into either."""
    bench = Bench()
    bench.unseen, bench.proxy = unseen, told
    bench.beat()
    up = bench.upstream()
    for _ in range(6):
        bench.feed(up, None)
        view = bench.beat()
    assert spots(view)["http3_clients"] is blind
    assert no_orphan(bench) is bool(blind)


@pytest.mark.parametrize("paths", [("/run/vllm.sock",), (), None])
def test_answers_from_nowhere(paths):
    """A client is served and nothing leads on: it is said when the hop is connected to a path, not known when it may
    not be looked into, and no blind spot otherwise (the proxy answers by itself)."""
    bench = Bench()
    bench.unseen = UnseenSockets((), paths)
    bench.beat()
    down = bench.client()
    for _ in range(4):
        bench.feed(Sock(0, 0, 0), down, size=2000)
        view = bench.beat()
    assert spots(view)["unix_upstream"] is (None if paths is None else bool(paths))
    assert clients(view) == []


@pytest.mark.parametrize(
    ("again", "addresses", "blind"), [(True, 1, True), (True, 8, False), (False, 1, False)], ids=str
)
def test_connections_that_are_kept_by_few(again: bool, addresses: int, blind: bool):
    """Eight connections, asked on again and again, from one address: something stands in front. From eight addresses
    they are users, and connections that are not asked on again say nothing."""
    bench = Bench()
    bench.beat()
    pairs = [(bench.client(), bench.upstream()) for _ in range(8)]
    rows = Sock.row
    hosts = {down.cookie: n % addresses for n, (down, _) in enumerate(pairs)}

    def row(self: Sock, now: float) -> np.ndarray:
        made = rows(self, now)
        made["dst_lo"] += hosts.get(self.cookie, 0)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sock, "row", row)
        for n in range(6):
            for down, up in pairs:
                if again and n % 2:
                    bench.says(down, 300)
                    up.sent, up.sent_at = up.sent + 160, bench.now
                bench.feed(up, down)
            view = bench.beat()
    assert spots(view)["load_balancer"] is blind
    assert no_orphan(bench)


def test_the_hop_before_is_no_load_balancer():
    """Where it is watched, who left is seen there."""
    bench = Bench(hops=("edge", "admit"))
    bench.beat()
    assert spots(bench.beat(), "admit")["load_balancer"] is False


def test_a_sign_is_remembered_for_a_while():
    """Clients come and go; five minutes after the last one on HTTP/2 nothing is said any more."""
    bench = Bench()
    bench.proxy = ProxySnapshot("haproxy", h2_connections=1, h2_streams=1)
    assert spots(bench.beat())["http2_clients"] is True
    bench.proxy = ProxySnapshot("haproxy", h2_connections=0, h2_streams=0)
    bench.now += SIGN_SECONDS - 2
    assert spots(bench.beat())["http2_clients"] is True
    bench.now += 2
    assert spots(bench.beat())["http2_clients"] is False


def test_without_sockets_little_is_known():
    """None, not False: what could not be looked at is not in order."""
    bench = Bench()
    bench.unseen = None
    view = bench.beat(readable=False)
    assert spots(view) == dict.fromkeys(BLIND_SPOTS)


# --- counts that leak -----------------------------------------------------------------------------------------------


def test_a_count_that_leaked_is_no_stream():
    """21 requests by the proxy's and the engine's gauges for 30 s, no client, no token: no stream, no gap, and the
    proxy's count is said to be stale."""
    bench = Bench()
    bench.proxy = ProxySnapshot("router", streams=21)
    bench.page = EnginePage(running=21.0, waiting=0.0, generation_tokens=36_496.0, finished=5.0, start_time=1.0)
    for _ in range(30):
        view = bench.beat()
    assert clients(view) == []
    tokens = view.engines[0].tokens
    assert (tokens.out, sum(tokens.orphaned.values()), tokens.unattributed) == (0.0, 0, 0.0)
    assert (view.proxies[0].streams, view.proxies[0].stale) == (21, True)
    bench.client()
    assert bench.beat().proxies[0].stale is False


# --- totals ---------------------------------------------------------------------------------------------------------


def reading_of(at: float, value: ProxySnapshot | None) -> Readings:
    return Readings(
        at=at,
        wall=0.0,
        topology=Topology(),
        sockets=Reading(0.0, error="-"),
        engines={},
        processes=Reading(0.0, error="-"),
        proxies={"edge": Reading(at, error="down") if value is None else Reading(at, value=value)},
    )


def total_of(told: Iterable[tuple[float, float, int] | None]) -> float | None:
    """What is published after a proxy told (at, uptime, clients that left), or could not be read."""
    memories: Mapping[str, ProxyMemory] = {}
    for each in told:
        at, value = (0.0, None) if each is None else (each[0], ProxySnapshot("haproxy", each[1], client_aborts=each[2]))
        memories = observe(memories, reading_of(at, value))
    return memories["edge"].client_aborts.grown if memories else None


HAPPENS = st.one_of(
    st.tuples(st.sampled_from(["leave", "wait"]), st.integers(1, 9)),
    st.tuples(st.sampled_from(["read", "unread", "restart"]), st.just(1)),
)


@given(st.lists(HAPPENS, max_size=40), st.integers(0, 5), st.integers(3, 90))
def test_the_total_of_a_proxy_is_what_it_counted_while_somebody_could_know(
    happened: list[tuple[str, int]], before: int, uptime: int
):
    """Whoever left between two readings is in it, whatever could not be read, however often the proxy was restarted;
    lost is what it had counted before a restart since it was read last, and what came before the first reading."""
    now, started, count, read = 100.0, 100.0 - uptime, before, None
    told: list[tuple[float, float, int] | None] = []
    total = None
    for what, much in [*happened, ("read", 1)]:
        now += much if what == "wait" else 0.01
        if what == "leave":
            count += much
        elif what == "restart":
            now += 3.0  # a proxy is up for a while, and takes one to start
            started, count, read = now, 0, None if read is None else 0
        elif what == "unread":
            told.append(None)
        elif what == "read":
            total = 0.0 if total is None else total + count - (read or 0)
            read = count
            told.append((now, float(int(now - started)), count))
    assert total_of(told) == total


@pytest.mark.parametrize(
    ("told", "total"),
    [
        pytest.param([(10, 50, 7), (11, 51, 7), (12, 52, 9)], 2, id="grows"),
        pytest.param([(10, 50, 7), None, (12, 0, 1)], 1, id="restarted, and one left before it was read again"),
        pytest.param([(10, 50, 7), None, (12, 0, 7)], 7, id="restarted, and as many left again"),
        pytest.param([(10, 50, 7), (12, 2, 9)], 9, id="restarted at once"),
        pytest.param([(10, 1, 2), (11.5, 1, 1)], 1, id="restarted, and was hardly up before"),
        pytest.param([(10, 1, 2), (11.5, 2, 1)], 0, id="hardly up, and counters were cleared"),
        pytest.param([(10, 1, 7), (11, 1, 8)], 1, id="an uptime is told in whole seconds"),
        pytest.param([(10, 500, 7), (12, 440, 8)], 1, id="the clock was set back"),
        pytest.param([(10, 500, 7), (12, 502, 2), (14, 504, 3)], 1, id="counters were cleared"),
        pytest.param([(10, None, 7), (12, None, 8), (14, None, 2)], 1, id="no uptime"),
    ],
)
def test_when_a_proxy_counts_anew(told: list[tuple[float, float, int] | None], total: float):
    """A restart is known by an uptime that is shorter than the time since; anything else that falls is a new base."""
    assert total_of(told) == total
