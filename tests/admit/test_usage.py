"""Usage: asked for, counted, and not there for a client that did not ask, whatever way the bytes are cut."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.admit.usage import EventStream, WholeAnswer, asking, read_ask, refuses_to_tell
from tokengap.lab.answers import Answer, Ask, StreamOptions


def answer(*, chat: bool, include: bool, running: bool, tokens: int = 7) -> bytes:
    """Return a streamed answer as the engine writes it."""
    ask = Ask(prompt="x", messages=[], stream=True, stream_options=StreamOptions(include, running))
    made = Answer(ask=ask, chat=chat, id="1", model="m", created=1, prompt=3, start=5)
    events = [made.token(number, "length" if number == tokens else None) for number in range(1, tokens + 1)]
    return b"".join([made.opening(), *events, made.closing(tokens)])


def through(passing, data: bytes, cuts: list[int]) -> bytes:
    """Pass ``data`` on in pieces."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    return b"".join([*(passing.feed(piece) for piece in pieces if piece), passing.end()])


@given(st.booleans(), st.sampled_from(["nothing", "total", "running"]), st.lists(st.integers(0, 5000), max_size=20))
def test_a_client_sees_what_it_would_have_seen(chat, sees, cuts):
    """Byte for byte what the engine sends to one who asks for just this, and the count is exact."""
    sent = answer(chat=chat, include=True, running=True)
    passing = EventStream(sees)
    assert through(passing, sent, cuts) == answer(chat=chat, include=sees != "nothing", running=sees == "running")
    assert (passing.tokens, passing.exact) == (7, True)


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_without_usage_events_with_text_count(cuts):
    """An engine that tells no usage: nothing is changed, and the role that opens a chat is no token."""
    sent = answer(chat=True, include=False, running=False)
    passing = EventStream("nothing")
    assert through(passing, sent, cuts) == sent
    assert (passing.tokens, passing.exact) == (7, False)


def test_events_pass_as_soon_as_they_are_whole():
    """What came of the next event waits for its end, and nothing else does."""
    first, second = b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[{"text":"b"}]}\n\n'
    passing = EventStream("nothing")
    assert passing.feed(first + second[:9]) == first
    assert passing.tokens == 1
    assert passing.feed(second[9:]) == second
    assert passing.tokens == 2


def test_the_total_at_the_end_wins_over_counted_events():
    """Two tokens in one event: the engine knows better."""
    passing = EventStream("nothing")
    passing.feed(b'data: {"choices":[{"text":"ab"}]}\n\n')
    assert (
        passing.feed(b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n') == b"data: [DONE]\n\n"
    )
    assert (passing.tokens, passing.exact) == (2, True)


def test_several_choices_are_added_up():
    """With n > 1 running usage is that of one choice."""
    passing = EventStream("running")
    for index, tokens in ((0, 1), (1, 1), (0, 2)):
        event = {"choices": [{"index": index, "text": "x"}], "usage": {"completion_tokens": tokens}}
        passing.feed(b"data: " + msgspec.json.encode(event) + b"\n\n")
    assert passing.tokens == 3


@pytest.mark.parametrize(
    ("event", "left"),
    [
        (b'{"choices":[{"a":1}],"usage":{"completion_tokens":1}}', b'{"choices":[{"a":1}]}'),
        (b'{"choices":[{"a":1}],"usage":{"completion_tokens":1},"z":2}', b'{"choices":[{"a":1}],"z":2}'),
        (b'{"usage":{"completion_tokens":1},"choices":[{"a":1}]}', b'{"choices":[{"a":1}]}'),
        (b'{"choices": [{"a": 1}], "usage": {"completion_tokens": 1}}', b'{"choices": [{"a": 1}]}'),
        (
            b'{"usage":{"completion_tokens":1},"choices":[{"a":1,"usage":{"b":1}}]}',
            b'{"choices":[{"a":1,"usage":{"b":1}}]}',
        ),
        (
            b'{"choices":[{"text":",\\"usage\\":{}"}],"usage":{"completion_tokens":1,"details":{"a":1}}}',
            b'{"choices":[{"text":",\\"usage\\":{}"}]}',
        ),
        (
            b'{"choices":[{"a":1}],"usage":{"completion_tokens":1,"x":{"y":{"z":"}"}}}}',
            b'{"choices":[{"a":1}]}',
        ),
    ],
    ids=["last", "in between", "first", "spaced", "one of a choice", "in a text", "deep"],
)
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
def test_only_the_usage_of_the_event_is_taken_out(event, left, end):
    """Wherever it stands, and nothing that looks like it."""
    assert EventStream("nothing").feed(b"data: " + event + end) == b"data: " + left + end


@pytest.mark.parametrize(
    "data",
    [
        b": keep-alive\n\n",
        b"data: [DONE]\n\n",
        b"data: {broken\n\n",
        b'data: {"error":{"code":500}}\n\n',
        b"event: x\n\n",
    ],
)
def test_what_is_no_answer_passes(data):
    """Comments, ends, errors and rubbish are the client's to read."""
    passing = EventStream("nothing")
    assert passing.feed(data) == data
    assert passing.tokens == 0


def test_an_event_without_end_is_not_kept_for_ever():
    """Past two megabytes it passes as it comes."""
    passing = EventStream("nothing")
    piece = b"x" * 2**20
    assert b"".join([passing.feed(piece) for _ in range(4)] + [passing.end()]) == piece * 4


def test_the_responses_api_tells_at_its_end():
    """Deltas are counted until ``response.completed`` says how many tokens they were."""
    passing = EventStream("running")
    delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
    assert passing.feed(delta * 3) == delta * 3
    assert passing.tokens == 3
    passing.feed(
        b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"output_tokens":5}}}\n\n'
    )
    assert (passing.tokens, passing.exact) == (5, True)


def test_the_messages_api_tells_as_it_goes():
    """Its first count is of the beginning, its last the total."""
    passing = EventStream("running")
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'
    passing.feed(delta * 2)
    passing.feed(b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":9}}\n\n')
    assert passing.tokens == 9


@given(st.integers(1, 5000))
def test_a_whole_answer_tells_at_its_end(cut):
    """Its bytes are not touched."""
    body = b'{"choices":[{"text":"' + b"x" * 400 + b'"}],"usage":{"completion_tokens":12}}'
    passing = WholeAnswer()
    assert through(passing, body, [cut]) == body
    assert (passing.tokens, passing.exact) == (12, True)


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"usage":null}', b'{"usage":{"prompt_tokens":3}}'])
def test_a_whole_answer_that_tells_nothing_has_none(body):
    """Errors, embeddings: no output tokens, and no guess."""
    passing = WholeAnswer()
    assert through(passing, body, []) == body
    assert (passing.tokens, passing.exact) == (0, False)


def test_asking_keeps_every_other_byte():
    """Numbers as they were written, and options that are not ours."""
    body = b'{"stream": true, "seed": 12345678901234567890, "temperature": 1.0, "stream_options": {"x": 1.50}}'
    asked = asking(body, "running")
    assert asked == (
        b'{"stream":true,"seed":12345678901234567890,"temperature":1.0,'
        b'"stream_options":{"x":1.50,"include_usage":true,"continuous_usage_stats":true}}'
    )
    assert b"continuous" not in asking(body, "total")


@pytest.mark.parametrize("options", [b"", b',"stream_options":null', b',"stream_options":{"include_usage":false}'])
def test_asking_those_who_did_not(options):
    """Absent, null and false are the same wish: not to see it."""
    body = b'{"stream":true' + options + b"}"
    assert read_ask(body).sees == "nothing"
    assert read_ask(asking(body, "running")).sees == "running"


def test_running_usage_alone_is_none():
    """vLLM tells no running usage to one who does not ask for usage."""
    assert read_ask(b'{"stream_options":{"continuous_usage_stats":true}}').sees == "nothing"


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [
        (400, b'{"error":{"message":"Extra inputs are not permitted: continuous_usage_stats"}}', True),
        (422, b'{"detail":[{"loc":["body","stream_options"]}]}', True),
        (400, b'{"error":{"message":"max_tokens must be at least 1"}}', False),
        (500, b"stream_options", False),
    ],
)
def test_a_refusal_to_tell(status, body, refused):
    """Only where the engine names what it was asked for besides is it asked again."""
    assert refuses_to_tell(status, body) is refused


def test_a_body_that_is_none():
    """One line says what is wrong."""
    with pytest.raises(ValueError, match=re.escape("JSON is malformed")):
        read_ask(b"{nope")
