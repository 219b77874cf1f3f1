"""``tokengap drill --matrix`` on real proxies: each way to leave, and each kind of proxy, at least once in `make test`.

The rest of the matrix is in `make test-long`; cells that are known to miss a bar are those with a reason on its page.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

import replay
from lab.commands import COMMAND, started, tokengap
from lab.serving import at_rest, until
from tokengap.chaos.faults import alive
from tokengap.join import start, step
from tokengap.lab.accuracy import UNEXPLAINED, Cell, Run, reason
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.matrix import NO_CAPABILITIES, unprivileged
from tokengap.lab.parts import LOOPBACK, Part, free_ports, running
from tokengap.lab.proxies import PROXIES, Wiring
from tokengap.lab.stage import serve_arguments
from tokengap.lab.users import User, Visit
from tokengap.lab.ways import WAYS
from tokengap.readings import Reading

#: How often a cell is played again when the machine was too busy for the exporter to beat in time.
TRIES = 3


async def play(rows: str, columns: str, kinds: str = "streamed", *more: str, within: float = 200.0) -> Run:
    ran = await tokengap(
        *("drill", "--matrix", "--json", "--rows", rows, "--columns", columns, "--kinds", kinds, *more), within=within
    )
    assert ran.code in (0, 1), ran
    return msgspec.json.decode(ran.out, type=Run)


async def settled(rows: str, columns: str, *more: str) -> tuple[Cell, ...]:
    """Play cells until no beat came late in them; what was measured with late beats says nothing of the exporter."""
    for _ in range(TRIES):
        cells = (await play(rows, columns, "streamed", *more)).cells
        if not any(cell.misses() and cell.late_beats for cell in cells):
            break
    return cells


#: One cell at least of each way to leave and of each kind of proxy, and with less privilege.
SELECTION = {
    "nginx": ("nginx", "half-close,fin,stall"),
    "haproxy": ("haproxy", "none"),
    "envoy": ("envoy", "queued,vanish"),
    "naive": ("naive", "rst"),
    "direct": ("direct", "fin"),
    "engine leaks": ("direct-engine-leaks", "fin"),
    "unprivileged": ("nginx", "fin", "--unprivileged"),
    "no events": ("nginx", "fin", "--no-events"),
}


@pytest.fixture(scope="module")
def selection() -> dict[str, tuple[Cell, ...]]:
    """The cells of the selection, a few rows at a time: they wait more than they work."""

    async def all_of_it():
        few = asyncio.Semaphore(3)

        async def one(arguments):
            async with few:
                return await settled(*arguments)

        return await asyncio.gather(*map(one, SELECTION.values()))

    return dict(zip(SELECTION, asyncio.run(all_of_it()), strict=True))


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.parametrize("name", [name for name in SELECTION if name != "no events"])
def test_what_is_measured_is_what_happened(name, selection):
    """Tokens and client states are within their bars, and every cell was run."""
    for cell in selection[name]:
        assert cell.truth is not None, cell.skipped
        assert cell.truth.out >= 500
        assert cell.misses() == ()
        if cell.column not in ("none", "half-close"):
            assert len(cell.seconds) == 3
            assert cell.truth.orphaned > 500 or name not in ("naive", "engine leaks")


@pytest.mark.e2e
@pytest.mark.alone
def test_without_events_a_beat_of_each_socket_is_missed(selection):
    """Where the kernel does not tell the end of sockets: what eight of them carried in the last beat, and no more."""
    (cell,) = selection["no events"]
    assert cell.measured.out == cell.truth.out
    assert cell.error <= 8 * 100 / cell.truth.out
    assert cell.slowest <= 2.0


def test_an_unprivileged_exporter_has_no_capability():
    """None that it has, none that it could get."""
    ran = subprocess.run([*unprivileged(), "cat", "/proc/self/status"], capture_output=True, text=True, check=True)
    status = dict(line.split(":\t", 1) for line in ran.stdout.splitlines() if ":\t" in line)
    assert {status[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "nginx"), "--rows: only with --matrix"),
        (("--matrix", "--users", "3"), "--users: not with --matrix"),
        (("--matrix", "--rows", "apache"), "--rows: 'apache'; expected some of nginx, "),
        (("--matrix", "--columns", "tea"), "--columns: 'tea'; expected some of none, "),
        (("--matrix", "--unprivileged", "--no-events"), "--unprivileged, --no-events: one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_what_is_wrongly_asked_is_said_in_one_line(arguments, said):
    """Exit 2, and nothing was started."""
    ran = await tokengap("drill", *arguments)
    assert (ran.code, ran.out) == (2, ""), ran
    assert said in ran.err.splitlines()[-1]


@pytest.mark.e2e
async def test_what_is_missing_is_not_run_and_said():
    """LiteLLM is not installed unless asked for; the rest goes on."""
    run = await play("litellm", "none")
    assert [cell.skipped for cell in run.cells] == ["it is installed and run only with --litellm"]


@pytest.mark.e2e
def test_without_root_nobody_vanishes_and_that_is_said():
    """It takes a network of its own; every other way to leave does not."""
    cell = ("drill", "--matrix", "--rows", "direct", "--columns", "vanish", "--kinds", "streamed", "--json")
    ran = subprocess.run([*NO_CAPABILITIES, *COMMAND, *cell], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    (cell,) = msgspec.json.decode(ran.stdout, type=Run).cells
    assert cell.skipped.startswith("a network namespace of its own takes root: ")


@pytest.mark.e2e
async def test_interrupted_it_leaves_nothing_behind():
    """No process; it exits as a shell says it of a program that was interrupted."""
    async with started("drill", "--matrix", "--rows", "nginx", "--columns", "vanish") as process:
        main = psutil.Process(process.pid)

        async def all_parts_run() -> bool:
            return len(main.children(recursive=True)) >= 5  # the engine, nginx and its two workers, the exporter

        await until(all_parts_run, within=30)
        family = main.children(recursive=True)
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 128 + signal.SIGINT
    assert [left for left in family if alive(left)] == []


def _known(cell: Cell) -> bool:
    return reason(cell) != UNEXPLAINED


@pytest.mark.long
@pytest.mark.parametrize("row", [way.name for way in WAYS.values() if not way.optional])
async def test_every_cell_of_a_row(row):
    """Within its bars, or with a reason on the page for why it is not."""
    run = await play(row, "none,half-close,fin,rst,queued,stall,vanish", "streamed,whole", within=900.0)
    assert len(run.cells) == 14
    missed = {(c.column, c.kind): c.misses() for c in run.cells if c.misses() and not c.late_beats and not _known(c)}
    assert missed == {}


@pytest.mark.e2e
@pytest.mark.alone
async def test_the_queue_of_a_real_drill(tmp_path: Path):
    """Through nginx, as it rises past 6 s and falls: its age within a beat and 0.2 s of what the engine knows, at every
    beat, from the sockets and from the curves alone."""
    edge, engine, exporter = free_ports(3)
    recording = tmp_path / "beats"
    arguments = serve_arguments(exporter, f"http://{LOOPBACK}:{engine}", {"edge": f"{LOOPBACK}:{edge}"})
    recorder = str(Path(__file__).parent.parent / "record_beats.py")
    proxy = PROXIES["nginx"].part(Wiring(edge, engine, leak=False, directory=tmp_path))
    command = (sys.executable, recorder, str(recording), *arguments)
    async with (
        running(engine_part(engine, Knobs(max_num_seqs=1, rate=200.0)), tmp_path),
        running(proxy, tmp_path),
        running(Part("recorder", command, (exporter,)), tmp_path),
    ):
        await _come_faster_than_they_are_served(edge)
        truth = await at_rest(engine)
    _, beats = replay.load(str(recording))
    history = {round(sample.at, 1): sample.head_age for sample in truth.history}
    states = {"sockets": None, "curve": None}
    highest, compared = 0.0, dict.fromkeys(states, 0)
    for readings in beats:
        at = readings.engines["worker"].at
        known = [history[key] for key in (round(at + near, 1) for near in (-0.1, 0.0, 0.1)) if key in history]
        for way, state in states.items():
            seen = readings
            if way == "curve":
                seen = replace(readings, sockets=Reading(readings.at, error="not permitted"))
            states[way], view = step(start(readings.topology) if state is None else state, seen)
            if known:
                highest, compared[way] = max(highest, *known), compared[way] + 1
                assert min(known) - 1.2 <= view.engines[0].queue_age <= max(known) + 1.2
                if min(known) > 0:
                    assert view.engines[0].queue_age_from == way
    assert highest > 6
    assert min(compared.values()) >= 10


async def _come_faster_than_they_are_served(edge: int) -> None:
    async def come(number: int) -> str:
        await asyncio.sleep(number * 0.35)
        return (await Visit(User(f"user-{number}", max_tokens=160, prompt_tokens=100), edge).run()).how

    assert set(await asyncio.gather(*map(come, range(16)))) == {"completed"}
