"""A real Prometheus scrapes an exporter that asks who it is: by password, and by certificate."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import bcrypt
import pytest

from deployed import prometheus_config
from monitoring import aimed, prometheus
from series.example import rich_view
from tokengap.series.render import render
from tokengap.web.access import followed, read_access
from tokengap.web.guard import Guard
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving
from web.certificates import certificates

__all__ = ["certificates"]

pytestmark = pytest.mark.e2e


async def test_prometheus_scrapes_with_password_and_certificate(certificates: Path, tmp_path: Path):
    """It is up with both, and not with a password that is wrong or no certificate; also after the certificate is
    another."""
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    file = certificates / "scraped.yml"
    text = (
        "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, "
        f"client_auth_type: RequireAndVerifyClientCert}}\nbasic_auth_users: {{prometheus: '{hashed}'}}"
    )
    file.write_text(text)
    access = read_access(file)
    serving = Serving(also=())
    view = rich_view()
    serving.publish(view, render(view))
    server = Server(make_app(serving), Guard(access))
    await server.start("127.0.0.1", 0, access.tls)
    mine = {"cert_file": str(certificates / "client.crt"), "key_file": str(certificates / "client.key")}
    config = aimed(prometheus_config(), [f"127.0.0.1:{server.port}"], [], scrape=1)
    (job,) = config["scrape_configs"]
    config["scrape_configs"] = [
        job
        | {
            "job_name": name,
            "scheme": "https",
            "tls_config": {"ca_file": str(certificates / "ca.crt"), **certificate},
            "basic_auth": {"username": "prometheus", "password": password},
        }
        for name, certificate, password in (
            ("both", mine, "secret"),
            ("wrong password", mine, "Secret"),
            ("no certificate", {}, "secret"),
        )
    ]
    try:
        async with followed(access, server.take, every=0.1), prometheus(config, tmp_path) as asked:
            await asked.until('up{job="both"}', lambda rows: [value for _, value in rows] == [1], within=30)
            await asked.until("up", lambda rows: len(rows) == 3, within=30)
            assert await asked.values("up", "job") == {
                ("both",): 1,
                ("wrong password",): 0,
                ("no certificate",): 0,
            }
            file.write_text(text.replace("server.", "renewed."))
            async with asyncio.timeout(30):
                while True:
                    await asyncio.sleep(0.05)
                    if server.tls != access.tls:
                        break
            since = f'up{{job="both"}} == 1 and timestamp(up{{job="both"}}) > {time.time()}'
            await asked.until(since, bool, within=30)
    finally:
        await server.stop()
