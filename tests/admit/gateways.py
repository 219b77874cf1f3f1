"""Running a gateway inside a test, over real sockets, and asking it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from lab.serving import until
from tokengap.admit.service import Gateway, gateway
from tokengap.config import Settings, load
from tokengap.lab.parts import LOOPBACK


def settings(*engines: int, slots: int = 64, **more: Any) -> Settings:
    """Return settings for engines at these ports, read as those of a command line are."""
    urls = tuple(f"e{number}=http://{LOOPBACK}:{port}" for number, port in enumerate(engines))
    return load(None, {}, {"engines": urls, "slots": str(slots), "admit_listen": f"{LOOPBACK}:0"} | more)


@asynccontextmanager
async def admitting(*engines: int, slots: int = 64, **more: Any) -> AsyncIterator[Gateway]:
    """Serve a gateway to these engines."""
    async with gateway(settings(*engines, slots=slots, **({"admit_stop_within": "500ms"} | more))) as built:
        yield built


def session(built: Gateway) -> aiohttp.ClientSession:
    """Return a session that asks this gateway."""
    return aiohttp.ClientSession(f"http://{LOOPBACK}:{built.port}")


def chat(**more: Any) -> dict[str, Any]:
    """Return the body of a streamed chat completion."""
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 20} | more


async def published(built: Gateway) -> dict[str, float]:
    """Return the gateway's page as it is now: samples by name and label values, ``name{a,b}``."""
    built.publish()
    async with session(built) as asking, asking.get("/metrics") as answer:
        text = await answer.text()
    return {
        sample.name + ("{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def settled(built: Gateway) -> dict[str, float]:
    """Return the page once nothing of the first engine is pending: a kernel acknowledges up to 40 ms after it read."""

    async def nothing_pending() -> bool:
        return not (await published(built))["tokengap_tokens_pending{e0}"]

    await until(nothing_pending)
    return await published(built)


class Raw:
    """A client of its own bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def said(self, within: float = 5.0) -> bytes:
        """Return everything up to the end of the connection."""
        async with asyncio.timeout(within):
            return await self.reader.read()


@asynccontextmanager
async def raw(port: int, request: bytes) -> AsyncIterator[Raw]:
    """Connect, send these bytes, and close at the end of the block."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(request)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def post(path: str, body: Any = None, *headers: str, version: str = "1.1") -> bytes:
    """Return the bytes of a POST."""
    data = b"" if body is None else msgspec.json.encode(body)
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data
