"""The Helm chart and the plain manifests made from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from deploy.chart import CHART, OPERATOR, objects, one, rendered, sidecar, validate
from deploy.image import FINAL
from deploy.unit import DEPLOY, NETNS, ROOT, settings
from tokengap import __version__
from tokengap.cli import main, serve
from tokengap.config import load

pytestmark = pytest.mark.e2e

KUBERNETES = DEPLOY / "kubernetes"
SIDECAR = {"form": "sidecar", "sidecarPodLabels": {"app": "edge"}}
ALL = {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboards", "networkPolicy")}
PLACED = {
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"operator": "Exists"}],
    "imagePullSecrets": [{"name": "pull"}],
}

VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "everything": ALL | PLACED | {"gpu": True, "networkPolicy": {"enabled": True, "from": [{"podSelector": {}}]}},
    "without the pods": {"readPods": False, "gpu": True},
    "settings in a Secret": {"settingsSecret": "mine"},
    "sidecar": SIDECAR | {"serviceMonitor": {"enabled": True}},
}


def container(found: list[dict[str, Any]]) -> dict[str, Any]:
    (only,) = one(found, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_lint(values: dict[str, Any]):
    """Strictly: nothing but that an icon would be nice."""
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [said["error"] for said in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_knows_every_field(values: dict[str, Any]):
    """By its schemas, the oldest and the newest."""
    for found in objects(values):
        if found["apiVersion"] != OPERATOR:
            validate(found)


def test_a_wrong_field_would_be_found():
    """The check above is one."""
    wrong = one(objects(), "DaemonSet")
    wrong["spec"]["template"]["spec"]["hostNetwrk"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetwrk"):
        validate(wrong)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"frm": "sidecar"}, "frm"),
        ({"form": "deployment"}, "form"),
        ({"form": "sidecar"}, "sidecarPodLabels"),
        (SIDECAR | {"networkPolicy": {"enabled": True}}, "networkPolicy"),  # it would shut the proxy's own ports
        ({"serviceMonitor": {"interval": "5"}}, "interval"),
        ({"readPods": "yes"}, "readPods"),
    ],
)
def test_the_schema_refuses_what_is_wrong(values: dict[str, Any], why: str):
    with pytest.raises(helm.HelmError, match=why):
        rendered(values)


def test_its_settings_are_those_of_the_exporter(tmp_path: Path):
    """The example is read by tokengap itself, and so is the command."""
    found = objects()
    file = tmp_path / "tokengap.yaml"
    file.write_text(one(found, "ConfigMap")["data"]["tokengap.yaml"])
    assert [hop.name for hop in load(file, {"TOKENGAP_NETNS": "all"}, {}).hops] == ["edge"]
    command, *arguments = container(found)["args"]
    assert command == "serve"
    above = click.Context(main, **main.context_settings)
    assert serve.make_context("serve", arguments, above).params["config"] == Path("/etc/tokengap/tokengap.yaml")


def test_its_parts_fit(tmp_path: Path):
    """Who selects whom, ports, volumes, the image's version."""
    found = objects(VALUES["everything"])
    template = one(found, "DaemonSet")["spec"]["template"]
    only = container(found)
    (port,) = only["ports"]
    (served,) = one(found, "Service")["spec"]["ports"]
    assert (port["name"], port["containerPort"], served["name"]) == ("metrics", served["targetPort"], "metrics")
    for selector in (
        one(found, "DaemonSet")["spec"]["selector"]["matchLabels"],
        one(found, "Service")["spec"]["selector"],
        one(found, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= template["metadata"]["labels"].items()
    monitored = one(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= one(found, "Service")["metadata"]["labels"].items()
    assert [mount["name"] for mount in only["volumeMounts"]] == [v["name"] for v in template["spec"]["volumes"]]
    assert template["spec"]["volumes"][0]["configMap"]["name"] in {each["metadata"]["name"] for each in found}
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert only["image"].endswith(f":{chart['appVersion']}")
    assert chart["appVersion"] == __version__


def test_no_more_rights_than_needed():
    """To read pods, what the systemd unit's drop-in has; else none, as the image's own user; nobody's token, ever."""
    whole, plain = objects(), objects({"readPods": False})
    needed = settings(NETNS)["CapabilityBoundingSet"][0].replace("CAP_", "").split()
    assert container(whole)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": needed}
    rights = container(plain)["securityContext"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert (rights["runAsNonRoot"], rights["allowPrivilegeEscalation"]) == (True, False)
    assert f"{rights['runAsUser']}:{rights['runAsGroup']}" == FINAL.only("USER")
    for found in (whole, plain):
        assert container(found)["securityContext"]["readOnlyRootFilesystem"]
        assert one(found, "DaemonSet")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_rules_and_dashboards_are_those_of_the_bundle():
    """All of them, and unchanged: no `{{ }}` of theirs was taken for Helm's."""
    found = objects(ALL)
    rules = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "alerts").glob("*.yml"))]
    assert one(found, "PrometheusRule")["spec"]["groups"] == [group for file in rules for group in file["groups"]]
    boards = {name: text for each in found if each["kind"] == "ConfigMap" for name, text in each["data"].items()}
    del boards["tokengap.yaml"]
    assert {name: json.loads(text) for name, text in boards.items()} == {
        file.name: json.loads(file.read_text()) for file in (ROOT / "dashboards").glob("*.json")
    }
    theirs = yaml.safe_load((KUBERNETES / "servicemonitor.yaml").read_text())
    assert one(found, "ServiceMonitor")["spec"]["endpoints"] == theirs["spec"]["endpoints"]


def test_the_sidecar_form_has_no_workload_of_its_own():
    """Only what goes with one: its settings, and how it is found."""
    found = objects(VALUES["sidecar"])
    assert {each["kind"] for each in found} == {"ConfigMap", "Service", "ServiceMonitor"}
    assert one(found, "Service")["spec"]["selector"] == SIDECAR["sidecarPodLabels"]


def plain(tmp_path: Path) -> dict[str, str]:
    """Return the plain manifests, by file."""
    texts = rendered({"networkPolicy": {"enabled": True}})
    whole = "---\n".join(texts[f"{name}.yaml"] for name in ("settings", "daemonset", "service"))
    head = "# Made from deploy/helm/tokengap by `make accept`; change it there, not here.\n"
    patch = "# kubectl patch deployment edge --patch-file sidecar-patch.yaml; the ConfigMap is in daemonset.yaml.\n"
    return {
        "daemonset.yaml": head + whole,
        "networkpolicy.yaml": head + texts["networkpolicy.yaml"],
        "sidecar-patch.yaml": head + patch + sidecar(tmp_path),
    }


def test_golden_plain_manifests(tmp_path: Path):
    """They are what the chart renders. If this fails: `make accept`, and look at the diff."""
    wanted = plain(tmp_path)
    if os.environ.get("TOKENGAP_ACCEPT"):
        for name, text in wanted.items():
            (KUBERNETES / name).write_text(text)
    assert {name: (KUBERNETES / name).read_text() for name in wanted} == wanted


def test_the_patch_makes_a_pod_that_kubernetes_knows():
    """In a Deployment, beside the proxy's own container; without any right."""
    pod = yaml.safe_load((KUBERNETES / "sidecar-patch.yaml").read_text())["spec"]["template"]["spec"]
    pod["containers"].append({"name": "edge", "image": "nginx"})
    labels = SIDECAR["sidecarPodLabels"]
    validate(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "edge"},
            "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
        }
    )
    assert "add" not in pod["containers"][0]["securityContext"]["capabilities"]


@pytest.mark.parametrize(
    "path", sorted({*KUBERNETES.glob("*.yaml"), *DEPLOY.glob("health/*.yaml")}), ids=lambda p: p.name
)
def test_kubernetes_knows_every_field_of_plain_manifests(path: Path):
    """Those of the bundle and of the health check as well. A patch is no object."""
    for found in yaml.safe_load_all(path.read_text()):
        if found.get("apiVersion", OPERATOR) != OPERATOR:
            validate(found)
