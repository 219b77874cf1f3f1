"""The bytes of answers."""

from __future__ import annotations

import json

import pytest

from tokengap.lab.answers import END, Answer, prompt_tokens, read_ask


def answer(body: dict, *, chat: bool) -> Answer:
    ask = read_ask(json.dumps(body).encode(), chat=chat)
    return Answer(ask=ask, chat=chat, id="0" * 32, model="tokengap-lab", created=1_764_403_200, prompt=7, start=3)


def event(data: bytes) -> dict:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    return json.loads(data[6:])


CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
PLAIN = {"prompt": "hello", "stream": True}


@pytest.mark.parametrize(("body", "chat"), [(CHAT, True), (PLAIN, False)], ids=["chat", "completion"])
def test_a_token_is_an_event_of_the_size_of_vllms(body, chat):
    """One token, one event, 200 to 260 bytes, the text in the place where clients look for it."""
    said = answer(body, chat=chat)
    for number in range(1, 60):
        data = said.token(number, None)
        assert 200 <= len(data) <= 260
        choice = event(data)["choices"][0]
        assert choice["delta"]["content"] if chat else choice["text"]
        assert choice["finish_reason"] is None
    assert event(said.token(60, "length"))["choices"][0]["finish_reason"] == "length"
    assert said.closing(60) == END


def test_a_chat_opens_with_its_role():
    """The role comes before the first token, and carries none."""
    assert event(answer(CHAT, chat=True).opening())["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer(PLAIN, chat=False).opening() == b""


def test_usage_is_told_at_the_end_or_all_the_time():
    """``include_usage`` adds one event without choices; ``continuous_usage_stats`` counts in every event."""
    once = answer(CHAT | {"stream_options": {"include_usage": True}}, chat=True)
    assert "usage" not in event(once.token(1, None))
    last = event(once.closing(9).removesuffix(END))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 7, "total_tokens": 16, "completion_tokens": 9}
    always = answer(
        CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        chat=True,
    )
    assert [event(always.token(number, None))["usage"]["completion_tokens"] for number in (1, 2, 3)] == [1, 2, 3]
    assert event(always.opening())["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_an_answer_that_is_not_streamed_is_one_document(chat):
    """With all of its text, its reason and its usage."""
    document = json.loads(answer(CHAT if chat else PLAIN, chat=chat).whole(30, "stop"))
    choice = document["choices"][0]
    assert len(choice["message"]["content"] if chat else choice["text"]) > 60
    assert choice["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize(
    ("body", "chat", "tokens"),
    [
        ({"prompt": "tok " * 400}, False, 400),
        ({"prompt": [1, 2, 3]}, False, 3),
        ({"prompt": ["tok ", "tok "]}, False, 2),
        ({"messages": [{"content": "tok tok "}, {"content": None}]}, True, 2),
        ({"messages": [{"content": [{"type": "text", "text": "tok "}]}]}, True, 1),
        ({"prompt": ""}, False, 1),
    ],
)
def test_prompt_tokens(body, chat, tokens):
    """Four bytes of text are a token; ids count themselves; no prompt is free."""
    assert prompt_tokens(read_ask(json.dumps(body).encode(), chat=chat)) == tokens


@pytest.mark.parametrize(
    ("body", "chat", "why"),
    [
        (b"", False, "truncated"),
        (b"{}", True, "messages"),
        (b"{}", False, "prompt"),
        (b'{"prompt": "x", "max_tokens": 0}', False, "max_tokens"),
        (b'{"prompt": "x", "max_tokens": "many"}', False, "max_tokens"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(body, chat, why):
    """The message names the field."""
    with pytest.raises(ValueError, match=why):
        read_ask(body, chat=chat)
