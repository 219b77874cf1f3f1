"""How soon a client that vanished is known, and that its proxy still holds its stream then.

Real proxies in front of the stand-in engine, with users whose packets are dropped on arrival: the column "vanished" of
the accuracy matrix. ``seconds_...`` is until ``/api/streams`` had the slowest of three right. ``held_seconds_...`` is
for how long the proxy went on for them at least: the engine generated every token that they had asked for, so it was
never told. A proxy finds out by itself when the kernel gives up, after about 15 minutes (tcp_retries2).

    python bench/vanished.py [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import msgspec

from tokengap.lab.accuracy import Run
from tokengap.lab.ways import COLUMNS

PROXIES = ("nginx", "haproxy", "envoy")
VANISH = COLUMNS["vanish"]


def measure(proxy: str) -> dict[str, float]:
    """Play one cell."""
    asked = ("--rows", proxy, "--columns", "vanish", "--kinds", "streamed", "--json")
    command = (sys.executable, "-m", "tokengap", "drill", "--matrix", *asked)
    played = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    (cell,) = msgspec.json.decode(played.stdout, type=Run).cells
    crowd = VANISH.of("streamed")
    if cell.slowest is None or cell.truth is None:
        raise SystemExit(f"{proxy}: {cell.skipped or cell.failed or 'a client that vanished was never seen'}")
    if cell.truth.out < crowd.users * crowd.tokens:
        raise SystemExit(f"{proxy} let go: {cell.truth.out:g} of {crowd.users * crowd.tokens} tokens were generated")
    held = crowd.tokens / crowd.rate - crowd.leave_at
    return {
        f"seconds_{proxy}": cell.slowest,
        f"held_seconds_{proxy}": held,
        f"ratio_seconds_to_held_{proxy}": round(cell.slowest / held, 3),
    }


def main() -> None:
    """Measure all proxies and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for proxy in PROXIES:
        figures |= measure(proxy)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:36} {value:8.2f}")


if __name__ == "__main__":
    main()
