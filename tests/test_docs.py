"""The documents that are written by hand: their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bundle.test_runbooks import anchors

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    """Each relative link names a file that is there, and an anchor in it that is."""
    path = PAGES[page]
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text()), target
