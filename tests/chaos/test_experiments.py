"""The experiments as a list: they hang together with the alerts, and each long one does what it says.

The long tests print how each came out, and how long alerts took::

    pytest -m long -rP tests/chaos/test_experiments.py
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.sites import DEFAULT
from chaos import story
from chaos.alerting import CASES
from lab.commands import tokengap
from tokengap.bundle.watches import watches
from tokengap.chaos.checks import Limits, Verdict, checks
from tokengap.chaos.experiments import EXPERIMENTS

CRITICAL = {watch.name: watch for watch in watches(DEFAULT) if watch.severity == "critical"}

#: Everything through these, and what differs elsewhere or by an option.
RUNS = (
    *((experiment, "--through", through) for through in ("haproxy", "envoy") for experiment in EXPERIMENTS),
    ("engine-crash", "--through", "admit"),
    ("engine-freeze", "--through", "admit", "--read-timeout", "10s"),
    ("partition", "--through", "admit"),
    ("partition-client", "--through", "nginx", "--tokens", "4000"),
    ("partition", "--direction", "to-gateway"),
    ("partition", "--direction", "to-engine"),
    ("partition", "--after-kb", "30"),
    ("reset", "--after-kb", "30"),
    ("gpu-lost", "--gpu-hangs"),
)

#: Validations that fail, or may, because that is how these gateways and this exporter are; docs/chaos.md says why. Any
#: other failure is news. By experiment, whatever it goes through, and by the whole run.
KNOWN: dict[str, set[str]] = {
    "engine-freeze": {"first-token-p99", "inter-token-p99", "next-request", "in-flight"},
    "slow-engine": {"first-token-p99", "inter-token-p99"},
    "engine-crash": {"tokens-agree"},
    "reset": {"tokens-agree"},
    "retry-storm": {"retry-storm", "in-flight", "tokens-agree"},
    "cold-restart": {"tokens-agree"},
    "partition": {"tokens-agree"},
    "partition --through admit": {"first-token-p99"},
    "partition-client --through nginx --tokens 4000": {"orphans-let-go", "tokens-agree"},
}


def test_what_rings_a_pager_is_rehearsed():
    """By an experiment that says the same, with a command that can be typed."""
    for name, watch in CRITICAL.items():
        experiment = shlex.split(watch.rehearsal)[0]
        assert name in EXPERIMENTS[experiment].rehearses
        assert CASES[name].experiment == experiment
    rehearsed = {name for experiment in EXPERIMENTS.values() for name in experiment.rehearses}
    assert rehearsed == set(CRITICAL) == set(CASES)


def test_options_are_options_of_the_command():
    """And mean something to some experiment."""
    from tokengap.chaos.command import run

    flags = {name for option in run.params for name in option.opts}
    for experiment in EXPERIMENTS.values():
        assert {f"--{option.replace('_', '-')}" for option in experiment.options} <= flags


def test_all_that_can_be_asked_for_is_in_the_docs():
    """Experiments, options and validations, by the names under which they are typed and printed."""
    from tokengap.chaos.command import manifests, run

    text = (Path(__file__).parent.parent.parent / "docs/chaos.md").read_text()
    options = [name for command in (run, manifests) for option in command.params for name in option.opts]
    flags = [name for name in options if name.startswith("--")]
    names = [check.name for check in checks(story.run(), Limits(), Verdict(frozenset({"idle"})))]
    assert [name for name in (*EXPERIMENTS, *flags, *names) if f"`{name}" not in text and f"{name} " not in text] == []


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("alert", CRITICAL)
async def test_its_experiment_makes_it_fire(alert: str):
    """A real Prometheus says so, with the rules as they are rendered; it says nothing before."""
    tests = Path(__file__).parent.parent
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "chaos.alerting", alert), cwd=tests, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    print(f"{alert}: fires {out.decode().strip()} s after {CASES[alert].experiment}")


async def failing(*arguments: str, out: Path) -> set[str]:
    """Return the validations that fail in a run, in which the fault is there and goes away."""
    ran = await tokengap("chaos", "run", *arguments, "--max-p99-ratio", "3", "--out", out, within=400)
    assert ran.code in (0, 1), str(ran)
    checks = json.loads((out / "report.json").read_text())["checks"]
    failed = {check["name"] for check in checks if check["judged"] and not check["passed"]}
    print(f"{' '.join(arguments)}: exit {ran.code}, {', '.join(sorted(failed)) or 'all validations hold'}\n{ran.out}")
    return failed


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
async def test_an_experiment_says_what_is_known(arguments: tuple[str, ...], tmp_path: Path):
    """The fault is there and goes away, and nothing fails but what is known to."""
    known = KNOWN.get(arguments[0], set()) | KNOWN.get(" ".join(arguments), set())
    assert await failing(*arguments, out=tmp_path / "report") <= known


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_pauses_at_random_keep_a_storm_small(tmp_path: Path):
    """Clients who ask again with jitter make at most half as many attempts more; at once, many times as many."""
    assert "retry-storm" not in await failing("retry-storm", "--jitter", out=tmp_path / "jitter")
    assert "retry-storm" in await failing("retry-storm", "--recovery", "15s", out=tmp_path / "at once")
