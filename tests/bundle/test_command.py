"""``tokengap bundle``: what it writes, what it refuses, and that it does so from an installed wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bundle.sites import DEFAULT
from tokengap.bundle.command import bundle
from tokengap.bundle.render import render
from tokengap.cli import main

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(main, ["bundle", *map(str, arguments)], env=environment, prog_name="tokengap")


def refusal(result: Result) -> str:
    """Return the one line on standard error with which it exits with 2."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def files(out: Path) -> dict[str, str]:
    return {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}


def test_it_writes_everything(tmp_path: Path):
    """What is rendered, and says how much of it."""
    result = run("--out", tmp_path / "new" / "folder")
    wanted = {path for path, _ in render(DEFAULT)}
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path}/new/folder: {len(wanted)} written, 0 removed\n"
    assert files(tmp_path / "new" / "folder").keys() == wanted
    assert run("--out", tmp_path / "new" / "folder").stdout.endswith(": 0 written, 0 removed\n")


def test_the_numbers_of_a_site(tmp_path: Path):
    """By flag, by variable, and with the age cut that the exporter takes for such a deadline."""
    run("--out", tmp_path / "a", "--deadline", "30s", "--age-cut", "25s", "--selector", 'cluster="a"')
    run("--out", tmp_path / "b", TOKENGAP_DEADLINE="30s")
    a, b = (files(tmp_path / name)["alerts/alerts.yml"] for name in "ab")
    assert re.search(r'\(tokengap_queue_age_seconds\{cluster="a"\}\) > 25\n', a)
    assert re.search(r"\(tokengap_queue_age_seconds\) > 22.5\n", b)
    assert a.startswith("# Made by `tokengap bundle --deadline 30s --age-cut 25s --selector 'cluster=\"a\"'`; ")
    assert b.startswith("# Made by `tokengap bundle --deadline 30s --age-cut 22.5s`; ")


def test_the_first_line_makes_the_same_files_again(tmp_path: Path):
    """Typed as it stands there."""
    given = (
        "--deadline",
        "30s",
        "--age-cut",
        "22.5s",
        "--selector",
        'a="it\'s"',
        "--label",
        "k=v",
        "--scrape",
        "15s",
        "--orphan-budget",
        "2.5%",
    )
    assert run("--out", tmp_path, *given).exit_code == 0
    first = files(tmp_path)["alerts/alerts.yml"].splitlines()[0]
    again = re.search(r"`(tokengap bundle .*)`", first)[1]
    command = f"{sys.executable} -m {again} --out {tmp_path} --check"
    assert subprocess.run(command, shell=True, check=False).returncode == 0


def test_check(tmp_path: Path):
    """0 and silence where nothing differs; 1, the differences and the cure where something does."""
    run("--out", tmp_path)
    same = run("--out", tmp_path, "--check")
    assert (same.exit_code, same.output) == (0, "")
    (tmp_path / "runbooks" / "TokengapDown.md").unlink()
    result = run("--out", tmp_path, "--check", "--deadline", "9s")
    assert result.exit_code == 1
    assert f"{tmp_path}/runbooks/TokengapDown.md is missing" in result.stdout
    assert f"{tmp_path}/alerts/alerts.yml is different" in result.stdout
    assert re.search(r"^\+ +max by .* > 6.75$", result.stdout, re.MULTILINE)
    assert "run `tokengap bundle`" in result.stderr
    assert not (tmp_path / "runbooks" / "TokengapDown.md").exists()


def test_what_was_edited_by_hand_is_not_lost(tmp_path: Path):
    """The difference is shown and nothing at all is written; with --force it is."""
    run("--out", tmp_path)
    rules = tmp_path / "alerts" / "alerts.yml"
    rules.write_text(rules.read_text().replace("for: 10s", "for: 1h"))
    (tmp_path / "runbooks" / "README.md").unlink()
    result = run("--out", tmp_path)
    assert refusal(result) == (
        f"tokengap: {rules}: edited by hand, as shown above; move the change into the options, or lose it with --force"
    )
    assert "-        for: 1h\n+        for: 10s\n" in result.stdout
    assert not (tmp_path / "runbooks" / "README.md").exists()
    assert run("--out", tmp_path, "--force").exit_code == 0
    assert run("--out", tmp_path, "--check").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--deadline", "5s", "--age-cut", "6s"), "tokengap: --age-cut is 6s; expected less than the deadline, 5s"),
        (("--age-cut", "9s"), "tokengap: --age-cut is 9s; expected less than the deadline, 8s"),
        (("--deadline", "soon"), "tokengap: --deadline is 'soon'; expected a time such as 8s"),
        (("--scrape", "0"), "tokengap bundle: Invalid value for '--scrape': '0' is not a time such as 8s"),
        (
            ("--orphan-budget", "1"),
            "tokengap bundle: Invalid value for '--orphan-budget': '1' is not a share such as 1%",
        ),
        (("--deadline-budget", "6%"), "tokengap: --deadline-budget is 6%; expected more than 0% and at most 5%"),
        (("--selector", "cluster=a"), "tokengap: --selector 'cluster=a'; expected matchers of labels, such as"),
        (("--runbook-base", "wiki"), "tokengap: --runbook-base 'wiki'; expected an address such as https://host/path"),
        (("--label", "release"), "tokengap: --label 'release'; expected KEY=VALUE, such as release=prometheus"),
        (("--selecto", "a"), "tokengap bundle: No such option '--selecto'. Did you mean '--selector'?"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], line: str, tmp_path: Path):
    """One line, and nothing written."""
    assert refusal(run("--out", tmp_path / "out", *arguments)).startswith(line)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    """Such as one that is a file."""
    (tmp_path / "out").write_text("")
    assert refusal(run("--out", tmp_path / "out")) == (
        f"tokengap: {tmp_path}/out/alerts/alerts.yml: cannot be written: Not a directory"
    )


def test_no_folder():
    """There is no folder that would be right for everybody."""
    assert refusal(run()) == "tokengap bundle: Missing option '--out'."


def test_from_the_wheel(built, tmp_path: Path):
    """The wheel holds the templates: it writes what the repository writes, without the repository."""
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path / "installed")
    where = "import tokengap.bundle; print(tokengap.bundle.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-P", "-m", "tokengap", "bundle", "--out", str(tmp_path / "out")]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    found = subprocess.run(
        [sys.executable, "-Pc", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout.startswith(str(tmp_path / "installed"))
    assert {path: Path(ROOT / path).read_text() for path, _ in render(DEFAULT)} == files(tmp_path / "out")


def test_json_files_stay_json(tmp_path: Path):
    """Whatever their first line says."""
    run("--out", tmp_path, "--selector", 'a="b",c=~"d.+"')
    for path, text in files(tmp_path).items():
        if path.endswith(".json"):
            assert "Made by `tokengap bundle" in json.loads(text)["description"]


def test_every_option_is_in_the_docs():
    """By its name."""
    text = (ROOT / "docs" / "bundle.md").read_text()
    options = [name for option in bundle.params for name in option.opts]
    assert [name for name in options if f"`{name}`" not in text] == []
