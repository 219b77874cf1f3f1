"""The truth, what was measured, and how far they are apart: made of outcomes and scrapes, without any traffic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.commands import ARTICLE
from tokengap.lab.batching import Knobs
from tokengap.lab.report import Fields, Report, last_leave, measured, moments, truth_of_lab, truth_of_page
from tokengap.lab.scrape import Scrape, read_page
from tokengap.lab.stage import Plan, Ports
from tokengap.lab.truth import RequestTruth, Sample, Truth
from tokengap.lab.users import Outcome, User

PAGE = (Path(__file__).parent.parent / "golden" / "page.txt").read_text()
SCRAPE = read_page(PAGE, 1.764e9)


def outcome(name: str, how: str, tokens: int, ended: float, first_token: float | None = None) -> Outcome:
    return Outcome(User(name), how, tokens, sent=0.0, first_token=first_token, ended=ended)


def request(name: str, state: str, generated: int, first_token: float | None, ended: float) -> RequestTruth:
    return RequestTruth(name, state, 400, 256, generated, generated, False, 0.0, 0.0, 0.0, first_token, ended)


def plan(*through: str, leak: str = "none") -> Plan:
    return Plan(through, leak, Knobs(max_num_seqs=2), Ports())


STAYED = outcome("stayed", "completed", 100, ended=4.0, first_token=1.0)
LEFT = outcome("left", "left", 30, ended=2.0, first_token=1.0)
QUEUED = outcome("queued", "left", 0, ended=2.0)


def truth(*requests: RequestTruth) -> Truth:
    history = [Sample(0.1, 0, 0, 0.0, 0.0), Sample(1.0, 2, 1, 1.0, 1.0), Sample(4.0, 1, 0, 0.0, 0.0)]
    known = {request.id: request for request in requests}
    return Truth(history[0], False, Knobs(max_num_seqs=2), sum(r.generated for r in requests), known, history)


LEAKED = truth(
    request("stayed", "finished", 100, 1.0, 4.0),
    request("left", "finished", 100, 1.0, 5.0),
    request("queued", "finished", 100, 5.0, 9.0),
)
CUT = truth(
    request("stayed", "finished", 100, 1.0, 4.0),
    request("left", "aborted", 31, 1.0, 2.0),
    request("queued", "aborted", 0, None, 2.0),
)


def test_the_truth_of_a_leak():
    """All that was generated for those who left and they had not received, held by the edge to the engine's end."""
    said = truth_of_lab([STAYED, LEFT, QUEUED], LEAKED, plan("naive", leak="edge"), instants=[1.0, 2.5, 4.5])
    assert (said.tokens_out_total, said.tokens_useful_total, said.gap) == (300, 130, 170)
    assert said.tokens_orphaned_total == {"edge": 170, "engine": 0}
    assert said.streams_ended_total == {"completed": 1, "cancelled": 0, "orphaned": 2, "failed": 0}
    assert said.cancelled_orphan == 0
    assert said.stream_age_seconds == 9.0
    assert said.client_connected == 0.0
    assert truth_of_lab([STAYED, LEFT, QUEUED], LEAKED, plan("naive", leak="edge"), [2.5]).client_connected == 1 / 3
    assert (said.slot_utilization, said.queue_age_seconds) == (1.0, 1.0)
    assert said.deadline_slack_seconds == 6.0, "who left in the queue had waited for 2 s, and has no deadline any more"


def test_the_truth_where_nothing_leaks():
    """Who leaves is cancelled, and only those who are there are held."""
    said = truth_of_lab([STAYED, LEFT, QUEUED], CUT, plan("nginx"), instants=[1.0, 2.5])
    assert (said.gap, said.cancelled_orphan, said.client_connected) == (1, 2, 1.0)
    assert said.stream_age_seconds == 4.0


def test_the_truth_of_an_engine_that_leaks():
    """No hop holds on, so all clients at the hop are there, and the tokens are lost at the engine."""
    said = truth_of_lab([STAYED, LEFT, QUEUED], LEAKED, plan("nginx", leak="engine"), instants=[2.5])
    assert said.tokens_orphaned_total == {"edge": 0, "engine": 170}
    assert (said.client_connected, said.stream_age_seconds) == (1.0, 4.0)


def test_who_left_with_the_answer_had_it():
    """The engine was done when the client closed: nothing ran for nobody."""
    early = truth(request("left", "finished", 30, 1.0, 1.9))
    assert truth_of_lab([LEFT], early, plan(), []).streams_ended_total["completed"] == 1


def test_the_truth_of_a_real_engine_is_what_its_page_shows():
    """Tokens, and the deadline as users saw it; what no page shows is not known."""
    said = truth_of_page([STAYED, LEFT], 200.0)
    assert (said.tokens_out_total, said.gap, said.deadline_slack_seconds) == (200.0, 70.0, 7.0)
    assert said.queue_age_seconds is None
    assert said.cancelled_orphan is None


def test_a_page_is_read_as_scrapers_read_it():
    """Totals over all engines, and of each gauge the worst."""
    assert (SCRAPE.tokens_out, SCRAPE.tokens_useful, SCRAPE.gap) == (16092.0, 15000.5, pytest.approx(992.25))
    assert SCRAPE.tokens_orphaned == {"edge": 900.25, "admit": 0.0, "engine": 92.0}
    assert SCRAPE.streams_ended == {"completed": 64, "cancelled": 5, "orphaned": 8, "failed": 1}
    assert (SCRAPE.client_connected, SCRAPE.queue_age, SCRAPE.deadline_slack) == (0.5, 6.75, 1.25)
    assert (SCRAPE.beats, SCRAPE.beat_at) == (4321, pytest.approx(0.5))


def test_a_page_of_somebody_else_is_no_page():
    """Another exporter on that port must not pass for ours with nothing to say."""
    with pytest.raises(ValueError, match="tokengap_beats_total"):
        read_page("# TYPE up gauge\nup 1\n", 0.0)


def series(**changes) -> Scrape:
    return replace(SCRAPE, **changes)


def test_what_is_measured_is_the_last_total_and_the_worst_gauge():
    """A gauge that was not known once is passed over."""
    said = measured(
        [
            series(beat_at=1.0, queue_age=3.0, deadline_slack=5.0, stream_age=4.0, tokens_out=10.0),
            series(beat_at=2.0, queue_age=None, deadline_slack=-2.0, stream_age=6.0, tokens_out=20.0),
            series(beat_at=3.0, queue_age=0.0, deadline_slack=8.0, stream_age=0.0, tokens_out=30.0),
        ]
    )
    assert (said.queue_age_seconds, said.deadline_slack_seconds, said.stream_age_seconds) == (3.0, -2.0, 6.0)
    assert said.tokens_out_total == 30.0


def test_who_is_connected_is_taken_after_the_last_one_left():
    """Within three seconds of it; what the share is when the orphans are alone says nothing."""
    shares = [
        series(beat_at=at, client_connected=share) for at, share in ((1.0, 1.0), (2.5, 0.6), (4.0, 0.5), (9.0, 0))
    ]
    left = last_leave([STAYED, LEFT])
    assert left == 2.0
    assert measured(shares, left).client_connected == 0.5
    assert [scrape.beat_at for scrape in moments(shares, left)] == [2.5, 4.0]
    assert measured(shares, last_leave([STAYED])).client_connected == 0


def test_what_is_not_on_the_page_is_not_known():
    """No field turns into 0, and a gap that is not known fails the drill."""
    said = measured([series(tokens_pending=None, queue_age=None)])
    assert (said.gap, said.queue_age_seconds) == (None, None)
    report = Report(Fields(tokens_out_total=100, gap=0), said, 0.01)
    assert (report.error_ratio, report.passed) == (None, False)
    assert measured([]) == Fields()


@pytest.mark.parametrize(("gap", "passed"), [(1000, True), (1010, True), (1011, False), (990, True), (989, False)])
def test_the_bar_is_a_share_of_the_tokens_out(gap, passed):
    """One percent of a thousand tokens is ten, in both directions."""
    report = Report(Fields(tokens_out_total=1000, gap=1000), Fields(gap=gap), 0.01)
    assert report.passed is passed


def test_nothing_came_out():
    """Without a token there is nothing to compare, and a drill that proved nothing has not passed."""
    assert not Report(Fields(tokens_out_total=0, gap=0), Fields(gap=0), 0.01).passed


def test_the_json_has_the_names_of_the_article():
    """In both halves, and plain numbers."""
    said = Report(truth_of_lab([STAYED], LEAKED, plan(), []), measured([SCRAPE]), 0.01).as_json()
    assert list(said) == ["truth", "measured", "error_ratio", "passed", "users"]
    for half in (said["truth"], said["measured"]):
        assert [name for name in half if name in ARTICLE] == list(ARTICLE)


def test_what_is_printed_is_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    """Every field of the article on a line of its own, nothing folded, no escape codes; not known is said."""
    scraped = measured([])
    Report(truth_of_lab([STAYED, LEFT], LEAKED, plan(), [1.0]), measured([SCRAPE]), 0.01, scraped, 15.0, 3).print()
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [name for name in ARTICLE if not any(line.split()[:1] == [name] for line in lines)] == []
    assert "\x1b" not in out
    assert "not known" in out
    assert any(line.startswith("The gap is 170 tokens and was measured as 992: off by") for line in lines)
    assert any("every 15 s came 3 times" in line for line in lines)
