"""The wheel, installed where nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.unit import ROOT


@pytest.fixture(scope="session")
def installed(built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel."""
    environment = tmp_path_factory.mktemp("installed")
    install(built.wheel, environment)
    return environment / "bin"


def install(wheel: Path, environment: Path) -> None:
    """Make an environment with a wheel and what that asks for, in the versions that are pinned, and nothing else."""
    run("venv", "--clear", "--without-pip", environment)
    pinned = ROOT / "requirements.txt"
    run("pip", "--python", environment / "bin" / "python", "install", "--quiet", "--constraint", pinned, wheel)


def run(module: str, *arguments: object) -> None:
    """Run one of Python's own programs."""
    command = (sys.executable, "-m", module, *map(str, arguments))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
