"""What stands before every route: the rate, the password, the headers of every answer."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, TypeAlias

import bcrypt
from aiohttp import BasicAuth, web
from multidict import CIMultiDict

from tokengap.config.values import Count
from tokengap.config.web import RateSettings, Spacing
from tokengap.web.access import Access

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: What tells only whether this process answers, and is asked by those who have no password: a kubelet, a balancer.
OPEN: Final = frozenset(("/-/healthy", "/-/ready"))

#: How often each client may ask where the file says nothing of rates: a hundred times a second. A live page asks twice
#: a second and begins with ten files, so behind one address there is room for some tens of people.
EACH: Final = RateSettings(Spacing(0.01), Count(500))

#: Clients of which is known how often they have asked, those who asked last.
MOST_CLIENTS: Final = 1000

#: Passwords that wait to be hashed. One takes some 50 ms of a core, and they are hashed one after the other.
MOST_WAITING: Final = 16

#: Passwords that were right and are not hashed again.
MOST_REMEMBERED: Final = 100

#: Bytes of a password that bcrypt looks at; others pass over the rest as well.
_BCRYPT_BYTES: Final = 72

_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "tokengap",  # not which version of Python and of which library
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "deny",
}


class Guard:
    """Lets through who may ask. What it goes by is changed with :meth:`take` while it stands.

    ``busy`` are the connections on which an answer is being made. ``telemetry_path`` is where bytes lie ready, which
    only a rate of the file limits: nobody can keep a scraper out, not even from the scraper's own address.
    """

    def __init__(self, access: Access | None = None, telemetry_path: str = "/metrics") -> None:
        self.busy: set[web.RequestHandler] = set()
        self._telemetry_path = telemetry_path
        self.take(access or Access())

    def take(self, access: Access) -> None:
        """Go by this from now on."""
        self._passwords = Passwords(access.users) if access.users else None
        self._bucket = Bucket(access.rate) if access.rate is not None and access.rate.interval > 0 else None
        self._each = Buckets(EACH) if access.rate is None else None
        # As what they will be part of: that is quicker than a dict, and is done for every answer.
        self._headers = CIMultiDict((name, value) for name, value in {**_HEADERS, **access.headers}.items() if value)

    def secure(self, headers: CIMultiDict[str]) -> None:
        """Put what every answer has into the headers of one."""
        headers.update(self._headers)

    async def prepare(self, _: web.Request, response: web.StreamResponse) -> None:
        """Put them into an answer of the application."""
        response.headers.update(self._headers)

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer, or refuse: 429 too often, 401 without the password, 503 while too many passwords are looked at."""
        self.busy.add(request.protocol)
        try:
            if request.path not in OPEN:
                if self._too_often(request):
                    return _refused(HTTPStatus.TOO_MANY_REQUESTS, "too many requests; try again", {"Retry-After": "1"})
                if self._passwords is not None and (refused := await _stranger(self._passwords, request)) is not None:
                    return refused
            return await handler(request)
        finally:
            self.busy.discard(request.protocol)

    def _too_often(self, request: web.Request) -> bool:
        if self._bucket is not None:
            return not self._bucket.take(time.monotonic())
        if self._each is None or (request.path == self._telemetry_path and not request.query_string):
            return False
        return not self._each.take(request.remote or "", time.monotonic())


async def _stranger(passwords: Passwords, request: web.Request) -> web.Response | None:
    """Return why a request is not answered for lack of a password, None where it is."""
    try:
        known = await passwords.right(request.headers.get("Authorization", ""))
    except Busy:
        again = {"Retry-After": "1"}
        return _refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many passwords to look at; try again", again)
    challenge = {"WWW-Authenticate": 'Basic realm="tokengap", charset="UTF-8"'}
    return None if known else _refused(HTTPStatus.UNAUTHORIZED, "a user and a password are needed", challenge)


class Busy(Exception):
    """As many passwords wait as may."""


class Passwords:
    """The users and their passwords.

    Hashing is made to be slow, so a password that was right is remembered: as a digest with a key of this process, with
    which nobody can do anything elsewhere. For a user that there is none, a hash is computed all the same: how long an
    answer takes does not tell who is a user.
    """

    def __init__(self, users: Mapping[str, bytes]) -> None:
        self._users = users
        self._decoy = next(iter(users.values()))
        self._key = secrets.token_bytes(32)
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def right(self, authorization: str) -> bool:
        """Return whether a header names a user with the right password. Raises Busy."""
        try:
            user, password, _ = BasicAuth.decode(authorization, encoding="utf-8")
        except ValueError:
            return False
        # A user's name has no NUL (it would not be printable), so the parts cannot be shifted.
        digest = hashlib.blake2b(f"{user}\0{password}".encode(), key=self._key).digest()
        if digest in self._remembered:
            self._remembered.move_to_end(digest)
            return True
        if self._waiting >= MOST_WAITING:
            raise Busy
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                hashed = self._users.get(user, self._decoy)
                fits = await asyncio.to_thread(bcrypt.checkpw, password.encode()[:_BCRYPT_BYTES], hashed)
        finally:
            self._waiting -= 1
        if not fits or user not in self._users:
            return False
        self._remembered[digest] = None
        while len(self._remembered) > MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return True


class Bucket:
    """A bucket of tokens: as many as ``burst``, one more each ``interval``; every request takes one."""

    def __init__(self, rate: RateSettings) -> None:
        self._interval, self._burst = float(rate.interval), int(rate.burst)
        self._tokens, self._at = float(rate.burst), 0.0

    def take(self, now: float) -> bool:
        """Take a token at this time (monotonic seconds). Return whether there was one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) / self._interval)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Buckets:
    """A bucket for each client, by address; of those that asked last."""

    def __init__(self, rate: RateSettings) -> None:
        self._rate = rate
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, client: str, now: float) -> bool:
        """Take a token of a client's. Return whether there was one."""
        bucket = self._buckets.setdefault(client, Bucket(self._rate))
        self._buckets.move_to_end(client)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return bucket.take(now)


def _refused(status: HTTPStatus, reason: str, headers: Mapping[str, str]) -> web.Response:
    return web.Response(status=status, text=reason + "\n", headers={**headers, "Cache-Control": "no-store"})
