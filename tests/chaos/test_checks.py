"""The validations: each holds of a run in which all is well, and fails on the far side of its own edge only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.story import FIRST, IDLE, TOKENS, ask, attempt, look, run, saying
from tokengap.chaos.checks import Check, Limits, Verdict, checks
from tokengap.chaos.evidence import Evidence, percentile

LIMITS, ANY = Limits(), Verdict()


def failing(evidence: Evidence, limits: Limits = LIMITS, verdict: Verdict = ANY) -> list[str]:
    return [check.name for check in checks(evidence, limits, verdict) if check.failed and check.name != "in-flight"]


def named(name: str, evidence: Evidence, limits: Limits = LIMITS, verdict: Verdict = ANY) -> Check:
    (found,) = (check for check in checks(evidence, limits, verdict) if check.name == name)
    return found


def test_a_run_in_which_all_is_well_passes():
    """Every validation; and those who were being answered when it broke are counted."""
    assert [check.name for check in checks(run(), LIMITS, Verdict()) if check.failed] == []
    assert named("in-flight", run()).said.startswith("7 were being answered")


@pytest.mark.parametrize(("first", "passes"), [(1.99 * FIRST, True), (2.01 * FIRST, False)])
def test_the_first_token_may_take_twice_as_long(first, passes):
    """At the 99th percentile: one in fifty is enough to fail."""
    slow = ask(attempt(12.0, first=first))
    assert named("first-token-p99", run(slow)).passed is passes


def test_a_request_that_failed_took_for_ever():
    """Left out, it would have made the percentile better."""
    lost = ask(attempt(12.0, tokens=0, end="refused"))
    check = named("first-token-p99", run(lost))
    assert not check.passed
    assert check.value == math.inf
    assert "1 of them never" in check.said


def test_one_who_asked_again_waited_from_the_first_question_on():
    """Also when the second attempt was fast."""
    again = ask(attempt(12.0, tokens=0, end="refused", after=1.5), attempt(13.6))
    assert named("first-token-p99", run(again)).value == pytest.approx(2.6)


def test_too_few_samples_are_a_failure():
    """In the fault or in the baseline; the percentile of nothing is no good news."""
    quiet = run(every=5.0)
    check = named("first-token-p99", quiet)
    assert not check.passed
    assert "it takes 20 in each" in check.said
    assert named("first-token-p99", quiet, replace(LIMITS, samples=2)).passed


def test_a_gap_that_a_retry_closed_is_a_gap():
    """From the last token of the attempt that broke to the first of the next one; of one that gave up, without end."""
    again = ask(attempt(8.0, tokens=10, end="broken", after=2.0), attempt(11.6))
    gone = ask(attempt(9.0, tokens=10, end="broken", after=2.0))
    evidence = run(again, gone)
    lengths = evidence.inter_token_latencies(evidence.fault)
    assert max(length for length in lengths if math.isfinite(length)) == pytest.approx(12.6 - 9.45)
    assert lengths.count(math.inf) == 1


@pytest.mark.parametrize("end", ["told", "broken", "refused", "impatient"])
def test_an_error_that_a_client_recognises_is_a_clean_end(end):
    """It can ask again."""
    assert "clean-ends" not in failing(run(ask(attempt(12.0, tokens=5, end=end), attempt(14.0))))


def test_silent_truncation_fails():
    """Nobody would notice."""
    assert "clean-ends" in failing(run(ask(attempt(12.0, tokens=5, end="truncated"))))


def test_a_whole_answer_that_lacks_tokens_fails():
    """It said that it was complete."""
    assert failing(run(ask(attempt(12.0, tokens=TOKENS - 1)))) == ["clean-ends"]


@pytest.mark.parametrize(
    "twice", [attempt(12.0, answers=2), attempt(12.0, tokens=TOKENS + 3)], ids=["two answers", "too many tokens"]
)
def test_an_answer_that_begins_again_fails(twice):
    """A gateway must not repeat what its client has had a part of."""
    assert failing(run(ask(twice))) == ["no-duplicates"]


def test_who_was_being_answered_and_never_was_fails():
    """Though each was told so."""
    lost = ask(attempt(9.0, tokens=0, end="told", after=1.5))
    assert not named("in-flight", run(lost)).passed


@pytest.mark.parametrize(("share", "passes"), [(0.991, True), (0.989, False), (1.009, True), (1.011, False)])
def test_useful_tokens_are_those_received(share, passes):
    """Within a hundredth, on either side."""
    evidence = run()
    received = sum(one.tokens for one in evidence.attempts)
    assert named("tokens-agree", saying(evidence, look(0), look(31, received * share))).passed is passes


@pytest.mark.parametrize(("useful", "passes"), [(100.0, True), (101.0, False), (99.0, False)])
def test_a_token_is_on_one_account(useful, passes):
    """On none, or on two, fails."""
    evidence = saying(run(), look(0), look(31, useful, out=110.0, orphaned=10.0))
    assert named("accounts-balance", evidence).passed is passes


def test_a_total_that_fell_fails():
    """Across a restart too."""
    assert not named("accounts-balance", saying(run(), look(0, 50.0), look(31, 40.0))).passed


@pytest.mark.parametrize(("silence", "passes"), [(6.4, True), (6.6, False)])
def test_the_gateway_tells_within_its_read_timeout(silence, passes):
    """And what may come on top of it. What was silent before it broke does not count."""
    told = ask(attempt(8.0, tokens=3, end="broken", after=10 - 8 - FIRST - 0.1 + silence), attempt(20.0))
    assert named("fail-fast", run(told)).passed is passes


def test_the_next_request_is_the_first_after_the_fault():
    """And is a failure when there is none."""
    slow = ask(attempt(10.0, first=9.0))
    evidence = run()
    asks = [one for one in evidence.asks if one.asked != 10.0]
    assert named("next-request", replace(evidence, asks=[slow, *asks])).value == pytest.approx(9.0)
    assert not named("next-request", replace(evidence, asks=[one for one in asks if one.asked < 10])).passed


def test_attempts_are_counted_for_each_request():
    """In the fault and in two minutes after it."""
    storm = [ask(*(attempt(12.0, tokens=0, end="refused") for _ in range(60)), attempt(13.0))]
    assert named("retry-storm", run(*storm)).value == pytest.approx(1 + 60 / 83, rel=0.05)
    assert "retry-storm" in failing(run(*storm))
    assert named("retry-storm", run()).value == 1


@pytest.mark.parametrize(("waits_until", "passes"), [(139, True), (141, False)])
def test_the_queue_is_back_in_time(waits_until, passes):
    """Within two minutes after the end of the fault."""
    queue = replace(IDLE, waiting=3.0)
    looks = [look(at, a=queue if 12 <= at <= waits_until else IDLE) for at in range(150)]
    assert named("queue-back", saying(run(), *looks)).passed is passes


def test_a_queue_that_stays_fails():
    """However long it is looked at."""
    queue = replace(IDLE, waiting=1.0)
    assert not named("queue-back", saying(run(), look(5), *(look(at, b=queue) for at in range(12, 30)))).passed


def test_a_slot_that_is_held_fails():
    """By the engine's own account, and by the exporter's."""
    assert "slots-released" in failing(replace(run(), at_rest={"a": 1, "b": 0}))
    held = replace(IDLE, running=1.0)
    assert "slots-released" in failing(saying(run(), look(5), look(31, b=held)))


@pytest.mark.parametrize(("until", "passes"), [(16.5, True), (16.6, False)])
def test_who_has_gone_is_let_go(until, passes):
    """Within the read timeout, and what may come on top of it; two stretches are not one."""
    held = [look(at, gone=1) for at in (10, 12, until)]
    evidence = saying(run(), look(0), *held, look(17), look(18, gone=1), look(19))
    assert named("orphans-let-go", evidence).passed == passes


STUCK = Verdict(frozenset({"stuck"}), 9.0)


@pytest.mark.parametrize(("at", "passes"), [(18, True), (20, False)])
def test_the_verdict_comes_in_time(at, passes):
    """Two windows and some beats."""
    looks = [look(second, a=replace(IDLE, state="stuck" if second >= at else "busy")) for second in range(30)]
    assert named("verdict", saying(run(), *looks), verdict=STUCK).passed is passes


def test_what_must_not_be_said_is_a_failure():
    """As that an engine is dead whose network is cut; and of the other one nothing may be said at all."""
    never = Verdict(never=frozenset({"dead"}))
    dead = replace(IDLE, state="dead")
    assert "verdict" in failing(saying(run(), look(5), look(15, a=dead), look(25)), verdict=never)
    assert "other-replica" in failing(saying(run(), look(5), look(15, b=dead), look(25)), verdict=never)


def test_a_cold_start_is_judged_only_where_there_is_a_limit():
    """Else it is shown."""
    started = replace(run(), first_token_again=26.0)
    assert named("cold-start", started).judged is False
    assert named("cold-start", started, replace(LIMITS, cold_start=17.0)).failed is False
    assert named("cold-start", started, replace(LIMITS, cold_start=15.0)).failed


def test_what_is_only_shown_decides_nothing():
    """It still says that it did not hold."""
    (check,) = (
        each
        for each in checks(
            run(ask(attempt(12.0, tokens=0, end="refused"))), LIMITS, Verdict(), frozenset({"first-token-p99"})
        )
        if each.name == "first-token-p99"
    )
    assert (check.passed, check.failed) == (False, False)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_this_share_does_not_exceed(values, share):
    """And the smallest such one."""
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_the_percentile_of_nothing_is_no_number():
    """Which no limit lets pass."""
    assert math.isnan(percentile([], 0.99))
