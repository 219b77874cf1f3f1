"""The ready-made examples under deploy/health: each is what its program accepts, and does what it says."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from health.looking import at, working
from lab.serving import engine
from tokengap.health.look import Plan
from tokengap.lab.parts import LOOPBACK, free_port
from tokengap.lab.truth import EngineControl

DEPLOY = Path(__file__).parent.parent.parent / "deploy" / "health"
DOCS = Path(__file__).parent.parent.parent / "docs" / "health.md"
SCRIPT = DEPLOY / "restart-if-stuck"
#: Where this interpreter's `tokengap` is.
PROGRAMS = Path(sys.executable).parent
SHORT = "--window 0.3s"

pytestmark = pytest.mark.e2e


async def run(*command: object, **environment: str) -> tuple[int, str]:
    """Run a program with our `tokengap` on its path; return its code and all that it said."""
    path = os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PATH": path} | environment,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode()


class TestKubernetes:
    manifest = yaml.safe_load((DEPLOY / "kubernetes-liveness.yaml").read_text())

    @property
    def container(self) -> dict:
        (container,) = self.manifest["spec"]["template"]["spec"]["containers"]
        return container

    def command(self, probe: str, port: int) -> list[str]:
        """Return a probe's command, for an engine of ours and with a short window."""
        command = self.container[probe]["exec"]["command"]
        assert "http://127.0.0.1:8000 --window 10s" in command[-1]
        line = command[-1].replace("/opt/tokengap/bin/", "").replace(":8000", f":{port}")
        return [*command[:-1], line.replace("--window 10s", SHORT)]

    def test_it_is_a_deployment(self):
        """With the selector that its pods match, the port that is probed, and probes of known fields."""
        assert (self.manifest["apiVersion"], self.manifest["kind"]) == ("apps/v1", "Deployment")
        spec = self.manifest["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert [port["containerPort"] for port in self.container["ports"]] == [8000]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            known = {"exec", "httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"}
            assert self.container[probe].keys() <= known

    def test_no_probe_is_cut_short(self):
        """kubelet counts a probe that ran out of time as failed."""
        assert Plan().longest < 54  # as docs/health.md says
        for probe in ("startupProbe", "livenessProbe"):
            assert self.container[probe]["timeoutSeconds"] > Plan().longest

    async def test_liveness(self):
        """It fails on a stuck engine and a dead one, with the verdict, and on no other."""
        async with working(6, max_num_seqs=4) as port:
            busy, _ = await run(*self.command("livenessProbe", port))
            await EngineControl(port).freeze()
            stuck, said = await run(*self.command("livenessProbe", port))
        dead, _ = await run(*self.command("livenessProbe", free_port()))
        assert (busy, stuck, dead) == (0, 1, 1)
        assert f"{at(port)} stuck: running 4, waiting 2, nothing moved for " in said
        async with engine(disable_log_stats=True) as port:
            assert (await run(*self.command("livenessProbe", port)))[0] == 0

    async def test_a_probe_that_cannot_run_restarts_nothing(self):
        """A wrong option, and a program that is not there."""
        *shell, line = self.command("livenessProbe", 1)
        for wrong in (line.replace("--window", "--windou"), line.replace("tokengap ", "tokengap-that-is-not-there ")):
            assert (await run(*shell, wrong))[0] == 0

    async def test_startup(self):
        """Not before the page can be read."""
        assert (await run(*self.command("startupProbe", free_port())))[0] != 0
        async with engine() as port:
            assert (await run(*self.command("startupProbe", port)))[0] == 0


class TestScript:
    @pytest.fixture
    def restarts(self, tmp_path: Path):
        """A command that notes each restart, and the environment in which it is one."""

        class Restarts:
            command = ("sh", "-c", f"echo once >> {tmp_path}/restarts")
            environment = {"STATE_DIRECTORY": str(tmp_path / "state"), "HEALTH_OPTIONS": SHORT}  # noqa: RUF012 - read only

            @property
            def count(self) -> int:
                file = tmp_path / "restarts"
                return len(file.read_text().splitlines()) if file.exists() else 0

            async def look(self, port: int, **environment: str) -> tuple[int, str]:
                return await run(SCRIPT, at(port), *self.command, **(self.environment | environment))

        return Restarts()

    async def test_stuck_is_restarted_once(self, restarts, tmp_path: Path):
        """And not again within 15 minutes: what a restart did not cure needs a person. After that, again."""
        async with working(2) as port:
            await EngineControl(port).freeze()
            code, said = await restarts.look(port)
            assert (code, restarts.count) == (0, 1)
            assert " stuck: running 2" in said
            code, said = await restarts.look(port)
            assert (code, restarts.count) == (1, 1)
            assert "was restarted less than 15 minutes ago and is stuck again: somebody has to look at it" in said
            (mark,) = (tmp_path / "state").iterdir()
            os.utime(mark, (0, 0))
            assert (await restarts.look(port))[0] == 0
            assert restarts.count == 2

    async def test_nothing_else_is(self, restarts, tmp_path: Path):
        """Not a busy engine, not one that is gone or cannot be read, and not for a `tokengap` that fails."""
        async with working(6) as port:
            assert (await restarts.look(port))[0] == 0
        async with engine(disable_log_stats=True) as port:
            assert (await restarts.look(port))[0] == 0
        assert (await restarts.look(free_port()))[0] == 0
        assert (await restarts.look(port, HEALTH_OPTIONS="--windou 1s"))[0] == 0
        broken = tmp_path / "bin" / "tokengap"
        broken.parent.mkdir()
        broken.write_text("#!/bin/sh\necho Traceback >&2\nexit 1\n")
        broken.chmod(0o755)
        path = os.pathsep.join([str(broken.parent), os.environ["PATH"]])
        assert (await restarts.look(port, PATH=path))[0] == 0
        assert restarts.count == 0

    async def test_a_restart_that_fails(self, restarts):
        """Its unit fails too."""
        async with working(2) as port:
            await EngineControl(port).freeze()
            assert (await run(SCRIPT, at(port), "false", **restarts.environment))[0] == 1

    async def test_wrong_arguments(self):
        """64, as for the command."""
        assert await run(SCRIPT, "http://127.0.0.1:1") == (64, "usage: restart-if-stuck URL COMMAND...\n")


def test_the_units(tmp_path: Path):
    """systemd finds nothing wrong with them, the script's place aside."""
    assert shutil.which("systemd-analyze"), "systemd-analyze is not installed: apt-get install systemd"
    for unit in ("tokengap-health@.service", "tokengap-health@.timer"):
        text = (DEPLOY / unit).read_text().replace("/usr/local/bin/restart-if-stuck", str(SCRIPT))
        (tmp_path / unit.replace("@", "@vllm")).write_text(text)
    (tmp_path / "vllm.service").write_text("[Service]\nExecStart=/bin/true\n")
    units = sorted(map(str, tmp_path.iterdir()))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    ours = [line for line in checked.stderr.splitlines() if "tokengap" in line]
    assert (checked.returncode, ours) == (0, [])


def test_the_cron_line():
    """Five fields of time, a user, and the script with an engine and what restarts it."""
    *_, line = (DEPLOY / "tokengap-health.cron").read_text().splitlines()
    match = re.fullmatch(r"((?:\S+ ){5})root flock -n \S+ restart-if-stuck (http://\S+) (.+) 2>&1 \| logger .*", line)
    assert match
    assert match[1] == "*/2 * * * * "
    assert match[2] == f"http://{LOOPBACK}:8000"


def test_the_docs_lead_to_each():
    """By its name."""
    text = DOCS.read_text()
    assert [file.name for file in DEPLOY.iterdir() if f"deploy/health/{file.name}" not in text] == []
