"""The stand-in engine over real sockets: its API, its counters against its truth, and its knobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from lab.serving import at_rest, engine, page, until
from tokengap.lab.batching import Knobs
from tokengap.lab.engine import engine_part
from tokengap.lab.parts import LOOPBACK, free_port, listens, running
from tokengap.lab.truth import EngineControl
from tokengap.lab.users import User, Visit, crowd


async def state_of(port: int, name: str) -> str:
    return (await EngineControl(port).truth()).requests[name].state


async def test_the_api_of_vllm_answers():
    """Models, health, version and a page; a request that is none is told so."""
    async with engine() as port, aiohttp.ClientSession(f"http://{LOOPBACK}:{port}") as session:
        async with session.get("/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == "tokengap-lab"
        async with session.get("/health") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        async with session.get("/version") as answer:
            assert (await answer.json())["version"] == "0.33.0"
        async with session.get("/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "process_start_time_seconds" in await answer.text()
        async with session.post("/v1/completions", data=b"{}") as answer:
            assert answer.status == 400
            assert "prompt" in (await answer.json())["error"]["message"]


async def test_a_stream_is_had_without_asking_for_anything():
    """``curl -N -X POST .../v1/stream`` gets events of an answer to 400 prompt tokens, until the end."""
    async with (
        engine(rate=2000, answer_tokens=20) as port,
        aiohttp.ClientSession(f"http://{LOOPBACK}:{port}") as session,
    ):
        async with session.post("/v1/stream") as answer:
            assert answer.content_type == "text/event-stream"
            events = (await answer.read()).split(b"\n\n")
        (request,) = (await at_rest(port)).requests.values()
    assert len(events) == 20 + 2  # [DONE], and nothing after the last empty line
    assert (request.prompt_tokens, request.generated) == (400, 20)


async def test_embeddings_take_no_slot():
    """They are answered while every slot is taken, one vector a text."""
    async with engine(max_num_seqs=1) as port, aiohttp.ClientSession(f"http://{LOOPBACK}:{port}") as session:
        async with session.post("/v1/stream"), session.post("/v1/embeddings", json={"input": ["a", "b"]}) as answer:
            assert len((await answer.json())["data"]) == 2
        async with session.post("/v1/embeddings", json={}) as answer:
            assert answer.status == 400


async def test_the_page_counts_what_the_truth_knows():
    """With leavers in every phase: generation counts all tokens, finished requests are those that stayed."""
    async with engine(max_num_seqs=2, rate=200) as port:
        outcomes = await asyncio.gather(
            *(Visit(user, port).run() for user in crowd(12, 4, max_tokens=60, leave_at=0.5))
        )
        truth, shown = await at_rest(port), await page(port)
    left = [outcome for outcome in outcomes if outcome.how == "left"]
    assert len(left) == 4
    assert shown["vllm:generation_tokens_total"] == truth.generated
    assert truth.generated == sum(request.generated for request in truth.requests.values())
    assert shown["vllm:request_success_total"] == 8
    assert shown["vllm:request_generation_tokens_sum"] == 8 * 60
    assert shown["vllm:num_requests_running"] == shown["vllm:num_requests_waiting"] == 0
    assert shown["vllm:kv_cache_usage_perc"] == pytest.approx(0)
    for outcome in left:
        request = truth.requests[outcome.user.id]
        assert request.state == "aborted"
        assert request.ended == pytest.approx(outcome.ended, abs=0.1)
        # Delivered and read: at most what was under way when it closed is missing.
        assert 0 <= request.written - outcome.tokens <= 2


async def test_the_queue_is_shown_and_sampled():
    """One slot and three users: two wait, and the truth has the age of the head at every tenth of a second."""
    async with engine(max_num_seqs=1, rate=50) as port:
        visits = [Visit(user, port) for user in crowd(3, 0, max_tokens=20, prompt_tokens=10)]
        tasks = [asyncio.create_task(visit.run()) for visit in visits]
        control = EngineControl(port)

        async def two_wait() -> bool:
            shown = await page(port)
            return (shown["vllm:num_requests_running"], shown["vllm:num_requests_waiting"]) == (1, 2)

        await until(two_wait)
        await asyncio.gather(*tasks)
        truth = await control.truth()
        recent = await control.truth(since=truth.now.at - 0.25)
    assert 1 <= len(recent.history) <= 4 < len(truth.history)
    waits = sorted(request.queue_wait for request in truth.requests.values())
    assert waits == pytest.approx([0, 0.4, 0.8], abs=0.15)
    assert max(sample.head_age for sample in truth.history) == pytest.approx(0.8, abs=0.25)
    assert max(sample.first_token_wait for sample in truth.history) == pytest.approx(0.8, abs=0.25)
    assert max(sample.waiting for sample in truth.history) == 2
    assert (truth.now.head_age, truth.now.first_token_wait) == (0, 0)


PHASES = {
    "queue": (Knobs(max_num_seqs=1, rate=20), 1),
    "prefill": (Knobs(rate=20, prefill_rate=10), 0),
    "decode": (Knobs(rate=20), 0),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("leaving", ["fin", "rst"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_frees_its_place_at_once(phase, leaving, stream):
    """In whatever phase, however it leaves, and streamed or not."""
    knobs, busy = PHASES[phase]
    async with engine(max_num_seqs=knobs.max_num_seqs, rate=knobs.rate, prefill_rate=knobs.prefill_rate) as port:
        others = [asyncio.create_task(Visit(User("other", max_tokens=5000), port).run()) for _ in range(busy)]

        async def busy_as_planned() -> bool:
            return (await EngineControl(port).truth()).now.running == busy

        await until(busy_as_planned)
        leaver = Visit(User("leaver", max_tokens=5000, leave_at=0.3, leaving=leaving, stream=stream), port)
        outcome = await leaver.run()
        assert outcome.how == "left"

        async def aborted() -> bool:
            return await state_of(port, "leaver") == "aborted"

        await until(aborted, within=0.5)
        truth = await EngineControl(port).truth()
        request = truth.requests["leaver"]
        assert (request.started is None) == (phase == "queue")
        assert (request.first_token is None) == (phase != "decode")
        assert (truth.now.running, truth.now.waiting) == (busy, 0)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_engine_that_ignores_disconnects_runs_to_the_end(stream):
    """Tokens go on being generated and counted for a client whose socket is closed."""
    async with engine(rate=100, ignore_disconnects=True) as port:
        outcome = await Visit(User("leaver", max_tokens=60, leave_at=0.2, stream=stream), port).run()
        truth, shown = await at_rest(port), await page(port)
    request = truth.requests["leaver"]
    assert (request.state, request.abandoned, request.generated) == ("finished", True, 60)
    assert outcome.tokens <= request.written < 40
    assert shown["vllm:generation_tokens_total"] == 60
    assert shown["vllm:request_success_total"] == 1


async def test_a_stream_has_its_header_at_once_unless_told_otherwise():
    """vLLM sends the header before the request is scheduled; with late_headers it comes with the first token."""
    body = {"prompt": "tok " * 300, "max_tokens": 3, "stream": True}
    for late in (False, True):
        async with engine(prefill_rate=1000, late_headers=late) as port, aiohttp.ClientSession() as session:
            loop = asyncio.get_running_loop()
            asked = loop.time()
            async with session.post(f"http://{LOOPBACK}:{port}/v1/completions", json=body) as answer:
                waited = loop.time() - asked
                assert (await answer.read()).count(b"data: ") == 4
            assert (waited > 0.25) == late


async def test_frozen_and_thawed():
    """A frozen engine answers /health and shows a page on which nothing moves; thawed, it finishes what it had."""
    async with engine(rate=100) as port:
        control = EngineControl(port)
        visit = Visit(User("u", max_tokens=60), port)
        task = asyncio.create_task(visit.run())

        async def begun() -> bool:
            return visit.tokens > 3

        await until(begun)
        await control.freeze()
        before, tokens = await page(port), visit.tokens
        await asyncio.sleep(0.2)
        after = await page(port)
        moved = {name for name in before if before[name] != after[name] and name.startswith("vllm:")}
        assert moved == set()
        assert (await control.truth()).frozen
        assert visit.tokens <= tokens + 1
        async with aiohttp.ClientSession() as session, session.get(f"http://{LOOPBACK}:{port}/health") as answer:
            assert answer.status == 200
        await control.thaw()
        assert (await asyncio.wait_for(task, 5)).tokens == 60


async def test_knobs_turn_while_it_runs():
    """A rate can be changed mid-stream; a knob that is none, or a value that fits none, is named."""
    async with engine(rate=1) as port:
        control = EngineControl(port)
        task = asyncio.create_task(Visit(User("u", max_tokens=50), port).run())
        await control.turn(rate=500, max_num_seqs=2)
        assert (await asyncio.wait_for(task, 3)).how == "completed"
        assert (await control.truth()).knobs == Knobs(rate=500, max_num_seqs=2)
        with pytest.raises(ValueError, match="speed: no such knob"):
            await control.turn(speed=3)
        with pytest.raises(ValueError, match="rate"):
            await control.turn(rate="fast")
        with pytest.raises(ValueError, match="rate must be above 0"):
            await control.turn(rate=-1)


async def test_the_same_name_twice_is_two_requests():
    """A proxy that retries shows up in the truth."""
    async with engine(rate=500) as port:
        for _ in range(2):
            await Visit(User("u", max_tokens=3), port).run()
        assert set((await EngineControl(port).truth()).requests) == {"u", "u#2"}


@pytest.mark.e2e
async def test_a_crash_ends_the_process_and_its_streams(tmp_path: Path):
    """No goodbye: open streams break off, and nobody listens any more."""
    port = free_port()
    async with running(engine_part(port), tmp_path) as part:
        task = asyncio.create_task(Visit(User("u", max_tokens=5000), port).run())

        async def running_one() -> bool:
            return (await EngineControl(port).truth()).now.running == 1

        await until(running_one)
        await EngineControl(port).crash()
        outcome = await asyncio.wait_for(task, 5)
        assert outcome.how == "failed"
        assert await asyncio.wait_for(part.process.wait(), 5) == 1
        assert not await listens(port)


@pytest.mark.e2e
async def test_the_command_takes_every_knob(tmp_path: Path):
    """What engine_part is given is what the process runs with."""
    knobs = Knobs(3, 77.0, 4321.0, 99, ignore_disconnects=True, late_headers=True)
    port = free_port()
    async with running(engine_part(port, knobs), tmp_path):
        assert (await EngineControl(port).truth()).knobs == knobs


@pytest.mark.e2e
async def test_many_streams_are_cheap(tmp_path: Path):
    """20 streams at 400 tokens/s keep their pace: 8,000 events a second out of one process, read by another."""
    port = free_port()
    async with running(engine_part(port, Knobs(20, 400.0)), tmp_path):
        visits = [Visit(User(f"u{number}", prompt_tokens=4, max_tokens=800), port) for number in range(20)]
        outcomes = await asyncio.wait_for(asyncio.gather(*(visit.run() for visit in visits)), 12)
        assert sum(outcome.tokens for outcome in outcomes) == 20 * 800
        slowest = max(outcome.ended - outcome.sent for outcome in outcomes)
        assert slowest < 2 * 800 / 400  # half the pace would do on a busy machine; alone it is 2.0 s
