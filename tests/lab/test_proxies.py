"""The real proxies in front of the stand-in engine, each with the configuration that the drill writes."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from lab.serving import at_rest, engine
from tokengap.errors import SetupError
from tokengap.lab.parts import free_port, running
from tokengap.lab.proxies import PROXIES, Wiring
from tokengap.lab.users import User, Visit, crowd

DOCS = Path(__file__).parent.parent.parent / "docs" / "lab.md"
#: The ports of the source article, and a directory that says what it is.
SHOWN = Wiring(listen=8080, upstream=8100, leak=False, directory=Path("/tmp/tokengap-drill"))
LEAKING = sorted(name for name, proxy in PROXIES.items() if proxy.leaks)


def test_what_is_missing_is_named_with_its_cure():
    """A drill that cannot run says what to install."""
    nginx = replace(PROXIES["nginx"], find=lambda: None)
    with pytest.raises(SetupError, match="nginx is not installed: apt-get install nginx-light"):
        nginx.part(SHOWN)


def test_envoy_cannot_be_made_to_leak(tmp_path: Path):
    """Asking for it is an error that says why and what to do instead."""
    with pytest.raises(SetupError, match="envoy closes the engine's side as soon as its client is gone"):
        PROXIES["envoy"].part(replace(SHOWN, leak=True, directory=tmp_path))


@pytest.mark.parametrize("name", PROXIES)
def test_configurations_keep_to_loopback_and_to_their_directory(name):
    """No other address, and no path that a service of this host uses."""
    text = PROXIES[name].config(SHOWN)
    assert set(re.findall(r"\d+\.\d+\.\d+\.\d+", text)) == {"127.0.0.1"}
    outside = [path for path in re.findall(r"(?<=[ \"])/[\w./-]+", text) if not path.startswith(str(SHOWN.directory))]
    assert outside == []


@pytest.mark.parametrize("name", ["nginx", "haproxy", "envoy"])
def test_the_docs_show_what_is_written(name):
    """docs/lab.md has each configuration as it is."""
    assert f"```\n{PROXIES[name].config(SHOWN)}```\n" in DOCS.read_text()


@pytest.mark.e2e
@pytest.mark.parametrize("name", PROXIES)
def test_each_tells_its_version(name):
    """Three numbers; a program that is not here fails with how to install it."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROXIES[name].version())


@pytest.mark.e2e
@pytest.mark.parametrize("name", PROXIES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_nothing_leaks_and_every_token_comes_through(name, stream, tmp_path: Path):
    """Who stays has every token; who leaves ends its request in the engine, in the queue and in decode."""
    edge = free_port()
    async with engine(max_num_seqs=2, rate=200) as port:
        wiring = Wiring(edge, port, leak=False, directory=tmp_path)
        async with running(PROXIES[name].part(wiring), tmp_path):
            users = crowd(10, 4, max_tokens=60, leave_at=0.4, stream=stream)
            outcomes = await asyncio.gather(*(Visit(user, edge).run() for user in users))
            truth = await at_rest(port)
    assert len(truth.requests) == 10, "a proxy asked more than once"
    for outcome in outcomes:
        request = truth.requests[outcome.user.id]
        if outcome.how == "left":
            assert request.state == "aborted"
            assert request.ended == pytest.approx(outcome.ended, abs=0.25)
            assert outcome.tokens <= request.generated <= outcome.tokens + (8 if stream else 60)
        else:
            assert (outcome.how, outcome.detail) == ("completed", "")
            assert outcome.tokens == request.generated == 60


@pytest.mark.e2e
@pytest.mark.parametrize("name", LEAKING)
async def test_a_leak_is_a_leak(name, tmp_path: Path):
    """Made to leak, each goes on for a client that left in the queue; only the naive one goes on to the end."""
    edge = free_port()
    async with engine(max_num_seqs=1, rate=200) as port:
        wiring = Wiring(edge, port, leak=True, directory=tmp_path)
        async with running(PROXIES[name].part(wiring), tmp_path):
            stays = asyncio.create_task(Visit(User("stays", max_tokens=120), edge).run())
            await asyncio.sleep(0.05)
            left = await Visit(User("left", max_tokens=120, leave_at=0.1), edge).run()
            await stays
            truth = await at_rest(port)
    assert (left.how, left.tokens) == ("left", 0)
    request = truth.requests["left"]
    assert request.started is not None
    assert request.started > left.ended
    if name == "naive":
        assert (request.state, request.generated) == ("finished", 120)
    else:
        assert request.state == "aborted"
        assert 1 <= request.generated < 100


@pytest.mark.e2e
@pytest.mark.skipif(os.geteuid() != 0, reason="without root all tests here run without a privilege")
@pytest.mark.parametrize("name", ["nginx", "haproxy", "envoy"])
async def test_no_privilege_is_needed(name):
    """As nobody, without a capability, each starts and serves, and writes into its directory only."""
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all")
    edge = free_port()
    # Neither tmp_path nor the checkout, which perhaps only their owner may enter.
    with tempfile.TemporaryDirectory() as name_of_directory:
        directory = Path(name_of_directory)
        os.chown(directory, 65534, 65534)
        async with engine(rate=500) as port:
            part = PROXIES[name].part(Wiring(edge, port, leak=False, directory=directory))
            async with running(
                replace(part, command=("env", f"--chdir={directory}", *nobody, *part.command)), directory
            ):
                outcome = await Visit(User("u", max_tokens=20), edge).run()
    assert (outcome.how, outcome.tokens, outcome.detail) == ("completed", 20, "")
