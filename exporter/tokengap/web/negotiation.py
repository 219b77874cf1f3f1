"""Which of the bytes that lie ready a scraper gets: pure functions of its ``Accept`` and ``Accept-Encoding``.

The library's own choice takes the first match, ignores q, and labels its 1.0 syntax with whatever version was asked
for; so the choice is made here, between the two formats that are really rendered.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

Format: TypeAlias = Literal["text", "openmetrics"]

CONTENT_TYPES: dict[Format, str] = {
    "text": "text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
}


class _Offer(NamedTuple):
    """One element of an Accept or Accept-Encoding header."""

    value: str
    parameters: dict[str, str]
    q: float


@lru_cache(maxsize=64)  # scrapers send the same header for ever; bounded, since anyone can send another
def choose_format(accept: str) -> Format:
    """Return the format with the highest q, the first of equals; text where nothing that is served is asked for.

    Answering text rather than 406 is what every exporter does, and what a person with a browser wants.
    """
    best: tuple[float, Format] = (0.0, "text")
    for offer in _offers(accept):
        wanted = _format(offer)
        if wanted is not None and offer.q > best[0]:
            best = (offer.q, wanted)
    return best[1]


@lru_cache(maxsize=64)  # as above
def wants_gzip(accept_encoding: str) -> bool:
    """Return whether gzip is accepted, and not less than the page as it is."""
    q = {offer.value: offer.q for offer in _offers(accept_encoding)}
    gzip = q.get("gzip", q.get("x-gzip", q.get("*", 0.0)))
    return gzip > 0 and gzip >= q.get("identity", 0.0)


def _format(offer: _Offer) -> Format | None:
    """Return the format that a media range asks for, None when it is not one of ours."""
    version = offer.parameters.get("version")
    match offer.value:
        case "application/openmetrics-text" if version in (None, "1.0.0"):
            return "openmetrics"
        case "text/plain" if version in (None, "0.0.4"):
            return "text"
        case "text/*" | "*/*":
            return "text"
        case "application/*":
            return "openmetrics"
    return None


def _offers(header: str) -> Iterable[_Offer]:
    """Yield the elements of a header; one whose q is not a number is passed over."""
    for element in header.split(","):
        value, *rest = (part.strip().lower() for part in element.split(";"))
        parameters = {}
        for part in rest:
            name, _, setting = part.partition("=")
            parameters[name.strip()] = setting.strip().strip('"')
        try:
            q = float(parameters.pop("q", "1"))
        except ValueError:
            continue
        if value and 0 <= q <= 1:
            yield _Offer(value, parameters, q)
