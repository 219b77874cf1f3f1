"""A small world in simulated time, told as the kernel and an engine would tell it.

It makes what the join reads (socket rows with ages, counters, final rows of closed sockets, an engine's page) from
users, one proxy and one engine, and keeps the truth. No real time passes, so hypothesis can try hundreds of histories.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tokengap.readings import (
    CLOSE_WAIT,
    ESTABLISHED,
    SOCKET,
    TIMER_RETRANSMIT,
    EnginePage,
    ProcessTable,
    Reading,
    Readings,
    SocketSnapshot,
)
from tokengap.topology import Endpoint, Engine, Hop, Topology

EDGE, ADMIT, WORKER = 8080, 8090, 8100
TICK = 0.01
LOOPBACK = 0x0000FFFF_7F000001


@dataclass
class Sock:
    """One simulated socket; instants in world seconds."""

    cookie: int
    sport: int
    dport: int
    sent: int = 0
    acked: int = 0
    received: int = 0
    wqueue: int = 0
    sent_at: float = 0.0
    recv_at: float = 0.0
    ack_at: float = 0.0
    state: int = ESTABLISHED
    timer: int = 0
    retransmits: int = 0
    closed: bool = False
    ended_at: float | None = None  # when it was destroyed: its ages are those of then

    def row(self, now: float) -> np.ndarray:
        row = np.zeros(1, dtype=SOCKET)
        row["cookie"] = row["inode"] = self.cookie
        row["src_lo"] = row["dst_lo"] = LOOPBACK
        row["sport"], row["dport"] = self.sport, self.dport
        row["state"], row["timer"], row["retransmits"] = self.state, self.timer, self.retransmits
        row["backoff"] = self.retransmits
        row["rto_us"] = 200_000 * 2**self.retransmits
        row["wqueue"] = self.wqueue
        row["bytes_sent"], row["bytes_acked"], row["bytes_received"] = self.sent, self.acked, self.received
        for column, instant in (
            ("last_data_sent", self.sent_at),
            ("last_data_recv", self.recv_at),
            ("last_ack_recv", self.ack_at),
        ):
            row[column] = round(((self.ended_at or now) - instant) * 250) * 4  # kernel ticks of 4 ms
        return row


def mirror(row: np.ndarray) -> np.ndarray:
    """Return the other end of a connection, as its host's kernel shows it."""
    other = row.copy()
    other["cookie"] += 1_000_000
    other["inode"] += 1_000_000
    other["sport"], other["dport"] = row["dport"], row["sport"]
    other["bytes_sent"] = other["bytes_acked"] = row["bytes_received"]
    other["bytes_received"] = row["bytes_sent"]
    other["last_data_sent"], other["last_data_recv"] = row["last_data_recv"], row["last_data_sent"]
    return other


@dataclass
class Person:
    """A user's plan and what became of it.

    ``leaves``: seconds after asking; ``how``: fin, vanish or half-close. ``via``: "edge"; or past it to the engine,
    from a "local" process (both ends of the connection are on this host) or a "remote" host (one end is), or "unseen"
    (neither is).
    """

    asks: float
    tokens: int
    leaves: float | None = None
    how: str = "fin"
    stream: bool = True
    via: str = "edge"
    got: int = 0
    generated: int = 0
    down: Sock | None = None
    up: Sock | None = None
    middle: tuple[Sock, Sock] | None = None  # the two ends of the connection between two hops
    gone: bool = False
    done: bool = False
    running_since: float | None = None
    dropped: bool = False
    corked: list[tuple[int, int]] = field(default_factory=list)  # bytes and tokens in the socket towards the user

    @property
    def active(self) -> bool:
        return self.up is not None and not self.done and not self.dropped


@dataclass
class World:
    """Users, a proxy (or with ``chain`` two in a row) and an engine with ``slots``.

    ``leaks``: "edge" or "admit" (that hop reads on), "held" (the edge reads on and keeps the dead client's socket in
    CLOSE-WAIT), "reset" (the same, and the client resets: its socket is in no table, and its end is told when the edge
    closes it), "engine" (generates on for closed connections), or None. ``corks``: so many tokens wait in the socket
    towards each user until more come, as with HAProxy. ``pool``: upstream connections are kept and
    used again. ``header_first``: the answer's header comes with the acceptance, not with the first token, as from vLLM.
    ``local``: the engine is on this host, so its accepted sockets are seen too. ``polls``: bytes of a page
    that something on this host fetches from the engine twice a second over one connection. ``shuffle``: a seed; the
    requests of one burst go on from the proxy, and into the engine's queue, in another order than they came. ``slow``:
    seconds for which the proxy holds a request before it sends it on.
    """

    people: list[Person]
    slots: int = 1
    rate: float = 50.0
    prefill: float = 0.1
    leaks: str | None = None
    corks: int = 0
    chain: bool = False
    pool: bool = False
    local: bool = False
    polls: int = 0
    chunk: int = 220
    header: int = 180
    header_first: bool = True
    skew: float = 0.01
    shuffle: int | None = None
    slow: float = 0.0
    now: float = 1000.0
    generated: int = 0
    finished: int = 0
    finished_tokens: int = 0
    closed: list[Sock] = field(default_factory=list)
    cookies: int = 1
    ports: int = 40000
    debt: float = 0.0
    idle: list[Sock] = field(default_factory=list)
    poller: Sock | None = None

    def __post_init__(self) -> None:
        self.start = self.now
        self.order = list(self.people)
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(self.order)
        self.place = {id(person): n for n, person in enumerate(self.order)}
        self.topology = Topology(
            engines=(Engine("worker", f"http://127.0.0.1:{WORKER}", (Endpoint(None, WORKER),)),),
            hops=(
                Hop("edge", (Endpoint(None, EDGE),), ("admit" if self.chain else "worker",)),
                *((Hop("admit", (Endpoint(None, ADMIT),), ("worker",)),) if self.chain else ()),
            ),
        )

    def _socket(self, sport: int, dport: int) -> Sock:
        self.cookies += 1
        return Sock(self.cookies, sport, dport, sent_at=self.now, recv_at=self.now, ack_at=self.now)

    def _close(self, sock: Sock | None) -> None:
        if sock is not None and not sock.closed:
            sock.closed, sock.ended_at = True, self.now
            self.closed.append(sock)

    def _poll(self) -> None:
        if self.poller is None:
            self.poller = self._socket(39999, WORKER)
        if (self.now - self.start) % 0.5 < TICK:
            self.poller.sent, self.poller.sent_at = self.poller.sent + 120, self.now
            self.poller.received, self.poller.recv_at = self.poller.received + self.polls, self.now

    def tick(self) -> None:
        self.now += TICK
        if self.polls:
            self._poll()
        clock = self.now - self.start
        for person in self.people:
            if person.down is None and person.up is None and clock >= person.asks:
                self._arrive(person)
        asking = [p for p in self.people if p.up is None and not p.dropped and clock >= p.asks + self.slow]
        for person in sorted(asking, key=lambda p: self.place[id(p)]):
            self._ask(person)
        for person in self.people:
            stays = person.leaves is None or person.gone or not person.active
            if not stays and clock >= person.asks + (person.leaves or 0.0):
                self._leave(person)
        self._generate()
        for person in self.people:
            down = person.down
            if down is not None and not down.closed and down.timer == TIMER_RETRANSMIT:
                down.retransmits = int(np.log2(max((self.now - down.ack_at) / 0.2, 1.0)))

    def _arrive(self, person: Person) -> None:
        self.ports += 3
        if person.via == "edge":
            person.down = self._socket(EDGE, self.ports)
            person.down.received, person.down.recv_at = 150, self.now

    def _ask(self, person: Person) -> None:
        self.ports += 3
        person.up = self.idle.pop() if self.idle else self._socket(self.ports + 1, WORKER)
        person.up.sent, person.up.sent_at = person.up.sent + 160, self.now
        if self.chain and person.via == "edge":
            out, in_ = self._socket(self.ports + 2, ADMIT), self._socket(ADMIT, self.ports + 2)
            out.sent, in_.received = 155, 155
            person.middle = (out, in_)
        if self.header_first and person.stream:
            self._deliver(person, self.header, 0)

    def _leave(self, person: Person) -> None:
        if person.down is None:
            person.gone = True
            self._close(person.up)
            person.dropped = self.leaks != "engine"
            return
        if person.how == "half-close":
            person.down.state = CLOSE_WAIT
            person.gone = False
            person.leaves = None
            return
        person.gone = True
        if person.how == "vanish":
            person.down.timer = TIMER_RETRANSMIT
            return
        if self.leaks == "held":
            person.down.state, person.down.received = CLOSE_WAIT, person.down.received + 1
            person.down.ack_at = self.now
            return
        if self.leaks == "reset":
            person.down.closed = True
            return
        self._close(person.down)
        if self.leaks == "edge":
            return
        for sock in person.middle or ():
            self._close(sock)
        if self.leaks == "admit":
            return
        self._close(person.up)
        person.dropped = self.leaks != "engine"

    def _generate(self) -> None:
        """Run the engine for one tick: prefill, then every running sequence one token a step."""
        queue = [p for p in self.order if p.up is not None and not p.done and not p.dropped]
        running = [p for p in queue if p.running_since is not None]
        for person in queue:
            if len(running) >= self.slots:
                break
            if person.running_since is None:
                person.running_since = self.now
                running.append(person)
        self.debt += self.rate * TICK
        if self.debt < 1:
            return
        self.debt -= 1
        for person in running:
            if self.now - (person.running_since or 0.0) >= self.prefill:
                self._token(person)

    def _token(self, person: Person) -> None:
        self.generated += 1
        person.generated += 1
        last = person.generated >= person.tokens
        if person.stream:
            header = self.header if person.generated == 1 and not self.header_first else 0
            self._deliver(person, self.chunk + header, 1)
        elif last:
            self._deliver(person, self.header + 300 + 5 * person.tokens, person.tokens)
        if last:
            self._finish(person)

    def _deliver(self, person: Person, size: int, tokens: int) -> None:
        up, down = person.up, person.down
        assert up is not None
        if up.closed:
            return
        up.received, up.recv_at = up.received + size, self.now
        if down is None:
            person.got += tokens
            return
        if person.middle is not None and not person.middle[0].closed:
            out, in_ = person.middle
            in_.sent, in_.acked, in_.sent_at, in_.ack_at = in_.sent + size, in_.acked + size, self.now, self.now
            out.received, out.recv_at = out.received + size, self.now
        held = down.state == CLOSE_WAIT and person.gone
        if not down.closed and not held:
            down.sent, down.sent_at = down.sent + size, self.now
            down.wqueue += size
            if not person.gone:  # else it vanished: written, never acknowledged
                person.corked.append((size, tokens))
                self._pull(person, self.corks)

    def _pull(self, person: Person, corks: int) -> None:
        """Let a user take what its socket has, but for so many tokens."""
        down = person.down
        while down is not None and not down.closed and len(person.corked) > corks:
            size, tokens = person.corked.pop(0)
            down.wqueue, down.acked, down.ack_at = down.wqueue - size, down.acked + size, self.now
            person.got += tokens

    def _finish(self, person: Person) -> None:
        person.done = True
        self.finished += 1
        self.finished_tokens += person.generated
        assert person.up is not None
        if not person.gone:
            self._pull(person, 0)
        if self.pool and not person.up.closed:
            self.idle.append(person.up)
        else:
            self._close(person.up)
        for sock in person.middle or ():
            self._close(sock)
        if self.leaks == "reset" and person.gone and person.down is not None:
            person.down.ended_at = self.now
            self.closed.append(person.down)
        elif not (person.gone and person.how == "vanish"):
            self._close(person.down)

    def beats(self, seconds: float, *, interval: float = 1.0, events: bool = True) -> Iterator[Readings]:
        """Yield the readings of each beat for so many seconds, until everything has ended, and two beats more."""
        rest = 3
        due = self.now
        while self.now - self.start < seconds and rest:
            while self.now < due:
                self.tick()
            due += interval
            yield self.readings(events=events)
            idle = all(p.done or p.dropped for p in self.people)
            rest = rest - 1 if idle else 3

    def readings(self, *, events: bool = True) -> Readings:
        at = self.now
        ups = [p.up for p in self.people if p.up is not None and p.via in ("edge", "local")] + self.idle
        near = {id(s): s for p in self.people for s in (p.down, *(p.middle or ())) if s is not None}
        near |= {id(s): s for s in [*ups, self.poller] if s is not None}
        far = [p.up for p in self.people if p.up is not None and p.via == "remote"]
        if self.local:
            far += [s for s in near.values() if s.dport == WORKER]
        hidden = {id(p.up) for p in self.people if p.via in ("remote", "unseen")}
        empty = np.zeros(0, dtype=SOCKET)
        open_rows = [s.row(at) for s in near.values() if not s.closed]
        open_rows += [mirror(s.row(at)) for s in {id(s): s for s in far}.values() if not s.closed]
        gone_rows = [s.row(at) for s in self.closed if id(s) not in hidden]
        gone_rows += [mirror(s.row(at)) for s in self.closed if id(s) in {id(f) for f in far}]
        open_ = np.concatenate([empty, *open_rows])
        closed = np.concatenate([empty, *gone_rows]) if events else empty
        closed["state"] = 7
        self.closed = []
        snapshot = SocketSnapshot(open_, closed, "sock_diag", events)
        for _ in range(round(self.skew / TICK)):  # the pages are read a little after the sockets
            self.tick()
        queue = [p for p in self.people if p.up is not None and not p.done and not p.dropped]
        page = EnginePage(
            running=float(sum(p.running_since is not None for p in queue)),
            waiting=float(sum(p.running_since is None for p in queue)),
            generation_tokens=float(self.generated),
            finished=float(self.finished),
            finished_tokens=float(self.finished_tokens),
            start_time=1.0,
            models=("m",),
            ranks=1,
        )
        return Readings(
            at=at,
            wall=1.7e9 + at,
            topology=self.topology,
            sockets=Reading(at, value=snapshot),
            engines={"worker": Reading(self.now, value=page)},
            processes=Reading(at, value=ProcessTable(owners=self.owners)),
        )

    @property
    def owners(self) -> dict[int, str]:
        """Whose upstream sockets are whose: what a walk of the process table would answer."""
        last = "admit" if self.chain else "edge"
        owners = {p.up.cookie: last if p.via == "edge" else "" for p in self.people if p.up is not None}
        owners |= {p.middle[0].cookie: "edge" for p in self.people if p.middle is not None}
        return owners | ({self.poller.cookie: ""} if self.poller is not None else {})

    @property
    def truth(self) -> dict[str, int]:
        """Tokens generated, received by users, and neither."""
        got = sum(p.got for p in self.people)
        return {"out": self.generated, "useful": got, "gap": self.generated - got}
