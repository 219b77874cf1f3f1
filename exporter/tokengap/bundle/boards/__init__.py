"""The dashboards: which panels of the watches, and which of their own, stand where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tokengap.bundle.boards.asking import Ask
from tokengap.bundle.boards.board import Board
from tokengap.bundle.boards.engine import engine
from tokengap.bundle.boards.exporter import exporter
from tokengap.bundle.boards.gpu import gpu
from tokengap.bundle.boards.money import money
from tokengap.bundle.boards.oncall import oncall
from tokengap.bundle.site import Site

#: Every dashboard, in the order of a person's questions.
BOARDS: Final[tuple[Callable[[Ask], Board], ...]] = (oncall, money, engine, gpu, exporter)


def boards(site: Site) -> tuple[Board, ...]:
    """Return every dashboard of a site, with what its reader chooses in every query."""
    return tuple(make(Ask(site)) for make in BOARDS)
