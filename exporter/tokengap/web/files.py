"""The files of the pages for people: read once, served from memory, so that no path of a request names a file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Final

from tokengap import __version__

#: Where they are served.
PATH: Final = "/static/"

_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGE: Final = "page.html"


@cache
def static() -> Mapping[str, tuple[bytes, str]]:
    """Return the style, scripts and icon: content and type by name."""
    folder = files("tokengap.web") / "static"
    return {
        file.name: (file.read_bytes(), kind)
        for file in folder.iterdir()
        for suffix, kind in _TYPES.items()
        if file.name.endswith(suffix)
    }


@cache
def page(telemetry_path: str) -> bytes:
    """Return the live page. What it shows its script fetches; it begins with links, for who has just found it.

    They are relative, as all links between pages are: a proxy in front may serve the exporter under a prefix.
    """
    text = (files("tokengap.web") / "static" / _PAGE).read_text()
    return Template(text).substitute(version=escape(__version__), telemetry_path=escape(f".{telemetry_path}")).encode()
