"""What tests of the GPU source share: NVIDIA's library, as our own stand-in for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokengap.lab.nvml.fake import FakeNvml, compile_library
from tokengap.lab.nvml.profiles import H100


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """A host with one H100, until the test says otherwise."""
    fake = FakeNvml(nvml_library, tmp_path / "nvml.control")
    fake.set(H100)
    return fake
