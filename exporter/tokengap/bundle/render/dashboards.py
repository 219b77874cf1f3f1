"""The dashboards as classic Grafana JSON."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

from tokengap.bundle.boards import BOARDS
from tokengap.bundle.render.file import File
from tokengap.bundle.site import Site
from tokengap.bundle.watch import Board, Panel, Watch


def uid(board: Board) -> str:
    """Return the identity of a dashboard in Grafana, the same at every site."""
    return f"tokengap-{board}"


def panel_url(site: Site, panel: Panel, chosen: dict[str, str]) -> str:
    """Return where a panel is seen alone. ``chosen``: values of the dashboard's variables, or templates of alerts."""
    variables = "".join(f"&var-{name}={value}" for name, value in chosen.items())
    return f"{site.dashboards.rstrip('/')}/d/{uid(panel.board)}?{urlencode({'viewPanel': panel.number})}{variables}"


def watch_url(site: Site, watch: Watch) -> str:
    """Return where a watch is seen, as an annotation of its alert: of the instance for which that fires."""
    return panel_url(
        site,
        watch.panel,
        {name: f"{{{{ $labels.{name} | urlquery }}}}" for name in ("job", "instance") if name in watch.labels},
    )


def files(site: Site) -> Iterator[File]:
    """Yield the file of each dashboard."""
    yield from (File(f"dashboards/{name}.json", make(site.on_dashboards())) for name, make in BOARDS.items())
