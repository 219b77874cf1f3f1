"""The command: what to look at, how, what to say about it and with which code to end.

A code that means a restart must never come from anything but a verdict: wrong arguments end with 64 and a failure of
this program with 70 (sysexits.h), where other commands of tokengap end with 2 and Python itself with 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from tokengap.config.flags import Value
from tokengap.config.values import Seconds, Url
from tokengap.errors import TokengapError
from tokengap.health.access import Access, checked_key, read_key, tls_context
from tokengap.health.ask import Asked, ask
from tokengap.health.look import Look, Plan, Verdict, look_at_proxy
from tokengap.health.others import Connections
from tokengap.logs import without_secrets

#: Verdicts that end with a code of their own, the worst first: what one look can prove and a restart cures, then what
#: a supervisor sees by itself, then what nobody knows.
CODES: Final[dict[Verdict, int]] = {"stuck": 1, "dead": 2, "blind": 3}

#: sysexits.h: the command was used incorrectly; an internal software error.
USAGE, SOFTWARE = 64, 70

KEY_VARIABLE: Final = "TOKENGAP_API_KEY"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found at one address. ``url`` is without credentials."""

    url: str
    kind: str
    verdict: Verdict
    evidence: str
    exit_code: int
    reads: int
    seconds: float
    restarts: int
    asked: Asked | None

    @property
    def line(self) -> str:
        """All of it that a person needs."""
        said = "" if self.asked is None else f"; {self.asked.said}"
        return f"{self.url} {self.verdict}: {self.evidence}{said}"


def exit_code(verdicts: Iterable[Verdict], fail_on: Sequence[Verdict] = tuple(CODES)) -> int:
    """Return the code of the worst verdict among those that count; 0 when there is none."""
    found = set(verdicts)
    return next((code for verdict, code in CODES.items() if verdict in found and verdict in fail_on), 0)


class Misused(click.UsageError):
    """Wrong arguments."""

    exit_code = USAGE


class Failed(click.UsageError):
    """A failure of this program: a bug, or a host on which it cannot run."""

    exit_code = SOFTWARE


class HealthCommand(click.Command):
    """A command whose exit codes are verdicts, so that whatever else ends it needs codes of its own."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the arguments."""
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise Misused(error.format_message(), error.ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run."""
        try:
            return super().invoke(ctx)
        except (TokengapError, click.UsageError) as error:
            raise Misused(str(error), ctx) from None
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            raise Failed(f"failed: {type(error).__name__}: {error}", ctx) from error


class _Verdicts(click.ParamType[Any]):
    """Verdicts that fail, separated by commas."""

    name = "VERDICTS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read them."""
        if isinstance(value, tuple):
            return value
        words = tuple(word.strip() for word in value.split(","))
        if unknown := [word for word in words if word not in CODES]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(CODES)}", param, ctx)
        return words


@click.command(cls=HealthCommand)
@click.argument("urls", metavar="URL...", nargs=-1, type=Value(Url))
@click.option("--proxy", "proxies", multiple=True, type=Value(Url), help="Ask a proxy for /v1/models, and no more.")
@click.option(
    "--window",
    type=Value(Seconds),
    default="10s",
    show_default=True,
    help="One window without progress; two make an engine stuck.",
)
@click.option(
    "--prefill-budget",
    type=Value(Seconds),
    help="How long an engine that shows nothing may be computing a prompt: look for so long before it is stuck. "
    "[default: two windows]",
)
@click.option("--timeout", type=Value(Seconds), default="5s", show_default=True, help="For one read of a page.")
@click.option("--ask", "asking", is_flag=True, help="Send an engine that is at rest one completion of one token.")
@click.option(
    "--ask-deadline", type=Value(Seconds), default="45s", show_default=True, help="Until that has to be answered."
)
@click.option(
    "--fail-on",
    type=_Verdicts(),
    default=",".join(CODES),
    show_default=True,
    help="The verdicts that do not end with 0.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help=f"The file that holds the API key. {KEY_VARIABLE} may hold it as well.",
)
@click.option("--ca-file", type=click.Path(path_type=Path), help="Authorities that TLS certificates are checked with.")
@click.option("--insecure-skip-verify", is_flag=True, help="Do not check TLS certificates.")
def health(
    urls: tuple[str, ...],
    proxies: tuple[str, ...],
    window: float,
    prefill_budget: float | None,
    timeout: float,
    asking: bool,
    ask_deadline: float,
    fail_on: tuple[Verdict, ...],
    as_json: bool,
    api_key_file: Path | None,
    ca_file: Path | None,
    insecure_skip_verify: bool,
) -> None:
    """Say whether engines work, from their own counters: one look of a moment, or of two windows at most.

    \b
    Exit codes, with several engines that of the worst, in this order:
      1  stuck: work in flight, and no progress in two windows
      2  dead: the connection is refused
      3  blind: it cannot be told
      0  busy, idle, sleeping, restarted
     64  wrong arguments;  70  this program failed
    """
    if not urls and not proxies:
        raise click.UsageError("nothing to look at: name an engine, such as http://127.0.0.1:8000, or a --proxy")
    if ca_file is not None and insecure_skip_verify:
        raise click.UsageError("--ca-file and --insecure-skip-verify exclude each other")
    access = Access(_key(api_key_file), tls_context(ca_file, verify=not insecure_skip_verify))
    plan = Plan(window, timeout, prefill_budget, ask_deadline if asking else None)

    show = (lambda _: None) if as_json else lambda finding: click.echo(finding.line)
    tell = _tell_terminal if sys.stderr.isatty() else lambda _: None
    findings = asyncio.run(look_at_all(urls, proxies, access, plan, show, tell))
    code = exit_code((finding.verdict for finding in findings), fail_on)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"exit_code": code, "findings": rows}, indent=2, ensure_ascii=False))
    sys.exit(code)


def _key(file: Path | None) -> str:
    if file is not None:
        return read_key(file)
    key = os.environ.get(KEY_VARIABLE, "")
    return checked_key(key, KEY_VARIABLE) if key else ""


def _tell_terminal(text: str) -> None:
    click.echo(text, err=True)


async def look_at_all(
    urls: Sequence[str],
    proxies: Sequence[str],
    access: Access,
    plan: Plan,
    show: Callable[[Finding], None],
    tell: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Look at everything at once and return what was found in the order asked; ``show`` gets each as it is known."""
    connections = Connections()

    async def one(url: str, *, proxy: bool) -> Finding:
        finding = await (_proxy(url, access, plan) if proxy else _engine(url, access, plan, connections, tell))
        show(finding)
        return finding

    try:
        return await asyncio.gather(
            *(one(url, proxy=False) for url in urls), *(one(url, proxy=True) for url in proxies)
        )
    finally:
        connections.close()


async def _engine(
    url: str, access: Access, plan: Plan, connections: Connections, tell: Callable[[str], None]
) -> Finding:
    began, shown = time.monotonic(), without_secrets(url)
    async with access.session(url) as session:
        look = Look(url, session, plan, connections, lambda text: tell(f"{shown} {access.clean(text)}"))
        judgement = await look.decide()
        asked = None
        if plan.ask_within is not None:
            judgement, asked = await ask(look, judgement, plan.ask_within)
    if asked is not None:
        asked = Asked(asked.sent, asked.model, asked.status, asked.seconds, access.clean(asked.said))
    return Finding(
        url=shown,
        kind="engine",
        verdict=judgement.state,
        evidence=access.clean(judgement.evidence),
        exit_code=exit_code([judgement.state]),
        reads=look.reads,
        seconds=round(time.monotonic() - began, 3),
        restarts=judgement.restarts,
        asked=asked,
    )


async def _proxy(url: str, access: Access, plan: Plan) -> Finding:
    began = time.monotonic()
    verdict, evidence = await look_at_proxy(url, access, plan)
    return Finding(
        url=without_secrets(url),
        kind="proxy",
        verdict=verdict,
        evidence=access.clean(evidence),
        exit_code=exit_code([verdict]),
        reads=1,
        seconds=round(time.monotonic() - began, 3),
        restarts=0,
        asked=None,
    )
