"""What a dashboard is: panels in rows. Where they stand and what their numbers are is computed, never written."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from tokengap.bundle import watch
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches

#: Grafana's grid is so many columns wide.
COLUMNS: Final = 24


class MisplacedPanel(ValueError):
    """A panel is twice on a dashboard, on one that is not its own, or on none. The message names it."""


@dataclass(frozen=True, slots=True)
class Note:
    """Words beside the panels, in Markdown. ``description`` is what the sign in the corner shows, as on a panel."""

    title: str
    description: str
    text: str

    @property
    def number(self) -> int:
        """Its id on the dashboard, as of a panel."""
        return number(self.title)


@dataclass(frozen=True, slots=True)
class Word:
    """What a number means, and its colour by Grafana's names."""

    value: int
    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A panel and how it looks on its dashboard. ``width`` is of the grid's 24 columns.

    ``most`` is the end of the scale, such as 1 for a ratio. ``stacked`` lines add up to a whole. ``words`` stand in
    place of numbers. ``columns`` are the labels that a table shows, in this order, and ``value`` heads the column of
    the value, where that says anything.
    """

    panel: watch.Panel | Note
    width: int = 8
    height: int = 8
    most: float | None = None
    decimals: int | None = None
    stacked: bool = False
    words: tuple[Word, ...] = ()
    columns: tuple[str, ...] = ()
    value: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Tiles under one heading, which wrap where the grid ends."""

    title: str
    tiles: tuple[Tile, ...]

    @property
    def number(self) -> int:
        """Its id on the dashboard, which no panel of the same title shares."""
        return number(f"row {self.title}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands on the grid."""

    x: int
    y: int
    width: int
    height: int


#: What stands on a dashboard: the heading of a row, or a tile.
Placed: TypeAlias = tuple[Row | Tile, Place]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. ``since`` is what it shows at first, as ``now-1h``, and ``refresh`` how often it asks anew.

    Raises MisplacedPanel.
    """

    name: watch.Board
    title: str
    description: str
    rows: tuple[Row, ...]
    since: str = "now-1h"
    refresh: str = "30s"

    def __post_init__(self) -> None:
        numbers = Counter(thing.panel.number for thing in self.tiles())
        for tile in self.tiles():
            if numbers[tile.panel.number] > 1:
                raise MisplacedPanel(f"{self.name}: {tile.panel.title!r} is there twice, or its number is")
            if isinstance(tile.panel, watch.Panel) and tile.panel.board != self.name:
                raise MisplacedPanel(f"{self.name}: {tile.panel.title!r} says that it is on {tile.panel.board}")

    def tiles(self) -> Iterator[Tile]:
        """Yield what stands on it, without the headings."""
        for row in self.rows:
            yield from row.tiles

    def panels(self) -> Iterator[watch.Panel]:
        """Yield the panels on it, without the words."""
        for tile in self.tiles():
            if isinstance(tile.panel, watch.Panel):
                yield tile.panel

    def laid_out(self) -> Iterator[Placed]:
        """Yield headings and tiles with their places: each as high up as it fits, and then as far to the left."""
        ground = [0] * COLUMNS  # how far down each column is taken
        for row in self.rows:
            ground = [max(ground) + 1] * COLUMNS
            yield row, Place(0, ground[0] - 1, COLUMNS, 1)
            for tile in row.tiles:
                tops = [max(ground[x : x + tile.width]) for x in range(COLUMNS - tile.width + 1)]
                y = min(tops)
                x = tops.index(y)
                ground[x : x + tile.width] = [y + tile.height] * tile.width
                yield tile, Place(x, y, tile.width, tile.height)


def watched(site: Site, board: watch.Board, title: str) -> Row:
    """Return the row of what alerts look at: the panel of every watch that is seen on this dashboard, each once."""
    panels = {each.panel.title: each.panel for each in watches(site) if each.panel.board == board}
    return Row(title, tuple(Tile(panel, words=_yes_or_no(panel)) for panel in panels.values()))


def _yes_or_no(panel: watch.Panel) -> tuple[Word, ...]:
    """Return the words of a panel that shows whether something is so: the one that alerts is red."""
    if panel.drawing != "state-timeline":
        return ()
    bad = {threshold.value for threshold in panel.thresholds}
    return tuple(Word(value, text, "red" if value in bad else "green") for value, text in ((0, "no"), (1, "yes")))


def number(title: str) -> int:
    """Return the id of what has this title: of the title alone, so that links outlive what comes and goes around it."""
    return zlib.crc32(title.encode()) % 1_000_000 + 1
