"""The verdict on engines of every family, each over time on its own pages: what it shows, and what it cannot show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tokengap.join.verdict import Judgement, VerdictState, judge
from tokengap.readings import EnginePage, Reading
from tokengap.sources.engine import parse_page
from tokengap.sources.engine_families import FAMILIES
from tokengap.topology import Limits

RECORDED = Path(__file__).parent.parent / "recorded"
LIMITS = Limits()

#: By family: the pages of a fresh engine, of one at work, and of the same 10 s later; seconds after which it is stuck
#: where nothing moves any more; and what the second says of the first.
STORIES = {
    "vllm": ("vllm-0.32.0/fresh", "vllm-0.32.0/busy-0", "vllm-0.32.0/busy-1", 20, "generation +"),
    "sglang": ("sglang-pages/rest", "sglang-pages/busy-0", "sglang-pages/busy-1", 20, "generation +600 in 10.0 s"),
    "llamacpp": ("llamacpp-pages/rest", "llamacpp-pages/busy-0", "llamacpp-pages/busy-1", 120, "work +120 in 10.0 s"),
    "tgi": ("tgi-pages/rest", "tgi-pages/busy-0", "tgi-pages/busy-1", 20, "work +480 in 10.0 s"),
    "trtllm": ("trtllm-pages/rest", "trtllm-pages/busy-0", "trtllm-pages/busy-1", 20, "work +12 in 10.0 s"),
    # It counts neither tokens nor prompts, so that each silence may be a prefill.
    "triton": ("triton-pages/rest", "triton-pages/busy-0", "triton-pages/busy-1", 120, "work +250 in 10.0 s"),
    "lmdeploy": ("lmdeploy-pages/rest", "lmdeploy-pages/busy-0", "lmdeploy-pages/busy-1", 20, "generation +400"),
    "vllm V0": (
        *("vllm-written/vllm-0.6.6-v0-idle-60s", "vllm-written/vllm-0.6.6-v0-busy-0"),
        *("vllm-written/vllm-0.6.6-v0-busy-1", 20, "generation +40 in 10.0 s"),
    ),
    "vllm in Rust": (
        *("vllm-written/vllm-0.33.0-rust-front-end-rest", "vllm-written/vllm-0.33.0-rust-front-end-busy-0"),
        *("vllm-written/vllm-0.33.0-rust-front-end-busy-1", 20, "generation +100 in 10.0 s"),
    ),
}
each = pytest.mark.parametrize(("fresh", "busy", "later", "patience", "says"), STORIES.values(), ids=STORIES.keys())


def recorded(name: str) -> EnginePage:
    return parse_page((RECORDED / f"{name}.prom").read_bytes())


class Watch:
    """One engine: its pages or failures in turn, and the last judgement."""

    def __init__(self) -> None:
        self.state = VerdictState()

    def see(
        self, at: float, page: EnginePage | Reading[EnginePage], streams: int | None = 4, flowing: bool = False
    ) -> Judgement:
        reading = page if isinstance(page, Reading) else Reading(at=at, value=page)
        self.state, judgement = judge(
            self.state, at=at, reading=reading, open_streams=streams, open_flowing=flowing, limits=LIMITS
        )
        return judgement


def test_there_is_a_story_of_each_family():
    """A row without one would be a verdict that nobody has seen."""
    assert {family.name for family in FAMILIES} <= set(STORIES)


@each
def test_work_is_seen(fresh, busy, later, patience, says):
    """At rest idle, at work busy, with the words for what moved."""
    watch, process = Watch(), recorded(busy)
    rest = replace(recorded(fresh), start_time=process.start_time, created=process.created)
    assert watch.see(0, rest, streams=0).state == "idle"
    assert watch.see(10, recorded(busy)).state == "busy"
    judgement = watch.see(20, recorded(later))
    assert judgement.state == "busy"
    assert says in judgement.evidence
    assert judgement.restarts == 0


@each
def test_a_hang_is_seen_and_not_early(fresh, busy, later, patience, says):
    """Nothing moves any more while sockets are open: busy until its patience is spent, stuck from there."""
    watch = Watch()
    watch.see(0, recorded(fresh), streams=0)
    watch.see(10, recorded(busy))
    page = recorded(later)
    for at in range(20, 20 + patience):
        assert watch.see(at, page).state == "busy"
    assert watch.see(20 + patience, page).state == "stuck"


@each
def test_slow_work_is_no_hang(fresh, busy, later, patience, says):
    """One page each 15 s on which its live field has moved by the least there is: busy for five minutes."""
    live = {"vllm": "generation_tokens", "tgi": "work", "llamacpp": "work", "triton": "work", "trtllm": "work"}
    watch, page = Watch(), recorded(later)
    field = live.get(page.family, "generation_tokens")
    for at in range(300):
        page = replace(page, **{field: getattr(page, field) + (at % 15 == 0)})
        assert watch.see(at, page).state == "busy"


@each
def test_a_restart_is_seen(fresh, busy, later, patience, says):
    """Refused, then back at 0: dead, restarted, and counted once; also where no page says which process made it."""
    watch, first = Watch(), recorded(later)
    watch.see(0, first)
    assert watch.see(1, Reading(1, error="connection refused", refused=True)).state == "dead"
    again = recorded(fresh)
    if again.start_time is not None:
        again = replace(again, start_time=again.start_time + 3600)
    judgement = watch.see(2, again, streams=0)
    assert (judgement.state, judgement.restarts) == ("restarted", 1)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_stale_gauges_are_no_work(family):
    """Whoever freezes its gauges: nothing moves and no socket is open, so it is idle from one window on."""
    watch = Watch()
    page = recorded(STORIES[family][2])
    for at in range(10):
        assert watch.see(at, page, streams=0).state == "busy"
    assert watch.see(10, page, streams=0).state == "idle"


def test_sglang_in_a_chunked_prefill():
    """No token, no step, KV usage as it was: the live count of computed prompt tokens tells. Busy."""
    watch = Watch()
    before, after = recorded("sglang-pages/prefill-0"), recorded("sglang-pages/prefill-1")
    assert (before.generation_tokens, before.kv_usage) == (after.generation_tokens, after.kv_usage)
    for n in range(20):
        page = replace(after, work=before.work + 8193 * n)
        judgement = watch.see(15 * n, page, streams=1)
        assert judgement.state == "busy"
    assert judgement.evidence == "running 1, work +8193 in 15.0 s"


def test_sglang_hangs_in_decode():
    """Its first tokens were counted, so the next silence is no prefill: stuck after two windows, not the budget."""
    watch, page = Watch(), recorded("sglang-pages/rest")
    watch.see(0, page, streams=0)
    watch.see(1, replace(page, running=1.0), streams=1)
    page = replace(page, running=1.0, first_tokens=1.0, work=900.0, generation_tokens=60.0)
    for at in range(2, 22):
        assert watch.see(at, page, streams=1).state == "busy"
    assert watch.see(22, page, streams=1).state == "stuck"


class TestLlamaCpp:
    """Its page is made between two steps: it comes when the step ends, or never."""

    busy, later = recorded("llamacpp-pages/busy-0"), recorded("llamacpp-pages/busy-1")

    @staticmethod
    def late(at: float) -> Reading[EnginePage]:
        return Reading(at, error="still no answer to an earlier read", late=True)

    @pytest.mark.parametrize("streams", [4, 0, None])
    def test_a_long_step_is_work(self, streams):
        """No page for a minute and a half, no byte: busy, and said when that ends; then it comes, and it is busy."""
        watch = Watch()
        watch.see(0, self.busy, streams)
        for at in range(1, 90):
            judgement = watch.see(at, self.late(at), streams)
            assert judgement.state == "busy"
        assert judgement.evidence.startswith("no page for 88.0 s, it waits for the step in progress (stuck from 120 s)")
        assert watch.see(90, self.later, streams).state == "busy"
        assert watch.see(91, self.late(91), streams).evidence.startswith("no page for 0.0 s")

    def test_bytes_that_flow_are_enough(self):
        """For as long as streams carry bytes it is busy, however late its page."""
        watch = Watch()
        watch.see(0, self.busy)
        for at in range(1, 600):
            assert watch.see(at, self.late(at), flowing=True).state == "busy"
        assert watch.see(600, self.late(600)).state == "busy"

    def test_a_hang_is_the_silence_of_page_and_streams(self):
        """Neither a page nor a byte for the prefill budget: stuck."""
        watch = Watch()
        watch.see(0, self.busy)
        for at in range(1, 121):
            assert watch.see(at, self.late(at)).state == "busy"
        judgement = watch.see(121, self.late(121))
        assert (judgement.state, judgement.progress_age) == ("stuck", 121)

    def test_a_suspended_host_is_no_silence(self):
        """An hour between two beats counts one window."""
        watch = Watch()
        watch.see(0, self.busy)
        watch.see(1, self.late(1))
        assert watch.see(3601, self.late(3601)).state == "busy"

    def test_without_work_it_is_not_explained_by_work(self):
        """Idle when last read, no stream open: nobody knows why it does not answer. Blind."""
        watch = Watch()
        watch.see(0, recorded("llamacpp-pages/rest"), streams=0)
        assert watch.see(1, self.late(1), streams=0).state == "blind"
        assert watch.see(2, self.late(2), streams=1).state == "busy"

    @pytest.mark.parametrize("error", ["HTTP 503", "the page is empty"])
    def test_an_error_is_no_silence(self, error):
        """It answered, and not with a page: blind, as everywhere."""
        watch = Watch()
        watch.see(0, self.busy)
        assert watch.see(1, Reading(1, error=error)).state == "blind"

    @pytest.mark.parametrize("family", [family.name for family in FAMILIES if not family.between_steps])
    def test_others_have_no_such_excuse(self, family):
        """An engine whose page does not depend on its steps and does not come is blind."""
        watch = Watch()
        watch.see(0, recorded(STORIES[family][2]))
        assert watch.see(1, self.late(1)).state == "blind"

    def test_counters_of_a_million_seem_to_stand_still(self):
        """Printed with six digits, 1,964,083 and 1,964,084 are one; but a page that comes is a step. Busy."""
        watch, page = Watch(), recorded("llamacpp-pages/large-counters")
        for at in range(300):
            shown = replace(page, work=float(f"{1_964_083 + at // 10:g}"))
            assert watch.see(at, shown).state == "busy"


class TestTensorRtWithoutIterationStatistics:
    """Nothing on its page moves before a request ends: no silence of it is evidence of a hang."""

    page = recorded("trtllm-pages/no-iteration-statistics")

    def test_it_is_never_stuck(self):
        """A stream of ten minutes: busy while bytes flow, blind while they do not, busy again when one has ended."""
        watch = Watch()
        watch.see(0, self.page, streams=0)
        for at in range(1, 600):
            assert watch.see(at, self.page, streams=1, flowing=True).state == "busy"
        for at in range(600, 700):
            judgement = watch.see(at, self.page, streams=1)
            assert judgement.state == "blind"
        assert "moves only when a request ends" in judgement.evidence
        ended = replace(self.page, finished=11.0, generation_tokens=2500.0)
        assert watch.see(700, ended, streams=1).state == "busy"

    @pytest.mark.parametrize(("streams", "state"), [(0, "idle"), (None, "blind")])
    def test_at_rest_the_sockets_tell(self, streams, state):
        """It does not say what it runs: idle where no socket is open, blind where the sockets are not known."""
        assert Watch().see(0, self.page, streams=streams).state == state
