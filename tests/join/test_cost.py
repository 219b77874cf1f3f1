"""What orphans cost: the formulas on their example, on shared and lost GPUs, and as properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.gpu_readings import Gpu
from tokengap.join.cost import CostState, Load, account
from tokengap.join.gpus import Used
from tokengap.view import Cost, GpusView, GpuView


def gpu(uuid: str = "GPU-0", *engines: str, up: bool | None = True, **fields) -> GpuView:
    row = Gpu(uuid, 0, 0.0, **fields)
    return GpuView(row, up, engines, "processes" if engines else None, 0, 71.0, False, None, "counter", 0, {})


def these(*gpus: GpuView) -> GpusView:
    return GpusView("ok", "", "nvml", "", 1, 0.0, gpus)


def load(running: float = 10, orphans: float = 2, tokens: float = 100, state="busy") -> Load:
    return Load(running, orphans, tokens, state)


def one_beat(gpus: GpusView, loads, used=(), dt=1.0, state: CostState | None = None) -> CostState:
    return account(state or CostState(), gpus, used, loads, dt=dt, interval=1.0)


def test_the_example_of_the_documentation():
    """8 GPUs, 15 s, 42 kJ, 10 running of which 2 orphans, 71 W idle: 24 GPU-seconds, 8,400 J, 6,696 J."""
    uuids = [f"GPU-{n}" for n in range(8)]
    gpus = these(*(gpu(uuid, "worker") for uuid in uuids))
    state = CostState()
    for second in range(15):
        used = [Used(uuid, 42_000 / 8, 42_000 / 8 - 71 * 15) for uuid in uuids] if second == 14 else []
        state = one_beat(gpus, {"worker": load()}, used, state=state)
    cost = state.accounts["worker"]
    assert (cost.gpu_seconds, cost.orphan_gpu_seconds) == (pytest.approx(120), pytest.approx(24))
    assert cost.joules == {"full": pytest.approx(42_000), "active": pytest.approx(33_480)}
    assert cost.orphan_joules == {"full": pytest.approx(8400), "active": pytest.approx(6696), "sole": 0.0}
    assert cost.gpus_up == 8


@pytest.mark.parametrize(
    ("running", "orphans", "share", "sole"),
    [(10, 2, 0.2, False), (0, 0, 0.0, False), (1, 1, 1.0, True), (2, 3, 1.0, True), (0, 2, 1.0, False)],
)
def test_the_orphans_share(running, orphans, share, sole):
    """O / max(R, O, 1), and alone where they are all that runs."""
    assert (load(running, orphans).share, load(running, orphans).only_orphans) == (share, sole)


def test_energy_that_only_orphans_kept_awake_is_sole():
    """Two beats, in one of which nothing but an orphan ran: half of the interval's energy is sole."""
    gpus = these(gpu("GPU-0", "worker"))
    state = one_beat(gpus, {"worker": load(running=4, orphans=1)})
    state = one_beat(gpus, {"worker": load(running=1, orphans=1)}, [Used("GPU-0", 1000.0, None)], state=state)
    cost = state.accounts["worker"]
    assert cost.orphan_joules == {"full": pytest.approx(625), "sole": pytest.approx(500)}
    assert cost.joules == {"full": pytest.approx(1000)}  # idle power not known: no active


def test_energy_read_rarely_is_dealt_out_by_the_beats_between():
    """A dcgm-exporter's counter moves every 30 s: what the beats saw decides, not the last of them."""
    gpus, state = these(gpu("GPU-0", "worker")), CostState()
    for second in range(30):
        used = [Used("GPU-0", 3000.0, None)] if second == 29 else []
        state = one_beat(gpus, {"worker": load(1, 1 if second < 10 else 0)}, used, state=state)
    assert state.accounts["worker"].orphan_joules["full"] == pytest.approx(1000)


def test_a_shared_gpu_is_divided_by_tokens():
    """Two engines on one GPU: by what they generated; evenly when neither did."""
    gpus = these(gpu("GPU-0", "a", "b"))
    state = one_beat(gpus, {"a": load(1, 0, tokens=30), "b": load(1, 1, tokens=10)}, [Used("GPU-0", 400.0, None)])
    assert state.accounts["a"].gpu_seconds == pytest.approx(0.75)
    assert state.accounts["b"].orphan_gpu_seconds == pytest.approx(0.25)
    assert state.accounts["b"].orphan_joules["full"] == pytest.approx(100)
    idle = one_beat(gpus, {"a": load(0, 0, tokens=0), "b": load(0, 0, tokens=0)})
    assert [idle.accounts[name].gpu_seconds for name in "ab"] == [0.5, 0.5]


REASONS = [
    (gpu("GPU-0", "worker", up=False), load(), 1.0, "gpu"),
    (gpu("GPU-0", "worker", up=None), load(), 1.0, "gpu"),
    (gpu("GPU-0", "worker"), None, 1.0, "engine"),
    (gpu("GPU-0", "worker"), load(), 60.0, "late"),
    (gpu("MIG-1", "worker", parent="GPU-0"), load(), 1.0, "mig"),
]


@pytest.mark.parametrize(("one", "told", "dt", "reason"), REASONS, ids=[reason for *_, reason in REASONS])
def test_what_is_not_known_is_not_accounted_and_said(one, told, dt, reason):
    """A GPU that is lost or unread, an engine that could not be read, a beat of a minute, a part of a GPU whose energy
    cannot be told apart: no share is guessed, and no zero is claimed."""
    state = one_beat(these(one), {"worker": told}, dt=dt)
    cost = state.accounts["worker"]
    assert (cost.gpu_seconds, cost.orphan_gpu_seconds, cost.unaccounted) == (None, None, {reason: dt})


def test_energy_of_time_that_is_not_known_is_nobodys():
    """Of 4 s two could not be read: half of the energy is accounted."""
    gpus = these(gpu("GPU-0", "worker"))
    state = one_beat(gpus, {"worker": load(2, 1)}, dt=2.0)
    state = one_beat(gpus, {"worker": None}, [Used("GPU-0", 400.0, None)], dt=2.0, state=state)
    assert state.accounts["worker"].joules["full"] == pytest.approx(200)
    assert state.accounts["worker"].orphan_joules["full"] == pytest.approx(100)


def test_an_interval_whose_energy_is_not_known_leaves_nothing_behind():
    """After a reset of the counter the next interval is dealt out by its own beats only."""
    gpus = these(gpu("GPU-0", "worker"))
    state = one_beat(gpus, {"worker": load(1, 1)}, [Used("GPU-0", None, None)])
    state = one_beat(gpus, {"worker": load(1, 0)}, [Used("GPU-0", 100.0, None)], state=state)
    assert state.accounts["worker"].joules == {"full": pytest.approx(100)}
    assert state.accounts["worker"].orphan_joules["full"] == 0.0


def test_an_engine_without_a_known_gpu_has_no_account():
    """Unknown is not free."""
    assert one_beat(these(gpu("GPU-0")), {"worker": load()}).accounts == {}


BUSY = [
    (gpu("GPU-0", "worker", utilization=0.9), load(0, 0, 0, "idle"), True),
    (gpu("GPU-0", "worker", utilization=0.9), load(3, 0, 0, "stuck"), True),
    (gpu("GPU-0", "worker", utilization=0.9), load(3, 0, 0, "busy"), False),
    (gpu("GPU-0", "worker", utilization=0.9), load(3, 0, 5, "idle"), False),
    (gpu("GPU-0", "worker", utilization=0.3), load(0, 0, 0, "idle"), False),
    (gpu("GPU-0", "worker", utilization=None), load(0, 0, 0, "idle"), False),
    (replace(gpu("GPU-0", "worker", utilization=1.0), latched=True), load(0, 0, 0, "idle"), False),
]


@pytest.mark.parametrize(("one", "told", "counts"), BUSY)
def test_a_gpu_that_works_for_no_token(one, told, counts):
    """Utilization is high while the engine is idle or stuck; a latched one does no work, and a prefill is busy."""
    assert one_beat(these(one), {"worker": told}).accounts["worker"].busy_without_tokens == float(counts)


beats = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),  # dt
        st.one_of(st.none(), st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 50))),
        st.one_of(st.none(), st.floats(0, 1e5)),  # joules of a reading
        st.sampled_from([True, False, None]),
    ),
    max_size=30,
)


@given(beats)
def test_parts_never_exceed_the_whole(history):
    """Totals never fall; orphans take at most all; what is accounted and what is not add up to wall time."""
    state, wall, joules, before = CostState(), 0.0, 0.0, Cost()
    for dt, told, energy, up in history:
        used = [Used("GPU-0", energy, None)] if up and energy is not None else []
        loads = {"worker": load(*map(float, told)) if told else None}
        state = one_beat(these(gpu("GPU-0", "worker", up=up)), loads, used, dt, state)
        wall, joules = wall + dt, joules + sum(use.joules or 0.0 for use in used)
        cost = state.accounts["worker"]
        assert (cost.orphan_gpu_seconds or 0.0) <= (cost.gpu_seconds or 0.0) + 1e-9
        assert (cost.gpu_seconds or 0.0) + sum(cost.unaccounted.values()) == pytest.approx(wall)
        assert (cost.gpu_seconds or 0.0) >= (before.gpu_seconds or 0.0)
        full = cost.joules.get("full", 0.0)
        assert cost.orphan_joules.get("sole", 0.0) <= cost.orphan_joules.get("full", 0.0) + 1e-6 <= full + 1e-3
        assert full <= joules + 1e-3
        before = cost


@pytest.mark.parametrize(
    ("neighbour", "counts"),
    [(load(1, 0, 5, "busy"), False), (load(1, 0, 0, "busy"), False), (load(0, 0, 0, "idle"), True), (None, False)],
)
def test_a_shared_gpu_that_works_for_the_other_engine(neighbour, counts):
    """What one engine of a GPU computes is no work for nothing of the other, which is idle."""
    shared = these(gpu("GPU-0", "worker", "other", utilization=0.9))
    accounts = one_beat(shared, {"worker": load(0, 0, 0, "idle"), "other": neighbour}).accounts
    assert accounts["worker"].busy_without_tokens == float(counts)
