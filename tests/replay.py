"""Beats recorded on real sockets, to be joined again: gzipped JSON lines, the truth first, then the beats."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokengap.readings import SOCKET, EnginePage, ProcessTable, Reading, Readings, SocketSnapshot
from tokengap.topology import Topology

BEATS = Path(__file__).parent / "recorded" / "beats"


def names() -> list[str]:
    """Return the names of all recordings."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in BEATS.glob("*.jsonl.gz"))


def load(name: str) -> tuple[dict[str, Any], Iterator[Readings]]:
    """Return what really happened, and the readings of each beat."""
    lines = gzip.decompress((BEATS / f"{name}.jsonl.gz").read_bytes()).splitlines()
    first = json.loads(lines[0])
    topology = msgspec.convert(first["topology"], Topology)
    columns = first["columns"]  # those of the time of the recording; what came later is 0
    return first["truth"], (_readings(json.loads(line), topology, columns) for line in lines[1:])


def save(name: str, truth: dict[str, Any], beats: list[Readings]) -> None:
    """Write a recording."""
    first = {"columns": SOCKET.names, "topology": asdict(beats[0].topology), "truth": truth}
    lines = [json.dumps(first), *(json.dumps(_plain(beat)) for beat in beats)]
    (BEATS / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def _plain(beat: Readings) -> dict[str, Any]:
    snapshot = beat.sockets.value
    assert snapshot is not None
    return {
        "at": beat.at,
        "wall": beat.wall,
        "sockets": {
            "at": beat.sockets.at,
            "took": beat.sockets.took,
            "events": snapshot.events,
            "open": _text(snapshot.open),
            "closed": _text(snapshot.closed),
        },
        "engines": {name: _plain_page(reading) for name, reading in beat.engines.items()},
        "owners": {str(inode): hop for inode, hop in beat.processes.value.owners.items()},
        "own": sorted(beat.processes.value.own),
    }


def _plain_page(reading: Reading[EnginePage]) -> dict[str, Any]:
    page = {"at": reading.at, "took": reading.took}
    return page | ({"error": reading.error} if reading.value is None else {"value": asdict(reading.value)})


def _page(plain: dict[str, Any]) -> Reading[EnginePage]:
    value = msgspec.convert(plain["value"], EnginePage) if "value" in plain else None
    return Reading(plain["at"], plain["took"], value, plain.get("error"))


def _text(table: np.ndarray) -> str:
    columns = np.column_stack([table[name].astype("u8") for name in SOCKET.names])
    return base64.b64encode(zlib.compress(columns.T.tobytes(), 9)).decode()


def _table(text: str, names: list[str]) -> np.ndarray:
    columns = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="u8").reshape(len(names), -1)
    table = np.zeros(columns.shape[1], dtype=SOCKET)
    for name, column in zip(names, columns, strict=True):
        table[name] = column.view("i8") if SOCKET[name] == np.int64 else column
    return table


def _process_table(beat: dict[str, Any]) -> ProcessTable:
    """Older recordings have our own sockets among the owners, as nobody's."""
    return ProcessTable(
        {int(inode): hop for inode, hop in beat["owners"].items()},
        frozenset(beat.get("own", ())),
    )


def _readings(beat: dict[str, Any], topology: Topology, columns: list[str]) -> Readings:
    sockets = beat["sockets"]
    tables = (_table(sockets[which], columns) for which in ("open", "closed"))
    snapshot = SocketSnapshot(*tables, "sock_diag", sockets["events"])
    return Readings(
        at=beat["at"],
        wall=beat["wall"],
        topology=topology,
        sockets=Reading(sockets["at"], sockets["took"], snapshot),
        engines={name: _page(plain) for name, plain in beat["engines"].items()},
        processes=Reading(beat["at"], value=_process_table(beat)),
    )
