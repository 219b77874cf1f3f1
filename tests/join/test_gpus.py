"""GPUs in the join: whose they are, what they used, and what of their telemetry is no truth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.gpu_readings import Gpu, GpuProcess, GpuSnapshot, Xid
from tokengap.join.gpus import GpuState, Used, observe
from tokengap.readings import ProcessTable, Reading, Readings, SocketSnapshot
from tokengap.topology import Engine, GpuPrice, Topology
from tokengap.view import GpusView

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"
WALL = 1_764_000_000.0


def engine(name: str, *gpus: str) -> Engine:
    return Engine(name, f"http://{name}:8000", (), gpus=gpus)


def beat(
    at: float,
    rows: Iterable[Gpu] = (),
    *,
    engines: Iterable[Engine] = (engine("worker"),),
    families: dict[str, frozenset[int]] | None = None,
    price: GpuPrice = GpuPrice(),  # noqa: B008 - a frozen value
    **snapshot,
) -> Readings:
    """Readings of one beat in which only GPUs and processes matter."""
    told = GpuSnapshot(
        **{"reason": "ok", "at": at if rows else 0.0, "sequence": int(at), "gpus": tuple(rows), **snapshot}
    )
    return Readings(
        at=at,
        wall=WALL + at,
        topology=Topology(engines=tuple(engines), price=price),
        sockets=Reading(at, value=SocketSnapshot(open=())),
        engines={},
        processes=Reading(at, value=ProcessTable(families=families or {})),
        gpu=Reading(at, value=told),
    )


def play(*beats: Readings) -> tuple[GpusView, list[Used]]:
    """Return what is known after the last beat, and all that was used."""
    state, used, view = GpuState(), [], None
    for readings in beats:
        state, view, now = observe(state, readings)
        used += now
    assert view is not None
    return view, used


def gpu(at: float, uuid: str = A, index: int = 0, **fields) -> Gpu:
    return Gpu(uuid, index, at, **fields)


# --- whose it is ---------------------------------------------------------------------------------------------------


def test_a_gpu_is_the_engines_whose_process_is_on_it():
    """The pid is a descendant's of the API server, not the API server itself."""
    rows = [gpu(1, processes=(GpuProcess(501),)), gpu(1, B, 1, processes=(GpuProcess(502), GpuProcess(9)))]
    view, _ = play(beat(1, rows, families={"worker": frozenset({500, 501, 502})}))
    assert [(g.engines, g.joined_by, g.other_processes) for g in view.gpus] == [
        (("worker",), "processes", 0),
        (("worker",), "processes", 1),
    ]


@pytest.mark.parametrize("processes", [None, (), (GpuProcess(7),)], ids=["not told", "none seen", "somebody else's"])
def test_nobody_knows_whose_a_gpu_is_without_a_match(processes):
    """An empty list may be a container's view: unknown is said, and never guessed, even with one engine and one GPU."""
    view, _ = play(beat(1, [gpu(1, processes=processes)], families={"worker": frozenset({500})}))
    assert (view.gpus[0].engines, view.gpus[0].joined_by) == ((), None)


def test_settings_name_gpus_and_win():
    """A configured engine has its GPUs and no others, whatever processes are seen; the others are found by process."""
    rows = [gpu(1, A, 0, processes=(GpuProcess(2),)), gpu(1, B, 1, processes=(GpuProcess(1), GpuProcess(2)))]
    families = {"named": frozenset({1}), "seen": frozenset({2})}
    view, _ = play(beat(1, rows, engines=[engine("named", A), engine("seen")], families=families))
    assert [(g.engines, g.joined_by) for g in view.gpus] == [(("named", "seen"), "settings"), (("seen",), "processes")]


def test_of_a_gpu_in_mig_mode_only_its_instances_are_an_engines():
    """The parent lists all processes; whose board it is cannot be said of one engine."""
    rows = [
        gpu(1, A, mig=True, processes=(GpuProcess(1), GpuProcess(2))),
        gpu(1, "MIG-1", parent=A, processes=(GpuProcess(1),)),
        gpu(1, "MIG-2", parent=A, processes=(GpuProcess(2),)),
    ]
    families = {"one": frozenset({1}), "two": frozenset({2})}
    view, _ = play(beat(1, rows, engines=[engine("one"), engine("two")], families=families))
    assert {g.row.uuid: g.engines for g in view.gpus} == {A: (), "MIG-1": ("one",), "MIG-2": ("two",)}


def test_a_process_list_that_is_missing_once_changes_nothing():
    """One read without the list leaves the GPU with its engine; an empty list takes it away."""
    families = {"worker": frozenset({1})}
    with_it, without = gpu(1, processes=(GpuProcess(1),)), gpu(2, processes=None)
    assert play(beat(1, [with_it], families=families), beat(2, [without]))[0].gpus[0].engines == ("worker",)
    assert play(beat(1, [with_it], families=families), beat(2, [gpu(2, processes=())]))[0].gpus[0].engines == ()


# --- lost, hung, absent --------------------------------------------------------------------------------------------


def test_one_of_four_lost():
    """nvitop 45: three complete, the lost one up 0 with its last UUID and engine, and no value of it is left."""
    families = {"worker": frozenset({1})}
    uuids = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    rows = [
        gpu(1, uuid, index, power=600.0, energy=1e6, processes=(GpuProcess(1),)) for index, uuid in enumerate(uuids)
    ]
    lost = Gpu("", 2, 2.0, up=False, reason="lost")  # a new reader never learned its UUID
    later = [replace(row, at=2.0, energy=1e6 + 600) for row in rows if row.index != 2]
    view, used = play(beat(1, rows, families=families), beat(2, [*later, lost], families=families))
    assert [g.up for g in view.gpus] == [True, True, False, True]
    gone = view.gpus[2]
    assert (gone.row.uuid, gone.engines, gone.row.reason) == ("GPU-2", ("worker",), "lost")
    assert (gone.row.power, gone.energy, gone.idle_power, gone.latched) == (None, None, None, None)
    assert {use.uuid: use.joules for use in used} == {"GPU-0": 600.0, "GPU-1": 600.0, "GPU-3": 600.0}


def test_a_gpu_that_is_no_longer_listed_is_missing_and_an_instance_is_forgotten():
    """A GPU that fell off is said to be; a MIG instance that was destroyed is not."""
    rows = [gpu(1), gpu(1, B, 1, mig=True), gpu(1, "MIG-1", 1, parent=B)]
    view, _ = play(beat(1, rows), beat(2, [gpu(2, B, 1, mig=False)]))
    assert [(g.row.uuid, g.up, g.row.reason) for g in view.gpus] == [(A, False, "missing"), (B, True, "")]


@pytest.mark.parametrize("reason", ["hung", "crashed", "version_mismatch", "starting"])
def test_when_nothing_can_be_read_values_are_dropped_and_identity_stays(reason):
    """Frozen values would hide a hang: up is not known, and what does not change is still said."""
    row = gpu(1, name="H100", power=600.0, energy=5.0, processes=())
    view, used = play(beat(1, [row], driver="590"), beat(2, reason=reason))
    (only,) = view.gpus
    assert (only.up, only.row.power, only.energy, only.row.name) == (None, None, None, "H100")
    assert (view.reason, view.driver, view.read_at) == (reason, "590", WALL + 1)
    assert not used


def test_values_that_do_not_change_any_more_are_dropped():
    """A dcgm-exporter that hangs serves its last page for ever: two and a half minutes of it are enough."""
    row = gpu(10, power=600.0)
    fresh = replace(beat(160, [row]), gpu=Reading(160, value=GpuSnapshot("ok", at=10, way="dcgm", gpus=(row,))))
    assert play(fresh)[0].reason == "ok"
    view, _ = play(fresh, replace(fresh, at=161.0, wall=WALL + 161))
    assert (view.reason, view.detail, view.gpus[0].row.power) == ("hung", "the same values for 151 s", None)


def test_a_source_that_raised_is_a_reason_too():
    """A failed read is no view of an idle host."""
    readings = replace(beat(1), gpu=Reading(1.0, error="bug"))
    view, _ = play(readings)
    assert (view.reason, view.detail, view.gpus) == ("failed", "bug", ())


def test_gpus_that_are_not_asked_for_are_not_spoken_of():
    """With --no-gpu there is no view of GPUs."""
    assert observe(GpuState(), replace(beat(1), gpu=None))[1:] == (None, ())


# --- energy --------------------------------------------------------------------------------------------------------


EMPTY = {"memory_total": 80 * 2**30, "memory_used": 0, "processes": ()}


def test_energy_is_the_difference_of_the_counter():
    """Whatever the power says: 42 kJ in 15 s, of which 71 W are idle power."""
    first, second = gpu(0, energy=1000.0, power=71.0, utilization=0.0), gpu(15, energy=43_000.0, power=600.0)
    view, used = play(beat(0, [first]), beat(15, [second]))
    assert used == [Used(A, 42_000.0, 42_000.0 - 71 * 15)]
    assert (view.gpus[0].energy, view.gpus[0].energy_source) == (43_000.0, "counter")


def test_a_counter_that_fell_makes_no_energy():
    """The driver was loaded anew: that interval is not known, the next one is; nothing falls below zero."""
    rows = [gpu(at, energy=energy) for at, energy in ((0, 5000.0), (1, 10.0), (2, 610.0))]
    view, used = play(*(beat(row.at, [row]) for row in rows))
    assert [use.joules for use in used] == [None, 600.0]
    assert (view.gpus[0].energy_resets, view.gpus[0].energy) == (1, 610.0)


def test_the_same_reading_seen_twice_is_one():
    """A beat that comes between two cycles of the reader closes no interval, and divides by nothing."""
    first, second = gpu(0, energy=0.0), gpu(1, energy=600.0)
    _, used = play(beat(0, [first]), beat(0.5, [first]), beat(1, [second]), beat(1.5, [second]))
    assert [use.joules for use in used] == [600.0]


def test_without_a_counter_power_is_integrated():
    """P100 (aiperf 1350): joules from power over time, said to be; never 0."""
    first = gpu(0, power=100.0, utilization=0.0, unsupported={"energy": "not_supported"})
    view, used = play(beat(0, [first]), beat(1, [replace(first, at=1, power=300.0, utilization=1.0)]))
    assert (view.gpus[0].energy_source, view.gpus[0].energy) == ("power_integral", 200.0)
    assert [(use.joules, use.active) for use in used] == [(200.0, 100.0)]


def test_a_gap_in_power_is_not_filled():
    """What was drawn while nobody looked for more than three beats is not guessed."""
    rows = [gpu(at, power=200.0, unsupported={"energy": "not_supported"}) for at in (0, 1, 10, 11)]
    view, used = play(*(beat(row.at, [row]) for row in rows))
    assert [use.joules for use in used] == [200.0, None, 200.0]
    assert view.gpus[0].energy == 400.0


def test_a_counter_that_is_not_told_once_goes_on():
    """A transient error leaves the interval open; it is not filled from power."""
    rows = [gpu(0, energy=0.0, power=100.0), gpu(1, power=100.0), gpu(2, energy=500.0, power=100.0)]
    _, used = play(*(beat(row.at, [row]) for row in rows))
    assert [use.joules for use in used] == [500.0]


def test_idle_power_is_the_least_seen_at_rest_or_as_configured():
    """By utilization, or where nothing is on the GPU. A configured one wins over what was seen."""
    steps = ((400.0, {"utilization": 0.0}), (78.0, {"utilization": 0.0}), (70.0, {"utilization": 1.0}), (71.0, EMPTY))
    rows = [gpu(at, power=power, **fields) for at, (power, fields) in enumerate(steps)]
    seen = [play(*(beat(row.at, [row]) for row in rows[:n]))[0].gpus[0].idle_power for n in range(1, 5)]
    assert seen == [400.0, 78.0, 78.0, 71.0]
    price = GpuPrice(idle_power=90.0)
    assert play(*(beat(row.at, [row], price=price) for row in rows))[0].gpus[0].idle_power == 90.0


def test_a_gpu_that_never_rests_has_no_idle_power():
    """An exporter that starts while the GPU works does not take 588 W for idleness, nor 2 W for the work."""
    steps = ((588.0, 1.0), (591.0, 1.0), (589.0, 0.4), (590.0, None))
    rows = [gpu(at, energy=590.0 * at, power=power, utilization=u) for at, (power, u) in enumerate(steps)]
    view, used = play(*(beat(row.at, [row]) for row in rows))
    assert view.gpus[0].idle_power is None
    assert [(use.joules, use.active) for use in used] == [(590.0, None)] * 3


@given(st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 1e9)), min_size=1, max_size=20))
def test_energy_adds_up_and_never_falls(steps):
    """Whatever the counter does, what was used is never negative, and adds up to its growth but for the resets."""
    at, beats, expected, last = 0.0, [], 0.0, None
    for seconds, energy in steps:
        at += seconds
        beats.append(beat(at, [gpu(at, energy=energy)]))
        expected += max(energy - last, 0.0) if last is not None and energy >= last else 0.0
        last = energy
    _, used = play(*beats)
    assert all(use.joules is None or use.joules >= 0 for use in used)
    assert sum(use.joules or 0.0 for use in used) == pytest.approx(expected)


# --- what is no truth ----------------------------------------------------------------------------------------------

LATCHED = [
    (EMPTY | {"utilization": 1.0, "power": 100.0}, True),
    (EMPTY | {"utilization": 0.98, "power": 100.0}, False),
    (EMPTY | {"utilization": 1.0, "power": 600.0}, False),
    (EMPTY | {"utilization": 1.0, "power": 100.0, "processes": (GpuProcess(1),)}, False),
    (EMPTY | {"utilization": 1.0, "power": 100.0, "memory_used": 70 * 2**30}, False),
    (EMPTY | {"utilization": 1.0, "power": 100.0, "processes": None}, None),
    (EMPTY | {"utilization": None, "power": 100.0}, None),
    (EMPTY | {"utilization": 1.0, "power": 100.0, "memory_total": None}, None),
]


@pytest.mark.parametrize(("fields", "latched"), LATCHED)
def test_utilization_that_is_latched(fields, latched):
    """lium-io 1140: 100 %, no process, 0 MiB, about 100 W after a kill in mid-kernel. Each condition is needed: busy
    processes that a container does not see hold memory and draw power."""
    calm = gpu(0, power=95.0, utilization=0.0)
    view, _ = play(beat(0, [calm]), beat(1, [gpu(1, **fields)]))
    assert view.gpus[0].latched is latched


def test_a_flood_of_reports_is_one_incident():
    """gpud 117: six reports of XID 45 in one second from one process are one incident; the next one in a minute is
    another, and so is another process's."""
    burst = [Xid(1 + n / 10, 45, pid=1496200, uuid=A) for n in range(6)]
    view, _ = play(
        beat(1, [gpu(1)]), beat(2, [gpu(2)], xids=tuple(burst)), beat(62, [gpu(62)], xids=(Xid(61, 45, A, pid=7),))
    )
    assert view.gpus[0].xids[45].incidents == 2
    assert view.gpus[0].xids[45].last == WALL + 61
    near = tuple(Xid(1, 45, A, pid=pid) for pid in (1, 2))
    assert play(beat(2, [gpu(2)], xids=near))[0].gpus[0].xids[45].incidents == 2


def test_both_sources_of_one_report_are_one_incident():
    """The driver's event names no process, the kernel's log no UUID but the PCI address, with fewer digits."""
    row = gpu(2, pci="00000000:3B:00.0")
    reports = (Xid(1.0, 79, uuid=A), Xid(1.2, 79, pci="0000:3b:00", pid=12))
    view, _ = play(beat(2, [row], xids=reports))
    assert {code: xid.incidents for code, xid in view.gpus[0].xids.items()} == {79: 1}


def test_a_first_report_is_there_at_once():
    """79 pages on its first event: the series appear with it, with the time it happened."""
    view, _ = play(beat(5, [gpu(5)], xids=(Xid(4.5, 79, A),)))
    assert (view.gpus[0].xids[79].incidents, view.gpus[0].xids[79].last) == (1, WALL + 4.5)


def test_a_report_of_a_gpu_that_nobody_knows_is_dropped():
    """No series without a GPU."""
    assert (
        play(beat(5, [gpu(5)], xids=(Xid(4.5, 79, "GPU-else"), Xid(4.5, 79, pci="0000:99:00"))))[0].gpus[0].xids == {}
    )
