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
    try:
        values, lines = _Walk(path, text).walk()
    except yaml.MarkedYAMLError as error:
        raise SettingsError(f"{path}{_line(error)}: {error.problem or 'is not YAML'}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:  # brackets a thousand deep
        raise SettingsError(f"{path} is not YAML that can be read: {' '.join(str(error).split())}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path} is not a mapping; expected lines such as `interval: 1s`")
    return SettingsFile(values, lines)


def dotted(path: KeyPath) -> str:
    """Write a key path as people do: ``engines[0].slots``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{_shown(step)}" for step in path).removeprefix(".")


def _shown(key: str) -> str:
    """A key as it is written, or quoted where that would break the line that a message is."""
    return key if key.isprintable() else repr(key)


class _Walk:
    """One walk through the nodes of a file."""

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        self._loader = yaml.SafeLoader(text)
        self._lines: dict[KeyPath, int] = {}
        self._walked: dict[yaml.Node, Any] = {}  # by identity: what an alias stands for is walked once
        self._around: set[yaml.Node] = set()

    def walk(self) -> tuple[Any, Mapping[KeyPath, int]]:
        try:
            root = self._loader.get_single_node()
            return (None if root is None else self._plain(root, ())), self._lines
        finally:
            self._loader.dispose()

    def _plain(self, node: yaml.Node, at: KeyPath) -> Any:
        self._lines.setdefault(at, node.start_mark.line + 1)
        if node in self._around:
            raise yaml.MarkedYAMLError(problem=f"{dotted(at)} contains itself", problem_mark=node.start_mark)
        if node not in self._walked:
            self._around.add(node)
            if isinstance(node, yaml.SequenceNode):
                self._walked[node] = [self._plain(item, (*at, place)) for place, item in enumerate(node.value)]
            elif isinstance(node, yaml.MappingNode):
                self._walked[node] = self._mapping(node, at)
            else:
                self._walked[node] = self._scalar(node)
            self._around.discard(node)
        return self._walked[node]

    def _mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, Any]:
        own: dict[str, int] = {}
        for key, line in ((_key(key_node), key_node.start_mark.line + 1) for key_node, _ in node.value):
            if key in own:
                raise SettingsError(
                    f"{self._file} line {line}: {dotted((*at, key))} stands twice, first on line {own[key]}"
                )
            own[key] = line
        self._loader.flatten_mapping(node)  # the merge key `<<`; what the mapping says itself comes last and wins
        plain = {}
        for key_node, value_node in node.value:
            key = _key(key_node)
            self._lines[(*at, key)] = own.get(key, node.start_mark.line + 1)
            plain[key] = self._plain(value_node, (*at, key))
        return plain

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node)
        except (ValueError, KeyError, AttributeError) as error:
            # PyYAML lets these through: `2026-13-45`, `!!bool maybe`, `!!timestamp soon`.
            raise yaml.MarkedYAMLError(
                problem=f"{node.value!r} is no {node.tag.rpartition(':')[2]}", problem_mark=node.start_mark
            ) from error


def _key(node: yaml.Node) -> str:
    """Return a key as it is written; all of ours are plain words."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "?"


def _line(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f" line {mark.line + 1}" if mark else ""
