"""The log: one line an event, in the form that was asked for, without secrets."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap import logs
from tokengap.logs import JsonFormatter, LogfmtFormatter, without_secrets


def record(message: str, *arguments: object, level: int = logging.INFO, **values: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "args": arguments, "levelno": level, "created": 1_700_000_000.5})
    vars(made).update(values)
    return made


def test_logfmt():
    """Time, level, message, then the values beside it; quoted where a reader would take them apart otherwise."""
    line = LogfmtFormatter().format(record("hop %s", "edge", listen=":8080", to="a b", streams=3, why="", level=30))
    assert line == 'ts=2023-11-14T22:13:20.500Z level=warn msg="hop edge" listen=:8080 to="a b" streams=3 why=""'


def test_json():
    """The same as one object; numbers stay numbers."""
    line = JsonFormatter().format(record("serving", address="http://h:1", streams=3, slots=None))
    assert json.loads(line) == {
        "ts": "2023-11-14T22:13:20.500Z",
        "level": "info",
        "msg": "serving",
        "address": "http://h:1",
        "streams": 3,
        "slots": None,
    }


@pytest.mark.parametrize("formatter", [LogfmtFormatter(), JsonFormatter()])
def test_a_traceback_stays_on_the_line(formatter: logging.Formatter):
    """Collectors of logs take a line for an event."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = formatter.format(record("a bug", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "test_a_traceback_stays_on_the_line" in line


@given(st.text())
def test_whatever_is_logged_is_one_line(text: str):
    """Line breaks of all kinds, quotes, backslashes: nothing breaks out."""
    for formatter in (LogfmtFormatter(), JsonFormatter()):
        assert len(formatter.format(record("%s", text, value=text)).splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        ("read http://user:pw@h:1/metrics", "read http://h:1/metrics"),
        ("read https://key@h", "read https://h"),
        ("http://u:p@ss@h:1/?a=b", "http://h:1/"),
        ("GET http://h:1/x?api_key=k&b failed", "GET http://h:1/x failed"),
        ("'http://u:p@a' and 'http://v:q@b'", "'http://a' and 'http://b'"),
        ("http://h:1/@home", "http://h:1/@home"),
        ("mail me@example.com?", "mail me@example.com?"),
    ],
)
def test_secrets_in_urls_are_left_out(said: str, logged: str):
    """Who writes a line need not think of it, a library included."""
    assert without_secrets(said) == logged
    assert json.loads(JsonFormatter().format(record("%s", said, url=said)))["url"] == logged


def test_configure_sends_what_is_wanted_to_standard_error(capsys: pytest.CaptureFixture[str]):
    """From the level up, in the form; and it can be called again."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    levels = {name: logging.getLogger(name).level for name in (None, "asyncio", "aiohttp.access")}
    try:
        logs.configure("warn", "json")
        logs.configure("warn", "logfmt")
        logging.getLogger("x").info("not this")
        logging.getLogger("x").warning("this")
        out, err = capsys.readouterr()
    finally:
        root.handlers[:] = before
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert out == ""
    assert re.fullmatch(r"ts=\S+ level=warn msg=this\n", err)
