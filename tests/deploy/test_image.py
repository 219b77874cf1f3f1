"""The Dockerfile. No engine runs it here: it is linted, and its own steps and commands are run without one."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.conftest import install
from deploy.image import BUILD, DOCKERFILE, FINAL
from deploy.unit import CONFIG, ROOT
from tokengap.lab.parts import LOOPBACK, Part, free_port, running

pytestmark = pytest.mark.e2e


USER, GROUP = FINAL.only("USER").split(":")

#: As the container's user, whatever the image's own capabilities are: with none.
UNPRIVILEGED = (
    *("setpriv", "--reuid", USER, "--regid", GROUP, "--clear-groups", "--no-new-privs"),
    *("--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"),
)


def test_hadolint_finds_nothing():
    """With all of its rules."""
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--failure-threshold", "style", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_ends_as_a_user_that_kubernetes_knows_is_not_root():
    """`runAsNonRoot` refuses users by name."""
    assert USER.isdecimal()
    assert int(USER) > 0


def test_both_stages_have_one_python():
    """What the environment links to has to be in the final image, at the same place."""
    assert BUILD.image == f"{FINAL.image} AS build"
    assert FINAL.only("COPY") == "--from=build /opt/tokengap /opt/tokengap"


def test_what_it_copies_is_there_and_nothing_else_is_sent():
    """The list of what the build is sent names exactly what is copied."""
    copied = {name for arguments in BUILD.all("COPY") for name in arguments.split()[:-1]}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_labels():
    """Those of the OCI that people and registries look for."""
    labels = FINAL.only("LABEL")
    for name in ("title", "description", "source", "documentation", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


@contextmanager
def open_to_everybody() -> Iterator[Path]:
    """A folder that the container's user may read: pytest's are root's alone."""
    with tempfile.TemporaryDirectory(prefix="tokengap-image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def run(*command: str, cwd: Path = ROOT) -> tuple[int, str]:
    """Run a program; return its code and what it said."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


async def serves_and_says_so(environment: Path, directory: Path) -> None:
    """Run the image's command as its user, and its health check, which fails when the command has ended."""
    port = free_port()
    config = directory / "tokengap.yaml"
    config.write_text(CONFIG.read_text() + f"listen: {LOOPBACK}:{port}\n")
    config.chmod(0o644)
    (program,) = FINAL.json("ENTRYPOINT")
    arguments = [str(config) if word == "/etc/tokengap/tokengap.yaml" else word for word in FINAL.json("CMD")]
    command = (*UNPRIVILEGED, str(environment / "bin" / program), *arguments)
    assert str(config) in command
    python, *check = FINAL.json("HEALTHCHECK")
    check = [*UNPRIVILEGED, str(environment / "bin" / python), *(word.replace(":10788", f":{port}") for word in check)]
    async with running(Part("exporter", command, (port,)), directory) as exporter:
        assert await run(*check) == (0, ""), exporter.last_lines()
    code, _ = await run(*check)
    assert code != 0


async def test_its_command_runs_as_its_user(built):
    """With the wheel in an environment of its own."""
    with open_to_everybody() as folder:
        install(built.wheel, folder / "tokengap")
        await serves_and_says_so(folder / "tokengap", folder)


@pytest.mark.long
async def test_its_own_steps_give_an_environment_that_runs():
    """Each RUN of the first stage as it stands there, on a copy of what is copied there, and then the command."""
    with open_to_everybody() as folder:
        source, environment = folder / "src", folder / "opt" / "tokengap"
        source.mkdir()
        for name, arguments in BUILD.instructions:
            if name == "COPY":
                *what, _ = arguments.split()
                for each in what:
                    put = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
                    put(ROOT / each, source / each)
            elif name == "RUN":
                step = arguments.replace("/opt/tokengap", str(environment))
                code, said = await run("sh", "-ec", step, cwd=source)
                assert code == 0, said
        await serves_and_says_so(environment, folder)
