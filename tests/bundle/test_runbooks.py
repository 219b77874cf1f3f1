"""The runbooks: short, whole, linked, and what is to be pasted can be pasted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bundle.linting import query_problems
from bundle.sites import DEFAULT, OTHER, SITES
from tokengap.bundle.render.runbooks import files
from tokengap.bundle.site import REPOSITORY
from tokengap.bundle.watches import watches

ROOT = Path(__file__).parent.parent.parent

NAMES = [watch.name for watch in watches(DEFAULT)]
PAGES = {Path(file.path).name: file.text for file in files(DEFAULT)}
BOOKS = {f"{name}.md": PAGES[f"{name}.md"] for name in NAMES}

#: What a command may begin with: ours, and what every host has.
PROGRAMS = {"tokengap", "curl", "journalctl", "systemctl", "ss", "promtool", "dmesg", "nvidia-smi", "cat"}

SECTIONS = [
    *(
        "Right now",
        "Meaning",
        "Impact",
        "Decide",
        "Diagnosis",
        "Mitigation",
        "Do not",
        "Rollback",
        "False alarm",
        "Limits",
    ),
]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page, as forges make them from its headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: str) -> list[str]:
    return re.findall(r"^ *\$ (.*)$", page, re.MULTILINE)


@pytest.mark.parametrize("name", BOOKS)
class TestShape:
    def test_its_sections(self, name: str):
        """The same on every page, in the same order, each with something in it."""
        page = BOOKS[name]
        assert re.findall(r"^## (.*)$", page, re.MULTILINE) == SECTIONS
        for section in re.split(r"^## .*$", page, flags=re.MULTILINE)[1:]:
            assert section.strip()

    def test_it_is_one_screen(self, name: str):
        """What is read first is at most 400 words, up to the commands."""
        first, _, _ = BOOKS[name].partition("## Diagnosis")
        words = re.sub(r"```promql.*?```", "", first, flags=re.DOTALL).split()
        assert len(words) <= 400

    def test_nothing_is_left_open(self, name: str):
        """No note to oneself, and no hole of a template."""
        assert not re.search(r"TODO|FIXME|XXX|TBD|\{\{|None\b", BOOKS[name])

    def test_its_commands(self, name: str):
        """At least one, each of a program that is there, with an example of what it prints."""
        assert commands(BOOKS[name])
        for command in commands(BOOKS[name]):
            assert command.split()[0] in PROGRAMS
        for block in re.findall(r"```console\n(.*?)```", BOOKS[name], re.DOTALL):
            assert len(block.strip().splitlines()) >= 2

    def test_its_queries(self, name: str):
        """Every block of PromQL is one query, of series that there are."""
        blocks = re.findall(r"```promql\n(.*?)```", BOOKS[name], re.DOTALL)
        assert len(blocks) >= 2
        for block in blocks:
            assert list(query_problems(block, DEFAULT)) == []

    def test_its_series(self, name: str):
        """What the text names in passing is there too."""
        for series in re.findall(r"(?<![:\w])tokengap_\w+", BOOKS[name]):
            assert list(query_problems(f"changes({series}[1h])", DEFAULT)) == []


@pytest.mark.parametrize("site", SITES, ids=["default", "other"])
def test_links_lead_somewhere(site):
    """To a page and an anchor that are there, or to the site."""
    pages = {Path(file.path).name: file.text for file in files(site)}
    for name, page in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", page):
            if target.startswith(site.dashboards):
                continue
            if target.startswith(REPOSITORY):
                assert (ROOT / target.removeprefix(f"{REPOSITORY}/")).exists(), f"{name}: {target}"
                continue
            file, _, anchor = target.partition("#")
            assert (file or name) in pages, f"{name}: {target}"
            assert not anchor or anchor in anchors(pages[file or name]), f"{name}: {target}"


def test_alerts_that_are_named_are_there():
    """And are links, but on their own page."""
    for name, page in BOOKS.items():
        for alert in re.findall(r"Tokengap\w+", page):
            assert alert in NAMES, f"{name}: {alert}"
        others = re.findall(r"(?<![\[\w/(])Tokengap\w+", page)
        assert {*others} == {name.removesuffix(".md")}


def test_the_index():
    """Every page is in it."""
    assert re.findall(r"\]\((Tokengap\w+)\.md\)", PAGES["README.md"]) == NAMES


def test_the_words_are_the_sites():
    """Owner and addresses."""
    for file in files(OTHER):
        assert OTHER.owner in file.text
        assert "127.0.0.1" not in file.text
