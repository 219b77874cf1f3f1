"""Certificates for tests, made by openssl: an authority, a server for loopback, a client, and a stranger."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def authority(folder: Path, name: str) -> None:
    """Make ``name.crt`` and ``name.key``, which sign others."""
    _openssl(folder, "req", "-x509", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")


def signed(folder: Path, name: str, by: str) -> None:
    """Make ``name.crt`` and ``name.key``, signed by an authority, good for 127.0.0.1 and localhost."""
    _openssl(folder, "req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signing = ("-CA", f"{by}.crt", "-CAkey", f"{by}.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signing)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca, server, renewed and client (signed by ca), and a stranger who has an authority of its own."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other"):
        authority(folder, name)
    for name in ("server", "renewed", "client"):
        signed(folder, name, by="ca")
    signed(folder, "stranger", by="other")
    return folder


def _openssl(folder: Path, *arguments: str) -> None:
    assert shutil.which("openssl"), "openssl is not installed: apt-get install openssl"
    subprocess.run(("openssl", *arguments), cwd=folder, check=True, capture_output=True)
