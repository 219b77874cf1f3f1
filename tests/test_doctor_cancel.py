"""``tokengap doctor cancel``: what it finds through proxies that cancel or do not, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from lab.commands import tokengap
from lab.serving import at_rest, engine, gateway
from tokengap import doctor_cancel
from tokengap.doctor_cancel import Plan, Trial, about, examine
from tokengap.errors import SettingsError, SetupError
from tokengap.lab.parts import LOOPBACK, free_port, running
from tokengap.lab.proxies import PROXIES, Wiring

PLAN = Plan("http://me:secret@edge:8080", "http://worker:8100")
CANCELLED = Trial("streaming", dropped_after=0.2, finished=False, tokens=12.0, watched=30.0)


def at(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"


@pytest.mark.parametrize(
    ("trial", "level", "found", "advice"),
    [
        (CANCELLED, "ok", "dropped it 0.2 s later, 12 tokens after its client left", "no cancel here; ask --early too"),
        (Trial("early", 2.0, False, None, 30.0), "ok", "dropped it 2.0 s later", "would add no cancel here"),
        (Trial("early", 2.1, False, 300.0, 30.0), "attention", "dropped it 2.1 s later", "noticed late"),
        (Trial("streaming", 1.0, True, 900.0, 30.0), "attention", "it ran to its end, 900 tokens", "rollback.md"),
        (Trial("streaming", None, False, 9e3, 30.0), "attention", "still runs it 30 s later, 9,000", "rollback.md"),
        (Trial("streaming", 0.2, False, 1.0, 30.0, others=3), "note", "with 3 other requests", "at rest"),
    ],
)  # fmt: skip
def test_what_a_trial_means(trial: Trial, level: str, found: str, advice: str):
    """Told at once, late, never; on both sides of two seconds; and a guess where others had work."""
    finding = about(trial, PLAN)
    assert finding.level == level
    assert found in finding.found
    assert advice in finding.advice
    assert "secret" not in finding.subject


@pytest.mark.parametrize("leave", ["streaming", "early"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leak", [False, True], ids=["cancels", "leaks"])
async def test_a_gateway_is_found_out(leave, stream, leak):
    """One that passes the leaving on and one that reads to the end; streamed or not, before a token or after."""
    async with engine(rate=200, prefill_rate=200) as worker, gateway(worker, leak=leak) as edge:
        plan = Plan(at(edge), at(worker), leave, stream, max_tokens=300)
        finding = await examine(plan)
        assert finding.level == ("attention" if leak else "ok"), finding
        assert ("ran to its end" in finding.found) == leak
        await at_rest(worker)


async def test_an_engine_that_goes_on_is_watched_no_longer_than_asked():
    """It says so after that."""
    async with engine(rate=50) as worker, gateway(worker, leak=True) as edge:
        finding = await examine(Plan(at(edge), at(worker), within=1.0))
        assert finding.level == "attention"
        assert "still runs it 1 s later" in finding.found


async def test_a_busy_engine_is_left_alone_unless_forced():
    """Nothing is sent; forced, the answer is called a guess."""
    async with engine(rate=50) as worker, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2000}
        async with session.post(f"{at(worker)}/v1/chat/completions", json=body) as other:
            await other.content.readline()
            with pytest.raises(SetupError, match="the engine has 1 requests"):
                await examine(Plan(at(worker), at(worker)))
            finding = await examine(Plan(at(worker), at(worker), force=True))
            assert (finding.level, "with 1 other requests" in finding.found) == ("note", True)


async def test_the_wrong_engine_is_said(monkeypatch: pytest.MonkeyPatch):
    """Its page shows nothing of the request."""
    monkeypatch.setattr(doctor_cancel, "BEGINS_WITHIN", 1.0)
    async with engine(rate=200) as worker, engine() as other:
        with pytest.raises(SetupError, match="never showed the request: is it the engine behind --url"):
            await examine(Plan(at(worker), at(other)))


@pytest.mark.parametrize(
    ("plan", "error", "said"),
    [
        (Plan("http://h", "ftp://h"), SettingsError, "--engine ftp://h"),
        (Plan("http://h", f"http://{LOOPBACK}:1"), SetupError, "connection refused"),
    ],
)
async def test_what_cannot_be_done_is_said(plan: Plan, error: type[Exception], said: str):
    """With the address."""
    with pytest.raises(error, match=said):
        await examine(plan)


async def test_a_url_where_nobody_listens_is_said():
    """The engine is fine, the proxy is not there."""
    async with engine() as worker:
        with pytest.raises(SetupError, match="the request failed"):
            await examine(Plan(at(free_port()), at(worker)))


@pytest.mark.e2e
async def test_the_command_through_nginx(tmp_path: Path):
    """Exit 0 and `ok` as it is usually set; exit 1 with proxy_ignore_client_abort."""
    codes, ask = {}, ("--no-stream", "--max-tokens", 300)
    async with engine(rate=200) as worker:
        for leak in (False, True):
            edge, own = free_port(), tmp_path / str(leak)
            own.mkdir()
            async with running(PROXIES["nginx"].part(Wiring(edge, worker, leak, own)), tmp_path):
                ran = await tokengap("doctor", "cancel", "--url", at(edge), "--engine", at(worker), *ask)
                codes[leak] = ran.code
                assert ran.out.startswith("attention" if leak else "ok"), ran
    assert codes == {False: 0, True: 1}
