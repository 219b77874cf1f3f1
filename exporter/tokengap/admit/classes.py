"""Which class a request is of: by what it says itself, by its path, by its API key. Pure: no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tokengap.topology import INTERACTIVE

#: A request says its class in this header.
HEADER: Final = "X-Tokengap-Class"

By: TypeAlias = Literal["header", "path", "key"]


@dataclass(frozen=True, slots=True)
class Sign:
    """What tells a class: ``header`` (``Name: value``), ``path`` (and all below it), or ``key``, the SHA-256 of an API
    key in hexadecimal, so that no key stands in a file of settings."""

    klass: str
    by: By
    value: str


class Classes:
    """The classes there are, and their signs. The first that fits decides; without one a request is interactive."""

    def __init__(self, known: Iterable[str], signs: Iterable[Sign] = ()) -> None:
        self._known = frozenset(known)
        self._signs = tuple(signs)
        self._by_key = any(sign.by == "key" for sign in self._signs)

    def of(self, path: str, headers: Mapping[str, str]) -> str:
        """Return the class of a request."""
        said = headers.get(HEADER, "")
        if said in self._known:
            return said
        key = _digest(headers) if self._by_key else ""
        fitting = (sign.klass for sign in self._signs if _fits(sign, path, headers, key))
        return next(fitting, INTERACTIVE)


def _fits(sign: Sign, path: str, headers: Mapping[str, str], key: str) -> bool:
    match sign.by:
        case "path":
            return path == sign.value or path.startswith(sign.value.rstrip("/") + "/")
        case "key":
            return key == sign.value
        case "header":
            name, _, value = sign.value.partition(":")
            return headers.get(name.strip(), "").strip().lower() == value.strip().lower()


def _digest(headers: Mapping[str, str]) -> str:
    """Return the SHA-256 of the key with which a request comes: ``Authorization: Bearer KEY``, or ``X-Api-Key``."""
    key = headers.get("Authorization", "").removeprefix("Bearer ").strip() or headers.get("X-Api-Key", "")
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
