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
    uv(f"venv --clear --python {sys.executable} {environment}")
    uv(f"pip install --python {environment / 'bin' / 'python'} --constraints {ROOT / 'requirements.txt'} {wheel}")


def uv(arguments: str) -> str:
    """Run uv, which does what pip and pipx do, in a tenth of the time; return what it printed."""
    done = subprocess.run([sys.executable, "-m", "uv", *arguments.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
