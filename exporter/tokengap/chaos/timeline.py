"""What happened when: the story of a run, told while it happens and kept for the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["phase", "fault", "proof", "heal", "verdict", "note"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, ``at`` a ``time.monotonic()``."""

    at: float
    kind: Kind
    text: str


@dataclass(slots=True)
class Timeline:
    """The events of a run in order. ``say`` tells a person each as it comes."""

    say: Callable[[str], None]
    events: list[Event] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def note(self, kind: Kind, text: str) -> float:
        """Take an event in, and return when it was."""
        event = Event(time.monotonic(), kind, text)
        self.events.append(event)
        self.say(self.line(event))
        return event.at

    def line(self, event: Event) -> str:
        """Return an event as a line."""
        return f"{event.at - self.began:6.1f} s  {event.kind:<7}  {event.text}"
