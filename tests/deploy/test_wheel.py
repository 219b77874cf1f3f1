"""What is released: a wheel that needs nothing beside it, and a source archive from which the same wheel comes."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from conftest import build
from deploy.unit import ROOT
from lab.commands import Ran
from tokengap import __version__
from tokengap.web.files import static

pytestmark = pytest.mark.e2e

#: Files beside the code, which a wheel easily lacks.
BESIDE = ("web/static/page.html", "lab/nvml/fake_nvml.c", "bundle/templates/runbook.md.j2")


def contents(wheel: Path) -> dict[str, str]:
    """Return the digest of each file."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def run(program: Path, *arguments: str, **environment: str) -> Ran:
    """Run what was installed, in an environment without ours."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, env=environment, cwd="/")
    return Ran(done.returncode, done.stdout, done.stderr)


def tracked(*folders: str) -> list[str]:
    """Return what is committed."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_the_wheel_has_all_of_the_package_and_nothing_else(built):
    """Each committed file of it, those beside the code as well; no test, no cache."""
    names = contents(built.wheel).keys()
    package = {name for name in names if not name.startswith(f"tokengap-{__version__}.dist-info/")}
    assert package == {name.removeprefix("exporter/") for name in tracked("exporter")}
    assert {f"tokengap/{name}" for name in BESIDE} <= package
    assert f"tokengap-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_source_archive_has_all_that_is_committed(built):
    """So that it can be tested by whoever packages it."""
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked()) - names == set()


def test_the_same_wheel_comes_from_the_source_archive(built, tmp_path: Path):
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert contents(build(source, tmp_path / "again").wheel) == contents(built.wheel)


def test_it_needs_nothing_that_it_does_not_ask_for(installed: Path):
    """Every module can be imported where nothing else is installed, and the command starts."""
    code = "from pkgutil import walk_packages as walk; import sys, tokengap as t\n"
    code += "for module in walk(t.__path__, 'tokengap.'): __import__(module.name)\nprint(*sys.modules)"
    ran = run(installed / "python", "-Wignore", "-c", code)
    assert (ran.code, ran.err) == (0, "")
    assert {"tokengap.lab.drill", "tokengap.top.screen", "tokengap.sources.nvml_reader.calls"} <= {*ran.out.split()}
    assert run(installed / "tokengap", "--help").out.startswith("Usage: tokengap ")
    assert run(installed / "tokengap", "--version").out.startswith(f"tokengap {__version__}, Python ")


def test_the_page_is_in_it(installed: Path):
    """What a browser asks for is served from the wheel, byte for byte."""
    code = "from tokengap.web.files import static; print({n: b for n, (b, _) in static().items()})"
    ran = run(installed / "python", "-c", code)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.strip() == str({name: content for name, (content, _) in static().items()})


def test_completion_in_a_shell(installed: Path):
    """bash, as docs/install.md sets it up, completes commands and their options."""
    ready = f'PATH={installed}:$PATH; eval "$(_TOKENGAP_COMPLETE=bash_source tokengap)"'
    ask = '; COMP_CWORD={at}; COMP_WORDS=(tokengap {line}); _tokengap_completion tokengap; echo "${{COMPREPLY[@]}}"'
    for at, line, wanted in ((1, "d", "demo drill doctor"), (2, "demo --p", "--port")):
        ran = run(Path("/bin/bash"), "-c", ready + ask.format(at=at, line=line), PATH="/usr/bin:/bin")
        assert (ran.code, ran.out.split()) == (0, wanted.split()), ran.err
