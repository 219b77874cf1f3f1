"""An exporter that keeps what it read: ``python tests/record_beats.py RECORDING serve ...``.

It is ``tokengap serve`` in every other way, and writes its beats as :mod:`replay` reads them when it is asked to stop.
``tokengap drill --matrix --exporter "python tests/record_beats.py /tmp/beats"`` records a cell of the matrix.
"""

from __future__ import annotations

import sys

import replay
import tokengap.join
from tokengap.cli import main
from tokengap.readings import Readings


def record(name: str, arguments: list[str]) -> None:
    """Run the command and write its beats."""
    beats: list[Readings] = []
    step = tokengap.join.step

    def keep(state, readings):
        if readings.sockets.value is not None and readings.processes.value is not None:
            beats.append(readings)
        return step(state, readings)

    tokengap.join.step = keep
    try:
        main(arguments)
    finally:
        if beats:
            replay.save(name, {}, beats)


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2:])
