"""What Grafana makes of a dashboard, without Grafana: its own models, of the package ``grafana-foundation-sdk``.

The models are generated from Grafana's schemas, those of its panel plugins included. Reading one drops what they do not
know and checks no type, so both are looked for here: what was dropped, and what is not of its type.
"""

from __future__ import annotations

import enum
import json
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Grafana prefers its schema v2, which no file can provision
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import dashboard, units

register_default_plugins()

#: Every unit that Grafana knows.
UNITS = frozenset(unit for name, unit in vars(units).items() if isinstance(unit, str) and not name.startswith("_"))


def complaints(written: Mapping[str, Any]) -> list[str]:
    """Return what of a dashboard Grafana's models do not know, or know to be something else."""
    return list(_as_model(written, dashboard.Dashboard, "dashboard"))


def _as_model(written: Any, model: Any, at: str) -> Iterator[str]:
    """Read JSON as one of the models, and complain of what was dropped and of what is not of its type."""
    try:
        read = model.from_json(dict(written))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        yield f"{at} cannot be read as {model.__name__}: {type(error).__name__} {error}"
        return
    yield from _dropped(written, json.loads(JSONEncoder().encode(read)), at)
    yield from _mistyped(read, object, at)


def _dropped(written: Any, kept: Any, at: str) -> Iterator[str]:
    if isinstance(written, Mapping) and isinstance(kept, Mapping):
        for key, value in written.items():
            if key in kept:
                yield from _dropped(value, kept[key], f"{at}.{key}")
            elif value is not None:
                yield f"{at}.{key}: unknown"
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        for number, (one, other) in enumerate(zip(written, kept, strict=True)):
            yield from _dropped(one, other, f"{at}[{number}]")
    elif written != kept:
        yield f"{at}: {written!r} becomes {kept!r}"


def _mistyped(value: Any, hint: Any, at: str) -> Iterator[str]:
    """Compare a value with what it is declared as. What plugins have of their own is declared as any object, and is a
    model all the same; some models are left as JSON where they are in a list."""
    if _is_model(type(value)):
        for name, declared in typing.get_type_hints(type(value)).items():
            yield from _mistyped(getattr(value, name), declared, f"{at}.{name}")
    elif isinstance(value, dict) and _is_model(_bare(hint)):
        yield from _as_model(value, _bare(hint), at)
    elif isinstance(value, list) and typing.get_origin(_bare(hint)) is list:
        for number, each in enumerate(value):
            yield from _mistyped(each, typing.get_args(_bare(hint))[0], f"{at}[{number}]")
    elif not _fits(value, hint):
        yield f"{at}: {value!r} is no {hint}"


def _is_model(hint: Any) -> bool:
    return hasattr(hint, "from_json") and hint.__module__.startswith(dashboard.__package__)


def _bare(hint: Any) -> Any:
    """Return a hint without the None that it allows."""
    choices = [each for each in typing.get_args(hint) if each is not type(None)]
    return choices[0] if typing.get_origin(hint) is typing.Union and len(choices) == 1 else hint


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return True
    if origin is typing.Union:
        return any(_fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is dict:
        return isinstance(value, dict)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, arguments[0]) for each in value)
    if issubclass(hint, enum.Enum):
        return value in set(hint)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)
