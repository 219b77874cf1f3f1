"""What the demo's pager prints of what Alertmanager posts."""

from __future__ import annotations

import json

import aiohttp
import pytest

from lab.serving import served
from tokengap.lab.pager import pager_app

#: As Alertmanager 0.25 posts it, with less in it.
MESSAGE = {
    "version": "4",
    "status": "firing",
    "receiver": "printer",
    "alerts": [
        {
            "status": "firing",
            "labels": {
                "alertname": "TokengapEngineDead",
                "severity": "critical",
                "engine": "worker",
                "job": "tokengap",
            },
            "annotations": {"summary": "An engine is dead.", "runbook_url": "https://runbooks/TokengapEngineDead.md"},
            "fingerprint": "5ef7",
        },
        {"status": "resolved", "labels": {"alertname": "Other"}, "annotations": {}},
    ],
}


async def post(body: bytes) -> tuple[int, str, list[str]]:
    """Return the answer's status and text, and what was said."""
    said: list[str] = []
    async with (
        served(pager_app(said.append)) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/", data=body) as answer,
    ):
        return answer.status, await answer.text(), said


async def test_a_line_for_each_alert_and_its_runbook():
    """Status, severity, name, what it is about, the sentence; not how it was found."""
    status, _, said = await post(json.dumps(MESSAGE).encode())
    assert status == 200
    assert [line[9:] for line in said] == [
        "FIRING critical TokengapEngineDead engine=worker: An engine is dead.",
        "https://runbooks/TokengapEngineDead.md",
        "RESOLVED Other: ",
    ]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"alerts": [{"status": 1}]}'])
async def test_what_is_no_message_is_refused(body: bytes):
    """With the reason, and nothing is printed."""
    status, text, said = await post(body)
    assert (status, said) == (400, [])
    assert text.startswith("not a message of Alertmanager's: ")
