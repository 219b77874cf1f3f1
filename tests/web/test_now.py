"""What the page and the terminal are told of a beat: which streams, in which order, and what is in trouble."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import aiohttp
import msgspec
import numpy as np
import pytest

from series.example import gpus, rich_view, view_with
from tokengap.bundle.site import Site
from tokengap.bundle.watches import watches
from tokengap.series.render import render
from tokengap.topology import Endpoint, Hop, Limits, Topology
from tokengap.view import CLIENTS, SourceView, Tokens, View
from tokengap.web.history import KEPT, STRETCH, STRETCHES, History
from tokengap.web.now import BAD_STATES, LEAKING_SHARE, MOST, ORDERS, Now, Wanted, choose, now_json, wanted
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving

WATCHED = Topology(hops=(Hop("edge", (Endpoint(None, 8080),), ("admit",)), Hop("admit", (), ("worker",))))
NOTHING: Mapping[str, float] = MappingProxyType({})
DEFAULT = Wanted()


def told(view: View, lost: Mapping[str, float] = NOTHING, want: Wanted = DEFAULT, watched: Topology = WATCHED) -> Now:
    """What is told of a view, as it is read on the other side."""
    return msgspec.json.decode(now_json(view, watched, lost, want, show_addresses=False), type=Now)


def healthy() -> View:
    """A view in which nothing is wrong."""
    worker = replace(rich_view().engines[0], queue_age=0.0, slack={"interactive": 8.0})
    streams = rich_view().streams[:2].copy()
    return replace(rich_view(), engines=(worker,), streams=streams, sources=rich_view().sources[:2])


def test_all_of_a_view_comes_through():
    """What is decoded is what was there, mappings and GPUs included; credentials are not."""
    now = told(rich_view())
    assert [engine.name for engine in now.engines] == ["worker", 'spare "b"\\<b>']
    assert now.engines[0].url == "http://127.0.0.1:8100/metrics"
    assert now.engines[0].tokens == rich_view().engines[0].tokens
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
        now = told(healthy(), {"engine": share})
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
    assert wanted(None, [], None) == DEFAULT == Wanted("cost", frozenset(CLIENTS), 100)
    assert wanted("age", ["gone", "vanished"], str(MOST)) == Wanted("age", frozenset({"gone", "vanished"}), MOST)
    for wrong in (
        (None, [], str(MOST + 1)),
        (None, [], "-1"),
        (None, [], "x"),
        ("name", [], None),
        (None, ["x"], None),
    ):
        with pytest.raises(ValueError, match="expected"):
            wanted(*wrong)


@pytest.mark.parametrize("streams", [2_000, 100_000])
def test_the_answer_stays_small(streams: int):
    """However many streams there are, under 500 kB."""
    view = view_with(streams)
    view.streams["leaks_at"] = 0
    assert len(now_json(view, WATCHED, {}, Wanted(top=MOST), show_addresses=True)) < 500_000


def remembered(beats: int, lost: Callable[[int], float]) -> History:
    """A history of so many beats of 100 tokens, of which the edge has lost so many after each."""
    history = History()
    for beat in range(beats):
        engine = replace(healthy().engines[0], tokens=Tokens(100.0 * beat, 90.0 * beat, {"edge": lost(beat)}))
        history.add(replace(healthy(), engines=(engine,), beats=beat))
    return history


def test_history():
    """The newest points, as totals."""
    points = msgspec.json.decode(remembered(KEPT + 5, lambda beat: 10.0 * beat).json())
    assert [point["beats"] for point in points] == list(range(5, KEPT + 5))
    assert (points[-1]["out"], points[-1]["orphaned"]) == (100.0 * (KEPT + 4), {"edge": 10.0 * (KEPT + 4)})


def test_what_lasts():
    """A hop that loses tokens stretch after stretch has lost that share; a burst, or too short a look, says nothing."""
    enough = STRETCH * STRETCHES + 1
    assert History().lost() == {}
    assert remembered(enough - 1, lambda beat: 10.0 * beat).lost() == {}
    assert remembered(enough, lambda beat: 10.0 * beat).lost() == {"edge": 0.1}
    assert remembered(enough, lambda beat: 5000.0 if beat == enough - 5 else 0.0).lost()["edge"] <= 0.0
    assert remembered(enough, lambda beat: 0.0 if beat < STRETCH else 10.0 * (beat - STRETCH)).lost() == {"edge": 0.0}


async def test_over_http():
    """The same by its address, and what is wrong with a wish in one line."""
    serving = Serving(also=(), watched=WATCHED)
    serving.publish(rich_view(), render(rich_view()))
    server = Server(make_app(serving))
    await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(server.url) as client:
            async with client.get("/api/now?sort=age&client=gone&client=connected&top=1") as answer:
                streams = (await answer.json())["streams"]
                assert (streams["matching"], [row["id"] for row in streams["rows"]]) == (3, [13])
            async with client.get("/api/now?top=many") as answer:
                assert (answer.status, await answer.text()) == (400, "top: expected a number from 0 to 500\n")
            async with client.get("/api/history") as answer:
                assert [point["beats"] for point in await answer.json()] == [4321]
    finally:
        await server.stop()
