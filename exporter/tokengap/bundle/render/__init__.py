"""Everything that is rendered for a site, as files that are not written yet."""

from __future__ import annotations

from collections.abc import Iterator

from tokengap.bundle.render import dashboards, kubernetes, rules, runbooks
from tokengap.bundle.render.file import File
from tokengap.bundle.site import Site


def render(site: Site) -> Iterator[File]:
    """Yield every file."""
    boards = tuple(dashboards.files(site))
    yield from rules.files(site)
    yield from runbooks.files(site)
    yield from boards
    yield from kubernetes.files(site, boards)
