"""The ``/metrics`` page of an engine: vLLM 0.6 to 0.33, V0 and V1, Python and Rust front ends, and other families.

:func:`parse_page` is all the lines of a page, :class:`EngineSource` the request for it. A page has 600 lines (50 kB),
3,300 with eight data-parallel ranks, and is read every beat, so only the dozen series that the join needs are looked
at; what they are called is in :mod:`tokengap.sources.engine_families`. ``prometheus_client.parser`` is the oracle in
the tests.

Never asked for: ``/health`` (on SGLang it generates a token), and any completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from tokengap.errors import SourceError, SourceTimeout, SourceUnusable
from tokengap.readings import EnginePage
from tokengap.sources.engine_families import FAMILY_NAMED, LONGEST_DEADLINE, Family, Name, recognise
from tokengap.sources.host import is_own, own_addresses
from tokengap.sources.page import MetricsPage
from tokengap.topology import Endpoint, Engine

_START = "process_start_time_seconds"
_START_SAMPLE = re.compile(rf"\n({_START})([{{ \t][^\n]*)")
_STARTED = ((_START, Name(_START)),)
_EOF = re.compile(r"\n# EOF[ \t\r]*+(?:\n|\Z)")

#: Of these the highest of all series counts, and not their sum.
_HIGHEST = frozenset({"kv_usage", "created", _START})

# Possessive quantifiers (++, *+) keep a hostile line linear.
_REST = re.compile(
    r'[ \t]*+(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})?[ \t]*+'  # labels
    r"([^ \t\r]++)"  # value
    r"(?:[ \t]++-?[0-9.]++)?"  # timestamp
    r"[ \t\r]*+(?:#.*)?"  # OpenMetrics exemplar
)
_LABEL = re.compile(r'[ \t]*+([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+(?:,|\Z)')
_ESCAPE = re.compile(r'\\([\\"n])')

_Labels = frozenset[tuple[str, str]]


class _Unusable(Exception):
    """A line of a page that must be left out; the message is the reason under which it is counted."""


def parse_page(body: bytes) -> EnginePage:
    """Read what the join needs from a page in the Prometheus text format or OpenMetrics, of whatever family it is.

    A line that cannot be used (``nan``, ``negative``, ``too_large``, ``malformed``) is left out, counted in
    ``skipped``, and makes its whole family unknown in this reading: a sum over data-parallel ranks that lacks one would
    look like a counter that fell, and on the next page like a burst. Of two lines for one series the first counts, the
    other is a ``duplicate``. A last line without its end is ``truncated``.

    Raises SourceUnusable when the page is not text, or has no line of an engine on it: statistics are off
    (``--disable-log-stats``), they go to Ray's agent, or this is something else. An engine that has served nothing yet
    may show only ``# TYPE`` lines (V0); then every field is None.
    """
    text = _text(body)
    family = recognise(text)
    if family is None:
        raise SourceUnusable(_what_else(text))
    skipped: Counter[str] = Counter()
    void: set[str] = set()
    text = _whole_lines(text, family, void, skipped)

    seen: set[tuple[str, _Labels]] = set()
    values: dict[tuple[str, Name], dict[_Labels, float]] = {}
    started = _START_SAMPLE.search(text)
    for name, rest in family.sample.findall(text) + ([] if started is None else [started.groups()]):
        targets = family.targets.get(name, _STARTED)
        try:
            labels, number = _split(rest)
            if name in family.picky:
                targets = tuple(target for target in targets if target[1].takes(labels))
            if not targets or (family.parts and any(key in family.parts and part for key, part in labels)):
                continue
            if (name, labels) in seen:
                raise _Unusable("duplicate")
            seen.add((name, labels))
            value = _value(number)
        except _Unusable as reason:
            skipped[str(reason)] += 1
            if str(reason) != "duplicate":
                void.update(field for field, _ in targets)
            continue
        # In multi-process mode a gauge may have one line per writer, `pid`, of which the others hold old values or 0;
        # tensor-parallel ranks each tell of the same requests.
        series = labels
        if family.copied.search(rest) is not None:
            series = frozenset(pair for pair in labels if pair[0] not in family.copies)
        for target in targets:
            of_name = values.setdefault(target, {})
            of_name[series] = max(value, of_name.get(series, 0.0))

    of_engine = [labels for name, labels in seen if name != _START]
    on_page = {pair for labels in of_engine for pair in labels}
    ranks = {value for name, value in on_page if name == family.rank}  # no such label on V0 and on V1 before 0.8.3
    told: dict[str, float] = {}
    for (field, _), of_name in values.items():
        if field not in void:
            value = max(of_name.values()) if field in _HIGHEST else sum(of_name.values())
            before = told.get(field, 0.0)
            told[field] = before + value if field in family.added else max(before, value)
    shown = {field for field, _ in values}
    return EnginePage(
        running=told.get("running"),
        waiting=told.get("waiting"),
        deferred=told.get("deferred"),
        generation_tokens=told.get("generation_tokens"),
        prompt_tokens=told.get("prompt_tokens"),
        first_tokens=told.get("first_tokens"),
        steps=told.get("steps"),
        step_tokens=told.get("step_tokens"),
        work=told.get("work"),
        preemptions=told.get("preemptions"),
        finished=told.get("finished"),
        finished_tokens=told.get("finished_tokens"),
        kv_usage=told.get("kv_usage"),
        asleep=_asleep(family, values) if "asleep" in told else None,
        start_time=told.get(_START),
        created=told.get("created"),
        models=tuple(sorted({_unescape(value) for name, value in on_page if name == family.model})),
        ranks=len(ranks) or min(len(of_engine), 1),
        skipped=dict(skipped),
        family=family.name,
        live=not (shown and family.live.isdisjoint(shown)),
        between_steps=family.between_steps,
    )


def _text(body: bytes) -> str:
    """Decode a page, and begin it with a line break, so that each of its lines begins after one."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise SourceUnusable(f"the page is not text (byte {error.start} is not UTF-8)") from None
    if text.startswith('"'):  # llama.cpp sent its page as a JSON string for a while (issue 17384)
        with contextlib.suppress(msgspec.DecodeError):
            text = msgspec.json.decode(body, type=str)
    return "\n" + text


def _what_else(text: str) -> str:
    """Say what a page is that shows no engine."""
    if not text.strip():
        return "the page is empty"
    if text.lstrip()[0] in "[{":
        return "the page is JSON; that of trtllm-serve is at /prometheus/metrics"
    return "no series of an engine on the page"


def _whole_lines(text: str, family: Family, void: set[str], skipped: Counter[str]) -> str:
    """Return the page up to ``# EOF`` or to its last whole line; a family that the end cuts in two becomes void."""
    if text.rfind("\n# EOF") >= 0:  # three times as fast as a search where there is none
        end = _EOF.search(text)
        if end is not None:
            return text[: end.start()]
    whole, _, cut = text.rpartition("\n")
    if cut:
        skipped["truncated"] += 1
        last = family.sample.match(whole, whole.rfind("\n"))
        if last is not None:
            head = last[0][1 : last.end(1) - last.start() + 1]  # the name and what follows it
            if cut.startswith(head) or head.startswith(cut):
                void.update(field for field, _ in family.targets[last[1]])
    return whole


def _split(rest: str) -> tuple[_Labels, str]:
    """Split what follows a name into labels and value."""
    match = _REST.fullmatch(rest)
    if match is None:
        raise _Unusable("malformed")
    labels = match[1] or ""
    return _parse_short_labels(labels) if len(labels) < 512 else _parse_labels(labels), match[2]


def _parse_labels(raw: str) -> _Labels:
    """Parse ``a="x",b="y"``, in any order; values stay escaped."""
    pairs: dict[str, str] = {}
    position = 0
    while position < len(raw):
        match = _LABEL.match(raw, position)
        if match is None or match[1] in pairs:
            raise _Unusable("malformed")
        pairs[match[1]] = match[2]
        position = match.end()
    return frozenset(pairs.items())


#: Ranks and families share few label sets, the same ones every beat. Short ones only: memory stays bounded.
_parse_short_labels = lru_cache(maxsize=512)(_parse_labels)


def _value(number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise _Unusable("malformed") from None
    if not number.isascii() or "_" in number:  # digits to Python, not to Prometheus
        raise _Unusable("malformed")
    if math.isnan(value):
        raise _Unusable("nan")
    if value < 0:
        raise _Unusable("negative")
    if value >= 2**63:
        raise _Unusable("too_large")  # +Inf, or no count of anything
    return value


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)


def _asleep(family: Family, values: Mapping[tuple[str, Name], Mapping[_Labels, float]]) -> bool | None:
    """Asleep when no rank is awake. ``/sleep?level=0`` sets no other state to 1."""
    states = [state for name in family.fields["asleep"] for state in values["asleep", name].items()]
    awake = [value for labels, value in states if ("sleep_state", "awake") in labels]
    if awake:
        return not any(awake)
    return True if any(value for _, value in states) else None


def metrics_url(url: str) -> str:
    """Return the address of an engine's page, from its address with or without ``/v1``, ``/metrics`` or a slash.

    Raises ValueError, saying what is expected, when it is no HTTP address.
    """
    parts = urlsplit(url.strip())
    _ = parts.port  # raises ValueError when out of range
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected http://HOST:PORT")
    path = re.sub(r"/(?:v1|metrics)?$", "", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, f"{path}/metrics", "", ""))


async def resolve(url: str) -> tuple[Endpoint, ...]:
    """Return the endpoints at which the API behind an engine's URL is reached, in the resolver's order.

    ``Endpoint(None, port)`` stands for any address of this host (loopback, ``0.0.0.0``, an address of one of its
    interfaces); the same engine is then reached by whichever of them a proxy uses. Raises ValueError for a bad URL and
    SourceError when the name does not resolve.
    """
    parts = urlsplit(metrics_url(url))
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a label of the name is empty or too long for IDNA
        raise SourceError(f"{host} does not resolve") from None
    own = own_addresses()
    addresses = (str(sockaddr[0]).partition("%")[0] for *_, sockaddr in found)
    return tuple(dict.fromkeys(Endpoint(None if is_own(address, own) else address, port) for address in addresses))


class EngineSource:
    """The page of one engine.

    ``deadline`` (seconds) is for the whole read, ``max_bytes`` for the page after decompression: info labels have made
    pages of 22 MB (vLLM issue 44691). An engine of a family that makes its page between two steps gets that family's
    deadline instead; until the family is known, each timeout doubles it up to ``longest``, for one that is busy when we
    come. Raises ValueError for a bad URL.
    """

    def __init__(
        self,
        engine: Engine,
        session: aiohttp.ClientSession,
        *,
        deadline: float,
        longest: float = LONGEST_DEADLINE,
        max_bytes: int = 8 * 2**20,
    ) -> None:
        self.engine = engine
        self._page = MetricsPage(metrics_url(engine.url), session, max_bytes=max_bytes)
        self._deadline = self._first_deadline = deadline
        self._longest = longest
        self._family: Family | None = None

    @property
    def takes_its_time(self) -> bool:
        """The page comes when a step of the engine ends: one that came late is still the newest there is."""
        return self._family is not None and self._family.between_steps

    async def read(self) -> EnginePage:
        """Fetch and read the page. Raises a SourceError."""
        try:
            answer = await self._page.fetch(self._deadline)
        except SourceTimeout:
            if self._family is None:
                self._deadline = max(self._first_deadline, min(2 * self._deadline, self._longest))
            raise
        page = parse_page(answer.body)
        self._family = FAMILY_NAMED[page.family]
        self._deadline = self._family.deadline or self._first_deadline
        if self._family.start_header and page.start_time is None:
            return replace(page, start_time=_number(answer.headers.get(self._family.start_header)))
        return page


def _number(header: str | None) -> float | None:
    try:
        return None if header is None else _value(header.strip())
    except _Unusable:
        return None
