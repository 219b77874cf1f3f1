"""Settings, and values as they read them, as flags of a command."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tokengap.config.settings import SETTINGS, Setting
from tokengap.logs import without_secrets

#: What to watch; the other settings are about how.
SELECTION = (
    *("engines", "hops", "auto", "slots", "netns"),
    *("haproxy_socket", "envoy_admin", "nginx_status", "admit", "gpu", "dcgm"),
)

#: A link of the documentation's own; a terminal shows where it leads.
_LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


class Value(click.ParamType[Any]):
    """A value as the settings read it."""

    def __init__(self, kind: Any) -> None:
        self._kind, self.name = kind, kind.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        if isinstance(value, self._kind):
            return value
        try:
            return self._kind.read(value)
        except ValueError:
            self.fail(f"{without_secrets(repr(value))} is not {self._kind.expects}", param, ctx)


def options(*keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of these settings, or of all, and --config."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(SETTINGS):
            if not keys or setting.key in keys:
                command = _option(setting)(command)
        file = click.Path(path_type=Path)
        return click.option("--config", "--config.file", "config", type=file, help="A YAML file of settings.")(command)

    return decorate


def _option(setting: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return one setting as a flag. What it may look like is the settings' business, so click takes any text."""
    meaning = _LINK.sub(r"docs/\2", setting.shape.meaning).replace("`", "")
    if setting.shape.many:
        return click.option(*setting.flags, setting.key, multiple=True, metavar=setting.metavar, help=meaning)
    meaning = f"{meaning}  [default: {setting.default}]"
    if setting.default in ("true", "false"):
        (flag, *_), off = setting.flags, f"--no-{setting.flags[0].removeprefix('--')}"
        return click.option(f"{flag}/{off}", setting.key, default=None, help=meaning)
    return click.option(*setting.flags, setting.key, metavar=setting.metavar, help=meaning)
