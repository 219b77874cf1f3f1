"""The lab's proxies with the interfaces that they tell about themselves on, and with clients on HTTP/2. For tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tokengap.lab.parts import LOOPBACK, Part, free_port
from tokengap.lab.proxies import PROXIES, Proxy, Wiring
from tokengap.topology import ProxyInterface


def _with(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"the lab's configuration has no {old!r} any more"
    return text.replace(old, new)


def _haproxy(text: str, wiring: Wiring, _: int) -> str:
    server = f"server vllm {LOOPBACK}:{wiring.upstream}"
    text = _with(text, "    timeout server 1h\n", "    timeout server 1h\n    timeout queue 1h\n")
    return _with(text, server, f"{server} maxconn 4")


def _envoy(text: str, _: Wiring, status: int) -> str:
    return f"admin:\n  address: {{socket_address: {{address: {LOOPBACK}, port_value: {status}}}}}\n{text}"


def _nginx(text: str, _: Wiring, status: int) -> str:
    page = (
        f"    server {{\n        listen {LOOPBACK}:{status};\n        location = /status {{ stub_status; }}\n    }}\n"
    )
    return _with(_with(text, "    server {\n", f"{page}    server {{\n"), "backlog=16384", "backlog=16384 http2")


@dataclass(frozen=True)
class Told:
    """A proxy that tells about itself: what to run, and where to ask. HAProxy lets 4 requests go to the engine."""

    part: Part
    interface: ProxyInterface


_CHANGES: dict[str, tuple[Callable[[str, Wiring, int], str], Callable[[Path, int], str]]] = {
    "haproxy": (_haproxy, lambda directory, _: str(directory / "haproxy.sock")),
    "envoy": (_envoy, lambda _, status: f"http://{LOOPBACK}:{status}"),
    "nginx": (_nginx, lambda _, status: f"http://{LOOPBACK}:{status}/status"),
}


def told(name: str, wiring: Wiring) -> Told:
    """Return one of the lab's proxies with its own interface; nginx speaks nothing but HTTP/2 to its clients then."""
    change, address = _CHANGES[name]
    status = free_port()

    def config(wiring: Wiring) -> str:
        return change(PROXIES[name].config(wiring), wiring, status)

    proxy: Proxy = replace(PROXIES[name], config=config)
    part = proxy.part(wiring)
    ports = part.ports if name == "haproxy" else (*part.ports, status)
    return Told(replace(part, ports=ports), ProxyInterface("edge", name, address(wiring.directory, status)))


RECORDED = Path(__file__).parents[1] / "recorded" / "haproxy-2.6"

Answer = Callable[[str], Awaitable[bytes]]


@asynccontextmanager
async def runtime_socket(path: Path, answer: Answer) -> AsyncIterator[list[str]]:
    """Serve something like HAProxy's runtime socket: one line asked, one answer, the end."""
    asked: list[str] = []
    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        try:
            asked.append((await reader.readline()).decode().strip())
            writer.write(await answer(asked[-1]))
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield asked
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def answers(*, sessions: bytes | None = None, stat: bytes | None = None) -> Answer:
    """Return what HAProxy said with six streams, of which two wait; or what is given."""

    async def answer(command: str) -> bytes:
        if command == "show info":
            return (RECORDED / "info.txt").read_bytes()
        if command == "show stat":
            return (RECORDED / "stat-h2.csv").read_bytes() if stat is None else stat
        assert command == "show sess all"
        return (RECORDED / "sess-h2.txt").read_bytes() if sessions is None else sessions

    return answer
