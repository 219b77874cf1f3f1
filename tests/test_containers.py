"""One exporter on the host, and proxies, engines and users in network namespaces of their own, as in containers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

import netns
from lab.commands import tokengap
from netns import Host, Space
from test_end_to_end import Exporter, Samples, balanced, serve_part, state, total
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.gateway import gateway_part
from tokengap.lab.matrix import unprivileged
from tokengap.lab.parts import LOOPBACK, Part, RunningPart, free_port, free_ports, running
from tokengap.lab.proxies import PROXIES, Wiring
from tokengap.lab.users import Outcome, Visit, crowd
from tokengap.series.engines import COVERAGE
from tokengap.series.itself import ACCOUNTING_MODE, BEATS_DEGRADED, NETNS
from tokengap.series.streams import STREAMS, STREAMS_ENDED
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT, TOKENS_USEFUL

pytestmark = pytest.mark.e2e

#: Free in each namespace that is made here. Nobody else on this host may use them: others are watched too, by `all`.
EDGE, ENGINE = free_ports(2)
EVERYWHERE = "0.0.0.0"


@pytest.fixture
def host() -> Iterator[Host]:
    with netns.host() as made:
        yield made


@asynccontextmanager
async def inside(space: Space | None, part: Part, at: str, directory: Path) -> AsyncIterator[RunningPart]:
    """Run a part of the lab in a namespace; it is ready when it accepts at its port of an address of that, seen from
    there."""
    (port,) = part.ports
    command = part.command if space is None else space.command(*part.command)
    async with running(Part(f"{part.name}-{at}-{port}", command, (), part.orphan_signal), directory) as started:
        for _ in range(200):
            try:
                await asyncio.to_thread(lambda: (space or HERE).connect(port, at).close())
                break
            except OSError:
                assert not started.ended, started.last_lines()
                await asyncio.sleep(0.05)
        else:
            pytest.fail(f"{part.name} is not ready:\n{started.last_lines()}")
        yield started


class _Here(Space):
    """The test's own namespace."""

    def run(self, do):
        return do()


HERE = _Here("here")


def on_every_address(part: Part) -> Part:
    return Part(part.name, (*part.command, "--host", EVERYWHERE), part.ports, part.orphan_signal)


def an_engine(port: int = ENGINE) -> Part:
    return on_every_address(engine_part(port, Knobs(rate=50, max_num_seqs=8)))


def a_gateway(upstream: str) -> Part:
    """The gateway that leaks."""
    part = gateway_part(EDGE, 1, leak=True)
    command = [upstream if word.startswith("http://") else word for word in part.command]
    return on_every_address(Part(part.name, tuple(command), part.ports))


def an_nginx(directory: Path, engine: str) -> Part:
    """The nginx of the lab, with other addresses."""
    part = PROXIES["nginx"].part(Wiring(EDGE, ENGINE, False, directory))
    config = directory / "nginx.conf"
    text = config.read_text().replace(f"listen {LOOPBACK}:", f"listen {EVERYWHERE}:")
    config.write_text(text.replace(f"http://{LOOPBACK}:{ENGINE}", f"http://{engine}:{ENGINE}"))
    return part


@asynccontextmanager
async def exporter(directory: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> AsyncIterator[Exporter]:
    """Run ``tokengap serve`` in the root namespace."""
    port = free_port()
    part = serve_part(port, *arguments)
    async with (
        running(Part(part.name, prefix + part.command, part.ports), directory),
        aiohttp.ClientSession() as session,
    ):
        watch = Exporter(f"http://{LOOPBACK}:{port}", session)
        for _ in range(150):
            async with session.get(f"{watch.url}/-/ready") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.1)
        yield watch


async def visit(count: int, leavers: int, address: str, **plan: object) -> list[Outcome]:
    """Let users come from this namespace, all at once."""
    return await asyncio.gather(*(Visit(user, EDGE, address).run() for user in crowd(count, leavers, **plan)))


def over(page: Samples) -> bool:
    return total(page, STREAMS) == 0 and state(page) == "idle" and total(page, TOKENS_OUT) > 0


async def test_a_gateway_in_a_container_leaks_and_is_named(host: Host, tmp_path: Path) -> None:
    """Gateway and engine each in a namespace, users outside: who left is gone, and what was generated for them was
    orphaned at the edge, to within 1 % of what came out."""
    edge, engine = host.space(), host.space()
    async with (
        inside(engine, an_engine(), engine.address, tmp_path),
        inside(edge, a_gateway(f"http://{engine.address}:{ENGINE}"), edge.address, tmp_path),
        exporter(
            tmp_path,
            *("--engine", f"worker=http://{engine.address}:{ENGINE}", "--hop", f"edge=:{EDGE}"),
            *("--netns", edge.path, "--netns", engine.path),
        ) as watch,
    ):
        users = asyncio.create_task(visit(6, 2, edge.address, max_tokens=300, leave_at=1.0))
        page = await watch.until(lambda page: total(page, STREAMS, hop="edge", client="gone") == 2)
        assert total(page, NETNS, state="watched") == 3
        assert total(page, NETNS, state="failed") == 0
        assert total(page, ACCOUNTING_MODE, mode="exact") == 1
        assert total(page, COVERAGE) == 1
        outcomes = await users
        page = await watch.until(over)
    useful = sum(outcome.tokens for outcome in outcomes)
    assert total(page, TOKENS_OUT) == 6 * 300
    assert total(page, TOKENS_USEFUL) == pytest.approx(useful, abs=18)
    assert total(page, TOKENS_ORPHANED, hop="edge") == pytest.approx(6 * 300 - useful, abs=18)
    assert total(page, TOKENS_ORPHANED) == total(page, TOKENS_ORPHANED, hop="edge")
    assert balanced(page)


async def test_an_nginx_in_a_container_that_lets_go_is_not_blamed(host: Host, tmp_path: Path) -> None:
    """It closes the engine's side when a user leaves: cancelled and not orphaned, also through two namespaces."""
    edge, engine = host.space(), host.space()
    async with (
        inside(engine, an_engine(), engine.address, tmp_path),
        inside(edge, an_nginx(tmp_path, engine.address), edge.address, tmp_path),
        exporter(
            tmp_path,
            *("--engine", f"worker=http://{engine.address}:{ENGINE}", "--hop", f"edge=:{EDGE}", "--netns", "all"),
        ) as watch,
    ):
        users = asyncio.create_task(visit(6, 2, edge.address, max_tokens=300, leave_at=1.0))
        await watch.until(lambda page: total(page, STREAMS, hop="edge", client="connected") == 4)
        outcomes = await users
        page = await watch.until(over)
    useful = sum(outcome.tokens for outcome in outcomes)
    out = total(page, TOKENS_OUT)
    assert total(page, TOKENS_USEFUL) == pytest.approx(useful, abs=0.01 * out)
    assert total(page, TOKENS_ORPHANED) == pytest.approx(out - useful, abs=0.01 * out)
    assert total(page, STREAMS_ENDED, how="cancelled") + total(page, STREAMS_ENDED, how="orphaned") == 2
    assert total(page, STREAMS_ENDED, how="completed") == 4
    assert balanced(page)


async def test_pods_with_equal_addresses_and_ports_are_not_mixed(host: Host, tmp_path: Path) -> None:
    """Two pods, each with users, a gateway and an engine that talk by loopback on the same ports, the users' own ports
    included: the tokens of those who left are orphaned at the engine of their pod, and none at the other's."""
    pods = {"a": host.space(), "b": host.space()}
    for pod in pods.values():
        pod.run(lambda: Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("20000 20049"))
    async with AsyncExitStack() as stack:
        for pod in pods.values():
            await stack.enter_async_context(inside(pod, an_engine(), pod.address, tmp_path))
            gateway = a_gateway(f"http://{LOOPBACK}:{ENGINE}")
            await stack.enter_async_context(inside(pod, gateway, pod.address, tmp_path))
        engines = [f"{name}=http://{pod.address}:{ENGINE}" for name, pod in pods.items()]
        watch = await stack.enter_async_context(
            exporter(
                tmp_path,
                *("--engine", engines[0], "--engine", engines[1], "--hop", f"edge=:{EDGE}", "--netns", "all"),
            )
        )

        def live(pod: Space, leavers: int) -> list[Outcome]:
            return pod.run(lambda: asyncio.run(visit(6, leavers, LOOPBACK, max_tokens=300, leave_at=1.0)))

        outcomes = await asyncio.gather(
            asyncio.to_thread(live, pods["a"], 3),
            asyncio.to_thread(live, pods["b"], 0),
        )
        page = await watch.until(
            lambda page: total(page, STREAMS) == 0 and total(page, TOKENS_OUT) == 2 * 6 * 300 and balanced(page)
        )
    for name, had in zip(pods, outcomes, strict=True):
        useful = sum(outcome.tokens for outcome in had)
        assert total(page, TOKENS_OUT, engine=name) == 6 * 300
        assert total(page, TOKENS_USEFUL, engine=name) == pytest.approx(useful, abs=18)
        assert total(page, TOKENS_ORPHANED, engine=name) == pytest.approx(6 * 300 - useful, abs=18)
    assert total(page, TOKENS_ORPHANED, engine="b") < 18


async def test_a_container_that_comes_later_is_found_and_ends_quietly(host: Host, tmp_path: Path) -> None:
    """The engine is on the host, its gateway comes in a container by and by, and goes: nothing fails over it."""
    port = free_port()
    async with (
        inside(None, an_engine(port), LOOPBACK, tmp_path),
        exporter(
            tmp_path, "--engine", f"worker=http://{LOOPBACK}:{port}", "--hop", f"edge=:{EDGE}", "--netns", "all"
        ) as watch,
    ):
        before = total(await watch.scrape(), NETNS, state="watched")
        space = host.space()
        async with inside(space, a_gateway(f"http://{host.address}:{port}"), space.address, tmp_path):
            page = await watch.until(lambda page: total(page, NETNS, state="watched") == before + 1)
            degraded = total(page, BEATS_DEGRADED)
            users = asyncio.create_task(visit(4, 2, space.address, max_tokens=300, leave_at=1.0))
            await watch.until(lambda page: total(page, STREAMS, hop="edge", client="gone") == 2)
            outcomes = await users
            page = await watch.until(over)
            useful = sum(outcome.tokens for outcome in outcomes)
            assert total(page, TOKENS_ORPHANED, hop="edge") == pytest.approx(4 * 300 - useful, abs=12)
        host.remove(space)
        page = await watch.until(lambda page: total(page, NETNS, state="watched") == before)
    assert total(page, NETNS, state="failed") == 0
    assert total(page, BEATS_DEGRADED) == degraded


async def test_without_privilege_one_line_says_what_is_missing(host: Host, tmp_path: Path) -> None:
    """Without any capability: streams in a container are still seen, their clients too, no token is called useful, and
    it is said once."""
    edge, engine = host.space(), host.space()
    async with (
        inside(engine, an_engine(), engine.address, tmp_path),
        inside(edge, a_gateway(f"http://{engine.address}:{ENGINE}"), edge.address, tmp_path),
        exporter(
            tmp_path,
            *("--engine", f"worker=http://{engine.address}:{ENGINE}", "--hop", f"edge=:{EDGE}", "--netns", "all"),
            prefix=unprivileged(),
        ) as watch,
    ):
        users = asyncio.create_task(visit(2, 0, edge.address, max_tokens=300))
        page = await watch.until(lambda page: total(page, STREAMS, hop="edge", client="connected") == 2)
        assert total(page, ACCOUNTING_MODE, mode="state") == 1
        assert total(page, NETNS, state="watched") >= 3
        users.cancel()
        await asyncio.gather(users, return_exceptions=True)
    said = [line for line in (tmp_path / "exporter.log").read_text().splitlines() if "CAP_SYS_ADMIN" in line]
    assert len(said) == 1
    assert "needs CAP_SYS_ADMIN; states and queues of their sockets are read from /proc/PID/net" in said[0]


async def test_the_doctor_names_a_proxy_that_nobody_looks_at(host: Host, tmp_path: Path) -> None:
    """With the --netns that would; and with that, that it is watched and who listens there."""
    space = host.space()
    async with inside(space, an_nginx(tmp_path, LOOPBACK), space.address, tmp_path) as nginx:
        hint = f"nginx (pid {nginx.pid}) listens on :{EDGE} in another network namespace"
        arguments = ("doctor", "--hop", f"edge=:{EDGE}", "--json")
        findings = (await tokengap(*arguments)).json["findings"]
        (found,) = (one for one in findings if one["found"] == hint)
        assert (found["level"], found["advice"]) == ("note", f"to watch it: --netns {nginx.pid}")
        (hop,) = (one for one in findings if one["subject"] == "hop edge")
        assert hop["level"] == "attention"

        findings = (await tokengap(*arguments, "--netns", nginx.pid)).json["findings"]
        assert hint not in [one["found"] for one in findings]
        (watched,) = (one for one in findings if one["subject"] == "network namespaces" and one["level"] == "ok")
        assert watched["found"] == f"pid {nginx.pid}, besides our own"
        (hop,) = (one for one in findings if one["subject"] == "hop edge")
        assert hop["level"] == "ok"
        assert hop["found"].startswith(f"nginx (pid {nginx.pid}) listens on :{EDGE}")

    ran = await tokengap("doctor", "--netns", "/run/netns/no-such", "--json")
    (missing,) = (one for one in ran.json["findings"] if one["found"].startswith("/run/netns/no-such"))
    assert (missing["level"], missing["found"]) == ("attention", "/run/netns/no-such: no such file, or not for us")


async def test_without_destroy_events_the_gap_is_within_a_beat_of_each_user(host: Host, tmp_path: Path) -> None:
    """``--no-events``: the page says that up to one beat of each socket that ended is missed, and no more is."""
    space = host.space()
    port = free_port()
    async with (
        inside(None, an_engine(port), LOOPBACK, tmp_path),
        inside(space, a_gateway(f"http://{host.address}:{port}"), space.address, tmp_path),
        exporter(
            tmp_path,
            *("--engine", f"worker=http://{LOOPBACK}:{port}", "--hop", f"edge=:{EDGE}"),
            *("--netns", space.path, "--no-events"),
        ) as watch,
    ):
        outcomes = await visit(6, 2, space.address, max_tokens=300, leave_at=1.0)
        page = await watch.until(over)
    useful, beat = sum(outcome.tokens for outcome in outcomes), 50
    assert total(page, ACCOUNTING_MODE, mode="beat") == 1
    assert total(page, TOKENS_OUT) == 6 * 300
    assert total(page, TOKENS_USEFUL) == pytest.approx(useful, abs=6 * beat)
    assert total(page, TOKENS_ORPHANED, hop="edge") == pytest.approx(6 * 300 - useful, abs=6 * beat)
    assert balanced(page)
