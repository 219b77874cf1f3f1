"""tokengap: a Prometheus exporter that joins proxy sockets and engine counters of streaming LLM inference."""

__version__: str


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: what that imports is half of the start of the GPU reader."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokengap")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0"
