"""Pictures of a rendered dashboard, drawn from the answers to its own queries, for a README.

It reads the same JSON as Grafana (places, units, colours, thresholds, words) and draws each kind of panel in its own
plain way. It is no Grafana, and each picture says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

from bundle.panels import Json, Line, Span

#: Grafana's names of colours, in its light theme; a colour that is not here stands for itself.
COLOURS: Final = {
    "green": "#56A64B",
    "red": "#E02F44",
    "dark-red": "#AD0317",
    "orange": "#FF780A",
    "yellow": "#E0B400",
    "blue": "#3274D9",
    "purple": "#8F3BB8",
    "text": "#464C54",
}

#: What lines have that no dashboard paints.
_PALETTE: Final = ("#3274D9", "#FF9830", "#37872D", "#8F3BB8", "#1F9BAA", "#C15C17", "#5794F2")

_PAGE, _PANEL, _EDGE, _INK, _FAINT = "#F1F2F4", "#FFFFFF", "#D8DADF", "#24292E", "#6B7280"

#: Seconds between two marks of the time: whole minutes, where there are some.
_TICKS: Final = (1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400, float("inf"))

#: Pixels: the width of the whole, the height of one row of the grid, and the space between panels.
_WIDTH, _ROW, _GAP, _HEAD, _FOOT = 1280, 30, 8, 44, 32
_DPI: Final = 100
_COLUMNS: Final = 24

CAPTION: Final = (
    "Drawn by `make screenshots` with a plotting library: the panels' own queries, asked of a real Prometheus that "
    "scraped tokengap on its lab. Not a picture of Grafana."
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A dashboard with what its panels show, by their id. ``fired``: when which alerts fired, in Unix seconds."""

    dashboard: Json
    lines: Mapping[int, Sequence[Sequence[Line]]]
    span: Span
    fired: Sequence[tuple[float, float]]


def draw(shown: Shown, path: Path, rows: Iterable[str] | None = None) -> None:
    """Write a picture (PNG) of a dashboard, or of those of its rows that have these titles."""
    panels = _placed(shown.dashboard, None if rows is None else set(rows))
    height = _HEAD + _FOOT + _ROW * max(y + panel["gridPos"]["h"] for y, panel in panels)
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAGE)
    FigureCanvasAgg(figure)
    sheet = _Sheet(figure, height)
    sheet.say(_GAP * 2, _HEAD / 2, shown.dashboard["title"], size=15, weight="bold")
    sheet.say(_WIDTH - _GAP * 2, _HEAD / 2, _time(shown.span), size=9, colour=_FAINT, side="right")
    for y, panel in panels:
        _panel(sheet, y, panel, shown)
    sheet.say(_GAP * 2, height - _FOOT / 2, CAPTION, size=9, colour=_FAINT, style="italic")
    figure.savefig(path)
    _make_small(path)


def _make_small(path: Path) -> None:
    """Keep the 256 colours that are used most: a third of the size, and nothing that can be seen is lost."""
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    counted = picture.getcolors(picture.width * picture.height) or []
    usual = [colour for _, colour in sorted(counted, key=itemgetter(0), reverse=True)[:256]]
    palette = Image.new("P", (1, 1))
    palette.putpalette(bytes(part for colour in usual if isinstance(colour, tuple) for part in colour))
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def _placed(dashboard: Json, rows: set[str] | None) -> list[tuple[int, Json]]:
    """Return the panels of the wanted rows, the headings too, and where each begins when the others are left out."""
    placed: list[tuple[int, Json]] = []
    y, within, wanted = 0, 0, False
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            y = max((top + above["gridPos"]["h"] for top, above in placed), default=0)
            within, wanted = panel["gridPos"]["y"], rows is None or panel["title"] in rows
        if wanted:
            placed.append((y + panel["gridPos"]["y"] - within, panel))
    return placed


def _time(span: Span) -> str:
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (span.begin, span.end))
    return f"{begin:%Y-%m-%d %H:%M} to {end:%H:%M} UTC, scraped every {span.scrape:g} s"


@dataclass(frozen=True, slots=True)
class _Sheet:
    """The page, in pixels from its upper left corner."""

    figure: Figure
    height: int

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Return axes that fill a rectangle."""
        box = (x / _WIDTH, 1 - (y + height) / self.height, width / _WIDTH, height / self.height)
        return self.figure.add_axes(box)

    def say(
        self, x: float, y: float, text: str, *, size: float, colour: str = _INK, side: str = "left", **more: Any
    ) -> None:
        """Write one line, its middle at ``y``."""
        at = (x / _WIDTH, 1 - y / self.height)
        self.figure.text(*at, text, fontsize=size, color=colour, ha=side, va="center", parse_math=False, **more)

    def width(self, text: str, size: float, weight: str = "normal") -> float:
        """Return how many pixels a line takes."""
        if not text:
            return 0.0
        outline = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight))
        return float(outline.get_extents().width) * _DPI / 72 * 1.04  # glyphs are put on whole pixels

    def wrapped(self, text: str, width: float, size: float, weight: str = "normal") -> list[str]:
        """Return a text as lines that are no wider than so many pixels, as far as its words allow."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if self.width(longer, size, weight) <= width:
                lines[-1] = longer
            else:
                lines.append(word)
        return [line for line in lines if line]

    def cut(self, text: str, width: float, size: float, weight: str = "normal") -> str:
        """Return as much of a text as is no wider than so many pixels."""
        if self.width(text, size, weight) <= width:
            return text
        while text and self.width(f"{text}…", size, weight) > width:
            text = text[:-1]
        return f"{text.rstrip()}…"

    def box(self, x: float, y: float, width: float, height: float) -> None:
        """Draw the ground of a panel."""
        edge = FancyBboxPatch(
            (x / _WIDTH, 1 - (y + height) / self.height),
            width / _WIDTH,
            height / self.height,
            boxstyle="square,pad=0",
            facecolor=_PANEL,
            edgecolor=_EDGE,
            linewidth=0.8,
            transform=self.figure.transFigure,
            zorder=-1,  # below the graphs
        )
        self.figure.add_artist(edge)


@dataclass(frozen=True, slots=True)
class _Place:
    """The inside of a panel, in pixels, below its title."""

    x: float
    y: float
    width: float
    height: float


def _panel(sheet: _Sheet, y: int, panel: Json, shown: Shown) -> None:
    column, at = (_WIDTH - 2 * _GAP) / _COLUMNS, panel["gridPos"]
    x, top = _GAP + at["x"] * column, _HEAD + y * _ROW
    width, height = at["w"] * column - _GAP, at["h"] * _ROW - _GAP
    if panel["type"] == "row":
        sheet.say(x + 4, top + height / 2 + 2, f"▾  {panel['title']}", size=11, weight="bold")
        return
    sheet.box(x, top, width, height)
    sheet.say(x + 10, top + 15, sheet.cut(panel["title"], width - 20, 10, "bold"), size=10, weight="bold")
    inside = _Place(x + 10, top + 28, width - 20, height - 36)
    if panel["type"] == "text":
        _note(sheet, inside, panel["options"]["content"])
        return
    queries = shown.lines[panel["id"]]
    if not any(queries):
        middle = (inside.x + inside.width / 2, inside.y + inside.height / 2)
        sheet.say(*middle, panel["fieldConfig"]["defaults"]["noValue"], size=10, colour=_FAINT, side="center")
        return
    _DRAW[panel["type"]](sheet, inside, panel, [line for lines in queries for line in lines], shown)


# --- kinds of panels --------------------------------------------------------------------------------------------------


def _timeseries(sheet: _Sheet, place: _Place, panel: Json, lines: list[Line], shown: Shown) -> None:
    look = panel["fieldConfig"]["defaults"]
    rows = _legend_rows(sheet, place, lines)
    axes = _graph(sheet, place, shown.span, 50, 20 + 16 * rows)
    colours = _colours(panel, lines)
    if look["custom"]["stacking"]["mode"] == "normal":
        times = sorted({at for line in lines for at, _ in line.points})
        values = [[dict(line.points).get(at, 0.0) for at in times] for line in lines]
        axes.stackplot(times, values, colors=colours, alpha=0.75, linewidth=0.5)
    else:
        for line, own in zip(lines, colours, strict=True):
            points = _with_gaps(line, shown.span)
            along, up = [at for at, _ in points], [value for _, value in points]
            axes.plot(along, up, color=own, linewidth=1.4)
            if len(lines) == 1:
                axes.fill_between(along, up, color=own, alpha=0.1, linewidth=0)
    for step in look["thresholds"]["steps"][1:]:
        axes.axhline(step["value"], color=COLOURS["red"], linewidth=1.1, linestyle=(0, (5, 4)))
    _scale(axes, look, lines)
    for begin, end in shown.fired:
        axes.axvspan(begin, end, color=COLOURS["red"], alpha=0.08, linewidth=0)
        axes.axvline(begin, color=COLOURS["red"], linewidth=1)
    _legend(sheet, place, lines, colours)


def _with_gaps(line: Line, span: Span) -> list[tuple[float, float]]:
    """Return the points, with a break where some are missing."""
    points: list[tuple[float, float]] = []
    for at, value in line.points:
        if points and at - points[-1][0] > 1.5 * span.step:
            points.append((at - span.step, float("nan")))
        points.append((at, value))
    return points


def _graph(sheet: _Sheet, place: _Place, span: Span, left: float, below: float) -> Axes:
    axes = sheet.axes(place.x + left, place.y + 4, place.width - left - 4, place.height - below - 4)
    axes.set_facecolor(_PANEL)
    axes.set_xlim(span.begin, span.end)
    apart = next(step for step in _TICKS if span.end - span.begin <= 7 * step)
    clock = "%H:%M" if apart >= 60 else "%H:%M:%S"
    axes.xaxis.set_major_locator(MultipleLocator(apart))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{datetime.fromtimestamp(at, UTC):{clock}}"))
    axes.tick_params(labelsize=8, colors=_FAINT, length=0, pad=5)
    axes.grid(color="#E9EAED", linewidth=0.7)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _scale(axes: Axes, look: Json, lines: list[Line]) -> None:
    low, high = axes.get_ylim()
    low = min(look.get("min", low), low) if look.get("min") is None else look["min"]
    high = max(high, look.get("max", high))
    if high <= low or all(value == 0 for line in lines for _, value in line.points):
        high = max(high, low + 1)
    axes.set_ylim(low, low + (high - low) * 1.04)
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value, look)))


def _state_timeline(sheet: _Sheet, place: _Place, panel: Json, lines: list[Line], shown: Shown) -> None:
    left = min(150.0, place.width / 3, 16 + max(sheet.width(line.name, 8) for line in lines))
    axes = _graph(sheet, place, shown.span, left, 40)
    axes.grid(visible=False)
    for row, line in enumerate(lines):
        for begin, end, value in _runs(line, shown.span):
            text, own = _said(panel, value)
            axes.broken_barh([(begin, end - begin)], (-row - 0.38, 0.76), color=own, alpha=0.75)
            if end - begin > (shown.span.end - shown.span.begin) / 9 and len(lines) < 9:
                axes.text((begin + end) / 2, -row, text, ha="center", va="center", fontsize=8, color="white")
    axes.set_ylim(-len(lines) + 0.4, 0.6)
    axes.set_yticks([-row for row in range(len(lines))], [sheet.cut(line.name, left - 10, 8) for line in lines])
    used = sorted({value for line in lines for _, value in line.points})
    _key(sheet, place, [_said(panel, value) for value in used])


def _runs(line: Line, span: Span) -> list[tuple[float, float, float]]:
    """Return from when to when which value was there."""
    runs: list[tuple[float, float, float]] = []
    for at, value in line.points:
        end = at + span.step
        if runs and runs[-1][2] == value and at - runs[-1][1] < span.step / 2:
            runs[-1] = (runs[-1][0], end, value)
        else:
            runs.append((at, end, value))
    return runs


def _stat(sheet: _Sheet, place: _Place, panel: Json, lines: list[Line], _: Shown) -> None:
    each = place.height / len(lines)
    size = min(26.0, each / 2.6)
    for row, line in enumerate(lines):
        text, own = _said(panel, line.newest)
        middle = place.y + each * (row + 0.5)
        name = line.name if len(lines) > 1 or "{{" in panel["targets"][0]["legendFormat"] else ""
        if name:
            sheet.say(place.x, middle, sheet.cut(name, place.width * 0.38, 9), size=9, colour=_FAINT)
        side, x = ("right", place.x + place.width) if name else ("center", place.x + place.width / 2)
        fits = size * min(1.0, 0.56 * place.width / sheet.width(text, size, "bold"))
        sheet.say(x, middle, text, size=fits, colour=own, side=side, weight="bold")


def _bargauge(sheet: _Sheet, place: _Place, panel: Json, lines: list[Line], _: Shown) -> None:
    most, each = max(line.newest for line in lines) or 1.0, min(place.height / len(lines), 48.0)
    left, right = place.width * 0.3, 70
    for row, line in enumerate(sorted(lines, key=lambda line: -line.newest)):
        y = place.y + row * each
        sheet.say(place.x, y + each / 2, sheet.cut(line.name, left - 8, 9), size=9)
        bar = sheet.axes(place.x + left, y + 5, place.width - left - right, each - 10)
        bar.barh([0], [most], color="#EEF0F2")
        bar.barh([0], [line.newest], color=_said(panel, line.newest)[1])
        bar.set_xlim(0, most)
        bar.axis("off")
        said = text_of(line.newest, panel["fieldConfig"]["defaults"])
        sheet.say(place.x + place.width, y + each / 2, said, size=10, side="right", weight="bold")


def _table(sheet: _Sheet, place: _Place, panel: Json, lines: list[Line], _: Shown) -> None:
    (order,) = (step["options"] for step in panel["transformations"] if step["id"] == "organize")
    columns = [name for name in order["indexByName"] if not order["excludeByName"].get(name) and name != "Value"]
    rows = [[line.labels.get(column, "") for column in columns] for line in lines]
    if not order["excludeByName"].get("Value"):
        columns.append(order["renameByName"]["Value"])
        for cells, line in zip(rows, lines, strict=True):
            cells.append(text_of(line.newest, panel["fieldConfig"]["defaults"]))
    _rows(sheet, place, columns, rows)


_DRAW: Final[Mapping[str, Callable[[_Sheet, _Place, Json, list[Line], Shown], None]]] = {
    "timeseries": _timeseries,
    "state-timeline": _state_timeline,
    "stat": _stat,
    "bargauge": _bargauge,
    "table": _table,
}


# --- words ------------------------------------------------------------------------------------------------------------


def _note(sheet: _Sheet, place: _Place, markdown: str) -> None:
    """Draw what a note has: paragraphs and one table."""
    y = place.y + 6
    for block in markdown.strip().split("\n\n"):
        if block.startswith("|"):
            head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
            y = _rows(sheet, _Place(place.x, y, place.width, place.height), head, rows) + 8
            continue
        weight = "bold" if block.startswith("**") else "normal"
        for line in sheet.wrapped(_plain(block), place.width, 9, weight):
            sheet.say(place.x, y + 6, line, size=9, weight=weight)
            y += 17
        y += 5


def _rows(sheet: _Sheet, place: _Place, head: Sequence[str], rows: Sequence[Sequence[str]]) -> float:
    """Draw a table no wider than its place, and return where it ends. Long cells take several lines."""
    size, line, space = 9.0, 15.0, 14.0
    wanted = [max(sheet.width(_plain(cells[column]), size) for cells in (head, *rows)) for column in range(len(head))]
    widths = _shared(wanted, place.width - space * (len(head) - 1))
    y = place.y
    for number, cells in enumerate((head, *rows)):
        weights = ["bold" if number == 0 or cell.startswith("**") else "normal" for cell in cells]
        texts = [
            sheet.wrapped(_plain(cell), width, size, weight)
            for cell, width, weight in zip(cells, widths, weights, strict=True)
        ]
        x = place.x
        for lines, width, weight in zip(texts, widths, weights, strict=True):
            for below, text in enumerate(lines):
                colour = _FAINT if number == 0 else _INK
                sheet.say(x, y + 10 + below * line, text, size=size, colour=colour, weight=weight)
            x += width + space
        y += line * max(1, *map(len, texts)) + 5
    return y


def _shared(wanted: Sequence[float], width: float) -> list[float]:
    """Return how wide columns are: as wide as wanted, but those that want more than an even part share what is left."""
    even = width / len(wanted)
    modest = sum(each for each in wanted if each <= even)
    greedy = sum(each for each in wanted if each > even)
    scale = min(1.0, (width - modest) / greedy) if greedy else 1.0
    return [each + 2 if each <= even else each * scale for each in wanted]


def _plain(markdown: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)|\*+", lambda found: found[1] or "", markdown).replace("\n", " ")


def _legend_rows(sheet: _Sheet, place: _Place, lines: list[Line]) -> int:
    return len(_key_rows(sheet, place, [(line.name, "") for line in lines]))


def _legend(sheet: _Sheet, place: _Place, lines: list[Line], colours: Sequence[str]) -> None:
    _key(sheet, place, [(line.name, colour) for line, colour in zip(lines, colours, strict=True)])


def _key(sheet: _Sheet, place: _Place, named: Sequence[tuple[str, str]]) -> None:
    """Draw what each colour means, below a graph."""
    rows = _key_rows(sheet, place, named)
    for number, row in enumerate(rows):
        x, y = place.x, place.y + place.height - 16 * (len(rows) - number) + 12
        for name, own in row:
            sheet.say(x, y - 1, "━", size=10, colour=own, weight="bold")
            sheet.say(x + 15, y, name, size=8.5)
            x += _key_width(sheet, name)


def _key_rows(sheet: _Sheet, place: _Place, named: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    rows: list[list[tuple[str, str]]] = [[]]
    for each in named:
        if rows[-1] and sum(_key_width(sheet, name) for name, _ in (*rows[-1], each)) > place.width:
            rows.append([])
        rows[-1].append(each)
    return rows


def _key_width(sheet: _Sheet, name: str) -> float:
    return 30 + sheet.width(name, 8.5)


def text_of(value: float, look: Json) -> str:
    """Return a number in its unit, as Grafana writes it."""
    unit, decimals = look["unit"], look.get("decimals")
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        return _seconds(value)
    if unit == "dateTimeAsIso":
        return f"{datetime.fromtimestamp(value / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    number = f"{value:.{decimals}f}" if decimals is not None else _short(value)
    suffix = {"cps": "c/s", "watt": "W", "bytes": "B", "celsius": "°C", "hertz": "Hz"}.get(unit, "")
    return number + (suffix if number[-1].isalpha() or not suffix else f" {suffix}")


def _seconds(value: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(value) >= 2 * size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g} s" if abs(value) >= 1 or value == 0 else f"{value * 1000:.3g} ms"


def _short(value: float) -> str:
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:.3g}"


# --- colours ----------------------------------------------------------------------------------------------------------


def _colours(panel: Json, lines: list[Line]) -> list[str]:
    """Return the colour of each line: the dashboard's where it has one for the name, else the next of the palette."""
    fixed = [
        (re.compile(override["matcher"]["options"].strip("/")), override["properties"][0]["value"]["fixedColor"])
        for override in panel["fieldConfig"]["overrides"]
    ]
    others = iter(_PALETTE * len(lines))
    return [
        next((paint(name) for pattern, name in reversed(fixed) if pattern.search(line.name)), None) or next(others)
        for line in lines
    ]


def _said(panel: Json, value: float) -> tuple[str, str]:
    """Return what a panel says in place of a value, and in which colour: its word for it, or the number in its unit."""
    look = panel["fieldConfig"]["defaults"]
    words = {float(number): word for mapping in look["mappings"] for number, word in mapping["options"].items()}
    if value in words:
        return words[value]["text"], paint(words[value]["color"])
    reached = [step["color"] for step in look["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
    return text_of(value, look), paint(reached[-1])


def paint(name: str) -> str:
    """Return a colour by Grafana's name for it."""
    return COLOURS.get(name, name)
