"""The dashboards: which panels of the watches, and which of their own, stand where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tokengap.bundle.site import Site
from tokengap.bundle.watch import Board

#: The text of each dashboard for a site, by the word in its address. Empty until there are any.
BOARDS: Final[Mapping[Board, Callable[[Site], str]]] = {}
