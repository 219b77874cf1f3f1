"""Pieces of PromQL. A vector is made of a series, never of a bare name, so that a renamed one leaves no query behind.

Everything keeps to what Prometheus 2.42 reads, and so loads in every later one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: What tells the series of one engine apart, over all exporters.
PER_ENGINE: Final = ("job", "instance", "engine")

#: Prometheus' own series about a scrape: 1 when it succeeded. The one name here that is not ours.
UP: Final = "up"

_MATCHER = r'[a-zA-Z_]\w*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n]|\\.)*"'
_MATCHERS: Final = re.compile(rf"{_MATCHER}(?:\s*,\s*{_MATCHER})*", re.ASCII)
_UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60))


def is_matchers(text: str) -> bool:
    """Tell whether a text is one or more matchers of labels, as they stand between braces."""
    return _MATCHERS.fullmatch(text) is not None


def vector(name: str, selector: str, labels: Mapping[str, str]) -> str:
    """Return a vector selector. ``selector`` are matchers as text, ``labels`` further ones for equality."""
    matchers = ",".join(filter(None, (selector, *(f'{label}="{value}"' for label, value in labels.items()))))
    return f"{name}{{{matchers}}}" if matchers else name


def by(operator: str, labels: tuple[str, ...], expression: str) -> str:
    """Return an aggregation, as ``max by (job, engine) (...)``."""
    return f"{operator} by ({', '.join(labels)}) ({expression})"


def on(labels: tuple[str, ...]) -> str:
    """Return the matching of two vectors by these labels. Without it vectors whose labels differ never match."""
    return f"on ({', '.join(labels)})"


def increase(vector: str, seconds: float) -> str:
    """Return by how much a counter grew in the last seconds."""
    return f"increase({vector}[{duration(seconds)}])"


def rate(vector: str, seconds: float) -> str:
    """Return how fast a counter grew in the last seconds, per second."""
    return f"rate({vector}[{duration(seconds)}])"


def duration(seconds: float) -> str:
    """Return a length of time as Prometheus writes it, and as people do: ``5s``, ``1m30s``, ``3d``, ``500ms``."""
    milliseconds = round(seconds * 1000)
    whole, rest = divmod(milliseconds, 1000)
    text = ""
    for unit, size in _UNITS:
        count, whole = divmod(whole, size)
        text += f"{count}{unit}" if count else ""
    text += f"{whole}s" if whole else ""
    text += f"{rest}ms" if rest else ""
    return text or "0s"
