"""What reading GPUs costs, and what a hung driver costs a scrape.

The reader process runs at one cycle a second on a stand-in for NVML with ``--gpus`` GPUs: its share of one processor,
and its memory. Of that, what a real driver would take is not in it, and what the stand-in takes is. ``--real`` measures
the reader alone, on the driver of this host.

Then three exporters run side by side: without GPUs, with GPUs that answer, and with a driver in which every reader
hangs so that no signal ends it, as many as there ever are at once. Their ``/metrics`` are asked in turn over kept-alive
connections; a claim is the median over the rounds of the ratio of two medians of one round.

    python bench/gpu.py [--gpus 8] [--json]
    python bench/gpu.py --real [--json]
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import psutil

from tokengap.lab.nvml.fake import FakeNvml, compile_library
from tokengap.lab.nvml.profiles import H100, many
from tokengap.lab.parts import LOOPBACK, free_port

WITHIN = 60.0


def processor_seconds(pid: int) -> float:
    """Return the time that all threads of a process have run (/proc/PID/schedstat counts nanoseconds)."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure_reader(environment: Mapping[str, str], seconds: int) -> dict[str, float]:
    """Run a reader by itself for some seconds."""
    command = (sys.executable, "-P", "-m", "tokengap.sources.nvml_reader", "--interval", "1")
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        line = reader.stdout.readline()
        first = time.perf_counter() - began
        reader.stdout.readline()
        began, cpu = time.perf_counter(), processor_seconds(reader.pid)
        for _ in range(seconds):
            line = reader.stdout.readline()
        share = (processor_seconds(reader.pid) - cpu) / (time.perf_counter() - began)
        memory = psutil.Process(reader.pid).memory_full_info()
        reader.stdin.close()
    return {
        "gpus": len(json.loads(line)["gpus"]),
        "reader_cpu_percent": round(100 * share, 2),
        "reader_rss_bytes": memory.rss,
        "reader_pss_bytes": memory.pss,
        "reader_first_line_ms": round(first * 1e3),
        "line_bytes": len(line),
    }


class Exporter:
    """A running ``tokengap serve`` and one kept-alive connection to it."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
        self.medians: list[float] = []
        self.all: list[float] = []

    def ask(self) -> bytes:
        """Return the page."""
        self._connection.request("GET", "/metrics")
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise ConnectionError(f"/metrics answers {answer.status}")
        return body

    def until(self, condition: Callable[[bytes], bool]) -> bytes:
        """Return the first page of which a condition holds."""
        deadline = time.monotonic() + WITHIN
        while True:
            try:
                if condition(page := self.ask()):
                    return page
            except (OSError, http.client.HTTPException):
                self._connection.close()  # it does not listen yet, or has no page
            if time.monotonic() > deadline:
                raise SystemExit(f"an exporter was not ready within {WITHIN:g} s")
            time.sleep(0.1)

    def round(self, scrapes: int) -> None:
        """Ask so often, one after the other."""
        times = []
        for _ in range(scrapes):
            began = time.perf_counter()
            self.ask()
            times.append(time.perf_counter() - began)
        self.medians.append(statistics.median(times))
        self.all += times


@contextmanager
def exporting(environment: Mapping[str, str], *flags: str) -> Iterator[Exporter]:
    """Run an exporter. Its readers that nothing else ends are killed afterwards: they are no clients of a driver."""
    port = free_port()
    listen = ("--listen", f"{LOOPBACK}:{port}", "--engine", f"worker=http://{LOOPBACK}:{free_port()}")
    command = (sys.executable, "-m", "tokengap", "serve", *listen, *flags)
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        readers: list[psutil.Process] = []
        try:
            yield Exporter(port)
        finally:
            readers = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(WITHIN)
            for reader in readers:
                if reader.is_running():
                    reader.kill()


def series(page: bytes, text: bytes) -> bool:
    """Tell whether a sample on the page has this text in it."""
    return any(text in line for line in page.splitlines() if not line.startswith(b"#"))


def measure_scrapes(well: FakeNvml, hung: FakeNvml, rounds: int, scrapes: int) -> dict[str, float]:
    """Compare three exporters side by side."""
    with ExitStack() as stack:
        none = stack.enter_context(exporting(os.environ, "--no-gpu"))
        working = stack.enter_context(exporting(well.environment, "--gpu"))
        hanging = stack.enter_context(exporting(hung.environment, "--gpu"))
        none.until(lambda page: series(page, b"tokengap_source_up"))
        working.until(lambda page: series(page, H100.name.encode()))
        hanging.until(lambda page: series(page, H100.name.encode()))
        hung.hang("nvmlDeviceGetTotalEnergyConsumption", "stop")
        hanging.until(lambda page: series(page, b'reason="hung"'))
        exporters = [none, working, hanging]
        for number in range(rounds + 1):
            for exporter in exporters if number % 2 else exporters[::-1]:
                exporter.round(scrapes)
        page = hanging.ask()
        if not series(page, b'reason="hung"'):
            raise SystemExit("the driver did not hang to the end")

    def ratio(one: Exporter) -> float:
        return round(statistics.median(a / b for a, b in zip(one.medians[1:], none.medians[1:], strict=True)), 3)

    return {
        "ratio_hung_to_none": ratio(hanging),
        "ratio_gpus_to_none": ratio(working),
        **{
            f"{what}_ms_{name}": round(value * 1e3, 3)
            for name, one in (("none", none), ("gpus", working), ("hung", hanging))
            for what, value in (
                ("median", statistics.median(one.all)),
                ("p99", statistics.quantiles(one.all, n=100)[98]),
                ("worst", max(one.all)),
            )
        },
        "page_bytes_hung": len(page),
    }


def measure_beside_a_stand_in(gpus: int, seconds: int, rounds: int, scrapes: int) -> dict[str, float]:
    """Measure the reader and the exporters on so many GPUs that are not there."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        library = compile_library(directory)
        well, hung = (FakeNvml(library, directory / f"{which}.control", many(H100, gpus)) for which in ("well", "hung"))
        well.write()
        hung.write()
        return measure_reader(well.environment, seconds) | measure_scrapes(well, hung, rounds, scrapes)


@click.command()
@click.option("--gpus", default=8, show_default=True, help="GPUs of the stand-in.")
@click.option("--seconds", default=20, show_default=True, help="How long the reader is watched.")
@click.option("--rounds", default=25, show_default=True, help="Rounds of scrapes.")
@click.option("--scrapes", default=100, show_default=True, help="Scrapes of each exporter in a round.")
@click.option("--real", is_flag=True, help="Only the reader, on this host's own driver.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(gpus: int, seconds: int, rounds: int, scrapes: int, real: bool, as_json: bool) -> None:
    """Measure the GPU reader, and scrapes while it hangs."""
    result = measure_reader(os.environ, seconds) if real else measure_beside_a_stand_in(gpus, seconds, rounds, scrapes)
    if as_json:
        click.echo(json.dumps(result))
        return
    for key, value in result.items():
        click.echo(f"{key:24} {value:>12,}")
    if not real:
        click.echo("bar: ratio_hung_to_none at most 1.2")


if __name__ == "__main__":
    main()
