"""Steering a gateway while it runs: over its socket and by SIGHUP, with who, when and why, and no stream lost."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
from pathlib import Path

import pytest

from admit.gateways import admitting, chat, published, session
from lab.commands import started, tokengap
from lab.serving import engine, until
from tokengap.admit.control import Order, Standing, tell, usual_path, who
from tokengap.errors import SetupError
from tokengap.lab.parts import LOOPBACK, free_port, listens

ME = who(os.geteuid(), os.getpid())


async def told(path: Path, order: Order) -> Standing:
    return await asyncio.to_thread(tell, path, order)


async def test_a_switch_tells_who_when_and_why_and_drops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The stream goes on to its end, the one that waits is served, and the next is refused as busy."""
    caplog.set_level(logging.WARNING, "tokengap.admit.control")
    path = tmp_path / "admit.sock"
    async with engine(max_num_seqs=1, rate=50) as port, admitting(port, slots=1, admit_control=str(path)) as built:
        async with session(built) as asking:
            answers = [asyncio.create_task(asked(asking)) for _ in range(2)]
            await until(lambda: waiting(built, 1))
            standing = await told(path, Order("busy", "the forecast is off"))
            assert (standing.mode, standing.was, standing.by, standing.why) == (
                "busy",
                "age",
                ME,
                "the forecast is off",
            )
            async with asking.post("/v1/chat/completions", json=chat()) as third:
                assert third.status == 429
            assert await asyncio.gather(*answers) == [200, 200]
        assert await told(path, Order()) == standing
    (record,) = caplog.records
    assert (record.mode, record.was, record.by, record.why) == ("busy", "age", ME, "the forecast is off")


async def asked(asking) -> int:
    async with asking.post("/v1/chat/completions", json=chat()) as answer:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        return answer.status


async def waiting(built, count: int) -> bool:
    return any(one.waiting == count for one in built.admission.gate.view(0.0).classes)


async def test_only_its_user_may_steer_it(tmp_path: Path):
    """The socket is its owner's alone, and goes with the gateway."""
    path = tmp_path / "admit.sock"
    async with engine() as port, admitting(port, admit_control=str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


@pytest.mark.parametrize(
    "line", [b"{}x\n", b'{"mode": "idle"}\n', b'{"modus": "age"}\n', b"\n", b"x" * 9000, b"\xff\n"]
)
async def test_nonsense_changes_nothing(line: bytes, tmp_path: Path):
    """It is answered or dropped, and the gateway takes the next order."""
    path = tmp_path / "admit.sock"
    async with engine() as port, admitting(port, admit_control=str(path)):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        async with asyncio.timeout(5):
            said = await reader.read()
        writer.close()
        assert said == b"" or b"error" in said
        assert (await told(path, Order())).mode == "age"


async def test_a_file_in_its_place_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The gateway serves without, and says so."""
    path = tmp_path / "mine"
    path.write_text("precious")
    async with engine() as port, admitting(port, admit_control=str(path)) as built:
        assert (await published(built))["tokengap_admit_mode{age}"] == 1
    assert path.read_text() == "precious"
    assert any("it exists and is no socket" in getattr(record, "why", "") for record in caplog.records)


def test_nobody_there_is_said(tmp_path: Path):
    """With where it was looked for."""
    with pytest.raises(SetupError, match=r"no `tokengap admit` answers at .*/admit.sock"):
        tell(tmp_path / "admit.sock", Order())


async def test_what_is_no_gateway_is_said(tmp_path: Path):
    """Something else answers there."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"500 what?\n")
        writer.close()

    path = tmp_path / "other.sock"
    async with await asyncio.start_unix_server(other, path):
        with pytest.raises(SetupError, match="is no `tokengap admit`"):
            await told(path, Order())


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        (
            {"RUNTIME_DIRECTORY": "/run/tokengap:/run/b", "XDG_RUNTIME_DIR": "/x"},
            "/run/tokengap/tokengap-admit-8090.sock",
        ),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/tokengap-admit-8090.sock"),
    ],
)
def test_where_it_is_by_default(environment, path, monkeypatch: pytest.MonkeyPatch):
    """In the runtime directory: systemd's for a service, a user's for a user."""
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert usual_path(8090) == Path(path)


@pytest.mark.e2e
async def test_the_commands_and_sighup(tmp_path: Path):
    """As an operator uses them: switch and ask, edit the file and send SIGHUP, and have it wrong once."""
    port, file = free_port(), tmp_path / "admit.yaml"

    def write(mode: str, deadline: str = "8s") -> None:
        file.write_text(
            f"engines: ['http://127.0.0.1:{worker}']\nslots: 1\nadmit_listen: '{LOOPBACK}:{port}'\n"
            f"admit_control: {tmp_path}/admit.sock\nadmit_mode: {mode}\ndeadline: {deadline}\n"
        )

    async with engine(max_num_seqs=1) as worker:
        write("age")
        async with started("admit", "--config", file) as process:
            await until(lambda: listens(port), within=20)
            ran = await tokengap("admit", "mode", "busy", "--why", "to be sure", "--config", file)
            assert ran.code == 0
            assert ran.out.startswith("mode busy, before age; set ")
            assert ran.out.endswith(": to be sure\n")
            assert "pid " in ran.out
            process.send_signal(signal.SIGHUP)
            await until(lambda: mode_is(file, "age"), within=20)
            write("nonsense")
            process.send_signal(signal.SIGHUP)
            assert (await asyncio.wait_for(logged(process, "are wrong"), 20)).startswith("ts=")
            write("busy", "10s")
            process.send_signal(signal.SIGHUP)
            await until(lambda: mode_is(file, "busy"), within=20)
            process.terminate()
            _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, err
    assert err.decode().count('by="SIGHUP, sender not told" why="the settings were read again"') == 1
    ran = await tokengap("admit", "mode", "--config", file)
    assert (ran.code, ran.out) == (2, "")


async def logged(process, words: str) -> str:
    """The first line from now on that has these words."""
    while words not in (line := (await process.stderr.readline()).decode()):
        pass
    return line


async def mode_is(file: Path, mode: str) -> bool:
    return (await tokengap("admit", "mode", "--config", file)).out.startswith(f"mode {mode}")
