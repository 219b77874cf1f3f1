"""``tokengap chaos``: the command line of the experiments."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tokengap.bundle.site import Site
from tokengap.chaos import mine
from tokengap.chaos.bench import KNOBS, Bench, Plan
from tokengap.chaos.checks import Limits
from tokengap.chaos.clients import Load
from tokengap.chaos.experiments import EXPERIMENTS, Experiment, Options
from tokengap.chaos.gateways import GATEWAYS
from tokengap.chaos.manifests import Cluster, files
from tokengap.chaos.page import html
from tokengap.chaos.report import PASSED, UNPROVEN, Report
from tokengap.chaos.run import Phases, play
from tokengap.chaos.timeline import Timeline
from tokengap.errors import SettingsError, SetupError
from tokengap.lab.demo import Time
from tokengap.lab.stage import run as run_program

_CLUSTER = Cluster()

#: Signals that end a core; SIGSTOP is an experiment of its own.
SIGNALS = ("SIGBUS", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM")


@click.group(short_help="Break it on purpose, and prove what clients saw.")
def chaos() -> None:
    """Break streaming inference on purpose, on a bench of this machine, and prove what its clients saw."""


@chaos.command("list")
def list_experiments() -> None:
    """Show the experiments."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("experiment", "what happens", "lasts", "options", "rehearses"):
        table.add_column(title, overflow="fold")
    for each in EXPERIMENTS.values():
        options = " ".join(map(_flag, each.options))
        needs = " (as root)" if each.network else ""
        table.add_row(each.name, each.summary + needs, f"{each.duration:g} s", options, " ".join(each.rehearses))
    _console().print(table)


_OPTIONS = tuple(option.name for option in fields(Options) if option.name != "window")

#: What means something where no bench is put up.
_OF_MINE = ("engine_pid", "this_is_my_system", "duration", "signal")


@chaos.command("run", short_help="Run one experiment.")
@click.argument("experiment", type=click.Choice(list(EXPERIMENTS)))
@click.option("--through", type=click.Choice(list(GATEWAYS)), default="haproxy", show_default=True)
@click.option("--duration", type=Time(), metavar="TIME", help="Of the fault. Its own by default, see `list`.")
@click.option("--baseline", type=Time(), default="15s", show_default=True, metavar="TIME")
@click.option("--recovery", type=Time(), metavar="TIME", help="Its own by default: 15s, and 2m after a retry-storm.")
@click.option("--seed", default=0, show_default=True, help="Of the clients and the engines.")
@click.option("--users", type=click.IntRange(2), default=16, show_default=True, help="Who ask again and again.")
@click.option("--slots", type=click.IntRange(1), default=KNOBS.max_num_seqs, show_default=True, help="Of each replica.")
@click.option("--read-timeout", type=Time(), default="5s", show_default=True, metavar="TIME", help="Of the gateway.")
@click.option("--window", type=Time(), default="3s", show_default=True, metavar="TIME", help="Of the exporter.")
@click.option("--signal", type=click.Choice(SIGNALS), default="SIGBUS", show_default=True, help="engine-crash")
@click.option(
    "--load", type=Time(), default="10s", show_default=True, metavar="TIME", help="cold-restart: of the model."
)
@click.option(
    "--direction",
    type=click.Choice(["both", "to-engine", "to-gateway"]),
    default="both",
    show_default=True,
    help="partition, reset",
)
@click.option("--after-kb", type=click.IntRange(1), help="partition, reset: once so many kB have gone that way.")
@click.option(
    "--slow-factor", type=click.FloatRange(0, 1, min_open=True), default=0.25, show_default=True, help="slow-engine"
)
@click.option("--clients", type=click.IntRange(1), default=6, show_default=True, help="partition-client: who vanish.")
@click.option(
    "--tokens", type=click.IntRange(1), default=400, show_default=True, help="partition-client: they ask for."
)
@click.option("--gpu-hangs", is_flag=True, help="gpu-lost: the driver hangs instead.")
@click.option(
    "--jitter/--no-jitter", default=False, show_default=True, help="retry-storm: clients pause before retries."
)
@click.option("--max-p99-ratio", type=click.FloatRange(0), default=2.0, show_default=True, help="Times the baseline.")
@click.option("--min-samples", type=click.IntRange(1), default=20, show_default=True, help="For a P99; fewer fail.")
@click.option(
    "--max-token-error",
    type=click.FloatRange(0),
    default=0.01,
    show_default=True,
    help="Useful against received, as a share.",
)
@click.option(
    "--margin", type=Time(), default="1.5s", show_default=True, metavar="TIME", help="Beyond the read timeout."
)
@click.option("--max-attempts", type=click.FloatRange(1), default=1.5, show_default=True, help="Over unique requests.")
@click.option("--queue-within", type=Time(), default="2m", show_default=True, metavar="TIME")
@click.option("--max-cold-start", type=Time(), metavar="TIME", help="Only shown by default.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the report goes, and what the parts write. A new one in tokengap-chaos/ by default.",
)
@click.option(
    "--engine-pid", type=click.IntRange(2), metavar="PID", help="Break this engine instead. With the next only."
)
@click.option("--this-is-my-system", is_flag=True, help="It is, and I may break it: engine-crash and engine-freeze.")
@click.option("--keep", is_flag=True, help="Leave everything up afterwards, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def run(context: click.Context, /, experiment: str, **given: Any) -> None:
    """Put up two replicas behind a gateway, clients and the exporter; break something, heal it, and judge.

    Exits with 0 when everything that was promised held, with 1 when a validation failed, with 2 when something is
    missing or wrong, and with 3 when the fault could not be shown to be there, or to be gone.
    """
    chosen = EXPERIMENTS[experiment]
    default = click.core.ParameterSource.DEFAULT
    by_hand = [name for name in given if context.get_parameter_source(name) is not default]
    for name in by_hand:
        if name in _OPTIONS and name not in chosen.options:
            raise SettingsError(f"{_flag(name)}: {experiment} has no such option; see tokengap chaos list")
    now = datetime.now(tz=UTC).astimezone()
    if given["engine_pid"] is not None or given["this_is_my_system"]:
        for name in by_hand:
            if name not in _OF_MINE:
                raise SettingsError(f"{_flag(name)} is of the bench; an engine of your own takes --duration, --signal")
        sys.exit(_break_mine(experiment, chosen.duration, **given))
    out = _directory(given["out"] or Path("tokengap-chaos") / f"{now:%Y%m%d-%H%M%S}-{experiment}-{given['through']}")
    report = run_program(_play(chosen, given, out))
    sys.exit(report.code)


async def _play(experiment: Experiment, given: dict[str, Any], out: Path) -> Report:
    options = Options(
        signal=signal.Signals[given["signal"]],
        window=given["window"],
        **{name: given[name] for name in _OPTIONS if name != "signal"},
    )
    plan = Plan(
        through=given["through"],
        load=Load(users=given["users"]),
        retries=experiment.retries(options),
        knobs=replace(KNOBS, max_num_seqs=given["slots"]),
        read_timeout=given["read_timeout"],
        window=given["window"],
        seed=given["seed"],
        gpus=experiment.gpus,
    )
    limits = Limits(
        p99_ratio=given["max_p99_ratio"],
        samples=given["min_samples"],
        tokens=given["max_token_error"],
        read_timeout=given["read_timeout"],
        margin=given["margin"],
        attempts=given["max_attempts"],
        queue_within=given["queue_within"],
        cold_start=given["max_cold_start"],
    )
    phases = Phases(
        given["baseline"], given["duration"] or experiment.duration, given["recovery"] or experiment.recovery
    )
    timeline = Timeline(say)
    timeline.note("note", f"{experiment.name} through {plan.through}: {experiment.summary}")

    async def after(report: Report, bench: Bench) -> None:
        path = out / "report.html"
        path.write_text(html(report))
        path.with_suffix(".json").write_text(report.dumps())
        if given["as_json"]:
            click.echo(report.dumps(), nl=False)
        else:
            report.print(_console())
        say(f"report: {path} (and .json)")
        if given["keep"]:
            say(f"kept: {bench.where()}; Ctrl-C takes it down")
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    return await play(experiment, options, plan, phases, limits, timeline, out, after)


def _break_mine(
    experiment: str,
    usual: float,
    /,
    engine_pid: int | None,
    this_is_my_system: bool,
    duration: float | None,
    **given: Any,
) -> int:
    """Break an engine of the user's own. Returns the exit code."""
    if engine_pid is None or not this_is_my_system:
        raise SettingsError("an engine of your own is broken with both of --engine-pid, --this-is-my-system")
    timeline, seconds = Timeline(say), duration or usual
    if experiment == "engine-freeze":
        shown = run_program(mine.freeze(engine_pid, seconds, timeline))
    elif experiment == "engine-crash":
        shown = run_program(mine.crash(engine_pid, signal.Signals[given["signal"]], seconds, timeline))
    else:
        raise SettingsError(f"--engine-pid: {experiment} is for the bench only; expected engine-crash or engine-freeze")
    return PASSED if shown else UNPROVEN


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def say(text: str) -> None:
    """Tell a person something, on standard error: standard output is the result."""
    click.echo(text, err=True)


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 160  # of a pipe nothing is known, and a table must not be folded
    return console


@chaos.command("manifests", short_help="Render the same experiments for clusters and CI.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR")
@click.option("--namespace", default=_CLUSTER.namespace, show_default=True, help="Of engines and gateway.")
@click.option("--engines", default=_CLUSTER.engines, show_default=True, metavar="LABEL=VALUE", help="Of their pods.")
@click.option("--gateway", default=_CLUSTER.gateway, show_default=True, metavar="LABEL=VALUE", help="Of its pods.")
@click.option("--container", default=_CLUSTER.container, show_default=True, help="Of the engine in its pod.")
@click.option("--prometheus", default=_CLUSTER.prometheus, show_default=True, metavar="URL")
@click.option("--gateway-health", default=_CLUSTER.gateway_health, show_default=True, metavar="URL")
@click.option("--duration", default=_CLUSTER.duration, show_default=True, help="Seconds of each fault.")
def manifests(out: Path, **given: Any) -> None:
    """Write LitmusChaos and Chaos Mesh objects, the recording rules that their probes ask, and CI jobs.

    Existing files of the same names are replaced.
    """
    for label in ("engines", "gateway"):
        if not re.fullmatch(r"[\w./-]+=[\w.-]+", given[label]):
            raise SettingsError(f"--{label} {given[label]!r}; expected a label such as app=vllm")
    try:
        for file in files(Site(), Cluster(**given)):
            path = out / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
            click.echo(path)
    except OSError as error:
        raise SetupError(f"--out {out}: {error.strerror}") from error


def _directory(out: Path) -> Path:
    """Make the directory of a report. SetupError when it cannot be, SettingsError when something is in it already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise SettingsError(f"--out {out}: something is in it already; expected a directory that is new or empty")
    except OSError as error:
        raise SetupError(f"--out {out}: {error.strerror}") from error
    return out.absolute()
