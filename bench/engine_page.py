"""How much faster engine pages are read than by prometheus_client's parser, on the same bytes in the same run.

``ratio_parser_to_ours`` is for a busy page of vLLM 0.32.0, ``..._8_ranks`` for vLLM 0.33.0 with eight data-parallel
ranks, ``..._lowest`` the lowest of all pages in ``tests/recorded``, of every version and family (``--all`` lists them),
``..._lowest_of_10_kb`` of those as long as real ones are: some written by hand have a dozen lines.
The two readers take turns; each figure is the fastest of its rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tokengap.errors import SourceUnusable
from tokengap.sources.engine import parse_page

RECORDED = Path(__file__).parent.parent / "tests" / "recorded"
PAGES = {"": "vllm-0.32.0/busy-1.prom", "_8_ranks": "vllm-pages/vllm-0.33.0-engines8.prom"}
ROUNDS = 50


def seconds(read: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    read()
    return time.perf_counter() - started


def measure(page: bytes, rounds: int) -> tuple[float, float]:
    """Return the fastest time of the parser and of ours, in seconds."""
    theirs = ours = float("inf")
    for _ in range(rounds):
        theirs = min(theirs, seconds(lambda: list(text_string_to_metric_families(page.decode()))))
        ours = min(ours, seconds(lambda: parse_page(page)))
    return theirs, ours


def readable(path: Path) -> bool:
    """Tell whether the page is one in the text format, of an engine: others are refused, which is quick."""
    page = path.read_bytes()
    try:
        parse_page(page)
    except SourceUnusable:
        return False
    return not page.startswith(b'"')


def main() -> None:
    """Print the figures as a table, or as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--all", action="store_true", help="print the ratio of each page as well")
    arguments = parser.parse_args()

    figures: dict[str, float] = {}
    for suffix, name in PAGES.items():
        theirs, ours = measure((RECORDED / name).read_bytes(), ROUNDS)
        figures[f"ratio_parser_to_ours{suffix}"] = round(theirs / ours, 1)
        figures[f"parser_ms{suffix}"] = round(theirs * 1e3, 3)
        figures[f"ours_ms{suffix}"] = round(ours * 1e3, 3)
    ratios: dict[str, float] = {}
    long: list[str] = []
    for path in filter(readable, sorted(RECORDED.glob("*/*.prom"))):
        name = f"{path.parent.name}/{path.stem}"
        theirs, ours = measure(path.read_bytes(), ROUNDS // 5)
        ratios[name] = round(theirs / ours, 1)
        if path.stat().st_size >= 10_000:
            long.append(name)
    figures["ratio_parser_to_ours_lowest"] = min(ratios.values())
    figures["ratio_parser_to_ours_lowest_of_10_kb"] = min(ratios[name] for name in long)
    figures["pages"] = len(ratios)
    if arguments.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:40} {value:>10g}")
    if arguments.all:
        for key, value in sorted(ratios.items(), key=lambda pair: pair[1]):
            print(f"{value:>6g} {key}")


if __name__ == "__main__":
    main()
