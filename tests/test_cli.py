"""The command: exit codes and messages are part of its interface."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from lab.commands import Ran, started, tokengap
from tokengap import __version__
from tokengap.cli import main
from tokengap.config import SETTINGS
from tokengap.config.settings import OF_ADMIT
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import free_ports, running

pytestmark = pytest.mark.e2e

#: Nothing listens there: the exporter has to live with that.
ENGINE = ("--engine", "worker=http://127.0.0.1:1")


@asynccontextmanager
async def serving(
    *arguments: str, **environment: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[str]]]:
    """Run `tokengap serve` on a free port, and yield it, its address and what it has said until it serves."""
    command = ("serve", "--listen", "127.0.0.1:0", *arguments)
    async with started(*command, PYTHONWARNINGS="error", **environment) as process:
        said: list[str] = []
        async with asyncio.timeout(20):
            while not (found := re.search(r"address=(http://\S+)", "".join(said[-1:]))):
                line = (await process.stderr.readline()).decode()
                assert line, f"it ended: {said}"
                said.append(line)
        yield process, found[1], said


async def ready(url: str) -> None:
    """Wait for the first beat."""
    async with asyncio.timeout(10), aiohttp.ClientSession() as session:
        while (await session.get(f"{url.removesuffix('/metrics')}/-/ready")).status != 200:  # noqa: ASYNC110 - another process's event
            await asyncio.sleep(0.05)


async def stopped(process: asyncio.subprocess.Process, by: signal.Signals) -> Ran:
    """Send a signal and wait for the end."""
    process.send_signal(by)
    out, err = await asyncio.wait_for(process.communicate(), 10)
    return Ran(process.returncode, out.decode(), err.decode())


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
async def test_serve_says_what_it_watches_and_ends_with_0(by: signal.Signals):
    """One line for each engine and hop and one for the address, on standard error; asked to stop, it has succeeded."""
    async with serving(*ENGINE, "--hop", "edge=:8080,:8443") as (process, url, said):
        await ready(url)
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            page = await answer.text()
        ended = await stopped(process, by)
    assert 'tokengap_engine_state{engine="worker",state="dead"} 1.0' in page
    lines = "".join(said)
    assert lines.count("level=info msg=engine engine=worker url=http://127.0.0.1:1\n") == 1
    assert lines.count("level=info msg=hop hop=edge listen=:8080,:8443 to=worker\n") == 1
    assert (ended.code, ended.out) == (0, "")
    assert "Traceback" not in ended.err


async def test_a_read_that_hangs_in_the_kernel_does_not_keep_it_from_ending():
    """Threads cannot be cancelled; after some seconds nobody waits for them any longer."""
    hang = (
        "import sys, time; import tokengap.cli as cli; from tokengap.sources.sockets import Sockets; "
        "Sockets.snapshot = lambda *_: time.sleep(60); cli.STOP_WITHIN = 0.5; "
        "cli.main(sys.argv[1:], prog_name='tokengap')"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", hang, "serve", "--listen", "127.0.0.1:0", *ENGINE), stderr=asyncio.subprocess.PIPE
    )
    try:
        while b"address=" not in await asyncio.wait_for(process.stderr.readline(), 10):
            pass
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert time.monotonic() - began < 5
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_taken_port_is_one_line_and_exit_2():
    """The message names the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = await tokengap("serve", *ENGINE, "--listen", f"127.0.0.1:{port}")
    assert ran.code == 2
    (line,) = (line for line in ran.err.splitlines() if "level=" not in line)
    assert re.fullmatch(rf"tokengap: cannot listen on 127.0.0.1:{port}: .*address already in use", line)


WRONG = {
    (
        "serve",
    ): "tokengap: no engine to watch: name one, such as --engine http://127.0.0.1:8000, or let --auto look for it",
    ("serve", "--interval", "0s", *ENGINE): "tokengap: --interval is '0s'; expected a time such as 8s, 500ms, 1m or 2h "
    "(a bare number is seconds)",
    ("serve", "--intervall", "1s"): "tokengap serve: No such option '--intervall'. Did you mean '--interval'?",
    ("serve", "--config", "/nowhere.yaml"): "tokengap: /nowhere.yaml cannot be read: No such file or directory",
    ("serve", "more"): "tokengap serve: Got unexpected extra argument (more)",
    ("sevre",): "tokengap: No such command 'sevre'. Did you mean 'serve'?",
    ("doctor", "--hop", "edge"): "tokengap: --hop is 'edge'; expected NAME=ADDR[,ADDR...], or a mapping with name, "
    "listen and, where wanted, to, class",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
async def test_what_is_wrong_is_one_line_and_exit_2(arguments: tuple[str, ...]):
    """On standard error, nothing on standard output, no traceback and no usage text."""
    assert await tokengap(*arguments) == Ran(2, "", WRONG[arguments] + "\n")


async def test_a_wrong_variable_is_one_line_and_exit_2():
    """As a flag is."""
    ran = await tokengap("serve", *ENGINE, TOKENGAP_INTERVALL="2s")
    assert ran == Ran(2, "", "tokengap: TOKENGAP_INTERVALL is no setting; did you mean TOKENGAP_INTERVAL?\n")


async def test_the_spellings_of_other_exporters_are_understood(tmp_path: Path):
    """Those of Prometheus' exporter-toolkit, with an equals sign or without."""
    (tmp_path / "t.yaml").write_text("engines: ['worker=http://user:secret@127.0.0.1:1']\nlog_level: error\n")
    toolkit = (
        *(
            "--web.listen-address=127.0.0.1:0",
            "--web.telemetry-path",
            "/prom",
            "--config.file",
            str(tmp_path / "t.yaml"),
        ),
        *("--log.level=info", "--log.format=json"),
    )
    async with started("serve", *toolkit) as process:
        said = []
        while "address" not in (said or [{}])[-1]:
            said.append(json.loads(await asyncio.wait_for(process.stderr.readline(), 10)))
        assert said[-1]["address"].endswith("/prom")
        assert {"ts", "level", "msg"} <= said[0].keys()
        assert "secret" not in str(said)
        await ready(said[-1]["address"].removesuffix("/prom"))
        assert (await stopped(process, signal.SIGTERM)).code == 0


async def test_auto_says_what_it_found(tmp_path: Path):
    """A sentence for each vLLM server and each proxy, and then it watches them."""
    (port,) = free_ports(1)
    async with (
        running(engine_part(port, Knobs(max_num_seqs=3)), tmp_path) as engine,
        serving("--auto") as (_, url, said),
    ):
        await ready(url)
        lines = "".join(said)
        assert f"vLLM server (pid {engine.process.pid}) at http://127.0.0.1:{port}: 3 slots" in lines
        assert f"msg=engine engine=vllm-{port} url=http://127.0.0.1:{port}\n" in lines


async def test_version():
    """Ours, and those that decide what can be used, in one line."""
    ran = await tokengap("--version")
    assert ran.code == 0
    assert re.fullmatch(rf"tokengap {re.escape(__version__)}, Python \d+\.\d+\.\d+\S*, \w+\n", ran.out)


async def test_help_names_every_setting_and_starts_nothing():
    """Every flag with its meaning: those of the exporter, and those that only the gateway has."""
    serve, admit = await tokengap("serve", "--help"), await tokengap("admit", "--help")
    assert (serve.code, admit.code) == (0, 0)
    for setting in SETTINGS:
        shown = admit.out if setting.key in OF_ADMIT else serve.out
        assert [flag for flag in setting.flags if flag not in shown] == []


async def test_without_a_command_it_shows_the_commands():
    """As git does; exit 2, since nothing was done."""
    ran = await tokengap()
    assert ran.code == 2
    for name in ("demo", "serve", "health", "drill", "admit", "doctor"):
        assert re.search(rf"^  {name} ", ran.err, re.MULTILINE)


async def test_serving_imports_nothing_that_it_does_not_need():
    """Neither the lab, nor the doctor's tables, nor what renders the bundle: it starts fast."""
    slow = ("tokengap.lab", *(f"tokengap.bundle.{part}" for part in ("render", "watches", "boards")), "rich", "jinja2")
    code = (
        f"import sys, tokengap.cli, tokengap.serve; print(*(name for name in sys.modules if name.startswith({slow})))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", code), stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().split() == []


def test_no_flag_is_said_twice():
    """Two settings with one spelling would silently share it."""
    for command in map(main.commands.get, ("serve", "doctor")):
        flags = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
        assert len(flags) == len(set(flags))
