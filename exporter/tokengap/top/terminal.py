"""The terminal: its keys as they are pressed, and its size when it changes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys(take: Callable[[str], None]) -> Iterator[bool]:
    """Give each key to ``take`` while the block lasts; False where no keys can be read, as over a pipe.

    Ctrl-C stays a signal, and what was typed is not shown. The terminal is put back as it was.
    """
    if not sys.stdin.isatty():
        yield False
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def pressed() -> None:
        for key in os.read(number, 64).decode(errors="ignore"):
            take(key)

    tty.setcbreak(number)
    loop.add_reader(number, pressed)
    try:
        yield True
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


@contextmanager
def resized(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell`` whenever the terminal has another size, while the block lasts."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
