"""What every test runs under, what is shipped, and NVIDIA's library for tests of GPUs, as our own stand-in for it."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from lab.guarded import Certificate, make_certificate
from tokengap.lab.nvml.fake import FakeNvml, compile_library
from tokengap.lab.nvml.profiles import H100

# The same examples every time, and no limit in milliseconds on one of them: `make test` leaves nothing to luck, and a
# CI machine may stall. `make test-long` looks for new examples, many more of them.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("repeatable")


ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Built:
    """What is uploaded for a release."""

    wheel: Path
    sdist: Path


def build(source: Path, out: Path) -> Built:
    """Build a source tree as it is released."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """A host with one H100, until the test says otherwise."""
    fake = FakeNvml(nvml_library, tmp_path / "nvml.control")
    fake.set(H100)
    return fake


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate for loopback that nobody but the test trusts."""
    return make_certificate(tmp_path_factory.mktemp("tls"))
