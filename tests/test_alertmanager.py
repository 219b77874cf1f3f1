"""The ready-made configurations of Prometheus and Alertmanager: what their own tools say, and what a person is told."""

from __future__ import annotations

import asyncio
import email
import email.policy
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiosmtpd.smtp import SMTP

from deployed import ALERTMANAGER, PROMETHEUS, alertmanager_config
from monitoring import Pager, alertmanager, paged, redirected
from tokengap.lab.parts import LOOPBACK, free_port

pytestmark = pytest.mark.e2e

RUNBOOK, DASHBOARD = (
    "https://runbooks.example.org/TokengapEngineDead.md",
    "https://grafana.example.org/d/tokengap-oncall",
)


def say(*command: object) -> tuple[int, str]:
    """Run a tool of Debian's; return its code and what it said."""
    name = str(command[0])
    package = {"promtool": "prometheus", "amtool": "prometheus-alertmanager"}[name]
    assert shutil.which(name), f"{name} is not installed: apt-get install {package}"
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_promtool_accepts_the_configuration():
    code, said = say("promtool", "check", "config", PROMETHEUS)
    assert code == 0, said


def test_amtool_accepts_the_configuration_and_its_templates():
    code, said = say("amtool", "check-config", ALERTMANAGER)
    assert code == 0, said
    assert "1 templates" in said


@pytest.mark.parametrize(
    ("receiver", "severity"),
    [("pager", "critical"), ("tickets", "warning"), ("nobody", "info"), ("tickets", "page"), ("tickets", "")],
)
def test_who_is_told(receiver: str, severity: str):
    """A page, a ticket, nobody; and a severity that nobody thought of is a ticket."""
    labels = [f"severity={severity}"] if severity else []
    code, said = say(
        *("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}"),
        *(f"--verify.receivers={receiver}", *labels, "alertname=TokengapQueueWillMissDeadline"),
    )
    assert code == 0, said


def test_no_wait_on_the_critical_route_only():
    route = yaml.safe_load(ALERTMANAGER.read_text())["route"]
    waits = {child["receiver"]: child["group_wait"] for child in route["routes"] if "group_wait" in child}
    assert waits == {"pager": "0s"}
    assert route["group_wait"] == "30s"


# --- what it does -------------------------------------------------------------------------------------------------


class Mailbox:
    """A mail server's inside: keeps the mail that came."""

    def __init__(self) -> None:
        self.mail: asyncio.Future[EmailMessage] = asyncio.get_running_loop().create_future()

    async def handle_DATA(self, _server, _session, envelope) -> str:  # noqa: N802 - the name that aiosmtpd calls
        self.mail.set_result(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return "250 OK"


@dataclass
class Told:
    """A running Alertmanager with our configuration, and all to whom it may speak."""

    url: str
    pager: Pager
    mailbox: Mailbox
    session: aiohttp.ClientSession

    async def post(self, alert: str, *, over: bool = False, **labels: str) -> None:
        """Tell it of an alert, as Prometheus does: it fires for a minute, or has just ended."""
        now = datetime.now(UTC)
        said = {
            "labels": {"alertname": alert, **labels},
            "annotations": {
                "summary": "An engine does not answer.",
                "description": f"The engine {labels.get('engine', '')} refuses connections.",
                "runbook_url": RUNBOOK,
                "dashboard_url": DASHBOARD,
            },
            "startsAt": (now - timedelta(seconds=1)).isoformat(),
            "endsAt": (now if over else now + timedelta(minutes=1)).isoformat(),
        }
        async with self.session.post(f"{self.url}/api/v2/alerts", json=[said]) as answer:
            assert answer.status == 200, await answer.text()

    async def silenced(self) -> dict[str, bool]:
        """Which of the alerts that it has are silenced by another."""
        async with self.session.get(f"{self.url}/api/v2/alerts") as answer:
            return {each["labels"]["alertname"]: bool(each["status"]["inhibitedBy"]) for each in await answer.json()}


@asynccontextmanager
async def told(directory: Path) -> AsyncIterator[Told]:
    """Run an Alertmanager with our configuration and templates, in which only what lasts longer than a test is shorter:
    the wait for tickets, and that for the next message about the same."""
    config = alertmanager_config(directory)
    config["route"]["group_wait"] = config["route"]["routes"][0]["group_interval"] = "1s"
    pager, mailbox, port = Pager(), Mailbox(), free_port()
    smtp = await asyncio.get_running_loop().create_server(lambda: SMTP(mailbox), LOOPBACK, port)
    async with (
        smtp,
        paged(pager) as address,
        alertmanager(redirected(config, address, f"{LOOPBACK}:{port}"), directory) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Told(url, pager, mailbox, session)


async def test_the_runbook_comes_first(tmp_path: Path):
    """To the pager at once, by PagerDuty and Slack, and as a ticket by mail; and what a webhook gets names it."""
    async with told(tmp_path) as am:
        sent = time.monotonic()
        await am.post("TokengapEngineDead", severity="critical", cluster="a", engine="gpu1:8000", instance="b:1")
        page = await am.pager.until(lambda n: n.tells("TokengapEngineDead", "firing"), 10)
        assert page.at - sent < 5, "the critical route waited"
        assert page.body["commonAnnotations"]["runbook_url"] == RUNBOOK
        await am.pager.until(lambda n: n.channel == "slack", 10)
        await am.pager.until(lambda n: n.channel == "pagerduty", 10)
        title = "[CRITICAL] TokengapEngineDead gpu1:8000 (a)"

        ((attachment,),) = (body["attachments"] for body in am.pager.of("slack"))
        assert attachment["title"] == title
        assert attachment["title_link"] == RUNBOOK
        assert attachment["text"].splitlines() == [
            f"Runbook: {RUNBOOK}",
            "An engine does not answer.",
            "The engine gpu1:8000 refuses connections.",
            f"Dashboard: {DASHBOARD}",
        ]
        assert [action["url"] for action in attachment["actions"]] == [RUNBOOK, DASHBOARD]

        (incident,) = am.pager.of("pagerduty")
        assert incident["event_action"] == "trigger"
        assert incident["payload"]["summary"] == title
        assert incident["links"][0] == {"href": RUNBOOK, "text": "Runbook"}
        assert incident["payload"]["custom_details"]["firing"].startswith(f"Runbook: {RUNBOOK}\n")

        await am.post("TokengapEngineBlind", severity="warning", cluster="a", engine="gpu2:8000")
        mail = await asyncio.wait_for(am.mailbox.mail, 10)
        assert mail["Subject"] == "[WARNING] TokengapEngineBlind gpu2:8000 (a)"
        assert mail["To"] == "oncall@example.org"
        text, html = (mail.get_body((kind,)) for kind in ("plain", "html"))
        assert text is not None
        assert text.get_content().startswith(f"Runbook: {RUNBOOK}")
        assert html is not None
        assert html.get_content().startswith(f'<p><a href="{RUNBOOK}">')


async def test_two_exporters_that_watch_one_engine_are_one_page(tmp_path: Path):
    """One message, or a second in the same conversation with the same key, never a second incident; and its end is told
    once both say so."""
    async with told(tmp_path) as am:
        for instance in ("one:10788", "two:10788"):
            await am.post("TokengapEngineDead", severity="critical", cluster="a", engine="e", instance=instance)
        await am.pager.until(lambda n: n.tells("TokengapEngineDead", "firing"), 10)
        for instance in ("one:10788", "two:10788"):
            await am.post(
                "TokengapEngineDead", over=True, severity="critical", cluster="a", engine="e", instance=instance
            )
        await am.pager.until(lambda n: n.channel == "pagerduty" and n.body["event_action"] == "resolve", 10)
        assert len({incident["dedup_key"] for incident in am.pager.of("pagerduty")}) == 1


#: A dead engine, an exporter that is down, and what each silences of the warnings beside them.
SILENCED: list[tuple[dict[str, str], dict[str, str], bool]] = [
    ({"alert": "TokengapEngineDead", "engine": "e"}, {"alert": "TokengapCoverageLow", "engine": "e"}, True),
    ({"alert": "TokengapEngineDead", "engine": "e"}, {"alert": "TokengapCoverageLow", "engine": "f"}, False),
    # Neither has the label that they should share: equal, for Alertmanager.
    ({"alert": "TokengapEngineDead"}, {"alert": "TokengapGpuThrottled", "uuid": "u"}, False),
    # The same name in another cluster is another engine.
    (
        {"alert": "TokengapEngineDead", "engine": "e", "cluster": "a"},
        {"alert": "TokengapCoverageLow", "engine": "e", "cluster": "b"},
        False,
    ),
    (
        {"alert": "TokengapDown", "job": "tokengap", "instance": "i"},
        {"alert": "TokengapSourceFailing", "job": "tokengap", "instance": "i"},
        True,
    ),
    (
        {"alert": "TokengapDown", "job": "tokengap", "instance": "i"},
        {"alert": "TokengapSourceFailing", "job": "tokengap", "instance": "k"},
        False,
    ),
    ({"alert": "TokengapDown", "job": "tokengap"}, {"alert": "TokengapCoverageLow", "job": "tokengap"}, False),
    # Not ours.
    ({"alert": "TokengapEngineDead", "engine": "e"}, {"alert": "DieselLow", "engine": "e"}, False),
]


async def test_what_silences_what(tmp_path: Path):
    """The cause silences warnings about the same engine, or from the same exporter, and nothing that merely lacks the
    same labels."""
    async with told(tmp_path) as am:
        for cause, warning, expected in SILENCED:
            for over in (False, True):
                await am.post(severity="critical", over=over, **cause)
                await am.post(severity="warning", over=over, **warning)
                if not over:
                    assert (await am.silenced())[warning["alert"]] is expected, (cause, warning)


async def test_a_critical_alert_is_never_silenced(tmp_path: Path):
    """Its end would not be told, and the incident stay open at the pager."""
    async with told(tmp_path) as am:
        for alert in ("TokengapQueueWillMissDeadline", "TokengapEngineStuck"):
            await am.post(alert, severity="critical", engine="e", job="tokengap", instance="i")
        await am.post("TokengapDown", severity="critical", job="tokengap", instance="i")
        assert not any((await am.silenced()).values())
