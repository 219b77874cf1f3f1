"""`tokengap top` as it is run: over a pipe, for scripts, standing alone, and in a terminal (tmux) with keys."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import bcrypt
import msgspec
import pytest

from series.example import rich_view
from test_end_to_end import watched
from tokengap.cli import main
from tokengap.errors import SourceError
from tokengap.lab.batching import Knobs
from tokengap.lab.parts import free_port
from tokengap.lab.users import User, Visit
from tokengap.series.render import render
from tokengap.top.feed import Login, remote, tls
from tokengap.topology import Hop, Topology
from tokengap.view import View
from tokengap.web.access import Access, read_access
from tokengap.web.guard import Guard
from tokengap.web.now import Now, Wanted
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving
from web.certificates import certificates

__all__ = ["certificates"]

pytestmark = pytest.mark.e2e

TOP = (sys.executable, "-m", "tokengap", "top")

#: pytest loads readline, which writes the size of its own terminal into the environment.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


@asynccontextmanager
async def shown(view: View, access: Access | None = None) -> AsyncIterator[tuple[Serving, str]]:
    """An exporter that shows a view to who may ask, and its address."""
    watched = Topology(hops=(Hop("edge", (), ("admit",)), Hop("admit", (), ("worker",))))
    serving = Serving(also=(), watched=watched)
    serving.publish(view, render(view))
    access = access or Access()
    server = Server(make_app(serving), Guard(access))
    await server.start("127.0.0.1", 0, access.tls)
    try:
        yield serving, server.url
    finally:
        await server.stop()


async def started(*arguments: str, **variables: str) -> asyncio.subprocess.Process:
    """The command, with pipes for everything."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *TOP, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=ENVIRONMENT | variables
    )


async def ran(*arguments: str, **variables: str) -> tuple[int | None, str, str]:
    """How the command ended and what it said."""
    process = await started(*arguments, **variables)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_once_over_a_pipe():
    """One screen of plain text, without colours, as wide as COLUMNS says or 120."""
    async with shown(rich_view()) as (_, url):
        code, out, err = await ran("--once", "--url", url)
        assert (code, err) == (0, "")
        assert "edge ▲ leaks: 1 held" in out
        assert "\x1b" not in out
        assert max(map(len, out.splitlines())) <= 120
        _, narrow, _ = await ran("--once", "--url", url, "--client", "orphans", "--sort", "age", COLUMNS="50")
        assert max(map(len, narrow.splitlines())) <= 50
        assert "streams: 1; order: age; clients: orphans" in narrow
        _, ascii_only, _ = await ran("--once", "--url", url, PYTHONIOENCODING="ascii")
        assert "edge ? leaks: 1 held" in ascii_only


async def test_json_for_scripts():
    """The document of /api/now, one object a line; whatever reads may stop reading."""
    async with shown(rich_view()) as (_, url):
        code, out, err = await ran("--once", "--json", "--rows", "2", "--url", url)
        assert (code, err) == (0, "")
        told = msgspec.json.decode(out, type=Now)
        assert [len(told.streams.rows), told.streams.matching] == [2, 4]
        process = await started("--json", "--url", url)
        for _ in range(2):
            assert json.loads(await process.stdout.readline())["beats"] == 4321
        process.stdout._transport.close()
        async with asyncio.timeout(20):
            assert (await process.stderr.read(), await process.wait()) == (b"", 0)


async def test_what_cannot_be_shown_is_one_line():
    """Nobody there, a page of somebody else, settings that exclude each other: what and where, and code 2."""
    port = free_port()
    nobody = f"http://127.0.0.1:{port}"
    async with shown(rich_view()) as (serving, url):
        serving.view = None
        by_url, by_settings, early, elsewhere, both = await asyncio.gather(
            ran("--once", "--url", nobody),
            ran("--once", TOKENGAP_LISTEN=f"127.0.0.1:{port}"),
            ran("--once", "--url", url),
            ran("--once", "--url", f"{url}/elsewhere"),
            ran("--url", url, "--engine", "http://127.0.0.1:8000"),
        )
    refused = (2, "", f"tokengap: no exporter answers at {nobody}: connection refused\n")
    assert by_url == by_settings == refused
    assert early == (2, "", f"tokengap: {url} says: the first beat is not done yet\n")
    assert elsewhere[0] == both[0] == 2
    assert elsewhere[2].endswith("does not answer as an exporter of this version does (status 404)\n")
    assert "leave the others out" in both[2]


async def test_an_exporter_that_asks_who_you_are(certificates: Path, tmp_path: Path):
    """With authority, certificate, user and password it shows; where one is missing or wrong, one line says which."""
    hashed = bcrypt.hashpw(b"hunter2", bcrypt.gensalt(4)).decode()
    file = certificates / "top.yml"
    file.write_text(
        "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, "
        f"client_auth_type: RequireAndVerifyClientCert}}\nbasic_auth_users: {{alice: '{hashed}'}}"
    )
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    (tmp_path / "mine.pem").write_text(
        "".join((certificates / f"client.{part}").read_text() for part in ("crt", "key"))
    )
    async with shown(rich_view(), read_access(file)) as (_, url):

        async def refused(user: str | None, password: str, authority: str | None, mine: str | None) -> str:
            context = tls(authority and certificates / authority, mine and tmp_path / mine)
            with pytest.raises(SourceError) as error:
                async with remote(url, Login(user, password, context)) as feed:
                    await feed.now(Wanted())
            return str(error.value)

        wants = f"{url} wants a --user and the right password"
        assert await refused("alice", "hunter3", "ca.crt", "mine.pem") == wants
        assert await refused(None, "", "ca.crt", "mine.pem") == wants
        assert (await refused("alice", "hunter2", "ca.crt", None)).startswith(f"{url} ends the connection")
        assert "(--ca-file names its authority): self-signed certificate" in await refused(
            "alice", "hunter2", None, None
        )
        files = ("--ca-file", str(certificates / "ca.crt"), "--cert-file", str(tmp_path / "mine.pem"))
        code, out, err = await ran("--once", "--url", url, *files, "--user", "alice", "--password-file", str(password))
    assert (code, err) == (0, "")
    assert "edge ▲ leaks: 1 held" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--user", "alice"), "--user needs a password: in TOKENGAP_PASSWORD, or in the file --password-file"),
        (("--password-file", "x"), "--password-file without a --user"),
        (("--user", "a", "--password-file", "/no/such"), "--password-file /no/such cannot be read: No such file"),
        (("--ca-file", "/no/such"), "--ca-file /no/such cannot be used: No such file"),
        (("--cert-file", "/dev/null"), "--cert-file /dev/null cannot be used: no certificate"),
    ],
)
def test_a_login_that_cannot_be(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]):
    """What is missing or cannot be read is one line and code 2."""
    with pytest.raises(SystemExit) as ended:
        main([*TOP[3:], *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.long
async def test_standing_alone_and_interrupted(tmp_path: Path):
    """Without an exporter it reads this host itself, and sees what an exporter sees; Ctrl-C is a clean end."""
    async with watched(tmp_path, Knobs()) as lab:
        visit = asyncio.create_task(Visit(User("u", max_tokens=4000), lab.edge_port).run())
        engine = f"worker=http://127.0.0.1:{lab.engine.part.ports[0]}"
        process = await started("--json", "--engine", engine, "--hop", f"edge=127.0.0.1:{lab.edge_port}")
        async with asyncio.timeout(30):
            while not (told := json.loads(await process.stdout.readline()))["streams"]["rows"]:
                pass
            assert [row["client"] for row in told["streams"]["rows"]] == ["connected"]
            visit.cancel()
            while told["streams"]["clients"]["gone"] != 1:
                told = json.loads(await process.stdout.readline())
            process.send_signal(signal.SIGINT)
            assert (await process.wait(), await process.stderr.read()) == (0, b"")
        assert [hop["name"] for hop in told["hops"] if hop["leaks"]] == ["edge"]


class Tmux:
    """A terminal of tmux of its own, with a size."""

    def __init__(self, socket: Path) -> None:
        program = shutil.which("tmux")
        assert program, "the test needs tmux: apt-get install -y --no-install-recommends tmux"
        self._command = (program, "-S", str(socket), "-f", "/dev/null")

    async def do(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._command, *arguments, stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, arguments
        return out.decode()

    async def press(self, key: str) -> None:
        await self.do("send-keys", "-t", "top", key)

    async def until(self, *words: str, without: str = "\0") -> str:
        """Wait until all of it is on the screen, and return that."""
        deadline = time.monotonic() + 30
        while True:
            screen = await self.do("capture-pane", "-p", "-t", "top")
            if all(word in screen for word in words) and without not in screen:
                return screen
            assert time.monotonic() < deadline, f"{words} did not come, or {without!r} stayed:\n{screen}"
            await asyncio.sleep(0.1)


@asynccontextmanager
async def terminal(directory: Path, *arguments: str) -> AsyncIterator[Tmux]:
    """The command in a terminal of 100 columns and 30 rows, typed into a shell that says how it ended."""
    tmux = Tmux(directory / "tmux")
    await tmux.do("new-session", "-d", "-s", "top", "-x", "100", "-y", "30", "sh")
    try:
        await tmux.press(" ".join((*TOP, *arguments)) + "; echo ended with $?\n")
        yield tmux
    finally:
        await tmux.do("kill-server")


@pytest.mark.long
async def test_in_a_terminal(tmp_path: Path):
    """Keys choose, the size is followed, what stops answering is said, and `q` leaves the terminal as it was."""
    async with shown(rich_view()) as (serving, url), terminal(tmp_path, "--url", url) as tmux:
        screen = await tmux.until("edge ▲ leaks", "order: cost; clients: all", "q quit")
        assert screen.splitlines()[29].startswith("q quit")
        await tmux.press("a")
        await tmux.until("order: age; clients: all")
        await tmux.press("f")
        await tmux.until("streams: 1; order: age; clients: orphans")
        await tmux.press("p")
        await tmux.until("paused: p goes on")
        serving.publish(replace(rich_view(), beats=9999), serving.page)
        await tmux.press("p")
        await tmux.until("beat 9,999", "not known yet", without="paused")
        await tmux.do("resize-window", "-t", "top", "-x", "44", "-y", "20")
        screen = await tmux.until("q quit", "NOBODY'S", without="EVIDENCE")
        assert max(map(len, screen.splitlines())) <= 44
        await tmux.do("resize-window", "-t", "top", "-x", "120", "-y", "30")
        view, serving.view = serving.view, None
        await tmux.until("says: the first beat is not done yet; what is shown is the last it said")
        serving.publish(view, serving.page)
        await tmux.until("beat 9,999", without="not done yet")
        await tmux.press("q")
        screen = await tmux.until("ended with 0", without="▲")
        await tmux.press("what is typed")
        await tmux.until("what is typed")  # is shown again


@pytest.mark.long
async def test_ctrl_c_in_a_terminal(tmp_path: Path):
    """Ends it, without a traceback."""
    async with shown(rich_view()) as (_, url), terminal(tmp_path, "--url", url) as tmux:
        await tmux.until("edge ▲ leaks")
        await tmux.press("C-c")
        assert "Traceback" not in await tmux.until("ended with 0", without="▲")
