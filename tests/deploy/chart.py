"""The Helm chart, rendered by Helm's own library, and Kubernetes' schemas to hold the outcome against."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import yaml

from deploy.unit import DEPLOY

CHART = DEPLOY / "helm" / "tokengap"

#: Kinds of Prometheus' operator: Kubernetes has no schema of them.
OPERATOR = "monitoring.coreos.com/v1"

#: The oldest that the chart is for, and the newest whose schemas there are.
VERSIONS = ("1.30", kubernetes_validate.latest_version())

#: A chart of somebody's proxy, which has ours among its dependencies and its sidecar in a pod: here, in a pod's patch.
PARENT = {
    "Chart.yaml": "{apiVersion: v2, name: edge, version: 0.1.0, dependencies: [{name: tokengap, version: 0.1.0}]}",
    "templates/patch.yaml": """\
spec:
  template:
    spec:
      containers:
        - {{- include "tokengap.sidecar" .Subcharts.tokengap | nindent 10 }}
      volumes:
        - {{- include "tokengap.volume" .Subcharts.tokengap | nindent 10 }}
""",
}

Objects = list[dict[str, Any]]


def rendered(values: dict[str, Any] | None = None, *, chart: Path = CHART, release: str = "tokengap") -> dict[str, str]:
    """Return the text of each template, by its name. HelmError: Helm, or the values' schema, refuses it."""
    with helm.Chart.load(chart) as loaded:
        loaded.validate_schema(values or {})
        texts = loaded.render(values or {}, name=release, namespace="monitoring")
    return {path.rpartition("/")[2]: text.strip() + "\n" for path, text in texts.items() if text.strip()}


def objects(values: dict[str, Any] | None = None) -> Objects:
    """Return all objects."""
    texts = [text for name, text in rendered(values).items() if name != "NOTES.txt"]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def one(found: Objects, kind: str) -> dict[str, Any]:
    (wanted,) = (each for each in found if each["kind"] == kind)
    return wanted


def sidecar(directory: Path) -> str:
    """Return the patch that gives a pod the sidecar, as the parent chart renders it."""
    for name, text in PARENT.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    shutil.copytree(CHART, directory / "charts" / "tokengap")
    values = {"tokengap": {"form": "sidecar", "sidecarPodLabels": {"app": "edge"}}}
    return rendered(values, chart=directory)["patch.yaml"]


@cache
def _validate(text: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(text), version, strict=True)


def validate(found: dict[str, Any]) -> None:
    """Hold an object against the schemas of both versions: no unknown field, no wrong type. Raises ValidationError."""
    for version in VERSIONS:
        _validate(json.dumps(found), version)
