"""The ``/metrics`` page of a vLLM server, versions 0.6 to 0.33, engines V0 and V1, Python and Rust front ends.

:func:`parse_page` is all the lines of a page, :class:`EngineSource` the request for it. A page has 600 lines (50 kB),
3,300 with eight data-parallel ranks, and is read every beat, so only the dozen families that the join needs are looked
at. ``prometheus_client.parser`` is the oracle in the tests.

Never asked for: ``/health`` (on SGLang it generates a token), and any completion.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from tokengap.errors import SourceError, SourceUnusable
from tokengap.readings import EnginePage
from tokengap.sources.host import is_own, own_addresses
from tokengap.sources.page import MetricsPage
from tokengap.topology import Endpoint, Engine

#: Names on the page, without their prefix, and the fields of EnginePage they fill.
#: ``iteration_tokens_total`` is a histogram whose own name ends in ``_total``. ``gpu_cache_usage_perc`` is the KV-cache
#: gauge's name up to 0.10; 0.9 and 0.10 show both.
_FIELDS: Mapping[str, str] = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "generation_tokens_total": "generation_tokens",
    "generation_tokens_created": "created",
    "prompt_tokens_total": "prompt_tokens",
    "iteration_tokens_total_count": "steps",
    "iteration_tokens_total_sum": "step_tokens",
    "num_preemptions_total": "preemptions",
    "request_success_total": "finished",
    "request_generation_tokens_sum": "finished_tokens",
    "kv_cache_usage_perc": "kv_usage",
    "gpu_cache_usage_perc": "kv_usage",
    "engine_sleep_state": "asleep",
}
_START = "process_start_time_seconds"

# The patterns begin with literals, for which `re` has a fast search; `^` with re.MULTILINE takes five times as long.
# The prefix is `vllm_` on OpenMetrics pages of prometheus_client 0.23 and newer.
_SAMPLE = re.compile(rf"\nvllm[:_]({'|'.join(sorted(_FIELDS, reverse=True))})([{{ \t][^\n]*)")
_START_SAMPLE = re.compile(rf"\n({_START})([{{ \t][^\n]*)")
_ANY_VLLM = re.compile(r"\n(?:# (?:HELP|TYPE) )?vllm[:_]")
_EOF = re.compile(r"\n# EOF[ \t\r]*+(?:\n|\Z)")

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
    """Read the families that the join needs from a page in the Prometheus text format or OpenMetrics.

    A line that cannot be used (``nan``, ``negative``, ``too_large``, ``malformed``) is left out, counted in
    ``skipped``, and makes its whole family unknown in this reading: a sum over data-parallel ranks that lacks one would
    look like a counter that fell, and on the next page like a burst. Of two lines for one series the first counts, the
    other is a ``duplicate``. A last line without its end is ``truncated``.

    Raises SourceUnusable when the page is not text, or has no line of vLLM on it: statistics are off
    (``--disable-log-stats``), they go to Ray's agent, or this is something else. An engine that has served nothing yet
    may show only ``# TYPE`` lines (V0); then every field is None.
    """
    try:
        text = "\n" + body.decode()
    except UnicodeDecodeError as error:
        raise SourceUnusable(f"the page is not text (byte {error.start} is not UTF-8)") from None
    skipped: Counter[str] = Counter()
    void: set[str] = set()
    text = _whole_lines(text, void, skipped)

    seen: set[tuple[str, _Labels]] = set()
    values: defaultdict[str, dict[_Labels, float]] = defaultdict(dict)
    started = _START_SAMPLE.search(text)
    for name, rest in _SAMPLE.findall(text) + ([] if started is None else [started.groups()]):
        field = _FIELDS.get(name, "start_time")
        try:
            labels, number = _split(rest)
            if field == "finished" and ("finished_reason", "abort") in labels:
                continue
            if (name, labels) in seen:
                raise _Unusable("duplicate")
            seen.add((name, labels))
            value = _value(number)
        except _Unusable as reason:
            skipped[str(reason)] += 1
            if str(reason) != "duplicate":
                void.add(field)
            continue
        # In multi-process mode a gauge may have one line per writer, `pid`, of which the others hold old values or 0.
        series = labels if "pid" not in rest else frozenset(pair for pair in labels if pair[0] != "pid")
        values[field][series] = max(value, values[field].get(series, 0.0))

    of_vllm = [labels for name, labels in seen if name != _START]
    if not of_vllm and not _ANY_VLLM.search(text):
        raise SourceUnusable("no vllm series on the page" if body.strip() else "the page is empty")
    on_page = {pair for labels in of_vllm for pair in labels}
    engines = {value for name, value in on_page if name == "engine"}  # no such label on V0 and on V1 before 0.8.3
    sums = {field: sum(family.values()) for field, family in values.items() if field not in void}
    highest = {field: max(family.values()) for field, family in values.items() if field not in void}
    return EnginePage(
        running=sums.get("running"),
        waiting=sums.get("waiting"),
        generation_tokens=sums.get("generation_tokens"),
        prompt_tokens=sums.get("prompt_tokens"),
        steps=sums.get("steps"),
        step_tokens=sums.get("step_tokens"),
        preemptions=sums.get("preemptions"),
        finished=sums.get("finished"),
        finished_tokens=sums.get("finished_tokens"),
        kv_usage=highest.get("kv_usage"),
        asleep=None if "asleep" in void else _asleep(values["asleep"]),
        start_time=highest.get("start_time"),
        created=highest.get("created"),
        models=tuple(sorted({_unescape(value) for name, value in on_page if name == "model_name"})),
        ranks=len(engines) or min(len(of_vllm), 1),
        skipped=dict(skipped),
    )


def _whole_lines(text: str, void: set[str], skipped: Counter[str]) -> str:
    """Return the page up to ``# EOF`` or to its last whole line; a family that the end cuts in two becomes void."""
    if text.rfind("\n# EOF") >= 0:  # three times as fast as a search where there is none
        end = _EOF.search(text)
        if end is not None:
            return text[: end.start()]
    whole, _, cut = text.rpartition("\n")
    if cut:
        skipped["truncated"] += 1
        last = _SAMPLE.match(whole, whole.rfind("\n"))
        if last is not None:
            head = last[0][1 : last.end(1) - last.start() + 1]  # the name and what follows it
            if cut.startswith(head) or head.startswith(cut):
                void.add(_FIELDS[last[1]])
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


def _asleep(states: Mapping[_Labels, float]) -> bool | None:
    """Asleep when no rank is awake. ``/sleep?level=0`` sets no other state to 1."""
    awake = [value for labels, value in states.items() if ("sleep_state", "awake") in labels]
    if awake:
        return not any(awake)
    return True if any(states.values()) else None


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
    pages of 22 MB (vLLM issue 44691). Raises ValueError for a bad URL.
    """

    def __init__(
        self, engine: Engine, session: aiohttp.ClientSession, *, deadline: float, max_bytes: int = 8 * 2**20
    ) -> None:
        self.engine = engine
        self._page = MetricsPage(metrics_url(engine.url), session, deadline=deadline, max_bytes=max_bytes)

    async def read(self) -> EnginePage:
        """Fetch and read the page. Raises a SourceError."""
        return parse_page(await self._page.fetch())
