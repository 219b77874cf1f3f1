"""The stand-in's page is vLLM's."""

from __future__ import annotations

import re
from pathlib import Path

from tokengap.lab.vllm_page import FAMILIES, VllmPage

RECORDED = Path(__file__).parent.parent / "recorded" / "vllm-pages" / "vllm-0.33.0-engines1.prom"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def shape(text: str) -> tuple[set[str], set[str]]:
    """Return the types and the series of a page, without values and without what a configuration's values say."""
    lines = [re.sub(r'="[^"]*"', "", line) if "cache_config_info{" in line else line for line in text.splitlines()]
    lines = [line for line in lines if not line.startswith("python_info{")]
    types = {line for line in lines if line.startswith("# TYPE")}
    return types, {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def test_names_types_labels_and_buckets_are_those_of_a_recorded_page():
    """Nothing more and nothing less than what vLLM 0.33.0's own logger put on its page."""
    assert shape(VllmPage(MODEL).text().decode()) == shape(RECORDED.read_text())


def test_every_family_says_what_it_means():
    """vLLM's page has a HELP line for each family, and so has the stand-in's."""
    text = VllmPage(MODEL).text().decode()
    assert all(re.search(rf"^# HELP vllm:{family.name}\w* \S", text, re.MULTILINE) for family in FAMILIES)


def test_what_is_written_is_shown():
    """A counter counts, a gauge stands, a histogram holds a value as often as it was observed."""
    page = VllmPage("m")
    page.add("request_success", 2, "length")
    page.put("kv_cache_usage_perc", 0.25)
    page.observe("iteration_tokens_total", 9, times=3)
    text = page.text().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25' in text
    assert 'vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="m"} 0.0' in text
    assert 'vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 27.0' in text
