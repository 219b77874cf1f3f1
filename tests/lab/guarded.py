"""A stand-in engine that is guarded: by TLS, by a key, or by both."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tokengap.lab.batching import Knobs
from tokengap.lab.engine import EngineServer
from tokengap.lab.parts import LOOPBACK


@dataclass(frozen=True, slots=True)
class Certificate:
    file: Path
    key: Path


def make_certificate(directory: Path) -> Certificate:
    """Make a certificate for loopback that nobody but the test trusts."""
    assert shutil.which("openssl"), "openssl is not installed: apt-get install openssl"
    made = Certificate(directory / "cert.pem", directory / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=engine", "-addext", f"subjectAltName=IP:{LOOPBACK}", "-days", "2"),
            *("-keyout", made.key, "-out", made.file),
        ],
        check=True,
        capture_output=True,
    )
    return made


@asynccontextmanager
async def guarded(certificate: Certificate | None = None, key: str = "") -> AsyncIterator[str]:
    """Serve a stand-in engine, where wanted with TLS, and only to who knows the key, and yield its URL."""

    @web.middleware
    async def check(request: web.Request, handler) -> web.StreamResponse:
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            said = f"Unauthorized: {request.headers.get('Authorization')}"
            return web.json_response({"error": {"message": said}}, status=401)
        return await handler(request)

    app = EngineServer(Knobs()).app()
    app.middlewares.append(check)
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.file, certificate.key)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, 0, ssl_context=context).start()
        yield f"http{'s' if context else ''}://{LOOPBACK}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
