"""The naive gateway in Python that many teams write, run as its own process: ``python -m tokengap.lab.gateway``.

It forwards each request and relays the answer as it comes. When a client leaves, its socket is closed, and the gateway
reads the engine's answer to the end all the same: nobody told it not to. LiteLLM 1.80 did so for streams, and many
gateways still do for answers that are not streamed. ``--no-leak`` ties the two together, which takes one argument.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable

import aiohttp
import click
from aiohttp import web

from tokengap.lab.parts import LOOPBACK, Part, serve_app

#: Headers that concern one connection (RFC 9110, 7.6.1) or that the sending side sets itself.
_NOT_FORWARDED = frozenset({"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})

_UPSTREAM = web.AppKey("upstream", str)
_SESSION = web.AppKey("session", aiohttp.ClientSession)


def gateway_app(upstream: str, *, pool: bool) -> web.Application:
    """Return the gateway to ``upstream``. Without ``pool`` each request has a connection of its own."""
    app = web.Application(client_max_size=64 * 2**20)
    app[_UPSTREAM] = upstream.rstrip("/")

    async def session(app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=not pool)
        no_limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=no_limit, auto_decompress=False) as opened:
            app[_SESSION] = opened
            yield

    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/v1/{path:.*}", _forward)
    return app


async def _forward(request: web.Request) -> web.StreamResponse:
    url = request.app[_UPSTREAM] + request.raw_path
    headers = {key: value for key, value in request.headers.items() if key.lower() not in _NOT_FORWARDED}
    body = await request.read()
    try:
        async with request.app[_SESSION].request(request.method, url, headers=headers, data=body) as answer:
            return await _relay(request, answer)
    except aiohttp.ClientConnectorError as error:
        return web.json_response({"error": {"message": str(error), "code": 502}}, status=502)
    except aiohttp.ClientError:
        # The engine broke off. The client learns it the same way: by an answer without an end.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError from None


async def _relay(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    response.headers.update({k: v for k, v in answer.headers.items() if k.lower() not in _NOT_FORWARDED})
    left = not await _delivered(response.prepare(request))
    async for data in answer.content.iter_any():
        # For a client that left, this reads on to the end, for nobody. Here is the leak.
        left = left or not await _delivered(response.write(data))
    if not left:
        await _delivered(response.write_eof())
    return response


async def _delivered(write: Awaitable[object]) -> bool:
    """Await a write to the client, and tell whether the client was still there."""
    try:
        await write
    except ConnectionResetError:
        return False
    return True


def gateway_part(port: int, upstream_port: int, *, leak: bool, pool: bool = False, name: str = "naive") -> Part:
    """Return the part that serves the gateway on loopback at ``port``."""
    upstream = f"http://{LOOPBACK}:{upstream_port}"
    command = [sys.executable, "-m", "tokengap.lab.gateway", "--port", str(port), "--upstream", upstream]
    command += ["--leak" if leak else "--no-leak", *(["--pool"] if pool else [])]
    return Part(name, tuple(command), (port,))


@click.command()
@click.option("--host", default=LOOPBACK, show_default=True)
@click.option("--port", type=int, required=True)
@click.option("--upstream", default="http://127.0.0.1:8100", show_default=True)
@click.option("--leak/--no-leak", default=True, show_default=True, help="Read on when a client has left.")
@click.option("--pool", is_flag=True, help="Keep connections to the engine open and use them again.")
def main(host: str, port: int, upstream: str, leak: bool, pool: bool) -> None:
    """Serve the naive gateway."""
    # The one argument: a client that leaves cancels what is done for it.
    serve_app(gateway_app(upstream, pool=pool), host, port, handler_cancellation=not leak)


if __name__ == "__main__":
    main()
