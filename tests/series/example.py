"""Views made by hand: one that has something of everything, and one with as many streams as wanted."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

import numpy as np

from tokengap.gpu_readings import Gpu, GpuProcess
from tokengap.view import (
    AGE_BOUNDS,
    CLIENTS,
    STREAM,
    AdmissionView,
    BlindSpotView,
    Cost,
    EngineView,
    GpusView,
    GpuView,
    Price,
    ProxyView,
    SourceView,
    StreamGroup,
    StreamTable,
    Tokens,
    View,
    XidView,
)

HOPS = ("edge", "admit", "engine")


def rich_view() -> View:
    """One busy engine that leaks at the edge, one that is dead and was never read, and a label that needs escaping."""
    worker = EngineView(
        name="worker",
        url="http://visitor:secret@127.0.0.1:8100/metrics?key=secret",
        models=("org/model-8b",),
        family="vllm",
        state="busy",
        evidence="1 running, 2 waiting; tokens rose by 24 in 1.0 s",
        tokens=Tokens(16092.0, 15000.5, {"edge": 900.25, "engine": 92.0}, pending=50.25, unattributed=49.0),
        running=1.0,
        waiting=2.0,
        slots=1.0,
        slots_from="commandline",
        queue_age=6.75,
        queue_age_from="sockets",
        slack={"interactive": 1.25, "batch": 593.25},
        coverage=1.0,
        open_streams=3,
        progress_age=0.0,
        restarts=1,
        ghost_steps=92.0,
        breach_seconds=0.75,
        skipped={"not a number": 2, "duplicate": 1},
        cost=Cost(
            gpus_up=1,
            gpus_lost=1,
            gpu_seconds=7200.0,
            orphan_gpu_seconds=1440.0,
            joules={"full": 3_600_000.0, "active": 3_000_000.0},
            orphan_joules={"full": 720_000.0, "active": 600_000.0, "sole": 36_000.0},
            unaccounted={"gpu": 12.5, "engine": 2.0},
            busy_without_tokens=30.0,
        ),
        restarts_last_hour=1,
        unfinished_tokens=92.0,
        unsafe={"no_cancel": True, "slack_short": False},
    )
    spare = EngineView(
        name='spare "b"\\<b>',
        url="http://[2001:db8::8]:8100/metrics",
        models=(),
        state="dead",
        evidence="connection refused <script>alert(1)</script>",
        tokens=Tokens(),
        running=None,
        waiting=None,
        slots=None,
        slots_from=None,
        queue_age=None,
        queue_age_from=None,
        slack={},
        coverage=None,
        open_streams=0,
        progress_age=None,
        restarts=0,
        ghost_steps=0.0,
        breach_seconds=0.0,
        skipped={},
    )
    streams = np.zeros(4, dtype=STREAM)
    streams["id"] = (11, 12, 13, 14)
    streams["engine"] = (0, 0, 0, -1)
    streams["hop"] = (0, 0, 0, 0)
    streams["client"] = (0, 1, 3, 0)
    streams["leaks_at"] = (-1, -1, 0, -1)
    streams["age"] = (2.5, 7.25, 61.5, 0.25)
    streams["first_byte"] = (False, True, True, False)
    streams["tokens"] = (0.0, 120.0, 900.0, 0.0)
    streams["useful"] = (0.0, 96.0, 36.0, 0.0)
    streams["orphaned"] = (0.0, 0.0, 864.0, 0.0)
    streams["slack"] = (5.5, np.nan, np.nan, 7.75)
    for row, client in enumerate(("203.0.113.7", "2001:db8:1:2::7", "198.51.100.20")):
        put_address(streams, row, client, 51000 + row)
    return View(
        at=5000.0,
        wall=1_764_000_000.5,
        beats=4321,
        late_beats=2,
        degraded_beats=17,
        interval=1.0,
        accounting="exact",
        events_lost=3,
        sources=(
            SourceView("sockets", "", True, 0.021, "sock_diag, destroy events"),
            SourceView("engine", "worker", True, 0.004, "vLLM page, 49 kB"),
            SourceView("engine", 'spare "b"\\<b>', False, 0.001, "connection refused"),
            SourceView("processes", "", True, 0.15, ""),
            SourceView("gpu", "", True, 0.0, "nvml"),
        ),
        engines=(worker, spare),
        hop_names=HOPS,
        groups=(
            group("worker", "edge", "connected", 2.5),
            group("worker", "edge", "stalled", 7.25),
            group("worker", "edge", "gone", 61.5, 4000.0),
            group("", "edge", "connected", 0.25),
        ),
        endings={
            ("worker", "edge", "completed"): 64,
            ("worker", "edge", "cancelled"): 5,
            ("worker", "edge", "orphaned"): 8,
            ("worker", "edge", "failed"): 1,
        },
        streams=streams,
        gpus=gpus(),
        proxies=(
            ProxyView("edge", "haproxy", 6, 2, 3.0, 4.0, 1.0, 1, 3),
            ProxyView("admit", "nginx", streams=21, stale=True),
        ),
        blind_spots=(
            BlindSpotView("edge", "http2_clients", True, "haproxy has 1 connection of HTTP/2 with 3 streams"),
            BlindSpotView("edge", "http3_clients", None),
            BlindSpotView("edge", "unix_upstream", False),
            BlindSpotView("edge", "load_balancer", False),
        ),
        price=Price(2.5, "EUR"),
        admission=AdmissionView(
            mode="age",
            closed=False,
            decisions={("interactive", "admitted"): 20, ("interactive", "rejected_age"): 3},
            moves={("streaming", "client_left", "cancelling"): 8},
            waiting={"interactive": 2, "batch": 0},
            queue_ages={"interactive": 1.25, "batch": 0.0},
            expected_starts={"interactive": 4.5},
            slots={("worker", "free"): 1, ("worker", "streaming"): 2, ("worker", "held"): 1},
            held_for={"worker": 12.5},
            engines_up={"worker": True, "dead": False},
        ),
        namespaces={"watched": 3, "failed": 1},
    )


def gpus() -> GpusView:
    """A GPU of everything, one that is lost, and one with memory of the host and no engine."""
    healthy = Gpu(
        uuid="GPU-8f6bb2a1-0000-4000-8000-000000000001",
        index=0,
        at=4999.5,
        name="NVIDIA H100 80GB HBM3",
        pci="00000000:3B:00.0",
        utilization=0.97,
        memory_used=80_000_000_000,
        memory_total=85_520_809_984,
        power=631.95,
        energy=123_456.789,
        temperature=59.0,
        sm_clock=1.98e9,
        throttled={"hw_thermal": 1.5, "sw_thermal": 0.0, "power_brake": 0.0},
        throttling=("hw_thermal",),
        ecc_uncorrectable=1,
        remap_failure=False,
        remap_pending=True,
        recovery_action="reset",
        pcie_replays=3,
        processes=(GpuProcess(4242, 79_000_000_000),),
        mig=False,
    )
    lost = Gpu("GPU-8f6bb2a1-0000-4000-8000-000000000002", 1, 4999.5, up=False, reason="lost", name=healthy.name)
    unified = Gpu(
        uuid="GPU-8f6bb2a1-0000-4000-8000-000000000003",
        index=2,
        at=4999.5,
        name="NVIDIA GB10",
        utilization=1.0,
        power=11.17,
        processes=(),
        unified_memory=True,
        unsupported={"memory": "not_supported"},
    )
    return GpusView(
        reason="ok",
        detail="",
        way="nvml",
        driver="590.48.01",
        readers=1,
        read_at=1_764_000_000.0,
        gpus=(
            GpuView(
                healthy,
                True,
                ("worker",),
                "processes",
                0,
                71.15,
                False,
                123_456.789,
                "counter",
                1,
                {79: XidView(1, 1_763_999_990.0)},
            ),
            GpuView(lost, False, ("worker",), "processes", None, None, None, None, "counter", 0, {}),
            GpuView(unified, True, (), None, 0, 11.17, None, 500.25, "power_integral", 0, {}),
        ),
    )


def view_with(streams: int) -> View:
    """The rich view with this many streams, spread over hops, client states and ages."""
    table = np.zeros(streams, dtype=STREAM)
    number = np.arange(streams)
    table["id"] = number
    table["hop"] = number % len(HOPS)
    table["client"] = number % len(CLIENTS)
    table["leaks_at"] = -1
    table["age"] = number * 0.01
    table["slack"] = np.nan
    table["src_lo"] = 0xFFFF_0A00_0000 + number
    table["port"] = 1024 + number % 60000
    groups = []
    for hop, name in enumerate(HOPS):
        for code, client in enumerate(CLIENTS):
            ages = table["age"][(table["hop"] == hop) & (table["client"] == code)]
            if len(ages):
                groups.append(group("worker", name, client, *ages))
    return replace(rich_view(), groups=tuple(groups), streams=table)


def group(engine: str, hop: str, client: str, *ages: float) -> StreamGroup:
    """The group of streams of these ages."""
    counts = np.histogram(ages, bins=(0.0, *np.nextafter(AGE_BOUNDS, np.inf), np.inf))[0]
    return StreamGroup(engine, hop, client, len(ages), tuple(counts.tolist()), float(sum(ages)), float(max(ages)))


def put_address(table: StreamTable, row: int, client: str, port: int) -> None:
    """Write a client's address into a row as the join does: IPv6, IPv4 mapped."""
    address = ipaddress.ip_address(client)
    number = int(address) if address.version == 6 else 0xFFFF_0000_0000 | int(address)
    table["src_hi"][row], table["src_lo"][row], table["port"][row] = number >> 64, number & (1 << 64) - 1, port
