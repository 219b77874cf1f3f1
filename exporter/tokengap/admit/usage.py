"""How many tokens an answer holds, asked of the engine itself and kept from a client that did not ask. Pure: no I/O.

An event of a stream is not a token: an engine may put several into one, or none. vLLM says exactly how many there were
so far in every event when asked (``stream_options`` with ``include_usage`` and ``continuous_usage_stats``), so it is
asked, and what comes of it is taken out again:

* the member ``usage`` of every event, and the event at the end that holds nothing else, where the client asked for
  none;
* only the running ``usage``, where the client asked for the one at the end;
* nothing, where it asked for both.

All other bytes pass as they came, in the pieces in which they came as far as whole events allow. Where an engine does
not know these options (:data:`ASKS`, from the most to the least) events with text in them are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

import msgspec

#: What the engine is asked for: usage in every event, usage at the end, nothing.
Asked: TypeAlias = Literal["running", "total", "nothing"]
ASKS: Final[tuple[Asked, ...]] = ("running", "total", "nothing")

_OPTIONS: Final[dict[Asked, tuple[str, ...]]] = {
    "running": ("include_usage", "continuous_usage_stats"),
    "total": ("include_usage",),
    "nothing": (),
}

#: Longest event that is waited for; what is longer is passed on as it comes, and no longer read.
MOST_HELD_BACK: Final = 2 * 2**20
#: Longest answer that is kept to be read at its end, where it is not streamed. The usage stands at its end.
MOST_KEPT: Final = 256 * 1024

_TRUE: Final = msgspec.Raw(b"true")
_Members: TypeAlias = dict[str, msgspec.Raw]
_members = msgspec.json.Decoder(_Members)

_EVENT_END: Final = re.compile(rb"(\r\n\r\n|\n\n)")
#: A member ``usage`` with the comma before it, its value an object with at most one level of objects below.
_USAGE: Final = re.compile(rb'\s*,\s*"usage"\s*:\s*\{(?:[^{}"]|"[^"\\]*"|\{[^{}]*\})*\}')


class StreamOptions(msgspec.Struct, frozen=True):
    """The part of ``stream_options`` that concerns usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Ask(msgspec.Struct, frozen=True):
    """What a request for a generation says that matters here."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def sees(self) -> Asked:
        """Return the usage that the client asked for itself."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "nothing"
        return "running" if options.continuous_usage_stats else "total"


_asks = msgspec.json.Decoder(Ask)


def read_ask(body: bytes) -> Ask:
    """Read the body of a request. ValueError says what is wrong with it; of no body nothing is asked."""
    return _asks.decode(body) if body else Ask()


def asking(body: bytes, asked: Asked) -> bytes:
    """Return the body of a streamed request with this usage asked for besides. Values keep their bytes."""
    members = _members.decode(body)
    options = members.get("stream_options")
    wanted = (msgspec.json.decode(options, type=_Members | None) if options is not None else None) or {}
    wanted |= dict.fromkeys(_OPTIONS[asked], _TRUE)
    return msgspec.json.encode(members | {"stream_options": msgspec.Raw(msgspec.json.encode(wanted))})


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None
    output_tokens: int | None = None  # the word of the Responses and Messages APIs

    @property
    def tokens(self) -> int | None:
        return self.output_tokens if self.completion_tokens is None else self.completion_tokens


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: Any = None

    @property
    def says(self) -> bool:
        """Whether there is anything of a token in it: text, reasoning, a call of a tool."""
        said = self.delta
        return bool(self.text) or (isinstance(said, dict) and any(said[key] for key in said if key != "role"))


class _Whole(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _Event(msgspec.Struct, frozen=True):
    """An event of any of the APIs, as far as it is about tokens."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    type: str = ""
    response: _Whole | None = None

    @property
    def tokens(self) -> int | None:
        """The count that it holds, where it holds one."""
        usage = self.usage or (self.response.usage if self.response is not None else None)
        return None if usage is None else usage.tokens


_events = msgspec.json.Decoder(_Event)
_whole = msgspec.json.Decoder(_Whole)


class EventStream:
    """An answer of server-sent events on its way through.

    ``sees`` is what the client asked for. ``tokens`` are those in the events that were passed on so far.
    """

    def __init__(self, sees: Asked) -> None:
        self.exact = False
        self._sees = sees
        self._held = b""
        self._total: int | None = None
        self._of_choice: dict[int, int] = {}
        self._unreadable = False

    @property
    def tokens(self) -> int:
        """Tokens so far: what the engine said, else events with text in them."""
        return sum(self._of_choice.values()) if self._total is None else self._total

    def feed(self, data: bytes) -> bytes:
        """Return what goes to the client of what came."""
        if self._unreadable:
            return data
        if not self._held and 0 <= data.find(b"\n\n") == len(data) - 2:  # one whole event, as most come
            event = self._one(data[:-2])
            return b"" if event is None else event + b"\n\n"
        parts = _EVENT_END.split(self._held + data if self._held else data)
        self._held = parts.pop()
        if len(self._held) > MOST_HELD_BACK:
            self._unreadable = True
            parts += [self._held, b""]
            self._held = b""
        return b"".join(self._passed(parts))

    def end(self) -> bytes:
        """Return what was held back: an answer that does not end with an event."""
        held, self._held = self._held, b""
        return held

    def _passed(self, parts: list[bytes]) -> Iterator[bytes]:
        """Yield events and their ends, ``parts`` being both by turns."""
        for event, end in zip(parts[::2], parts[1::2], strict=True):
            passed = self._one(event)
            if passed is not None:
                yield passed
                yield end

    def _one(self, event: bytes) -> bytes | None:
        """Return one event, without its end, as the client sees it; None where it does not."""
        payload = _payload(event)
        if not payload.startswith(b"{"):
            return event  # [DONE], a comment
        try:
            read = _events.decode(payload)
        except ValueError:
            return event
        self._count(read)
        if read.usage is None or read.choices is None or self._sees == "running":
            return event
        if read.choices:
            return _without_usage(event)
        return event if self._sees == "total" else None

    def _count(self, event: _Event) -> None:
        tokens = event.tokens
        if tokens is None:
            if not self.exact:
                self._count_text(event)
        elif event.choices:
            if not self.exact:
                self.exact = True
                self._of_choice.clear()
            self._of_choice[event.choices[0].index] = tokens
        elif event.choices is not None or tokens >= self.tokens:
            # The Messages API begins with a count of its own, which is not the total.
            self.exact = True
            self._total = tokens

    def _count_text(self, event: _Event) -> None:
        for choice in event.choices or ():
            if choice.says:
                self._of_choice[choice.index] = self._of_choice.get(choice.index, 0) + 1
        if event.type.endswith(("_text.delta", "content_block_delta", "arguments.delta")):
            self._of_choice[0] = self._of_choice.get(0, 0) + 1


class WholeAnswer:
    """An answer that is not streamed, on its way through. ``tokens`` is known at its end."""

    def __init__(self) -> None:
        self.tokens = 0
        self.exact = False
        self._kept = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return what goes to the client of what came: all of it."""
        if len(self._kept) <= MOST_KEPT:
            self._kept += data
        return data

    def end(self) -> bytes:
        """Read the usage. Nothing was held back."""
        try:
            usage = _whole.decode(self._kept).usage
        except ValueError:
            usage = None
        if usage is not None and usage.tokens is not None:
            self.tokens, self.exact = usage.tokens, True
        self._kept.clear()
        return b""


Passing: TypeAlias = EventStream | WholeAnswer


def refuses_to_tell(status: int, body: bytes) -> bool:
    """Tell whether an engine refused a request for the usage that was asked for besides."""
    return status in (400, 422) and (b"stream_options" in body or b"_usage" in body)


def _payload(event: bytes) -> bytes:
    """Return the JSON of an event, whichever of its lines that is."""
    if not event.startswith(b"data:"):
        at = event.find(b"\ndata:")
        if at < 0:
            return b""
        event = event[at + 1 :]
    return event[5:].strip()


def _without_usage(event: bytes) -> bytes:
    """Return an event without the member ``usage`` of its object."""
    at = event.rfind(b',"usage":{')
    # As engines write it: the last member, an object without objects in it. Only the brace of the whole one follows.
    if at > 0 and event.find(b"}", at) == len(event) - 2:
        return event[:at] + b"}"
    *_, member = [None, *_USAGE.finditer(event)]
    if member is not None:
        without = event[: member.start()] + event[member.end() :]
        if "usage" not in _members.decode(_payload(without)):
            return without
    members = _members.decode(_payload(event))
    del members["usage"]
    return event[: event.index(b"{")] + msgspec.json.encode(members)
