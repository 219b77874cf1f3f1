"""The same experiments for clusters: objects of LitmusChaos and Chaos Mesh, the rules that their probes ask, CI jobs.

Rendered from values, so that names and numbers agree in all of them. What a cluster cannot do is left out, and said
where somebody would look for it: LitmusChaos kills with SIGKILL or SIGTERM only (no SIGBUS), and neither stops a
process (SIGSTOP) or loses a GPU; those are experiments of one machine.

A promProbe of LitmusChaos passes its query through a shell in double quotes, wants exactly one series, and takes an
answer that is no number for 0, which passes. So each asks for a recording rule by its bare name, and each rule is one
series whatever happens: NaN, which fails, where there is nothing to record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tokengap.bundle.promql import Match, any_of, by, rate
from tokengap.bundle.render.file import File, as_yaml
from tokengap.bundle.site import Site
from tokengap.series.engines import ENGINE_STATE
from tokengap.series.queue import QUEUE_AGE
from tokengap.series.tokens import TOKENS_ORPHANED, TOKENS_OUT

LITMUS, MESH = "litmuschaos.io/v1alpha1", "chaos-mesh.org/v1alpha1"

#: What an engine is called that works or could.
WELL: Final[Match] = any_of("busy", "idle", "sleeping")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where things are: ``engines`` and ``gateway`` are labels of pods, ``container`` is the engine's in its pod.
    ``duration``: seconds of each fault."""

    namespace: str = "llm"
    engines: str = "app=vllm"
    gateway: str = "app=gateway"
    container: str = "vllm"
    prometheus: str = "http://prometheus.monitoring:9090"
    gateway_health: str = "http://gateway.llm:8080/health"
    duration: int = 60


@dataclass(frozen=True, slots=True)
class Probe:
    """A number that must hold at the end of an experiment: a recording rule, its expression, and its limit."""

    name: str
    record: str
    expr: str
    criteria: str
    value: str


def probes(site: Site) -> tuple[Probe, ...]:
    """Return what is asked at the end of each experiment."""
    orphaned, out = (by("sum", (), rate(site.select(series), 60)) for series in (TOKENS_ORPHANED, TOKENS_OUT))
    well = by("min", (), by("max", ("engine",), site.select(ENGINE_STATE, state=WELL)))
    return (
        Probe("every-engine-is-well", "tokengap:chaos_engines_well:min", _always(well), ">=", "1"),
        Probe(
            "the-queue-is-young",
            "tokengap:chaos_queue_age_seconds:max",
            _always(by("max", (), site.select(QUEUE_AGE))),
            "<=",
            f"{site.age_cut:g}",
        ),
        Probe(
            "few-tokens-are-orphaned",
            "tokengap:chaos_orphaned:ratio_rate1m",
            _always(f"{orphaned} / {out}"),
            "<=",
            f"{site.orphan_budget:g}",
        ),
    )


def _always(expr: str) -> str:
    """Return an expression that is one series also where there is nothing, and then no number."""
    return f"({expr}) or vector(NaN)"


def files(site: Site, cluster: Cluster) -> Iterator[File]:
    """Yield every file, the path below the folder of the manifests."""
    rules = {"groups": [{"name": "tokengap-chaos", "rules": [_rule(probe) for probe in probes(site)]}]}
    yield File("prometheus/tokengap-chaos.rules.yml", as_yaml(rules))
    for engine in litmus(site, cluster):
        yield File(f"litmus/{engine['metadata']['name']}.yaml", as_yaml(engine))
    for chaos in mesh(cluster):
        yield File(f"chaos-mesh/{chaos['metadata']['name']}.yaml", as_yaml(chaos))
    yield File("ci/github-actions.yml", as_yaml(github()))
    yield File("ci/gitlab-ci.yml", as_yaml(gitlab()))


def _rule(probe: Probe) -> dict[str, Any]:
    return {"record": probe.record, "expr": probe.expr}


# --- LitmusChaos ----------------------------------------------------------------------------------------------------


def litmus(site: Site, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield a ChaosEngine for each experiment that LitmusChaos can do. Values of variables are texts."""
    killed = {
        "TARGET_CONTAINER": cluster.container,
        "CONTAINER_RUNTIME": "containerd",
        "SOCKET_PATH": "/run/containerd/containerd.sock",
        "SIGNAL": "SIGKILL",
    }
    yield _engine(site, cluster, "engine-crash", "container-kill", cluster.engines, killed)
    yield _engine(site, cluster, "cold-restart", "pod-delete", cluster.engines, {"FORCE": "true"})
    cut = {
        "POLICY_TYPES": "all",
        "POD_SELECTOR": cluster.gateway,
        "NAMESPACE_SELECTOR": f"kubernetes.io/metadata.name={cluster.namespace}",
    }
    yield _engine(site, cluster, "partition", "pod-network-partition", cluster.engines, cut)


def _engine(
    site: Site, cluster: Cluster, name: str, experiment: str, label: str, variables: dict[str, str]
) -> dict[str, Any]:
    every = {"TOTAL_CHAOS_DURATION": str(cluster.duration), **variables}
    return {
        "apiVersion": LITMUS,
        "kind": "ChaosEngine",
        "metadata": {"name": name, "namespace": cluster.namespace},
        "spec": {
            "engineState": "active",
            "chaosServiceAccount": f"{experiment}-sa",
            "appinfo": {"appns": cluster.namespace, "applabel": label, "appkind": "deployment"},
            "experiments": [
                {
                    "name": experiment,
                    "spec": {
                        "components": {"env": [{"name": key, "value": value} for key, value in every.items()]},
                        "probe": [_gateway_answers(cluster), *(_asked(cluster, each) for each in probes(site))],
                    },
                }
            ],
        },
    }


def _gateway_answers(cluster: Cluster) -> dict[str, Any]:
    """Return the probe that asks the gateway all the while."""
    return {
        "name": "the-gateway-answers",
        "type": "httpProbe",
        "mode": "Continuous",
        "httpProbe/inputs": {
            "url": cluster.gateway_health,
            "method": {"get": {"criteria": "==", "responseCode": "200"}},
        },
        "runProperties": {"probeTimeout": "5s", "interval": "2s", "attempt": 1, "probePollingInterval": "2s"},
    }


def _asked(cluster: Cluster, probe: Probe) -> dict[str, Any]:
    """Return the probe that asks Prometheus at the end, in two minutes of attempts: engines load for a while."""
    return {
        "name": probe.name,
        "type": "promProbe",
        "mode": "EOT",
        "promProbe/inputs": {
            "endpoint": cluster.prometheus,
            "query": probe.record,
            "comparator": {"criteria": probe.criteria, "value": probe.value},
        },
        "runProperties": {"probeTimeout": "10s", "interval": "10s", "attempt": 12},
    }


# --- Chaos Mesh -----------------------------------------------------------------------------------------------------


def mesh(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield an object for each experiment that Chaos Mesh can do, a schedule, and a workflow of several."""
    engines, gateway = (_selector(cluster, label) for label in (cluster.engines, cluster.gateway))
    lasts = f"{cluster.duration}s"
    crash = {
        "action": "container-kill",
        "mode": "one",
        "containerNames": [cluster.container],
        "selector": engines,
    }
    cut = {
        "action": "partition",
        "mode": "all",
        "direction": "both",
        "duration": lasts,
        "selector": gateway,
        "target": {"mode": "one", "selector": engines},
    }
    slow = {
        "mode": "one",
        "duration": lasts,
        "selector": engines,
        "stressors": {"cpu": {"workers": 8, "load": 90}},
    }
    yield _object(cluster, "PodChaos", "engine-crash", crash)
    yield _object(cluster, "PodChaos", "cold-restart", {"action": "pod-kill", "mode": "one", "selector": engines})
    yield _object(cluster, "NetworkChaos", "partition", cut)
    yield _object(cluster, "StressChaos", "slow-engine", slow)
    weekly = {
        "schedule": "0 10 * * 2",
        "historyLimit": 4,
        "concurrencyPolicy": "Forbid",
        "type": "PodChaos",
        "podChaos": crash,
    }
    yield _object(cluster, "Schedule", "engine-crash-weekly", weekly)
    pause = {"templateType": "Suspend", "deadline": "5m"}
    templates = [
        {"name": "all", "templateType": "Serial", "deadline": "30m", "children": ["crash", "recovers", "cut"]},
        {"name": "crash", "templateType": "PodChaos", "deadline": lasts, "podChaos": crash},
        {"name": "recovers", **pause},
        {"name": "cut", "templateType": "NetworkChaos", "deadline": lasts, "networkChaos": _without(cut, "duration")},
    ]
    yield _object(cluster, "Workflow", "engine-crash-then-partition", {"entry": "all", "templates": templates})


def _selector(cluster: Cluster, label: str) -> dict[str, Any]:
    """Return a selector that is never empty: one without a label is every pod of the namespace."""
    key, _, value = label.partition("=")
    return {"namespaces": [cluster.namespace], "labelSelectors": {key: value}}


def _object(cluster: Cluster, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": MESH,
        "kind": kind,
        "metadata": {"name": name, "namespace": cluster.namespace},
        "spec": spec,
    }


def _without(spec: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a spec for a template of a workflow, whose deadline is its duration."""
    return {name: value for name, value in spec.items() if name != key}


# --- CI -------------------------------------------------------------------------------------------------------------

#: What runs on each change: short enough for that.
IN_CI: Final = ("engine-crash", "partition")
_INSTALL: Final = (
    "sudo apt-get update && sudo apt-get install -y --no-install-recommends haproxy nftables",
    "python -m pip install 'tokengap[lab]'",
)


def _run(experiment: str, sudo: str) -> str:
    return f'{sudo}"$(command -v tokengap)" chaos run {experiment} --seed 1 --out chaos-report'


def github() -> dict[str, Any]:
    """Return a workflow of GitHub Actions. ``"on"`` is in quotes: without, YAML 1.1 reads a truth value."""
    return {
        "name": "chaos",
        "on": {"pull_request": {}, "schedule": [{"cron": "0 4 * * 1"}]},
        "jobs": {
            "chaos": {
                "runs-on": "ubuntu-latest",
                "timeout-minutes": 15,
                "strategy": {"fail-fast": False, "matrix": {"experiment": list(IN_CI)}},
                "steps": [
                    {"uses": "actions/setup-python@v5", "with": {"python-version": "3.12"}},
                    *({"run": command} for command in _INSTALL),
                    {"run": _run("${{ matrix.experiment }}", "sudo ")},
                    {
                        "if": "always()",
                        "uses": "actions/upload-artifact@v4",
                        "with": {"name": "chaos-${{ matrix.experiment }}", "path": "chaos-report"},
                    },
                ],
            }
        },
    }


def gitlab() -> dict[str, Any]:
    """Return jobs of GitLab CI. A runner needs the capability to make network namespaces for `partition`."""
    install = [command.replace("sudo ", "") for command in _INSTALL]
    return {
        "chaos": {
            "image": "python:3.12-bookworm",
            "parallel": {"matrix": [{"EXPERIMENT": list(IN_CI)}]},
            "script": [*install, _run('"$EXPERIMENT"', "")],
            "artifacts": {"when": "always", "paths": ["chaos-report"]},
        }
    }
