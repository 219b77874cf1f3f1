"""A real browser for tests: Debian's Chromium, without a window, steered by Playwright."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

INSTALL = "apt-get install -y --no-install-recommends chromium"


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Chromium while the block lasts."""
    program = shutil.which("chromium")
    assert program, f"the test needs Chromium: {INSTALL}"
    async with async_playwright() as playwright:
        # Its own sandbox needs user namespaces, which containers of CI forbid; it is shown only what we serve.
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Tab:
    """A page that is open, what it complained about on its console, and every address it asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def until(self, condition: str, within: float = 20.0) -> None:
        """Wait until an expression of JavaScript is true. Playwright's own wait is eval(), which our policy forbids."""
        deadline = time.monotonic() + within
        while not await self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"in {within:g} s this did not come true: {condition}"
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """Return what a person reads there."""
        return await self.page.inner_text(selector)


async def open_tab(browser: Browser, address: str, **how: Any) -> Tab:
    """Open an address in a tab of its own; ``how``: width and height of the window, colour scheme and the like."""
    page = await browser.new_page(**how)
    tab = Tab(page)
    page.on("console", lambda said: tab.complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    page.on("request", lambda request: tab.asked.append(request.url))
    await page.goto(address)
    return tab
