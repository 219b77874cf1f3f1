"""``tokengap bundle``: write the rules, dashboards and runbooks of a site, or compare them with what is there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from tokengap.bundle import files
from tokengap.bundle.promql import percent
from tokengap.bundle.render import render
from tokengap.bundle.site import Site
from tokengap.config import load
from tokengap.config.flags import Value, options
from tokengap.config.values import Seconds
from tokengap.errors import SettingsError, SetupError

#: Said wherever files are not as they should be.
CURE: Final = "run `tokengap bundle` with the options in the files' first lines (here: `make bundle`)"


def write(site: Site, out: Path, *, force: bool) -> str:
    """Write the bundle below a folder, and return what was done.

    Raises SetupError for a file that was edited by hand, unless ``force``, having shown the difference.
    """
    wanted = files.changes(render(site), out, site.options)
    if not force:
        _refuse_to_lose([change for change in wanted if change.by_hand])
    files.apply(wanted)
    removed = sum(change.wanted is None for change in wanted)
    return f"{out}: {len(wanted) - removed} written, {removed} removed"


def compare(site: Site, out: Path) -> bool:
    """Say how what lies below a folder differs from the bundle. True when it does not."""
    different = files.changes(render(site), out, site.options)
    for change in different:
        click.echo(change)
        click.echo(change.difference, nl=False)
    return not different


def _refuse_to_lose(edited: list[files.Change]) -> None:
    for change in edited:
        click.echo(change.difference, nl=False)
    if edited:
        names = ", ".join(str(change.path) for change in edited)
        raise SetupError(
            f"{names}: edited by hand, as shown above; move the change into the options, or lose it with --force"
        )


def _labels(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    for key, equals, value in pairs:
        if not key or not equals or not value:
            raise SettingsError(f"--label {key + equals + value!r}; expected KEY=VALUE, such as release=prometheus")
    return {key: value for key, _, value in pairs}


_USUAL: Final = Site()


def _text(flag: str, name: str, metavar: str, meaning: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(flag, name, metavar=metavar, default=getattr(_USUAL, name), show_default=True, help=meaning)


class Share(click.ParamType[float]):
    """A part of a whole."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read ``1%``, or what is one already."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*%", value.strip(), re.ASCII)
        if match is None:
            self.fail(f"{value!r} is not a share such as 1% or 0.5%", param, ctx)
        return float(match[1]) / 100


def _share(flag: str, name: str, meaning: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    usual = percent(getattr(_USUAL, name))
    return click.option(flag, name, type=Share(), metavar="SHARE", default=usual, show_default=True, help=meaning)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder in which to write.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 and show how the files there differ.")
@click.option("--force", is_flag=True, help="Write over files that were edited by hand.")
@options("interval", "deadline", "age_cut", "window")
@click.option("--scrape", type=Value(Seconds), default="5s", show_default=True, help="How often Prometheus scrapes.")
@_share("--orphan-budget", "orphan_budget", "Of the tokens of 30 days, how many may be for nobody.")
@_share("--deadline-budget", "deadline_budget", "Of 30 days, for how long deadlines may be missed.")
@_text("--job", "job", "NAME", "The exporter's scrape job in Prometheus.")
@_text("--selector", "selector", "MATCHERS", 'What every query is limited to, such as cluster="a".')
@_text("--runbook-base", "runbooks", "URL", "Where runbooks can be read; {alert} in it stands for the alert.")
@_text("--dashboard-base", "dashboards", "URL", "Grafana.")
@_text("--exporter-url", "exporter", "URL", "The exporter, in the commands of runbooks.")
@_text("--engine-url", "engine", "URL", "An engine, in the commands of runbooks.")
@_text("--prometheus-url", "prometheus", "URL", "Prometheus, in the commands of runbooks.")
@_text("--owner", "owner", "WHO", "Who is called, as runbooks name them.")
@_text("--namespace", "namespace", "NAME", "Of the Kubernetes objects.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Of the Kubernetes objects, further ones.")
def bundle(
    out: Path,
    check: bool,
    force: bool,
    config: Path | None,
    interval: str | None,
    deadline: str | None,
    age_cut: str | None,
    window: str | None,
    labels: tuple[str, ...],
    **rest: Any,
) -> None:
    """Write alert rules, dashboards and runbooks with this site's own numbers and addresses.

    Rules, thresholds of panels and words of runbooks come from one description, and change together.
    """
    flags = {"interval": interval, "deadline": deadline, "age_cut": age_cut, "window": window}
    settings = load(config, os.environ, flags)
    site = Site(
        deadline=settings.deadline,
        age_cut=settings.age_cut,
        window=settings.window,
        beat=settings.interval,
        labels=_labels(labels),
        **rest,
    )
    if not check:
        click.echo(write(site, out, force=force))
    elif not compare(site, out):
        click.echo(f"{out}: not as rendered: {CURE}", err=True)
        sys.exit(1)
