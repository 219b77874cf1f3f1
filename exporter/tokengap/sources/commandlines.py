"""What the command line of a process says: whether it is a vLLM server or a known proxy, and with how many slots.

Pure: words in, answers out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath

_VLLM_PORT = 8000
_VLLM_STARTS = frozenset(
    {
        ("vllm", "serve"),
        ("vllm.entrypoints.cli.main", "serve"),
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("-m", "tokengap.lab.engine"),
    }
)

#: Programs that forward to engines, by the name of the process, and Python ones by the script or module that runs.
_PROXIES = frozenset({"nginx", "haproxy", "envoy", "caddy", "traefik"})
_PYTHON_PROXIES = {"litellm": "litellm", "tokengap.lab.gateway": "gateway"}
KNOWN_PROXIES = tuple(sorted(_PROXIES | set(_PYTHON_PROXIES.values())))

#: Ports on which a proxy by convention serves its operator, not its users.
OPERATOR_PORTS: Mapping[str, frozenset[int]] = {
    "caddy": frozenset({2019}),
    "envoy": frozenset({9901}),
    "haproxy": frozenset({8404}),
}

_INTERPRETER = re.compile(r"(?:python|pypy|node|ruby|perl|php|java|dotnet|bash|sh)[\d.]*$")


def is_interpreter(name: str) -> bool:
    """Tell whether the name of a process says nothing about what it runs."""
    return _INTERPRETER.match(name) is not None


def is_vllm(argv: Sequence[str]) -> bool:
    """Tell whether a command line starts a vLLM server. Its children are not: they are titled ``VLLM::EngineCore``."""
    words = [PurePath(word).name for word in argv[:8]]  # an interpreter or a wrapper such as numactl may come first
    return any(pair in _VLLM_STARTS for pair in pairwise(words))


def proxy_program(name: str, argv: Sequence[str]) -> str | None:
    """Return which known proxy a process is, by its name and its command line."""
    if name in _PROXIES:
        return name
    if name in _PYTHON_PROXIES or is_interpreter(name):
        words = [PurePath(word).name for word in argv[:4]]
        return next((_PYTHON_PROXIES[word] for word in words if word in _PYTHON_PROXIES), None)
    return None


def option(argv: Sequence[str], *names: str) -> str | None:
    """Return the value of a command line option, the last one as argparse does; ``_`` in its name reads as ``-``."""
    value = None
    for place, word in enumerate(argv):
        flag, equals, rest = word.partition("=")
        if flag.startswith("-") and flag.replace("_", "-") in names:
            value = rest if equals else (argv[place + 1] if place + 1 < len(argv) else None)
    return value


def slots_of(argv: Sequence[str]) -> int | None:
    """Return how many sequences the ranks behind one page can run at once, where the command line says so.

    ``--max-num-seqs`` (and ``--max-num-active-seqs``, vLLM 0.31, where it is lower) is per data-parallel rank. A page
    shows all ranks, but with hybrid load balancing those of its node, and with external load balancing one.
    """
    limits = [_number(option(argv, name)) for name in ("--max-num-seqs", "--max-num-active-seqs")]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    ranks = _number(option(argv, "--data-parallel-size", "-dp")) or 1
    flags = {word.replace("_", "-") for word in argv}
    if flags & {"--data-parallel-hybrid-lb", "-dph"}:
        ranks = _number(option(argv, "--data-parallel-size-local", "-dpl")) or ranks
    one_rank = {"--data-parallel-external-lb", "-dpe", "--data-parallel-multi-port-external-lb", "-dpm"}
    if flags & one_rank or option(argv, "--data-parallel-rank", "-dpn") is not None:
        ranks = 1
    return min(known) * ranks


def api_port(argv: Sequence[str]) -> int:
    """Return the port of a vLLM server, its default where the command line names none."""
    return _number(option(argv, "--port")) or _VLLM_PORT


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and int(text) > 0 else None
