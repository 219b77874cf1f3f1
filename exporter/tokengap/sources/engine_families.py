"""What the engines call what we need: one row per family of engines, and nothing else in the program knows a name.

A family is told by the prefix of its series. To add one: a row in :data:`FAMILIES`, and pages of it in
``tests/recorded/FAMILY-pages/``, see ``docs/engines.md``.

The names were read in the engines' sources and documentation: vLLM 0.6 to 0.33 (`vllm/v1/metrics/loggers.py`), SGLang
0.5 (`srt/observability/metrics_collector.py`), llama.cpp (`tools/server`), TGI 3 (`docs/source/reference/metrics.md`),
TensorRT-LLM 1.2 (`tensorrt_llm/metrics/collector.py`) and its backend in Triton (`triton_backend`), LMDeploy 0.10 and
newer (`lmdeploy/metrics/loggers.py`). Only vLLM's were seen on pages of real servers.

What an engine must never be asked for by us: SGLang's ``/health`` and ``/health_generate`` (each generates a token),
``/metrics`` of ``trtllm-serve`` (it takes statistics out of a queue that others read; its page is at
``/prometheus/metrics``), and anything that llama.cpp answers only between two steps, twice at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

#: A label and its value.
Label: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A series of the page, by its name without the prefix: the lines of it ``with_``, or not ``without``, a label."""

    name: str
    with_: Label | None = None
    without: Label | None = None

    def takes(self, labels: frozenset[Label]) -> bool:
        """Tell whether a line with these labels is meant."""
        return (self.with_ is None or self.with_ in labels) and (self.without is None or self.without not in labels)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of engines. ``name`` is what series show, ``title`` what people read.

    ``fields`` maps fields of :class:`~tokengap.readings.EnginePage` to names. Where a field has several, the highest
    counts (versions rename, and two counters may tell the same in different ways), but those in ``added`` are added up.
    ``live`` are the fields that move while a request runs; the others only when one ends.

    ``rank``: the label that numbers data-parallel ranks, whose values add up. ``copies``: labels that tell apart
    several accounts of one value, of which the highest counts. ``parts``: labels that, unless empty, mark a line as a
    part of a total that stands in a line of its own. ``model``: the label with the model's name.

    ``between_steps``: the page is made by the inference loop between two of its steps, so it takes as long as a step;
    ``deadline`` is then what one read may take, in seconds. ``start_header``: the header of the page that tells the
    process, where no series does; an opaque number.
    """

    name: str
    title: str
    prefix: str
    fields: Mapping[str, tuple[Name, ...]]
    live: frozenset[str]
    added: frozenset[str] = frozenset()
    rank: str = "engine"
    model: str = "model_name"
    copies: tuple[str, ...] = ("pid",)
    parts: tuple[str, ...] = ()
    between_steps: bool = False
    deadline: float | None = None
    start_header: str = ""
    # What follows from these, made once.
    sample: re.Pattern[str] = field(init=False, repr=False)
    targets: Mapping[str, tuple[tuple[str, Name], ...]] = field(init=False, repr=False)
    picky: frozenset[str] = field(init=False, repr=False)  # names of which not every line is meant
    copied: re.Pattern[str] = field(init=False, repr=False)  # found in lines that may have a label of ``copies``

    def __post_init__(self) -> None:
        targets: dict[str, tuple[tuple[str, Name], ...]] = {}
        for name, names in self.fields.items():
            for one in names:
                targets[one.name] = (*targets.get(one.name, ()), (name, one))
        # It begins with literals, for which `re` has a fast search; `^` with re.MULTILINE takes five times as long.
        # The prefix ends in `_` on OpenMetrics pages of prometheus_client 0.23 and newer.
        names_of = "|".join(sorted(map(re.escape, targets), reverse=True))
        object.__setattr__(self, "sample", re.compile(rf"\n{self.prefix}[:_]({names_of})([{{ \t][^\n]*)"))
        object.__setattr__(self, "targets", targets)
        picky = (one.name for names in self.fields.values() for one in names if one.with_ or one.without)
        object.__setattr__(self, "picky", frozenset(picky))
        object.__setattr__(self, "copied", re.compile("|".join(self.copies)))


def _names(*names: str | Name) -> tuple[Name, ...]:
    return tuple(name if isinstance(name, Name) else Name(name) for name in names)


def _request(kind: str) -> Name:
    return Name("request_metrics", with_=("request_type", kind))


#: Queues of SGLang that wait for a grammar or, in disaggregated serving, for the other node.
_ELSEWHERE = (
    "num_grammar_queue_reqs",
    "num_prefill_prealloc_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "vllm",
        "vLLM",
        prefix="vllm",
        fields={
            "running": _names("num_requests_running"),
            "waiting": _names("num_requests_waiting"),
            "deferred": _names(Name("num_requests_waiting_by_reason", with_=("reason", "deferred"))),  # from 0.20 on
            "generation_tokens": _names("generation_tokens_total"),
            "created": _names("generation_tokens_created"),
            "prompt_tokens": _names("prompt_tokens_total"),
            # A histogram whose own name ends in `_total`.
            "steps": _names("iteration_tokens_total_count"),
            "step_tokens": _names("iteration_tokens_total_sum"),
            "preemptions": _names("num_preemptions_total"),
            # Never shown by the Python front end (issues 31503, 55634); by the Rust one, for clients that left.
            "finished": _names(Name("request_success_total", without=("finished_reason", "abort"))),
            "finished_tokens": _names("request_generation_tokens_sum"),
            "kv_usage": _names("kv_cache_usage_perc", "gpu_cache_usage_perc"),  # the latter up to 0.10; 0.9 shows both
            "asleep": _names("engine_sleep_state"),
        },
        live=frozenset({"generation_tokens", "steps", "kv_usage"}),
    ),
    Family(
        "sglang",
        "SGLang",
        prefix="sglang",
        fields={
            "running": _names("num_running_reqs"),
            "waiting": _names("num_queue_reqs", *_ELSEWHERE),
            "deferred": _names(*_ELSEWHERE),
            # The first counts each decode step and not the first tokens; the other all, when a request ends.
            "generation_tokens": _names(
                Name("realtime_tokens_total", with_=("mode", "decode")), "generation_tokens_total"
            ),
            "prompt_tokens": _names("prompt_tokens_total"),
            "first_tokens": _names("time_to_first_token_seconds_count"),
            "work": _names("realtime_tokens_total", "cuda_graph_passes_total"),
            "preemptions": _names("num_retracted_requests_total"),
            "finished": _names("num_requests_total"),
            "finished_tokens": _names("generation_tokens_total"),
            "kv_usage": _names("token_usage"),
        },
        live=frozenset({"work", "kv_usage"}),
        added=frozenset({"waiting", "deferred", "work"}),
        rank="dp_rank",
        copies=("pid", "tp_rank", "pp_rank", "moe_ep_rank"),
        parts=("priority",),
    ),
    Family(
        "llamacpp",
        "llama.cpp",
        prefix="llamacpp",
        fields={
            "running": _names("requests_processing"),
            "waiting": _names("requests_deferred"),
            "generation_tokens": _names("tokens_predicted_total"),
            "prompt_tokens": _names("prompt_tokens_total"),
            "work": _names("n_decode_total"),
            "kv_usage": _names("kv_cache_usage_ratio"),  # gone in 2025 (PR 13660)
        },
        live=frozenset({"work", "kv_usage"}),
        between_steps=True,
        deadline=60.0,
        start_header="Process-Start-Time-Unix",
    ),
    Family(
        "tgi",
        "TGI",
        prefix="tgi",
        fields={
            "running": _names("batch_current_size"),
            "waiting": _names("queue_size"),
            "generation_tokens": _names("request_generated_tokens_sum"),
            "prompt_tokens": _names("request_input_length_sum"),
            "first_tokens": _names(Name("batch_inference_success", with_=("method", "prefill"))),
            "work": _names("batch_inference_count", "batch_inference_success"),
            "finished": _names("request_success"),
            "finished_tokens": _names("request_generated_tokens_sum"),
        },
        live=frozenset({"work"}),
        added=frozenset({"work"}),
    ),
    Family(
        "trtllm",
        "TensorRT-LLM",  # trtllm-serve, at /prometheus/metrics; through Dynamo, on the worker's page
        prefix="trtllm",
        fields={
            "running": _names("num_requests_running"),
            "waiting": _names("num_requests_waiting"),
            "generation_tokens": _names("generation_tokens_total"),
            "created": _names("generation_tokens_created"),
            "prompt_tokens": _names("prompt_tokens_total"),
            "work": _names(
                "kv_cache_gen_alloc_blocks_total",
                "kv_cache_missed_blocks_total",
                "kv_cache_reused_blocks_total",
                "num_requests_completed_total",
            ),
            "finished": _names("request_success_total", "num_requests_completed_total"),
            "finished_tokens": _names("generation_tokens_total"),
            "kv_usage": _names("kv_cache_utilization"),
        },
        live=frozenset({"kv_usage"}),  # only with `enable_iter_perf_stats`
        added=frozenset({"work"}),
    ),
    Family(
        "triton",
        "Triton",  # its TensorRT-LLM backend; the page has a port of its own (8002)
        prefix="nv_trt_llm",
        fields={
            "running": (_request("active"), _request("scheduled")),
            "waiting": (_request("waiting"),),
            "work": (Name("general_metrics", with_=("general_type", "iteration_counter")),),
            "kv_usage": (Name("kv_cache_block_metrics", with_=("kv_cache_block_type", "fraction")),),
        },
        live=frozenset({"work", "kv_usage"}),
        model="model",
    ),
    Family(
        "lmdeploy",
        "LMDeploy",
        prefix="lmdeploy",
        fields={
            "running": _names("num_requests_running"),
            "waiting": _names("num_requests_waiting", "num_api_requests_waiting"),
            "generation_tokens": _names("generation_tokens_total"),
            "prompt_tokens": _names("prompt_tokens_total"),
            "steps": _names("iteration_tokens_total_count"),
            "step_tokens": _names("iteration_tokens_total_sum"),
            "finished": _names("request_success_total"),
            "finished_tokens": _names("request_generation_tokens_sum"),
            "kv_usage": _names("gpu_cache_usage_perc"),
        },
        live=frozenset({"generation_tokens", "steps", "kv_usage"}),
        added=frozenset({"waiting"}),
    ),
)

FAMILY_NAMED: Mapping[str, Family] = {family.name: family for family in FAMILIES}
_BY_PREFIX: Mapping[str, Family] = {family.prefix: family for family in FAMILIES}
_ANY = re.compile(rf"\n(?:# (?:HELP|TYPE) )?({'|'.join(sorted(_BY_PREFIX, reverse=True))})[:_]")

#: The longest that a read of any family may take, in seconds.
LONGEST_DEADLINE: float = max(family.deadline or 0.0 for family in FAMILIES)


def recognise(page: str) -> Family | None:
    """Return the family of the first series that has one; each line of ``page`` begins after a line break."""
    found = _ANY.search(page)
    return None if found is None else _BY_PREFIX[found[1]]
