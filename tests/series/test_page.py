"""The page: golden, linted, parsed by the library that did not write our samples, and of bounded size."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import ProcessCollector
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from series.example import rich_view, view_with
from tokengap.series import SERIES
from tokengap.series.declare import Distribution
from tokengap.series.render import Page, render, render_named
from tokengap.view import View

GOLDEN = Path(__file__).parent.parent / "golden"


def samples(page: Page) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the text page, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(page.text.decode())
        for sample in family.samples
    }


def value(page: Page, name: str, **labels: str) -> float | None:
    """One sample of the text page, None where there is none."""
    return samples(page).get((name, frozenset(labels.items())))


def lint(page: bytes) -> subprocess.CompletedProcess[str]:
    """What promtool finds on a page."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus"
    return subprocess.run(
        [promtool, "check", "metrics"], input=page.decode(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["page.txt", "page.openmetrics.txt"])
def test_golden_page(name: str) -> None:
    """The page of the rich view is the one that was accepted; TOKENGAP_ACCEPT=1 accepts what it is now."""
    page = render(rich_view())
    answer = (page.text if name == "page.txt" else page.openmetrics).decode()
    # The only values that depend on where the test runs.
    answer = re.sub(r'python="[^"]+",version="[^"]+"', 'python="PYTHON",version="VERSION"', answer)
    golden = GOLDEN / name
    if os.environ.get("TOKENGAP_ACCEPT") == "1":
        golden.write_text(answer)
    assert answer == golden.read_text(), "the page changed; if it should, run `make accept` and commit"


@pytest.mark.parametrize("view", [rich_view(), view_with(0), view_with(100)], ids=["rich", "0", "100"])
def test_promtool_is_silent(view: View) -> None:
    """`promtool check metrics` says nothing, with the process's own series and without."""
    for page in (render(view), render(view, [ProcessCollector(registry=None)])):
        result = lint(page.text)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_promtool_would_speak() -> None:
    """The lint is not silent about everything: a counter without its suffix is found."""
    assert lint(b"# TYPE tokengap_x counter\ntokengap_x 1\n").returncode == 3


def test_both_formats_say_the_same() -> None:
    """The text page and the OpenMetrics page hold the same samples, as their own parsers read them."""
    page = render(rich_view())
    from_openmetrics = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_openmetrics(page.openmetrics.decode())
        for sample in family.samples
    }
    assert from_openmetrics == samples(page)
    assert page.openmetrics.endswith(b"# EOF\n")
    assert b"# EOF" not in page.text


def test_no_sample_is_written_twice() -> None:
    """No name with the same labels stands on the page twice."""
    lines = [line.rpartition(" ")[0] for line in render(rich_view()).text.decode().splitlines() if line[0] != "#"]
    assert len(lines) == len(set(lines))


def test_no_created_series() -> None:
    """No `_created` samples: Prometheus would store each as one more series."""
    page = render(view_with(10))
    assert b"_created" not in page.text + page.openmetrics


def test_gzipped_pages_hold_the_same_bytes() -> None:
    """Unpacking the gzipped pages gives the plain ones."""
    page = render(rich_view())
    assert gzip.decompress(page.text_gzip) == page.text
    assert gzip.decompress(page.openmetrics_gzip) == page.openmetrics


def test_number_of_series_is_independent_of_the_number_of_streams() -> None:
    """With 0, 100 and 10,000 streams the page has the same series; only their values differ."""
    none, some, many = (samples(render(view_with(streams))).keys() for streams in (0, 100, 10_000))
    assert none == some == many


def test_names_on_the_page_are_those_of_the_catalogue() -> None:
    """Nothing undescribed leaves the process, and nothing described is left out, whatever is known."""
    blind = replace(rich_view(), engines=(), groups=(), sources=(), hop_names=(), endings={}, accounting="none")
    for view in (rich_view(), blind):
        families = [family.name for family in parse_openmetrics(render(view).openmetrics.decode())]
        assert families == [series.name.removesuffix("_total") for series in SERIES]


def test_unknown_is_missing() -> None:
    """Of an engine that was never read, what is not known is not on the page, and what is known is."""
    page = render(rich_view())
    spare = 'spare "b"\\<b>'
    for name in (
        "tokengap_queue_age_seconds",
        "tokengap_slot_utilization_ratio",
        "tokengap_engine_requests_running",
        "tokengap_engine_requests_waiting",
        "tokengap_coverage_ratio",
        "tokengap_engine_progress_age_seconds",
    ):
        assert value(page, name, engine=spare) is None
        assert value(page, name, engine="worker") is not None
    assert value(page, "tokengap_engine_state", engine=spare, state="dead") == 1.0
    assert value(page, "tokengap_source_up", source="engine", target=spare) == 0.0
    assert "NaN" not in page.text.decode()


def test_without_sockets_streams_are_missing_and_not_zero() -> None:
    """When no sockets can be read, no series claims that there are no streams."""
    page = render(replace(rich_view(), accounting="none", groups=()))
    names = {name for name, _ in samples(page)}
    assert not {name for name in names if name.startswith("tokengap_stream_age")}
    assert not names & {"tokengap_streams", "tokengap_client_connected_ratio", "tokengap_engine_streams_open"}
    assert "tokengap_streams_ended_total" in names  # counted until now, still true


def test_a_path_without_streams_reads_zero() -> None:
    """Every engine by every hop is there, counters at 0, so that the first increase is seen."""
    page = render(rich_view())
    assert value(page, "tokengap_streams", engine="worker", hop="admit", client="gone") == 0.0
    assert value(page, "tokengap_streams_ended_total", engine="worker", hop="admit", how="orphaned") == 0.0
    assert value(page, "tokengap_tokens_orphaned_total", engine="worker", hop="admit") == 0.0
    assert value(page, "tokengap_client_connected_ratio", engine="worker", hop="admit") == 1.0


def test_connected_ratio_counts_who_can_still_receive() -> None:
    """Connected and stalled clients are there, vanished and gone ones are not: 2 of 4."""
    assert value(render(rich_view()), "tokengap_client_connected_ratio", engine="worker", hop="edge") == 0.5


def test_stream_ages_are_cumulated() -> None:
    """Buckets hold the streams up to a bound, the last one all, and the sum is that of the ages."""
    page = render(rich_view())
    labels = {"engine": "worker", "hop": "edge", "client": "gone"}
    name = "tokengap_stream_age_seconds"
    assert [value(page, f"{name}_bucket", le=le, **labels) for le in ("60.0", "120.0", "3600.0", "+Inf")] == [
        0,
        1,
        1,
        2,
    ]
    assert value(page, f"{name}_gcount", **labels) == 2
    assert value(page, f"{name}_gsum", **labels) == 4061.5


def test_the_ledger_on_the_page_adds_up() -> None:
    """out = useful + orphaned + pending + unattributed can be recomputed from the page."""
    page = render(rich_view())
    out = value(page, "tokengap_tokens_out_total", engine="worker", model="org/model-8b")
    parts = [
        value(page, f"tokengap_tokens_{part}", engine="worker") or 0.0
        for part in ("useful_total", "pending", "unattributed_total")
    ]
    orphaned = sum(v for (name, _), v in samples(page).items() if name == "tokengap_tokens_orphaned_total")
    assert out is not None
    assert sum(parts) + orphaned == pytest.approx(out)


def test_nothing_private_is_on_the_page() -> None:
    """No password, no query of an engine's address, no client address in any label."""
    text = render(rich_view()).text
    for private in (b"secret", b"visitor", b"203.0.113", b"198.51.100", b"51000"):
        assert private not in text


def test_named_page_holds_only_what_was_asked_for() -> None:
    """`name[]` keeps the samples of those names and drops the rest; names of the process's series work too."""
    also = [ProcessCollector(registry=None)]
    page = render_named(
        rich_view(), ["tokengap_queue_age_seconds", "process_open_fds"], as_openmetrics=False, also=also
    )
    assert {s.name for family in parse_text(page.decode()) for s in family.samples} == {
        "tokengap_queue_age_seconds",
        "process_open_fds",
    }
    assert render_named(rich_view(), ["nobody"], as_openmetrics=True) == b"# EOF\n"


def test_counts_and_bounds_agree() -> None:
    """Every distribution of the rich view has a count for each bound and one for what lies above."""
    seen = [s.value for series in SERIES for s in series.read(rich_view()) if isinstance(s.value, Distribution)]
    assert seen
    assert all(len(distribution.counts) == len(distribution.bounds) + 1 for distribution in seen)
