"""File, environment and command line, put together.

What stands on the command line wins over the environment (``TOKENGAP_*``), the environment over the file, the file over
the defaults. A list that is given replaces the whole list below it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from tokengap.config import file as settings_file
from tokengap.config import rules
from tokengap.config.file import KeyPath, SettingsFile
from tokengap.config.settings import SETTINGS, Settings, Shape, words
from tokengap.config.values import Name, Seconds
from tokengap.errors import SettingsError
from tokengap.logs import without_secrets

#: The variable that names the file of settings; the one variable of ours that is no setting.
CONFIG_VARIABLE: Final = "TOKENGAP_CONFIG"

#: The share of the deadline that makes the age cut where only the deadline is set: 6 of 8 seconds.
AGE_CUT_SHARE: Final = 0.75

#: Kubernetes puts such variables into every pod beside a service called tokengap, or tokengap-something.
_SERVICE_LINK = re.compile(r"TOKENGAP_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")

#: ``make accept`` sets the second for this project's tests, which pass their environment on. ``tokengap health`` reads
#: the third, ``tokengap top`` the fourth.
_NO_SETTINGS: Final = frozenset({CONFIG_VARIABLE, "TOKENGAP_ACCEPT", "TOKENGAP_API_KEY", "TOKENGAP_PASSWORD"})

_BY_KEY: Final = {setting.key: setting for setting in SETTINGS}
_BY_VARIABLE: Final = {setting.variable: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: in a file at a line, in a variable, on the command line, or nowhere (it is a default)."""

    source: str
    file: SettingsFile | None = None
    path: KeyPath = ()

    def at(self, *steps: str | int) -> Place:
        """Return the place of a part."""
        return replace(self, path=(*self.path, *steps))

    def __str__(self) -> str:
        if self.file is None:
            return self.source
        return f"{self.source} line {self.file.line(self.path)}: {settings_file.dotted(self.path)}"


_Given: TypeAlias = dict[str, tuple[Any, Place]]


def load(file: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Return the settings. ``flags`` is what stood on the command line, by key; None and () mean: nothing did.

    Without ``file`` the variable ``TOKENGAP_CONFIG`` may name one. Raises SettingsError: one line that says where the
    wrong value stands, what it is, and what is expected.
    """
    if file is None and env.get(CONFIG_VARIABLE):
        file = Path(env[CONFIG_VARIABLE])
    given = (_from_file(file) if file is not None else {}) | _from_environment(env) | _from_flags(flags)
    values = {key: _value(_BY_KEY[key].shape, value, place) for key, (value, place) in given.items()}
    if "deadline" in values and "age_cut" not in values:
        values["age_cut"] = Seconds(AGE_CUT_SHARE * values["deadline"])
    settings = Settings(**values)
    named = (msgspec.structs.replace(engine, name=engine.name or Name(engine.url.short)) for engine in settings.engines)
    settings = msgspec.structs.replace(settings, engines=tuple(named))
    places = {key: Place(f"{key} (by default)") for key in _BY_KEY} | {key: place for key, (_, place) in given.items()}
    for path, problem in rules.broken(settings):
        raise SettingsError(f"{places[str(path[0])].at(*path[1:])} {problem}")
    return settings


def _from_file(path: Path) -> _Given:
    file = settings_file.read(path)
    top = Place(str(path), file)
    for key in file.values:
        if key not in _BY_KEY:
            raise SettingsError(f"{top.at(key)} {_unknown(key, _BY_KEY)}")
    return {key: (value, top.at(key)) for key, value in file.values.items() if value is not None}


def _from_environment(env: Mapping[str, str]) -> _Given:
    given: _Given = {}
    for variable in sorted(name for name in env if name.startswith("TOKENGAP_") and name not in _NO_SETTINGS):
        setting = _BY_VARIABLE.get(variable)
        text = env[variable].strip()
        if setting is None:
            if not _SERVICE_LINK.fullmatch(variable):
                raise SettingsError(f"{variable} {_unknown(variable, _BY_VARIABLE)}")
        elif text:  # an empty one is how compose files say: not set
            given[setting.key] = (words(text, setting.key) if setting.shape.many else text, Place(variable))
    return given


def _from_flags(flags: Mapping[str, Any]) -> _Given:
    return {
        key: (list(value) if isinstance(value, tuple) else value, Place(_BY_KEY[key].flags[0]))
        for key, value in flags.items()
        if value is not None and value != ()
    }


def _value(shape: Shape, value: Any, place: Place) -> Any:
    """Return what was given as what it should be."""
    if shape.many is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_one(shape, item, place.at(index)) for index, item in enumerate(items))
    if shape.many is Mapping:
        return {
            _one(Shape(shape.key, None, optional=False, meaning=""), name, place.at(name)): _one(
                shape, item, place.at(name)
            )
            for name, item in _pairs(shape, value, place)
        }
    return _one(shape, value, place)


def _one(shape: Shape, value: Any, place: Place) -> Any:
    if shape.optional and value in (None, "none"):
        return None
    try:
        if issubclass(shape.one, Struct):
            return structure(shape.one, shape.one.in_one_word(value) if isinstance(value, str) else value, place)
        if isinstance(value, list | dict):
            raise ValueError
        return shape.one.read(value)
    except ValueError:
        shown = "***" if getattr(shape.one, "secret", False) else _shown(value)
        raise SettingsError(f"{place} is {shown}; expected {_expected(shape)}") from None


def structure(kind: Any, value: Any, place: Place) -> Any:
    """Return a mapping of a file as the struct ``kind``. Raises SettingsError; ValueError where it is no mapping."""
    if not isinstance(value, dict):
        raise ValueError
    fields = {declared.encode_name: declared for declared in msgspec.structs.fields(kind)}
    values = {}
    for key, item in value.items():
        if key not in fields:
            raise SettingsError(f"{place.at(key)} {_unknown(key, fields)}")
        if item is not None:
            values[fields[key].name] = _value(Shape.of(fields[key].type), item, place.at(key))
    for key, declared in fields.items():
        if declared.required and not values.get(declared.name):
            raise SettingsError(f"{place} has no {key}; expected {_expected(Shape.of(declared.type))}")
    return kind(**values)


def _pairs(shape: Shape, value: Any, place: Place) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a mapping, or of ``NAME=VALUE`` words."""
    if isinstance(value, dict):
        return value.items()
    pairs: dict[str, str] = {}
    for word in value if isinstance(value, list) else [value]:
        name, equals, item = str(word).partition("=")
        if not equals or name in pairs:
            raise SettingsError(f"{place} is {_shown(word)}; expected {shape.expects}, and each name once")
        pairs[name] = item
    return pairs.items()


def _expected(shape: Shape) -> str:
    """Return what is expected of one value."""
    return replace(shape, many=None).expects


def _shown(value: object) -> str:
    """Return a wrong value: one line, not long, and without credentials."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    text = without_secrets(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown(key: str, known: Mapping[str, object]) -> str:
    # Without what all variables begin with, or any of them would be close to any other.
    prefix = "TOKENGAP_" if key.startswith("TOKENGAP_") else ""
    words = {name.removeprefix(prefix): name for name in known}
    close = difflib.get_close_matches(key.removeprefix(prefix).replace("-", "_"), words, n=1)
    if close:
        return f"is no setting; did you mean {words[close[0]]}?"
    listed = dict.fromkeys(re.sub(r"(?i)^(admit_).*", r"\1...", word) for word in words)
    return f"is no setting; expected {prefix and prefix + ' and '}one of {', '.join(listed)}"
