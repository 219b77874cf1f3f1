"""What docs/rollback.md says: its configurations in the real programs, and its check that nothing is left."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

import netns
from lab.serving import at_rest, engine, until
from tokengap.doctor_cancel import Plan, examine
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import LOOPBACK, Part, free_port, listens, running
from tokengap.lab.proxies import PROXIES

PAGE = (Path(__file__).parent.parent / "docs" / "rollback.md").read_text()

NGINX = """\
daemon off;
pid {directory}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
{said}
}}
"""


def block(language: str) -> str:
    """The one block of the page in that language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return text


def proxy(name: str, edge: int, worker: int, directory: Path) -> tuple[Part, tuple[str, ...]]:
    """The program with the page's configuration, at other ports, and the command that checks it as the page says."""
    said = block({"envoy": "yaml"}.get(name, name)).replace("8080", str(edge)).replace("8100", str(worker))
    program = str(PROXIES[name].program())
    config = directory / PROXIES[name].config_name
    config.write_text(NGINX.format(directory=directory, said=said) if name == "nginx" else said)
    match name:
        case "nginx":
            command = (program, "-p", str(directory), "-c", str(config), "-e", "stderr", "-g", "user root;")
            check = (*command, "-t")
        case "haproxy":
            command = (program, "-db", "-f", str(config))
            check = (program, "-c", "-f", str(config))
        case _:
            command = (program, "-c", str(config), "--concurrency", "1", "--disable-hot-restart")
            check = (*command, "--mode", "validate")
    return Part(name, command, (edge,), PROXIES[name].orphan_signal), check


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["nginx", "haproxy", "envoy"])
async def test_with_this_configuration_the_engine_is_told_at_once(name, tmp_path: Path):
    """The program's own check accepts it, answers come through, and whoever leaves is cancelled, early and late."""
    edge = free_port()
    async with engine(rate=200, prefill_rate=200) as worker:
        part, check = proxy(name, edge, worker, tmp_path)
        await asyncio.to_thread(subprocess.run, check, check=True, capture_output=True, timeout=20)
        async with running(part, tmp_path), aiohttp.ClientSession(f"http://{LOOPBACK}:{edge}") as asking:
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 20}
            async with asking.post("/v1/chat/completions", json=body) as answer:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            for leave in ("streaming", "early"):
                plan = Plan(f"http://{LOOPBACK}:{edge}", f"http://{LOOPBACK}:{worker}", leave, max_tokens=1000)
                finding = await examine(plan)
                assert finding.level == "ok", finding
                await at_rest(worker)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("name", ["nginx", "haproxy", "envoy"])
async def test_with_this_configuration_a_long_stream_comes_to_its_end(name, tmp_path: Path):
    """Past 15 s, at which Envoy ends it unless told otherwise."""
    edge = free_port()
    async with engine(rate=10) as worker:
        part, _ = proxy(name, edge, worker, tmp_path)
        async with running(part, tmp_path), aiohttp.ClientSession(f"http://{LOOPBACK}:{edge}") as asking:
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 180}
            async with asking.post("/v1/chat/completions", json=body) as answer:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")


@contextmanager
def program(space: netns.Space, command: tuple[str, ...], port: int, directory: Path) -> Iterator[None]:
    """Run something in a network namespace while the block lasts."""
    process = subprocess.Popen(space.command(*command), cwd=directory)
    try:
        space.run(lambda: asyncio.run(until(lambda: listens(port), within=20)))
        yield
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.e2e
def test_the_check_that_nothing_is_left(tmp_path: Path):
    """It names whoever still listens and fails, for either port; with neither it says nothing and passes."""
    admit = (
        *(sys.executable, "-m", "tokengap", "admit", "--engine", "http://127.0.0.1:8100", "--slots", "1"),
        *("--admit-listen", "127.0.0.1:8090", "--admit-control", str(tmp_path / "admit.sock")),
    )
    with netns.host() as host:
        space = host.space(address=False)

        def check() -> subprocess.CompletedProcess[str]:
            return subprocess.run(space.command("bash", "-c", block("sh")), capture_output=True, text=True, timeout=20)

        with program(space, engine_part(8100, Knobs()).command, 8100, tmp_path):
            with program(space, admit, 8090, tmp_path):
                both = check()
            engine_only = check()
        nothing = check()
    assert (both.returncode, both.stdout.count("LISTEN")) == (1, 2), both
    assert (engine_only.returncode, engine_only.stdout.count(":8100")) == (1, 1), engine_only
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "")
