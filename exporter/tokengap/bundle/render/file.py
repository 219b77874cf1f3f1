"""A file that is not written yet, and YAML as people write it."""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml


class File(NamedTuple):
    """A path below the folder of the bundle, with ``/``, and the text that belongs there."""

    path: str
    text: str


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as such, and lists are indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's signature
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(*documents: Any) -> str:
    """Return documents as YAML, keys in the order given."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True, explicit_start=True
    )
