"""The live page in a real browser: on a lab that leaks, on an exporter that dies, and on what a hostile name says."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser
from yarl import URL

from browser import Tab, chromium, open_tab
from series.example import rich_view, view_with
from test_end_to_end import watched
from tokengap.lab.batching import Knobs
from tokengap.lab.parts import LOOPBACK, Part, free_port, on_path, running
from tokengap.lab.users import User, Visit
from tokengap.series.render import render
from tokengap.top.feed import Login, remote
from tokengap.topology import Endpoint, Engine, Hop, Topology
from tokengap.view import View
from tokengap.web.now import Wanted
from tokengap.web.routes import PAGES, make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

#: Two beats, and a second for a machine that is busy with other tests.
TWO_BEATS = 3.0

WATCHED = Topology(
    engines=(Engine("worker", "http://127.0.0.1:8100", (Endpoint("127.0.0.1", 8100),)),),
    hops=(Hop("edge", (Endpoint(None, 8080),), ("admit",)), Hop("admit", (Endpoint(None, 8090),), ("worker",))),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@asynccontextmanager
async def shown(view: View) -> AsyncIterator[tuple[Serving, str]]:
    """An exporter that shows a view, and its address. Its page of series is another's: few look at it here."""
    serving = Serving(also=(), watched=WATCHED)
    serving.publish(view, render(rich_view()))
    server = Server(make_app(serving))
    await server.start("127.0.0.1", 0)
    try:
        yield serving, server.url
    finally:
        await server.stop()


async def beats(url: str) -> int:
    """The number of an exporter's newest beat."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/now?top=0") as answer:
        return (await answer.json())["beats"]


async def loaded(browser: Browser, address: str, **how: object) -> Tab:
    """The page, when it shows its first beat."""
    tab = await open_tab(browser, address, **how)
    await tab.until("document.getElementById('beat').textContent.startsWith('live')")
    return tab


async def test_a_client_leaves_and_the_exporter_restarts(browser: Browser, tmp_path: Path):
    """Within two beats of a client leaving, the page has the orphan first and the hop that leaks marked; while the
    exporter is away it says so, and when it is back it goes on by itself. Nothing it asks for is elsewhere."""
    knobs = Knobs(max_num_seqs=4)
    async with watched(tmp_path, knobs) as lab:
        await lab.exporter.scrape()
        tab = await loaded(browser, lab.exporter.url)
        assert "no hop leaks" in await tab.text("#troubles")
        visits = [asyncio.create_task(Visit(User(f"u{n}", max_tokens=4000), lab.edge_port).run()) for n in range(2)]
        await tab.until("document.querySelectorAll('#stream-table tbody tr').length === 2")

        visits[0].cancel()
        left, beat = time.monotonic(), await beats(lab.exporter.url)
        await tab.until("document.querySelector('#stream-table tbody tr.bad th')?.textContent === 'gone'")
        shown_at = await tab.text("#beats")
        assert time.monotonic() - left < TWO_BEATS
        assert int(re.match(r"Beat ([\d,]+),", shown_at)[1].replace(",", "")) - beat <= 2
        await tab.until("document.querySelector('.hop.leaks h3')?.textContent === 'edge'")
        assert "edge leaks" in await tab.text("#troubles")
        assert tab.complaints == []

        await lab.exporter_part.stop()
        await tab.until("!document.getElementById('broken').hidden")
        assert "does not tell: no answer" in await tab.text("#broken")
        async with running(lab.exporter_part.part, tmp_path):
            await tab.until("document.getElementById('broken').hidden")
            await tab.until("document.querySelectorAll('#stream-table tbody tr').length >= 1")
        visits[1].cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        assert {URL(address).origin() for address in tab.asked} == {URL(lab.exporter.url)}


async def test_every_page_shows_its_part(browser: Browser):
    """No page complains, none is wider than a telephone, and what comes from outside is text on each."""
    parts = {"/": "#chart", "/streams": "#stream-table", "/engines": "#engine-table", "/gpus": "#gpu-table"}
    assert set(parts) == set(PAGES)
    async with shown(rich_view()) as (_, url):
        for path, part in parts.items():
            tab = await loaded(browser, url + path, viewport={"width": 360, "height": 640})
            assert await tab.page.is_visible(part), path
            assert await tab.page.evaluate("document.documentElement.scrollWidth") == 360, path
            assert not await tab.page.query_selector("main script, main b"), path
            assert await tab.page.evaluate("document.querySelector('nav a[aria-current]').pathname") == path
            assert tab.complaints == [], path
            assert "secret" not in await tab.page.content()
            await tab.page.close()


async def test_what_the_overview_says(browser: Browser):
    """All of a view that has something of everything, as the tables of old had it."""
    async with shown(rich_view()) as (_, url):
        tab = await loaded(browser, url)
        said = await tab.text("body")
        for words in (
            *(
                "worker",
                "busy",
                "1 running, 2 waiting",
                "16,092 out",
                "992 for nobody (6 %), 50 pending, 49 unattributed",
            ),
            *("6.8 s, limit 6.0 s", "slack, interactive", "1.3 s of 8.0 s", "100 %: 1 of 1", "203.0.113.x:*"),
            *("haproxy", "nginx: its count has leaked", "http2_clients", "1 connection of HTTP/2 with 3 streams"),
            *("<script>alert(1)</script>", 'spare "b"\\<b>', "not known", "connection refused", "Accounting: exact"),
            *("NVIDIA H100 80GB HBM3", "XID 79 (1)", "slowed down: hw_thermal", "1.00 EUR", "1 lost"),
            *(":8080", "2 connected, 1 stalled, 1 gone", "Leaks here", "does not answer: connection refused."),
        ):
            assert words in said, words
        assert await tab.text("#verdict li:first-child") == 'spare "b"\\<b> is dead. What to do'


async def test_a_beat_that_stands_still(browser: Browser):
    """An exporter that answers with what it knew long ago is not taken for a live one; nor is one without sockets for
    one that sees no streams."""
    async with shown(replace(rich_view(), interval=0.1, accounting="none", groups=())) as (serving, url):
        tab = await loaded(browser, url)
        assert await tab.text("#counted") == "not known: no sockets can be read"
        await tab.until("document.getElementById('broken').textContent.includes('its beat stands still')")
        serving.publish(replace(rich_view(), beats=4322, at=5001.0), serving.page)
        await tab.until("document.getElementById('broken').hidden")


async def test_before_the_first_beat(browser: Browser):
    """The page waits for it, says so, and shows it when it comes."""
    server = Server(make_app(serving := Serving(also=())))
    await server.start("127.0.0.1", 0)
    try:
        tab = await open_tab(browser, server.url)
        await tab.until("document.getElementById('broken').textContent.includes('the first beat is not done yet')")
        serving.publish(rich_view(), render(rich_view()))
        await tab.until("document.getElementById('broken').hidden")
    finally:
        await server.stop()


async def test_the_choice_of_streams(browser: Browser):
    """Order and client state are asked of the exporter, so that they hold for all streams and not for those shown; what
    is not shown is said. The keyboard is enough."""
    async with shown(view_with(2000)) as (_, url):
        tab = await loaded(browser, url)
        assert await tab.text("#counted") == "the first 50 of 2,000"
        clients = "[...document.querySelectorAll('#stream-table tbody th')].map((cell) => cell.textContent)"
        assert set(await tab.page.evaluate(clients)) == {"vanished", "gone"}
        await tab.page.focus("select[name=client]")
        await tab.page.keyboard.type("stalled")
        await tab.until("document.getElementById('counted').textContent === 'the first 50 of 500'")
        assert set(await tab.page.evaluate(clients)) == {"stalled"}
        await tab.page.select_option("select[name=sort]", "age")
        await tab.until("document.querySelector('#stream-table tbody td').textContent === '20.0 s'")


async def test_under_a_prefix(browser: Browser, tmp_path: Path):
    """A proxy may serve the exporter under a path: every link and every request stays below it, runbooks, redirects and
    ``tokengap top`` included."""
    port = free_port()
    async with shown(rich_view()) as (_, url), under_a_prefix(url, port, tmp_path):
        base = f"http://{LOOPBACK}:{port}/telemetry/gap"
        tab = await loaded(browser, base)
        for name, part in (("Streams", "#stream-table"), ("GPUs", "#gpu-table"), ("Overview", "#chart")):
            await tab.page.click(f"nav >> text={name}")
            await tab.until("document.getElementById('beat')?.textContent.startsWith('live')")
            assert await tab.page.is_visible(part), name
            assert await tab.text("nav a[aria-current]") == name
        await tab.page.click("#troubles a >> nth=0")
        assert await tab.text("h1") == "TokengapEngineDead"
        await tab.page.goto(f"{base}/runbooks")
        await tab.page.click("text=TokengapDown >> nth=0")
        assert await tab.text("h1") == "TokengapDown"
        await tab.page.click("nav >> text=Exporter")
        await tab.until("document.getElementById('beat')?.textContent.startsWith('live')")
        assert tab.complaints == []
        await tab.page.click("nav >> text=Metrics")
        assert "tokengap_tokens_out_total" in await tab.text("body")
        assert [one for one in tab.asked if not one.startswith(base)] == []
        async with remote(base, Login()) as feed:
            assert (await feed.now(Wanted())).beats == 4321


@asynccontextmanager
async def under_a_prefix(url: str, port: int, directory: Path) -> AsyncIterator[None]:
    """nginx, which serves the exporter at a URL under /telemetry/gap/."""
    config = directory / "nginx.conf"
    config.write_text(
        f"daemon off; pid {directory}/nginx.pid; events {{}} http {{ access_log off; "
        + "".join(f"{kind}_temp_path {directory}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        + f"server {{ listen {LOOPBACK}:{port}; location /telemetry/gap/ {{ proxy_pass {url}/; }} }} }}"
    )
    command = (str(on_path("nginx")), "-c", str(config), "-e", "stderr")
    async with running(Part("nginx", command, (port,)), directory):
        yield


async def test_hundreds_of_engines(browser: Browser):
    """Those that need a look are shown, the others counted; also on a telephone."""
    fine = rich_view().engines[0]
    engines = tuple(replace(fine, name=f"e{number}") for number in range(500))
    view = replace(view_with(2000), engines=(*engines, replace(fine, name="broken", state="stuck")))
    async with shown(view) as (_, url):
        tab = await loaded(browser, url, viewport={"width": 360, "height": 640})
        assert await tab.page.evaluate("document.querySelectorAll('.card').length") == 12
        assert await tab.text(".card h3 >> nth=0") == "broken"
        assert await tab.text("#engines-more") == "And others: 489 busy."
        assert "and 495 more" in await tab.text("#hops")
        assert "And 495 more" in await tab.text("#troubles li:last-child")
        assert await tab.page.title() == "(503) tokengap"
        assert await tab.page.evaluate("document.documentElement.scrollWidth") == 360
        assert tab.complaints == []


async def test_the_keyboard_is_enough(browser: Browser):
    """From the top: the link past the navigation, then the navigation, each where the focus can be seen; what scrolls
    can be reached."""
    async with shown(rich_view()) as (_, url):
        tab = await loaded(browser, url, viewport={"width": 360, "height": 640})
        focused: list[str] = []
        while True:
            await tab.page.keyboard.press("Tab")
            name, outline = await tab.page.evaluate(
                "(({ name, ariaLabel, textContent, tagName }, outline) => [tagName === 'BODY' ? '' : "
                "name || ariaLabel || textContent, outline])"
                "(document.activeElement, getComputedStyle(document.activeElement).outlineStyle)"
            )
            if not name:
                break
            assert outline != "none", name
            focused.append(name)
        assert focused[:4] == ["To the verdict", "tokengap", "Overview", "Streams"]
        assert {"What to do", "sort", "client", "Streams in flight", "Sources"} <= set(focused)


@pytest.mark.long
@pytest.mark.parametrize("leaks", [True, False])
async def test_an_engine_that_goes_on_for_nobody(browser: Browser, tmp_path: Path, leaks: bool):
    """It shows no socket, and is marked all the same; one that ends what was left is not, however many leave."""
    marked = "[...document.querySelectorAll('.hop.leaks h3')].map((name) => name.textContent)"
    async with watched(tmp_path, Knobs(ignore_disconnects=leaks), leak=False) as lab:
        tab = await loaded(browser, lab.exporter.url)
        seen: set[str] = set()
        began = time.monotonic()
        async with asyncio.TaskGroup() as visits:
            number = 0
            while time.monotonic() - began < 75 and "worker" not in seen:
                leave_at = 1.0 if number % 2 else None
                visits.create_task(Visit(User(f"u{number}", max_tokens=100, leave_at=leave_at), lab.edge_port).run())
                number += 1
                await asyncio.sleep(1.0)
                seen.update(await tab.page.evaluate(marked))
        assert seen == ({"worker"} if leaks else set())
