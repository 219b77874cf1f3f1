"""What lies ready in ``deploy/`` for Prometheus and Alertmanager, as tests run it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"
ALERTMANAGER, PROMETHEUS = DEPLOY / "alertmanager.yml", DEPLOY / "prometheus.yml"


def prometheus_config() -> dict[str, Any]:
    return yaml.safe_load(PROMETHEUS.read_text())


def alertmanager_config(directory: Path) -> dict[str, Any]:
    """Its templates are put into the directory from which it will run."""
    shutil.copytree(DEPLOY / "templates", directory / "templates")
    return yaml.safe_load(ALERTMANAGER.read_text())
