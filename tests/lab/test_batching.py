"""Who runs, who waits and who gets a token when, in virtual time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.lab.batching import Batch, Knobs, Sequence
from tokengap.lab.vllm_page import VllmPage


class Run:
    """A batch, its page, and a clock that the test moves."""

    def __init__(self, **knobs):
        self.page = VllmPage("m")
        self.batch = Batch(Knobs(**knobs), self.page)
        self.now = 1000.0
        self.sequences: list[Sequence] = []

    def ask(self, prompt=80, limit=10) -> Sequence:
        sequence = Sequence(f"s{len(self.sequences)}", prompt, limit, self.now, max_tokens=limit)
        self.sequences.append(sequence)
        self.batch.submit(sequence, self.now)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        self.batch.abort(sequence, self.now)

    def go(self, seconds: float) -> list[Sequence]:
        """Move the clock the way the engine does: stop wherever something is due."""
        got, end = [], self.now + seconds
        while (due := self.batch.due()) is not None and due <= end:
            self.now = max(self.now, due)
            got += self.batch.advance(self.now)
        self.now = end
        return got

    def shown(self, name: str) -> float:
        """Return a family's value on the page, summed over labels."""
        lines = re.findall(rf"^vllm:{name}(?:{{.*?}})? (\S+)$", self.page.text().decode(), re.MULTILINE)
        assert lines, f"{name} is not on the page"
        return sum(map(float, lines))


def test_one_request_prefills_and_then_gets_a_token_every_step():
    """80 prompt tokens at 800/s and 10 tokens at 50/s: first token after 0.1 s, the last one nine steps later."""
    run = Run(rate=50, prefill_rate=800)
    sequence = run.ask(prompt=80, limit=10)
    run.go(5)
    assert sequence.first_token == pytest.approx(1000.1)
    assert sequence.ended == pytest.approx(1000.1 + 9 / 50)
    assert (sequence.state, sequence.reason, sequence.generated) == ("finished", "length", 10)


def test_slots_are_given_in_order_of_arrival():
    """With two slots the third starts when the first ends, and the fourth after it."""
    run = Run(max_num_seqs=2, rate=10, prefill_rate=1e9)
    first, second, third, fourth = (run.ask(limit=limit) for limit in (5, 8, 5, 5))
    assert (run.batch.running, run.batch.waiting) == (2, 2)
    run.go(0.2)
    assert run.batch.head_age(run.now) == pytest.approx(0.2)
    run.go(5)
    assert third.started == first.ended
    assert fourth.started == second.ended
    assert run.batch.head_age(run.now) == run.batch.first_token_wait(run.now) == 0


def test_running_sequences_share_every_step():
    """Continuous batching: three running sequences get three tokens a step, and the step counts once."""
    run = Run(max_num_seqs=3, rate=10, prefill_rate=1e9)
    for _ in range(3):
        run.ask(limit=4)
    run.go(1)
    assert run.shown("generation_tokens_total") == 12
    assert run.shown("iteration_tokens_total_count") == 4
    assert run.shown("iteration_tokens_total_sum") == 12 + 3 * 80
    assert run.shown("inter_token_latency_seconds_count") == 9


def test_a_long_prefill_shows_in_the_cache_and_in_no_counter():
    """As recorded from vLLM 0.32.0: KV usage rises while iterations and prompt tokens stand at 0."""
    run = Run(prefill_rate=1000)
    run.ask(prompt=20_000)
    usage = []
    for _ in range(3):
        run.go(4)
        run.batch.show(run.now)
        usage.append(run.shown("kv_cache_usage_perc"))
    assert 0 < usage[0] < usage[1] < usage[2]
    assert run.shown("iteration_tokens_total_count") == run.shown("prompt_tokens_total") == 0
    run.go(9)
    assert run.shown("prompt_tokens_total") == 20_000


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_who_leaves_frees_the_slot_at_once_and_is_counted_nowhere(phase):
    """In no per-request family of vLLM (issues 31503, 55634); what was generated stays in generation_tokens."""
    run = Run(max_num_seqs=1, rate=10, prefill_rate=80)
    first = run.ask(limit=50)  # 1 s of prefill
    second = run.ask(limit=50)
    leaver, stayer = (second, first) if phase == "queue" else (first, second)
    run.go(1.55 if phase == "decode" else 0.5)
    run.leave(leaver)
    assert leaver.state == "aborted"
    assert (run.batch.running, run.batch.waiting) == (1, 0)
    assert stayer.started is not None
    run.go(60)
    assert stayer.state == "finished"
    assert run.shown("request_success_total") == 1
    assert run.shown("request_generation_tokens_sum") == 50
    assert run.shown("generation_tokens_total") == 50 + leaver.generated
    assert leaver.generated == (6 if phase == "decode" else 0)
    assert run.shown("kv_cache_usage_perc") == 0


def test_frozen_nothing_moves_and_thawed_it_goes_on_from_there():
    """A frozen engine generates nothing, schedules nobody, shows what it last showed, and makes up for nothing."""
    run = Run(max_num_seqs=2, rate=10, prefill_rate=1e9)
    sequence = run.ask(limit=20)
    run.go(0.5)
    had = sequence.generated
    run.batch.freeze(run.now)
    late = run.ask()
    run.go(30)
    assert sequence.generated == had
    assert late.state == "queued"
    assert (run.shown("num_requests_running"), run.shown("num_requests_waiting")) == (1, 0)
    run.batch.thaw(run.now)
    run.go(0.35)
    assert had + 3 <= sequence.generated <= had + 4
    assert late.state == "running"


def test_a_late_call_catches_up_but_never_more_than_a_second():
    """A busy event loop loses no token; a process that was stopped for a minute did not compute for a minute."""
    run = Run(rate=50, prefill_rate=1e9)
    sequence = run.ask(limit=10_000)
    run.go(0)
    run.batch.advance(run.now + 0.5)
    had = sequence.generated
    assert had == pytest.approx(1 + 25, abs=1)
    run.batch.advance(run.now + 60.5)
    assert sequence.generated == pytest.approx(had + 50, abs=1)


def test_more_slots_are_used_at_once():
    """Turning max_num_seqs up starts those who wait."""
    run = Run(max_num_seqs=1)
    run.ask(), run.ask(), run.ask()
    run.batch.turn(Knobs(max_num_seqs=3), run.now)
    assert (run.batch.running, run.batch.waiting) == (3, 0)


def test_knobs_that_make_no_sense_are_refused():
    """No slot and no rate is no engine."""
    with pytest.raises(ValueError, match="rate must be above 0"):
        Knobs(rate=0)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 400), st.integers(1, 30)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("go"), st.integers(1, 300), st.just(0)),
        st.tuples(st.just("freeze"), st.just(0), st.just(0)),
        st.tuples(st.just("thaw"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(slots=st.integers(1, 4), acts=ACTS)
def test_whatever_happens_the_books_are_balanced(slots, acts):
    """Slots are never exceeded, starts are in order of arrival, and counters equal what the sequences got."""
    run = Run(max_num_seqs=slots, rate=20, prefill_rate=1000)
    for act, one, two in acts:
        match act:
            case "ask":
                run.ask(one, two)
            case "leave" if one < len(run.sequences):
                run.leave(run.sequences[one])
            case "go":
                run.go(one / 100)
            case "freeze":
                run.batch.freeze(run.now)
            case "thaw":
                run.batch.thaw(run.now)
        assert run.batch.running <= slots
        assert run.batch.frozen or run.batch.running == slots or run.batch.waiting == 0
    run.batch.thaw(run.now)
    run.go(3600)
    starts = [sequence.started for sequence in run.sequences if sequence.started is not None]
    assert starts == sorted(starts)
    assert all(sequence.state in {"finished", "aborted"} for sequence in run.sequences)
    generated = sum(sequence.generated for sequence in run.sequences)
    finished = [sequence for sequence in run.sequences if sequence.state == "finished"]
    assert run.batch.generated == generated == run.shown("generation_tokens_total")
    assert run.shown("request_success_total") == len(finished)
    assert run.shown("request_generation_tokens_sum") == sum(sequence.limit for sequence in finished)
    assert run.shown("kv_cache_usage_perc") == pytest.approx(0, abs=1e-12)
    assert run.shown("num_requests_running") == run.shown("num_requests_waiting") == 0
