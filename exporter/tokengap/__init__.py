"""tokengap: a Prometheus exporter that joins proxy sockets and engine counters of streaming LLM inference."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tokengap")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
