"""Command lines: servers, proxies, slots and ports, by each way to write them."""

from __future__ import annotations

import pytest

from tokengap.sources.commandlines import api_port, is_vllm, proxy_program, slots_of


@pytest.mark.parametrize(
    ("command", "vllm"),
    [
        ("/opt/venv/bin/python3 /opt/venv/bin/vllm serve Qwen/Qwen3-8B --port 8100", True),
        ("vllm serve m", True),
        ("numactl -N 0 vllm serve m", True),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", True),
        ("python3 -m vllm.entrypoints.cli.main serve m", True),
        ("python -m tokengap.lab.engine --max-num-seqs 4 --port 8100", True),
        ("VLLM::EngineCore", False),
        ("VLLM::APIServer_0", False),
        ("vllm bench serve --model m", False),
        ("python3 -m vllm.entrypoints.cli.main bench serve", False),
        ("vim vllm/entrypoints/openai/api_server.py", False),
        ("vllm", False),
        ("", False),
    ],
)
def test_what_is_a_vllm_server(command: str, vllm: bool) -> None:
    """Servers by each way to start them; their titled children and other commands of vLLM are none."""
    assert is_vllm(command.split()) is vllm


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ("", None),
        ("--max-num-seqs 4", 4),
        ("--max-num-seqs=4", 4),
        ("--max_num_seqs 4", 4),
        ("--max_num_seqs=4 --max-num-seqs 8", 8),
        ("--max-num-seqs 4 --data-parallel-size 2", 8),
        ("-dp 2 --max-num-seqs 4", 8),
        ("--max-num-seqs 4 -dp=2", 8),
        ("--data-parallel-size 8", None),
        ("--max-num-seqs 4 -dp 8 --data-parallel-hybrid-lb --data-parallel-size-local 2", 8),
        ("--max-num-seqs 4 -dp 8 --data-parallel-external-lb", 4),
        ("--max-num-seqs 4 -dp 8 --data-parallel-rank 0", 4),
        ("--max-num-seqs 256 --max-num-active-seqs 64", 64),
        ("--max-num-seqs four", None),
        ("--max-num-seqs 0", None),
        ("--max-num-seqs", None),
        ("--served-model-name --max-num-seqsy 3", None),
    ],
)
def test_slots_on_a_command_line(options: str, slots: int | None) -> None:
    """Sequences at once of the ranks that one page shows; None where the command line does not say."""
    assert slots_of(f"vllm serve m {options}".split()) == slots


def test_the_port_on_a_command_line() -> None:
    """vLLM's default is 8000."""
    assert api_port(["vllm", "serve", "m", "--port=8100"]) == 8100
    assert api_port(["vllm", "serve", "m"]) == 8000


@pytest.mark.parametrize(
    ("name", "command", "program"),
    [
        ("nginx", "nginx: worker process", "nginx"),
        ("haproxy", "haproxy -Ws -f a.cfg", "haproxy"),
        ("envoy", "envoy -c a.yaml", "envoy"),
        ("litellm", "/usr/bin/python3 /usr/local/bin/litellm --port 4000", "litellm"),
        ("python3.11", "python3.11 -m litellm --port 4000", "litellm"),
        ("python", "python -m tokengap.lab.gateway --port 8080", "gateway"),
        ("vim", "vim litellm", None),
        ("python3", "python3 proxy.py", None),
        ("gateway", "gateway", None),
    ],
)
def test_which_proxy_a_process_is(name: str, command: str, program: str | None) -> None:
    """Proxies by the name of the process; those written in Python by what the interpreter runs."""
    assert proxy_program(name, command.split()) == program
