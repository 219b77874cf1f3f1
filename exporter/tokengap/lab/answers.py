"""What a completion asks for and what is answered, byte for byte as vLLM's OpenAI server writes it. No I/O.

One token is one event. Bytes of an event differ only by the length of the token's text, as with a real tokenizer.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

#: The name of the model that a stand-in engine serves unless told otherwise.
MODEL = "tokengap-lab"

#: Tokens of the stand-in's only language. Their lengths, 2 to 10 bytes, are those of common English tokens.
TOKENS = (
    *(" the", " of", ",", " request", " a", "ing", " slot", " waits", " and", " stream", ".", " in", " token"),
    *(" generation", "ed", " for", " client", " to", " queue", " is", " engine", " no", " one", " reads", "\\n"),
)

END = b"data: [DONE]\n\n"


class StreamOptions(msgspec.Struct, frozen=True):
    """``continuous_usage_stats`` is vLLM's own: usage in every event, the exact count of tokens so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; only text counts."""

    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    content: str | list[ContentPart] | None = None


class Ask(msgspec.Struct, frozen=True):
    """The body of a completion or chat completion, as far as the stand-in takes notice of it."""

    prompt: str | list[int | str] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None

    @property
    def limit(self) -> int | None:
        """Output tokens asked for at most, whichever way it was spelled."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def read_ask(body: bytes, *, chat: bool) -> Ask:
    """Read a request's body. ValueError says what is wrong with it."""
    ask = msgspec.json.decode(body, type=Ask)
    if (ask.messages if chat else ask.prompt) is None:
        raise ValueError(f"{'messages' if chat else 'prompt'}: field required")
    if ask.limit is not None and ask.limit < 1:
        raise ValueError(f"max_tokens must be at least 1, got {ask.limit}")
    return ask


def prompt_tokens(ask: Ask) -> int:
    """Count the prompt's tokens: four bytes of text are one, and token ids are themselves."""
    if isinstance(ask.prompt, list) and all(isinstance(item, int) for item in ask.prompt):
        return max(1, len(ask.prompt))
    texts: list[str] = []
    if isinstance(ask.prompt, str):
        texts.append(ask.prompt)
    elif ask.prompt is not None:
        texts += [item for item in ask.prompt if isinstance(item, str)]
    for message in ask.messages or ():
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            texts += [part.text for part in message.content or ()]
    return max(1, math.ceil(sum(len(text.encode()) for text in texts) / 4))


class Answer:
    """The bytes of one answer. ``start`` picks where in :data:`TOKENS` its text begins."""

    def __init__(self, *, ask: Ask, chat: bool, id: str, model: str, created: int, prompt: int, start: int) -> None:  # noqa: A002 - the API's own word
        self._chat = chat
        self._usage = ask.stream_options.include_usage
        self._running_usage = self._usage and ask.stream_options.continuous_usage_stats
        self._prompt = prompt
        self._start = start
        kind = "chat.completion" if chat else "text_completion"
        self._fields = f'"id":"{"chatcmpl" if chat else "cmpl"}-{id}","object":"{kind}'
        self._more = f'"created":{created},"model":{msgspec.json.encode(model).decode()}'
        event = f'data: {{{self._fields}{".chunk" if chat else ""}",{self._more},"choices":['
        self._event = event.encode()
        self._head = (event + ('{"index":0,"delta":{"content":"' if chat else '{"index":0,"text":"')).encode()
        self._tails = {reason: self._tail(reason).encode() for reason in (None, "stop", "length")}

    def _tail(self, reason: str | None) -> str:
        why = "null" if reason is None else f'"{reason}"'
        if self._chat:
            return f'"}},"logprobs":null,"finish_reason":{why},"token_ids":null}}]'
        return f'","logprobs":null,"finish_reason":{why},"stop_reason":null,"token_ids":null}}]'

    def _counts(self, generated: int) -> bytes:
        prompt, total = self._prompt, self._prompt + generated
        return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (prompt, total, generated)

    def opening(self) -> bytes:
        """Return the event that goes before the first token: a chat's role. A completion has none."""
        if not self._chat:
            return b""
        usage = b"," + self._counts(0) if self._running_usage else b""
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._event + role + b',"prompt_token_ids":null' + usage + b"}\n\n"

    def token(self, number: int, reason: Literal["stop", "length"] | None) -> bytes:
        """Return the event of the token with this number, counted from 1. ``reason`` goes with the last one."""
        usage = b"," + self._counts(number) if self._running_usage else b""
        text = TOKENS[(self._start + number) % len(TOKENS)].encode()
        return self._head + text + self._tails[reason] + usage + b"}\n\n"

    def closing(self, generated: int) -> bytes:
        """Return what follows the last token."""
        return (self._event + b"]," + self._counts(generated) + b"}\n\n" if self._usage else b"") + END

    def whole(self, generated: int, reason: Literal["stop", "length"] | None) -> bytes:
        """Return the answer to a request that did not ask for a stream."""
        text = "".join(TOKENS[(self._start + number) % len(TOKENS)] for number in range(1, generated + 1))
        said = f'"message":{{"role":"assistant","content":"{text}"}}' if self._chat else f'"text":"{text}"'
        choice = f'{{"index":0,{said},"logprobs":null,"finish_reason":"{reason}","stop_reason":null}}'
        body = f'{{{self._fields}",{self._more},"choices":[{choice}],'
        return body.encode() + self._counts(generated) + b"}"
