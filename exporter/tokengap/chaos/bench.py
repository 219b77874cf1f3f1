"""What is broken: two replicas behind a real gateway, clients, and the exporter on all of it.

::

    clients --> gateway (HAProxy, nginx, Envoy, admit) --+--> a 127.0.1.1  front end, core
                                                         +--> b 127.0.1.2  front end, core
    tokengap serve ------------------- sockets, pages ---+

Each is a program of its own on loopback. Where a network has to be cut, all of it lives in a network namespace of its
own (:mod:`tokengap.lab.network`), so that nothing else on this host can be hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Never

import aiohttp
import psutil
import yaml

from tokengap.chaos.clients import Crowd, Load, Retries
from tokengap.chaos.gateways import Upstream, gateway_part
from tokengap.chaos.looks import Look, read_look
from tokengap.chaos.replica import replica_part
from tokengap.errors import SetupError
from tokengap.lab.batching import Knobs
from tokengap.lab.network import Network
from tokengap.lab.nvml.fake import FakeNvml, compile_library
from tokengap.lab.nvml.profiles import H100, many
from tokengap.lab.parts import LOOPBACK, Part, RunningPart, free_ports, running
from tokengap.lab.proxies import ADMIT
from tokengap.lab.scrape import Exporter
from tokengap.lab.stage import Stage, exporter_part, staged
from tokengap.lab.truth import EngineControl

#: The replica that is broken, and the one that is left.
TARGET, OTHER = "a", "b"

#: The names of the gateway and of the exporter among the parts.
GATEWAY, EXPORTER = "gateway", "exporter"

#: The exporter's page is read twice a beat (1 s).
LOOK_EVERY = 0.5

#: What vLLM's core shows as in the process tree, of which the kernel keeps 15 bytes.
CORE = "VLLM::EngineCore"[:15]


#: A replica has slots for all users, so that one can stand in for both. A first token takes a second: long enough that
#: moving to another replica at once does not double it.
KNOBS = Knobs(max_num_seqs=24, rate=20.0, prefill_rate=800.0)
LOAD, RETRIES = Load(), Retries()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is put up. ``read_timeout`` is the gateway's, ``window`` the exporter's, in seconds; ``gpus``: with a GPU
    for each replica, as a stand-in for NVIDIA's library tells of it."""

    through: str = "haproxy"
    load: Load = LOAD
    retries: Retries = RETRIES
    knobs: Knobs = KNOBS
    read_timeout: float = 5.0
    window: float = 3.0
    seed: int = 0
    gpus: bool = False


def core_of(pid: int) -> psutil.Process:
    """Return the core process of the vLLM server, or stand-in, that has this process id.

    It is looked for in the process tree: a pattern of command lines that matches nothing kills nothing, and nobody
    notices. Raises SetupError when there is none.
    """
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        raise SetupError(f"there is no process {pid}") from None
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(CORE):
                return process
    names = ", ".join(sorted({process.name() for process in below})) or "nothing"
    raise SetupError(f"below process {pid} there is no {CORE}...; there is {names}")


@dataclass(slots=True)
class Bench:
    """The running bench, and what was seen of it so far. ``newest`` are parts by name, as they were started last."""

    plan: Plan
    directory: Path
    upstreams: Mapping[str, Upstream]
    crowd: Crowd
    exporter: Exporter
    session: aiohttp.ClientSession
    network: Network | None
    nvml: FakeNvml | None
    newest: dict[str, RunningPart]
    gateway: Part
    looks: list[Look] = field(default_factory=list)
    _later: AsyncExitStack = field(default_factory=AsyncExitStack)

    def where(self) -> str:
        """Say where it can be looked at."""
        inside = "" if self.network is None else f" (in its own network: nsenter --net=/proc/{os.getpid()}/ns/net)"
        return f"clients call {LOOPBACK}:{self.gateway.ports[0]}, the exporter is {self.exporter.url}{inside}"

    def engine(self, name: str) -> EngineControl:
        """Return the ``/lab/`` side of a replica."""
        return EngineControl(self.upstreams[name].port)

    def core(self, name: str) -> psutil.Process:
        """Return the core process of a replica."""
        return core_of(self.newest[name].pid)

    async def start(self, part: Part) -> None:
        """Start a part again that has ended, or end it first."""
        await self.newest[part.name].stop()
        self.newest[part.name] = await self._later.enter_async_context(running(part, self.directory))

    def replica(self, name: str, load: float = 0.0) -> Part:
        """Return the part of a replica."""
        upstream = self.upstreams[name]
        seed = self.plan.seed + sum(map(ord, name))
        return replica_part(name, upstream.port, (LOOPBACK, upstream.address), self.plan.knobs, seed=seed, load=load)

    async def health(self, name: str) -> int | None:
        """Return what ``/health`` of a replica says where the gateway reaches it, None when it does not answer."""
        upstream = self.upstreams[name]
        try:
            async with self.session.get(
                f"http://{upstream.address}:{upstream.port}/health", timeout=aiohttp.ClientTimeout(total=1.0)
            ) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def look_for_ever(self, spared: Collection[str]) -> Never:
        """Read the exporter's page again and again. Raises SetupError when it is not there, unless it is spared."""
        due = time.monotonic()
        while True:
            try:
                look = await self.exporter.read(read_look)
            except SetupError:
                if EXPORTER not in spared:
                    raise
            else:
                if not self.looks or look.at > self.looks[-1].at + 0.1:  # the same beat again, but for the clocks
                    self.looks.append(look)
            due += LOOK_EVERY
            await asyncio.sleep(due - time.monotonic())

    async def guard(self, spared: Collection[str]) -> Never:
        """Raise SetupError when a part ends that nobody broke."""
        await Stage(tuple(self.newest.values())).guard(spared)


def serve_settings(upstreams: Mapping[str, Upstream], gateway: int, plan: Plan) -> str:
    """Return the exporter's settings, as YAML."""
    engines = [
        {"name": each.name, "url": f"http://{LOOPBACK}:{each.port}", "addresses": [f"{each.address}:{each.port}"]}
        for each in upstreams.values()
    ]
    admits = plan.through == ADMIT.name
    hops = [{"name": ADMIT.name if admits else "edge", "listen": [f"{LOOPBACK}:{gateway}"]}]
    settings = {"engines": engines, "hops": hops, "window": f"{plan.window:g}s", "slots": plan.knobs.max_num_seqs}
    return yaml.safe_dump(settings | ({"admit": f"http://{LOOPBACK}:{gateway}"} if admits else {}))


@asynccontextmanager
async def put_up(plan: Plan, directory: Path, network: Network | None) -> AsyncIterator[Bench]:
    """Run the bench while the block lasts. Everything it writes is in ``directory``. Raises SetupError."""
    gateway_port, exporter_port, *ports = free_ports(4)
    upstreams = {
        name: Upstream(name, f"127.0.1.{number}", port)
        for number, (name, port) in enumerate(zip((TARGET, OTHER), ports, strict=True), 1)
    }
    gateway = gateway_part(
        GATEWAY,
        plan.through,
        gateway_port,
        tuple(upstreams.values()),
        read_timeout=plan.read_timeout,
        slots=plan.knobs.max_num_seqs,
        directory=directory,
    )
    settings = directory / "tokengap.yaml"
    settings.write_text(serve_settings(upstreams, gateway_port, plan))
    nvml = fake_gpus(directory, len(upstreams)) if plan.gpus else None
    exporter = exporter_part(
        exporter_port, ["serve", "--listen", f"{LOOPBACK}:{exporter_port}", "--config", str(settings)]
    )
    async with AsyncExitStack() as later, aiohttp.ClientSession() as session:
        crowd = Crowd(gateway_port, plan.load, plan.retries, plan.seed, None if network is None else network.cut)
        watch = Exporter(f"http://{LOOPBACK}:{exporter_port}", session)
        bench = Bench(plan, directory, upstreams, crowd, watch, session, network, nvml, {}, gateway, _later=later)
        parts = [*map(bench.replica, upstreams), gateway, _with_gpus(exporter, nvml)]
        stage = await later.enter_async_context(staged(parts, directory))
        bench.newest |= {started.part.name: started for started in stage.parts}
        if nvml is not None:
            # Each replica computes on one: its core is what NVIDIA's library would tell of.
            cores = [bench.core(name).pid for name in upstreams]
            nvml.set(*(replace(gpu, processes={pid: 60 << 30}) for gpu, pid in zip(nvml.gpus, cores, strict=True)))
        await watch.ready()
        yield bench


def fake_gpus(directory: Path, count: int) -> FakeNvml:
    """Return a host with so many GPUs. Raises SetupError when the stand-in for NVIDIA's library does not compile."""
    nvml = FakeNvml(compile_library(directory), directory / "nvml.control")
    nvml.set(*many(H100, count))
    return nvml


def _with_gpus(exporter: Part, nvml: FakeNvml | None) -> Part:
    """Return the exporter, started so that it finds this library in place of NVIDIA's."""
    if nvml is None:
        return replace(exporter, command=(*exporter.command, "--no-gpu"))
    variables = (f"{name}={nvml.environment[name]}" for name in ("LD_LIBRARY_PATH", "FAKE_NVML_CONTROL"))
    return replace(exporter, command=("env", *variables, *exporter.command))
