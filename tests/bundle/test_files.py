"""Files on disk: written whole, pruned, compared, and nothing that a person wrote is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tokengap.bundle.files import Change, apply, changes, intact, sealed
from tokengap.bundle.render.file import File
from tokengap.errors import SetupError

RULES = File("alerts/alerts.yml", "---\ngroups: []\n")
BOOK = File("runbooks/A.md", "# A\n\nWhat to do.\n")
BOARD = File("dashboards/a.json", json.dumps({"title": "A", "description": "Who pays."}))
FILES = (RULES, BOOK, BOARD)

#: With everything that a shell, YAML and JSON have to quote.
OPTIONS = """--selector 'cluster="a",region=~"eu-.+\\\\d"' --owner "it's us" """.strip()


def write(out: Path, *files: File, options: str = "") -> list[Change]:
    found = changes(files, out, options)
    apply(found)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
@pytest.mark.parametrize("options", ["", OPTIONS])
def test_the_first_line(file: File, options: str):
    """It says by which command the file was made and where to change it; the rest is as it was rendered."""
    text = sealed(file, options)
    first, _, rest = text.partition("\n")
    said = json.loads(text)["description"] if file.path.endswith(".json") else first
    assert f"Made by `{f'tokengap bundle {options}'.strip()}`; change it there, not here [" in said
    assert "tokengap bundle" in first
    assert file.path.endswith(".json") or rest.lstrip("\n") == file.text
    assert intact(text)


def test_the_first_line_leaves_a_file_what_it_is():
    """Comments in YAML and Markdown; in JSON, which has none, behind the dashboard's own description."""
    assert yaml.safe_load(sealed(RULES)) == {"groups": []}
    board = json.loads(sealed(BOARD))
    assert board["title"] == "A"
    assert board["description"].startswith("Who pays. Made by ")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
def test_any_edit_is_seen(file: File):
    """One character anywhere, the first line included."""
    text = sealed(file, OPTIONS)
    for at in range(len(text)):
        other = "y" if text[at] == "x" else "x"
        assert not intact(text[:at] + other + text[at + 1 :])
    assert not intact(text + "\n")
    assert not intact(file.text)


def test_written_and_then_the_same(tmp_path: Path):
    """Folders are made; a second time there is nothing to do, and no other file lies about."""
    assert [str(change.path.relative_to(tmp_path)) for change in write(tmp_path, *FILES)] == [f.path for f in FILES]
    assert changes(FILES, tmp_path, "") == []
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["A.md", "a.json", "alerts.yml"]


def test_what_is_rendered_no_more_is_removed(tmp_path: Path):
    """But nothing that was not ours, wherever it lies."""
    write(tmp_path, *FILES)
    ours, theirs = tmp_path / "runbooks" / "A.md", tmp_path / "runbooks" / "theirs.md"
    theirs.write_text("# Ours since 2019\n")
    write(tmp_path, RULES, BOARD)
    assert not ours.exists()
    assert theirs.read_text() == "# Ours since 2019\n"


def test_another_rendering_is_replaced(tmp_path: Path):
    """With other options or from another version: nobody edited it, so nothing is lost."""
    write(tmp_path, *FILES, options="--deadline 30s")
    found = changes(FILES, tmp_path, "")
    assert [(change.by_hand, change.wanted is None) for change in found] == [(False, False)] * 3


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
def test_an_edit_by_hand_is_told(file: File, tmp_path: Path):
    """With the difference; of a file that is rendered no more too."""
    write(tmp_path, *FILES)
    path = tmp_path / file.path
    edited = path.read_text().replace("A", "B").replace("[]", "[{name: mine}]")
    path.write_text(edited)
    (change,) = changes(FILES, tmp_path, "")
    assert change.by_hand
    assert f"--- {path}\n+++ {path} as rendered\n" in change.difference
    removed = [
        line[1:] for line in change.difference.splitlines() if line.startswith("-") and not line.startswith("---")
    ]
    assert removed
    assert all(line in edited for line in removed)
    (gone,) = changes([one for one in FILES if one is not file], tmp_path, "")
    assert (gone.by_hand, gone.wanted) == (True, None)


def test_a_file_that_was_never_ours(tmp_path: Path):
    """Where one of ours should be, it is taken for an edited one."""
    (tmp_path / "alerts").mkdir()
    (tmp_path / "alerts" / "alerts.yml").write_text("groups: []\n")
    assert [change.by_hand for change in changes(FILES, tmp_path, "")] == [True, False, False]


def test_what_cannot_be_written(tmp_path: Path):
    """One line, with the path and the reason."""
    (tmp_path / "alerts").write_text("a file where a folder should be")
    with pytest.raises(SetupError, match=rf"^{tmp_path}/alerts/alerts.yml: cannot be written: (File exists|Not a dir)"):
        write(tmp_path, RULES)


def test_what_cannot_be_read(tmp_path: Path):
    """A folder where a file should be."""
    (tmp_path / RULES.path).mkdir(parents=True)
    with pytest.raises(SetupError, match="cannot be read: Is a directory"):
        changes(FILES, tmp_path, "")


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whole, and nothing beside it."""
    write(tmp_path, RULES)
    former = (tmp_path / RULES.path).read_text()

    def no_space(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(SetupError, match="cannot be written: No space left on device"):
        write(tmp_path, RULES._replace(text="groups: [1]\n"))
    assert (tmp_path / RULES.path).read_text() == former
    assert list((tmp_path / "alerts").iterdir()) == [tmp_path / RULES.path]
