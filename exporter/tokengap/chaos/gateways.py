"""Real gateways in front of several replicas, configured as somebody would who has read their manuals: HAProxy, nginx,
Envoy, and the one of this package that admits.

Each asks the replicas for their health where it can, gives up on a replica that is silent for the read timeout, and
asks another one as long as its client has got no byte (the one that admits: as long as nothing was sent). What each
makes of the same fault differs, and that is what experiments are for (``docs/chaos.md``).

Replicas are reached at addresses of their own, 127.0.1.1, 127.0.1.2 ..., so that a network can be cut between the
gateway and one of them while everybody else still reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokengap.lab.parts import LOOPBACK, Part
from tokengap.lab.proxies import ADMIT, GATES, Wiring

_PREVIOUS_HOSTS = "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"

#: Seconds within which a connection to a replica is there, or another one is tried.
CONNECT = 0.5


@dataclass(frozen=True, slots=True)
class Upstream:
    """A replica as a gateway sees it."""

    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Routes:
    """``read_timeout``: seconds without a byte of a replica after which it is given up."""

    upstreams: tuple[Upstream, ...]
    read_timeout: float


def haproxy_config(wiring: Wiring, routes: Routes) -> str:
    """Return haproxy.cfg.

    What is retried is what no client has seen a byte of. ``shutdown-sessions`` ends streams to a replica that is down;
    without it they wait for the read timeout. ``tcp-ut`` ends a client that acknowledges nothing for so long, which
    nothing else does (TCP_USER_TIMEOUT). Without ``http-no-delay`` tokens come in bursts, each 200 ms (MSG_MORE).
    """
    servers = "\n".join(f"    server {each.name} {each.address}:{each.port}" for each in routes.upstreams)
    wait = f"{routes.read_timeout * 1000:.0f}ms"
    return f"""\
defaults
    mode http
    timeout connect {CONNECT * 1000:.0f}ms
    timeout check {CONNECT * 1000:.0f}ms
    timeout client 1h
    timeout server {wait}
    option abortonclose
    option http-no-delay
    option redispatch 1
    http-reuse never
    retries 2
    retry-on conn-failure empty-response response-timeout 500 503

frontend edge
    bind {LOOPBACK}:{wiring.listen} backlog 16384 tcp-ut {wait}
    default_backend engines

backend engines
    balance leastconn
    option httpchk GET /health
    default-server check inter 1s fall 2 rise 2 on-marked-down shutdown-sessions
{servers}
"""


def nginx_config(wiring: Wiring, routes: Routes) -> str:
    """Return nginx.conf. It asks nobody for their health: a replica is out for a while after it has failed somebody."""
    servers = "\n".join(
        f"        server {each.address}:{each.port} max_fails=1 fail_timeout=5s;" for each in routes.upstreams
    )
    temporary = "\n".join(
        f'    {name}_temp_path "{wiring.directory}/{name}";'
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
daemon off;
worker_processes 2;
pid "{wiring.directory}/nginx.pid";
error_log stderr;

events {{
    worker_connections 16384;
}}

http {{
    access_log off;
{temporary}

    upstream engines {{
        zone engines 64k;
        least_conn;
{servers}
    }}

    server {{
        listen {LOOPBACK}:{wiring.listen} backlog=16384;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_connect_timeout {CONNECT * 1000:.0f}ms;
            proxy_read_timeout {routes.read_timeout * 1000:.0f}ms;
            proxy_next_upstream error timeout non_idempotent http_500 http_503;
            proxy_next_upstream_tries 2;
        }}
    }}
}}
"""


def envoy_config(wiring: Wiring, routes: Routes) -> str:
    """Return envoy.yaml.

    The idle timeout of the route is what a read timeout is elsewhere: Envoy has one for both ways of a stream. Without
    ``no_traffic_interval`` the second health check comes after a minute, however much traffic there is meanwhile. One
    request a connection, for a request over one that was kept waits for the idle timeout when its network is cut.
    TCP_USER_TIMEOUT is option 18 of level 6.
    """
    endpoints = "\n".join(
        f"        - endpoint: {{address: {{socket_address: {{address: {each.address}, port_value: {each.port}}}}}}}"
        for each in routes.upstreams
    )
    wait = routes.read_timeout
    return f"""\
static_resources:
  listeners:
  - name: edge
    address: {{socket_address: {{address: {LOOPBACK}, port_value: {wiring.listen}}}}}
    tcp_backlog_size: 16384
    socket_options:
    - {{level: 6, name: 18, int_value: {wait * 1000:.0f}, state: STATE_PREBIND}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: edge
          preserve_external_request_id: true
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: engines
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                route:
                  cluster: engines
                  timeout: 0s
                  idle_timeout: {wait:g}s
                  retry_policy:
                    retry_on: 5xx,reset,connect-failure
                    num_retries: 2
                    retry_host_predicate:
                    - name: envoy.retry_host_predicates.previous_hosts
                      typed_config:
                        "@type": {_PREVIOUS_HOSTS}
                    host_selection_retry_max_attempts: 3
  clusters:
  - name: engines
    type: STATIC
    connect_timeout: {CONNECT:g}s
    lb_policy: LEAST_REQUEST
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {{max_requests_per_connection: 1}}
        explicit_http_config: {{http_protocol_options: {{}}}}
    circuit_breakers:
      thresholds:
      - {{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000, max_retries: 100000}}
    common_lb_config: {{healthy_panic_threshold: {{value: 0}}}}
    health_checks:
    - timeout: {CONNECT:g}s
      interval: 1s
      no_traffic_interval: 1s
      unhealthy_threshold: 2
      healthy_threshold: 2
      http_health_check: {{path: /health}}
    outlier_detection: {{consecutive_5xx: 3, interval: 1s, base_ejection_time: 5s, max_ejection_percent: 50}}
    load_assignment:
      cluster_name: engines
      endpoints:
      - lb_endpoints:
{endpoints}
"""


def admit_config(wiring: Wiring, routes: Routes) -> str:
    """Return admit.yaml. It reads the replicas' pages, and refuses by age as it does without being told.

    What begins to be answered is never sent again; a connection that nobody takes sends a request to the other replica.
    """
    engines = "\n".join(f"  - {each.name}=http://{each.address}:{each.port}" for each in routes.upstreams)
    return f"""\
engines:
{engines}
slots: {wiring.slots}
admit_listen: {LOOPBACK}:{wiring.listen}
admit_control: {wiring.directory}/admit.sock
admit_silence: {routes.read_timeout:g}s
"""


#: What there is by the name of its program, as ``--through`` has it.
GATEWAYS: Mapping[str, Callable[[Wiring, Routes], str]] = {
    "haproxy": haproxy_config,
    "nginx": nginx_config,
    "envoy": envoy_config,
    ADMIT.name: admit_config,
}


def gateway_part(
    name: str,
    through: str,
    listen: int,
    upstreams: Sequence[Upstream],
    *,
    read_timeout: float,
    slots: int,
    directory: Path,
) -> Part:
    """Write a gateway's configuration and return the part to run. Raises SetupError when it is not installed.

    ``slots`` are those of each replica, for the one that admits.
    """
    own = directory / name
    own.mkdir()
    routes = Routes(tuple(upstreams), read_timeout)
    gate = replace(GATES[through], config=lambda wiring: GATEWAYS[through](wiring, routes))
    return replace(gate.part(Wiring(listen, upstreams[0].port, leak=False, directory=own, slots=slots)), name=name)
