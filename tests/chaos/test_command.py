"""``tokengap chaos`` as it is typed: what it refuses, that it heals, and two experiments from end to end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from lab.commands import Ran, started, tokengap
from lab.serving import until
from tokengap.chaos.bench import core_of
from tokengap.chaos.experiments import EXPERIMENTS
from tokengap.chaos.replica import replica_part
from tokengap.lab.batching import Knobs
from tokengap.lab.parts import LOOPBACK, free_port, running

#: Phases as short as they can be with enough samples.
SHORT = ("--baseline", "6s", "--duration", "8s", "--recovery", "5s")

#: A machine that is shared with other tests stalls now and then, which all streams feel at once; and in a run this
#: short, a beat of tokens is a share of all that counts (docs/chaos.md). First tokens are held to :data:`MOVED_ON`.
LENIENT = ("--max-p99-ratio", "10", "--min-samples", "10", "--max-token-error", "0.04")


#: Seconds to a first token within which a gateway has moved on, which waits no read timeout for it.
MOVED_ON = 4.0


async def chaos(*arguments: object, within: float = 200.0) -> Ran:
    return await tokengap("chaos", "run", *arguments, within=within)


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def check(out: Path, name: str) -> Any:
    return next(each for each in report(out)["checks"] if each["name"] == name)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such-thing",), "'no-such-thing' is not one of 'engine-crash'"),
        (("engine-crash", "--through", "apache"), "'apache' is not one of 'haproxy', 'nginx', 'envoy', 'admit'"),
        (("engine-crash", "--load", "3s"), "--load: engine-crash has no such option; see tokengap chaos list"),
        (("engine-crash", "--duration", "long"), "'long'; expected a time such as 8s"),
        (("engine-crash", "--signal", "SIGSTOP"), "'SIGSTOP' is not one of"),
    ],
)
async def test_what_cannot_be_is_said_in_a_line(arguments, said):
    """With exit code 2, before anything is started."""
    ran = await chaos(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.e2e
async def test_a_report_is_not_written_over(tmp_path: Path):
    """Its directory is named."""
    (tmp_path / "mine").write_text("")
    ran = await chaos("engine-crash", "--out", tmp_path)
    assert ran.code == 2
    assert f"--out {tmp_path}: something is in it already" in ran.err


@pytest.mark.e2e
async def test_every_experiment_is_listed():
    """With what happens in it."""
    ran = await tokengap("chaos", "list")
    assert ran.code == 0
    assert [name for name in EXPERIMENTS if not re.search(rf"^ *{name} ", ran.out, re.MULTILINE)] == []


@pytest.mark.e2e
@pytest.mark.alone
async def test_an_engine_crashes(tmp_path: Path):
    """Clients are told, ask again and are answered by the other replica; the exporter says dead, then restarted."""
    out = tmp_path / "report"
    ran = await chaos("engine-crash", *SHORT, *LENIENT, "--out", out)
    assert ran.code == 0, str(ran)
    assert "is gone" in next(event["text"] for event in report(out)["timeline"] if event["kind"] == "proof")
    assert check(out, "fail-fast")["value"] < 2
    assert check(out, "first-token-p99")["value"] < MOVED_ON
    assert re.search(r"dead .* restarted", check(out, "verdict")["said"])
    assert {request["end"] for request in report(out)["requests"]} >= {"completed", "told"}
    assert "<svg" in (out / "report.html").read_text()


@pytest.mark.e2e
@pytest.mark.alone
async def test_a_network_is_cut(tmp_path: Path):
    """Nobody is told, and the gateway moves on within its read timeout; of an engine that is out of reach the exporter
    does not say that it is broken. For one beat what an engine generates may be taken for delivered."""
    out = tmp_path / "report"
    ran = await chaos("partition", *SHORT, *LENIENT, "--out", out)
    assert ran.code == 0, str(ran)
    assert "packets were dropped" in next(
        event["text"] for event in report(out)["timeline"] if event["kind"] == "proof"
    )
    assert 0.5 < check(out, "fail-fast")["value"] < 6.5
    assert check(out, "first-token-p99")["value"] < MOVED_ON
    ends = {request["end"] for request in report(out)["requests"]}
    assert {"completed", "broken"} <= ends <= {"completed", "broken", "refused"}  # a retry may meet the cut as well


@pytest.mark.e2e
@pytest.mark.long
async def test_what_is_kept_can_be_looked_at(tmp_path: Path):
    """After the report; Ctrl-C takes it down, and the exit code is that of the run, in which a P99 had no samples."""
    out = tmp_path / "report"
    short = ("--baseline", "1s", "--duration", "1s", "--recovery", "1s")
    async with started("chaos", "run", "engine-freeze", *short, "--keep", "--out", out) as process:
        assert process.stderr is not None
        said = await asyncio.wait_for(process.stderr.readuntil(b"Ctrl-C takes it down"), 90)
        exporter = re.findall(r"the exporter is (http://[\d.:]+)", said.decode())[-1]
        async with aiohttp.ClientSession() as session, session.get(f"{exporter}/metrics") as page:
            assert "tokengap_engine_state" in await page.text()
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 1
    assert "first-token-p99" in report(out)["verdict"]
    assert [each for each in below if each.is_running()] == []


@pytest.mark.e2e
@pytest.mark.long
async def test_a_fault_that_never_was_says_nothing(tmp_path: Path):
    """So many kB never go through: exit code 3, with what was seen instead, and the rules were taken out."""
    out = tmp_path / "report"
    ran = await chaos("partition", "--after-kb", "1000000", "--baseline", "1s", "--duration", "1s", "--out", out)
    assert ran.code == 3, str(ran)
    assert "the fault did not apply: no packet was hit" in ran.out
    assert [event["kind"] for event in report(out)["timeline"]][-2:] == ["heal", "note"]


@pytest.mark.e2e
async def test_ctrl_c_heals_first(tmp_path: Path):
    """A stopped core goes on before everything is taken down, and nothing is left of it."""
    out = tmp_path / "report"
    async with started("chaos", "run", "engine-freeze", "--baseline", "1s", "--out", out) as process:
        assert process.stderr is not None
        await asyncio.wait_for(process.stderr.readuntil(b"  proof  "), 90)
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest, code = await asyncio.wait_for(asyncio.gather(process.stderr.read(), process.wait()), 60)
    assert code == 130
    assert b"SIGCONT to process" in rest
    assert [each for each in below if each.is_running()] == []


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("engine-freeze", "--engine-pid", "1234"), "both of --engine-pid, --this-is-my-system"),
        (("engine-freeze", "--this-is-my-system"), "both of --engine-pid, --this-is-my-system"),
        (("reset", "--engine-pid", "1234", "--this-is-my-system"), "reset is for the bench only"),
        (("engine-freeze", "--engine-pid", "4194304", "--this-is-my-system"), "there is no process 4194304"),
        (
            ("engine-freeze", "--engine-pid", "1234", "--this-is-my-system", "--through", "envoy"),
            "--through is of the bench; an engine of your own takes --duration, --signal",
        ),
    ],
)
async def test_an_engine_of_ones_own_is_asked_for_in_so_many_words(arguments, said):
    """Nothing is touched before."""
    ran = await chaos(*arguments)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.e2e
async def test_an_engine_of_ones_own_is_frozen(tmp_path: Path):
    """For as long as asked, and goes on after it; Ctrl-C lets it go on at once, and so does kill -9."""
    part = replica_part("a", free_port(), (LOOPBACK,), Knobs())
    async with running(part, tmp_path) as engine:

        async def goes_on() -> bool:
            return core_of(engine.pid).status() != psutil.STATUS_STOPPED

        mine = ("--engine-pid", engine.pid, "--this-is-my-system")
        ran = await chaos("engine-freeze", *mine, "--duration", "1s")
        assert (ran.code, "is stopped" in ran.err) == (0, True), str(ran)
        assert await goes_on()
        for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
            async with started("chaos", "run", "engine-freeze", *mine, "--duration", "1h") as process:
                assert process.stderr is not None
                await asyncio.wait_for(process.stderr.readuntil(b" is stopped"), 30)
                process.send_signal(number)
                assert await asyncio.wait_for(process.wait(), 30) == code
            await until(goes_on)


@pytest.mark.e2e
async def test_an_engine_of_ones_own_that_nobody_starts_again_is_a_failure(tmp_path: Path):
    """Its core is gone, and nobody listens: exit code 3."""
    async with running(replica_part("a", free_port(), (LOOPBACK,), Knobs()), tmp_path) as engine:
        ran = await chaos(
            *(
                "engine-crash",
                "--engine-pid",
                engine.pid,
                "--this-is-my-system",
                "--signal",
                "SIGKILL",
                "--duration",
                "5s",
            )
        )
    assert ran.code == 3, str(ran)
    assert "nobody listens" in ran.err
