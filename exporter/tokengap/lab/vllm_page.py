"""The ``/metrics`` page of vLLM 0.33.0, as that release's own metrics logger lays it out: names, labels, buckets.

The families stand here as a table; a test holds the table against a page recorded from vLLM. The stand-in engine
writes to the few that it simulates; the others are on the page at rest, as they are on a real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

#: What vLLM answers since 0.8.3: a plain route that never negotiates.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Tokens the KV cache holds: ``num_gpu_blocks`` times ``block_size`` of ``vllm:cache_config_info``.
BLOCK_TOKENS, BLOCKS = 16, 16_384

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_NEXT_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST_TIME = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of the page, without the prefix ``vllm:``.

    ``split`` is a further label and its values, all of which vLLM shows from the start. ``per_engine`` is False for the
    few that carry no ``engine`` label.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    bounds: tuple[float, ...] = ()
    split: tuple[str, tuple[str, ...]] | None = None
    per_engine: bool = True


FAMILIES: tuple[Family, ...] = (
    Family("num_requests_running", "gauge", "Number of requests in model execution batches."),
    Family("num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    Family(
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of requests waiting to be processed, by reason.",
        split=("reason", ("capacity", "deferred")),
    ),
    Family(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.",
        split=("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    ),
    Family("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    Family("prefix_cache_queries", "counter", "Prefix cache queries, in terms of number of queried tokens."),
    Family("prefix_cache_hits", "counter", "Prefix cache hits, in terms of number of cached tokens."),
    Family("external_prefix_cache_queries", "counter", "External prefix cache queries, in number of tokens."),
    Family("external_prefix_cache_hits", "counter", "External prefix cache hits, in number of tokens."),
    Family("mm_cache_queries", "counter", "Multi-modal cache queries, in number of items."),
    Family("mm_cache_hits", "counter", "Multi-modal cache hits, in number of items."),
    Family("num_preemptions", "counter", "Cumulative number of preemption from the engine."),
    Family("prompt_tokens", "counter", "Number of prefill tokens processed."),
    Family(
        "prompt_tokens_by_source",
        "counter",
        "Number of prompt tokens by source.",
        split=("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    ),
    Family("prompt_tokens_cached", "counter", "Number of cached prompt tokens."),
    Family(
        "prompt_tokens_cached_by_source",
        "counter",
        "Number of cached prompt tokens by source.",
        split=("source", ("device", "host", "p2p", "disk", "external_unspecified")),
    ),
    Family("generation_tokens", "counter", "Number of generation tokens processed."),
    Family(
        "request_success",
        "counter",
        "Count of successfully processed requests.",
        split=("finished_reason", ("stop", "length", "abort", "error", "repetition")),
    ),
    Family(
        "admission_rejections",
        "counter",
        "Count of requests rejected at admission.",
        split=("reason", ("max_num_queued_reqs", "max_num_queued_tokens")),
        per_engine=False,
    ),
    Family("request_prompt_tokens", "histogram", "Number of prefill tokens processed.", _TOKENS),
    Family("request_generation_tokens", "histogram", "Number of generation tokens processed.", _TOKENS),
    Family("iteration_tokens_total", "histogram", "Histogram of number of tokens per engine_step.", _STEP_TOKENS),
    Family(
        "request_max_num_generation_tokens",
        "histogram",
        "Histogram of maximum number of requested generation tokens.",
        _TOKENS,
    ),
    Family("request_params_n", "histogram", "Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    Family("request_params_max_tokens", "histogram", "Histogram of the max_tokens request parameter.", _TOKENS),
    Family("time_to_first_token_seconds", "histogram", "Histogram of time to first token in seconds.", _FIRST_TOKEN),
    Family("inter_token_latency_seconds", "histogram", "Histogram of inter-token latency in seconds.", _NEXT_TOKEN),
    Family(
        "request_time_per_output_token_seconds",
        "histogram",
        "Histogram of time_per_output_token_seconds per request.",
        _NEXT_TOKEN,
    ),
    Family("e2e_request_latency_seconds", "histogram", "Histogram of e2e request latency in seconds.", _REQUEST_TIME),
    Family("request_queue_time_seconds", "histogram", "Histogram of time spent in WAITING phase.", _REQUEST_TIME),
    Family("request_inference_time_seconds", "histogram", "Histogram of time spent in RUNNING phase.", _REQUEST_TIME),
    Family("request_prefill_time_seconds", "histogram", "Histogram of time spent in PREFILL phase.", _REQUEST_TIME),
    Family("request_decode_time_seconds", "histogram", "Histogram of time spent in DECODE phase.", _REQUEST_TIME),
    Family("request_num_preemptions", "histogram", "Histogram of preemptions per request.", (1, 2, 3, 4, 5, 10, 20)),
    Family(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _TOKENS,
    ),
)

#: Labels of ``vllm:cache_config_info``. Values are Python's ``str()`` of the setting, "None" included.
_CACHE_CONFIG = {
    "block_size": str(BLOCK_TOKENS),
    "cache_dtype": "auto",
    "calculate_kv_scales": "False",
    "cpu_offload_gb": "0",
    "enable_prefix_caching": "False",
    "gpu_memory_utilization": "0.9",
    "is_attention_free": "False",
    "kv_cache_memory_bytes": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_page_size_padded": "None",
    "num_cpu_blocks": "0",
    "num_gpu_blocks": str(BLOCKS),
    "prefix_caching_hash_algo": "sha256",
    "sliding_window": "None",
    "swap_space": "4",
}


class VllmPage:
    """The counters behind one page, all at rest until written to. Names are given without ``vllm:`` and ``_total``."""

    def __init__(self, model: str) -> None:
        self._registry, self._process = CollectorRegistry(), CollectorRegistry()
        for registry in (self._registry, self._process):
            GCCollector(registry=registry)
            PlatformCollector(registry=registry)
            ProcessCollector(registry=registry)
        self._counters: dict[tuple[str, str], Counter] = {}
        self._gauges: dict[tuple[str, str], Gauge] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}
        for family in FAMILIES:
            self._declare(family, model)
        Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            ["engine", *_CACHE_CONFIG],
            registry=self._registry,
        ).labels(engine="0", **_CACHE_CONFIG).set(1)
        self.put("engine_sleep_state", 1, "awake")

    def _declare(self, family: Family, model: str) -> None:
        """Register a family and keep its children, which makes vLLM's page show them from the start."""
        fixed = {"model_name": model} | ({"engine": "0"} if family.per_engine else {})
        split, values = family.split or ("", ("",))
        name, labels = f"vllm:{family.name}", [*fixed, *filter(None, [split])]
        every = {(family.name, value): fixed | ({split: value} if split else {}) for value in values}
        match family.kind:
            case "counter":
                counter = Counter(name, family.help, labels, registry=self._registry)
                self._counters |= {key: counter.labels(**chosen) for key, chosen in every.items()}
            case "gauge":
                gauge = Gauge(name, family.help, labels, registry=self._registry)
                self._gauges |= {key: gauge.labels(**chosen) for key, chosen in every.items()}
            case "histogram":
                histogram = Histogram(name, family.help, labels, registry=self._registry, buckets=family.bounds)
                self._histograms |= {key: histogram.labels(**chosen) for key, chosen in every.items()}

    def add(self, name: str, amount: float = 1, split: str = "") -> None:
        """Count up a counter; ``split`` picks the value of its further label."""
        self._counters[name, split].inc(amount)

    def put(self, name: str, value: float, split: str = "") -> None:
        """Set a gauge."""
        self._gauges[name, split].set(value)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Put a value into a histogram, ``times`` times."""
        histogram = self._histograms[name, ""]
        for _ in range(times):
            histogram.observe(value)

    def text(self, *, without_engine: bool = False) -> bytes:
        """Return the page in text format 0.0.4; ``without_engine``: only what the process itself shows."""
        return generate_latest(self._process if without_engine else self._registry)
