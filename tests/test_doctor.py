"""What the doctor says: of each thing that can be looked at, as it should be and not; and on real parts."""

from __future__ import annotations

import io
import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from lab.commands import tokengap
from lab.http2 import http2_client
from lab.native import told
from lab.serving import served
from tokengap.doctor import (
    Answer,
    Door,
    Finding,
    Listeners,
    Namespaces,
    Program,
    about_blind_spots,
    about_engine,
    about_gpus,
    about_hop,
    about_interface,
    about_namespaces,
    about_selection,
    about_slots,
    about_sockets,
    as_json,
    effective_capabilities,
    examine,
    healthy,
    look_at_gpus,
    print_findings,
)
from tokengap.errors import SourceRefused, SourceTimeout, SourceUnusable
from tokengap.gpu_readings import Gpu, GpuProcess, GpuSnapshot
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import LOOPBACK, free_ports, running
from tokengap.lab.proxies import PROXIES, Wiring
from tokengap.readings import LISTEN, EnginePage, ProcessTable, ProxySnapshot
from tokengap.sources.gpu import NvmlReader
from tokengap.sources.host import Row
from tokengap.sources.sockets import SocketAccess, probe
from tokengap.topology import Endpoint, Engine, Hop, ProxyInterface, Topology
from tokengap.view import BLIND_SPOTS, BlindSpotView

ACCESS = SocketAccess("Linux 6.18", "sock_diag", True, "", True, "", 50_000, 248)
ENGINE = Engine("worker", "http://127.0.0.1:8000", (Endpoint(None, 8000),))
HOP = Hop("edge", (Endpoint(None, 8080),), ("worker",))
ROW = Row("0.0.0.0", 8080, "0.0.0.0", 0, LISTEN, 7)
PAGE = EnginePage(generation_tokens=5.0, models=("m",), family="vllm")
NONE: frozenset[str] = frozenset()


# --- one thing at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("access", "capabilities", "levels", "says"),
    [
        (ACCESS, NONE, ["ok", "ok"], "sock_diag will be used, with every column"),
        (replace(ACCESS, tcp_info=104), NONE, ["note", "ok"], "this kernel tells 104 of 208 bytes of tcp_info"),
        (replace(ACCESS, events_room=332), NONE, ["ok", "note"], "when more than 332 sockets end within a beat"),
        (replace(ACCESS, events_room=332), {"CAP_NET_ADMIN"}, ["ok", "ok"], "final counters of each socket that ends"),
        (
            replace(ACCESS, events=False, events_reason="Operation not permitted"),
            NONE,
            ["ok", "note"],
            "Operation not permitted; this process lacks CAP_NET_ADMIN",
        ),
        (
            replace(ACCESS, events=False, events_reason="permitted, but none came"),
            {"CAP_NET_ADMIN"},
            ["ok", "note"],
            "permitted, but none came",
        ),
        (
            replace(ACCESS, sock_diag=False, sock_diag_reason="Protocol not supported", way="proc"),
            NONE,
            ["attention"],
            "proc will be used, it tells states and queues, no bytes; sock_diag: Protocol not supported",
        ),
        (
            replace(ACCESS, sock_diag=False, sock_diag_reason="no netlink", way="psutil"),
            NONE,
            ["attention"],
            "psutil will be used, it tells states only",
        ),
    ],
)
def test_sockets(access: SocketAccess, capabilities: set[str], levels: list[str], says: str):
    """Which way serves, what an old kernel leaves out, whether events come, and which capability is missing."""
    findings = list(about_sockets(access, frozenset(capabilities)))
    assert [finding.level for finding in findings] == levels
    assert any(says in finding.found for finding in findings)


@pytest.mark.parametrize(
    ("engine", "answer", "level", "says", "advice"),
    [
        (ENGINE, Answer(PAGE, 0.01, "0.32.0"), "ok", "vLLM 0.32.0 with m at :8000", ""),
        (ENGINE, Answer(PAGE), "ok", "a page of vLLM with m at :8000", ""),
        (ENGINE, Answer(EnginePage(family="vllm")), "note", "which counts no tokens yet", "after the first request"),
        (ENGINE, Answer(PAGE, 2.0), "attention", "its page took 2.0 s, and a beat waits 0.8 s", "--interval"),
        (ENGINE, Answer(SourceRefused("connection refused")), "attention", "connection refused", "start it"),
        (ENGINE, Answer(SourceTimeout("no page within 5 s")), "attention", "no page within 5 s", "stuck"),
        (ENGINE, Answer(SourceUnusable("HTTP 503")), "attention", "HTTP 503", "an engine's series"),
        (replace(ENGINE, endpoints=()), Answer(PAGE), "attention", "did not resolve", "addresses"),
    ],
)
def test_an_engine(engine: Engine, answer: Answer, level: str, says: str, advice: str):
    """Its version where it tells one; why its page cannot be read, and what to do."""
    finding = about_engine(engine, answer, 0.8)
    assert (finding.subject, finding.level) == ("engine worker", level)
    assert says in finding.found
    assert advice in finding.advice


def test_slots():
    """From the settings, else from a command line, else unknown: then how to tell them."""
    assert about_slots(replace(ENGINE, slots=4), 8).found == "4, by the settings"
    assert about_slots(ENGINE, 8).found == "8, by its command line"
    unknown = about_slots(ENGINE, None)
    assert unknown.level == "note"
    assert "--slots" in unknown.advice


@pytest.mark.parametrize(
    ("listeners", "level", "says", "advice"),
    [
        (
            Listeners([ROW], {7: Program("nginx", 12, "nginx/1.22")}),
            "ok",
            "nginx (pid 12) listens on :8080 (nginx/1",
            "",
        ),
        (Listeners([ROW], {7: Program("gateway", 12)}), "ok", "gateway (pid 12) listens on :8080", ""),
        (Listeners([ROW], {7: Program("envoy", 12)}), "note", "envoy (pid 12)", "HTTP/2"),
        (Listeners([ROW], {7: Program("docker-proxy", 12)}), "attention", "for a container", "--netns"),
        (Listeners([ROW]), "note", "this process lacks CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE", "as its user"),
        (Listeners(), "attention", "nobody listens on :8080", "start the proxy"),
        (Listeners(error="no /proc/net/tcp"), "note", "no /proc/net/tcp", "ports alone"),
    ],
)
def test_a_hop(listeners: Listeners, level: str, says: str, advice: str):
    """Who listens there, or that nobody does, or that it may not be seen and what that takes."""
    (finding,) = about_hop(HOP, listeners, NONE)
    assert (finding.subject, finding.level) == ("hop edge", level)
    assert says in finding.found
    assert advice in finding.advice


def test_every_address_of_a_hop_is_looked_at():
    """The one at which nobody listens needs attention, the other does not."""
    hop = replace(HOP, listen=(Endpoint(None, 8080), Endpoint("10.0.0.5", 8443)))
    findings = list(about_hop(hop, Listeners([ROW], {7: Program("nginx", 12)}), NONE))
    assert [finding.level for finding in findings] == ["ok", "attention"]
    assert "10.0.0.5:8443" in findings[1].found


def test_nothing_to_watch():
    """Without an engine there is nothing to do; without a hop there is less."""
    assert [(f.subject, f.level) for f in about_selection(Topology())] == [("engines", "attention"), ("hops", "note")]
    assert list(about_selection(Topology((ENGINE,), (HOP,)))) == []


def test_only_what_is_in_order_goes_without_advice():
    """A finding that tells a person no next step is a bug."""
    with pytest.raises(AssertionError, match="no advice about x"):
        Finding("x", "note", "y")


GPU = Gpu("GPU-aaaa", 0, 1.0, name="NVIDIA H100 80GB HBM3", processes=(GpuProcess(501),))
LOST = Gpu("", 1, 1.0, up=False, reason="lost")
READ = GpuSnapshot("ok", driver="590.48.01", gpus=(GPU,))


@pytest.mark.parametrize(
    ("answer", "pids", "levels", "says"),
    [
        (None, (), [], ""),
        (GpuSnapshot("library_not_found"), (), ["ok"], "none: no NVIDIA driver here (library_not_found)"),
        (GpuSnapshot("version_mismatch", "init"), (), ["attention"], "none can be read (version_mismatch): init"),
        (GpuSnapshot("no_gpus"), (), ["attention"], "none can be read (no_gpus)"),
        (SourceRefused("connection refused"), (), ["attention"], "connection refused"),
        (READ, (501,), ["ok", "ok"], "1 read by nvml: NVIDIA H100 80GB HBM3, driver 590.48.01"),
        (READ, (9,), ["ok", "note"], "not known: no process of it is seen on a GPU"),
        (replace(READ, gpus=(GPU, LOST)), (501,), ["attention", "ok", "ok"], "lost: 1 (UUID not known): lost"),
    ],
)
def test_gpus(answer, pids, levels, says):
    """No driver is a normal state; what cannot be read needs somebody, and so does one that is lost. An engine whose
    GPUs are not known is worth a note."""
    findings = list(about_gpus(answer, Topology((ENGINE,)), ProcessTable(families={"worker": frozenset(pids)})))
    assert [finding.level for finding in findings] == levels
    assert says in " | ".join(finding.found for finding in findings)


async def test_without_a_driver_gpus_are_looked_for_and_not_missed():
    """The real reader on this host: an answer within seconds, and nothing that needs attention."""
    async with NvmlReader() as gpus:
        answer = await look_at_gpus(gpus)
    assert answer.reason != "starting"
    assert [f.level for f in about_gpus(answer, Topology(), ProcessTable())] == ["ok"]


# --- shown ----------------------------------------------------------------------------------------------------------

FINDINGS = [
    Finding("sockets", "ok", "sock_diag"),
    Finding("slots of a", "note", "not known", "tell them"),
    Finding("hop edge", "attention", "nobody listens on [::1]:80", "start it"),
]


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal():
    """One a finding, to be searched with grep; the advice below it."""
    print_findings(FINDINGS, out := io.StringIO())
    assert out.getvalue() == (
        "ok         sockets: sock_diag\n"
        "note       slots of a: not known\n"
        "           -> tell them\n"
        "attention  hop edge: nobody listens on [::1]:80\n"
        "           -> start it\n"
    )


def test_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    """With every word, brackets included."""
    monkeypatch.setenv("COLUMNS", "120")
    print_findings(FINDINGS, out := Terminal())
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert all(words in text for f in FINDINGS for words in (f.subject, f.level, f.found, f.advice))


def test_json_and_the_verdict():
    """Notes do not make it unhealthy, attention does."""
    said = json.loads(as_json(FINDINGS))
    assert said["healthy"] is False
    assert said["findings"][1] == {
        "subject": "slots of a",
        "level": "note",
        "found": "not known",
        "advice": "tell them",
    }
    assert healthy(FINDINGS[:2])


HAPROXY = ProxyInterface("edge", "haproxy", "/run/haproxy/admin.sock")


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [
        (
            ProxySnapshot("haproxy", streams=3, queued=0, client_aborts=2),
            "ok",
            "3 streams, 0 queued, 2 clients that left",
        ),
        (ProxySnapshot("haproxy", streams=3, queued=1, oldest_queued=2.0), "ok", "3 streams, 1 queued"),
        (ProxySnapshot("haproxy", streams=3, queued=1), "note", "3 streams, 1 queued"),
        (SourceRefused("Permission denied"), "attention", "/run/haproxy/admin.sock: Permission denied"),
    ],
)
def test_what_a_proxy_tells(answer, level, says):
    """What is told, what takes a higher level, and why it could not be asked."""
    finding = about_interface(HAPROXY, answer)
    assert (finding.subject, finding.level) == ("haproxy of edge", level)
    assert says in finding.found


def test_blind_spots_are_noted_with_what_to_do():
    """Only those that there are."""
    spots = [BlindSpotView("edge", kind, True, "because") for kind in BLIND_SPOTS]
    spots += [BlindSpotView("admit", kind, blind) for kind in BLIND_SPOTS for blind in (False, None)]
    found = list(about_blind_spots(spots))
    assert [(finding.subject, finding.level, finding.found) for finding in found] == [
        ("hop edge", "note", f"{kind}: because") for kind in BLIND_SPOTS
    ]


# --- on this host ---------------------------------------------------------------------------------------------------


async def test_a_port_where_nobody_listens_and_one_where_we_do():
    """Real listeners, real processes: ourselves."""
    with socket.create_server((LOOPBACK, 0)) as server, socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        ours, nobodys = server.getsockname()[1], bound.getsockname()[1]
        hop = Hop("edge", (Endpoint(LOOPBACK, ours), Endpoint(None, nobodys)), ())
        findings = [f for f in await examine(Topology(hops=(hop,))) if f.subject == "hop edge"]
    assert [finding.level for finding in findings] == ["ok", "attention"]
    assert f"listens on {LOOPBACK}:{ours}" in findings[0].found


async def test_engines_that_are_refused_silent_or_something_else():
    """Each with its own reason; one that is well beside them is well. Credentials are not shown."""
    engine_app, other_app = web.Application(), web.Application()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text='vllm:generation_tokens_total{model_name="m"} 7\nvllm:num_requests_running{} 0\n')

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def other(_: web.Request) -> web.Response:
        return web.Response(text="node_load1 0.5\n")

    engine_app.router.add_get("/metrics", page)
    engine_app.router.add_get("/version", version)
    other_app.router.add_get("/metrics", other)
    async with served(engine_app) as well, served(other_app) as foreign:
        (refused,) = free_ports(1)
        ports = {"well": well, "foreign": foreign, "refused": refused}
        engines = tuple(
            Engine(name, f"http://user:secret@{LOOPBACK}:{port}", (Endpoint(None, port),))
            for name, port in ports.items()
        )
        found = {finding.subject: finding for finding in await examine(Topology(engines))}
    assert found["engine well"].level == "ok"
    assert "vLLM 0.32.0" in found["engine well"].found
    assert found["engine foreign"].level == "attention"
    assert found["engine refused"].found == "connection refused"
    assert "secret" not in as_json(list(found.values()))


def test_this_kernel_and_these_rights():
    """What is said of them is what the probe and the kernel say."""
    findings = list(about_sockets(probe(), effective_capabilities()))
    assert {finding.subject for finding in findings} <= {"sockets", "destroy events"}
    assert effective_capabilities() <= {"CAP_DAC_READ_SEARCH", "CAP_NET_ADMIN", "CAP_SYS_PTRACE"}


@pytest.mark.e2e
async def test_the_command_on_real_parts(tmp_path: Path):
    """An engine with 3 slots behind nginx: all is well, exit 0. The engine gone: it says so, exit 1."""
    edge, engine = free_ports(2)
    (own := tmp_path / "edge").mkdir()
    selection = ("--engine", f"worker=http://{LOOPBACK}:{engine}", "--hop", f"edge={edge}")
    async with running(PROXIES["nginx"].part(Wiring(edge, engine, False, own)), tmp_path):
        async with running(engine_part(engine, Knobs(max_num_seqs=3)), tmp_path):
            well = await tokengap("doctor", *selection, "--json")
        gone = await tokengap("doctor", *selection)
    assert well.code == 0, well
    found = {finding["subject"]: finding for finding in well.json["findings"]}
    assert found["engine worker"]["level"] == "ok"
    assert found["slots of worker"]["found"] == "3, by its command line"
    assert re.match(rf"nginx \(pid \d+\) listens on :{edge} \(nginx version: ", found["hop edge"]["found"])
    assert (gone.code, gone.err) == (1, "")
    assert "attention  engine worker: connection refused\n           -> start it" in gone.out


@pytest.mark.e2e
async def test_the_command_on_a_proxy_that_tells(tmp_path: Path):
    """A client on HTTP/2 with three streams: HAProxy's socket is asked, and the blind spot is said. Without HAProxy the
    socket is what needs attention."""
    edge, engine = free_ports(2)
    (own := tmp_path / "edge").mkdir()
    proxy = told("haproxy", Wiring(edge, engine, False, own))
    selection = ("--engine", f"worker=http://{LOOPBACK}:{engine}", "--hop", f"edge={edge}")
    selection += ("--haproxy-socket", proxy.interface.address)
    async with running(engine_part(engine, Knobs(max_num_seqs=3, rate=20)), tmp_path):
        async with running(proxy.part, tmp_path), http2_client(edge) as client:
            await client.got(*[client.ask(max_tokens=2000) for _ in range(3)], tokens=2)
            well = await tokengap("doctor", *selection, "--json")
        gone = await tokengap("doctor", *selection)
    assert well.code == 0, well
    found = {finding["subject"]: finding["found"] for finding in well.json["findings"]}
    assert "3 streams, 0 queued" in found["haproxy of edge"]
    said = [finding["found"] for finding in well.json["findings"] if finding["level"] == "note"]
    assert "http2_clients: haproxy has 1 connection of HTTP/2 with 3 streams" in said
    assert gone.code == 1
    assert (
        f"attention  haproxy of edge: {proxy.interface.address}: connection refused\n           -> it needs" in gone.out
    )


@pytest.mark.e2e
async def test_the_command_without_anything_to_watch():
    """It still looks at the host, and says what is missing."""
    ran = await tokengap("doctor")
    assert (ran.code, ran.err) == (1, "")
    assert "attention  engines: none to watch\n" in ran.out


@pytest.mark.parametrize(
    ("spaces", "levels", "says"),
    [
        (Namespaces(), [], ""),
        (Namespaces(["pid 12", "/run/netns/a"]), ["ok"], "pid 12, /run/netns/a, besides our own"),
        (
            Namespaces(["pid 12"], refused="it needs more"),
            ["attention"],
            "pid 12, states and queues of their sockets only",
        ),
        (Namespaces(refused="it needs more"), [], ""),  # nothing there to be refused
        (Namespaces(missing=["pid 9: no such process"]), ["attention"], "pid 9: no such process"),
        (
            Namespaces(doors=[Door("nginx", 12, (80, 443))]),
            ["note"],
            "nginx (pid 12) listens on :80, :443 in another network namespace",
        ),
    ],
)
def test_network_namespaces(spaces: Namespaces, levels: list[str], says: str):
    """What is watched besides our own, what is not there, and who listens where nobody looks."""
    findings = list(about_namespaces(spaces))
    assert [finding.level for finding in findings] == levels
    assert says in "".join(finding.found for finding in findings)
