"""One line that says how far it is, on standard error, so that standard output is the result and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

#: Seconds between two lines where there is no terminal: enough to see that it lives, few enough for a log.
LOG_EVERY = 5.0


async def show(console: Console, line: Callable[[], str], every: float = 0.25) -> NoReturn:
    """Show ``line()`` until cancelled: in place on a terminal, else as a line now and then."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LOG_EVERY)
            console.print(line(), highlight=False, soft_wrap=True)
    with console.status("") as status:
        while True:
            status.update(line()[: console.width - 3])  # a line and no more: the spinner stands before it
            await asyncio.sleep(every)
