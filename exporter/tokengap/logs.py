"""What the process says about itself while it runs: one line an event, logfmt or JSON, on standard error.

Values go beside the message, as ``extra``: ``log.info("serving", extra={"address": "http://..."})`` becomes
``ts=... level=info msg=serving address=http://...``. Secrets in URLs never reach a line: every line passes
:func:`without_secrets`, whoever wrote it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final

#: The levels a person may ask for (the spellings of Prometheus' exporter-toolkit).
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}

#: The forms of a line that a person may ask for.
FORMATS: Final = ("logfmt", "json")

_LEVEL_NAMES: Final = {number: name for name, number in LEVELS.items()} | {logging.CRITICAL: "error"}
_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_BARE: Final = re.compile(r"[^\s\"=\\]+")
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/?#@'\"]*(?:@[^\s/?#@'\"]*)*@")
_QUERY: Final = re.compile(r"(\w+://[^\s?#'\"]*)\?[^\s'\"]*")


def without_secrets(text: str) -> str:
    """Take the credentials and the query out of every URL in a text: both may hold a key."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", text))


def configure(level: str, form: str) -> None:
    """Send the log of the whole process to standard error, from ``level`` up, as ``logfmt`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else LogfmtFormatter())
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    # One line for every scrape or asyncio wake-up helps nobody below debug.
    for chatty in ("aiohttp.access", "asyncio"):
        logging.getLogger(chatty).setLevel(max(LEVELS[level], logging.WARNING) if level != "debug" else logging.DEBUG)


class LogfmtFormatter(logging.Formatter):
    """A record as ``key=value`` pairs, values quoted where they must be; a traceback is one quoted value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return " ".join(f"{key}={_quoted(value)}" for key, value in _fields(self, record).items())


class JsonFormatter(logging.Formatter):
    """A record as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return json.dumps(_fields(self, record), default=str)


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    instant = datetime.fromtimestamp(record.created, UTC)
    fields: dict[str, Any] = {
        "ts": instant.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": _LEVEL_NAMES.get(record.levelno, record.levelname.lower()),
        "msg": record.getMessage(),
    }
    fields |= {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
    if record.exc_info:
        fields["traceback"] = formatter.formatException(record.exc_info)
    return {key: _clean(value) for key, value in fields.items()}


def _clean(value: object) -> object:
    return value if isinstance(value, int | float | None) else without_secrets(str(value))


def _quoted(value: object) -> str:
    text = str(value)
    if text.isprintable():
        return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)
    return json.dumps(text)
