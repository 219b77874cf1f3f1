"""A YAML file as plain values, with the line on which each of them stands, so that a message can name it.

PyYAML's safe loader drops what a good message needs: it forgets the lines, and of a key that stands twice it silently
keeps the last. So the file is composed into nodes, and the nodes are walked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tokengap.errors import SettingsError

#: The way to a value: keys and positions from the top of the file.
KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What stands in the file, and by key path the line (from 1) on which it stands."""

    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """Return the line of what stands at a key path; of what is around it where it has none of its own."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read(path: Path) -> SettingsFile:
    """Read a file whose top level is a mapping. An empty file is an empty mapping.

    Raises :class:`SettingsError` when it cannot be read, is not YAML, or says the same key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not a text file in UTF-8 (byte {error.start})") from error
    lines: dict[KeyPath, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            values = _plain(loader, root, (), lines, path) if root is not None else {}
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise SettingsError(f"{path}{_line(error)}: {error.problem or 'is not YAML'}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise SettingsError(f"{path} is nested too deeply, or an alias in it contains itself") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path} is not a mapping; expected lines such as `interval: 1s`")
    return SettingsFile(values, lines)


def dotted(path: KeyPath) -> str:
    """Write a key path as people do: ``engines[0].slots``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _plain(loader: yaml.SafeLoader, node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int], file: Path) -> Any:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*at, place), lines, file) for place, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        _refuse_twins(node, at, file)
        loader.flatten_mapping(node)  # the merge key `<<`; what the mapping says itself comes last and wins
        plain = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            lines[(*at, key)] = key_node.start_mark.line + 1
            plain[key] = _plain(loader, value_node, (*at, key), lines, file)
        return plain
    return loader.construct_object(node)


def _refuse_twins(node: yaml.MappingNode, at: KeyPath, file: Path) -> None:
    first: dict[str, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in first:
            raise SettingsError(f"{file} line {line}: {dotted((*at, key))} stands twice, first on line {first[key]}")
        first[key] = line


def _line(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f" line {mark.line + 1}" if mark else ""
