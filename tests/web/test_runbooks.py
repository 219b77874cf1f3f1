"""The runbooks as the exporter serves them: the rendered text, as HTML that lets nothing through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import PurePosixPath

import aiohttp
import pytest
from yarl import URL

from tokengap.bundle.render.runbooks import files
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches
from tokengap.web import runbooks
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

SITE = Site(deadline=30, age_cut=25, engine="http://10.0.0.2:8000")
NAMES = [watch.name for watch in watches(SITE)]
TEXTS = {PurePosixPath(file.path).stem: file.text for file in files(SITE)}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client of an exporter that has not beaten yet: runbooks do not wait for that."""
    server = Server(make_app(Serving(also=(), site=SITE)))
    await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(server.url) as session:
        yield session
    await server.stop()


class Page(HTMLParser):
    """What is on a page: its tags, its links, its tables row by row, and the text of its main part."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.rows: list[int] = []
        self.main = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if tag == "a" and name == "href"]
        if tag == "tr":
            self.rows.append(0)
        elif tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_data(self, data: str) -> None:
        if "main" in self.tags:
            self.main += data


async def page(client: aiohttp.ClientSession, path: str) -> Page:
    async with client.get(path) as answer:
        assert answer.status == 200, path
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        return Page(await answer.text())


def words(markdown: str) -> list[str]:
    """The words of a text, without what only makes it Markdown: targets of links, fences, numbers of lists."""
    text = re.sub(r"\]\([^)]*\)", "", markdown)
    text = re.sub(r"^ *```\w*$|^ *\d+\. ", "", text, flags=re.MULTILINE)
    return re.findall(r"\w+", text)


async def test_every_page_has_the_whole_text(client: aiohttp.ClientSession):
    """Word by word as `tokengap bundle` writes it, with this exporter's numbers."""
    for name, text in TEXTS.items():
        shown = await page(client, "/runbooks/" + name.replace("README", ""))
        assert re.findall(r"\w+", shown.main) == words(text), name
    assert "25s" in (await page(client, "/runbooks/TokengapQueueWillMissDeadline")).main
    assert "http://10.0.0.2:8000" in (await page(client, "/runbooks/TokengapEngineStuck")).main


async def test_every_link_between_them_leads_somewhere(client: aiohttp.ClientSession):
    """From the index each is one click away, by the name of its page or of its file."""
    index = await page(client, "/runbooks/")
    assert [f"./{name}" for name in NAMES] == [link for link in index.links if "Tokengap" in link]
    for name in TEXTS:
        shown = await page(client, f"/runbooks/{name.replace('README', '')}")
        own = {link for link in shown.links if not link.startswith("http")}
        assert {"../", "./"} <= own
        for link in own - {"../"}:
            await page(client, f"/runbooks/{link}")
    assert (await page(client, "/runbooks/TokengapDown.md")).tags == (await page(client, "/runbooks/TokengapDown")).tags


async def test_tables_are_tables(client: aiohttp.ClientSession):
    """Each with as many cells in every row."""
    for name in ("TokengapEngineStuck", "decision-matrix", "rollback"):
        shown = await page(client, f"/runbooks/{name}")
        assert set(shown.rows) <= {2, 3}
        assert len(shown.rows) > 3


async def test_the_short_address_sends_on(client: aiohttp.ClientSession):
    """`/runbooks` leads to the index, where its links are right."""
    async with client.get("/runbooks", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (308, "runbooks/")


@pytest.mark.parametrize(
    "path",
    [
        "/runbooks/TokengapNever",
        "/runbooks/../../etc/passwd",
        "/runbooks/..%2f..%2fetc%2fpasswd",
        "/runbooks/%2e%2e/alerts/alerts.yml",
        "/runbooks//etc/passwd",
        "/runbooks/runbook.md.j2",
        "/runbooks/TokengapDown%00",
        "/runbooks/tokengapdown",
        "/runbooks/<script>alert(1)</script>",
    ],
)
async def test_what_is_no_runbook_is_not_there(client: aiohttp.ClientSession, path: str):
    """No path leads to a file, and what was asked for is not repeated."""
    async with client.get(URL(path, encoded=True)) as answer:
        assert answer.status == 404
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert "passwd" not in (said := await answer.text())
        assert "script" not in said


async def test_other_methods_are_refused(client: aiohttp.ClientSession):
    """HEAD has the headers, anything that writes is 405."""
    async with client.head("/runbooks/TokengapDown") as answer:
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 1000
    async with client.post("/runbooks/TokengapDown") as answer:
        assert answer.status == 405


async def test_they_are_made_once(client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    """However many ask at once."""
    made = 0
    real = runbooks.pages

    def pages(site: Site):
        nonlocal made
        made += 1
        return real(site)

    monkeypatch.setattr(runbooks, "pages", pages)
    await asyncio.gather(*(page(client, "/runbooks/") for _ in range(20)))
    assert made == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("a <b>bold</b> word", "a &lt;b&gt;bold&lt;/b&gt; word"),
        ("[x](javascript:alert(1))", "[x](javascript:alert(1))"),
        ("| a |\n| --- |\n| <img src=x onerror=alert(1)> |", "&lt;img src=x onerror=alert(1)&gt;"),
        ("![x](http://evil.example/x.png)", "<img"),
    ],
)
def test_nothing_raw_is_passed_through(text: str, shown: str):
    """HTML in a text is text, a script is no link; a picture from elsewhere the page's own policy does not load."""
    html = runbooks._reader({}).render(text)
    assert shown in html
    assert {"script", "b"}.isdisjoint(Page(html).tags)
    assert not Page(html).links
