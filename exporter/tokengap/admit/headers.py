"""Which headers pass a proxy, and which are its own. Pure: no I/O."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Final

from multidict import CIMultiDict

REQUEST_ID: Final = "X-Request-Id"
FORWARDED_FOR: Final = "X-Forwarded-For"

#: They concern one connection (RFC 9110, 7.6.1); those that ``Connection`` names besides do so too.
_OF_A_CONNECTION: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authenticate", "proxy-authorization"),
    }
)
#: The side that sends sets these itself. ``Expect`` is answered here.
_OF_THE_SENDER: Final = frozenset({"host", "content-length", "expect"})

#: What may stand in a log and go to an engine as the name of a request.
_ID: Final = re.compile(r"[!-~]{1,200}")


def passed(headers: Mapping[str, str], *, but: Iterable[str] = ()) -> CIMultiDict[str]:
    """Return the headers that go on, in their order, without those that concern one connection and without ``but``."""
    dropped = _OF_A_CONNECTION | {name.strip().lower() for name in headers.get("Connection", "").split(",")} | set(but)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def to_engine(headers: Mapping[str, str], request_id: str, peer: str, *, readable: bool) -> CIMultiDict[str]:
    """Return what a client's request becomes. ``readable``: its answer is to be read here, so it must come plain."""
    going = passed(headers, but=_OF_THE_SENDER)
    going[REQUEST_ID] = request_id
    before = ", ".join(going.popall(FORWARDED_FOR, []))
    going[FORWARDED_FOR] = f"{before}, {peer}" if before else peer
    if readable:
        going["Accept-Encoding"] = "identity"
    return going


def request_id(headers: Mapping[str, str]) -> str:
    """Return the name that a request has, or one made for it."""
    given = headers.get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
