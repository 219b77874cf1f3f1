"""The engine page: every page there is against prometheus_client's parser, then what no well-behaved server sends."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import random
import re
import socket
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tokengap.errors import SourceError, SourceRefused, SourceTimeout, SourceUnusable
from tokengap.readings import EnginePage
from tokengap.sources.engine import EngineSource, metrics_url, parse_page, resolve
from tokengap.sources.engine_families import FAMILIES, Family
from tokengap.topology import Endpoint, Engine

RECORDED = Path(__file__).parent.parent / "recorded"
PAGES = sorted(path for path in RECORDED.glob("*/*.prom") if path.parent.name != "dcgm-pages")
BUSY = (RECORDED / "vllm-0.32.0" / "busy-1.prom").read_bytes()
RANKS_8 = (RECORDED / "vllm-pages" / "vllm-0.33.0-engines8.prom").read_bytes()

SUMMED = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "generation_tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "steps": "iteration_tokens_total_count",
    "step_tokens": "iteration_tokens_total_sum",
    "preemptions": "num_preemptions_total",
    "finished": "request_success_total",
    "finished_tokens": "request_generation_tokens_sum",
}
FIELDS = [*SUMMED, "deferred", "first_tokens", "work", "kv_usage", "asleep", "start_time", "created"]


def oracle(page: bytes) -> EnginePage | None:
    """Read a well-formed page with prometheus_client's parser, slowly; None where the engine cannot be seen.

    vLLM's names are spelled out here once more; those of the other families come from the table.
    """
    text = page.decode()
    text = (json.loads(text) if text.startswith('"') else text).partition("\n# EOF\n")[0] + "\n"
    for family in FAMILIES:
        if family.name != "vllm" and re.search(rf"^{family.prefix}[:_]", text, re.MULTILINE):
            return oracle_of(family, text)
    return oracle_of_vllm(text)


def oracle_of(family: Family, text: str) -> EnginePage:
    """Read a page by the row of its family."""
    samples = [sample for read in text_string_to_metric_families(text) for sample in read.samples]
    told: dict[str, float] = {}
    used = []
    for field, names in family.fields.items():
        of_names = []
        for name in names:
            # The reference parser adds `_total` to the name of a counter that has none.
            spellings = {f"{family.prefix}{sep}{name.name}{end}" for sep in ":_" for end in ("", "_total")}
            series: dict[frozenset[tuple[str, str]], float] = {}
            for sample in samples:
                labels = frozenset(sample.labels.items())
                if sample.name in spellings and name.takes(labels) and not any(map(sample.labels.get, family.parts)):
                    used.append(sample)
                    key = frozenset(pair for pair in labels if pair[0] not in family.copies)
                    series[key] = max(series.get(key, 0.0), sample.value)
            if series:
                of_names.append(max(series.values()) if field in ("kv_usage", "created") else sum(series.values()))
        if of_names:
            told[field] = sum(of_names) if field in family.added else max(of_names)
    return EnginePage(
        **told,  # type: ignore[arg-type]  # field names are the keys
        start_time=next((sample.value for sample in samples if sample.name == "process_start_time_seconds"), None),
        models=tuple(sorted({sample.labels[family.model] for sample in used if family.model in sample.labels})),
        ranks=len({sample.labels[family.rank] for sample in used if family.rank in sample.labels}) or min(len(used), 1),
    )


def oracle_of_vllm(text: str) -> EnginePage | None:
    """Read a page of vLLM."""
    of_vllm: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    start_time = None
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            if sample.name.startswith(("vllm:", "vllm_")):
                of_vllm.setdefault(sample.name[5:], {}).setdefault(labels, sample.value)
            elif sample.name == "process_start_time_seconds" and start_time is None:
                start_time = sample.value
    if not of_vllm and "vllm:" not in text:
        return None

    def total(name: str, only: frozenset[tuple[str, str]] = frozenset()) -> float | None:
        series: dict[frozenset[tuple[str, str]], float] = {}
        for labels, value in of_vllm.get(name, {}).items():
            if ("finished_reason", "abort") not in labels and only <= labels:
                without_pid = frozenset(pair for pair in labels if pair[0] != "pid")
                series[without_pid] = max(series.get(without_pid, 0.0), value)
        return sum(series.values()) if series else None

    def highest(*names: str) -> float | None:
        return max((value for name in names for value in of_vllm.get(name, {}).values()), default=None)

    awake = [v for labels, v in of_vllm.get("engine_sleep_state", {}).items() if ("sleep_state", "awake") in labels]
    wanted = [*SUMMED.values(), "kv_cache_usage_perc", "gpu_cache_usage_perc", "engine_sleep_state"]
    wanted += ["generation_tokens_created", "num_requests_waiting_by_reason"]
    seen = [
        dict(labels)
        for name in wanted
        for labels in of_vllm.get(name, {})
        if not (name == "request_success_total" and ("finished_reason", "abort") in labels)
        and (name != "num_requests_waiting_by_reason" or ("reason", "deferred") in labels)
    ]
    return EnginePage(
        **{field: total(name) for field, name in SUMMED.items()},  # type: ignore[arg-type]  # field names are the keys
        deferred=total("num_requests_waiting_by_reason", frozenset({("reason", "deferred")})),
        kv_usage=highest("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        asleep=not any(awake) if awake else None,
        start_time=start_time,
        created=highest("generation_tokens_created"),
        models=tuple(sorted({labels["model_name"] for labels in seen if "model_name" in labels})),
        ranks=len({labels["engine"] for labels in seen if "engine" in labels}) or min(len(seen), 1),
    )


def approximately(page: EnginePage) -> dict[str, object]:
    numbers = {field: getattr(page, field) for field in FIELDS}
    return {field: value if value is None else pytest.approx(value) for field, value in numbers.items()}


def assert_same(ours: EnginePage, theirs: EnginePage) -> None:
    assert {field: getattr(ours, field) for field in FIELDS} == approximately(theirs)
    assert (ours.models, ours.ranks, ours.skipped) == (theirs.models, theirs.ranks, theirs.skipped)


# The recorded pages


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_page_reads_as_the_reference_parser_reads_it(path: Path) -> None:
    """Every field of every recorded or written page equals what prometheus_client's parser sees there."""
    page = path.read_bytes()
    expected = oracle(page)
    if expected is None:
        with pytest.raises(SourceUnusable, match="no series of an engine"):
            parse_page(page)
    else:
        assert_same(parse_page(page), expected)


def test_a_busy_page_field_by_field() -> None:
    """The numbers a person reads off busy-1.prom."""
    assert parse_page(BUSY) == EnginePage(
        running=4,
        waiting=5,
        deferred=0,
        generation_tokens=2882,
        prompt_tokens=52084,
        steps=742,
        step_tokens=54966,
        preemptions=0,
        finished=1,
        finished_tokens=20,
        kv_usage=0.005615919912098644,
        asleep=False,
        start_time=1795963319.47,
        created=1795963346.2158663,
        models=("tiny",),
        ranks=1,
        family="vllm",
    )


VERSIONS = ("0.6.6", "0.8.5", "0.9.2", "0.10.2", "0.11.0", "0.14.0", "0.20.0", "0.24.0", "0.32.0", "0.33.0")
FAMILY_PAGES = [
    (
        "sglang-pages/busy-0",
        # 2 in the queue and 1 compiling its grammar; 4,210 decoded, of which 4,000 by requests that have ended.
        {"running": 3, "waiting": 3, "deferred": 1, "generation_tokens": 4210, "finished_tokens": 4000, "finished": 20}
        | {"first_tokens": 23, "work": 4210 + 9000 + 1500, "kv_usage": 0.31, "start_time": None, "live": True},
    ),
    ("sglang-pages/tp2-busy", {"running": 3, "waiting": 3, "generation_tokens": 4210, "work": 14710, "ranks": 1}),
    ("sglang-pages/old-busy", {"running": 2, "waiting": 1, "generation_tokens": 5000, "work": None, "live": True}),
    (
        "llamacpp-pages/busy-0",
        {"running": 4, "waiting": 2, "generation_tokens": 2100, "prompt_tokens": 6400, "work": 1840, "kv_usage": None}
        | {"between_steps": True, "live": True, "models": (), "finished": None},
    ),
    ("llamacpp-pages/quoted-b7010", {"running": 4, "waiting": 2, "work": 1840}),
    ("llamacpp-pages/2024-kv-usage", {"running": 2, "kv_usage": 0.3125}),
    ("llamacpp-pages/large-counters", {"generation_tokens": 1_905_110, "work": 1_964_080}),
    (
        "tgi-pages/busy-0",
        {"running": 6, "waiting": 3, "generation_tokens": 9000, "prompt_tokens": 4800, "finished": 30}
        | {"first_tokens": 36, "work": 36 + 36 + 1500 + 1499, "kv_usage": None, "live": True},
    ),
    (
        "trtllm-pages/busy-0",
        {"running": 5, "waiting": 2, "generation_tokens": 2000, "finished": 10, "kv_usage": 0.21, "live": True}
        | {
            "work": 60 + 130 + 0 + 10,
            "start_time": 1795963319.47,
            "created": 1795963346.2,
            "models": ("nemotron-nano-3",),
        },
    ),
    ("trtllm-pages/no-iteration-statistics", {"running": None, "waiting": None, "live": False, "finished": 10}),
    (
        "triton-pages/busy-0",
        {"running": 8, "waiting": 3, "generation_tokens": None, "kv_usage": 0.4875, "work": 1200, "live": True}
        | {"models": ("tensorrt_llm",), "finished": None},
    ),
    (
        "lmdeploy-pages/busy-0",
        {"running": 4, "waiting": 3, "generation_tokens": 3000, "finished": 10, "finished_tokens": 2500, "steps": 800}
        | {"step_tokens": 3200, "kv_usage": 0.42, "start_time": 1795963319.47, "created": None},
    ),
]


@pytest.mark.parametrize(("name", "fields"), FAMILY_PAGES, ids=[name for name, _ in FAMILY_PAGES])
def test_a_page_of_each_family_field_by_field(name: str, fields: dict[str, object]) -> None:
    """The numbers a person reads off it, and which engine it is, told by the page alone."""
    page = parse_page((RECORDED / f"{name}.prom").read_bytes())
    assert {field: getattr(page, field) for field in fields} == fields
    assert (page.family, page.skipped) == (name.partition("-")[0], {})


def test_there_is_a_page_of_every_family_and_version() -> None:
    """A row of the table without a page would be tested by nothing; so would a version that is said to be read."""
    families = {parse_page(path.read_bytes()).family for path in PAGES if path.stem != "nostats"}
    assert families == {family.name for family in FAMILIES}
    paths = " ".join(str(path) for path in PAGES)
    assert [version for version in VERSIONS if f"vllm-{version}" not in paths] == []


def test_every_family_is_in_the_docs() -> None:
    """By the name that people read and the one that series show."""
    text = (RECORDED.parent.parent / "docs" / "engines.md").read_text()
    missing = [family.name for family in FAMILIES if family.title not in text or f"`{family.name}`" not in text]
    assert missing == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_row_of_the_table_is_whole(family: Family) -> None:
    """Every field is one of an engine page, what must move can, and what is added up is there."""
    known = {field.name for field in dataclasses.fields(EnginePage)}
    assert set(family.fields) <= known
    assert {"running", "waiting"} <= set(family.fields)
    assert family.live <= set(family.fields)
    assert family.added <= set(family.fields)
    assert family.live
    assert not family.between_steps or family.deadline


def test_what_a_family_shows_late_is_never_less_than_before() -> None:
    """SGLang's live counter of tokens appears with the first one decoded and may be behind the one of ended requests:
    the higher counts, so that the tokens of an engine never fall."""
    line = 'sglang:realtime_tokens_total{{mode="decode",model_name="m"}} {}\n'
    ended = 'sglang:generation_tokens_total{model_name="m"} 500\n'
    pages = [ended, ended + line.format(7), ended + line.format(612)]
    assert [parse_page(page.encode()).generation_tokens for page in pages] == [500, 500, 612]


def test_a_long_prefill_moves_nothing_but_the_kv_cache() -> None:
    """While a 36,000-token prompt is computed, steps and tokens stay at 0 and KV usage rises in every reading."""
    pages = [parse_page(path.read_bytes()) for path in sorted(RECORDED.glob("vllm-0.32.0/long-prefill-*.prom"))]
    assert {(page.running, page.steps, page.generation_tokens, page.prompt_tokens) for page in pages} == {(1, 0, 0, 0)}
    usage = [page.kv_usage for page in pages]
    assert None not in usage
    assert usage == sorted(set(usage))  # type: ignore[type-var]  # no None, as just asserted


def test_several_api_servers_show_no_start_time_and_what_the_leavers_cost() -> None:
    """In multi-process mode start times are unknown; at rest, generated minus finished is the leavers' 92 tokens."""
    page = parse_page((RECORDED / "vllm-0.32.0" / "multiapi-idle.prom").read_bytes())
    assert (page.start_time, page.created, page.running) == (None, None, 0)
    assert page.generation_tokens is not None
    assert page.finished_tokens is not None
    assert page.generation_tokens - page.finished_tokens == 92


def test_ranks_are_summed_and_the_fullest_cache_counts() -> None:
    """Eight ranks: running, waiting and tokens add up, KV usage is the highest."""
    page = RANKS_8.decode()
    for rank in range(8):
        label = f'engine="{rank}",model_name="meta-llama/Llama-3.1-8B-Instruct"'
        for name, value in (("num_requests_running", rank), ("kv_cache_usage_perc", rank / 10)):
            page = page.replace(f"vllm:{name}{{{label}}} 0.0", f"vllm:{name}{{{label}}} {value}")
    read = parse_page(page.encode())
    assert (read.ranks, read.running, read.kv_usage) == (8, 28, 0.7)


# What versions and modes do to the page

ONE = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0",model_name="m"} 3',
        'vllm_num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_running{model_name="m",engine="0"} 3.0',
        'vllm:num_requests_running{engine="0",model_name="m",} 3.0',
        'vllm:num_requests_running { engine = "0", model_name = "m" } 3.0',
        'vllm:num_requests_running{engine="0",model_name="m"} 3e0 1795963319470',
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0 # {trace_id="a}b"} 1.0 17.5',
        'vllm:num_requests_running{engine="0",model_name="m"}\t3.0\r',
    ],
)
def test_one_value_in_every_spelling(line: str) -> None:
    """Integers, both prefixes, any label order, spaces, timestamps, exemplars and CRLF all read as 3."""
    assert parse_page(f"{line}\n".encode()) == EnginePage(running=3, models=("m",), ranks=1, family="vllm", live=False)


@pytest.mark.parametrize("model", ['a"b', "a,b", "a}b", "a{b", "a\\b", "a\nb", 'x",engine="9', "Qwen/Qwen3-8B", "模型"])
def test_a_model_may_be_called_anything(model: str) -> None:
    """Quotes, commas, braces, backslashes and line breaks in a label value stay inside it."""
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    page = parse_page(f'vllm:num_requests_running{{model_name="{escaped}",engine="0"}} 2\n'.encode())
    assert (page.models, page.ranks, page.running, page.skipped) == ((model,), 1, 2, {})


def test_a_gauge_split_by_writer_is_the_highest_not_the_sum() -> None:
    """vLLM 0.9.2 to 0.11.0 in multi-process mode: one line per `pid`, all but one of them 0 (vLLM PR 28792)."""
    lines = [f'vllm:kv_cache_usage_perc{{engine="0",model_name="m",pid="{pid}"}} 0.0' for pid in range(7)]
    lines.append('vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="273"} 0.65')
    lines += [f'vllm:num_requests_running{{engine="{e}",pid="{p}"}} {e + p}' for e in range(2) for p in range(3)]
    page = parse_page("\n".join([*lines, ""]).encode())
    assert (page.kv_usage, page.running, page.ranks, page.skipped) == (0.65, 2 + 3, 2, {})


def test_v0_names_are_read() -> None:
    """V0 has no engine label and calls the KV cache `gpu_cache_usage_perc`."""
    page = parse_page(
        b'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\nvllm:num_requests_running{model_name="m"} 1.0\n'
    )
    assert page == EnginePage(running=1, kv_usage=0.25, models=("m",), ranks=1, family="vllm")


def test_v0_before_its_first_request_is_seen_but_knows_nothing() -> None:
    """Only HELP and TYPE lines: statistics are on, so the engine is not blind, and nothing is 0."""
    text = b"# HELP vllm:num_requests_running Number of requests\n# TYPE vllm:num_requests_running gauge\n"
    assert parse_page(text) == EnginePage(family="vllm")


def test_abort_is_no_finish() -> None:
    """The Rust front end counts clients that left as `abort`; the Python one never does. Neither counts here."""
    page = parse_page(
        b'vllm:request_success_total{finished_reason="abort",engine="0"} 5\n'
        b'vllm:request_success_total{finished_reason="stop",engine="0"} 2\n'
        b'vllm:request_success_total{finished_reason="length",engine="0"} 1\n'
    )
    assert page.finished == 3


def test_nothing_after_eof_counts() -> None:
    """OpenMetrics ends at `# EOF`; a comment that only begins so does not end it."""
    page = parse_page(b"# EOFish\n" + ONE.encode() + b'# EOF\nvllm:num_requests_waiting{engine="0"} 7\n')
    assert page == EnginePage(running=3, models=("m",), ranks=1, family="vllm", live=False)


@pytest.mark.parametrize(
    ("states", "asleep"),
    [
        ({"awake": "1", "weights_offloaded": "0", "discard_all": "0"}, False),
        ({"awake": "0", "weights_offloaded": "1", "discard_all": "0"}, True),
        ({"awake": "0", "weights_offloaded": "0", "discard_all": "0"}, True),  # /sleep?level=0
        ({"weights_offloaded": "1"}, True),
        ({"weights_offloaded": "0"}, None),
        ({"awake": "NaN", "weights_offloaded": "0"}, None),
        ({}, None),
    ],
)
def test_sleep(states: dict[str, str], asleep: bool | None) -> None:
    """Asleep is said by `awake` at 0, unknown where the page does not say."""
    lines = [
        f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} {value}\n' for state, value in states.items()
    ]
    assert parse_page(("vllm:x 1\n" + "".join(lines)).encode()).asleep is asleep


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_"])
def test_an_openmetrics_page_of_prometheus_client(prefix: str) -> None:
    """A page rendered as OpenMetrics, which renames `vllm:` to `vllm_`, reads the same."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "n", ["engine"], registry=registry).labels("0").set(4)
    Counter("vllm:generation_tokens", "n", ["engine"], registry=registry).labels("0").inc(100)
    steps = Histogram("vllm:iteration_tokens_total", "n", ["engine"], registry=registry, buckets=[1, 8]).labels("0")
    steps.observe(3)
    steps.observe(4)
    page = openmetrics.generate_latest(registry)
    assert b"vllm_generation_tokens_total{" in page
    read = parse_page(page.replace(b"\nvllm_", f"\n{prefix}".encode()))
    assert (read.running, read.generation_tokens, read.steps, read.step_tokens) == (4, 100, 2, 7)
    assert read.created is not None


# Bad pages


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"# TYPE python_info gauge\npython_info 1.0\nprocess_start_time_seconds 17.0\n", "no series of an engine"),
        (b"<html>502 vllm: Bad Gateway</html>", "no series of an engine"),
        (b'"vllm:num_requests_running 1', "no series of an engine"),
        (b'[{"numActiveRequests": 2}]', "JSON; that of trtllm-serve is at /prometheus/metrics"),
        (b"\x1f\x8b\x08\x00vllm", "not text"),
    ],
)
def test_a_page_without_the_engine_is_unusable(body: bytes, reason: str) -> None:
    """An empty body, a page of Python's own series and binary data are each refused with their reason."""
    with pytest.raises(SourceUnusable, match=reason):
        parse_page(body)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "nan"),
        ("-1.0", "negative"),
        ("-Inf", "negative"),
        ("+Inf", "too_large"),
        ("1e300", "too_large"),
        ("abc", "malformed"),
        ("1_0", "malformed"),
        ("٣", "malformed"),
        ("", "malformed"),
        ("3.0 4.0 5.0", "malformed"),
    ],
)
def test_a_bad_value_is_left_out_and_counted(value: str, reason: str) -> None:
    """The family is unknown, never 0; the rest of the page stands."""
    page = parse_page(f'vllm:num_requests_waiting{{engine="0"}} {value}\n{ONE}'.encode())
    assert page == EnginePage(running=3, models=("m",), ranks=1, family="vllm", live=False, skipped={reason: 1})


@pytest.mark.parametrize(
    "labels", ['{engine="0"', "{engine=0}", '{engine="0" model="m"}', '{engine="0",engine="0"}', '{"']
)
def test_bad_labels_are_left_out_and_counted(labels: str) -> None:
    """Labels that cannot be told apart are no series."""
    page = parse_page(f"vllm:num_requests_waiting{labels} 1\n{ONE}".encode())
    assert (page.waiting, page.running, page.skipped) == (None, 3, {"malformed": 1})


def test_one_bad_rank_makes_the_sum_unknown() -> None:
    """A sum that lacks a rank would look like a fallen counter, and like a burst when the rank is back."""
    page = RANKS_8.replace(
        b'vllm:generation_tokens_total{engine="3",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0',
        b'vllm:generation_tokens_total{engine="3",model_name="meta-llama/Llama-3.1-8B-Instruct"} NaN',
    )
    read = parse_page(page)
    assert (read.generation_tokens, read.running, read.skipped) == (None, 0, {"nan": 1})


def test_a_series_that_comes_twice_counts_once() -> None:
    """The first line of a series counts, in any label order; the others are counted as duplicates."""
    twice = ONE + 'vllm:num_requests_running{model_name="m",engine="0"} 9.0\n' + ONE
    page = parse_page(twice.encode())
    assert (page.running, page.skipped) == (3, {"duplicate": 2})


@given(st.integers(0, len(BUSY)))
@example(BUSY.index(b"vllm:num_requests_running{") + 30)
@example(BUSY.index(b'vllm:request_success_total{engine="0",finished_reason="error"') + 40)
def test_a_page_cut_anywhere_in_a_line_tells_nothing_false(cut: int) -> None:
    """Each field of a page that breaks off is that of the whole page, or unknown."""
    if BUSY[cut - 1 : cut] == b"\n":  # cut between two lines: nothing shows it
        return
    try:
        page = parse_page(BUSY[:cut])
    except SourceUnusable:
        return
    whole = parse_page(BUSY)
    assert page.skipped == ({} if cut == len(BUSY) else {"truncated": 1})
    for field in FIELDS:
        assert getattr(page, field) in (None, getattr(whole, field)), field


def test_a_family_cut_between_its_ranks_is_unknown() -> None:
    """Three of eight ranks are no sum."""
    cut = RANKS_8.index(b'vllm:num_requests_running{engine="3"')
    page = parse_page(RANKS_8[: cut + 40].replace(b"} 0.0", b"} 5.0"))
    assert (page.running, page.skipped) == (None, {"truncated": 1})


LINES = [line for line in BUSY.splitlines() if b"_bucket" not in line]


@st.composite
def damaged_pages(draw: st.DrawFn) -> bytes:
    """Lines of a real page, some of them bent: bytes removed, repeated, or put in."""
    lines = draw(st.lists(st.sampled_from(LINES), max_size=12))
    bent = []
    for line in lines:
        at = draw(st.integers(0, len(line)))
        bent.append(
            line[:at]
            + draw(st.sampled_from([b"", b'"', b"{", b"}", b"\\", b" ", b"-", b"#", b"\x00", b"9e9"]))
            + line[at:]
        )
    return draw(st.sampled_from([b"\n", b"\r\n"])).join(bent) + draw(st.sampled_from([b"", b"\n", b"\n# EOF\n"]))


@given(st.one_of(st.binary(), damaged_pages()))
def test_any_bytes_give_a_page_or_a_reason(body: bytes) -> None:
    """No input raises anything but SourceUnusable, and no number on a page is negative or infinite."""
    try:
        page = parse_page(body)
    except SourceUnusable:
        return
    for field in FIELDS:
        value = getattr(page, field)
        assert value is None or 0 <= value < float("inf")
    assert set(page.skipped) <= {"nan", "negative", "too_large", "malformed", "duplicate", "truncated"}


NAMES = [*SUMMED.values(), "kv_cache_usage_perc", "gpu_cache_usage_perc", "generation_tokens_created"]
NOISE = [
    "# HELP vllm:num_requests_running vllm:num_requests_running{} 5",
    "# TYPE vllm:num_requests_waiting gauge",
    'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 5.0',
    'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 742.0',
    'vllm:request_generation_tokens_count{engine="0"} 9',
    'vllm:prompt_tokens_created{engine="0"} 1.7e+09',
    'vllm:lora_requests_info{max_lora="0"} 1.7e+09',
    'http_requests_total{handler="/vllm:num_requests_running{} 3"} 5.0',
    "process_start_time_seconds 1795963319.5",
    "",
]


@st.composite
def generated_pages(draw: st.DrawFn) -> bytes:
    """Well-formed pages of any shape: several models and ranks, writers, duplicates, noise, odd names of models."""
    models = draw(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r")), min_size=1, max_size=2))
    number = st.one_of(st.integers(0, 10**9), st.floats(0, 1e9), st.floats(0, 1))
    lines = draw(st.lists(st.sampled_from(NOISE)))
    prefix = draw(st.sampled_from(["vllm:", "vllm_"]))
    for name in draw(st.lists(st.sampled_from(NAMES))):
        labels = [("engine", str(draw(st.integers(0, 3)))), ("model_name", draw(st.sampled_from(models)))]
        if name == "request_success_total":
            labels.append(("finished_reason", draw(st.sampled_from(["stop", "length", "abort"]))))
        if name in ("kv_cache_usage_perc", "num_requests_running") and draw(st.booleans()):
            labels.append(("pid", str(draw(st.integers(1, 3)))))
        escaped = [
            '{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
            for key, value in draw(st.permutations(labels))
        ]
        lines.append(f"{prefix}{name}{{{','.join(escaped)}}} {draw(number)}")
    lines.append("vllm:corrupted_requests_total 0")
    draw(st.randoms()).shuffle(lines)
    return ("\n".join(lines) + draw(st.sampled_from(["\n", "\n# EOF\n", "\n# EOF\nvllm:x{ 1\n"]))).encode()


@given(generated_pages())
def test_any_well_formed_page_reads_as_the_reference_parser_reads_it(body: bytes) -> None:
    """Generated pages agree with prometheus_client's parser in every field."""
    expected = oracle(body)
    assert expected is not None
    ours = parse_page(body)
    assert set(ours.skipped) <= {"duplicate"}
    assert {field: getattr(ours, field) for field in FIELDS} == approximately(expected)
    assert (ours.models, ours.ranks) == (expected.models, expected.ranks)


@st.composite
def pages_of_families(draw: st.DrawFn) -> bytes:
    """Well-formed pages of any family: some of its series, with ranks, copies, parts of totals, and other series."""
    family = draw(st.sampled_from(FAMILIES))
    number = st.one_of(st.integers(0, 10**9), st.floats(0, 1e9), st.floats(0, 1))
    names = [name for field, names in family.fields.items() if field != "asleep" for name in names]
    lines = [f"{family.prefix}{draw(st.sampled_from(':_'))}something_else 1"]
    for name in draw(st.lists(st.sampled_from(names))):
        labels = {family.model: draw(st.sampled_from(["m", 'a"b']))} if draw(st.booleans()) else {}
        labels |= {family.rank: str(draw(st.integers(0, 2)))} if draw(st.booleans()) else {}
        labels |= {copy: str(draw(st.integers(0, 2))) for copy in family.copies if draw(st.booleans())}
        labels |= {part: draw(st.sampled_from(["", "5"])) for part in family.parts if draw(st.booleans())}
        for label in (name.with_, name.without):
            if label is not None:
                labels[label[0]] = draw(st.sampled_from([label[1], "other"]))
        escaped = ",".join(
            '{}="{}"'.format(key, value.replace('"', '\\"'))
            for key, value in draw(st.permutations(list(labels.items())))
        )
        lines.append(f"{family.prefix}{draw(st.sampled_from(':_'))}{name.name}{{{escaped}}} {draw(number)}")
    draw(st.randoms()).shuffle(lines)
    return ("\n".join(lines) + "\n").encode()


@given(pages_of_families())
def test_any_page_of_any_family_reads_as_the_reference_parser_reads_it(body: bytes) -> None:
    """By the rows of the table, and nothing of one family is taken for another's."""
    expected = oracle(body)
    assert expected is not None
    ours = parse_page(body)
    assert set(ours.skipped) <= {"duplicate"}
    if not ours.skipped:  # of two lines for one series the oracle takes the last, we the first
        assert {field: getattr(ours, field) for field in FIELDS} == approximately(expected)
        assert (ours.models, ours.ranks) == (expected.models, expected.ranks)


# Addresses


@pytest.mark.parametrize(
    "url", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/", "http://h:8000/metrics"]
)
def test_every_way_to_name_an_engine_is_one_page(url: str) -> None:
    """The base, the OpenAI base and the page itself are the same engine."""
    assert metrics_url(url) == "http://h:8000/metrics"


def test_a_path_in_front_of_an_engine_is_kept() -> None:
    """Behind an ingress the page lies under the engine's path."""
    assert metrics_url("https://h/llama/v1") == "https://h/llama/metrics"


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:99999", "http://h:x", "", "http://[::1"])
def test_a_bad_address_is_refused(url: str) -> None:
    """What is no HTTP address raises ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 - urllib's own messages differ by case
        metrics_url(url)


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("http://127.0.0.1:8000", (Endpoint(None, 8000),)),
        ("http://localhost:8000/v1", (Endpoint(None, 8000),)),
        ("http://[::1]:8000", (Endpoint(None, 8000),)),
        ("http://0.0.0.0", (Endpoint(None, 80),)),
        ("http://192.0.2.7:8000", (Endpoint("192.0.2.7", 8000),)),
        ("https://[2001:db8::7]", (Endpoint("2001:db8::7", 443),)),
    ],
)
async def test_resolve(url: str, endpoints: tuple[Endpoint, ...]) -> None:
    """This host is known by port, another host by its addresses."""
    assert await resolve(url) == endpoints


async def test_an_own_address_that_is_not_loopback_is_this_host() -> None:
    """The address of one of this host's interfaces means this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells which own address faces outward
        except OSError:
            pytest.skip("this host has no address but loopback")
        own = probe.getsockname()[0]
    assert await resolve(f"http://{own}:8000") == (Endpoint(None, 8000),)


async def test_a_name_that_does_not_resolve_says_so() -> None:
    """An unknown host is a SourceError, not a crash of the start."""
    with pytest.raises(SourceError, match=r"nowhere\.invalid does not resolve"):
        await resolve("http://nowhere.invalid:8000")


# Reading over HTTP

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve raw TCP on loopback, so that a server may do what no HTTP library would."""
    connections: set[asyncio.StreamWriter] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in connections:
            writer.transport.abort()
        await asyncio.sleep(0)


@asynccontextmanager
async def reading(handler: Handler, deadline: float = 5.0, max_bytes: int = 8 * 2**20) -> AsyncIterator[EngineSource]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(handler))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        engine = Engine("e", url, (Endpoint(None, 1),))
        yield EngineSource(engine, session, deadline=deadline, max_bytes=max_bytes)


async def request_of(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n\r\n")).decode()


def answer(body: bytes, status: str = "200 OK", headers: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{headers}\r\n".encode() + body


def always(response: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            writer.write(response)
            await writer.drain()

    return handler


async def test_a_page_is_read_over_one_kept_connection() -> None:
    """Two reads ask for /metrics as plain text, gzip allowed, and share a connection."""
    requests: list[tuple[int, str]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            requests.append((id(writer), await request_of(reader)))
            writer.write(answer(BUSY))

    async with reading(handler) as source:
        assert await source.read() == parse_page(BUSY)
        assert (await source.read()).running == 4
    assert len({connection for connection, _ in requests}) == 1
    first = requests[0][1].lower()
    assert first.startswith("get /metrics http/1.1\r\n")
    assert "accept: text/plain;version=0.0.4\r\n" in first
    assert "accept-encoding: gzip\r\n" in first


async def test_a_gzipped_page_is_read() -> None:
    """A reverse proxy may compress the page."""
    async with reading(always(answer(gzip.compress(BUSY), headers="Content-Encoding: gzip\r\n"))) as source:
        assert await source.read() == parse_page(BUSY)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (answer(b"broken", "500 Internal Server Error"), "HTTP 500"),
        (answer(BUSY, "503 Service Unavailable"), "HTTP 503"),
        (answer(b"", "401 Unauthorized"), "HTTP 401"),
        (answer(b"", "204 No Content"), "HTTP 204"),
        (answer(b""), "the page is empty"),
        (answer(random.Random(1).randbytes(5000)), "not text"),
        (answer(BUSY, headers="Content-Encoding: gzip\r\n"), "the answer is broken"),
        (answer(b"", "302 Found", "Location: http://\r\n"), "the answer is broken"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "the answer is broken"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "the answer is broken"),
    ],
)
async def test_an_answer_that_is_no_page_is_unusable(response: bytes, reason: str) -> None:
    """Status, emptiness, binary data, broken encoding, broken HTTP and a huge header each give one reason."""
    async with reading(always(response)) as source:
        with pytest.raises(SourceUnusable, match=reason) as caught:
            await source.read()
    assert "\n" not in str(caught.value)


async def test_nobody_listening_is_refused() -> None:
    """A closed port says that the engine is gone, not that its page is bad."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            for address in (url, url.replace("127.0.0.1", "localhost")):
                with pytest.raises(SourceRefused, match="connection refused"):
                    await EngineSource(Engine("e", address, ()), session, deadline=5).read()


async def test_an_unknown_host_is_not_a_dead_engine() -> None:
    """A name that does not resolve is no evidence that the engine refused."""
    async with aiohttp.ClientSession() as session:
        source = EngineSource(Engine("e", "http://nowhere.invalid:8000", ()), session, deadline=5)
        with pytest.raises(SourceError, match="does not resolve") as caught:
            await source.read()
    assert not isinstance(caught.value, SourceRefused)


async def test_a_silent_server_times_out() -> None:
    """No answer within the deadline is a timeout, and the connection is given up."""
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        assert await reader.read() == b""
        gone.set()

    async with reading(handler, deadline=0.1) as source:
        with pytest.raises(SourceTimeout, match=r"no page within 0\.1 s"):
            await source.read()
        await asyncio.wait_for(gone.wait(), 5)


async def test_a_server_that_hangs_in_mid_page_times_out() -> None:
    """The deadline is for the whole page, not for each piece of it."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer(BUSY[:9000], length=len(BUSY)))
        while True:  # a byte now and then keeps a per-read timeout from ever firing
            writer.write(b"#")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with reading(handler, deadline=0.2) as source:
        with pytest.raises(SourceTimeout):
            await source.read()


async def test_a_page_that_breaks_off_is_unusable() -> None:
    """A connection closed before the announced length is an error, not a short page."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer(BUSY[:9000], length=len(BUSY)))

    async with reading(handler) as source:
        with pytest.raises(SourceUnusable, match="the answer is broken"):
            await source.read()


async def test_a_kept_connection_that_the_server_closed_is_opened_again() -> None:
    """A server that closes idle connections, even as the next request arrives, costs no reading."""
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await request_of(reader)
        writer.write(answer(BUSY))
        await request_of(reader)  # and closes without an answer

    async with reading(handler) as source:
        for _ in range(3):
            assert (await source.read()).running == 4
    assert connections == 3


async def test_a_page_of_22_mb_is_refused_in_bounded_memory() -> None:
    """Past the limit the connection is closed and the reason names the limit (vLLM issue 44691 saw 22 MB)."""
    closed = asyncio.Event()
    line = b'vllm:cache_config_info{config="' + b"x" * 999 + b'"} 1.0\n'

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer(b"", length=22_000_000))
        try:
            for _ in range(22_000_000 // len(line)):
                writer.write(line)
                await writer.drain()
        except ConnectionError:
            closed.set()

    async with reading(handler) as source:
        tracemalloc.start()
        try:
            with pytest.raises(SourceUnusable, match="larger than 8388608 bytes"):
                await source.read()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        await asyncio.wait_for(closed.wait(), 5)
    assert peak < 20_000_000


async def test_a_gzip_bomb_is_refused_in_bounded_memory() -> None:
    """The limit is on decompressed bytes: 200 kB that unfold to 200 MB stop at the limit."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = b"#" * 1_000_000
    bomb = b"".join(packer.compress(piece) for _ in range(200)) + packer.flush()
    async with reading(always(answer(bomb, headers="Content-Encoding: gzip\r\n")), max_bytes=1_000_000) as source:
        tracemalloc.start()
        try:
            with pytest.raises(SourceUnusable, match="larger than 1000000 bytes"):
                await source.read()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 10_000_000


LLAMA = (RECORDED / "llamacpp-pages" / "busy-0.prom").read_bytes()


async def test_an_engine_that_answers_between_two_steps_is_waited_for() -> None:
    """Known from its first page: after that a read outlives the deadline of others, and none is given up early."""
    slow, requests = False, 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while True:
            await request_of(reader)
            requests += 1
            if slow:
                await asyncio.sleep(1.2)
            writer.write(answer(LLAMA, headers="Process-Start-Time-Unix: 17001\r\n"))

    async with reading(handler, deadline=1.0) as source:
        assert not source.takes_its_time
        assert (await source.read()).start_time == 17001
        assert source.takes_its_time
        slow = True
        assert (await source.read()).running == 4
    assert requests == 2


async def test_an_engine_that_is_busy_when_we_come_gets_more_time_with_each_read() -> None:
    """Nobody knows yet that it is one that waits: the deadline doubles until the first page tells the family."""
    come = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        await come.wait()
        writer.write(answer(BUSY))

    async with reading(handler, deadline=0.1) as source:
        for seconds in (0.1, 0.2, 0.4, 0.8):
            with pytest.raises(SourceTimeout, match=f"no page within {seconds} s"):
                await source.read()
        come.set()
        assert (await source.read()).family == "vllm"
        come.clear()
        assert not source.takes_its_time
        with pytest.raises(SourceTimeout, match=r"no page within 0\.1 s"):
            await source.read()


@pytest.mark.parametrize("start", ["", "-1", "soon", "nan"])
async def test_a_start_time_in_a_header_that_is_none_is_not_known(start: str) -> None:
    """A header that is missing or no number tells nothing."""
    async with reading(always(answer(LLAMA, headers=f"Process-Start-Time-Unix: {start}\r\n"))) as source:
        assert (await source.read()).start_time is None


async def test_an_engine_is_asked_one_thing_at_a_time() -> None:
    """Reads that overlap wait for each other, each within its own deadline."""
    open_requests = highest = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_requests, highest
        while True:
            await request_of(reader)
            open_requests += 1
            highest = max(highest, open_requests)
            await asyncio.sleep(0.02)
            open_requests -= 1
            writer.write(answer(BUSY))

    async with reading(handler) as source:
        pages = await asyncio.gather(*(source.read() for _ in range(4)))
    assert [page.running for page in pages] == [4] * 4
    assert highest == 1
