"""Pieces of PromQL. A vector is made of a series, never of a bare name, so that a renamed one leaves no query behind.

Everything keeps to what Prometheus 2.42 reads, and so loads in every later one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

#: What tells one exporter's series from another's, and one engine's within it.
PER_EXPORTER: Final = ("job", "instance")
PER_ENGINE: Final = (*PER_EXPORTER, "engine")

#: Prometheus' own series about a scrape: 1 when it succeeded. The one name here that is not ours.
UP: Final = "up"

_MATCHER = r'([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n`<]|\\.)*"'
_REGEXP: Final = r'~\s*"((?:[^"\\]|\\.)*)"'
_MATCHERS: Final = re.compile(rf"{_MATCHER}(?:\s*,\s*{_MATCHER})*", re.ASCII)
_UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60))


def is_matchers(text: str) -> bool:
    """Tell whether a text is one or more matchers of labels, as they stand between braces.

    Two characters that no cluster or region has are refused: the selector stands in comments and tables too.
    """
    return _MATCHERS.fullmatch(text) is not None and all(map(_is_regexp, re.findall(_REGEXP, text)))


def _is_regexp(pattern: str) -> bool:
    """Python's expressions are not quite Prometheus', but what neither can read is found."""
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def labels_of(matchers: str) -> tuple[str, ...]:
    """Return the labels that matchers are about, each once."""
    return tuple(dict.fromkeys(re.findall(_MATCHER, matchers, re.ASCII)))


class Match(NamedTuple):
    """How a label is matched where it is not for equality: see :func:`any_of` and :func:`other_than`."""

    operator: str
    value: str


def any_of(*values: str) -> Match:
    """Match a label that has one of these values."""
    return Match("=~", "|".join(map(re.escape, values)))


def other_than(value: str) -> Match:
    """Match a label that has another value, or, with an empty one, a label that is there."""
    return Match("!=", value)


def vector(name: str, selector: str, labels: Mapping[str, str | Match]) -> str:
    """Return a vector selector. ``selector`` are matchers as text, ``labels`` further ones by label."""
    matches = {label: value if isinstance(value, Match) else Match("=", value) for label, value in labels.items()}
    own = (f'{label}{match.operator}"{match.value}"' for label, match in matches.items())
    matchers = ",".join(filter(None, (selector, *own)))
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


def over_time(operator: str, vector: str, seconds: float, before: float = 0.0) -> str:
    """Return what a gauge was in the last seconds, as ``avg``, ``max`` or ``min``; or in as many, so long ``before``.

    A scrape that fails is left out.
    """
    offset = f" offset {duration(before)}" if before else ""
    return f"{operator}_over_time({vector}[{duration(seconds)}]{offset})"


def share(part: str, whole: str, labels: tuple[str, ...]) -> str:
    """Return a part of a whole of these labels, and nothing where there is no whole."""
    return f"{part}\n/ {on(labels)}\n({whole} > 0)"


def duration(seconds: float) -> str:
    """Return a length of time as Prometheus reads it: ``5s``, ``1m30s``, ``3d``, ``22s500ms``."""
    milliseconds = round(seconds * 1000)
    whole, rest = divmod(milliseconds, 1000)
    text = ""
    for unit, size in _UNITS:
        count, whole = divmod(whole, size)
        text += f"{count}{unit}" if count else ""
    text += f"{whole}s" if whole else ""
    text += f"{rest}ms" if rest else ""
    return text or "0s"


def said(seconds: float) -> str:
    """Return a length of time as people say it: as Prometheus does, but ``22.5s``."""
    return duration(seconds) if seconds == int(seconds) else f"{seconds:.6g}s"


def percent(part: float) -> str:
    """Return a part of 1 as people write it: ``1%``, ``0.5%``."""
    return f"{100 * part:.12g}%"
