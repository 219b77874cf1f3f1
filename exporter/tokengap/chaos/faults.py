"""Faults as values: each is applied, proves that it was, is healed, and proves that it is gone.

A fault that did not apply makes every experiment pass, and one that stays spoils the next. So :meth:`Fault.applied` and
:meth:`Fault.healed` look at the thing itself (the process table, the kernel's counters, the engine), never at what was
asked for, and raise NotProven as long as it is not so.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias

import psutil

from tokengap.chaos.bench import GATEWAY, TARGET, Bench
from tokengap.chaos.gateways import Upstream
from tokengap.lab.network import Network
from tokengap.lab.nvml.fake import FakeNvml
from tokengap.lab.nvml.profiles import FakeGpu
from tokengap.sources.sockets import Sockets

Direction: TypeAlias = Literal["both", "to-engine", "to-gateway"]

#: The bit of NVML's reasons for which clocks are held down by hardware because of heat (nvml.h).
HW_THERMAL = 0x40

#: Seconds within which the kB that may go through before a network is cut have to.
BITES_WITHIN = 30.0

#: Bytes for each client who is not there that show that the gateway went on: some tokens, and more than are ever on
#: their way to one who is.
UNHEARD = 500


class NotProven(Exception):
    """What was to be shown is not so, or not yet. ``str()`` says what is there instead."""


class Fault(ABC):
    """One fault. ``apply`` and ``heal`` say in words what was done; healing what was not applied does nothing.

    ``kills``: parts that may end while it lasts. ``restarts``: the target's engine has to be started again.
    """

    kills: tuple[str, ...] = ()
    restarts = False

    @abstractmethod
    async def apply(self, bench: Bench) -> str:
        """Break it."""

    @abstractmethod
    async def applied(self, bench: Bench) -> str:
        """Say what shows that it is broken. Raises NotProven."""

    @abstractmethod
    async def heal(self, bench: Bench) -> str:
        """Mend it. May be called more than once, and before it was applied."""

    async def healed(self, bench: Bench) -> str:
        """Say what shows that it is whole again. Raises NotProven."""
        for name in bench.upstreams:
            if (status := await bench.health(name)) != 200:
                raise NotProven(f"/health of {name} says {status or 'nothing'}")
        return "every replica answers /health where the gateway reaches it"


def _prove(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotProven(otherwise)


# --- processes ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CoreKilled(Fault):
    """The core of one replica gets a signal, SIGBUS as from a full /dev/shm; its front end ends by itself."""

    number: signal.Signals = signal.SIGBUS
    load: float = 0.0
    core: psutil.Process | None = None
    kills = (TARGET,)
    restarts = True

    async def apply(self, bench: Bench) -> str:
        """Send the signal."""
        self.core = bench.core(TARGET)
        name = self.core.name()  # afterwards it may have none
        self.core.send_signal(self.number)
        return f"{self.number.name} to process {self.core.pid} ({name}), the core of replica {TARGET}"

    async def applied(self, _: Bench) -> str:
        """Look for the process: a handler may have caught the signal, and process 1 of a container ignores it."""
        assert self.core is not None
        _prove(not alive(self.core), f"process {self.core.pid} is still there")
        return f"process {self.core.pid} is gone"

    async def heal(self, bench: Bench) -> str:
        """Start the replica again, as its supervisor would."""
        if self.core is None or alive(self.core):
            return "nothing to heal"
        await bench.start(bench.replica(TARGET, self.load))
        return f"replica {TARGET} was started again"


@dataclass(slots=True)
class ColdRestart(Fault):
    """One replica is killed whole and started at once, and loads its model for so many seconds."""

    load: float = 10.0
    core: psutil.Process | None = None
    starting: asyncio.Task[None] | None = None
    kills = (TARGET,)
    restarts = True

    async def apply(self, bench: Bench) -> str:
        """Kill it and start it."""
        self.core = bench.core(TARGET)
        bench.newest[TARGET].signal(signal.SIGKILL)
        self.starting = asyncio.create_task(bench.start(bench.replica(TARGET, self.load)))
        return f"SIGKILL to replica {TARGET}, which is started again and loads its model for {self.load:g} s"

    async def applied(self, bench: Bench) -> str:
        """Look for its core, and ask for its health."""
        assert self.core is not None
        _prove(not alive(self.core), f"process {self.core.pid} is still there")
        return f"process {self.core.pid} is gone; /health says {await bench.health(TARGET) or 'nothing'}"

    async def heal(self, _: Bench) -> str:
        """Wait until the model is loaded."""
        if self.starting is None:
            return "nothing to heal"
        await self.starting
        return f"replica {TARGET} has loaded its model"


@dataclass(slots=True)
class CoreStopped(Fault):
    """The core of one replica is stopped (SIGSTOP): its page stands still, and its /health says 200."""

    core: psutil.Process | None = None

    async def apply(self, bench: Bench) -> str:
        """Stop it."""
        self.core = bench.core(TARGET)
        self.core.suspend()
        return f"SIGSTOP to process {self.core.pid}, the core of replica {TARGET}"

    async def applied(self, bench: Bench) -> str:
        """Look at the state of the process, and ask for its health."""
        assert self.core is not None
        _prove(self.core.status() == psutil.STATUS_STOPPED, f"process {self.core.pid} is {self.core.status()}")
        return f"process {self.core.pid} is stopped; /health of {TARGET} says {await bench.health(TARGET) or 'nothing'}"

    async def heal(self, _: Bench) -> str:
        """Let it go on."""
        if self.core is None:
            return "nothing to heal"
        with contextlib.suppress(psutil.NoSuchProcess):
            self.core.resume()
        return f"SIGCONT to process {self.core.pid}"

    async def healed(self, bench: Bench) -> str:
        """Look at the state of the process again."""
        assert self.core is not None
        _prove(self.core.is_running() and self.core.status() != psutil.STATUS_STOPPED, "the core is still stopped")
        return await Fault.healed(self, bench)


@dataclass(slots=True)
class PartKilled(Fault):
    """The gateway, or the exporter, is killed, and started again by :meth:`heal`: meanwhile connections are refused."""

    part: str = GATEWAY
    kills: tuple[str, ...] = ()
    broken: bool = False

    def __post_init__(self) -> None:
        self.kills = (self.part,)

    async def apply(self, bench: Bench) -> str:
        """Kill it."""
        self.broken = True
        bench.newest[self.part].signal(signal.SIGKILL)
        return f"SIGKILL to the {self.part}"

    async def applied(self, bench: Bench) -> str:
        """Look whether it has ended."""
        _prove(bench.newest[self.part].ended, f"the {self.part} is still there")
        return f"the {self.part}'s process is gone"

    async def heal(self, bench: Bench) -> str:
        """Start it again."""
        if not self.broken or not bench.newest[self.part].ended:
            return "nothing to heal"
        await bench.start(bench.newest[self.part].part)
        return f"the {self.part} was started again"


def alive(process: psutil.Process) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- networks -------------------------------------------------------------------------------------------------------


def cut_rules(upstream: Upstream, direction: Direction, how: Literal["drop", "reset"], after_kb: int | None) -> str:
    """Return nft rules that cut the network between the gateway and a replica, on arrival, and count what they hit.

    ``direction`` is that of the packets. ``after_kb``: only once so many kB have gone that way. Resets are let through:
    a rule that answers a packet with one would take it away again.
    """
    verdict = "drop" if how == "drop" else "reject with tcp reset"
    quota = "" if after_kb is None else f"quota over {after_kb} kbytes "
    ways = {
        "to-engine": f"ip daddr {upstream.address} tcp dport {upstream.port}",
        "to-gateway": f"ip saddr {upstream.address} tcp sport {upstream.port}",
    }
    rules = "\n".join(
        f"        {match} {quota}counter {verdict}" for way, match in ways.items() if direction in ("both", way)
    )
    resets = "        tcp flags & rst == rst accept\n" if how == "reset" else ""
    return f"""\
table inet chaos {{
    chain arrives {{
        type filter hook input priority -10;
{resets}{rules}
    }}
}}
"""


@dataclass(slots=True)
class Cut(Fault):
    """The network between the gateway and one replica is cut, in both directions or one: packets are dropped, and
    nobody is told, or answered with a reset."""

    direction: Direction = "both"
    how: Literal["drop", "reset"] = "drop"
    after_kb: int | None = None
    unheard: int = 0

    async def apply(self, bench: Bench) -> str:
        """Put the rules in. Where so much may go through before, wait for it: until then nothing is broken."""
        network = _network(bench)
        await network.run(cut_rules(bench.upstreams[TARGET], self.direction, self.how, self.after_kb))
        if self.after_kb is not None:
            await _bites(network)
        after = "" if self.after_kb is None else f", now that {self.after_kb} kB have gone through"
        what = "dropped" if self.how == "drop" else "answered with a reset"
        return f"packets between the gateway and replica {TARGET} are {what} ({self.direction}){after}"

    async def applied(self, bench: Bench) -> str:
        """Ask the kernel how many packets were hit, and how much the replica sent that nobody acknowledged."""
        packets = await _packets(_network(bench))
        _prove(packets > 0, "no packet was hit")
        if self.how == "reset":
            return f"{packets} packets were answered with a reset"
        self.unheard = max(self.unheard, await asyncio.to_thread(_queued, bench.upstreams[TARGET].port))
        _prove(self.unheard > 0, f"{packets} packets were dropped, and yet nothing waits in the replica's sockets")
        return f"{packets} packets were dropped; up to {self.unheard:,} bytes waited in the replica's sockets"

    async def heal(self, bench: Bench) -> str:
        """Take the rules out."""
        network = _network(bench)
        if not await _there(network):
            return "nothing to heal"
        await network.run("delete table inet chaos")
        return "the rules were taken out"

    async def healed(self, bench: Bench) -> str:
        """Look whether the rules are gone."""
        _prove(not await _there(_network(bench)), "the rules are still there")
        return await Fault.healed(self, bench)


def _network(bench: Bench) -> Network:
    assert bench.network is not None, "an experiment that cuts a network has one of its own"
    return bench.network


async def _there(network: Network) -> bool:
    return any(item.get("table", {}).get("name") == "chaos" for item in await network.tell("list", "tables"))


async def _packets(network: Network) -> int:
    return sum(
        expression["counter"]["packets"]
        for item in await network.tell("list", "table", "inet", "chaos")
        for expression in item.get("rule", {}).get("expr", ())
        if "counter" in expression
    )


async def _bites(network: Network) -> None:
    """Wait for the first packet that is hit. Where none is in time, whoever asks for the proof is told."""
    deadline = time.monotonic() + BITES_WITHIN
    while not await _packets(network):
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.05)


def _queued(port: int) -> int:
    """Return how many bytes wait in the sockets that serve a port."""
    sockets = Sockets(events=False)
    try:
        rows = sockets.snapshot(frozenset({port}), frozenset()).open
    finally:
        sockets.close()
    return int(rows["wqueue"].sum())


@dataclass(slots=True)
class ClientsVanish(Fault):
    """Some clients are cut off from the network in the middle of their streams; nobody is told."""

    count: int = 6
    after: float = 2.0
    tokens: int = 400
    came: bool = False
    unheard: int = 0

    async def apply(self, bench: Bench) -> str:
        """Let them come, and vanish."""
        self.came = True
        await bench.crowd.visit(self.count, "vanish", self.after, self.count, self.tokens)
        return f"{self.count} clients came, and were cut off after {self.after:g} s"

    async def applied(self, bench: Bench) -> str:
        """Ask who is cut off, and whether the gateway went on sending: bytes that nobody acknowledged."""
        told = await _network(bench).tell("list", "set", "inet", "lab", "gone")
        ports: list[int] = next((item["set"].get("elem", []) for item in told if "set" in item), [])
        _prove(len(ports) >= self.count, f"{len(ports)} clients are cut off")
        self.unheard = max(self.unheard, await asyncio.to_thread(_queued, bench.gateway.ports[0]))
        _prove(self.unheard >= UNHEARD * self.count, "the gateway has sent them nothing since")
        return (
            f"{len(ports)} clients are cut off; up to {self.unheard:,} bytes waited for them in the gateway's sockets"
        )

    async def heal(self, bench: Bench) -> str:
        """Cut nobody off any more; those who vanished do not come back."""
        if not self.came:
            return "nothing to heal"
        await _network(bench).mend()
        return "nobody is cut off any more"


# --- clients --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Storm(Fault):
    """The exercise of the article, again and again: ``count`` clients come at once, and ``leavers`` of them leave."""

    count: int = 20
    leavers: int = 8
    after: float = 1.5
    every: float = 5.0
    tokens: int = 60
    over: asyncio.Event = field(default_factory=asyncio.Event)
    storming: asyncio.Task[None] | None = None

    async def apply(self, bench: Bench) -> str:
        """Begin."""
        self.storming = asyncio.create_task(self._storm(bench))
        return f"{self.count} clients come every {self.every:g} s, and {self.leavers} leave after {self.after:g} s"

    async def _storm(self, bench: Bench) -> None:
        async with asyncio.TaskGroup() as rounds:
            while not self.over.is_set():
                rounds.create_task(bench.crowd.visit(self.count, "rst", self.after, self.leavers, self.tokens))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.every):
                        await self.over.wait()

    async def applied(self, bench: Bench) -> str:
        """Count who left."""
        left = sum(attempt.end == "left" for ask in bench.crowd.asks for attempt in ask.attempts)
        _prove(left >= self.leavers, f"{left} clients have left")
        return f"{left} clients have left in the middle of their answers"

    async def heal(self, _: Bench) -> str:
        """Let nobody come any more, and wait for those who are here."""
        if self.storming is None:
            return "nothing to heal"
        self.over.set()
        await self.storming
        return "nobody comes any more who leaves"


# --- engines --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slow(Fault):
    """One replica generates at a part of its speed."""

    factor: float = 0.25

    async def apply(self, bench: Bench) -> str:
        """Slow it down."""
        rate = bench.plan.knobs.rate * self.factor
        await bench.engine(TARGET).turn(rate=rate)
        return f"replica {TARGET} generates {rate:g} tokens a second for each stream, {self.factor:.0%} of what it did"

    async def applied(self, bench: Bench) -> str:
        """Measure what it generates."""
        measured = await _speed(bench)
        limit = bench.plan.knobs.rate * (1 + self.factor) / 2
        _prove(measured < limit, f"it generates {measured:.1f} tokens a second for each stream")
        return f"it generates {measured:.1f} tokens a second for each stream"

    async def heal(self, bench: Bench) -> str:
        """Let it run as before."""
        await bench.engine(TARGET).turn(**asdict(bench.plan.knobs))
        return f"replica {TARGET} runs as before"

    async def healed(self, bench: Bench) -> str:
        """Measure again."""
        measured = await _speed(bench)
        limit = bench.plan.knobs.rate * (1 + self.factor) / 2
        _prove(measured > limit, f"it still generates {measured:.1f} tokens a second for each stream")
        return f"it generates {measured:.1f} tokens a second for each stream"


async def _speed(bench: Bench, seconds: float = 0.6) -> float:
    """Return the tokens a second of each stream that was decoding there all the while."""
    engine = bench.engine(TARGET)
    before = await engine.truth(since=time.monotonic())
    await asyncio.sleep(seconds)
    after = await engine.truth(since=time.monotonic())
    rates = [
        (request.generated - before.requests[name].generated) / (after.now.at - before.now.at)
        for name, request in after.requests.items()
        if request.state == "running" and name in before.requests and before.requests[name].generated
    ]
    _prove(bool(rates), "no stream is decoding there")
    return sum(rates) / len(rates)


# --- GPUs -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GpuLost(Fault):
    """The GPU of one replica falls off the bus, or its driver does not answer any more; the engine answers on."""

    how: Literal["lost", "hangs"] = "lost"

    async def apply(self, bench: Bench) -> str:
        """Let NVIDIA's library say so."""
        nvml = _nvml(bench)
        if self.how == "lost":
            nvml.xid(0, 79)
            nvml.lose(0)
            return f"the GPU of replica {TARGET} has fallen off the bus (XID 79)"
        nvml.hang("nvmlDeviceGetUtilizationRates")
        return "the driver does not answer any more"

    async def applied(self, bench: Bench) -> str:
        """Ask what the exporter reads."""
        up = bench.looks[-1].gpus_up
        lost = _nvml(bench).gpus[0].uuid
        if self.how == "lost":
            _prove(up.get(lost) == 0, f"tokengap_gpu_up is {up.get(lost)}")
            return f"tokengap_gpu_up of {lost} is 0; /health of {TARGET} says {await bench.health(TARGET)}"
        _prove(not any(up.values()), f"{sum(up.values()):g} GPUs are up")
        return f"no GPU is up; /health of {TARGET} says {await bench.health(TARGET)}"

    async def heal(self, bench: Bench) -> str:
        """Let it answer again."""
        _nvml(bench).say()
        return "the GPU is back"

    async def healed(self, bench: Bench) -> str:
        """Ask what the exporter reads."""
        up = bench.looks[-1].gpus_up
        _prove(len(up) == len(bench.upstreams) and all(up.values()), f"GPUs that are up: {up}")
        return "every GPU is up"


@dataclass(slots=True)
class GpuThrottled(Fault):
    """The GPU of one replica is too hot: its clocks are held down, and its engine is slower."""

    factor: float = 0.7
    cool: tuple[FakeGpu, ...] = ()
    heating: asyncio.Task[None] | None = None
    before: float = 0.0

    async def apply(self, bench: Bench) -> str:
        """Let NVIDIA's library say so, and slow the engine down as it would be."""
        nvml = _nvml(bench)
        self.cool = nvml.gpus
        self.before = sum(bench.looks[-1].throttled.values())
        await bench.engine(TARGET).turn(rate=bench.plan.knobs.rate * self.factor)
        self.heating = asyncio.create_task(self._heat(bench))
        return f"the GPU of replica {TARGET} is at 95 °C and held down; its engine runs at {self.factor:.0%}"

    async def _heat(self, bench: Bench) -> None:
        began = time.monotonic()
        while True:
            hot, *others = self.cool
            held = time.monotonic() - began
            hot = replace(hot, temperature=95, sm_mhz=690, reasons=HW_THERMAL, hw_thermal=hot.hw_thermal + held)
            _nvml(bench).set(hot, *others)
            await asyncio.sleep(0.25)

    async def applied(self, bench: Bench) -> str:
        """Ask what the exporter reads."""
        seconds = sum(bench.looks[-1].throttled.values()) - self.before
        _prove(seconds > 0, "no second of throttling is counted")
        return f"the exporter counts {seconds:.1f} s of throttling"

    async def heal(self, bench: Bench) -> str:
        """Let it cool."""
        if self.heating is None:
            return "nothing to heal"
        self.heating.cancel()
        await asyncio.gather(self.heating, return_exceptions=True)
        hot, *others = _nvml(bench).gpus
        _nvml(bench).set(replace(self.cool[0], hw_thermal=hot.hw_thermal), *others)
        await bench.engine(TARGET).turn(**asdict(bench.plan.knobs))
        return "the GPU is cool, the engine runs as before"

    async def healed(self, bench: Bench) -> str:
        """Ask twice: the count stands still."""
        before = sum(bench.looks[-1].throttled.values())
        await asyncio.sleep(3.0)
        _prove(sum(bench.looks[-1].throttled.values()) == before, "seconds of throttling are still counted")
        return "no more throttling is counted"


def _nvml(bench: Bench) -> FakeNvml:
    assert bench.nvml is not None, "an experiment with GPUs has some"
    return bench.nvml
