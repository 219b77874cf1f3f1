"""What the page and the terminal are told of a beat: which streams, in which order, and what is in trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgspec
import numpy as np
import pytest
from multidict import MultiDict
from yarl import URL

from series.example import gpus, rich_view, view_with
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches
from tokengap.series.render import render
from tokengap.topology import Endpoint, Hop, Limits, Topology
from tokengap.view import CLIENTS, EngineState, SourceView, Tokens, View
from tokengap.web.api import engines_json
from tokengap.web.history import Curves, Trend
from tokengap.web.now import (
    BAD_STATES,
    LEAKING_SHARE,
    MOST,
    MOST_ENGINES,
    ORDERS,
    Now,
    Wanted,
    choose,
    now_json,
    streams_json,
    wanted,
    wanted_page,
)
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

WATCHED = Topology(hops=(Hop("edge", (Endpoint(None, 8080),), ("admit",)), Hop("admit", (), ("worker",))))
NOTHING = Trend()
DEFAULT = Wanted()


def told(view: View, trend: Trend = NOTHING, want: Wanted = DEFAULT, watched: Topology = WATCHED) -> Now:
    """What is told of a view, as it is read on the other side."""
    return msgspec.json.decode(now_json(view, watched, trend, want, show_addresses=False), type=Now)


def healthy() -> View:
    """A view in which nothing is wrong."""
    worker = replace(rich_view().engines[0], queue_age=0.0, slack={"interactive": 8.0})
    streams = rich_view().streams[:2].copy()
    return replace(rich_view(), engines=(worker,), streams=streams, sources=rich_view().sources[:2])


def test_all_of_a_view_comes_through():
    """What is decoded is what was there, mappings and GPUs included; credentials are not."""
    now = told(rich_view())
    assert [engine.name for engine in now.engines] == ['spare "b"\\<b>', "worker"]
    assert now.engines[1].url == "http://127.0.0.1:8100/metrics"
    assert now.engines[1].tokens == rich_view().engines[0].tokens
    assert now.gpus == gpus()
    assert (now.proxies, now.price, now.limits) == (list(rich_view().proxies), rich_view().price, Limits())
    assert [spot.kind for spot in now.blind_spots] == ["http2_clients"]


def test_hops():
    """Where each listens and leads, its streams by client state, and what it cost; the engine is the last."""
    edge, admit, engine = told(rich_view()).hops
    assert (edge.name, edge.listen, edge.to) == ("edge", [":8080"], ["admit"])
    assert edge.clients == {"connected": 2, "stalled": 1, "vanished": 0, "gone": 2}
    assert (edge.oldest, edge.oldest_orphan, edge.leaking, edge.leaks) == (4000.0, 4000.0, 1, True)
    assert (admit.to, admit.leaking, admit.leaks, admit.oldest_orphan) == (["worker"], 0, False, 0.0)
    assert (engine.name, engine.orphaned) == ("engine", 92.0)


def test_a_hop_leaks_without_a_socket():
    """An engine that goes on for nobody shows no socket: what it lost of the newest tokens says it, from 5 % on."""
    for share, leaks in ((LEAKING_SHARE - 0.001, False), (LEAKING_SHARE, True)):
        now = told(healthy(), Trend({"engine": share}))
        assert [hop.leaks for hop in now.hops] == [False, False, leaks]
        assert [trouble.runbook for trouble in now.troubles] == ["TokengapEngineIgnoresCancel"] * leaks


def test_troubles():
    """The worst first, each with a runbook that there is; none where nothing is wrong."""
    assert told(healthy()).troubles == []
    dead = rich_view().engines[1]
    late = replace(rich_view().engines[0], slack={"interactive": -0.1, "batch": 3.0})
    troubles = told(replace(rich_view(), engines=(late, dead))).troubles
    assert [(one.kind, one.where) for one in troubles] == [
        *(("engine", dead.name), ("leak", "edge"), ("deadline", "worker"), ("queue", "worker")),
        ("source", f"engine {dead.name}"),
    ]
    assert troubles[1].says == "edge leaks: it goes on for clients who have left."
    assert "(interactive)" in troubles[2].says
    known = {watch.name for watch in watches(Site())}
    assert {one.runbook for one in troubles} | set(BAD_STATES.values()) | {"TokengapEngineIgnoresCancel"} <= known


@pytest.mark.parametrize(("age", "late"), [(None, False), (5.9, False), (6.0, False), (6.1, True)])
def test_the_queue_is_late_above_the_age_cut(age: float | None, late: bool):
    """Not known is not late."""
    engine = replace(healthy().engines[0], queue_age=age)
    assert [one.kind for one in told(replace(healthy(), engines=(engine,))).troubles] == ["queue"] * late


@pytest.mark.parametrize(
    ("reason", "state"),
    [("library_not_found", "absent"), ("starting", "absent"), ("hung", "down"), ("no_gpus", "down")],
)
def test_a_host_without_gpus_is_in_no_trouble(reason: str, state: str):
    """Where no driver is, none is expected; where one hangs, somebody should look."""
    source = SourceView("gpu", "", False, 0.0, reason)
    now = told(replace(healthy(), sources=(source,), gpus=replace(gpus(), reason=reason, gpus=())))
    assert now.sources[0].state == state
    assert bool(now.troubles) == (state == "down")


def test_orders():
    """What costs most: orphans first, by the tokens they took; then whoever has most on its way. Else as it says."""
    table = view_with(200).streams
    random = np.random.default_rng(1)
    for column in ("tokens", "useful", "orphaned", "age"):
        table[column] = random.integers(0, 50, len(table))
    table["slack"] = np.where(random.random(len(table)) < 0.5, np.nan, random.normal(0, 5, len(table)))
    rows = {order: choose(table, Wanted(order, top=MOST))[0] for order in ORDERS}
    assert all(sorted(chosen["id"]) == list(range(200)) for chosen in rows.values())
    cost = [(row["client"] >= 2, row["orphaned"], row["tokens"] - row["useful"], row["age"]) for row in rows["cost"]]
    assert cost == sorted(cost, reverse=True)
    assert list(rows["age"]["age"]) == sorted(table["age"], reverse=True)
    assert list(rows["tokens"]["tokens"]) == sorted(table["tokens"], reverse=True)
    assert list(rows["client"]["client"]) == sorted(table["client"], reverse=True)
    known = ~np.isnan(table["slack"])
    assert list(rows["slack"]["slack"][: known.sum()]) == sorted(table["slack"][known])


def test_only_some():
    """By client state, and no more than asked for; how many there are in all is said."""
    streams = told(view_with(2000), want=Wanted(clients=frozenset({"gone"}), top=10)).streams
    assert streams.clients == dict.fromkeys(CLIENTS, 500)
    assert streams.matching == 500
    assert [row.client for row in streams.rows] == ["gone"] * 10
    assert told(view_with(2000), want=Wanted(top=0)).streams.rows == []


def test_what_a_request_says():
    """By default the 100 that cost most; anything else than what there is is refused with what is expected."""
    assert wanted(MultiDict()) == DEFAULT == Wanted("cost", frozenset(CLIENTS), 100)
    chosen = MultiDict([("sort", "age"), ("client", "gone"), ("client", "vanished"), ("top", f"{MOST}")])
    assert wanted(chosen) == Wanted("age", frozenset({"gone", "vanished"}), MOST)
    for name, value in (
        *(("top", f"{MOST + 1}"), ("top", "-1"), ("top", "x"), ("top", ""), ("top", "²")),
        *(("sort", "name"), ("sort", ""), ("client", "x")),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            wanted(MultiDict({name: value}))


def test_what_a_request_for_a_page_says():
    """By default the first page, as long as one may be."""
    assert wanted_page(MultiDict()) == Wanted("cost", frozenset(CLIENTS), MOST, 0)
    assert wanted_page(MultiDict(limit="7", offset="1000000")) == Wanted("cost", frozenset(CLIENTS), 7, 1_000_000)
    for name, value in (("limit", f"{MOST + 1}"), ("limit", "x"), ("offset", "-1"), ("offset", "9" * 5000)):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            wanted_page(MultiDict({name: value}))


def crowded(engines: int, streams: int, state: EngineState) -> View:
    """A fleet whose every engine is in one state and leaks, and has as much to say of it as one can have."""
    worker = replace(rich_view().engines[0], state=state, evidence="it does not get on. " * 15)
    fleet = tuple(
        replace(worker, name=f"engine-{number:03}.{'x' * 50}", tokens=Tokens(1e9, 1e8, {"edge": 1e6 + number}))
        for number in range(engines)
    )
    sources = tuple(SourceView("engine", engine.name, state == "busy", 0.1, "no answer. " * 30) for engine in fleet)
    view = replace(view_with(streams), engines=fleet, sources=sources)
    view.streams["engine"] = np.arange(streams) % engines
    view.streams["leaks_at"] = 0
    return view


@pytest.mark.parametrize("state", ["busy", "dead"])
@pytest.mark.parametrize(("engines", "streams"), [(1, 100_000), (500, 2_000), (2_000, 100_000)])
def test_the_answer_stays_small(engines: int, streams: int, state: EngineState):
    """However many streams and engines there are, in trouble or not: under 500 kB."""
    view = crowded(engines, streams, state)
    targets = tuple(engine.name for engine in view.engines)
    watched = Topology(hops=(Hop("edge", (Endpoint(None, 8080),), targets), Hop("admit", (), targets)))
    assert len(now_json(view, watched, NOTHING, Wanted(top=MOST), show_addresses=True)) < 500_000
    for offset in (0, 1500):
        assert len(streams_json(view, Wanted(top=MOST, offset=offset), show_addresses=True)) < 500_000
    assert len(engines_json(view, MOST_ENGINES, 0)) < 500_000


def test_of_many_engines_those_that_need_a_look():
    """First those in a bad state, then those who are late, then those that lost most; how many there are is said."""
    view = crowded(500, 2000, "busy")
    calm = [replace(engine, queue_age=0.0, slack={}) for engine in view.engines]
    calm[7] = replace(calm[7], state="stuck")
    calm[5] = replace(calm[5], slack={"batch": -1.0})
    calm[3] = replace(calm[3], queue_age=6.1)
    now = told(replace(view, engines=tuple(calm)))
    numbers = [int(engine.name[7:10]) for engine in now.engines]
    assert numbers[:4] == [7, 5, 3, 499] or numbers[:4] == [7, 3, 5, 499]
    assert numbers[4:] == list(range(498, 498 - (MOST_ENGINES - 4), -1))
    assert now.engine_states == {"busy": 499, "stuck": 1}
    assert len(now.sources) < now.source_states["up"] == 500


def test_of_many_troubles_the_worst():
    """How many there are is said; of sources those that are down come first."""
    view = crowded(500, 2000, "dead")
    up = SourceView("sockets", "", True, 0.1, "")
    now = told(replace(view, sources=(up, *view.sources)))
    assert {trouble.kind for trouble in now.troubles} == {"engine"}
    assert now.troubles_in_all == 500 + 1 + 500 + 500  # each is dead, late and does not answer; and the edge leaks
    assert {source.state for source in now.sources} == {"down"}
    assert now.source_states == {"up": 1, "down": 500}


async def test_over_http():
    """The same by its address, and what is wrong with a wish in one line."""
    async with asked() as client:
        async with client.get("/api/now?sort=age&client=gone&client=connected&top=1") as answer:
            streams = (await answer.json())["streams"]
            assert (streams["matching"], [row["id"] for row in streams["rows"]]) == (3, [13])
        async with client.get("/api/now?top=many") as answer:
            assert (answer.status, await answer.text()) == (400, "top: expected a number from 0 to 500\n")
        async with client.get("/api/history") as answer:
            assert await answer.json() == {name: [] for name in Curves.__struct_fields__}


@pytest.mark.parametrize(
    ("path", "key", "in_all"),
    [("/api/streams?sort=age&client=gone&client=stalled", "id", 20), ("/api/engines", "name", 60)],
)
async def test_lists_by_the_page(path: str, key: str, in_all: int):
    """Each page says how many there are in all and where the next one is, until there is none; all together are all."""
    view = crowded(60, 40, "busy")
    async with asked(view) as client:
        found: list[object] = []
        address: URL | None = URL(path).update_query(limit=7)
        while address is not None:
            async with client.get(address) as answer:
                assert answer.headers["X-Total-Count"] == f"{in_all}"
                rows = await answer.json()
                found += [row[key] for row in rows]
                address = answer.links["next"]["url"] if "next" in answer.links else None
                assert len(rows) == 7 or address is None
        assert len(found) == len(set(found)) == in_all
        for wrong in ("limit=x", "limit=501", "offset=-1"):
            async with client.get(URL(path).update_query(wrong)) as answer:
                assert answer.status == 400
                assert (await answer.text()).startswith(wrong.partition("=")[0])


@asynccontextmanager
async def asked(view: View | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """Who asks an exporter that shows a view."""
    serving = Serving(also=(), watched=WATCHED)
    view = view or rich_view()
    serving.publish(view, render(view))
    server = Server(make_app(serving))
    await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(server.url) as client:
            yield client
    finally:
        await server.stop()
