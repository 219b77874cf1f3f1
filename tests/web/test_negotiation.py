"""Which bytes a scraper gets."""

from __future__ import annotations

import pytest

from tokengap.web.negotiation import choose_format, wants_gzip

OPENMETRICS = "application/openmetrics-text"
# What Prometheus 2.42 and 3.x send.
PROMETHEUS_2 = (
    f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPENMETRICS};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/plain", "text"),
        ("text/plain;version=0.0.4", "text"),
        (BROWSER, "text"),
        ("text/html", "text"),
        ("application/json", "text"),
        ("garbage", "text"),
        (";;;,,,=;q=", "text"),
        (f"{OPENMETRICS};q=x", "text"),
        (f"{OPENMETRICS};q=nan", "text"),
        (f"{OPENMETRICS};q=-1", "text"),
        (f"{OPENMETRICS};q=0", "text"),
        (OPENMETRICS, "openmetrics"),
        (OPENMETRICS.upper(), "openmetrics"),
        (f"{OPENMETRICS};version=1.0.0", "openmetrics"),
        (f'{OPENMETRICS}; version="1.0.0"; charset=utf-8', "openmetrics"),
        (f"{OPENMETRICS};version=2.0.0", "text"),
        (f"{OPENMETRICS};version=2.0.0,{OPENMETRICS};version=1.0.0;q=0.8,text/plain;q=0.1", "openmetrics"),
        (f"{OPENMETRICS};version=0.0.1", "text"),
        (f"{OPENMETRICS};q=0.5,text/plain;q=0.9", "text"),
        (f"{OPENMETRICS};q=0.9,text/plain;q=0.5", "openmetrics"),
        (f"{OPENMETRICS},text/plain", "openmetrics"),
        (f"text/plain,{OPENMETRICS}", "text"),
        (PROMETHEUS_2, "openmetrics"),
        (PROMETHEUS_3, "openmetrics"),
    ],
)
def test_highest_q_of_what_is_served_wins(accept: str, expected: str) -> None:
    """The highest q decides, the first of equals; nothing that is served means text."""
    assert choose_format(accept) == expected


@pytest.mark.parametrize(
    ("accept_encoding", "expected"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("x-gzip", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0,*", False),
        ("*;q=0", False),
        ("identity", False),
        ("deflate, br", False),
        ("br, gzip;q=0.5", True),
        ("identity;q=1, gzip;q=0.5", False),
        ("identity;q=0.5, gzip", True),
        ("gzip;q=high", False),
    ],
)
def test_gzip_only_when_accepted(accept_encoding: str, expected: bool) -> None:
    """Gzip is sent when it is accepted and not less wanted than the plain page."""
    assert wants_gzip(accept_encoding) is expected
