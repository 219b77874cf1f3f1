"""The verdict, on the cases of public reports, on recorded pages, and on pages nobody has seen."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.errors import SourceUnusable
from tokengap.join.verdict import TABLE, Judgement, VerdictState, judge, table
from tokengap.readings import EnginePage, Reading
from tokengap.sources.engine import parse_page
from tokengap.topology import Limits
from tokengap.view import ENGINE_STATES

RECORDED = Path(__file__).parent.parent / "recorded"
DOCS = Path(__file__).parent.parent.parent / "docs" / "verdict.md"

#: A page at rest of an engine that has served something.
REST = EnginePage(
    running=0.0,
    waiting=0.0,
    generation_tokens=10_000.0,
    prompt_tokens=40_000.0,
    steps=5_000.0,
    step_tokens=50_000.0,
    preemptions=0.0,
    finished=100.0,
    finished_tokens=9_000.0,
    kv_usage=0.0,
    asleep=False,
    start_time=1_700_000_000.0,
    created=1_700_000_005.0,
    models=("m",),
    ranks=1,
)
RUNNING = replace(REST, running=4.0, kv_usage=0.4)


class Watch:
    """One engine, watched: keeps the state between readings, and the last judgement."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.state = VerdictState()

    def see(
        self, at: float, page: EnginePage | Reading[EnginePage], streams: int | None = None, flowing: bool = False
    ) -> Judgement:
        reading = page if isinstance(page, Reading) else Reading(at=at, value=page)
        self.state, judgement = judge(
            self.state, at=at, reading=reading, open_streams=streams, open_flowing=flowing, limits=self.limits
        )
        return judgement

    def see_still(self, since: float, until: float, page: EnginePage, streams: int | None = None) -> Judgement:
        """See the same page every second, from ``since`` to ``until``, both included."""
        judgement = self.see(since, page, streams)
        for n in range(1, int(until - since) + 1):
            judgement = self.see(since + n, page, streams)
        return judgement if until - since == int(until - since) else self.see(until, page, streams)


def work(page: EnginePage, tokens: float) -> EnginePage:
    """Return the page after the engine made ``tokens`` more, in as many steps."""
    return replace(
        page,
        generation_tokens=(page.generation_tokens or 0) + tokens,
        steps=(page.steps or 0) + tokens,
        step_tokens=(page.step_tokens or 0) + tokens,
    )


def refused(at: float) -> Reading[EnginePage]:
    return Reading(at=at, error="connection refused", refused=True)


def failed(at: float, error: str = "no page within 2 s") -> Reading[EnginePage]:
    return Reading(at=at, error=error)


def recorded(name: str) -> EnginePage:
    return parse_page((RECORDED / name).read_bytes())


class TestReportedCases:
    def test_1_streams_closed_by_their_clients(self):
        """Five clients leave, nothing finishes, the engine is empty: idle (vLLM issue 55634)."""
        watch = Watch()
        before = replace(RUNNING, running=5.0)
        after = replace(before, running=0.0, prompt_tokens=before.prompt_tokens + 3010, kv_usage=0.0)
        assert watch.see(0, before, streams=5).state == "busy"
        assert watch.see(10, after, streams=0).state == "idle"

    class Test2StaleGaugesAfterAMassAbort:
        """Running 106, waiting 15, all flat, and no socket is open (issues 22545, 29928)."""

        page = replace(REST, running=106.0, waiting=15.0, kv_usage=0.904)

        def test_three_scrapes(self):
            """Idle, and the evidence says why."""
            watch = Watch()
            watch.see(0, self.page, streams=0)
            for at in (10, 20):
                judgement = watch.see(at, self.page, streams=0)
                assert judgement.state == "idle"
                assert judgement.evidence == (
                    f"stale gauges: running 106, waiting 15, nothing moved for {at}.0 s, 0 open sockets"
                )
                assert judgement.progress_age is None

        def test_not_before_one_window(self):
            """Gauges may be a moment behind: busy until one window has passed."""
            watch = Watch()
            assert watch.see_still(0, 9.9, self.page, streams=0).state == "busy"
            assert watch.see(10, self.page, streams=0).state == "idle"

        @pytest.mark.parametrize("streams", [1, None])
        def test_not_where_a_socket_is_open_or_might_be(self, streams):
            """One open socket, or sockets that do not cover the engine: nobody may call this idle."""
            watch = Watch()
            assert watch.see_still(0, 19, self.page, streams).state == "busy"
            assert watch.see_still(20, 60, self.page, streams).state == "stuck"

        def test_an_orphan_that_runs_is_not_stale(self):
            """No socket, but tokens are made: busy."""
            watch, page = Watch(), self.page
            for at in range(40):
                page = work(page, 5)
                assert watch.see(at, page, streams=0).state == "busy"

    class Test3FrozenInACudaWait:
        """Running 4, open sockets, everything flat (issue 42897)."""

        def test_two_windows(self):
            """Busy up to two windows since the last progress, stuck from there on, with numbers."""
            watch = Watch()
            watch.see(0, RUNNING, streams=4)
            frozen = work(RUNNING, 50)
            assert watch.see_still(3.4, 23.3, frozen, streams=4).state == "busy"
            judgement = watch.see(23.4, frozen, streams=4)
            assert judgement.state == "stuck"
            assert judgement.evidence == "running 4, nothing moved for 20.0 s, 4 open sockets"
            assert judgement.progress_age == pytest.approx(20.0)
            assert watch.see_still(24, 120, frozen, streams=4).state == "stuck"

        def test_seen_frozen_from_the_first(self):
            """The exporter came later than the hang: two windows of its own."""
            watch = Watch()
            assert watch.see_still(100, 119, RUNNING, streams=4).state == "busy"
            assert watch.see(120, RUNNING, streams=4).state == "stuck"

        def test_bytes_are_not_progress(self):
            """SSE keep-alive comments go on over a hung core: stuck, and said."""
            watch = Watch()
            watch.see_still(0, 19, RUNNING, streams=4)
            judgement = watch.see(20, RUNNING, streams=4, flowing=True)
            assert judgement.state == "stuck"
            assert "bytes still flow" in judgement.evidence

        @pytest.mark.parametrize(
            "change",
            [
                {"generation_tokens": 10_001.0},
                {"prompt_tokens": 40_001.0},
                {"steps": 5_001.0, "step_tokens": 50_001.0},
                {"preemptions": 1.0},
                {"finished": 101.0, "running": 3.0},
                {"kv_usage": 0.3999},
                {"kv_usage": 0.4001},
            ],
        )
        def test_any_progress_starts_the_windows_again(self, change):
            """Each kind of progress, once, just before the end: busy for two windows more."""
            watch = Watch()
            watch.see_still(0, 19, RUNNING, streams=4)
            moved = replace(RUNNING, **change)
            assert watch.see_still(19.5, 39.4, moved, streams=4).state == "busy"
            assert watch.see(39.5, moved, streams=4).state == "stuck"

        @pytest.mark.parametrize(
            "change", [{"steps": 5_001.0}, {"running": 3.0}, {"waiting": 7.0}, {"skipped": {"nan": 1}}]
        )
        def test_what_is_no_progress(self, change):
            """Steps alone, and requests that come or go, do not start them again."""
            watch = Watch()
            watch.see_still(0, 19, RUNNING, streams=4)
            assert watch.see(20, replace(RUNNING, **change), streams=4).state == "stuck"

    class Test4WaitingNeverScheduled:
        """Waiting 3, running 0, KV 0, everything flat (issue 39863)."""

        page = replace(REST, waiting=3.0)

        def test_two_windows(self):
            """Stuck after two windows from when they came, not before; no prefill to wait for."""
            watch = Watch()
            watch.see_still(0, 100, REST, streams=0)
            assert watch.see_still(101, 120, self.page, streams=3).state == "busy"
            judgement = watch.see(121, self.page, streams=3)
            assert judgement.state == "stuck"
            assert judgement.evidence == "running 0, waiting 3, nothing moved for 20.0 s, 3 open sockets"

    class Test4WaitingForAnotherNode:
        """Disaggregated serving: all that wait do so for KV blocks whose prompt another node is computing."""

        page = replace(REST, waiting=3.0, deferred=3.0)

        def test_it_may_take_the_prefill_budget(self):
            """Busy while a prompt may be in the making there, stuck when the budget is spent."""
            watch = Watch()
            watch.see(0, REST, streams=0)
            assert watch.see_still(1, 120.9, self.page, streams=3).state == "busy"
            assert watch.see(121, self.page, streams=3).state == "stuck"

        def test_one_that_waits_for_this_engine_is_enough(self):
            """Two of three wait for another node and one for nothing: two windows."""
            watch, page = Watch(), replace(self.page, deferred=2.0)
            watch.see(0, REST, streams=0)
            assert watch.see_still(1, 20.9, page, streams=3).state == "busy"
            assert watch.see(21, page, streams=3).state == "stuck"

    class Test5ADeadBackend:
        """Stuck for 85 minutes, then refused, then up with a new start time (Fastllm-proxy 19)."""

        def test_stuck_dead_restarted(self):
            """The verdict follows it, and one restart is counted."""
            watch, page = Watch(), replace(RUNNING, running=2.0)
            assert watch.see_still(0, 5040, page, streams=2).state == "stuck"
            assert watch.see(5041, refused(5041), streams=0).state == "dead"
            judgement = watch.see(5053, refused(5053), streams=0)
            assert (judgement.state, judgement.evidence) == ("dead", "connection refused for 12.0 s")
            new = EnginePage(running=1.0, waiting=0.0, generation_tokens=0.0, start_time=page.start_time + 5100)
            judgement = watch.see(5100, new, streams=1)
            assert (judgement.state, judgement.restarts) == ("restarted", 1)
            assert judgement.evidence == "a new process, 0.0 s ago; running 1"
            judgement = watch.see(5101, work(new, 30), streams=1)
            assert (judgement.state, judgement.restarts) == ("busy", 1)
            assert judgement.evidence == "running 1, generation +30 in 1.0 s"

        def test_restarts_in_the_last_hour(self):
            """Each counts for an hour, also while nothing can be read; the total goes on."""
            watch = Watch()
            for life, at in enumerate((0, 600, 1200)):
                page = replace(REST, start_time=REST.start_time + at, generation_tokens=0.0)
                judgement = watch.see(at, page)
                assert (judgement.restarts, judgement.restarts_last_hour) == (life, life)
            assert watch.see(4199, failed(4199)).restarts_last_hour == 2
            assert watch.see(4200, failed(4200)).restarts_last_hour == 1
            judgement = watch.see(4801, page)
            assert (judgement.restarts, judgement.restarts_last_hour) == (2, 0)

        def test_a_storm_is_bounded(self):
            """A restart a second for an hour takes no more memory than a thousand of them."""
            watch = Watch()
            for at in range(1100):
                judgement = watch.see(at, replace(REST, start_time=REST.start_time + at))
            assert (judgement.restarts, judgement.restarts_last_hour) == (1099, 1000)

        def test_restarted_is_shown_for_one_window(self):
            """A new engine without traffic: restarted for a window, then idle."""
            watch, new = Watch(), replace(REST, start_time=1_800_000_000.0, generation_tokens=0.0)
            watch.see(0, REST)
            assert watch.see_still(1, 10.9, new).state == "restarted"
            assert watch.see(11, new).state == "idle"

        def test_refused_before_it_was_ever_reached(self):
            """Dead too; and its first page is no restart."""
            watch = Watch()
            assert watch.see(0, refused(0)).state == "dead"
            judgement = watch.see(1, REST)
            assert (judgement.state, judgement.restarts) == ("idle", 0)

        @pytest.mark.parametrize(
            ("identity", "restarts"),
            [({}, 0), ({"start_time": None}, 0), ({"start_time": None, "created": None}, 1)],
            ids=["start time", "created", "neither"],
        )
        def test_refused_and_up_again_with_the_same_counters(self, identity, restarts):
            """The start time, or else `_created`, says that it is the same; without either it is taken for another."""
            watch, page = Watch(), replace(REST, **identity)
            watch.see(0, page)
            watch.see(1, refused(1))
            assert watch.see(2, page).restarts == restarts

        @pytest.mark.parametrize(
            ("before", "after", "restarts"),
            [
                ({}, {"start_time": 1_800_000_000.0}, 1),
                ({}, {"generation_tokens": 5.0}, 0),
                ({}, {"generation_tokens": 5.0, "created": 1_700_009_999.0}, 0),
                ({"start_time": None}, {"start_time": None, "created": 1_700_009_999.0}, 1),
                *[
                    ({"start_time": None, "created": None}, {"start_time": None, "created": None, name: 1.0}, 1)
                    for name in ("generation_tokens", "prompt_tokens", "steps", "step_tokens", "finished_tokens")
                ],
            ],
        )
        def test_what_begins_anew(self, before, after, restarts):
            """A new start, or counters that fell, are never compared across. Fallen counters under the same start time
            are a reset (elastic scale-up), not a restart."""
            watch = Watch()
            watch.see(0, replace(REST, **before))
            judgement = watch.see(1, replace(REST, **after))
            assert (judgement.state, judgement.restarts) == ("restarted", restarts)
            assert judgement.evidence.startswith("a new process" if restarts else "the same process")

        def test_a_new_label_is_no_restart(self):
            """`_created` gets newer with each new label: nothing, under one start time and growing counters."""
            watch = Watch()
            watch.see(0, RUNNING)
            judgement = watch.see(1, replace(work(RUNNING, 3), created=RUNNING.created + 900))
            assert (judgement.state, judgement.restarts) == ("busy", 0)

        def test_a_restarted_engine_that_hangs_is_stuck_in_its_own_time(self):
            """Quiet time is not carried over from the process before."""
            watch = Watch()
            watch.see_still(0, 60, RUNNING, streams=4)
            new = replace(RUNNING, start_time=1_800_000_000.0)
            assert watch.see_still(61, 70, new, streams=4).state == "restarted"
            assert watch.see_still(71, 80, new, streams=4).state == "busy"
            assert watch.see(81, new, streams=4).state == "stuck"

    def test_6_slow_but_alive(self):
        """54 tokens in 10 s with 14 waiting: busy, at scrapes every 10 s too (llm-scaler 391)."""
        watch, page = Watch(), replace(RUNNING, running=1.0, waiting=14.0)
        for n in range(12):
            judgement = watch.see(10 * n, page, streams=15)
            assert judgement.state == "busy"
            page = work(page, 54)
        assert judgement.evidence == "running 1, waiting 14, generation +54 in 10.0 s"
        watch, page = Watch(), replace(RUNNING, running=1.0)
        for n in range(12):  # one token in 19 s is slow, not stuck
            assert watch.see_still(19 * n, 19 * n + 18, page, streams=1).state == "busy"
            page = work(page, 1)

    class Test7ChunkedPrefillOfALongPrompt:
        """Running 1, every counter flat for 49 chunks (issue 51261)."""

        def test_kv_usage_moves(self):
            """A V1 engine allocates chunk by chunk: busy for as long as it does."""
            watch, page = Watch(), replace(REST, running=1.0)
            watch.see(0, REST, streams=0)
            for n in range(1, 490):
                page = replace(page, kv_usage=n / 1000)
                assert watch.see(n, page, streams=1).state == "busy"

        @pytest.mark.parametrize("kv", [0.3, None])
        def test_nothing_moves_at_all(self, kv):
            """An engine that allocates the whole prompt at once, or shows no KV usage: busy while the budget lasts."""
            watch = Watch()
            watch.see(0, replace(REST, kv_usage=kv), streams=0)
            page = replace(REST, running=1.0, kv_usage=kv)
            judgement = watch.see_still(1, 50, page, streams=1)
            assert judgement.state == "busy"
            assert "a prompt may be in the making (stuck from 120 s)" in judgement.evidence
            assert watch.see_still(51, 120.9, page, streams=1).state == "busy"
            assert watch.see(121, page, streams=1).state == "stuck"

        def test_it_started_while_others_were_generating(self):
            """The others finish, the long one is left without a token: its budget runs from the last progress."""
            watch, page = Watch(), replace(RUNNING, running=1.0)
            watch.see(0, page, streams=1)
            page = replace(work(page, 20), running=2.0)
            watch.see(1, page, streams=2)
            page = replace(work(page, 20), running=1.0, finished=page.finished + 1)
            watch.see(2, page, streams=1)
            assert watch.see_still(3, 121, page, streams=1).state == "busy"
            assert watch.see(122, page, streams=1).state == "stuck"

        def test_its_first_token_ends_the_budget(self):
            """The prompt is counted with the first token; what hangs after that hangs in decode: two windows."""
            watch, page = Watch(), replace(REST, running=1.0)
            watch.see(0, REST, streams=0)
            watch.see_still(1, 60, page, streams=1)
            page = replace(work(page, 1), prompt_tokens=page.prompt_tokens + 100_000)
            assert watch.see_still(61, 80, page, streams=1).state == "busy"
            assert watch.see(81, page, streams=1).state == "stuck"

        def test_the_first_prefill_of_an_engine_seen_midway(self):
            """No token since it began, one running: a prefill may be going on although its start was not seen."""
            watch = Watch()
            page = EnginePage(running=1.0, waiting=0.0, generation_tokens=0.0, prompt_tokens=0.0, steps=0.0)
            assert watch.see_still(0, 119, page, streams=1).state == "busy"
            assert watch.see(120, page, streams=1).state == "stuck"

        def test_gauges_that_do_not_know_yet(self):
            """Sockets show requests that the engine's gauges do not (issue 49538, 18 s): busy for the budget."""
            watch = Watch()
            watch.see(0, REST, streams=0)
            judgement = watch.see_still(1, 120, REST, streams=3)
            assert (judgement.state, judgement.progress_age) == ("busy", 119)
            assert watch.see(121, REST, streams=3).state == "stuck"

    def test_8_v0_counts_steps_at_rest(self):
        """One step each 10 s with no token: idle, never busy, never restarted."""
        watch = Watch()
        for at in range(61):
            page = EnginePage(running=0.0, waiting=0.0, generation_tokens=0.0, steps=3.0 + at // 10, step_tokens=0.0)
            judgement = watch.see(at, page, streams=0)
            assert judgement == Judgement("idle", "running 0, waiting 0, 0 open sockets", None, 0, 0)

    @pytest.mark.parametrize(
        "body",
        [b"", b'python_info{version="3.12"} 1.0\nprocess_start_time_seconds 1.7e9\n', b"# TYPE vllm:x gauge\n"],
        ids=["empty", "process only", "no sample yet"],
    )
    @pytest.mark.parametrize("known_before", [True, False])
    def test_9_a_page_without_the_engine(self, body, known_before):
        """Blind, never idle and never dead, whatever was known before (issues 8612, 7188)."""
        watch = Watch()
        if known_before:
            watch.see(0, REST, streams=0)
        try:
            reading = Reading(at=1.0, value=parse_page(body))
        except SourceUnusable as error:
            reading = Reading(at=1.0, error=str(error))
        judgement = watch.see(1, reading, streams=0)
        assert judgement.state == "blind"
        assert "page" in judgement.evidence

    @pytest.mark.parametrize("streams", [0, 1, None])
    def test_10_the_proxy_keeps_the_upstream(self, streams):
        """50 tokens a second for nobody: the engine is busy, and its own abort count is not asked (litellm 30244)."""
        watch, page = Watch(), replace(RUNNING, running=1.0)
        for at in range(60):
            assert watch.see(at, page, streams).state == "busy"
            page = work(page, 50)
        page = replace(page, running=0.0, finished=page.finished + 1)
        assert watch.see(60, page, 0).state == "idle"


class TestRecordedPages:
    def test_busy(self):
        """Three pages a second apart: busy, with the tokens made."""
        watch = Watch()
        evidence = [watch.see(at, recorded(f"vllm-0.32.0/busy-{at}.prom"), streams=9) for at in range(3)]
        assert [judgement.state for judgement in evidence] == ["busy"] * 3
        assert evidence[2].evidence == "running 4, waiting 5, generation +1308 in 1.0 s"

    @pytest.mark.parametrize("streams", [1, None])
    def test_long_prefill(self, streams):
        """Every counter at 0 for 25 s: busy, because KV usage moves."""
        watch = Watch()
        for at in (1, 5, 10, 15, 20, 25):
            judgement = watch.see(at, recorded(f"vllm-0.32.0/long-prefill-{at:02}s.prom"), streams)
            assert judgement.state == "busy"
        assert judgement.evidence == "running 1, KV usage 3.61% to 4.05% in 5.0 s"

    def test_core_killed(self):
        """Frozen values for 3 s are no verdict yet, refused is; a server that lived on with them would be stuck."""
        watch = Watch()
        for n, at in enumerate((0.0, 0.9, 1.5, 2.1, 2.6)):
            page = recorded(f"vllm-0.32.0/core-killed-{n}.prom")
            assert watch.see(at, page, streams=7).state == "busy"
        survivor = Watch()
        survivor.state = watch.state
        assert watch.see(3.1, refused(3.1), streams=0).state == "dead"
        assert survivor.see_still(3, 19.9, page, streams=7).state == "busy"
        assert survivor.see(20, page, streams=7).state == "stuck"

    def test_several_api_servers(self):
        """No start time, no `_created`: busy, idle; and anything that falls is a restart."""
        watch = Watch()
        assert watch.see(0, recorded("vllm-0.32.0/multiapi-busy.prom"), streams=4).state == "busy"
        assert watch.see(1, recorded("vllm-0.32.0/multiapi-busy2.prom"), streams=4).state == "busy"
        assert watch.see(9, recorded("vllm-0.32.0/multiapi-idle.prom"), streams=0).state == "idle"
        judgement = watch.see(10, recorded("vllm-0.32.0/multiapi-busy.prom"), streams=4)
        assert (judgement.state, judgement.restarts) == ("restarted", 1)

    def test_eight_ranks(self):
        """Data-parallel, several API servers (no start time, no `_created`): one rank works, the others stand still.
        Busy on the sum; stuck when the one hangs, with numbers of all."""
        text = (RECORDED / "vllm-pages" / "vllm-0.33.0-engines8.prom").read_text()
        lines = [line for line in text.splitlines() if not re.match(r"(# TYPE )?(process|python)_|.*_created", line)]
        shared = "\n".join(lines) + "\n"

        def page(tokens: int) -> EnginePage:
            now = re.sub(r'(:num_requests_running\{engine="3".*\}) 0.0', r"\1 2.0", shared)
            for name in ("generation_tokens_total", "iteration_tokens_total_sum", "prompt_tokens_total"):
                now = re.sub(rf'(:{name}\{{engine="3".*\}}) 0.0', rf"\1 {tokens}.0", now)
            return parse_page(now.encode())

        watch = Watch()
        for at in range(5):
            judgement = watch.see(at, page(100 + at), streams=2)
            assert judgement.state == "busy"
        assert (page(1).ranks, page(1).start_time, page(1).created) == (8, None, None)
        assert judgement.evidence == "running 2, generation +1 in 1.0 s"
        assert watch.see_still(5, 23.9, page(104), streams=2).state == "busy"
        assert watch.see(24, page(104), streams=2).state == "stuck"

    def test_statistics_off(self):
        """`--disable-log-stats`: blind, while streams flow and while none do."""
        with pytest.raises(SourceUnusable) as error:
            recorded("vllm-0.32.0/nostats.prom")
        for flowing in (True, False):
            judgement = Watch().see(0, failed(0, str(error.value)), streams=2, flowing=flowing)
            assert judgement.state == "blind"
            assert ("streams still carry bytes" in judgement.evidence) is flowing

    @pytest.mark.parametrize(
        "path",
        [
            *sorted((RECORDED / "vllm-pages").glob("*.prom")),
            RECORDED / "vllm-0.32.0" / "fresh.prom",
            *sorted((RECORDED / "vllm-written").glob("*engines1.prom")),
            *sorted((RECORDED / "vllm-written").glob("*rest.prom")),
            *sorted((RECORDED / "vllm-written").glob("*idle-00s.prom")),
        ],
        ids=lambda path: path.stem,
    )
    def test_every_release_at_rest(self, path):
        """A fresh engine of each release, one rank or eight: idle."""
        watch = Watch()
        assert watch.see_still(0, 30, parse_page(path.read_bytes()), streams=0).state == "idle"


class TestReadingsThatFail:
    @pytest.mark.parametrize("error", ["no page within 2 s", "HTTP 500", "the page is larger than 8388608 bytes"])
    def test_are_blind_and_say_for_how_long(self, error):
        """Neither dead nor idle, and the reason is the source's own."""
        watch = Watch()
        watch.see(0, RUNNING, streams=4)
        assert watch.see(1, failed(1, error), streams=4).evidence == error
        judgement = watch.see(5, failed(5, error), streams=4, flowing=True)
        assert (judgement.state, judgement.progress_age) == ("blind", None)
        assert judgement.evidence == f"{error} for 4.0 s, streams still carry bytes"
        judgement = watch.see(6, work(RUNNING, 9), streams=4)
        assert (judgement.state, judgement.evidence) == ("busy", "running 4, generation +9 in 6.0 s")
        assert watch.see(7, failed(7, error), streams=4).evidence == error

    def test_a_pause_counts_as_one_window_at_most(self):
        """The host slept for an hour, or the source failed for one: the engine gets a window to show itself."""
        watch = Watch()
        watch.see_still(0, 5, RUNNING, streams=4)
        assert watch.see(3600, RUNNING, streams=4).state == "busy"
        assert watch.see_still(3601, 3604, RUNNING, streams=4).state == "busy"
        assert watch.see(3605, RUNNING, streams=4).state == "stuck"

    def test_slow_scrapes_need_two_of_them(self):
        """A page every 15 s: no progress twice is stuck, once is not."""
        watch = Watch()
        watch.see(0, RUNNING, streams=4)
        assert watch.see(15, RUNNING, streams=4).state == "busy"
        assert watch.see(30, RUNNING, streams=4).state == "stuck"

    def test_a_cut_line_hides_no_progress(self):
        """A page lacks the token counter once: the next is compared with the one before it."""
        watch = Watch()
        watch.see(0, RUNNING, streams=4)
        watch.see(1, replace(RUNNING, generation_tokens=None, start_time=None), streams=4)
        judgement = watch.see(2, work(RUNNING, 7), streams=4)
        assert (judgement.evidence, judgement.restarts) == ("running 4, generation +7 in 1.0 s", 0)

    def test_a_page_without_its_gauges(self):
        """Neither running nor waiting: busy while tokens are made; else what the sockets tell, or blind."""
        watch, page = Watch(), replace(REST, running=None, waiting=None)
        assert watch.see(0, page).state == "blind"
        assert watch.see(1, work(page, 5)).state == "busy"
        assert watch.see(2, work(page, 5)).state == "blind"
        assert watch.see(3, work(page, 5), streams=0).state == "idle"
        assert watch.see(4, work(page, 5), streams=2).state == "busy"


class TestSleep:
    def test_asleep_is_by_order(self):
        """Sleeping, however long nothing moves; and it wakes with fresh windows."""
        watch, page = Watch(), replace(RUNNING, asleep=True)
        watch.see_still(0, 15, RUNNING, streams=4)
        judgement = watch.see_still(16, 300, page, streams=4)
        assert (judgement.state, judgement.progress_age) == ("sleeping", None)
        assert watch.see_still(301, 320, RUNNING, streams=4).state == "busy"
        assert watch.see(321, RUNNING, streams=4).state == "stuck"


class TestGhostSteps:
    """The core goes on for a request that its front end dropped: steps, and no token (facts of `output_processor`)."""

    page = replace(RUNNING, running=1.0)

    def test_are_counted_and_are_work(self):
        """No socket is open and the engine steps without tokens: busy, counted, and said."""
        watch, page = Watch(), self.page
        watch.see(0, page, streams=0)
        for at in range(1, 31):
            page = replace(page, steps=page.steps + 40)
            judgement = watch.see(at, page, streams=0)
            assert (judgement.state, judgement.ghost_steps) == ("busy", 40 * at)
        assert "requests its front end has dropped" in judgement.evidence
        assert watch.see(31, work(page, 3), streams=0).evidence == "running 1, generation +3 in 1.0 s"
        assert watch.see_still(32, 41, work(page, 3), streams=0).state == "idle"

    @pytest.mark.parametrize(
        ("change", "streams"),
        [
            ({"steps": 5_040.0}, 1),
            ({"steps": 5_040.0}, None),
            ({"steps": 5_040.0, "step_tokens": 50_040.0}, 0),
            ({"steps": 5_040.0, "generation_tokens": 10_001.0}, 0),
            ({"steps": 5_040.0, "step_tokens": None}, 0),
            ({"steps": 5_040.0, "start_time": 1_800_000_000.0}, 0),
            ({"steps": 5_001.0, "running": 0.0}, 0),
        ],
    )
    def test_what_is_none(self, change, streams):
        """Tokens came, a socket is there or might be, nothing runs, or the pages cannot be compared."""
        watch = Watch()
        watch.see(0, self.page, streams)
        assert watch.see(1, replace(self.page, **change), streams).ghost_steps == 0


class TestAFirstPageWithWork:
    """What runs when an engine is first seen: was its prompt finished? The page does not say."""

    @pytest.mark.parametrize(("unseen", "stuck_from"), [(False, 20), (True, 120)])
    def test_silence(self, unseen, stuck_from):
        """Two windows by default; the prefill budget for who starts with the doubt."""
        watch = Watch()
        watch.state = VerdictState(prefilling=unseen)
        assert watch.see_still(0, stuck_from - 1, RUNNING).state == "busy"
        assert watch.see(stuck_from, RUNNING).state == "stuck"

    def test_the_doubt_ends(self):
        """With the first prompt that is finished, with an empty engine, and with another process."""
        for after in (
            replace(RUNNING, prompt_tokens=RUNNING.prompt_tokens + 5),
            REST,
            replace(RUNNING, start_time=RUNNING.start_time + 9),
        ):
            watch = Watch()
            watch.state = VerdictState(prefilling=True)
            watch.see(0, RUNNING)
            watch.see(1, after)
            assert not watch.state.prefilling


class TestSeveralBackendsBehindOneAddress:
    one = replace(RUNNING, start_time=1_700_000_000.0)
    other = replace(RUNNING, start_time=1_700_050_000.0, generation_tokens=300.0, steps=100.0)

    def test_with_start_times(self):
        """A start time that comes back is no restart: blind, and asks for the backends, until it stops."""
        watch, pages = Watch(), {"a": self.one, "b": self.other}
        states = []
        for at, backend in enumerate("aababbaaab"):
            pages[backend] = work(pages[backend], 10)
            judgement = watch.see(at, pages[backend], streams=4)
            states.append(judgement.state)
        assert states == ["busy", "busy", "restarted", *["blind"] * 7]
        assert judgement.evidence.startswith("several backends")
        assert judgement.restarts == 1
        for at in range(10, 29):
            assert watch.see(at, work(pages["b"], at), streams=4).state == "blind"
        assert watch.see(29, work(pages["b"], 29), streams=4).state == "busy"

    def test_a_third_backend_is_no_restart(self):
        """Once reads come from several, another new set of counters is one more of them."""
        watch = Watch()
        backends = [replace(RUNNING, start_time=1_700_000_000.0 + n) for n in (0, 50, 99)]
        judgements = [watch.see(at, backends[n], streams=4) for at, n in enumerate((0, 1, 0, 2, 0, 1, 2))]
        assert [judgement.state for judgement in judgements] == ["busy", "restarted", *["blind"] * 5]
        assert judgements[-1].restarts == 1

    @pytest.mark.parametrize("order", ["ABAB", "AABBAAB", "BABABB", "ABAAAAAAB"])
    def test_without_start_times(self, order):
        """Two sets of counters, each growing: known when the reads fall back onto the smaller a second time."""
        pages = {name: replace(p, start_time=None, created=None) for name, p in (("A", self.one), ("B", self.other))}
        watch, seen = Watch(), []
        for at, backend in enumerate(order):
            pages[backend] = work(pages[backend], 10)
            seen.append(watch.see(at, pages[backend], streams=4))
        assert seen[-1].state == "blind"
        assert seen[-1].restarts == 1

    @pytest.mark.parametrize("identity", [True, False])
    def test_a_crash_loop_is_not_that(self, identity):
        """Each life ends in a refused connection and begins at 0: restarts, every one counted."""
        watch = Watch()
        for life in range(5):
            start = 1_700_000_000.0 + 60 * life if identity else None
            page = EnginePage(running=1.0, waiting=0.0, generation_tokens=0.0, steps=0.0, start_time=start)
            for second in range(4):
                judgement = watch.see(6 * life + second, work(page, 5.0 * second + life), streams=1)
                assert judgement.state in ("busy", "restarted")
            assert judgement.restarts == life
            watch.see(6 * life + 5, refused(6 * life + 5), streams=0)

    def test_a_reset_that_repeats_is_not_that(self):
        """The same start time is one process, however often its counters fall."""
        watch = Watch()
        for at in range(12):
            judgement = watch.see(at, replace(REST, generation_tokens=float(at % 3)), streams=0)
        assert judgement.state != "blind"
        assert judgement.restarts == 0


AMOUNT = st.none() | st.integers(0, 5).map(float) | st.floats(0, 2**63)
PAGES = st.builds(
    EnginePage,
    running=AMOUNT,
    waiting=AMOUNT,
    deferred=AMOUNT,
    generation_tokens=AMOUNT,
    prompt_tokens=AMOUNT,
    steps=AMOUNT,
    step_tokens=AMOUNT,
    first_tokens=AMOUNT,
    work=AMOUNT,
    preemptions=AMOUNT,
    finished=AMOUNT,
    finished_tokens=AMOUNT,
    live=st.booleans(),
    between_steps=st.booleans(),
    kv_usage=st.none() | st.floats(0, 1),
    asleep=st.none() | st.booleans(),
    start_time=st.none() | st.sampled_from([1.0, 2.0]),
    created=st.none() | st.sampled_from([1.0, 2.0]),
)
LATE: Reading[EnginePage] = Reading(at=0.0, error="no answer within 0.8 s", late=True)
READINGS = st.builds(lambda page: Reading(at=0.0, value=page), PAGES) | st.sampled_from([refused(0), failed(0), LATE])


class TestAnything:
    @given(st.lists(st.tuples(st.floats(0, 40), READINGS, st.none() | st.integers(0, 5), st.booleans()), max_size=25))
    def test_gives_a_verdict_that_rests_on_something(self, beats):
        """No reading, in whatever order, raises; totals never fall; without a page it is dead or
        blind, or for one that is late what its silence means; and never stuck where nothing shows progress."""
        watch, now, restarts, ghosts = Watch(), 100.0, 0, 0.0
        for dt, reading, streams, flowing in beats:
            now += dt
            judgement = watch.see(now, replace(reading, at=now), streams, flowing)
            assert judgement.state in ENGINE_STATES
            assert judgement.evidence.splitlines() == [judgement.evidence]
            assert judgement.restarts >= restarts
            assert judgement.ghost_steps >= ghosts
            assert judgement.progress_age is None or judgement.progress_age >= 0
            restarts, ghosts = judgement.restarts, judgement.ghost_steps
            if reading.value is None and not reading.late:
                assert judgement.state == ("dead" if reading.refused else "blind")
            if reading.late:
                assert judgement.state in ("blind", "busy", "stuck")
            if judgement.state == "stuck":
                assert judgement.progress_age >= (120 if reading.late else 20)
                assert reading.late or reading.value.live
            if len(watch.state.left) > 4:
                pytest.fail("memory grows with the readings")

    @given(
        st.lists(st.tuples(st.floats(0.1, 3), st.integers(1, 9)), min_size=1, max_size=60), st.none() | st.integers(0)
    )
    def test_an_engine_that_makes_tokens_is_busy(self, beats, streams):
        """Whatever the sockets show: an engine that progresses is never anything else."""
        watch, page, now = Watch(), RUNNING, 0.0
        for dt, tokens in beats:
            page, now = work(page, tokens), now + dt
            assert watch.see(now, page, streams).state == "busy"

    def test_the_table_is_complete(self):
        """It can say every state there is, and its last row holds whatever the facts are."""
        assert {row.state for row in TABLE} == set(ENGINE_STATES)
        assert TABLE[-1].holds(None)


def test_golden_table_stands_in_the_docs():
    """docs/verdict.md shows the table that decides, between its markers."""
    begin, end = "<!-- drawn from exporter/tokengap/join/verdict.py: begin -->\n", "\n<!-- end -->"
    text = DOCS.read_text()
    before, _, rest = text.partition(begin)
    drawn, _, after = rest.partition(end)
    if os.environ.get("TOKENGAP_ACCEPT"):
        DOCS.write_text(f"{before}{begin}{table()}{end}{after}")
        return
    assert drawn == table(), "docs/verdict.md is out of date: run `make accept` and commit"
