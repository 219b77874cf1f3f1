"""The catalogue: every series described, named by the rules, and written down in docs/series.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from series.example import rich_view
from tokengap.series import SERIES
from tokengap.series.__main__ import CURE, catalogue, main
from tokengap.series.declare import Series
from tokengap.series.engines import public_url

#: All labels that a series may have. Each one's values are configured, or a fixed list.
BOUNDED = {
    *("engine", "hop", "client", "class", "model", "how", "state", "source", "target", "mode", "reason", "url"),
    *("version", "python", "currency", "basis", "by", "family", "kind"),
    *("uuid", "index", "name", "pci", "driver", "parent", "way", "scope", "action", "xid"),
    *("decision", "before", "event", "after"),
}

each = pytest.mark.parametrize("series", SERIES, ids=str)


@each
def test_every_series_is_explained(series: Series) -> None:
    """HELP is at least six words, one line, and ends as a sentence does."""
    assert len(series.help.split()) >= 6
    assert "\n" not in series.help
    assert "|" not in series.help  # it would break the table in docs/series.md
    assert series.help.endswith(".")


@each
def test_names_follow_the_conventions(series: Series) -> None:
    """Prefixed, and `_total` on counters and nowhere else."""
    assert series.name.startswith("tokengap_")
    assert series.name.endswith("_total") == (series.kind == "counter")


@each
def test_labels_are_bounded_and_filled(series: Series) -> None:
    """Labels are from the list of bounded ones, and every sample has a value for each."""
    assert set(series.labels) <= BOUNDED
    for sample in series.read(rich_view()):
        assert len(sample.labels) == len(series.labels)
        assert all(isinstance(label, str) for label in sample.labels)


@each
def test_every_series_has_a_sample_in_the_rich_view(series: Series) -> None:
    """The hand-made view leaves no series untested."""
    assert list(series.read(rich_view()))


def test_names_are_unique() -> None:
    """No two series share a name."""
    assert len({series.name for series in SERIES}) == len(SERIES)


def test_a_series_reads_as_its_name_in_an_expression() -> None:
    """Expressions are f-strings of the values, so a rename cannot leave one behind."""
    assert [f"rate({series}[5m])" for series in SERIES] == [f"rate({series.name}[5m])" for series in SERIES]


def test_the_distribution_says_how_not_to_use_it() -> None:
    """A gauge histogram looks like a histogram to PromQL: its HELP warns of rate()."""
    (ages,) = [series for series in SERIES if series.kind == "gaugehistogram"]
    assert "now, not since start: never rate()" in ages.help


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://me:secret@engine.example:8443/v1/metrics?token=secret#x", "https://engine.example:8443/v1/metrics"),
        ("http://a:b@c@[2001:db8::1]:80/metrics", "http://[2001:db8::1]:80/metrics"),
    ],
)
def test_public_url_hides_credentials(url: str, public: str) -> None:
    """What could be a secret is cut off, the address stays."""
    assert public_url(url) == public


def test_docs_are_up_to_date() -> None:
    """docs/series.md is what SERIES says."""
    written = (Path(__file__).parents[2] / "docs" / "series.md").read_text()
    assert written == catalogue(), CURE


def test_drift_is_found_and_cured(tmp_path: Path) -> None:
    """`--check` passes on what was written, and fails naming the cure once it differs."""
    path = tmp_path / "series.md"
    run = CliRunner().invoke
    assert run(main, [str(path)]).exit_code == 0
    assert run(main, ["--check", str(path)]).exit_code == 0
    path.write_text(path.read_text() + "more\n")
    drifted = run(main, ["--check", str(path)])
    assert drifted.exit_code == 1
    assert CURE in drifted.output
