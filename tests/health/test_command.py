"""The command in a process of its own: exit codes and lines are what watchdogs are built on."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from health.looking import at, working
from lab.commands import COMMAND, Ran, started, tokengap
from lab.serving import engine
from tokengap.health.command import CODES, SOFTWARE, USAGE, Finding, exit_code
from tokengap.lab.parts import free_port
from tokengap.lab.truth import EngineControl
from tokengap.view import ENGINE_STATES

DOCS = Path(__file__).parent.parent.parent / "docs" / "health.md"
SHORT = ("--window", "0.3s")


def test_every_verdict_has_its_code():
    """Healthy ones 0, each other one its own."""
    codes = {state: exit_code([state]) for state in (*ENGINE_STATES, "answers")}
    healthy = dict.fromkeys(("busy", "idle", "sleeping", "restarted", "answers"), 0)
    assert codes == healthy | {"stuck": 1, "dead": 2, "blind": 3}


@pytest.mark.parametrize(
    ("verdicts", "fail_on", "code"),
    [
        (["busy", "blind", "dead", "stuck"], ("stuck", "dead", "blind"), 1),
        (["blind", "dead", "idle"], ("stuck", "dead", "blind"), 2),
        (["blind", "dead"], ("blind",), 3),
        (["blind", "dead"], ("stuck",), 0),
        ([], ("stuck",), 0),
    ],
)
def test_the_worst_that_counts_decides(verdicts, fail_on, code):
    """Stuck, dead, blind, in this order, in whatever order they are asked for or found."""
    assert exit_code(verdicts, fail_on) == exit_code(verdicts[::-1], fail_on[::-1]) == code


@pytest.mark.e2e
async def test_a_line_an_engine_and_the_code_of_the_worst():
    """As each is known: the address without credentials, the verdict, and why."""
    async with engine() as idle, working(2) as stuck:
        await EngineControl(stuck).freeze()
        gone = free_port()
        urls = (f"http://user:word@127.0.0.1:{idle}/v1", at(stuck), at(gone))
        ran = await tokengap("health", *urls, *SHORT)
        some = await tokengap("health", *urls, *SHORT, "--fail-on", "dead,blind")
        none = await tokengap("health", *urls, *SHORT, "--fail-on", "blind")
    lines = sorted(ran.out.splitlines())
    assert {line.split()[0] for line in lines} == {f"{at(idle)}/v1", at(stuck), at(gone)}
    assert f"{at(idle)}/v1 idle: running 0, waiting 0" in lines
    assert any(line.startswith(f"{at(gone)} dead: connection refused") for line in lines)
    assert any(line.startswith(f"{at(stuck)} stuck: running 2, nothing moved for ") for line in lines)
    assert (ran.code, some.code, none.code) == (1, 2, 0)
    assert ran.err == ""


@pytest.mark.e2e
async def test_json():
    """One object, the findings in the order asked, with every field."""
    async with engine() as port:
        ran = await tokengap("health", at(free_port()), at(port), "--proxy", at(port), *SHORT, "--json")
    assert (ran.code, ran.json["exit_code"]) == (2, 2)
    assert [(row["kind"], row["verdict"]) for row in ran.json["findings"]] == [
        *(("engine", "dead"), ("engine", "idle"), ("proxy", "answers"))
    ]
    assert all(row.keys() == set(Finding.__slots__) for row in ran.json["findings"])


WRONG = {
    (): "nothing to look at: name an engine, such as http://127.0.0.1:8000, or a --proxy",
    ("ftp://h",): "Invalid value for 'URL...': 'ftp://h' is not http://HOST:PORT or https://HOST:PORT",
    ("http://u:secret@h?k",): "Invalid value for 'URL...': 'http://h' is not http://HOST:PORT or https://HOST:PORT",
    (
        "http://h",
        "--window",
        "0",
    ): "Invalid value for '--window': '0' is not a time such as 8s, 500ms, 1m or 2h (a bare number is seconds)",
    ("http://h", "--windw", "1"): "No such option '--windw'. Did you mean '--window'?",
    ("http://h", "--fail-on", "stuck,busy"): "Invalid value for '--fail-on': 'busy' is none of stuck, dead, blind",
    ("http://h", "--api-key-file", "/nowhere"): "the API key cannot be read from /nowhere: No such file or directory",
    ("http://h", "--ca-file", "/nowhere"): "--ca-file /nowhere cannot be used: No such file or directory",
    (
        "http://h",
        "--ca-file",
        "/x",
        "--insecure-skip-verify",
    ): "--ca-file and --insecure-skip-verify exclude each other",
}


@pytest.mark.e2e
@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
async def test_wrong_arguments_are_no_verdict(arguments):
    """One line on standard error, and 64: other commands say 2 there, which is "dead" here."""
    assert await tokengap("health", *arguments) == Ran(USAGE, "", f"tokengap health: {WRONG[arguments]}\n")


@pytest.mark.e2e
async def test_a_failure_of_the_program_is_no_verdict():
    """Python ends with 1 when it fails, which is "stuck" here."""
    breaks = (
        "import sys; import tokengap.health.command as command; from tokengap.cli import main; "
        "command.look_at_all = lambda *_: 1 / 0; main(sys.argv[1:], prog_name='tokengap')"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", breaks, "health", "http://127.0.0.1:1"), stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == SOFTWARE
    assert err.decode() == "tokengap health: failed: ZeroDivisionError: division by zero\n"


@pytest.mark.e2e
async def test_interrupted():
    """Ctrl-C while it waits: one line, no traceback, and no code of a verdict."""
    async with working(1) as port:
        await EngineControl(port).freeze()
        async with engine() as first, started("health", at(port), at(first), "--window", "60s") as process:
            await asyncio.wait_for(process.stdout.readline(), 20)  # the one at rest is said at once
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 128 + signal.SIGINT
    assert err.decode().strip() == "tokengap: interrupted"


@pytest.mark.e2e
async def test_a_terminal_is_told_why_it_waits(tmp_path: Path):
    """On standard error, and only where somebody looks."""
    async with working(1) as port:
        await EngineControl(port).freeze()
        command = [*COMMAND, "health", at(port), "--window", "0.3s", "--json"]
        seen = await asyncio.create_subprocess_exec(
            *("script", "--quiet", "--return", "--command", " ".join([*command, f">{tmp_path}/out"]), "/dev/null"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await seen.communicate()
        unseen = await tokengap(*command[len(COMMAND) :])
    assert seen.returncode == 1
    assert json.loads((tmp_path / "out").read_text())["exit_code"] == 1
    lines = said.decode().splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{at(port)} busy, running 1") for line in lines)
    assert all(line.endswith("looking again in 0.3 s") for line in lines)
    assert unseen.err == ""


def test_the_docs_name_every_option_and_code():
    """By what is typed, and by number."""
    from tokengap.health.command import health

    text = DOCS.read_text()
    options = [name for option in health.params for name in option.opts if name.startswith("--")]
    codes = [f"| {code} | {verdict} |" for verdict, code in CODES.items()]
    assert [name for name in (*(f"`{name}" for name in options), *codes, "| 64 |", "| 70 |") if name not in text] == []
