"""Rendered files on disk: written whole, pruned, compared, and never over what a person wrote.

The first line of each file says from what it was made and how to change it, and ends with a digest of the rest. A file
whose digest is right may be replaced; any other was edited by hand, or was never ours.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokengap.bundle.render.file import File
from tokengap.errors import SetupError

#: Where rendered files lie; what is ours there and rendered no more is removed.
FOLDERS: Final = ("alerts", "dashboards", "runbooks", "deploy/kubernetes")

_MARK: Final = re.compile(r"Made by `tokengap bundle[^`\n]*`; change it there, not here(?P<seal> \[[0-9a-f]{16}\])")


@dataclass(frozen=True, slots=True)
class Change:
    """What has to happen to one file. ``now`` is what is on disk, ``wanted`` what should be; None: no file.

    ``by_hand``: what is there was not made by us as it stands, so it may not be lost.
    """

    path: Path
    now: str | None
    wanted: str | None
    by_hand: bool

    @property
    def difference(self) -> str:
        """The difference between what is there and what should be, as ``diff -u`` shows it."""
        now, wanted = ((text or "").splitlines(keepends=True) for text in (self.now, self.wanted))
        return "".join(difflib.unified_diff(now, wanted, f"{self.path}", f"{self.path} as rendered"))

    def __str__(self) -> str:
        word = "missing" if self.now is None else "not rendered any more" if self.wanted is None else "different"
        return f"{self.path} is {word}"


def changes(files: Iterable[File], out: Path, options: str) -> list[Change]:
    """Return what has to change below ``out``. ``options`` are the command's, said in each file's first line.

    Raises SetupError for what cannot be read.
    """
    wanted = {out / file.path: sealed(file, options) for file in files}
    try:
        there = {path: _text(path) for path in {*wanted, *_present(out)} if path.exists()}
    except OSError as error:
        raise SetupError(f"{error.filename}: cannot be read: {error.strerror}") from error
    stale = [path for path, text in there.items() if path not in wanted and _MARK.search(text)]
    return [
        Change(path, there.get(path), wanted.get(path), path in there and not intact(there[path]))
        for path in (*wanted, *sorted(stale))
        if there.get(path) != wanted.get(path)
    ]


def apply(changes: Iterable[Change]) -> None:
    """Make the changes, each file whole or not at all. Raises SetupError for the first that cannot be made."""
    for change in changes:
        try:
            if change.wanted is None:
                change.path.unlink()
            else:
                _write(change.path, change.wanted)
        except OSError as error:
            raise SetupError(f"{change.path}: cannot be written: {error.strerror}") from error


def sealed(file: File, options: str = "") -> str:
    """Return a file's text with its first line: from what it was made, how to change it, and the digest of the rest."""
    command = f"tokengap bundle {options}".strip()
    mark = f"Made by `{command}`; change it there, not here"
    if file.path.endswith(".json"):
        # JSON has no comments, and Grafana shows this one where it is read: in the dashboard's settings.
        document = json.loads(file.text)
        about = f"{document.pop('description', '')} {mark}".strip()
        text = json.dumps({"description": about} | document, indent=2, ensure_ascii=False) + "\n"
        text = text.replace("{\n  ", "{", 1)  # so that it is on the first line
        mark = json.dumps(mark, ensure_ascii=False).strip('"')
    elif file.path.endswith(".md"):
        text = f"<!-- {mark} -->\n\n{file.text}"
    else:
        text = f"# {mark}\n{file.text}"
    return text.replace(mark, mark + _seal(text), 1)


def intact(text: str) -> bool:
    """Tell whether a text is as it was rendered, be it by another version or with other options."""
    found = _MARK.search(text)
    return found is not None and _seal(text[: found.start("seal")] + text[found.end("seal") :]) == found["seal"]


def _seal(text: str) -> str:
    return f" [{hashlib.sha256(text.encode()).hexdigest()[:16]}]"


def _present(out: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in (out / folder).glob("*") if path.is_file())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
